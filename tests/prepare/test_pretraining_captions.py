"""Masked captions: what is hidden, what is wrong, where things stand, and that the three losses are learned from."""

import itertools

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from confed.data.seeding import generator
from confed.datasets.scene_captions import WAYS, tell
from confed.datasets.scenes.graph import COLOURS, NOUNS, Object, objects, sample
from confed.models.tokenizer import SPECIAL_TOKENS
from confed.prepare.pretraining.captions import KINDS, CaptionLearner, captioned_scenes, mismatched

THINGS = (Object(0, "dog", "red", "small"), Object(5, "cat", "blue", "large"), Object(9, "box", "red", "large"))


def pairs(caption: str) -> list[tuple[str, str]]:
    words = caption.split()
    return [(a, b) for a, b in itertools.pairwise(words) if a in COLOURS and b in NOUNS]


@pytest.fixture(scope="module")
def made():
    return captioned_scenes(240, 40, 3)


def test_a_mismatched_caption_is_wrong_about_one_thing():
    rng, there = np.random.default_rng(0), {(thing.colour, thing.noun) for thing in THINGS}
    changed = set()
    for number in range(200):
        way = WAYS[number % len(WAYS)]
        told = pairs(mismatched(THINGS, way, rng)) if way != "sizes" else []
        wrong = [pair for pair in told if pair not in there]
        assert len(wrong) == (way != "sizes")
        changed |= {*wrong}
    # Words of other things of the picture, which only a model that binds colours to things can tell, come too.
    assert {("blue", "dog"), ("red", "cat")} <= changed


def test_captions_are_masked_or_matched(made):
    table, learn, held, tokenizer = made
    columns, mask = table.columns, SPECIAL_TOKENS.index("[MASK]")
    hidden = columns["masked"] >= 0
    assert torch.equal(columns["text"] == mask, hidden)
    assert torch.equal(hidden.any(1), columns["type"] == KINDS.index("masked"))
    assert torch.equal(columns["label"] >= 0, ~hidden.any(1))
    assert torch.equal(columns["label"] == 1, columns["type"] == 0)
    assert (columns["masked"][hidden] >= len(SPECIAL_TOKENS)).all()
    words = {tokenizer.vocabulary[i] for i in columns["masked"][hidden].tolist()}
    assert {*COLOURS, "small", "left"} <= words
    assert not words & {"a", "and", "is", "stands"}
    # Nothing is masked where it is measured, and no picture is on both sides.
    assert len(held) == 40
    assert not hidden[held].any()
    assert not {*table.image_index[held].tolist()} & {*table.image_index[learn].tolist()}


def test_aligned_words_stand_where_the_thing_stands(made):
    table, _, _, tokenizer = made
    columns = table.columns
    uniform = np.full(len(COLOURS), 1 / len(COLOURS))
    graphs = sample("public", NOUNS, uniform, generator(3, "graphs", "public", "masked captions"))
    things = [objects(next(graphs), 0) for _ in range(60)]
    text = torch.where(columns["masked"] >= 0, columns["masked"], columns["text"])
    rows, places = (columns["cell"] >= 0).nonzero(as_tuple=True)
    assert len(rows) > 200
    for row, place in zip(rows.tolist(), places.tolist(), strict=True):
        (thing,) = (t for t in things[table.image_index[row]] if t.cell == columns["cell"][row, place])
        assert tokenizer.vocabulary[text[row, place]] in (thing.colour, thing.noun)
        assert columns["label"][row] != 0
    right = (columns["type"] == 0).nonzero()[:, 0].tolist()
    told = " ".join(tokenizer.vocabulary[i] for i in columns["text"][right[0]] if i).split(maxsplit=1)[1]
    there = things[table.image_index[right[0]]]
    assert all(pair in {(t.colour, t.noun) for t in there} for pair in pairs(told))
    assert tell(there[:1], "list").startswith("a")


@torch.no_grad()
def test_losses_by_hand(made):
    table, learn, _, tokenizer = made
    learner = CaptionLearner("vilt_mlm_mini", tokenizer, 0)
    batch = table.batch(learn[:16])
    hidden, mask, _ = learner.body.embed(batch)
    for block in learner.body.vilt.encoder.layer:
        hidden = block(hidden, mask)[0]
    losses = learner._losses(hidden, batch)
    torch.testing.assert_close(learner.pretraining_states(batch).answer_loss, sum(losses.values()))
    asked = batch["label"] >= 0
    by_hand = F.cross_entropy(learner(batch).logits[asked], batch["label"][asked])
    torch.testing.assert_close(losses["matching"], by_hand)
    states, length = learner.body.vilt.layernorm(hidden), batch["text"].shape[1]
    embeddings = learner.body.vilt.embeddings.text_embeddings.word_embeddings.weight
    wrong: dict[str, list[torch.Tensor]] = {"masked words": [], "alignment": []}
    for row in range(16):
        for place in range(length):
            word, token = states[row, place], batch["masked"][row, place]
            if token >= 0:
                scores = embeddings @ learner.words(word) + learner.bias
                wrong["masked words"].append(-scores.log_softmax(0)[token])
            if (cell := batch["cell"][row, place]) >= 0:
                # The picture's tokens are its class token and the 16 cells, row by row.
                scores = learner.patch(states[row, length + 1 :]) @ learner.word(word) / 8
                wrong["alignment"].append(-scores.log_softmax(0)[cell])
    for name, values in wrong.items():
        torch.testing.assert_close(losses[name], torch.stack(values).mean())

import pytest
import torch
from safetensors.torch import load_file

from confed import pretrain as module
from confed.data.examples import encode
from confed.data.scenes import ANSWERS, FAMILIES, WORDS, public_split
from confed.models.pretrained import MINI_WEIGHTS, describe
from confed.models.vilt import mini_tokenizer, vilt_mini
from confed.pretrain import Tagger, accuracy, pretrain, word_targets

SMALL = {"questions": 64, "validation": 16, "epochs": 2, "batch_size": 32, "progress": False}


def test_word_targets_by_hand():
    # Tokens: 10 dog, 11 cat; 20 red, 21 blue; 30 small, 31 large; 0 nothing.
    words = {
        "noun": torch.tensor([0, 10, 11]),
        "colour": torch.tensor([0, 20, 21]),
        "size": torch.tensor([0, 30, 31]),
        "number": torch.arange(40, 46),
    }
    cells = {name: torch.zeros(2, 16, dtype=torch.int64) for name in ("noun", "colour", "size")}
    # Picture 0: a large blue dog in cell 3 (top right) and a small red cat in cell 12 (bottom left).
    # Picture 1: a small red dog in cell 0 and a large red dog in cell 5.
    for picture, cell, noun, colour, size in (
        (0, 3, 1, 2, 2),
        (0, 12, 2, 1, 1),
        (1, 0, 1, 1, 1),
        (1, 5, 1, 1, 2),
    ):
        for name, value in (("noun", noun), ("colour", colour), ("size", size)):
            cells[name][picture, cell] = value
    row, column = torch.arange(16) // 4, torch.arange(16) % 4
    cells["right"] = torch.zeros(2, 16, dtype=torch.int64)
    cells["right"][0, 12] = 2
    cells["quadrant"] = 2 * (row >= 2) + (column >= 2)
    text = torch.tensor([[5, 10, 11, 21], [10, 11, 20, 21]])
    targets = word_targets(text, words, cells)
    assert targets["colour"].tolist() == [[-1, 2, 1, -1], [-1, 0, -1, -1]]
    assert targets["size"].tolist() == [[-1, 2, 1, -1], [-1, 0, -1, -1]]
    assert targets["quadrant"].tolist() == [[-1, 1, 2, -1], [-1, -1, -1, -1]]
    assert targets["right"].tolist() == [[-1, 0, 2, -1], [-1, -1, -1, -1]]
    assert targets["noun"].tolist() == [[-1, -1, -1, 1], [-1, -1, -1, 0]]
    assert targets["number"].tolist() == [[-1, -1, -1, 1], [-1, -1, 2, 0]]


def test_tagger_scores_are_products_with_word_embeddings():
    words = {"colour": torch.tensor([0, 2, 1]), "quadrant": torch.tensor([[1, 2], [0, 1], [2, 2], [0, 0]])}
    tagger = Tagger(4, words, torch.Generator().manual_seed(0))
    embeddings = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    hidden = torch.randn(1, 2, 4, generator=torch.Generator().manual_seed(2))
    mapped = tagger.layers["patch"](hidden)[0]
    colour = (mapped[1] @ embeddings[[0, 2, 1]].T).log_softmax(0)[2]
    corners = torch.stack([embeddings[i] + embeddings[j] for i, j in ((1, 2), (0, 1), (2, 2), (0, 0))])
    quadrant = (mapped[0] @ corners.T).log_softmax(0)[3]
    targets = {"colour": torch.tensor([[-1, 2]]), "quadrant": torch.tensor([[3, -1]])}
    torch.testing.assert_close(tagger.loss("patch", hidden, targets, embeddings), -colour - quadrant)


def test_an_interrupted_run_ends_with_the_same_weights(tmp_path, monkeypatch):
    whole, broken = tmp_path / "whole.safetensors", tmp_path / "broken.safetensors"
    state = torch.get_rng_state()
    result = pretrain(whole, **SMALL)
    assert torch.equal(torch.get_rng_state(), state)
    assert {"overall"} < set(result) <= {*FAMILIES, "overall"}

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "_show", stop)
        with pytest.raises(KeyboardInterrupt):
            pretrain(broken, **(SMALL | {"progress": True}))
    assert describe(broken)["epochs_done"] == 1
    assert pretrain(broken, **SMALL) == result
    first, second = load_file(whole), load_file(broken)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert describe(whole) == describe(broken)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["broken.safetensors", "whole.safetensors"]


def test_packaged_weights_answer_public_questions():
    facts = describe()
    assert facts["accuracy"]["overall"] > 0.85
    assert tuple(facts["answers"]) == ANSWERS
    assert MINI_WEIGHTS.stat().st_size <= 3_000_000
    examples, _ = public_split(600, seed=987)
    tokenizer = mini_tokenizer(WORDS)
    model = vilt_mini(ANSWERS, tokenizer.vocab_size)
    table = encode(examples, tokenizer, ANSWERS, FAMILIES)
    assert accuracy(model, table, FAMILIES)["overall"] > 0.82
    maps = model.attention(table.batch(torch.arange(8)))
    assert maps.shape == (8, 4, 4)


def test_known_words_keep_their_embeddings_and_new_ones_start_fresh():
    tokenizer = mini_tokenizer(["zebra", "dog", "stripes"])
    model = vilt_mini(["yes", "no"], tokenizer.vocab_size, max_length=20, seed=1)
    other = vilt_mini(["yes", "no"], tokenizer.vocab_size, max_length=20, seed=2)
    saved = load_file(MINI_WEIGHTS)
    name = "vilt.embeddings.text_embeddings.word_embeddings.weight"
    known = len(saved[name])
    assert tokenizer.vocab_size == known + 2
    assert torch.equal(model.state_dict()[name][:known], saved[name])
    assert not torch.equal(model.state_dict()[name][known:], other.state_dict()[name][known:])
    assert not torch.equal(model.classifier[0].weight, saved["classifier.0.weight"])
    assert not torch.equal(model.classifier[0].weight, other.classifier[0].weight)
    with pytest.raises(ValueError, match=rf"vocab_size must be at least {known} .* got {known - 1}"):
        vilt_mini(2, known - 1)


def test_the_head_is_reused_only_for_the_same_answers():
    saved = load_file(MINI_WEIGHTS)["classifier.3.weight"]
    size = mini_tokenizer([]).vocab_size
    assert torch.equal(vilt_mini(ANSWERS, size).classifier[3].weight, saved)
    for answers in (ANSWERS[::-1], len(ANSWERS)):
        assert not torch.equal(vilt_mini(answers, size).classifier[3].weight, saved)
    with pytest.raises(ValueError, match="expected a weights file at"):
        vilt_mini(ANSWERS, size, pretrained="nowhere.safetensors")

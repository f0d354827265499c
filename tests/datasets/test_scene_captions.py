"""The built-in captions, batches mixed of texts, pictures and documents, and tokens of what is written."""

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from command_line import confed
from confed.data.caption_batches import MixedData, groups
from confed.data.examples import Examples, FederatedDataset, Turn
from confed.datasets.scene_captions import READER, WAYS, scene_captions, tell, tell_words
from confed.datasets.scenes.graph import Object
from confed.models.caption_tokenizer import END, START, Pieces, WrittenWords, train_pieces
from confed.runs.encode import load_run_data
from refusals import refuses

SMALL: Mapping[str, Any] = {
    "train": 12, "validation": 3, "test": 4, "texts": 9, "documents": 4, "references": 3,
    "unseen": ("home", "commercial", "natural", "sports"),
}  # fmt: skip


@pytest.fixture(scope="module")
def scenes() -> FederatedDataset:
    return scene_captions(**SMALL)


# The built-in captions ------------------------------------------------------------------------------------------------


def test_captions_say_what_stands_where():
    things = [Object(2, "dog", "orange", "small"), Object(9, "car", "red", "large"), Object(15, "cup", "blue", "small")]
    assert [tell(things, way) for way in WAYS] == [
        "a red car and an orange dog and a blue cup",
        "there is a red car next to an orange dog",
        "a large red car with a small orange dog",
        "a red car stands at the bottom left",
        "three things and a red car is one of them",
    ]
    refuses("list, there", tell, things, "loudly")


def test_every_word_of_every_caption_is_known(scenes: FederatedDataset):
    assert scenes.words == tell_words()
    for split in scenes.clients.values():
        for part in (split.train, split.validation, split.test):
            texts = [*part.questions, *(c for own in part.captions or () for c in own)]
            texts += [turn.text for own in part.before or () for turn in own]
            assert {word for text in texts for word in text.split()} <= {*scenes.words}
    assert {word for text in scenes.public for word in text.split()} <= {*scenes.words}


def test_clients_have_what_was_asked_and_seeds_change_training(scenes: FederatedDataset):
    assert scenes.modalities == {"transport": ("image", "text"), "educational": ("image", "text"), READER: ("text",)}
    train = scenes.clients["transport"].train
    assert Counter(re.sub(r"\d", "n", kind) for kind in train.types) == {"n things": 24, "text": 9, "document": 4}
    assert len(scenes.clients[READER].train) == 18
    assert all(len(own) == 2 for own in (train.before or ())[-4:])
    other = scene_captions(**SMALL, seed=1)
    same, changed = other.clients["transport"], other.clients["transport"].train
    assert same.test.captions == scenes.clients["transport"].test.captions
    assert changed.questions != train.questions
    again = scene_captions(**SMALL)
    assert list(again.clients["transport"].train.questions) == list(train.questions)
    rows = np.arange(len(train.images))
    assert np.array_equal(again.clients["transport"].train.images[rows], train.images[rows])


@pytest.mark.parametrize(
    ("options", "message"),
    [({"train": 2}, "at least 3"), ({"conflict": 2.0}, "conflict"), ({"unseen": ("moon",)}, "distinct names"),
     ({"texts": 0}, "reader false"), ({"shots": -1}, "shots"), ({"unseen": "home"}, "distinct names out of transport")],
)  # fmt: skip
def test_the_built_in_captions_refuse_what_is_out_of_range(options: dict[str, Any], message: str):
    refuses(message, scene_captions, **{**SMALL, **options})


# Mixtures and documents as tensors ------------------------------------------------------------------------------------


def run_data(**options: Any) -> Any:
    data = {"name": "scene_captions", **SMALL, **options}
    model = json.dumps({"name": "caption_transformer_tiny", "max_length": 16})
    return load_run_data(json.dumps(data), model, 0)


def test_batches_have_the_sources_in_their_proportions():
    data = run_data(train=40, texts=30, documents=5).clients["transport"]
    assert isinstance(data, MixedData)

    def epoch(seed: int, size: int = 32) -> list[dict[str, Any]]:
        return list(data.train(size, torch.Generator().manual_seed(seed)))

    batches = epoch(0)
    assert sum(len(batch["index"]) for batch in batches) == len(data) == 115
    assert len(batches) == data.steps(32) == 4
    assert [len(part["text"]) for part in groups(batches[0])] == [14, 14, 4]
    # Whatever the size, after n rows each source has had its share to within one.
    seen = np.zeros(3)
    for batch in epoch(3, 5):
        seen += [len(batch.get(f"{prefix}text", ())) for prefix in ("texts.", "", "documents.")]
        assert np.abs(seen - seen.sum() * np.array([14, 14, 4]) / 32).max() <= 1.0
    once, again, other = epoch(1), epoch(1), epoch(2)
    assert all(torch.equal(a["index"], b["index"]) for a, b in zip(once, again, strict=True))
    assert any(not torch.equal(a["index"], b["index"]) for a, b in zip(once, other, strict=True))
    # Five documents come again and again, each as often as the others.
    types = [row for batch in once for row in batch["index"].tolist()[-len(batch["documents.text"]) :]]
    assert max(Counter(types).values()) - min(Counter(types).values()) <= 1


def test_clients_without_a_source_leave_its_share_to_the_others():
    clients = run_data().clients
    rng = torch.Generator().manual_seed(0)
    batch = next(iter(clients[READER].train(8, rng)))
    assert set(batch) == {"text", "text_mask", "label", "type", "index"}
    batch = next(iter(run_data(documents=0).clients["transport"].train(8, rng)))
    assert [len(part["text"]) for part in groups(batch)] == [4, 4]


def test_documents_are_pictures_and_texts_in_turns():
    made = run_data(shots=2)
    data = made.clients["transport"]
    examples = made.dataset.clients["transport"].train
    row = next(i for i, own in enumerate(examples.before or ()) if own)
    batch = data.tables[0].batch(torch.tensor([row]))
    told = (examples.before or ())[row]
    for k, turn in enumerate(told):
        assert torch.equal(
            batch["before_image"][0, k], torch.from_numpy(examples.images[turn.picture]).permute(2, 0, 1)
        )
        assert made.tokenizer.decode(batch["before_text"][:, k]) == [turn.text]
    assert made.tokenizer.decode(batch["text"]) == [examples.questions[row]]
    # Few-shot: two described pictures stand before each test picture, which has no text of its own.
    asked = next(iter(data.test(4)))
    assert "text" not in asked
    assert asked["before_image"].shape == (4, 2, 3, 64, 64)
    assert examples.present is not None
    shown = examples.present["image"]
    plain = next(i for i, own in enumerate(examples.before or ()) if not own and shown[i])
    refuses("all be documents", data.tables[0].batch, torch.tensor([plain, row]))


def test_a_source_with_several_sets_is_a_part_for_each_of_them():
    made = run_data(train=60, documents=40, missing={"image": 0.5})
    data = made.clients["transport"]
    part_of: list[int] = [0, 0]
    for batch in data.train(32, torch.Generator().manual_seed(0)):
        parts = groups(batch)
        beginnings = [key.removesuffix("text") for key in batch if key.endswith(".text") or key == "text"]
        assert len(parts) == len(beginnings)
        # Rows stand part by part: each part's texts are those of its rows.
        assert sum(len(part["text"]) for part in parts) == len(batch["index"])
        told = torch.cat([part["text"] for part in parts])
        assert torch.equal(told, data.tables[0].columns["text"][batch["index"]])
        sizes = dict(zip(beginnings, map(len, (part["text"] for part in parts)), strict=True))
        documents = [size for name, size in sizes.items() if name.startswith("documents.")]
        if len(batch["index"]) == 32:
            assert (sizes["texts."], sizes[""], sum(documents)) == (14, 14, 4)
        for own in parts:
            if "before_text" in own:
                part_of["image" in own] += len(own["text"])
    assert min(part_of) > 0


@pytest.mark.parametrize(
    ("mixture", "message"),
    [((1.0, 2.0), "three shares"), ((-1.0, 1.0, 1.0), "three shares"), ((0.0, 0.0, 1.0), "no share")],
)
def test_mixtures_that_give_nothing_are_refused(mixture: tuple[float, ...], message: str):
    table = run_data(documents=0).clients["transport"].tables[0]
    refuses(message, MixedData, table, table, table, mixture)


def test_examples_refuse_empty_captions_and_turns_of_nothing():
    def made(**more: Any) -> Examples:
        pictures = np.zeros((2, 4, 4, 3), np.uint8)
        return Examples(pictures, np.array([0]), ["a"], ["caption"], ["t"], ["one"], **more)

    for more in ({"captions": [[]]}, {"captions": [["  "]]}):
        refuses("'one' needs captions", made, **more)
    for turn in (Turn(2, "a"), Turn(-1, " "), Turn(-2, "a")):
        refuses("before example 'one'", made, before=[[turn]])


# Tokens ---------------------------------------------------------------------------------------------------------------


def test_words_go_there_and_back_and_long_texts_are_refused():
    tokenizer = WrittenWords(["dog", "a", "runs"], 6)
    ids, mask = tokenizer(["A dog runs.", "a dogs", "a zebra"])
    assert ids[0].tolist() == [START, 8, 7, 9, END, 0]
    assert mask[0].tolist() == [1, 1, 1, 1, 1, 0]
    assert tokenizer.decode(ids) == ["a dog runs", "a dogs", "a"]
    refuses(r"at most 6 tokens.*'a dog runs a dog'", tokenizer, ["a dog", "a dog runs a dog"])
    refuses("at least 3", WrittenWords, ["dog"], 2)


def test_pieces_are_learned_from_public_texts(scenes: FederatedDataset, tmp_path: Path):
    file = tmp_path / "pieces.model"
    assert train_pieces(scenes.public, file, 90) == 90
    other = tmp_path / "again.model"
    train_pieces(scenes.public, other, 90)
    assert file.read_bytes() == other.read_bytes()
    pieces = Pieces(file, 40)
    texts = ["a red car", "there is a blue dog next to a small cat"]
    ids, mask = pieces(texts)
    assert ids.shape == mask.shape == (2, 40)
    assert ids[:, 0].tolist() == [START] * 2
    assert int(ids.max()) < pieces.vocab_size == 95
    assert pieces.decode(ids) == texts
    pieces.save(tmp_path / "saved")
    assert torch.equal(Pieces(tmp_path / "saved" / "pieces.model", 40)(texts)[0], ids)
    with pytest.raises(ValueError, match="at most 5 tokens"):
        Pieces(file, 5)(texts)
    (tmp_path / "no.model").write_text("nothing")
    refuses("SentencePiece model file", Pieces, tmp_path / "no.model")
    refuses("found none", Pieces, tmp_path / "gone.model")
    refuses("5000 pieces", train_pieces, scenes.public, tmp_path / "many.model", 5000)
    refuses("got none", train_pieces, [], tmp_path / "none.model", 90)
    made = materials_with(file)
    assert made.tokenizer.vocab_size == 95


def materials_with(pieces: Path) -> Any:
    model = {"name": "caption_transformer_tiny", "max_length": 40, "pieces": str(pieces)}
    return load_run_data(json.dumps({"name": "scene_captions", **SMALL}), json.dumps(model), 0)


def test_the_command_learns_pieces_of_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    options = [f"data.{key}=4" for key in ("train", "test", "validation", "texts", "documents")]
    options += ["--size", "80", "--json"]
    assert confed("data", "prepare", "pieces", "captions_scenes", tmp_path / "p.model", *options) == 0
    assert json.loads(capsys.readouterr().out)["pieces"] == 80
    assert confed("data", "prepare", "pieces", "modalities", tmp_path / "q.model") == 2
    assert "public texts, got none" in " ".join(capsys.readouterr().err.split())

"""Region features: tables and batches, the built-in encoder, random clients, and runs of models that read regions."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from confed.data.encode import encode
from confed.data.examples import Examples, FederatedDataset, Split
from confed.data.picture_tables import NoPictures
from confed.data.regions import HeldRegions, grid_boxes, join
from confed.data.table import Table, concatenate_tables
from confed.data.targets import SoftTargets
from confed.datasets.scenes import FAMILIES, public_split, scenes
from confed.inference.ask import ask
from confed.inference.export import export
from confed.inference.load import load_exported
from confed.metrics.vqa import soft_targets
from confed.models.albef import albef_mini, mini_answer_tokenizer
from confed.models.grid_features import ENCODER, grid_features, regions_of
from confed.models.tokenizer import WordTokenizer
from confed.recipes.recipe import load_recipe
from confed.registry import datasets
from confed.runs.encode import load_run_data
from confed.runs.run import run
from refusals import refuses

RNG = np.random.default_rng(0)


def some_regions(pictures: int, regions: int = 3, width: int = 5, encoder: str = "") -> HeldRegions:
    corners = np.sort(RNG.random((pictures, regions, 2, 2)), axis=2)
    boxes = np.concatenate([corners[:, :, 0], corners[:, :, 1]], axis=2).astype(np.float32)
    return HeldRegions(RNG.normal(size=(pictures, regions, width)).astype(np.float32), boxes, encoder)


def some_examples(regions: HeldRegions | None, pictures: bool = True) -> Examples:
    images = np.zeros((4, 2, 2, 3), np.uint8) if pictures else NoPictures(4)
    return Examples(
        images, np.array([2, 0, 3]), ["red ?", "is it ?", "what ?"], ["yes", "no", "yes"], ["a", "a", "b"],
        ["x/0", "x/1", "x/2"], regions=regions,
    )  # fmt: skip


# Tables


def test_a_batch_has_the_regions_of_its_pictures_and_no_pictures():
    regions = some_regions(4)
    examples = some_examples(regions)
    table = encode(examples, WordTokenizer(["red"]), ["yes", "no"], ["a", "b"], regions=examples.regions)
    batch = table.batch(torch.tensor([2, 0]))
    assert "image" not in batch
    assert batch["regions"].dtype is batch["boxes"].dtype is torch.float32
    for row, picture in enumerate((3, 2)):
        np.testing.assert_array_equal(batch["regions"][row].numpy(), regions.features[picture])
        np.testing.assert_array_equal(batch["boxes"][row].numpy(), regions.boxes[picture])
    assert "regions" in table.take(1).batch(torch.tensor([0]))
    batch["regions"].zero_()
    assert regions.features[3].any(), "a batch is a copy"


def test_taken_examples_keep_their_regions():
    regions = some_regions(4)
    assert some_examples(regions).take([1]).regions is regions


def test_features_without_pictures_serve_models_of_regions():
    examples = some_examples(some_regions(4), pictures=False)
    assert len(examples.take([0, 2])) == 2
    encode(examples, WordTokenizer(["red"]), ["yes", "no"], ["a", "b"], regions=examples.regions)
    with pytest.raises(ValueError, match="features of its pictures and not the pictures: choose a model that reads"):
        encode(examples, WordTokenizer(["red"]), ["yes", "no"], ["a", "b"])
    with pytest.raises(ValueError, match="features of its pictures and not the pictures"):
        examples.images[0]


def test_tables_are_put_together_with_their_regions():
    parts = [some_regions(4, 3), some_regions(4, 2)]
    tables = [
        encode(some_examples(r), WordTokenizer(["red"]), ["yes", "no"], ["a", "b"], regions=r)
        for r in (parts[0], parts[1], parts[0])
    ]
    together = concatenate_tables(tables)
    assert len(together) == 9
    assert together.regions is not None
    assert together.regions.shape == (8, 3, 5)  # the shared one once
    batch = together.batch(torch.tensor([0, 3, 6]))
    np.testing.assert_array_equal(batch["regions"][0].numpy(), parts[0].features[2])
    np.testing.assert_array_equal(batch["regions"][1, :2].numpy(), parts[1].features[2])
    assert not batch["regions"][1, 2].any()
    np.testing.assert_array_equal(batch["regions"][2].numpy(), parts[0].features[2])
    same = concatenate_tables([tables[0], tables[2]])
    assert same.regions is parts[0]
    refuses("width and encoder of regions must agree", join, [parts[0], some_regions(1, 3, 6)])
    with pytest.raises(ValueError, match="in memory only"):
        concatenate_tables(
            [tables[0], Table(torch.zeros(1, 3, 2, 2), torch.zeros(1, dtype=torch.int64), tables[0].columns)]
        )


def test_faulty_features_and_boxes_are_refused():
    good = some_regions(4)
    for features, boxes, message in (
        (good.features[0], good.boxes, r"shape \(M, R, W\)"),
        (good.features, good.boxes[:, :2], r"boxes of regions must be of shape \(4, 3, 4\)"),
        (good.features * np.nan, good.boxes, "finite"),
        (good.features, good.boxes + 1, r"boxes must lie in \[0, 1\]"),
    ):
        refuses(message, HeldRegions, features, boxes)
    refuses(r"regions must have one entry per picture \(4\), got 3", some_examples, some_regions(3))


def test_cells_are_numbered_row_by_row():
    boxes = grid_boxes(2, 4)
    assert boxes[1].tolist() == [0.25, 0, 0.5, 0.5]
    assert boxes[4].tolist() == [0, 0.5, 0.25, 1]
    assert (boxes[:, 2:] - boxes[:, :2]).prod(1).sum() == pytest.approx(1)


def test_soft_scores_of_a_few_answers_each():
    answers = ["yes", "no", "2", "red"]
    given = [["yes"] * 7 + ["no"] * 3, ["red"] * 4 + ["blue"] * 6, ["green"] * 10, ["2", "red", "no", *["yes"] * 7], ()]
    counts = torch.tensor([[one.count(answer) for answer in answers] for one in given])
    dense = torch.nn.functional.pad(soft_targets(counts), (0, 2))
    sparse = SoftTargets.of(given, answers, 6)
    rows = torch.tensor([3, 0, 2, 1, 4, 0])
    assert torch.equal(sparse[rows], dense[rows])
    assert torch.equal(sparse.take(2)[torch.tensor([1])], dense[1:2])
    assert sparse.labels[1].tolist() == [3] * 4 + [6] * 6
    both = SoftTargets.join([sparse.take(1), SoftTargets.of([["2"] * 12], answers, 6), SoftTargets.of([], answers, 6)])
    assert torch.equal(both[torch.tensor([0])], dense[:1])
    assert both.labels.shape == (2, 12)
    refuses("widths of soft scores must agree", SoftTargets.join, [sparse, SoftTargets.of(given, answers, 4)])


def test_tables_with_annotators_give_scores_and_can_be_joined():
    examples = Examples(
        np.zeros((1, 2, 2, 3), np.uint8), np.zeros(2, np.int64), ["a ?", "b ?"], ["yes", "no"], ["t", "t"], ["0", "1"],
        [["yes"] * 10, ["no"] * 2 + ["yes"] * 7 + ["perhaps"]],
    )  # fmt: skip
    table = encode(examples, WordTokenizer(["red"]), ["yes", "no"], ["t"], width=3)
    batch = concatenate_tables([table.take(1), table]).batch(torch.tensor([2, 0]))
    torch.testing.assert_close(batch["target"], torch.tensor([[1.0, 0.6, 0], [1, 0, 0]]))
    assert batch["annotated"].tolist() == [[1] * 2 + [0] * 7 + [3], [0] * 10]
    assert "target" not in table.columns, "a table of all scores would not fit for large vocabularies"
    plain = encode(Examples(*[getattr(examples, k) for k in ("images", "image_index", "questions", "answers", "types",
                   "names")]), WordTokenizer(["red"]), ["yes", "no"], ["t"])  # fmt: skip
    assert "target" not in plain.batch(torch.tensor([0]))
    refuses("annotators' answers of all, or of none", concatenate_tables, [plain, table])


# The built-in encoder


def test_grid_features_are_the_packaged_encoders_last_states():
    pictures = public_split(8, seed=3)[0].images[:2]
    found = grid_features(pictures)
    assert found.shape == (2, 16, 64)
    assert found.encoder == ENCODER
    model = albef_mini(1, mini_answer_tokenizer(()).vocab_size).eval()
    with torch.no_grad():  # the library's own pass
        pixels = torch.from_numpy(pictures[:].transpose(0, 3, 1, 2)).float() / 127.5 - 1
        states = model.visual_encoder(pixel_values=pixels).last_hidden_state[:, 1:]
    np.testing.assert_allclose(found.features, states.numpy(), atol=2e-5)
    np.testing.assert_array_equal(found.boxes[1], grid_boxes(4, 4))
    np.testing.assert_allclose(regions_of(pictures[1], ENCODER).features[0], found.features[1], atol=2e-5)


def test_regions_tell_what_stands_in_their_cell():
    # A linear map fitted to 300 pictures names the colour of the thing in a cell of other pictures.
    examples, tags = public_split(1600, seed=4)
    features = grid_features(examples.images).features
    filled = tags.colour > 0
    x = np.concatenate([features, np.ones((*features.shape[:2], 1))], axis=2)
    train = np.zeros_like(filled)
    train[:300] = True
    wanted = np.eye(int(tags.colour.max()) + 1)[tags.colour[filled & train]]
    fitted, *_ = np.linalg.lstsq(x[filled & train], wanted, rcond=None)
    right = (x[filled & ~train] @ fitted).argmax(1) == tags.colour[filled & ~train]
    assert right.mean() > 0.9


def test_pictures_that_the_encoder_cannot_read():
    with pytest.raises(ValueError, match=r"64 x 64 pixels, got 32 x 32: set data\.image_size = 64"):
        grid_features(np.zeros((1, 32, 32, 3), np.uint8))
    refuses("the dataset has none", grid_features, NoPictures(3))
    refuses("made elsewhere; a picture cannot", regions_of, np.zeros((64, 64, 3), np.uint8), "")


# Random clients


def test_questions_are_dealt_and_no_picture_has_two_clients():
    options = {"preset": "random", "clients": 3, "train": 30, "validation": 8, "test": 9}
    data = scenes(**options)
    assert list(data.clients) == ["client-01", "client-02", "client-03"]
    assert data.unseen == {}
    seen: set[bytes] = set()
    count = 0
    for split in data.clients.values():
        assert [len(part) for part in (split.train, split.validation, split.test)] == [30, 8, 9]
        for part in (split.train, split.validation, split.test):
            assert isinstance(part.images, np.ndarray)
            seen |= {picture.tobytes() for picture in part.images}
            count += len(part.images)
            assert set(part.types) <= set(FAMILIES)
            assert np.array_equal(np.unique(part.image_index), np.arange(len(part.images)))
    assert len(seen) == count
    assert "whit" not in " ".join(q for s in data.clients.values() for q in s.train.questions).split()
    again, other = scenes(**options), scenes(**options, seed=1)
    first, second, third = (d.clients["client-02"] for d in (data, again, other))
    assert first.train.questions == second.train.questions
    assert first.train.questions != third.train.questions
    assert first.test.questions == third.test.questions


def test_types_of_the_answers():
    data = scenes(preset="random", clients=1, train=200, validation=10, test=10, types="answers")
    examples = data.clients["client-01"].train
    for answer, kind in zip(examples.answers, examples.types, strict=True):
        assert kind == ("yes/no" if answer in ("yes", "no") else "number" if answer in "012345" else "other")
    assert len(Counter(examples.types)) == 3
    refuses("types must be one of families, answers, got 'words'", scenes, preset="random", types="words")
    refuses("words as answers, got 'task'", scenes, preset="task", types="answers")


def test_tables_over_the_same_pictures_may_have_other_regions(monkeypatch: pytest.MonkeyPatch):
    """Regions belong to the examples: those of one role are not those of another for sharing a picture table."""
    images, parts = np.zeros((4, 2, 2, 3), np.uint8), [some_regions(4), some_regions(4)]
    roles = [replace(some_examples(regions), images=images) for regions in parts]
    data = FederatedDataset("two", ("yes", "no"), {"one": Split(roles[0], roles[0], roles[1])}, {}, ("red",))
    datasets.names()  # loads them
    monkeypatch.setitem(datasets._entries, "two", lambda: data)  # pyright: ignore[reportPrivateUsage]
    tables = load_run_data(json.dumps({"name": "two"}), json.dumps({"name": "mcan_s_mini"}), 0).clients["one"].tables
    assert [table.regions for table in tables] == [parts[0], parts[0], parts[1]]
    other = replace(roles[1], regions=some_regions(4, encoder="other"))
    mixed = FederatedDataset("two", ("yes", "no"), {"one": Split(roles[0], roles[0], other)}, {}, ("red",))
    monkeypatch.setitem(datasets._entries, "two", lambda seed: mixed)  # pyright: ignore[reportPrivateUsage]
    refuses("made by one encoder", load_run_data, json.dumps({"name": "two"}), json.dumps({"name": "mcan_s_mini"}), 3)


# Runs

TINY = [
    "study.methods=[]", "algorithm.name=fedavg", "model.name=mcan_s_mini", "data.preset=random", "data.clients=2",
    "data.train=24", "data.validation=8", "data.test=8", "run.rounds=1", "run.workers=1", "run.gallery=1",
    "run.evaluate_every=0", "local.lr=0.01", "local.epochs=1",
]  # fmt: skip


def test_models_of_one_study_share_the_data_and_their_regions():
    data = json.dumps({"name": "scenes", "preset": "random", "clients": 2, "train": 12, "validation": 4, "test": 4})
    one, other = (load_run_data(data, json.dumps({"name": name}), 0) for name in ("mcan_s_mini", "butd_mini"))
    assert one.region_width == 64
    assert one.encoder == ENCODER
    assert one.dataset is other.dataset
    assert one.clients["client-01"].tables[0].regions is other.clients["client-01"].tables[0].regions
    assert load_run_data(data, json.dumps({"name": "vilt_tiny"}), 0).region_width == 0


def test_datasets_that_models_of_regions_cannot_read():
    model = json.dumps({"name": "mcan_s_mini"})
    tasks = {"name": "scenes", "preset": "task", "train": 40, "validation": 10, "test": 10}
    refuses("questions about two pictures", load_run_data, json.dumps(tasks), model, 0)


def test_a_run_is_asked_and_exported(tmp_path: Path):
    folder = tmp_path / "run"
    run(load_recipe(overrides=TINY), folder)
    data = scenes(preset="random", clients=2, train=24, validation=8, test=8)
    examples = data.clients["client-01"].test
    recorded = load_file(folder / "predictions.safetensors")["global/client-01/prediction"]
    picture = tmp_path / "picture.png"
    Image.fromarray(examples.images[int(examples.image_index[0])]).save(picture)
    found = ask(folder, picture, examples.questions[0])
    assert found["answers"][0]["answer"] == data.answers[int(recorded[0])]
    export(folder, tmp_path / "out")
    loaded = load_exported(tmp_path / "out").ask(picture, examples.questions[0])
    assert loaded["answers"][0]["answer"] == found["answers"][0]["answer"]
    assert loaded["answers"][0]["probability"] == pytest.approx(found["answers"][0]["probability"], abs=1e-5)
    assert f"made by: {ENCODER}" in (tmp_path / "out" / "global" / "README.md").read_text()

"""What is wrong with multi-label input is named, counted or harmless: labels, users, pictures, lists and embeddings."""

import io
import json
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from command_line import confed
from confed.api.progress import Display
from confed.data.partitions import label_skew
from confed.data.preparation import step
from confed.datasets.flair import FLAIR_LABELS, flair, flair_hdf5_records, flair_relationship
from confed.datasets.object_labels import coco, voc
from confed.datasets.tagged_texts import tagged_texts
from confed.models.label_embeddings import LabelEmbeddings, save_label_embeddings
from confed.prepare.label_embeddings import write_label_embeddings
from confed.recipes.recipe import load_recipe
from confed.results.folder import read_jsonl
from confed.runs.run import load_data, run
from reader_folders import coco_split, flair_folder, voc_year

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # typer's, about a newer click

USERS: dict[str, tuple[str, list[list[str]]]] = {
    "a": ("train", [["food", "plant"], ["food"], ["art"], []]),
    "b": ("train", [[], [], []]),  # nothing on any picture
    "c": ("train", [["plant"], ["music", "art"]]),
    "v": ("val", [["food"], ["art"]]),
    "t": ("test", [["food", "art"], ["plant"], []]),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """FLAIR with five users."""
    users: dict[str, Any] = {}
    for user, (split, pictures) in USERS.items():
        users[user] = split, [(labels, []) for labels in pictures]
    return flair_folder(tmp_path / "flair", users)


def _embeddings(file: Path, names: tuple[str, ...], width: int = 64) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(1)
    vectors = torch.randn(len(names), width, generator=rng)
    save_label_embeddings(LabelEmbeddings(names, vectors, torch.ones(width), -torch.ones(width)), file)
    return dict(zip(names, vectors, strict=True))


SMALL = (
    "model.name=ctran_mini", "model.pretrained=false", "data.image_size=64", "run.rounds=1", "run.cohort=3",
    "run.threads=1", "run.device=cpu", "local.precision=fp32", "local.epochs=1",
)  # fmt: skip


def test_the_published_recipe_runs_with_users_who_have_no_label(folder: Path, tmp_path: Path) -> None:
    _embeddings(tmp_path / "e.safetensors", FLAIR_LABELS[::-1])  # in another order: names are compared
    given = (*SMALL, f"data.root={folder}", f"model.embeddings={tmp_path / 'e.safetensors'}")
    recipe = load_recipe("fedlgt_flair", given)
    summary = run(recipe.method("fedlgt"), tmp_path / "run")
    numbers = [value for value in _numbers(summary) if not math.isnan(value)]
    assert numbers
    assert all(map(math.isfinite, numbers))
    assert "nan" not in json.dumps(summary).lower()


def _numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for inner in value.values() for number in _numbers(inner)]
    if isinstance(value, list | tuple):
        return [number for inner in value for number in _numbers(inner)]
    return [float(value)] if isinstance(value, int | float) else []


def test_embeddings_of_other_labels_or_of_another_width_are_refused_by_a_run(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "e.safetensors"
    given = (*SMALL, f"data.root={folder}", f"model.embeddings={file}")
    _embeddings(file, (*FLAIR_LABELS[:-1], "religions"))
    with pytest.raises(ValueError, match=r"have no row for 'structure'"):
        run(load_recipe("fedlgt_flair", given).method("fedlgt"), tmp_path / "one")
    _embeddings(file, FLAIR_LABELS, 512)
    with pytest.raises(ValueError, match="must have the model's 64 features, got 512"):
        run(load_recipe("fedlgt_flair", given).method("fedlgt"), tmp_path / "two")


@pytest.mark.filterwarnings("ignore:1 of . pictures")
def test_damaged_pictures_of_a_large_data_set_are_left_out_before_the_first_round(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("confed.datasets.reader.HELD", 0)  # as if they did not fit into memory
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    _embeddings(tmp_path / "e.safetensors", FLAIR_LABELS)
    for name in ("a1", "t1"):
        file = folder / "small_images" / f"{name}.jpg"
        file.write_bytes(file.read_bytes()[:-100])
    given = (*SMALL, f"data.root={folder}", f"model.embeddings={tmp_path / 'e.safetensors'}")
    with pytest.raises(ValueError, match=r"1 of 9 pictures in .* more than the share of 0\.01 .*a1\.jpg"):
        load_data(load_recipe("fedlgt_flair", given).method("fedlgt"))
    summary = run(load_recipe("fedlgt_flair", (*given, "data.unreadable=0.4")).method("fedlgt"), tmp_path / "run")
    assert summary["facts"]["unreadable"] == "1 pictures left out: 'a1.jpg'"
    assert summary["facts"]["test: unreadable"] == "1 pictures left out: 't1.jpg'"
    (line,) = (row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "errors" in row)
    assert not line["errors"]  # every user takes part
    trusting = load_recipe("fedlgt_flair", (*given, "data.check=present")).method("fedlgt")
    with pytest.raises(RuntimeError, match=r't1\.jpg.*; data\.check = "decoded" would leave it out'):
        run(trusting, tmp_path / "trusting")


@pytest.mark.filterwarnings("default")
def test_the_command_line_says_once_how_many_pictures_are_left_out(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("confed.datasets.reader.HELD", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (folder / "small_images" / "a1.jpg").write_bytes(b"no picture")
    steps = [f"checking the pictures in small_images: {n}" for n in (9, 2, 3)]
    for expected in (steps, []):  # the second time the verdict is known
        assert confed("data", "describe", "flair", f"root={folder}", "unreadable=0.2", "--json") == 0
        out, err = capfd.readouterr()
        assert json.loads(out)["facts"]["unreadable"] == "1 pictures left out: 'a1.jpg'"
        (warning,) = (line for line in err.splitlines() if line not in expected)
        assert warning.startswith(
            f"warning: 1 of 9 pictures in {folder / 'small_images'} cannot be read and are left out"
        )
        assert [line for line in err.splitlines() if line != warning] == expected


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("kind", ["run", "grid"])
def test_displays_show_the_first_look_at_pictures(tmp_path: Path, kind: str, terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    display = Display(console, rounds=kind == "run")
    with display, step("checking the pictures in [there]", 40) as done:
        done(30)
        display._bars.refresh()
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert ("30/40" in text) == terminal
    assert ("checking the pictures in [there]: 40\n" in text) != terminal
    with step("nobody is told", 1) as done:
        done(1)
    assert console.file.getvalue() == text  # type: ignore[attr-defined]


def test_flair_says_which_level_and_which_share(folder: Path) -> None:
    with pytest.raises(ValueError, match="level must be one of coarse, fine, got 'finest'"):
        flair(folder, level="finest")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_train must be at least 1, got 0"):
        flair(folder, max_train=0)
    with pytest.raises(ValueError, match="seed must not be negative, got -1"):
        flair(folder, seed=-1)


def test_an_arrow_alone_divides_where_there_is_one(tmp_path: Path) -> None:
    file = tmp_path / "label_relationship.txt"
    file.write_text("salt, pepper -> food\npiano (grand) -> music\n(oak, plant)\n")
    assert flair_relationship(file) == {"salt, pepper": "food", "piano (grand)": "music", "oak": "plant"}
    for line in ("a -> b -> food", " -> food", "a ->"):
        file.write_text(line)
        with pytest.raises(ValueError, match="row 1: expected 'fine label -> coarse label'"):
            flair_relationship(file)


@pytest.mark.parametrize(("row", "column"), [(-1, 0), (0, -1), (2, 0), (0, 2)])
def test_pairs_outside_the_pictures_or_the_labels_are_refused(tmp_path: Path, row: int, column: int) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "f.hdf5", "w") as file:
        for key in ("label_mapping", "fine_grained_label_mapping"):
            file[f"metadata/{key}"] = json.dumps({"art": 0, "food": 1})
        file["train/a/images"], file["train/a/image_ids"] = np.zeros((2, 4, 4, 3), np.uint8), np.array(["1", "2"], "S")
        for level in ("labels", "fine_grained_labels"):
            file[f"train/a/{level}_row"], file[f"train/a/{level}_col"] = np.array([0]), np.array([1])
    assert [record.labels for record in flair_hdf5_records(tmp_path / "f.hdf5")] == [("food",), ()]
    with h5py.File(tmp_path / "f.hdf5", "r+") as file:
        file["train/a/labels_row"][0], file["train/a/labels_col"][0] = row, column
    with pytest.raises(ValueError, match="expected labels of 2 pictures and 2 labels, got others"):
        list(flair_hdf5_records(tmp_path / "f.hdf5"))


def test_coco_never_tests_on_what_trains(tmp_path: Path) -> None:
    coco_split(tmp_path, "train2017", {key: ["dog"] for key in range(1, 7)})
    coco_split(tmp_path, "val2014", {key: ["dog"] for key in (6, 7, 8)})  # 2017 dealt the pictures of 2014 anew
    message = r"got 1 in both, 'coco-6' is one"
    with pytest.raises(ValueError, match=message):
        coco(tmp_path, train="train2017", test="val2014", clients=2, image_size=4)
    with pytest.raises(ValueError, match="got 3 in both"):
        coco(tmp_path, train="val2014", test="val2014", clients=2, image_size=4)


@pytest.mark.filterwarnings("ignore:1 of . pictures")
def test_coco_and_voc_leave_damaged_pictures_out_that_are_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("confed.datasets.reader.HELD", 0)
    coco_split(tmp_path, "train2014", {key: ["dog"] for key in range(1, 7)})
    file = tmp_path / "train2014" / f"{4:012d}.png"
    file.write_bytes(file.read_bytes()[:50])
    dataset = coco(tmp_path, test="", clients=1, unreadable=0.2, image_size=4)
    assert dataset.facts["unreadable"] == f"1 pictures left out: {file.name!r}"
    year = tmp_path / "VOC2007"
    voc_year(tmp_path, "VOC2007", "trainval", {key: [("dog", 0)] for key in "123"})
    (year / "JPEGImages" / "2.png").write_bytes(b"no picture")
    dataset = voc(tmp_path, test=(), clients=1, unreadable=0.4, image_size=4)
    assert dataset.facts["unreadable"] == "1 pictures left out: 'VOC2007/JPEGImages/2.png'"


def test_coco_and_voc_list_labels_outside_theirs(tmp_path: Path) -> None:
    coco_split(tmp_path, "train2014", {key: ["unicorn"] for key in (1, 2)})
    with pytest.raises(ValueError, match=r"1 labels are outside the 80 that are known: 'unicorn' \(2 times, first in"):
        coco(tmp_path, test="", clients=1, image_size=4)
    year = tmp_path / "VOC2007"
    voc_year(tmp_path, "VOC2007", "trainval", {"1": [("hydra", 0)]})
    with pytest.raises(ValueError, match=r"1 labels are outside the 20 that are known: 'hydra' \(1 times, first in"):
        voc(tmp_path, test=[], clients=1, image_size=4)
    voc_year(tmp_path, "VOC2007", "trainval", {"1": [("cat", 0)]})
    (year / "JPEGImages" / "1.png").unlink()
    with pytest.raises(ValueError, match=r"1 of 1 pictures in .* cannot be read, more than the share of 0\.01"):
        voc(tmp_path, test=[], clients=1, image_size=4)


def _lines(root: Path, rows: list[dict[str, Any]]) -> Path:
    (root / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return root


def _sizes(dataset: Any) -> dict[str, tuple[int, int, int]]:
    return {name: (len(s.train), len(s.validation), len(s.test)) for name, s in dataset.clients.items()}


def test_captions_have_no_validation_or_test_that_nobody_asked_for() -> None:
    options: dict[str, Any] = {"clients": 3, "train": 20, "minimum": 2}
    without = _sizes(tagged_texts(**options, validation=0, test=5))
    assert sum(train for train, _, _ in without.values()) == 60
    assert {validation for _, validation, _ in without.values()} == {0}
    untested = _sizes(tagged_texts(**options, validation=2, test=0))
    assert sum(train for train, _, _ in untested.values()) == 60
    assert {test for _, _, test in untested.values()} == {0}


def test_texts_of_people_who_do_not_train_are_a_place(tmp_path: Path) -> None:
    rows = [
        {"text": f"text {i}", "labels": ["x"], "user": f"u{i % 4}", "split": ("train", "test")[i % 4 == 3 or i > 15]}
        for i in range(20)
    ]
    dataset = tagged_texts(_lines(tmp_path, rows), "user")
    assert list(dataset.clients) == ["u0", "u1", "u2"]
    assert {test for _, _, test in _sizes(dataset).values()} == {1}
    assert {place: list(part.names) for place, part in dataset.unseen.items()} == {
        "newcomers": ["3", "7", "11", "15", "19"]
    }
    assert "3 test and 5 elsewhere" in dataset.facts["counts"]
    assert not tagged_texts(tmp_path, "iid", clients=2).unseen


def test_a_row_without_a_text_is_named(tmp_path: Path) -> None:
    rows = [{"text": "a", "labels": ["x"]}, {"image": "b.jpg", "labels": ["x"]}, {"image": "c.jpg", "labels": []}]
    with pytest.raises(ValueError, match=r"texts\.jsonl, row 2: expected a text, got none \(2 such rows\)"):
        tagged_texts(_lines(tmp_path, rows))


@pytest.mark.parametrize("partition", ["label_skew", "iid"])
def test_fewer_test_rows_than_clients_leave_some_without(tmp_path: Path, partition: Any) -> None:
    rows = [{"text": str(i), "labels": ["xy"[i % 2]], "split": "test" if i < 3 else "train"} for i in range(200)]
    sizes = _sizes(tagged_texts(_lines(tmp_path, rows), partition, clients=10, alpha=20.0, minimum=2))
    assert len(sizes) == 10
    assert sum(test for _, _, test in sizes.values()) == 3


def test_a_minimum_of_none_lets_clients_go_empty() -> None:
    offsets, values = np.array([0, 1, 2]), np.array([0, 0])
    owners = label_skew(offsets, values, np.full((5, 1), 0.2), np.random.default_rng(0), 0)
    assert sorted(np.concatenate(list(owners.values())).tolist()) == [0, 1]
    with pytest.raises(ValueError, match="5 clients need more than the 2 that are shared out"):
        label_skew(offsets, values, np.full((5, 1), 0.2), np.random.default_rng(0), 1)


def test_the_mini_encoder_refuses_what_it_does_not_have(tmp_path: Path) -> None:
    refused: list[dict[str, Any]] = [{"template": "a {label}"}, {"width": 32}]
    for options in refused:
        with pytest.raises(ValueError, match="the encoder mini: expected bare names without a prompt, and 64 features"):
            write_label_embeddings("captions", tmp_path / "e", encoder="mini", **options)
    assert not (tmp_path / "e").exists()

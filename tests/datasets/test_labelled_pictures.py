"""One's own pictures with several labels each: the folder's layout, what is refused, and a run from end to end."""

import json
import math
import tarfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from confed.cli.dataset_description import describe
from confed.data.examples import Examples, FederatedDataset
from confed.datasets.labelled_pictures import labelled_pictures
from confed.inference.ask import ask
from confed.prepare.label_embeddings import write_label_embeddings
from confed.recipes.recipe import load_recipe
from confed.registry import datasets
from confed.runs.dataset import load_source
from confed.runs.encode import load_run_data
from confed.runs.run import run
from reader_folders import picture
from refusals import refuses

WORDS = ("tree", "dog", "car")


def _write(root: Path, rows: list[dict[str, Any]]) -> Path:
    """A folder whose pictures are as bright as their line's number."""
    for number, row in enumerate(rows):
        if "image" in row:
            picture(root / "images" / row["image"], number, (6 + number % 3, 8))
    (root / "labels.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return root


def _rows(count: int, **more: str) -> list[dict[str, Any]]:
    return [{"image": f"{i:02d}.png", "labels": list(WORDS[: i % 4]), **more} for i in range(count)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """30 pictures of three users, in turns; nothing is on those of "cleo"."""
    users = ("anna", "ben", "cleo")
    rows = [row | {"user": users[i % 3]} | ({"labels": []} if i % 3 == 2 else {}) for i, row in enumerate(_rows(30))]
    return _write(tmp_path / "own", rows)


def _sizes(dataset: FederatedDataset) -> dict[str, tuple[int, int, int]]:
    return {name: (len(s.train), len(s.validation), len(s.test)) for name, s in dataset.clients.items()}


def _names(dataset: FederatedDataset, role: str) -> list[str]:
    return [name for split in dataset.clients.values() for name in getattr(split, role).names]


def _shades(part: Examples) -> list[int]:
    return [int(part.images[int(row)][0, 0, 0]) for row in part.image_index]


def test_users_are_clients_with_their_own_pictures(folder: Path) -> None:
    dataset = datasets["labelled_pictures"](folder, image_size=4)
    assert dataset.answers == ("car", "dog", "tree")  # those that occur
    assert _sizes(dataset) == dict.fromkeys(("anna", "ben", "cleo"), (6, 2, 2))
    names = [name for role in ("train", "validation", "test") for name in _names(dataset, role)]
    assert sorted(names) == [f"{i:02d}.png" for i in range(30)]
    for place, (user, split) in enumerate(dataset.clients.items()):
        for part in (split.train, split.validation, split.test):
            # A name, its picture and its labels belong together, whatever order the table has.
            numbers = [int(name[:2]) for name in part.names]
            assert {number % 3 for number in numbers} == {place}
            assert _shades(part) == numbers
            expected = [set() if user == "cleo" else set(WORDS[: number % 4]) for number in numbers]
            assert [set(part.labels.table.labels_of(int(row))) for row in part.image_index] == expected
    assert dataset.facts["users"].endswith("; 1 without any label")
    assert dataset.facts["partition"] == "user"
    other = labelled_pictures(folder, image_size=4, seed=1)
    assert _names(other, "test") == _names(dataset, "test")  # whatever the seed
    assert _names(other, "validation") != _names(dataset, "validation")


def test_labels_have_the_order_of_their_file(folder: Path) -> None:
    (folder / "labels.txt").write_bytes("\ufefftree\n\n car \ndog\nsea\n".encode())
    dataset = labelled_pictures(folder, image_size=4)
    assert dataset.answers == ("tree", "car", "dog", "sea")
    assert dataset.facts["labels"] == "1 of 4 labels are on no row"
    (folder / "labels.txt").write_text("tree\n")
    message = r"2 labels are outside the 1 that are known: 'dog' \(9 times, first in .*labels\.jsonl, row 4\), 'car'"
    refuses(message, labelled_pictures, folder, image_size=4)
    for content, wrong in ((b"\n", "expected one label a line, got none"), (b"\xff\xfe", "expected UTF-8 text")):
        (folder / "labels.txt").write_bytes(content)
        refuses(rf"labels\.txt: {wrong}", labelled_pictures, folder, image_size=4)


def test_an_archive_of_the_pictures_is_read_in_place(folder: Path) -> None:
    before = labelled_pictures(folder, image_size=4)
    with tarfile.open(folder / "images.tar", "w") as tar:
        for file in (folder / "images").iterdir():
            tar.add(file, file.name)
            file.unlink()
    after = labelled_pictures(folder, image_size=4)
    for name, split in before.clients.items():
        assert _shades(after.clients[name].train) == _shades(split.train)


@pytest.mark.parametrize(
    ("partition", "options"),
    [(None, {}), ("iid", {}), ("dirichlet", {"minimum": 2}), ("label_skew", {"minimum": 2, "alpha": 5.0})],
)
def test_pictures_of_nobody_are_shared_out(tmp_path: Path, partition: Any, options: dict[str, Any]) -> None:
    _write(tmp_path, _rows(30))
    dataset = labelled_pictures(tmp_path, partition, clients=3, image_size=4, **options)
    assert list(dataset.clients) == ["client-00", "client-01", "client-02"]
    assert dataset.facts["partition"] == (partition or "iid")
    names = [name for role in ("train", "validation", "test") for name in _names(dataset, role)]
    assert sorted(names) == [f"{i:02d}.png" for i in range(30)]
    sizes = _sizes(dataset)
    for train, validation, test in sizes.values():  # a fifth, and a fifth of the rest
        held = train + validation
        assert test == round(0.2 * (held + test))
        assert validation == round(0.2 * held)
    if partition in (None, "iid"):
        assert set(sizes.values()) == {(6, 2, 2)}
    refuses("expected a user of pictures for the partition 'user'", labelled_pictures, tmp_path, "user", image_size=4)


def test_given_splits_count_and_newcomers_are_a_place(tmp_path: Path) -> None:
    splits = {**dict.fromkeys(range(6), "train"), 6: "validation", 7: "val", 8: "test", 9: "test"}
    rows = [row | {"user": f"u{i // 10}", "split": splits[i % 10]} for i, row in enumerate(_rows(30))]
    for row in rows[20:26]:
        row["split"] = "test"  # nobody trains on the third user's
    _write(tmp_path, rows)
    dataset = labelled_pictures(tmp_path, image_size=4)
    assert _sizes(dataset) == {"u0": (6, 2, 2), "u1": (6, 2, 2)}
    assert list(dataset.unseen["newcomers"].names) == [f"{i}.png" for i in (20, 21, 22, 23, 24, 25, 28, 29)]
    assert "4 test and 8 elsewhere" in dataset.facts["counts"]
    dealt = labelled_pictures(tmp_path, "iid", clients=2, image_size=4)
    assert not dealt.unseen
    assert sum(test for _, _, test in _sizes(dealt).values()) == 12


def test_unreadable_pictures_are_counted_or_refused(folder: Path) -> None:
    (folder / "images" / "04.png").write_bytes(b"no picture")
    (folder / "images" / "05.png").unlink()
    with pytest.raises(ValueError, match=r"2 of 30 pictures in .*images cannot be read, more than the share of 0.01"):
        labelled_pictures(folder, image_size=4)
    with pytest.warns(UserWarning, match="2 of 30 pictures"):
        dataset = labelled_pictures(folder, unreadable=0.1, image_size=4)
    assert sorted(dataset.facts["unreadable"].partition(": ")[2].split(", ")) == ["'04.png'", "'05.png'"]
    assert sum(map(sum, _sizes(dataset).values())) == 28
    for split in dataset.clients.values():  # the others keep their pictures and their users
        assert _shades(split.train) == [int(name[:2]) for name in split.train.names]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image": ""}, r"row 4: expected a picture's name as 'image', got none"),
        ({"image": "../03.png"}, r"row 4: expected a picture's name, without a way out of its folder"),
        ({"image": "02.png"}, r"row 4: the id '02\.png' is that of row 3 already"),
        ({"image": "02.png", "id": "another"}, r"row 4: the image '02\.png' is that of row 3 already"),
        ({"split": "dev"}, r"row 4: expected the split train, validation or test, got 'dev'"),
        ({"labels": "dog"}, r"row 4: expected a list of texts as 'labels', got 'dog'"),
        ({"user": [7]}, r"row 4: expected a text as 'user', got \[7\]"),
    ],
)
def test_a_faulty_line_is_named(folder: Path, change: dict[str, Any], message: str) -> None:
    lines = (folder / "labels.jsonl").read_text().splitlines()
    changed = json.loads(lines[3]) | change
    if change.get("image") == "":
        changed["text"] = "a caption alone"
    lines[3] = json.dumps(changed)
    (folder / "labels.jsonl").write_text("\n".join(lines))
    refuses(message, labelled_pictures, folder, image_size=4)


def test_one_picture_under_two_names_is_seen(folder: Path) -> None:
    file = folder / "labels.jsonl"
    again = json.dumps({"image": "./00.png", "labels": [], "user": "anna", "id": "again"})
    file.write_text(f"{file.read_text()}\n{again}")
    refuses(r"the image '00\.png' is that of row \d already", labelled_pictures, folder)


@pytest.mark.parametrize("lost_first", [True, False])
def test_a_run_goes_on_with_the_pictures_it_began_with_only(tmp_path: Path, lost_first: bool) -> None:
    root = _write(tmp_path / "own", _rows(60))
    aside, place = tmp_path / "aside.png", root / "images/07.png"
    if lost_first:
        place.rename(aside)
    overrides = ["data.name=labelled_pictures", f"data.root={root}", "data.clients=3", "data.unreadable=0.5"]
    overrides += ["run.rounds=1", "run.checkpoint_seconds=0", "run.evaluate_every=0"]
    recipe = load_recipe("fedlgt_ucm", overrides).method("fedctran")
    out = tmp_path / "run"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = run(recipe, out)
        (out / "summary.json").unlink()
        assert run(recipe, out, resume=True)["global_seen"] == first["global_seen"]  # nothing has changed yet
        (aside if lost_first else place).rename(place if lost_first else aside)
        load_source.cache_clear()
        load_run_data.cache_clear()
        with pytest.raises(ValueError, match=r"not those that the run began with: then \d+ examples and [01] that.*07"):
            run(recipe, out, resume=True)


def test_what_is_missing_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"elsewhere/labels\.jsonl does not exist; labelled_pictures reads"):
        labelled_pictures(tmp_path / "elsewhere")
    (folder / "images").rename(folder / "photos")
    refuses(r"expected .*own/images\.tar or .*own/images, got neither", labelled_pictures, folder)
    text = (folder / "labels.jsonl").read_text()
    (folder / "labels.jsonl").write_text(text[:-10])
    refuses(r"labels\.jsonl, row 30: expected one JSON object, got .*; is it cut off\?", labelled_pictures, folder)
    _write(tmp_path, [{"image": "a.png", "labels": []}])
    refuses(r"expected labels on some picture, or in .*labels\.txt, got none", labelled_pictures, tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"partition": "quantity"}, "partition must be one of user, iid, dirichlet, label_skew, got 'quantity'"),
        ({"partition": "iid", "clients": 50}, "50 clients need more than the 30"),
        ({"validation": 1.0}, r"validation must lie in \[0, 1\), got 1.0"),
        ({"test_share": -0.1}, r"test_share must lie in \[0, 1\), got -0.1"),
        ({"max_train": 0}, "max_train must be at least 1, got 0"),
        ({"unreadable": 2.0}, r"unreadable must lie in \[0, 1\], got 2.0"),
    ],
)
def test_options_out_of_range_are_refused(folder: Path, options: Mapping[str, Any], message: str) -> None:
    refuses(message, labelled_pictures, folder, image_size=4, **options)


@pytest.mark.filterwarnings("ignore:run.cohort = 12 is more than the 3 clients")
def test_what_the_module_says_to_type_works(folder: Path, tmp_path: Path) -> None:
    (folder / "labels.txt").write_text("\n".join(WORDS))
    assert describe("labelled_pictures", [f"root={folder}"], tmp_path / "sheet.png")["answers"] == 3
    embeddings = tmp_path / "labels.safetensors"
    write_label_embeddings(str(folder / "labels.txt"), embeddings, encoder="mini")
    given = (
        "data.name=labelled_pictures", f"data.root={folder}", 'study.methods=["fedctran", "fedlgt_ule"]',
        f"methods.fedlgt_ule.model.embeddings={embeddings}", "run.rounds=1", "run.threads=1", "local.epochs=1",
    )  # fmt: skip
    recipe = load_recipe("fedlgt_ucm", given)
    assert recipe.label("fedlgt_ule") == "FedLGT"
    summary = run(recipe.method("fedlgt_ule"), tmp_path / "run")
    assert "nan" not in json.dumps(summary).lower()
    found = ask(tmp_path / "run", image=folder / "images" / "00.png", known=["tree=yes"])
    assert {entry["label"] for entry in found["labels"]} == {"dog", "car"}
    assert all(math.isfinite(entry["probability"]) for entry in found["labels"])


def test_the_published_model_takes_them_too(folder: Path) -> None:
    given = ("data.name=labelled_pictures", f"data.root={folder}", "data.image_size=256", "model.embeddings=e")
    recipe = load_recipe("fedlgt_coco", given).method("fedlgt")
    data = recipe.sections["data"]
    assert (data["name"], data["image_size"], data.get("partition")) == ("labelled_pictures", 256, None)
    assert (recipe.sections["model"]["name"], recipe.sections["model"]["embeddings"]) == ("ctran", "e")

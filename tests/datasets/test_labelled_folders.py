"""Classification of pictures in folders: the three forms, roles, names, refusals; EuroSAT where it is there."""

import json
import os
from pathlib import Path

import pytest

from confed.data.few_shot import NEW
from confed.datasets.labelled_folders import labelled_folders
from reader_folders import picture
from refusals import refuses

OPTIONS = {"partition": "iid", "clients": 2, "shots": 2, "validation_shots": 1, "image_size": 8}


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    for number, name in enumerate(("AnnualCrop", "sea_lake", "river", "forest")):
        for i in range(12):
            picture(tmp_path / name / f"{i:02d}.png", 20 * number + i)
    return tmp_path


def test_folder_per_class(folders: Path) -> None:
    dataset = labelled_folders(folders, **OPTIONS)
    assert dataset.answers == ("annual crop", "forest", "river", "sea lake")
    train = dataset.clients["client-00"].train
    assert set(train.answers) <= {"annual crop", "forest"}
    row = train.answers.index("forest")
    value = int(train.images[train.image_index[row]][0, 0, 0])
    assert 60 <= value < 72  # the forest is number 3 above
    assert set(dataset.unseen[NEW].answers) == {"river", "sea lake"}


def test_roles_and_domains_above_classes(tmp_path: Path) -> None:
    values = iter(range(64))
    for role, count in (("train", 6), ("test", 2)):
        for domain in ("aerial", "ground"):
            for name in ("a", "b", "c", "d"):
                for i in range(count):
                    picture(tmp_path / role / domain / name / f"{i}.png", next(values))
    dataset = labelled_folders(tmp_path, **{**OPTIONS, "partition": "domain"}, domains=True)
    assert set(dataset.clients) == {"aerial", "ground"}
    assert len(dataset.clients["aerial"].test) == 4
    assert all("test/" in name for name in dataset.clients["aerial"].test.names)


def test_split_file_of_coop(folders: Path) -> None:
    rows = {name: [[f"{name}/{i:02d}.png", number, f"class {number}"] for i in range(12)]
            for number, name in enumerate(("AnnualCrop", "sea_lake", "river", "forest"))}  # fmt: skip
    split = {role: [row for own in rows.values() for row in own[part]]
             for role, part in (("train", slice(0, 6)), ("val", slice(6, 9)), ("test", slice(9, 12)))}  # fmt: skip
    (folders / "split_zhou_Some.json").write_text(json.dumps(split))
    dataset = labelled_folders(folders, **OPTIONS, split_file="split_zhou_Some.json")
    assert dataset.answers == ("class 0", "class 1", "class 2", "class 3")
    tests = [name for s in dataset.clients.values() for name in s.test.names]
    assert len(tests) == 6
    assert all(name.endswith(("09.png", "10.png", "11.png")) for name in tests)


def test_lines_with_labels(folders: Path) -> None:
    (folders / "images").mkdir()
    lines = []
    for name in ("AnnualCrop", "sea_lake", "river", "forest"):
        for i in range(12):
            (folders / name / f"{i:02d}.png").rename(folders / "images" / f"{name}-{i:02d}.png")
            role = "test" if i >= 10 else "train"
            lines.append(json.dumps({"image": f"{name}-{i:02d}.png", "label": name, "split": role}))
    (folders / "labels.jsonl").write_text("\n".join(lines))
    dataset = labelled_folders(folders, **OPTIONS)
    assert sorted(n for s in dataset.clients.values() for n in s.test.names) == sorted(
        f"{name}-{i}.png" for name in ("AnnualCrop", "forest") for i in (10, 11)
    )


def test_classes_may_have_another_key(folders: Path) -> None:
    (folders / "images").mkdir()
    lines: list[str] = []
    for name in ("AnnualCrop", "sea_lake", "river", "forest"):
        for i in range(12):
            (folders / name / f"{i:02d}.png").rename(folders / "images" / f"{name}-{i:02d}.png")
            lines.append(json.dumps({"image": f"{name}-{i:02d}.png", "land_use": name}))
    (folders / "labels.jsonl").write_text("\n".join(lines))
    assert "annual crop" in labelled_folders(folders, class_key="land_use", **OPTIONS).answers
    refuses("label", labelled_folders, folders, **OPTIONS)


def test_faulty_folders_of_classes_are_named(tmp_path: Path, folders: Path) -> None:
    refuses("nowhere does not exist", labelled_folders, tmp_path / "nowhere")
    empty = tmp_path / "empty"
    empty.mkdir()
    refuses("expected class/picture, labels", labelled_folders, empty)
    (folders / "labels.jsonl").write_text('{"image": "a.png", "label": "a", "split": "exam"}')
    (folders / "images").mkdir()
    refuses("row 1: expected the split train, validation or test, got 'exam'", labelled_folders, folders)
    (folders / "split.json").write_text('{"train": [["a.png", 0]], "test": []}')
    refuses(r"train, entry 1: expected \[path, number, name\]", labelled_folders, folders, split_file="split.json")
    (folders / "split.json").write_text('{"train": [["a.png", 0, "a"]], "test": [["a.png", 0, "a"]]}')
    with pytest.raises(ValueError, match=r"expected the role train of 'a\.png', as before, got 'test'"):
        labelled_folders(folders, split_file="split.json")
    for name in ("null", '["a", "b"]', "{}"):
        (folders / "labels.jsonl").write_text(f'{{"image": "a.png", "label": {name}}}')
        refuses(r"row 1", labelled_folders, folders)


def test_base_classes_of_a_split_file_have_the_lower_numbers(folders: Path) -> None:
    names = ("sea_lake", "AnnualCrop", "river", "forest")  # as numbered, not in alphabetical order
    parts = {"train": slice(0, 6), "val": slice(6, 9), "test": slice(9, 12)}
    split = {
        role: [[f"{name}/{i:02d}.png", number, name] for number, name in enumerate(names) for i in range(12)[part]]
        for role, part in parts.items()
    }
    (folders / "split.json").write_text(json.dumps(split))
    dataset = labelled_folders(folders, **OPTIONS, split_file="split.json")
    assert dataset.answers == ("sea lake", "annual crop", "river", "forest")
    assert dataset.unseen[NEW].offered == ("river", "forest")


def test_shots_in_total_are_shared_out(folders: Path) -> None:
    each = labelled_folders(folders, **OPTIONS)
    total = labelled_folders(folders, **OPTIONS, shots_in_total=True)
    assert sum(len(split.train) for split in each.clients.values()) == 2 * 2 * 2
    assert sum(len(split.train) for split in total.clients.values()) == 2 * 2
    assert total.facts["shots"] == "2 per class in all, 1 to validate"


def test_eurosat_has_its_classes_and_shots() -> None:
    root = Path(os.environ.get("CONFED_DATA", "/nowhere")) / "eurosat_mini"
    if not root.is_dir():
        pytest.skip("no data in CONFED_DATA")
    dataset = labelled_folders(root, "classes", clients=5, shots=8, image_size=32)
    assert len(dataset.answers) == 10
    assert "annual crop" in dataset.answers
    assert all(len(split.train) == 8 for split in dataset.clients.values())
    assert len(dataset.unseen[NEW]) == 5 * 60


def test_other_data_sets_are_asked_about_among_their_own_classes(folders: Path) -> None:
    for number, name in enumerate(("forest", "harbour")):
        for i in range(10):
            picture(folders / "elsewhere" / "UCM" / name / f"{i:02d}.png", 100 + 50 * number + i)
    other = folders.parent / "UCM"
    (folders / "elsewhere" / "UCM").rename(other)
    (folders / "elsewhere").rmdir()
    dataset = labelled_folders(folders, **OPTIONS, others=(str(other),))
    assert dataset.answers == ("annual crop", "forest", "river", "sea lake", "harbour")
    place = dataset.unseen["UCM"]
    assert place.offered == ("forest", "harbour")
    assert sorted(place.answers) == ["forest"] * 2 + ["harbour"] * 2
    for row, answer in zip(place.image_index, place.answers, strict=True):
        assert int(place.images[row][0, 0, 0]) // 50 == {"forest": 2, "harbour": 3}[answer]
    assert dataset.facts["other data sets"] == "UCM: 2 classes, 1 of them learned"
    assert len(dataset.unseen[NEW].images) == 48  # the folder's own pictures
    with pytest.raises(ValueError, match="there is a client or place 'UCM' already"):
        labelled_folders(folders, **OPTIONS, others=(str(other), str(other)))

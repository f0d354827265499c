"""One identity of an example: copies of a picture, patients and documents stay on one side of a split."""

import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from confed.data.intake.identity import first_copies_of_files, joined_groups, united_by
from confed.datasets.chat_records import chat_records
from confed.datasets.labelled_folders import labelled_folders
from confed.datasets.labelled_pictures import labelled_pictures
from confed.prepare.own_data import recognise
from reader_folders import write

COUNT = 40
"""Pictures; each is there twice, under another name and in another class or with another client."""


def content_of(number: int) -> int:
    return number // 4 * 2 + number % 2


def pictures(folder: Path) -> list[str]:
    folder.mkdir(parents=True)
    names = [f"{number:02d}.png" for number in range(COUNT)]
    for number, name in enumerate(names):
        Image.fromarray(np.full((6, 6, 3), 6 * content_of(number), np.uint8)).save(folder / name)
    return names


def questions(folder: Path, **columns: Callable[[int], Any]) -> Any:
    names = pictures(folder / "images")
    write(folder / "q.jsonl", (
        {"image": name, "question": "bright?", "answer": ["no", "yes"][number // 20],
         **{key: of(number) for key, of in columns.items()}} for number, name in enumerate(names)
    ), lines=True)  # fmt: skip
    return chat_records(folder, image_size=4, clients=2)


def classes(folder: Path) -> Any:
    for number, name in enumerate(pictures(folder / "all")):
        place = folder / "ab"[number // 2 % 2] / name
        place.parent.mkdir(exist_ok=True)
        (folder / "all" / name).rename(place)
    return labelled_folders(folder, "iid", clients=2, shots=0, new="none", image_size=4)


def archived(folder: Path) -> Any:
    names = pictures(folder / "images")
    with tarfile.open(folder / "images.tar", "w") as archive:
        for name in names:
            archive.add(folder / "images" / name, name)
    write(folder / "labels.jsonl", ({"image": n, "label": "ab"[i // 2 % 2]} for i, n in enumerate(names)), lines=True)
    return labelled_folders(folder, "iid", clients=2, shots=0, new="none", image_size=4, validation=0.2)


def labels(folder: Path, **columns: Callable[[int], Any]) -> Any:
    names = pictures(folder / "images")
    write(folder / "labels.jsonl", (
        {"image": n, "labels": ["ab"[i % 2]], **{key: of(i) for key, of in columns.items()}}
        for i, n in enumerate(names)
    ), lines=True)  # fmt: skip
    return labelled_pictures(folder, clients=2, image_size=4, minimum=1)


def sides(dataset: Any, group_of: Callable[[int], int]) -> dict[int, set[str]]:
    """Group -> the roles that its examples have."""
    roles: dict[int, set[str]] = {}
    for client in dataset.clients:
        for role, part in dataset.clients[client].roles.items():
            for name in part.names:
                number = int(name.rpartition("/")[2].removesuffix(".png"))
                roles.setdefault(group_of(number), set()).add(role)
    return roles


@pytest.mark.parametrize("make", [questions, classes, archived, labels])
def test_copies_of_a_picture_are_on_one_side(make: Callable[[Path], Any], tmp_path: Path) -> None:
    dataset = make(tmp_path / "data")
    roles = sides(dataset, content_of)
    assert len(roles) == COUNT // 2
    assert {len(has) for has in roles.values()} == {1}
    assert {"test"} in roles.values()
    assert "20 pictures have the content of others" in dataset.facts["read"]


@pytest.mark.parametrize("key", ["patient", "document"])
@pytest.mark.parametrize("make", [questions, labels])
def test_patients_and_documents_are_on_one_side(make: Callable[..., Any], key: str, tmp_path: Path) -> None:
    dataset = make(tmp_path / "data", **{key: lambda number: number // 4})
    roles = sides(dataset, lambda number: number // 4)
    assert len(roles) == 10
    assert {len(has) for has in roles.values()} == {1}
    assert {"test"} in roles.values()


def test_what_two_clients_share_is_a_test_for_both_or_for_none(tmp_path: Path) -> None:
    dataset = questions(tmp_path / "data", client=lambda number: "ns"[number % 4 // 2])
    assert set(dataset.clients) == {"n", "s"}
    assert {len(has) for has in sides(dataset, content_of).values()} == {1}


@pytest.mark.parametrize("make", [questions, labels])
def test_patients_in_two_given_splits_are_warned_of(make: Any, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="5 patients, documents or pictures are in several of .*, such as patient '0'"):
        make(tmp_path / "data", patient=lambda number: number // 8, split=lambda number: ["train", "test"][number % 2])


def test_a_class_of_copies_alone_is_trained_on_and_tested(tmp_path: Path) -> None:
    for number in range(20):
        place = tmp_path / "ab"[number % 2] / f"{number}.png"
        place.parent.mkdir(exist_ok=True)
        Image.fromarray(np.full((6, 6, 3), 99 * (number % 2), np.uint8)).save(place)
    dataset = labelled_folders(tmp_path, "iid", clients=1, shots=0, new="none", image_size=4)
    assert [len(part) for part in dataset.clients["client-00"].roles.values()] == [16, 0, 4]


def test_files_are_equal_by_all_of_their_bytes(tmp_path: Path) -> None:
    start = b"x" * (1 << 15)
    contents = [start + b"a", b"", start + b"b", start + b"a", b"", b"short"]
    files = [tmp_path / str(number) for number in range(len(contents))]
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content)
    assert first_copies_of_files([*files, tmp_path / "gone"]) == [0, 1, 2, 0, 4, 5, 6]


def test_groups_are_joined_by_what_stands_between_them() -> None:
    groups = joined_groups([["a"], ["b"], [], ["a", "b"], ["c"]])
    assert groups[0] == groups[1] == groups[3]
    assert len(set(groups.tolist())) == 3
    assert united_by({"patient": 7, "document": " x ", "other": 1}) == ("patient '7'", "document 'x'")
    assert united_by({"patient": None, "document": ["pages"]}) == ()


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ("patient_id,hospital", {"patient": "patient_id", "client": "hospital"}),
        ("patient_id", {"client": "patient_id"}),
        ("doc_id,hospital", {"document": "doc_id", "client": "hospital"}),
    ],
)
def test_proposals_keep_patients_and_documents_together(columns: str, expected: dict[str, str], tmp_path: Path) -> None:
    names = pictures(tmp_path / "images")
    rows = [f"{name},{'ab'[i % 2]},p{i // 4},{'ns'[i // 20]}" for i, name in enumerate(names)]
    width = columns.count(",") + 1
    table = "\n".join(",".join(row.split(",")[: 2 + width]) for row in rows)
    (tmp_path / "q.csv").write_text(f"image,label,{columns}\n{table}\n")
    proposal = recognise(tmp_path)[0][0]
    assert proposal.options["columns"] == {"answer": "label", **expected}
    assert proposal.options["partition"] == "client"

"""Columns of owners: how they are called, what their cells mean, and what readers leave out, merge and report."""

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from confed.data.owners import by_likelihood, is_owner_column, notes_on_owners, owner_text, says_owners
from confed.datasets.chat_records import chat_records
from confed.datasets.labelled_folders import labelled_folders
from confed.datasets.labelled_pictures import labelled_pictures
from confed.datasets.sensor_series import sensor_series
from confed.datasets.tagged_texts import tagged_texts
from reader_folders import write
from refusals import refuses

NAMES = ["Oslo"] * 9 + ["oslo "] * 3 + ["Oslo "] * 2 + ["Rom"] * 9 + ["", " ", None]
"""Two clients, a third that differs in case, blanks around names, and three blank cells of 26."""
SIZES = {"Oslo": 11, "oslo": 3, "Rom": 9}


@pytest.mark.parametrize("name", ["client", "Hospital", "sender_id", "SenderID", "patient-name", "site code", "user",
                                  "department", "batch_id", "USER_ID"])  # fmt: skip
def test_columns_called_like_owners(name: str):
    assert is_owner_column(name)


@pytest.mark.parametrize("name", ["id", "image_id", "question_id", "imageId", "answer", "label", "category_id", "side",
                                  "username_hint", "question", ""])  # fmt: skip
def test_columns_called_like_something_else(name: str):
    assert not is_owner_column(name)


def test_the_likelier_column_comes_first():
    assert by_likelihood(["batch_id", "patient_id", "answer", "hospital"]) == ["hospital", "patient_id", "batch_id"]


def test_values_decide_whether_a_column_says_owners():
    assert says_owners(["a", "b", "a", "b", ""])
    assert not says_owners(["a", "a", "a"])
    assert not says_owners(["1", "2", "3", "4", "4"])
    assert not says_owners(["", " "])


def test_cells_as_texts():
    cells = [None, math.nan, 3, 3.0, 2.5, True, " x "]
    assert [owner_text({"c": cell}, "c") for cell in cells] == ["", "", "3", "3", "2.5", "true", " x "]
    assert owner_text({}, "c") == ""
    refuses(r"row 1: expected a text as 'c', got \['x'\]", owner_text, {"c": ["x"]}, "c", "row 1")


def test_what_is_said_of_a_column():
    cells = [name or "" for name in NAMES]
    assert notes_on_owners(cells, "site") == [
        "3 of 26 rows have no site and are left out",
        "5 rows have blanks around their site, such as 'oslo', which are not counted",
        "nearly equal names are different clients: 'Oslo' (11), 'oslo' (3); make them equal where they are one",
    ]
    assert notes_on_owners(["Oslo", "Rom"], "site") == []
    assert "'St. Olav' (1), 'St Olav' (1)" in notes_on_owners(["St. Olav", "St Olav"], "site")[0].replace(
        "'St Olav' (1), 'St. Olav' (1)", "'St. Olav' (1), 'St Olav' (1)"
    )


def pictures(folder: Path) -> list[str]:
    (folder / "images").mkdir(parents=True)
    for number in range(len(NAMES)):
        shade = np.full((8, 8, 3), 9 * number, np.uint8)
        Image.fromarray(shade).save(folder / "images" / f"{number}.png")
    return [f"{number}.png" for number in range(len(NAMES))]


def questions(folder: Path) -> Any:
    rows = [{"image": image, "question": "dark?", "answer": ["yes", "no"][n % 2], "site": name}
            for n, (image, name) in enumerate(zip(pictures(folder), NAMES, strict=True))]  # fmt: skip
    write(folder / "q.jsonl", rows, lines=True)
    return chat_records(folder, columns={"client": "site"}, image_size=8)


def labels(folder: Path) -> Any:
    rows = [{"image": image, "labels": ["a", "b"][: n % 2 + 1], "site": name}
            for n, (image, name) in enumerate(zip(pictures(folder), NAMES, strict=True))]  # fmt: skip
    write(folder / "labels.jsonl", rows, lines=True)
    return labelled_pictures(folder, user_key="site", image_size=8)


def classes(folder: Path) -> Any:
    rows = [{"image": image, "label": "ab"[n % 2], "site": name}
            for n, (image, name) in enumerate(zip(pictures(folder), NAMES, strict=True))]  # fmt: skip
    write(folder / "labels.jsonl", rows, lines=True)
    return labelled_folders(folder, "domain", domain_key="site", shots=0, new="none", image_size=8, validation=0.1)


def texts(folder: Path) -> Any:
    folder.mkdir()
    rows = [{"text": f"text {n}", "labels": ["a"], "site": name} for n, name in enumerate(NAMES)]
    write(folder / "texts.jsonl", rows, lines=True)
    return tagged_texts(folder, "user", user_key="site")


def sensors(folder: Path) -> Any:
    folder.mkdir()
    rows = [f"{n},{name or ''},train,,text {n},{'ab'[n % 2]}" for n, name in enumerate(NAMES)]
    (folder / "examples.csv").write_text("\n".join(["id,client,split,series,text,label", *rows]), encoding="utf-8")
    return sensor_series(folder)


@pytest.mark.parametrize("read", [questions, labels, classes, texts, sensors])
def test_every_reader_leaves_blank_owners_out_and_counts_them(read: Any, tmp_path: Path):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        dataset = read(tmp_path / "data")
    sizes = {name: sum(map(len, dataset.clients[name].roles.values())) for name in dataset.clients}
    assert sizes == SIZES
    said = [str(warning.message) for warning in told]
    assert any("3 of 26 rows have no" in text for text in said)
    assert any("nearly equal names are different clients: 'Oslo' (11), 'oslo' (3)" in text for text in said)


def test_rows_of_unseen_places_need_no_client(tmp_path: Path):
    rows = [
        {"image": image, "question": "dark?", "answer": ["yes", "no"][n % 2]}
        | {"client": "" if n < 6 else "ab"[n % 2], "place": "far" if n < 5 else "near"}
        for n, image in enumerate(pictures(tmp_path / "data"))
    ]
    write(tmp_path / "data" / "q.jsonl", rows, lines=True)
    with pytest.warns(UserWarning, match="1 of 21 rows have no client and are left out"):
        dataset = chat_records(tmp_path / "data", unseen=["far"], image_size=8)
    assert (len(dataset.unseen["far"]), sorted(dataset.clients)) == (5, ["a", "b"])


def test_a_partition_of_which_no_row_has_the_column_is_refused(tmp_path: Path):
    pictures(tmp_path / "data")
    write(
        tmp_path / "data" / "q.jsonl", [{"image": "1.png", "question": "q", "answer": "a", "client": " "}], lines=True
    )
    with pytest.raises(ValueError, match="expected a text as 'client' for the partition 'client', got no line"):
        chat_records(tmp_path / "data", "client", image_size=8)

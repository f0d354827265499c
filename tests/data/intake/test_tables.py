"""Tables and texts as people have them: each kind with known counts, faults with their rows, accounts that add up."""

import csv
import io
import json
import tarfile
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from confed.data.intake.tables import read_records
from confed.data.intake.values import plain_path, plain_text
from confed.datasets.chat_records import chat_records
from confed.datasets.labelled_folders import labelled_folders
from confed.datasets.labelled_pictures import labelled_pictures
from confed.datasets.object_labels import coco, voc
from confed.datasets.picture_captions import coco_captions
from confed.datasets.tagged_texts import tagged_texts
from confed.datasets.vqa_v2 import vqa_v2
from confed.prepare.own_data import recognise
from refusals import refuses

COUNT = 12
CAFE = "caf\u00e9"


def rows(**changed: Callable[[int], Any]) -> list[dict[str, Any]]:
    """Questions about pictures, with some columns as functions of the row's number."""
    plain: list[dict[str, Any]] = []
    for n in range(COUNT):
        row = {
            "image": f"{n}.png",
            "question": "is it red?",
            "answer": ["yes", "no"][n % 2],
            "client": "ns"[n // 2 % 2],
        }
        plain.append(row | {key: value(n) for key, value in changed.items()})
    return plain


def table(entries: list[dict[str, Any]], delimiter: str = ",", end: str = "\n", **options: Any) -> str:
    """The rows as a table of text."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(entries[0]), delimiter=delimiter, lineterminator=end, **options)
    writer.writeheader()
    writer.writerows(entries)
    return stream.getvalue()


def lines(entries: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)


def parquet(entries: list[dict[str, Any]]) -> bytes:
    arrow: Any = pytest.importorskip("pyarrow")
    library: Any = pytest.importorskip("pyarrow.parquet")
    stream = io.BytesIO()
    library.write_table(arrow.Table.from_pylist(entries), stream)
    return stream.getvalue()


def stray_quotes() -> str:
    questions = {4: '"is it red?', 8: 'is it red"'}
    entries = [{**row, "question": questions.get(n, row["question"])} for n, row in enumerate(rows())]
    return "".join("\t".join(cells) + "\n" for cells in [[*entries[0]], *([*entry.values()] for entry in entries)])


def every(of: str, value: Any, *numbers: int) -> Callable[[int], Any]:
    """A column that has another value in some rows."""
    return lambda n: value if n in numbers else rows()[n][of]


YES_NO = {"yes", "no"}
NFD = unicodedata.normalize("NFD", CAFE)
ACCENTED = rows(answer=lambda n: [CAFE, "no"][n % 2])
FLOATS = rows(answer=lambda n: float(n % 2))
# Kind -> name of the file, its content, answers, what is said, how many rows are left out.
KINDS: dict[str, tuple[str, str | bytes, set[str], str, int]] = {
    "commas": ("q.csv", table(rows()), YES_NO, "", 0),
    "semicolons": ("q.csv", table(rows(), ";"), YES_NO, "a table with semicolons between cells", 0),
    "semicolons and commas in cells": (
        "q.csv", table(rows(question=lambda n: "red, blue, or green?"), ";"), YES_NO, "semicolons", 0,
    ),
    "tabs in .csv": ("q.csv", table(rows(), "\t"), YES_NO, "a table with tabs between cells", 0),
    "bars": ("q.csv", table(rows(), "|"), YES_NO, "a table with bars between cells", 0),
    "commas in .tsv": ("q.tsv", table(rows()), YES_NO, "a table with commas between cells", 0),
    "a line sep=": ("q.csv", "sep=;\n" + table(rows(), ";"), YES_NO, "semicolons", 0),
    "mark": ("q.csv", table(rows()).encode("utf-8-sig"), YES_NO, "UTF-8 with a byte-order mark", 0),
    "semicolons and mark": ("q.csv", table(rows(), ";", "\r\n").encode("utf-8-sig"), YES_NO, "in UTF-8 with a byte", 0),
    "UTF-16": ("q.csv", table(rows(), "\t").encode("utf-16"), YES_NO, "in UTF-16", 0),
    "UTF-16 without mark": ("q.csv", table(rows()).encode("utf-16-le"), YES_NO, "UTF-16", 0),
    "Windows": ("q.csv", table(ACCENTED).encode("cp1252"), {CAFE, "no"}, "Windows-1252 where it is no UTF-8", 0),
    "one byte of Windows": (
        "q.csv",
        table([*ACCENTED[:-1], {**ACCENTED[-1], "question": "o\u00f9?"}]).encode().replace(b"\xc3\xb9", b"\xf9"),
        {CAFE, "no"}, "Windows-1252", 0,
    ),
    "ends of Windows": ("q.csv", table(rows(), end="\r\n"), YES_NO, "", 0),
    "ends of old Macs": ("q.csv", table(rows(), end="\r"), YES_NO, "", 0),
    "cells over lines": ("q.csv", table(rows(question=every("question", "is it\nred?", 3))), YES_NO, "", 0),
    "delimiters in cells": ("q.csv", table(rows(question=every("question", "red, or blue?", 3))), YES_NO, "", 0),
    "a stray quote": ("q.csv", table(rows()).replace("is it red?", '"is it red?', 1), YES_NO, "", 0),
    "quotes in a table with tabs": ("q.tsv", stray_quotes(), YES_NO, "", 0),
    "quoted table with tabs": ("q.tsv", table(rows(), "\t", quoting=csv.QUOTE_ALL), YES_NO, "", 0),
    "doubled quotes": ("q.tsv", table(rows(question=lambda n: 'is it "red"?'), "\t"), YES_NO, "", 0),
    "quotes behind backslashes": (
        "q.csv", table(rows(question=lambda n: "a QQredQQ, or blue?")).replace("QQ", '\\"'), YES_NO, "", 0,
    ),
    "empty lines": ("q.csv", table(rows()).replace("3.png", "\n\n3.png") + "\n\n", YES_NO, "", 0),
    "a delimiter too many": ("q.csv", table(rows()).replace("\n", ",\n").replace(",\n", "\n", 1), YES_NO, "", 0),
    "rows of delimiters": ("q.csv", table(rows(), ";") + ";;;\n;;;\n", YES_NO, "semicolons", 0),
    "a column of numbers without a name": ("q.csv", table([{"": n, **r} for n, r in enumerate(rows())]), YES_NO, "", 0),
    "blanks in the header": ("q.csv", table(rows()).replace("question", " question "), YES_NO, "", 0),
    "floats of a tool in a table": ("q.csv", table(FLOATS), {"0", "1"}, "", 0),
    "blank answers": ("q.csv", table(rows(answer=every("answer", " ", 2, 5))), YES_NO, "", 2),
    "blank questions": ("q.csv", table(rows(question=every("question", "", 2, 5, 7))), YES_NO, "", 3),
    "blank pictures": ("q.csv", table(rows(image=every("image", "", 4))), YES_NO, "", 1),
    "numbers": ("q.jsonl", lines(rows(answer=lambda n: n % 3)), {"0", "1", "2"}, "", 0),
    "truth values": ("q.jsonl", lines(rows(answer=lambda n: n % 2 == 0)), {"true", "false"}, "", 0),
    "floats of a tool": ("q.jsonl", lines(FLOATS), {"0", "1"}, "", 0),
    "floats": ("q.jsonl", lines(rows(answer=lambda n: [1.0, 2.5][n % 2])), {"1.0", "2.5"}, "", 0),
    "a number among texts": ("q.jsonl", lines(rows(answer=every("answer", 2, 3, 4))), YES_NO | {"2"}, "", 0),
    "lines with a mark": ("q.jsonl", lines(rows()).encode("utf-8-sig"), YES_NO, "byte-order mark", 0),
    "lines in UTF-16": ("q.jsonl", lines(ACCENTED).encode("utf-16"), {CAFE, "no"}, "UTF-16", 0),
    "lines of Windows": ("q.jsonl", lines(ACCENTED).encode("cp1252"), {CAFE, "no"}, "Windows", 0),
    "empty lines between lines": ("q.jsonl", lines(rows()).replace("\n", "\n\n"), YES_NO, "", 0),
    "no numbers": ("q.jsonl", lines(rows(answer=every("answer", float("nan"), 1, 4))), YES_NO, "", 2),
    "null": ("q.jsonl", lines(rows(answer=every("answer", None, 1), question=every("question", None, 4))), YES_NO,
             "", 2),
    "a list": ("q.json", json.dumps(rows(), indent=1), YES_NO, "", 0),
    "a list with a mark": ("q.json", json.dumps(rows()).encode("utf-8-sig"), YES_NO, "byte-order mark", 0),
    "a list of Windows": ("q.json", json.dumps(ACCENTED, ensure_ascii=False).encode("cp1252"), {CAFE, "no"}, "Win", 0),
    "a list in an object": ("q.json", json.dumps({"version": 1, "data": rows()}), YES_NO, "", 0),
    "columns in an object": (
        "q.json", json.dumps({key: {str(n): row[key] for n, row in enumerate(rows())} for key in rows()[0]}), YES_NO,
        "", 0,
    ),
    "lists by split": ("q.json", json.dumps({"train": rows()[:8], "test": rows()[8:]}), YES_NO, "", 0),
    "rows by id": ("q.json", json.dumps({f"id {n}": row for n, row in enumerate(rows())}), YES_NO, "", 0),
    "a comment above": ("q.csv", "# made by hand\n" + table(rows()), YES_NO, "below 1 line left out", 0),
    "a title above": ("q.csv", "My export;;;\n" + table(rows(), ";"), YES_NO, "semicolons", 0),
    "names in another case": ("q.csv", table(rows(image=lambda n: f"{n}.PNG")), YES_NO, "", 0),
    "signs of an address": ("q.csv", table(rows(image=lambda n: f"%69mages/{n}.png")), YES_NO, "", 0),
    "answers as lists": ("q.jsonl", lines(rows(answer=lambda n: [["yes"], ["no"]][n % 2])), YES_NO, "", 0),
    "lines called .json": ("q.json", lines(rows()), YES_NO, "", 0),
    "other systems' paths": ("q.jsonl", lines(rows(image=lambda n: f"images\\{n}.png")), YES_NO, "", 0),
    "dots before paths": ("q.csv", table(rows(image=lambda n: f".\\images\\{n}.png")), YES_NO, "", 0),
    "addresses of files": ("q.jsonl", lines(rows(image=lambda n: f"file:///x/images/{n}.png")), YES_NO, "", 0),
    "paths of another machine": ("q.csv", table(rows(image=lambda n: f"C:\\data\\images\\{n}.png")), YES_NO, "", 0),
    "blanks around": (
        "q.jsonl", lines(rows(answer=every("answer", "yes ", 0, 2))), YES_NO, "2 of 12 answers are read in another", 0,
    ),
    "Unicode forms": ("q.jsonl", lines(rows(answer=lambda n: [CAFE, NFD][n % 2])), {CAFE}, "'caf\u00e9'", 0),
    "case": ("q.jsonl", lines(rows(answer=every("answer", "Yes", 0))), YES_NO | {"Yes"}, "data.fold_case = true", 0),
    "control words": ("q.csv", table(rows(question=every("question", "what is <image> here?", 6))), YES_NO, "", 0),
    "control words beside one": (
        "q.jsonl",
        lines([*rows()[:-1], {"images": ["11.png"], "client": "n", "messages": [
            {"role": "user", "content": "<image>\nis <image> red?"}, {"role": "assistant", "content": "no"}]}]),
        YES_NO, "", 0,
    ),
}  # fmt: skip


def folder_of(place: Path, name: str, content: str | bytes, stem: str = "") -> Path:
    (place / "images").mkdir(parents=True)
    for n in range(COUNT):
        shade = np.full((4, 4, 3), 20 * n, np.uint8)
        Image.fromarray(shade).save(place / "images" / f"{stem}{n}.png")
    data = content if isinstance(content, bytes) else content.encode()
    (place / name).write_bytes(data)
    return place


def read(place: Path, **options: Any) -> Any:
    return chat_records(place, image_size=4, validation=0, test_share=0.2, **options)


def examples(dataset: Any) -> list[Any]:
    parts = [part for name in dataset.clients for part in dataset.clients[name].roles.values()]
    return [*parts, *dataset.unseen.values()]


def answers(dataset: Any) -> list[str]:
    given: list[str] = []
    for part in examples(dataset):
        given += part.answers
    return given


def check_account(dataset: Any, rows_in_files: int, left: int, per_row: int = 1) -> None:
    """The account adds up, and what it says is used is what the dataset has."""
    counts = dataset.account.counts
    assert counts["rows"] == rows_in_files == counts["used"] + counts["left out"] + counts["merged"]
    assert counts["left out"] == left
    assert counts["used"] * per_row == sum(map(len, examples(dataset)))
    assert str(dataset.account) == dataset.facts["account"]


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_tables(kind: str, tmp_path: Path) -> None:
    name, content, expected, said, left = KINDS[kind]
    dataset = read(folder_of(tmp_path / "data", name, content))
    check_account(dataset, COUNT, left)
    assert set(answers(dataset)) == expected
    assert said in dataset.facts.get("read", "")
    assert said or "is read as" not in dataset.facts.get("read", "")
    assert dataset.kind == "answers"


def test_parquet_has_numbers_and_truth_values(tmp_path: Path) -> None:
    for number, (value, expected) in enumerate(
        [(lambda n: n % 2, {"0", "1"}), (lambda n: n % 2 == 0, {"true", "false"}), (lambda n: float(n % 2), {"0", "1"})]
    ):
        dataset = read(folder_of(tmp_path / str(number), "q.parquet", parquet(rows(answer=value))))
        check_account(dataset, COUNT, 0)
        assert set(answers(dataset)) == expected
    blank = read(folder_of(tmp_path / "blank", "q.parquet", parquet(rows(answer=every("answer", None, 3)))))
    check_account(blank, COUNT, 1)
    assert "no answer: row 4" in str(blank.account)


@pytest.mark.parametrize(("stored", "written"), [(CAFE, NFD), (NFD, CAFE)])
def test_names_of_files_in_another_unicode_form(stored: str, written: str, tmp_path: Path) -> None:
    content = lines(rows(image=lambda n: f"{written}{n}.png"))
    check_account(read(folder_of(tmp_path / "data", "q.jsonl", content, stored)), COUNT, 0)


def test_pictures_of_labels_in_another_unicode_form(tmp_path: Path) -> None:
    entries = [{"image": f"{CAFE}{n}.png", "labels": ["a"]} for n in range(COUNT)]
    place = folder_of(tmp_path / "data", "labels.jsonl", lines(entries), NFD)
    options = {"clients": 2, "image_size": 4, "minimum": 1, "unreadable": 0.0}
    check_account(labelled_pictures(place, **options), COUNT, 0)
    with tarfile.open(place / "images.tar", "w") as archive:
        for file in sorted((place / "images").iterdir()):
            archive.add(file, file.name)
    check_account(labelled_pictures(place, **options), COUNT, 0)


def test_splits_are_read_in_any_case(tmp_path: Path) -> None:
    content = table(rows(split=lambda n: ["Train", "TEST ", "valid"][n % 3]))
    dataset = read(folder_of(tmp_path / "data", "q.csv", content), partition="iid", clients=1)
    assert [len(part) for part in examples(dataset)] == [4, 4, 4]


@pytest.mark.parametrize("reader", [labelled_folders, labelled_pictures])
def test_splits_of_labels_are_read_in_any_case(reader: Callable[..., Any], tmp_path: Path) -> None:
    entries: list[dict[str, Any]] = []
    for n in range(COUNT):
        split = ["Train", "TEST ", "valid"][n % 3]
        entries.append({"image": f"{n}.png", "label": "ab"[n // 3 % 2], "labels": ["a"], "split": split})
    folder = folder_of(tmp_path / "data", "labels.jsonl", lines(entries))
    options: dict[str, Any] = {"shots": 0, "new": "none"} if reader is labelled_folders else {"minimum": 1}
    dataset = reader(folder, "iid", clients=1, image_size=4, **options)
    assert [len(part) for part in examples(dataset)] == [4, 4, 4]


def test_what_is_not_read_is_named_with_what_to_do(tmp_path: Path) -> None:
    place = folder_of(tmp_path / "data", "q.xlsx", b"")
    (place / "other.csv").write_text("a;b\n1;2\n")
    refuses(r"q\.xlsx: a spreadsheet; save it as CSV; other\.csv has the columns a, b, no", recognise, place)


def test_tables_of_competitions_name_pictures_without_ending(tmp_path: Path) -> None:
    place = folder_of(tmp_path / "data", "train.csv", "id,breed\n" + "".join(f"{n},a\n" for n in range(COUNT)))
    (place / "images").rename(place / "train")
    (place / "train.csv").write_text("id,label\n" + "".join(f"{n},{'ab'[n % 2]}\n" for n in range(COUNT)))
    found = recognise(place, 2)[0][0]
    assert found.options["columns"] == {"answer": "label", "image": "id"}
    options = {key: value for key, value in found.options.items() if key not in ("root", "image_size")}
    check_account(read(place, **options), COUNT, 0)


def test_case_is_merged_when_it_is_asked_for(tmp_path: Path) -> None:
    content = lines(rows(answer=every("answer", "YES", 0), client=every("client", "N", 0)))
    dataset = read(folder_of(tmp_path / "data", "q.jsonl", content), fold_case=True)
    assert (set(answers(dataset)), set(dataset.clients)) == (YES_NO, {"n", "s"})


def test_a_picture_under_two_names_is_one(tmp_path: Path) -> None:
    content = lines(rows(image=lambda n: "0.png" if n % 2 else "images/0.png"))
    dataset = read(folder_of(tmp_path / "data", "q.jsonl", content), partition="iid", clients=1)
    assert len({id(part.images) for part in examples(dataset)}) == 1
    assert [len(part) for part in examples(dataset)] in ([12, 0, 0], [0, 0, 12])


def test_control_words_of_a_question_stay_its_text(tmp_path: Path) -> None:
    name, content, *_ = KINDS["control words"]
    asked = [part.questions for part in examples(read(folder_of(tmp_path / "data", name, content)))]
    assert "what is <image> here?" in [text for questions in asked for text in questions]


FAULTS: dict[str, tuple[str, str | bytes, str]] = {
    "a cell too many": (
        "q.csv",
        table(rows()).replace("7.png,", "7.png,x,"),
        r"q\.csv, row 9: expected 4 cells, .*got 5",
    ),
    "a cell too few": (
        "q.tsv",
        table(rows(), "\t").replace("7.png\t", ""),
        r"q\.tsv, row 9: expected 4 cells, .*got 3",
    ),
    "a column twice": ("q.csv", table(rows()).replace("client", "image", 1), "got 'image' twice"),
    "no header": ("q.csv", "", "expected a header"),
    "cut off": ("q.jsonl", lines(rows())[:-20], r"q\.jsonl, row 12: expected one JSON object.*cut off"),
    "a list cut off": ("q.json", json.dumps(rows())[:-20], "row 12: .*cut off"),
    "no answer at all": (
        "q.csv",
        table(rows(answer=lambda n: "")),
        "none of 12 rows can be used: .*'no answer'.*row 2",
    ),
    "no object": ("q.jsonl", lines(rows()) + "3\n", r"row 13: expected an object, got 3"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_name_the_row_as_an_editor_counts(fault: str, tmp_path: Path) -> None:
    name, content, message = FAULTS[fault]
    refuses(message, read, folder_of(tmp_path / "data", name, content))


def test_rows_count_as_an_editor_shows_them(tmp_path: Path) -> None:
    file = tmp_path / "q.csv"
    file.write_text('a,b\n1,"x\ny"\n\n2,z\n')
    assert [row for row, _ in read_records(file).rows] == [2, 5]
    file = tmp_path / "q.jsonl"
    file.write_text('{"a": 1}\n\n{"a": 2}\n')
    assert [row for row, _ in read_records(file).rows] == [1, 3]


def test_one_blank_client_of_many_is_left_out_alone(tmp_path: Path) -> None:
    content = table(rows(client=every("client", "", 3)))
    with pytest.warns(UserWarning, match="1 of 12 rows have no client"):
        dataset = read(folder_of(tmp_path / "data", "q.csv", content))
    check_account(dataset, COUNT, 1)
    assert set(dataset.clients) == {"n", "s"}


def test_a_large_sorted_file_keeps_all_classes(tmp_path: Path) -> None:
    entries = [
        {"image": f"{n % COUNT}.png", "question": "which?", "answer": f"c{n // 1000:02d}"} for n in range(21_000)
    ]
    dataset = read(folder_of(tmp_path / "data", "q.csv", table(entries)), partition="iid", clients=2, max_train=9000)
    assert len(set(answers(dataset))) == 21
    counts = dataset.account.counts
    assert counts["rows"] == 21_000 == counts["used"] + counts["left out"]
    assert counts["used"] == sum(map(len, examples(dataset)))


def test_forms_of_labels(tmp_path: Path) -> None:
    listed = [{"image": f"{n}.png", "label": ["ab"[n % 2]]} for n in range(COUNT)]
    folder = folder_of(tmp_path / "lists", "labels.jsonl", lines(listed))
    options = {"clients": 1, "shots": 0, "new": "none", "image_size": 4, "test_share": 0.4}
    assert labelled_folders(folder, "iid", **options).answers == ("a", "b")
    flags = [{"image": f"{n}.png", "labels": {"a": 1, "b": n % 2 == 0, "c": 0}} for n in range(COUNT)]
    folder = folder_of(tmp_path / "flags", "labels.jsonl", lines(flags))
    dataset = labelled_pictures(folder, clients=2, image_size=4, minimum=1)
    assert dataset.answers == ("a", "b")
    check_account(dataset, COUNT, 0)


def labels_of(place: Path) -> Any:
    entries = [{"image": f"{n}.png", "labels": [["cat", "Cat"], ["cat "], ["dog", 3], []][n % 4]} for n in range(COUNT)]
    entries[5]["labels"], entries[6]["labels"] = None, [" "]
    return labelled_pictures(folder_of(place, "labels.jsonl", lines(entries)), clients=2, image_size=4, minimum=1)


def classes_of(place: Path) -> Any:
    entries = [{"image": f"images\\{n}.png"[7:], "label": [1.0, "b ", "b", None][n % 4]} for n in range(COUNT)]
    folder = folder_of(place, "labels.jsonl", lines(entries))
    return labelled_folders(folder, "iid", clients=1, shots=0, new="none", image_size=4, test_share=0.4)


def texts_of(place: Path) -> Any:
    place.mkdir()
    entries = [{"text": f"text {n}", "labels": [["a"], [" a"], ["b"]][n % 3]} for n in range(COUNT)]
    (place / "texts.jsonl").write_text(lines([*entries, {"text": "x", "labels": None}]))
    return tagged_texts(place, "iid", clients=2)


@pytest.mark.parametrize(
    ("make", "count", "left"), [(labels_of, COUNT, 2), (classes_of, COUNT, 3), (texts_of, COUNT + 1, 1)]
)
def test_the_account_of_every_reader_adds_up(
    make: Callable[[Path], Any], count: int, left: int, tmp_path: Path
) -> None:
    check_account(make(tmp_path / "data"), count, left)


def test_labels_that_are_one_are_merged_and_case_is_reported(tmp_path: Path) -> None:
    dataset = labels_of(tmp_path / "data")
    assert dataset.answers == ("3", "Cat", "cat", "dog")
    assert "labels are read in another spelling, such as 'cat ' as 'cat'" in dataset.facts["read"]
    assert "'cat' (5), 'Cat' (3)" in dataset.facts["read"]
    folded = labelled_pictures(tmp_path / "data", clients=2, image_size=4, minimum=1, fold_case=True)
    assert folded.answers == ("3", "cat", "dog")


def test_classes_that_differ_in_case_alone_are_two(tmp_path: Path) -> None:
    entries = [{"image": f"{n}.png", "label": "aA"[n % 2]} for n in range(COUNT)]
    folder = folder_of(tmp_path / "data", "labels.jsonl", lines(entries))
    options = {"clients": 1, "shots": 0, "new": "none", "image_size": 4, "test_share": 0.4}
    assert labelled_folders(folder, "iid", **options).answers == ("A", "a")


def test_values_and_paths_in_normal_form() -> None:
    given = [" x ", NFD, 2, 2.5, True, None, float("nan"), ["x"]]
    assert [plain_text(value) for value in given] == ["x", CAFE, "2", "2.5", "true", "", "", None]
    paths = ["a\\b.png", "./a/b.png", "file://a/b.png", ".\\a\\b.png", " a/b.png", f"{NFD}.png"]
    assert [plain_path(path) for path in paths] == [*["a/b.png"] * 5, f"{CAFE}.png"]


def captions_of(place: Path, name: str, content: str) -> Any:
    folder = folder_of(place, name, content)
    return coco_captions(folder, captions=name, clients=2, min_count=1, validation=0.1, image_size=4)


def test_captions_a_row_are_merged_by_picture(tmp_path: Path) -> None:
    pairs = [(f"{n % COUNT}.png", "" if n == 5 else f"a thing, number {n}") for n in range(3 * COUNT)]
    flickr8k = table([{"image": name, "caption": caption} for name, caption in pairs])
    bars = "image_name| comment_number| comment\n" + "".join(f"{a}| {n}| {b}\n" for n, (a, b) in enumerate(pairs))
    tokens = "".join(f"{name}#0\t{caption}\n" for name, caption in sorted(pairs))
    for name, content in (("captions.txt", flickr8k), ("results.csv", bars), ("results.token", tokens)):
        dataset = captions_of(tmp_path / name, name, content)
        counts = dataset.account.counts
        assert counts == {"rows": 36, "used": 12, "left out": 1, "merged": 23}
        assert "23 merged (captions of one picture)" in dataset.facts["account"]
        (tmp_path / name / "images").rename(tmp_path / name / "Images")
        found = recognise(tmp_path / name, 2)[0][0]
        assert (found.dataset, found.options["captions"]) == ("coco_captions", name)
        again = coco_captions(**{**found.options, "image_size": 4, "min_count": 1})
        assert again.account is not None
        assert again.account.counts == counts
        assert "licence" not in dataset.facts


def test_objects_of_other_files_have_numbers_of_their_own(tmp_path: Path) -> None:
    for split, count in (("train", 10), ("val", 4)):
        (tmp_path / split).mkdir()
        for n in range(count):
            shade = np.full((4, 4, 3), 20 * n + (5 if split == "val" else 0), np.uint8)
            Image.fromarray(shade).save(tmp_path / split / f"{n:04d}.png")
        content = {
            "images": [{"id": n, "file_name": f"{n:04d}.png"} for n in range(count)],
            "annotations": [{"id": n, "image_id": n, "category_id": 1} for n in range(count - 1)],
            "categories": [{"id": 1, "name": "cat"}],
        }
        (tmp_path / f"instances_{split}.json").write_text(json.dumps(content))
    options = {"train": "train", "test": "val", "clients": 2, "image_size": 4, "categories": "file"}
    dataset = coco(tmp_path, **options)
    check_account(dataset, 14, 2)
    assert "2 left out (no object: " in dataset.facts["account"]
    assert "licence" not in dataset.facts
    (tmp_path / "val" / "0001.png").write_bytes((tmp_path / "train" / "0001.png").read_bytes())
    refuses("got 1 in both, 'coco-1' is one", coco, tmp_path, **options)


def voc_of(place: Path) -> Any:
    (place / "VOC1" / "ImageSets" / "Main").mkdir(parents=True)
    (place / "VOC1" / "Annotations").mkdir()
    (place / "VOC1" / "JPEGImages").mkdir()
    for n in range(COUNT):
        (place / "VOC1" / "Annotations" / f"{n}.xml").write_text(
            f"<annotation><filename>{n}.jpg</filename><object><name>{['cat', 'dog'][n % 2]}</name></object>"
            "</annotation>"
        )
        Image.fromarray(np.full((4, 4, 3), 20 * n, np.uint8)).save(place / "VOC1" / "JPEGImages" / f"{n}.jpg")
    (place / "VOC1" / "ImageSets" / "Main" / "own.txt").write_text("".join(f"{n}\n" for n in range(COUNT)))
    return voc(place, train=["VOC1:own"], test=[], clients=2, image_size=4, minimum=1, max_train=3)


def vqa_of(place: Path) -> Any:
    for split, count in (("train2014", 8), ("val2014", 4)):
        (place / split).mkdir(parents=True)
        questions = [{"question_id": n, "image_id": n, "question": "what?"} for n in range(count)]
        given = ["rare" if n == 5 else "ab"[n % 2] for n in range(count)]
        answers = [
            {"question_id": n, "image_id": n, "answer_type": "other", "multiple_choice_answer": answer,
             "answers": [{"answer": answer}] * 10} for n, answer in enumerate(given)
        ]  # fmt: skip
        (place / f"v2_OpenEnded_mscoco_{split}_questions.json").write_text(json.dumps({"questions": questions}))
        (place / f"v2_mscoco_{split}_annotations.json").write_text(json.dumps({"annotations": answers}))
        for n in range(count):
            Image.fromarray(np.full((4, 4, 3), 20 * n, np.uint8)).save(place / split / f"COCO_{split}_{n:012d}.jpg")
    folders = (str(place / "train2014"), str(place / "val2014"))
    return vqa_v2(place, images=folders, clients=1, image_size=4, min_answers=2, validation=0.3)


@pytest.mark.parametrize(("make", "left"), [(voc_of, 4), (vqa_of, 1)])
def test_accounts_of_other_files_in_published_layouts(make: Callable[[Path], Any], left: int, tmp_path: Path) -> None:
    dataset = make(tmp_path)
    check_account(dataset, COUNT, left)
    assert "licence" not in dataset.facts

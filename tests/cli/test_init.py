"""Recipes for folders of one's own: every form is recognised, and the recipe that is written runs."""

import csv
import json
import math
import shutil
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from command_line import Capture, Patch, confed, refusal
from confed.datasets.chat_records import chat_records
from confed.recipes.recipe import load_recipe
from confed.runs.build import prepare

RGB = {"red": (220, 40, 40), "blue": (40, 60, 220), "green": (40, 200, 60)}
QUICK = [
    "run.rounds=1", "run.workers=1", "run.gallery=0", "run.controls=none", "run.evaluate_every=0", "local.epochs=1",
    'study.methods=["fedavg"]',
]  # fmt: skip


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


def picture(path: Path, colour: str, number: int) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(number).integers(0, 30, (20, 16, 3))
    Image.fromarray((np.array(RGB[colour]) + noise).clip(0, 255).astype(np.uint8)).save(path)
    return path.name


def rows(folder: Path, count: int = 24) -> list[dict[str, str]]:
    colours = [list(RGB)[number % 3] for number in range(count)]
    return [
        {"file": picture(folder / "images" / f"{number}.png", colour, number), "query": "which colour is it?",
         "label": colour, "hospital": "north" if number % 2 else "south"}
        for number, colour in enumerate(colours)
    ]  # fmt: skip


def lines(file: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    file.write_text("\n".join(json.dumps(entry) for entry in entries), encoding="utf-8")


def classes(folder: Path) -> None:
    for number in range(36):
        colour = list(RGB)[number % 3]
        picture(folder / colour / f"{number}.png", colour, number)
    (folder / "notes.txt").write_text("mine")


def domains(folder: Path) -> None:
    for number in range(48):
        colour = list(RGB)[number % 2]
        picture(folder / f"style {number % 4 // 2}" / colour / f"{number}.png", colour, number)


def domains_with_classes_of_their_own(folder: Path) -> None:
    for place, colours in (("north", ["red", "blue"]), ("south", ["green", "blue"])):
        for number in range(24):
            picture(folder / place / colours[number % 2] / f"{number}.png", colours[number % 2], number)


def images_in_classes(folder: Path) -> None:
    for number in range(36):
        colour = list(RGB)[number % 3]
        picture(folder / colour / "images" / f"{number}.png", colour, number)


def split_classes(folder: Path) -> None:
    for number in range(48):
        colour = list(RGB)[number % 3]
        picture(folder / ("train", "test", "train", "val")[number % 4] / colour / f"{number}.png", colour, number)


def one_label(folder: Path) -> None:
    lines(folder / "labels.jsonl", [{"image": row["file"], "label": row["label"]} for row in rows(folder, 36)])


def several_labels(folder: Path) -> None:
    entries = [
        {"image": row["file"], "labels": [row["label"], "square"], "user": row["hospital"]} for row in rows(folder)
    ]
    lines(folder / "labels.jsonl", entries)


def chat_lines(folder: Path) -> None:
    lines(
        folder / "qa.jsonl", [{"image": r["file"], "question": r["query"], "answer": r["label"]} for r in rows(folder)]
    )


def json_list(folder: Path) -> None:
    entries = [{"img": row["file"], "question": row["query"], "answer": row["label"]} for row in rows(folder)]
    (folder / "qa.json").write_text(json.dumps(entries))
    (folder / "settings.json").write_text("{}")


def write_table(file: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, entries[0])
        writer.writeheader()
        writer.writerows(entries)


def table(folder: Path) -> None:
    write_table(folder / "questions.csv", rows(folder))


def table_per_client(folder: Path) -> None:
    for place, colours in (("north", ["red", "blue"]), ("south", ["green", "blue"])):
        names = [picture(folder / place / f"{number}.png", colours[number % 2], number) for number in range(20)]
        entries = [{"image": name, "label": colours[number % 2]} for number, name in enumerate(names)]
        write_table(folder / place / "labels.csv", entries)


def table_per_split(folder: Path) -> None:
    for split, entries in (("train", rows(folder / "train")), ("test", rows(folder / "test", 12))):
        table = [{"file_name": f"images/{row['file']}", "label": row["label"]} for row in entries]
        write_table(folder / split / "metadata.csv", table)


def labels_in_cells(folder: Path) -> None:
    table = [
        {"image": row["file"], "labels": f"{row['label']}; square", "user": row["hospital"]} for row in rows(folder)
    ]
    write_table(folder / "labels.csv", table)


def labels_per_client(folder: Path) -> None:
    for place, colours in (("north", ["red", "blue"]), ("south", ["green", "blue"])):
        names = [picture(folder / place / "images" / f"{k}.png", colours[k % 2], k) for k in range(20)]
        table = [{"image": name, "labels": f"{colours[number % 2]};square"} for number, name in enumerate(names)]
        write_table(folder / place / "labels.csv", table)


def labels_beside_pictures(folder: Path) -> None:
    several_labels(folder)
    for file in (folder / "images").iterdir():
        file.rename(folder / file.name)
    (folder / "images").rmdir()


def captions_beside_pictures(folder: Path) -> None:
    names = [picture(folder / f"{number}.png", list(RGB)[number % 3], number) for number in range(24)]
    entries = [{"file_name": name, "text": f"a {list(RGB)[k % 3]} square"} for k, name in enumerate(names)]
    lines(folder / "metadata.jsonl", entries)


def parquet(folder: Path) -> None:
    arrow, library = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    library.write_table(arrow.Table.from_pylist(rows(folder)), folder / "questions.parquet")


def labelled_table(folder: Path) -> None:
    write_table(folder / "labels.csv", [{"filename": row["file"], "class": row["label"]} for row in rows(folder)])


def conversations(folder: Path) -> None:
    entries = [
        {"images": [row["file"]], "client": row["hospital"], "messages": [
            {"role": "user", "content": "<image> which colour?"}, {"role": "assistant", "content": row["label"]},
            {"role": "user", "content": "sure?"}, {"role": "assistant", "content": f"yes, {row['label']}"}]}
        for row in rows(folder, 8)
    ]  # fmt: skip
    lines(folder / "talks.jsonl", entries)


def coco(folder: Path) -> None:
    found = rows(folder)
    (folder / "images").rename(folder / "train2017")
    names = list(RGB)
    content = {
        "images": [{"id": number, "file_name": row["file"]} for number, row in enumerate(found)],
        "annotations": [
            {"id": number, "image_id": number, "category_id": names.index(row["label"]) + 1, "iscrowd": 0, "area": 4.0,
             "bbox": [0, 0, 2, 2]}
            for number, row in enumerate(found)
        ],
        "categories": [{"id": number + 1, "name": name} for number, name in enumerate(names)],
    }  # fmt: skip
    (folder / "annotations").mkdir()
    (folder / "annotations" / "instances_train2017.json").write_text(json.dumps(content))


def captions(folder: Path) -> None:
    found = rows(folder)
    content = {
        "images": [{"id": number, "file_name": row["file"]} for number, row in enumerate(found)],
        "annotations": [
            {"id": 5 * number + again, "image_id": number, "caption": f"a {row['label']} square"}
            for number, row in enumerate(found)
            for again in range(2)
        ],
    }
    (folder / "captions_mine.json").write_text(json.dumps(content))


def vqa(folder: Path) -> None:
    for split in ("train2014", "val2014"):
        asked, answered = [], []
        for number in range(24):
            colour = list(RGB)[number % 3]
            picture(folder / split / f"COCO_{split}_{number:012d}.jpg", colour, number)
            keys = {"question_id": number * 1000, "image_id": number}
            asked.append({**keys, "question": "What colour is it?"})
            people = [{"answer": colour, "answer_id": n + 1, "answer_confidence": "yes"} for n in range(10)]
            answered.append({**keys, "question_type": "what", "answer_type": "other",
                             "multiple_choice_answer": colour, "answers": people})  # fmt: skip
        head = {"data_type": "mscoco", "data_subtype": split}
        questions = folder / f"v2_OpenEnded_mscoco_{split}_questions.json"
        questions.write_text(json.dumps({**head, "questions": asked}))
        (folder / f"v2_mscoco_{split}_annotations.json").write_text(json.dumps({**head, "annotations": answered}))


def saved(folder: Path) -> None:
    library = pytest.importorskip("datasets")
    found = rows(folder)
    columns = {
        "picture": [str(folder / "images" / row["file"]) for row in found],
        "query": [row["query"] for row in found],
        "label": [row["label"] for row in found],
    }
    features = library.Features({"picture": library.Image(), "query": library.Value("string"),
                                 "label": library.Value("string")})  # fmt: skip
    written = library.Dataset.from_dict(columns, features=features)
    library.DatasetDict({"train": written}).save_to_disk(str(folder))
    shutil.rmtree(folder / "images")


def texts(folder: Path) -> None:
    lines(
        folder / "texts.jsonl",
        [{"text": f"{row['label']} thing", "labels": [row["label"]]} for row in rows(folder, 40)],
    )
    shutil.rmtree(folder / "images")


FORMS: Sequence[tuple[Callable[[Path], None], str, str, Mapping[str, Any]]] = (
    (classes, "classes", "labelled_folders", {"clients": 3}),
    (domains, "classes", "labelled_folders", {"partition": "domain", "domains": True}),
    (domains_with_classes_of_their_own, "classes", "labelled_folders", {"partition": "domain", "domains": True}),
    (images_in_classes, "classes", "labelled_folders", {"clients": 3}),
    (split_classes, "classes", "labelled_folders", {}),
    (one_label, "classes", "labelled_folders", {"partition": "iid"}),
    (several_labels, "labels", "labelled_pictures", {}),
    (chat_lines, "questions", "chat_records", {"partition": "iid"}),
    (json_list, "questions", "chat_records", {"columns": {"image": "img"}, "files": ["qa.json"]}),
    (table, "questions", "chat_records", {"partition": "client", "columns": {
        "image": "file", "question": "query", "answer": "label", "client": "hospital"}}),
    (parquet, "questions", "chat_records", {"partition": "client"}),
    (labelled_table, "questions", "chat_records", {"question": "what is this?"}),
    (table_per_client, "questions", "chat_records", {"partition": "client", "columns": {"answer": "label"}}),
    (table_per_split, "questions", "chat_records", {"columns": {"image": "file_name", "answer": "label"}}),
    (labels_in_cells, "labels", "labelled_pictures", {"partition": "user"}),
    (labels_per_client, "labels", "labelled_pictures", {"partition": "user"}),
    (labels_beside_pictures, "labels", "labelled_pictures", {"partition": "user"}),
    (captions_beside_pictures, "captions", "coco_captions", {"captions": "metadata.jsonl"}),
    (conversations, "conversations", "chat_records", {"partition": "client"}),
    (coco, "objects", "coco", {"train": "train2017", "categories": "file"}),
    (captions, "captions", "coco_captions", {"captions": "captions_mine.json"}),
    (vqa, "vqa", "vqa_v2", {"min_answers": 1}),
    (saved, "questions", "hub", {"columns": {"image": "picture", "question": "query", "answer": "label"}}),
    (texts, "texts", "tagged_texts", {}),
)  # fmt: skip

RUN = list({(dataset, form): make for make, form, dataset, _ in reversed(FORMS)}.values())
"""The first form of each dataset and kind is run; of the others the same model and data are made, up to round 1."""


@pytest.mark.parametrize(("make", "form", "dataset", "options"), FORMS, ids=[make.__name__ for make, *_ in FORMS])
def test_what_is_written_runs(
    make: Callable[[Path], None], form: str, dataset: str, options: Mapping[str, Any], tmp_path: Path,
    capfd: Capture,
) -> None:  # fmt: skip
    folder = tmp_path / "mine"
    folder.mkdir()
    make(folder)
    assert confed("init", folder, "--json") == 0, capfd.readouterr().err
    said = json.loads(capfd.readouterr().out)
    assert (said["form"], said["dataset"]) == (form, dataset)
    written = tomllib.loads((tmp_path / "mine.toml").read_text(encoding="utf-8"))
    assert {key: written["data"].get(key) for key in options} == dict(options)
    assert said["left"] == {"classes": ["notes.txt"], "json_list": ["settings.json"]}.get(make.__name__, [])
    if make not in RUN:
        _, data = prepare(load_recipe("mine.toml", QUICK).method("fedavg"))
        assert all(len(client.tables[0]) for client in data.clients.values())
        return
    assert confed("run", "mine.toml", *QUICK, "--out", tmp_path / "run", "--json") == 0, capfd.readouterr().err
    (run,) = json.loads(capfd.readouterr().out)["runs"]
    assert not run.get("errors")
    assert len(run["clients"]) >= 1


def test_a_folder_per_client_keeps_its_own_rows_and_pictures(tmp_path: Path):
    table_per_client(tmp_path)
    data = chat_records(tmp_path, columns={"answer": "label"}, question="what is this?", image_size=16)
    colours = {"north": {"red", "blue"}, "south": {"green", "blue"}}
    assert {name: {*client.train.answers} for name, client in data.clients.items()} == colours
    for client in data.clients.values():  # both folders have a picture 0.png
        for index, answer in zip(client.train.image_index, client.train.answers, strict=True):
            brightest = np.asarray(client.train.images[int(index)]).reshape(-1, 3).mean(0).argmax()
            assert ("red", "green", "blue")[brightest] == answer


def test_a_folder_per_split_gives_the_split(tmp_path: Path):
    table_per_split(tmp_path)
    columns = {"image": "file_name", "answer": "label"}
    data = chat_records(tmp_path, columns=columns, question="what is this?", clients=1, image_size=16)
    (client,) = data.clients.values()
    assert len(client.test) == 12


def test_what_is_seen_and_left_is_said(tmp_path: Path, capfd: Capture):
    classes(tmp_path / "mine")
    (tmp_path / "mine" / "red" / "labels.xlsx").touch()
    assert confed("init", "mine", "--clients", "3", "--rounds", "2") == 0
    out = capfd.readouterr().out
    for text in (
        "36 pictures of 3 classes, blue 12, green 12, red 12",
        "not read: notes.txt",
        "confed run mine.toml",
        "not read: red/labels.xlsx",
    ):
        assert text in out
    text = (tmp_path / "mine.toml").read_text(encoding="utf-8")
    assert "# number of clients" in text
    assert tomllib.loads(text)["data"]["clients"] == 3
    assert "mine.toml exists already" in refusal(capfd, "init", "mine")


def test_folders_without_readable_data_are_refused(tmp_path: Path, capfd: Capture):
    (tmp_path / "empty").mkdir()
    chat_lines(tmp_path / "lost")
    shutil.rmtree(tmp_path / "lost" / "images")
    coco(tmp_path / "coco")
    shutil.rmtree(tmp_path / "coco" / "train2017")
    for folder, message in (
        ("nowhere", "nowhere: expected a folder with data, got none"),
        ("empty", "is empty"),
        ("lost", "expected pictures below lost or its folder images/, got none; the first is '0.png'"),
        ("coco", "expected the pictures of the split 'train2017'"),
    ):
        assert message in refusal(capfd, "init", folder)
    assert "confed init FOLDER" in refusal(capfd, "init")
    assert not list(tmp_path.glob("*.toml"))


def initialised(folder: Path, capfd: Capture) -> tuple[dict[str, Any], dict[str, Any]]:
    """What init prints for a folder, and the section of data that it writes."""
    assert confed("init", folder, "--json") == 0, capfd.readouterr().err
    said = json.loads(capfd.readouterr().out)
    return said, tomllib.loads(Path(said["recipe"]).read_text(encoding="utf-8"))["data"]


def with_cells(folder: Path, **columns: Sequence[Any]) -> None:
    """Questions with further columns; a short one begins anew."""
    found = [
        {"image": row["file"], "question": row["query"], "answer": row["label"]}
        | {name: cells[number % len(cells)] for name, cells in columns.items()}
        for number, row in enumerate(rows(folder))
    ]
    lines(folder / "qa.jsonl", found)


OWNERS: Mapping[str, tuple[Mapping[str, Sequence[Any]], str, str]] = {
    "blank first": ({"client": ["", *"abababa"]}, "client", "3 of 24 rows have no client and are left out"),
    "null": ({"hospital": [None, *"abababa"]}, "hospital", "3 of 24 rows have no hospital and are left out"),
    "sender_id": ({"sender_id": [11, 12, 13]}, "sender_id", "one client per sender_id: 11 8, 12 8, 13 8"),
    "near": ({"Site": ["Oslo", "oslo ", "Rom", "Oslo"]}, "Site", "'Oslo' (12), 'oslo' (6)"),
    "second": ({"hospital": ["one"], "patient": ["p", "q"]}, "patient", "the column 'hospital' is not taken"),
    "floats": ({"department": [1.0, 2.0, math.nan]}, "department", "one client per department: 1 8, 2 8"),
}


@pytest.mark.parametrize("kind", OWNERS)
def test_clients_are_those_of_the_column_and_never_invented(kind: str, tmp_path: Path, capfd: Capture):
    columns, name, text = OWNERS[kind]
    with_cells(tmp_path / "mine", **columns)
    said, data = initialised(tmp_path / "mine", capfd)
    assert data["partition"] == "client"
    assert data.get("columns", {}).get("client", "client") == name
    assert "clients" not in data
    assert text in "\n".join(said["saw"])
    assert said["read"].startswith(("2 clients", "3 clients"))


def test_a_column_that_is_no_owners_is_named(tmp_path: Path, capfd: Capture):
    with_cells(tmp_path / "mine", visit_id=[*range(24)])
    said, data = initialised(tmp_path / "mine", capfd)
    assert data["partition"] == "iid"
    line = "the column 'visit_id' is not taken as that of the clients; data.columns.client = 'visit_id' does so"
    assert line in said["saw"]


def test_blank_cells_of_a_table_leave_its_clients(tmp_path: Path, capfd: Capture):
    found = rows(tmp_path / "mine")
    found[0]["hospital"], found[0]["label"] = "", "red"
    write_table(tmp_path / "mine" / "questions.csv", found)
    said, data = initialised(tmp_path / "mine", capfd)
    assert (data["partition"], data["columns"]["client"]) == ("client", "hospital")
    assert "1 of 24 rows have no hospital and are left out" in said["saw"]
    assert said["read"].startswith("2 clients")


@pytest.mark.parametrize(("file", "entry", "partition"), [
    ("labels.jsonl", {"labels": ["a"]}, "user"), ("labels.jsonl", {"label": "red"}, "domain"),
    ("texts.jsonl", {"labels": ["a"], "text": "rain"}, "user"),
])  # fmt: skip
def test_labels_have_the_clients_of_their_column(
    file: str, entry: dict[str, Any], partition: str,
    tmp_path: Path, capfd: Capture,
) -> None:  # fmt: skip
    entries: list[dict[str, Any]] = []
    for number, row in enumerate(rows(tmp_path / "mine", 36)):
        own = {**entry, "sender": ["x", "y", ""][number // 3 % 3]}
        own |= {"label": row["label"]} if "label" in entry else {}
        entries.append({**own, "id": str(number)} if file == "texts.jsonl" else {**own, "image": row["file"]})
    lines(tmp_path / "mine" / file, entries)
    said, data = initialised(tmp_path / "mine", capfd)
    assert (data["partition"], data[f"{partition}_key"], "clients" in data) == (partition, "sender", False)
    assert "12 of 36 rows have no sender and are left out" in said["saw"]
    assert said["read"].startswith("2 clients")


def test_what_the_reader_refuses_is_not_proposed(tmp_path: Path, capfd: Capture):
    with_cells(tmp_path / "mine", id=["same"])
    said = refusal(capfd, "init", "mine")
    assert "its reader 'chat_records' refuses it, so that no recipe is written" in said
    assert "expected an id of its own, got 'same', that of" in said
    assert not (tmp_path / "mine.toml").exists()

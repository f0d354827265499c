"""Every reader of files says what became of each row, and the account adds up: rows = used + left out + merged."""

from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from confed.datasets.gqa_scenes.places import FORMAT, digest
from confed.registry import datasets
from reader_folders import flair_folder, picture, write

ELSEWHERE = {
    "chat_records", "coco", "coco_captions", "dicom_folders", "flickr30k", "labelled_folders", "labelled_pictures",
    "nifti_slices", "path_vqa", "sensor_series", "slake", "tagged_texts", "voc", "vqa_rad",
}  # fmt: skip
"""Readers whose accounts are checked in the tests of the intake, or beside the reader."""
NO_ROWS = {"caption_corpus", "digits"}
"""Readers of shards and of recordings, from which examples are drawn: their facts count what there is."""


def easy_vqa(root: Path) -> dict[str, Any]:
    for role, count in (("train", 6), ("test", 3)):
        rows: list[tuple[str, str, int]] = []
        for number in range(count):
            picture(root / role / "images" / f"{number}.png", number)
            color = ("red", "blue", "teal")[number % 3]
            rows += [("what color is the shape?", color, number), ("what shape is present?", "circle", number)]
        write(root / role / "questions.json", rows)
    (root / "answers.txt").write_text("red\nblue\nteal\ncircle")
    return {"unseen": ("teal",), "validation": 0.0}


def ucm(root: Path) -> dict[str, Any]:
    labels: list[dict[str, Any]] = []
    for number in range(12):
        name, scene = f"{number}.png", ("water", "nature")[number % 2]
        picture(root / "images" / name, number)
        split = {0: "val", 1: "test"}.get(number % 6 // 2, "train")
        labels.append({"image": name, "land_use": scene, "scene": scene, "labels": ["trees"], "split": split})
    write(root / "labels.jsonl", labels, lines=True)
    questions = [
        {"question_id": n, "image": row["image"], "question": "trees?", "answer": "yes", "type": "presence"}
        for n, row in enumerate(labels)
    ]
    write(root / "vqa_derived.jsonl", questions, lines=True)
    return {"unseen": ("water",), "image_size": 4}


def domainnet(root: Path) -> dict[str, Any]:
    for domain in ("real", "sketch"):
        for role in ("train", "test"):
            names = [f"{domain}/{'abc'[n % 3]}/{role}{n}.png" for n in range(9)]
            for name in names:
                picture(root / name)
            (root / f"{domain}_{role}.txt").write_text("".join(f"{x} {'abc'.index(x.split('/')[1])}\n" for x in names))
    return {"classes": 2, "domains": ("real", "sketch"), "unseen": ("sketch",), "image_size": 4, "max_train": 4}


def flair(root: Path) -> dict[str, Any]:
    three = [(["animal"], ["dog"])] * 3
    flair_folder(root, {"a": ("train", three), "b": ("train", three), "c": ("test", three)})
    return {"image_size": 4, "max_train": 2}


def vqa_v2(root: Path) -> dict[str, Any]:
    for split, count in (("train2014", 8), ("val2014", 4)):
        keys = [{"question_id": n + 100 * (count == 4), "image_id": n} for n in range(count)]
        answers: list[dict[str, Any]] = []
        for n, key in enumerate(keys):
            answer = "rare" if n == 5 else "ab"[n % 2] * 2
            given = {"multiple_choice_answer": answer, "answers": [{"answer": answer}] * 10, "answer_type": "other"}
            answers.append({**key, **given})
            picture(root / split / f"COCO_{split}_{n:012d}.jpg", n)
        asked = [{**key, "question": "what?"} for key in keys]
        write(root / f"v2_OpenEnded_mscoco_{split}_questions.json", {"questions": asked})
        write(root / f"v2_mscoco_{split}_annotations.json", {"annotations": answers})
    folders = (str(root / "train2014"), str(root / "val2014"))
    return {"images": folders, "clients": 1, "image_size": 4, "min_answers": 2, "validation": 0.3}


def aqua(root: Path) -> dict[str, Any]:
    for split in ("train", "val", "test"):
        rows: list[dict[str, Any]] = []
        for n in range(6):
            picture(root / "aqua" / "images" / f"{split}{n}.jpg", n)
            answer = ("red", "red", "blue")[n % 3]
            rows.append({"image": f"{split}{n}.jpg", "question": "what?", "answer": answer,
                         "need_external_knowledge": False})  # fmt: skip
        write(root / "aqua" / f"{split}.json", rows)
    return {"clients": ("art",), "answers": 1, "max_train": 3, "image_size": 4}


def clove(setting: str, stage: str, client: str) -> Callable[[Path], dict[str, Any]]:
    def make(root: Path) -> dict[str, Any]:
        for split in ("train", "val"):
            rows: list[dict[str, Any]] = []
            for n in range(12):
                picture(root / "gqa" / "images" / f"{n}.jpg", n)
                answer = ("red", "red", "blue")[n % 3]
                rows.append({"question": "what?", "question_id": f"{split}{n}", "stage": stage, "answer": answer,
                             "answers": [answer] * 10, "image_id": str(n), "raw_question_type": {}})  # fmt: skip
            write(root / f"clove/json/{setting}/fcl_mmf_{stage}_{split}.json", rows)
        return {"clients": (client,), "answers": 1, "max_test": 2, "validation": 0.3, "image_size": 4}

    return make


def snli_ve(root: Path) -> dict[str, Any]:
    for split in ("train", "dev", "test"):
        rows: list[dict[str, Any]] = []
        for n in range(8):
            picture(root / "flickr30k" / "flickr30k_images" / f"{n}.jpg", n)
            label = ("entailment", "contradiction", "neutral", "-")[n % 4]
            rows.append({"gold_label": label, "pairID": f"{split}{n}", "Flickr30K_ID": str(n), "sentence2": "a dog"})
        write(root / "snli_ve" / f"snli_ve_{split}.jsonl", rows, lines=True)
    return {"clients": ("snli_ve",), "shots": 1, "image_size": 4}


def gqa_scenes(root: Path) -> dict[str, Any]:
    write(root / "answers.json", ["red", "blue"])
    for scene, role in (("home", "train"), ("home", "test"), ("sports", "test")):
        rows: list[dict[str, str]] = []
        for n in range(6):
            name = f"{scene}{role}{n}"
            picture(root / "images" / f"{name}.jpg", n)
            answer = ("red", "blue", "other")[n % 3]
            rows.append({"question_id": name, "image_id": name, "question": "what?", "answer": answer, "type": "query"})
        write(root / scene / f"{role}.jsonl", rows, lines=True)
    files = {x.relative_to(root).as_posix(): digest(x) for x in root.rglob("*.json*")}
    manifest = {"format": FORMAT, "files": files, "images": "images", "options": {"threshold": 0.5}}
    write(root / "manifest.json", manifest)
    return {"clients": ("home",), "unseen": ("sports",), "validation": 0.0, "max_test": 4, "image_size": 4}


READERS: dict[str, tuple[Callable[[Path], dict[str, Any]], int, dict[str, int]]] = {
    "easy_vqa": (easy_vqa, 18, {"beyond max_train or max_test, or about training pictures of unseen colours": 4}),
    "ucm_vqa": (ucm, 12, {"beyond max_train or max_test, or about training pictures of unseen scenes": 2}),
    "ucm_labels": (ucm, 12, {"beyond max_train, training pictures of unseen scenes, or of no client that trains": 2}),
    "domainnet": (domainnet, 36, {"another class": 12,
                                  "beyond max_train or max_test, or training pictures of unseen domains": 7}),
    "flair": (flair, 9, {"beyond max_train": 2}),
    "vqa_v2": (vqa_v2, 12, {"answer outside the vocabulary": 1}),
    "feddat_domain": (aqua, 18, {"answer outside the client's answer set, or not drawn": 7}),
    "feddat_function": (clove("function", "object", "object"), 24,
                        {"answer outside the client's answer set, or not drawn": 14}),
    "feddat_scene": (clove("scene", "f#Outdoors", "Outdoors"), 24,
                     {"answer outside the client's answer set, or not drawn": 14}),
    "feddat_task": (snli_ve, 24, {"annotators do not agree": 6,
                                  "answer outside the client's answer set, or not drawn": 3}),
    "gqa_scenes": (gqa_scenes, 18, {"answer outside the vocabulary": 2, "beyond max_train or max_test": 4}),
}  # fmt: skip
"""Reader -> what makes a folder and gives options, the rows in its files, and how many are left out why."""


@pytest.mark.parametrize("name", READERS)
def test_the_account_adds_up(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("confed.datasets.vqa_v2.PUBLISHED", (8, 4))
    make, rows, left = READERS[name]
    dataset: Any = datasets[name](tmp_path, **make(tmp_path))
    counts = dataset.account.counts
    assert {why: len(places) for why, places in dataset.account.left.items()} == left
    assert counts["rows"] == rows == counts["used"] + counts["left out"] + counts["merged"]
    names: list[str] = []
    for examples in [
        *(e for split in dataset.clients.values() for e in split.roles.values()),
        *dataset.unseen.values(),
    ]:
        names += list(examples.names)
    assert len(set(names)) == counts["used"]
    assert dataset.facts["account"] == str(dataset.account)


def test_a_new_reader_has_an_account_that_is_checked() -> None:
    names = [name for name in datasets.names() if not datasets.is_own(name)]  # other tests may have some of their own
    readers = {name for name in names if "root" in signature(datasets[name]).parameters}
    assert readers == {*READERS} | ELSEWHERE | NO_ROWS

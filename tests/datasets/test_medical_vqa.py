"""Medical questions in their published layouts: VQA-RAD, SLAKE and PathVQA, made small by code."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from confed.datasets.medical_questions import path_vqa, slake, vqa_rad
from reader_folders import write
from refusals import refuses


def png(number: int) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.full((6, 6, 3), 9 * number, np.uint8)).save(stream, "PNG")
    return stream.getvalue()


def sizes(dataset: Any) -> dict[str, list[int]]:
    return {name: [len(part) for part in split.roles.values()] for name, split in dataset.clients.items()}


def check(dataset: Any, rows: int, left: int) -> None:
    counts = dataset.account.counts
    assert (counts["rows"], counts["left out"]) == (rows, left)
    assert counts["used"] == rows - left == sum(map(sum, sizes(dataset).values()))
    assert "licence" not in dataset.facts


def rad(root: Path) -> list[dict[str, Any]]:
    for number in range(8):
        write(root / "VQA_RAD Image Folder" / f"synpic{number}.jpg", png(number))
    return [
        {"qid": str(n), "image_name": f"synpic{n % 8}.jpg", "image_organ": ["HEAD", "CHEST"][n % 2],
         "question": f"q{n}",
         "answer": [1, "Yes", "no"][n % 3], "answer_type": ["OPEN", "CLOSED "][n % 2],
         "phrase_type": ["freeform", "para", "test_freeform"][n // 8]} for n in range(24)
    ]  # fmt: skip


def test_vqa_rad_has_a_client_per_organ_and_its_published_test(tmp_path: Path) -> None:
    entries = rad(tmp_path)
    entries[3]["answer"] = ""
    write(tmp_path / "VQA_RAD Dataset Public.json", json.dumps(entries))
    dataset = vqa_rad(tmp_path, image_size=6, validation=0)
    check(dataset, 24, 1)
    assert sizes(dataset) == {"chest": [7, 0, 4], "head": [8, 0, 4]}
    assert dataset.clients["head"].train.types[0] == "open"
    assert dataset.answers == ("1", "Yes", "no")
    assert dataset.facts["pictures seen in training"] == "8 of 8 test pictures"
    entries[5].pop("qid")
    write(tmp_path / "VQA_RAD Dataset Public.json", json.dumps(entries))
    refuses("row 6: expected an object with qid, image_name, question, phrase_type", vqa_rad, tmp_path)
    refuses(r"expected 'VQA_RAD Dataset Public\.json' in", vqa_rad, tmp_path / "none")


def test_slake_is_read_in_one_language_and_its_published_splits(tmp_path: Path) -> None:
    for name, first in (("train", 0), ("validate", 8), ("test", 12)):
        entries: list[dict[str, Any]] = []
        for n in range(first, first + (8 if name == "train" else 4)):
            write(tmp_path / "imgs" / f"xmlab{n}" / "source.jpg", png(n))
            for language in ("en", "zh"):
                entries.append(
                    {"qid": n, "img_id": n, "img_name": f"xmlab{n}/source.jpg", "question": f"q{n}", "answer": "CT",
                     "q_lang": language, "modality": ["CT", "MRI"][n % 2], "location": "Lung", "answer_type": "OPEN"}
                )  # fmt: skip
        write(tmp_path / f"{name}.json", json.dumps(entries))
    dataset = slake(tmp_path, image_size=6)
    check(dataset, 32, 16)
    assert sizes(dataset) == {"CT": [4, 2, 2], "MRI": [4, 2, 2]}
    assert "16 left out (another language than en" in dataset.facts["account"]
    assert sizes(slake(tmp_path, language="zh", place="location", image_size=6)) == {"Lung": [8, 4, 4]}
    (tmp_path / "validate.json").unlink()
    refuses(r"Questions: expected .*validate\.json or", slake, tmp_path)


def test_path_vqa_is_read_from_the_hubs_files_not_pickles(tmp_path: Path) -> None:
    arrow: Any = pytest.importorskip("pyarrow")
    library: Any = pytest.importorskip("pyarrow.parquet")
    write(tmp_path / "pickled" / "qas" / "train" / "train_qa.pkl", b"")
    refuses(r"train_qa\.pkl is of pickled objects, which could run code", path_vqa, tmp_path / "pickled")
    for name, first, count in (("train", 0, 12), ("validation", 12, 4), ("test", 16, 4)):
        rows = [{"image": {"bytes": png(n), "path": ""}, "question": f"q{n}", "answer": "yes" if n % 2 else "cells"}
                for n in range(first, first + count)]  # fmt: skip
        (tmp_path / "data").mkdir(exist_ok=True)
        library.write_table(arrow.Table.from_pylist(rows), tmp_path / "data" / f"{name}-00000-of-00001.parquet")
        short = {"validation": "val"}.get(name, name)
        for row in rows:
            number = int(row["question"][1:])
            write(tmp_path / "first" / "images" / short / f"{short}_{number}.jpg", png(number))
        lines = [{**row, "image": f"{short}_{row['question'][1:]}"} for row in rows]
        write(tmp_path / "first" / "qas" / f"{short}.jsonl", "\n".join(map(json.dumps, lines)))
    for root in (tmp_path, tmp_path / "first"):
        dataset = path_vqa(root, clients=2, image_size=6)
        check(dataset, 20, 0)
        assert sizes(dataset) == {"client-00": [6, 2, 2], "client-01": [6, 2, 2]}
        assert set(dataset.clients["client-00"].train.types) <= {"open", "closed"}

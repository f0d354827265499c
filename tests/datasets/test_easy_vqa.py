"""easy-VQA: both layouts, colours derived from answers, the published data where it is there."""

import gzip
import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from confed.datasets.easy_vqa import COLORS, SHAPES, easy_vqa, foreground, question_type, settle_colors
from confed.registry import datasets
from refusals import refuses
from repository import ROOT

REAL = Path(os.environ.get("CONFED_DATA", ROOT.parent / "shared" / "data")) / "easy_vqa"
needs_data = pytest.mark.skipif(not (REAL / "images.npz").is_file(), reason="the packed easy-VQA is not here")
ANSWERS = sorted((*COLORS, *SHAPES, "yes", "no"))
PAINT = {"red": (255, 0, 0), "blue": (0, 0, 255), "teal": (0, 128, 128)}


def _picture(color):
    picture = np.full((64, 64, 3), 240, dtype=np.uint8)
    picture[20:40, 20:40] = PAINT[color]
    return picture


def _asked(color):
    return [
        ("what color is the shape?", color),
        ("is there a circle?", "yes"),
        (f"is there not a {color} shape?", "no"),
        ("what shape is present?", "circle"),
    ]


@pytest.fixture
def colors():
    """Colours of 12 training and 6 test pictures."""
    return {"train": ["red", "blue", "teal"] * 4, "test": ["red", "blue", "teal"] * 2}


@pytest.fixture
def published(tmp_path, colors):
    for role, own in colors.items():
        (tmp_path / "data" / role / "images").mkdir(parents=True)
        rows = []
        for number, color in enumerate(own):
            Image.fromarray(_picture(color)).save(tmp_path / "data" / role / "images" / f"{3 * number}.png")
            rows += [[question, answer, 3 * number] for question, answer in _asked(color)]
        (tmp_path / "data" / role / "questions.json").write_text(json.dumps(rows))
    (tmp_path / "data" / "answers.txt").write_text("\n".join(ANSWERS))
    return tmp_path


@pytest.fixture
def packed(tmp_path, colors):
    root = tmp_path / "packed"
    root.mkdir()
    np.savez_compressed(
        root / "images.npz", **{role: np.stack([_picture(c) for c in own]) for role, own in colors.items()}
    )
    images, rows = [], []
    for role, own in colors.items():
        pairs = [(number, pair) for number, color in enumerate(own) for pair in _asked(color)]
        images += [{"split": role, "image_index": n, "color": c, "shape": None} for n, c in enumerate(own)]
        rows += [
            {"question_id": f"{role}-{i}", "split": role, "image_index": number, "question": question,
             "answer": answer, "type": question_type(question, answer)}
            for i, (number, (question, answer)) in enumerate(pairs)
        ]  # fmt: skip
    (root / "images.jsonl").write_text("\n".join(map(json.dumps, images)))
    with gzip.open(root / "questions.jsonl.gz", "wt") as file:
        file.write("\n".join(map(json.dumps, rows)))
    (root / "answers.txt").write_text("\n".join(ANSWERS))
    return root


def test_both_layouts_give_the_same_dataset(published, packed):
    one, two = (datasets["easy_vqa"](root, unseen=("teal",), validation=0.25) for root in (published, packed))
    assert list(one.clients) == ["blue", "red"]
    assert one.answers == tuple(ANSWERS)
    assert one.words == two.words
    assert {"circle", "shape", "teal"} <= set(one.words)
    for name, split in one.clients.items():
        assert [len(part) for part in (split.train, split.validation, split.test)] == [12, 4, 8]
        assert set(split.train.answers) & set(COLORS) == {name}
        assert split.train.names == two.clients[name].train.names
        assert split.train.types == two.clients[name].train.types
    np.testing.assert_array_equal(one.clients["red"].train.images, two.clients["red"].train.images)
    assert len(one.unseen["teal"]) == 8
    assert one.clients["red"].train.images is one.unseen["teal"].images


def test_pictures_are_resized(published):
    small = easy_vqa(published / "data", unseen=(), image_size=16)
    assert small.clients["red"].test.images.shape == (18, 16, 16, 3)


def test_truncated_and_missing_pictures(published):
    file = published / "data" / "train" / "images" / "3.png"
    file.write_bytes(file.read_bytes()[:60])
    refuses(r"images/3\.png.*complete, readable picture", easy_vqa, published, unseen=())
    file.unlink()
    refuses(r"images/3\.png.*nothing there", easy_vqa, published, unseen=())


def test_answer_outside_the_vocabulary(published):
    (published / "data" / "answers.txt").write_text("\n".join(set(ANSWERS) - {"circle"}))
    refuses(r"'train-3': expected one of the 12 answers.*'circle'", easy_vqa, published, unseen=())


@pytest.mark.parametrize("name", ["images.npz", "questions.jsonl.gz", "images.jsonl", "answers.txt"])
def test_missing_file_is_named_with_both_layouts(packed, name):
    (packed / name).unlink()
    refuses(rf"{name} does not exist; .*published layout.*packed one", easy_vqa, packed)


def test_damaged_packed_files_are_refused(packed):
    refuses(r"nowhere does not exist.*published layout", easy_vqa, packed / "nowhere")
    data = (packed / "questions.jsonl.gz").read_bytes()
    (packed / "questions.jsonl.gz").write_bytes(data[:80])
    refuses(r"questions\.jsonl\.gz: expected a complete compressed file.*cut off", easy_vqa, packed)
    (packed / "images.jsonl").write_text('{"split": "train", "image_index": 12, "color": "red"}')
    refuses(r"images\.jsonl, row 1: expected a picture of train \(12\).*'train' 12", easy_vqa, packed)
    (packed / "images.npz").write_bytes(b"PK nothing")
    refuses(r"images\.npz: expected a complete \.npz file", easy_vqa, packed)


def test_answers_then_the_nearest_foreground_settle_the_colour():
    open_between = [("is there a red shape?", "no"), ("what shape is present?", "circle")]
    shade = _picture("blue")
    shade[20:40, 20:40] = (40, 30, 230)
    asked = [_asked("red"), _asked("blue"), _asked("teal"), open_between]
    pictures = [_picture("red"), _picture("blue"), _picture("teal"), shade]
    assert settle_colors(asked, pictures) == ["red", "blue", "teal", "blue"]
    np.testing.assert_allclose(foreground(shade), (40, 30, 230))
    only = [("does the image not contain a gray shape?", "no")]  # two negatives: it is gray
    assert settle_colors([only], [shade]) == ["gray"]
    with pytest.raises(ValueError, match="picture 0: expected a colour and shape that agree"):
        settle_colors([[("what color is the shape?", "red"), ("is no red shape present?", "yes")]], [shade])
    refuses("expected another that settles which", settle_colors, [open_between], [shade])


@needs_data
def test_real_counts_and_partitions():
    data = easy_vqa(REAL, max_train=None, max_test=None, validation=0.1, unseen=())
    parts = [part for split in data.clients.values() for part in (split.train, split.validation)]
    assert sum(map(len, parts)) == 38575
    assert sum(len(split.test) for split in data.clients.values()) == 9673
    assert list(data.clients) == sorted(COLORS)
    parts += [split.test for split in data.clients.values()]
    kinds = Counter(kind for part in parts for kind in part.types)
    assert kinds == {"yesno_color": 25859, "yesno_shape": 9684, "open_color": 6446, "open_shape": 6259}
    assert len(data.answers) == 13
    held_out = easy_vqa(REAL)
    assert list(held_out.clients) == ["black", "blue", "brown", "gray", "green", "red"]
    assert {name: len(part) for name, part in held_out.unseen.items()} == {"yellow": 1000, "teal": 1000}
    assert {len(split.train) for split in held_out.clients.values()} == {1500}
    assert list(easy_vqa(REAL, "type").clients) == ["open_color", "open_shape", "yesno_color", "yesno_shape"]


@needs_data
def test_real_colours_and_types_follow_from_questions_alone():
    with np.load(REAL / "images.npz", allow_pickle=False) as archive:
        pictures = archive["test"]
    known = [json.loads(line) for line in (REAL / "images.jsonl").read_text().splitlines()]
    asked = [[] for _ in pictures]
    with gzip.open(REAL / "questions.jsonl.gz", "rt") as file:
        for row in map(json.loads, file):
            assert question_type(row["question"], row["answer"]) == row["type"]
            if row["split"] == "test":
                asked[row["image_index"]].append((row["question"], row["answer"]))
    stated = [row["color"] for row in known if row["split"] == "test"]
    pairs = enumerate(zip(settle_colors(asked, pictures), stated, strict=True))
    differ = {number: pair for number, pair in pairs if pair[0] != pair[1]}
    # The packed file calls one picture brown whose flat pixels are pure black; its answers leave both open.
    assert differ == {891: ("black", "brown")}
    assert (pictures[891].reshape(-1, 3) == 0).all(axis=1).sum() > 20

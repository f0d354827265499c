"""Aerial photographs: pictures from a tar or a folder, given splits, the real data where it is there."""

import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from confed.datasets.ucm import ucm_vqa
from confed.registry import datasets
from refusals import refuses
from repository import ROOT

REAL = Path(os.environ.get("CONFED_DATA", ROOT.parent / "shared" / "data")) / "ucm_multilabel"
needs_data = pytest.mark.skipif(not (REAL / "images.tar").is_file(), reason="the aerial photographs are not here")
USES = {"forest": "nature", "river": "water", "harbor": "water"}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "images").mkdir()
    labels, questions = [], []
    for use, scene in USES.items():
        for number in range(6):
            name, split = (
                f"{use}{number:02d}.jpg",
                ("train", "train", "train", "train", "val", "test")[number],
            )
            shade = 40 * number + len(use)
            Image.fromarray(np.full((96, 96, 3), shade, dtype=np.uint8)).save(tmp_path / "images" / name)
            labels.append({"image": name, "land_use": use, "scene": scene, "labels": ["trees"], "split": split})
            common = {"image": name, "scene": scene, "split": split}
            for question, answer, kind in [("what land use is this?", use, "land_use"),
                                           ("are there trees?", "yes", "presence")]:  # fmt: skip
                row = {"question": question, "answer": answer, "type": kind, "question_id": len(questions)}
                questions.append(common | row)
    (tmp_path / "labels.jsonl").write_text("\n".join(map(json.dumps, labels)))
    (tmp_path / "vqa_derived.jsonl").write_text("\n".join(map(json.dumps, questions)))
    return tmp_path


def test_folder_and_tar_give_the_same_dataset(folder):
    one = datasets["ucm_vqa"](folder, unseen=("nature",), image_size=32)
    with tarfile.open(folder / "images.tar", "w") as tar:
        for file in (folder / "images").iterdir():
            tar.add(file, file.name)
            file.unlink()
    two = ucm_vqa(folder, unseen=("nature",), image_size=32)
    np.testing.assert_array_equal(one.clients["water"].train.images, two.clients["water"].train.images)
    assert one.clients["water"].train.images.shape == (18, 32, 32, 3)
    split = two.clients["water"]
    assert [len(part) for part in (split.train, split.validation, split.test)] == [16, 4, 4]
    assert split.train.names[0] == "ucm-12"
    assert two.answers == ("forest", "harbor", "river", "yes")
    assert two.words == ("are", "is", "land", "there", "this", "trees", "use", "what")
    # Unseen scenes: validation and test questions of one land use with two pictures.
    assert [len(part) for part in two.unseen.values()] == [4]
    assert "test and validation" in two.facts["unseen"]
    assert list(ucm_vqa(folder, "land_use", unseen=("nature",)).clients) == ["harbor", "river"]


def test_cap_varies_with_the_seed_but_tests_do_not(folder):
    runs = [ucm_vqa(folder, unseen=(), max_train=5, max_test=1, seed=seed) for seed in range(4)]
    assert len({tuple(run.clients["water"].train.names) for run in runs}) > 1
    assert len({tuple(run.clients["water"].test.names) for run in runs}) == 1
    assert {len(run.clients["water"].train) for run in runs} == {5}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("labels.jsonl", None, r"labels\.jsonl does not exist; .*images\.tar.*images/"),
        ("vqa_derived.jsonl", None, r"vqa_derived\.jsonl does not exist"),
        ("images", None, r"expected .*images\.tar or .*images, got neither"),
        ("images/forest03.jpg", None, r"forest03\.jpg: expected a picture file, got nothing there"),
        ("images/forest03.jpg", b"\xff\xd8\xff", r"forest03\.jpg: expected a complete, readable picture"),
        ("labels.jsonl", b"\xff{", r"labels\.jsonl: expected UTF-8"),
        (
            "vqa_derived.jsonl",
            b'{"image": 1}',
            r"vqa_derived\.jsonl, row 1: expected the key 'question_id'",
        ),
    ],
)
def test_missing_and_damaged_files(folder, name, change, message):
    path = folder / name
    path.rename(folder / "away")
    if change is not None:
        path.write_bytes(change)
    refuses(message, ucm_vqa, folder, unseen=())


def test_answer_outside_the_vocabulary_and_unknown_picture(folder):
    file = folder / "vqa_derived.jsonl"
    text = file.read_text()
    file.write_text(text.replace('"answer": "yes"', '"answer": "perhaps"', 1))
    refuses(r"row 2: expected yes, no, .* got 'perhaps'", ucm_vqa, folder)
    file.write_text(text.replace("forest00.jpg", "../x.jpg", 1))
    refuses(r"row 1: expected a picture of labels.jsonl, got '\.\./x\.jpg'", ucm_vqa, folder)


def test_a_misspelt_split_is_refused_and_no_question_is_lost(folder):
    file = folder / "labels.jsonl"
    file.write_text(file.read_text().replace('"split": "train"', '"split": "trian"', 1))
    refuses(r"labels\.jsonl, row \d+: expected the split train, val or test, got 'trian'", ucm_vqa, folder)


@needs_data
def test_the_real_files_have_the_published_counts():
    data = ucm_vqa(REAL, unseen=(), max_train=None, max_test=None)
    parts = [part for s in data.clients.values() for part in (s.train, s.validation, s.test)]
    assert sum(map(len, parts)) == 11398
    assert len(data.clients) == 6
    assert len(data.answers) == 30
    images = [set(np.asarray(part.image_index).tolist()) for part in parts]
    assert sum(map(len, images)) == len(set().union(*images)) == 1680
    assert min(part.images.reshape(1680, -1).std(axis=1).min() for part in parts[:1]) > 1  # no blank picture
    held_out = ucm_vqa(REAL)
    assert list(held_out.clients) == ["nature", "recreation", "residential", "transport"]
    assert {name: len(part) for name, part in held_out.unseen.items()} == {"commercial": 334, "water": 502}


def test_composed_answers_say_what_labels_a_picture_has(folder):
    sets = [["trees"], ["cars", "trees"], ["bare-soil", "cars", "grass"]]
    rows = [json.loads(line) for line in (folder / "labels.jsonl").read_text().splitlines()]
    rows = [row | {"labels": sets[number % 3]} for number, row in enumerate(rows)]
    (folder / "labels.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "vqa_derived.jsonl").unlink()
    dataset = ucm_vqa(folder, unseen=(), image_size=32, questions="composed")
    labels = {row["image"]: set(row["labels"]) for row in rows}
    kinds: set[str] = set()
    for split in dataset.clients.values():
        for examples in (split.train, split.validation, split.test):
            for name, question, answer in zip(examples.names, examples.questions, examples.answers, strict=True):
                has = labels[name.removeprefix("ucm-").rpartition("-")[0]]
                negated = set(answer.replace(" and ", "|").replace(" without ", "|no ").split("|"))
                said = {part for part in negated if not part.startswith("no ")} - {"nothing"}
                denied = {part.removeprefix("no ") for part in negated if part.startswith("no ")}
                assert said <= has
                assert denied.isdisjoint(has)
                words = question.rstrip("?").replace("bare soil", "bare-soil").replace("mobile home", "mobile-home")
                if words.startswith("what can be seen besides "):
                    assert said == has - {words.rpartition(" ")[2]}
                else:
                    one, other = words.removeprefix("what is there of ").split(" and ")
                    assert said | denied == {one, other}
                kinds.add(f"{len(said)} of {len(said | denied)}")
    assert kinds == {"0 of 0", "0 of 2", "1 of 1", "1 of 2", "2 of 2"}


@needs_data
def test_the_photographs_have_over_500_composed_answers():
    dataset = ucm_vqa(REAL, image_size=16, questions="composed")
    assert len(dataset.answers) == 640
    assert sum(len(split.train) for split in dataset.clients.values()) == 4186


def test_questions_about_positions_are_about_corners(folder):
    # One picture of its land use and shade in each corner, in a scene of 24.
    rows, shades = [], {}
    for number in range(24):
        name, use = f"use{number}.png", f"use{number}"
        shades[use] = 10 * number + 3
        Image.fromarray(np.full((96, 96, 3), shades[use], dtype=np.uint8)).save(folder / "images" / name)
        split = ("train", "val", "test")[number % 3]
        labels = ["trees", "cars"] if number % 2 else ["grass"]
        rows.append({"image": name, "land_use": use, "scene": "nature", "labels": labels, "split": split})
    (folder / "labels.jsonl").write_text("\n".join(map(json.dumps, rows)))
    dataset = ucm_vqa(folder, unseen=(), image_size=32, questions="positions")
    use_of = {shade: use for use, shade in shades.items()}
    labels_of = {row["land_use"]: row["labels"] for row in rows}
    places = {"top left": (0, 0), "top right": (0, 31), "bottom left": (31, 0), "bottom right": (31, 31)}
    split = dataset.clients["nature"]
    kinds: set[str] = set()
    for examples in (split.train, split.validation, split.test):
        for row, (question, answer) in enumerate(zip(examples.questions, examples.answers, strict=True)):
            picture = examples.images[examples.image_index[row]]
            uses = {place: use_of[int(picture[pixel][0])] for place, pixel in places.items()}
            assert len(set(uses.values())) == 4
            kind, rest = question.rstrip("?").split(" ", 1)
            kinds.add(kind)
            if kind == "where":
                assert uses[answer] == rest.removeprefix("is the ")
            elif kind == "what":
                assert uses[rest.removeprefix("kind of area is at the ")] == answer
            else:
                place = next(place for place in places if rest.startswith(f"the {place} "))
                label = rest.removeprefix(f"the {place} ").replace(" ", "-")
                assert (label in labels_of[uses[place]]) == (answer == "yes")
    assert kinds == {"what", "where", "has"}
    with pytest.raises(ValueError, match="expected an even number where a picture is four photographs, got 33"):
        ucm_vqa(folder, unseen=(), image_size=33, questions="positions")

"""Official annotation files: every reader on a file of its own shape, and what each of them refuses."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from confed.data.intake.stream import json_items
from confed.data.vl_files.records import Record
from confed.data.vl_files.vizwiz import (
    ENTAILMENT_LABELS,
    PAIR_LABELS,
    aqua_records,
    clove_records,
    cocoqa_records,
    gqa_records,
    nlvr2_records,
    snli_ve_records,
    vcr_records,
    vizwiz_records,
)
from confed.data.vl_files.vqa import vqa_records
from confed.datasets.feddat_benchmarks import draw, frequent_answers
from reader_folders import write
from refusals import refuses


@pytest.fixture
def samples(real_data: Path) -> Path:
    folder = real_data / "format_samples"
    if not folder.is_dir():
        pytest.skip("the format samples are not here")
    return folder


# The samples


def test_vqa_v2_joins_questions_and_answers(samples: Path):
    first, *_ = records = list(vqa_records(samples / "vqa_v2", "train2014"))
    assert [r.question for r in records] == [
        "Is the cat asleep?", "How many cups are on the table?", "What color is the bus?",
    ]  # fmt: skip
    assert first.name == "vqa_v2-900001000"
    assert first.pictures == ("COCO_train2014_000000900001.jpg",)
    assert first.type == "yes/no"
    raw = json.loads((samples / "vqa_v2/v2_mscoco_train2014_annotations.json").read_text())["annotations"][0]
    assert first.answer == "yes"
    assert first.annotations == tuple(one["answer"] for one in raw["answers"])
    assert len(raw["answers"]) == 10


def test_abstract_scenes_have_their_own_names(samples: Path):
    records = list(vqa_records(samples / "vqa_abstract", "train2015", "vqa_abstract"))
    assert [r.pictures[0] for r in records] == ["abstract_v002_train2015_000000000005.png"] * 2
    assert [r.name for r in records] == ["vqa_abstract-50", "vqa_abstract-51"]


def test_vizwiz_sample_is_read_with_annotations(samples: Path):
    can, unreadable = vizwiz_records(samples / "vizwiz", "val")
    assert (can.answer, can.type, can.pictures) == ("tomato soup", "other", ("VizWiz_train_90000000.jpg",))
    assert can.annotations is not None
    assert [can.annotations.count(a) for a in ("tomato soup", "soup", "unsuitable")] == [6, 3, 1]
    assert unreadable.answer == "unanswerable"


def test_cocoqa_sample_is_read_with_types(samples: Path):
    records = list(cocoqa_records(samples / "cocoqa", "test"))
    assert [(r.pictures[0], r.answer, r.type) for r in records] == [
        ("000000900001", "cat", "object"), ("000000900001", "two", "number"),
        ("000000900002", "red", "color"), ("000000900003", "kitchen", "location"),
    ]  # fmt: skip
    assert records[0].question == "what is sleeping on the chair"


def test_aqua_sample_is_read_with_types(samples: Path):
    records = list(aqua_records(samples / "aqua", "val"))
    assert [sum(r.type == kind for r in records) for kind in ("visual", "knowledge")] == [10, 10]
    assert (records[0].pictures, records[0].answer) == (("42809-3baptist.jpg",), "people")


def test_gqa_sample_is_read_with_types(samples: Path, tmp_path: Path):
    for split in ("train", "val"):
        shutil.copy(samples / "gqa/train_balanced_questions.json", tmp_path / f"{split}_balanced_questions.json")
    color, verify = gqa_records(tmp_path, "val")
    assert (color.name, color.pictures, color.answer, color.type) == (
        "gqa-20000001",
        ("9000001.jpg",),
        "white",
        "query",
    )
    assert (verify.question, verify.type) == ("Is the cup white?", "verify")


def test_clove_sample_is_read_by_scene(samples: Path):
    (scene,) = clove_records(samples / "clove", "a#ShopAndDining", "train")
    assert (scene.pictures, scene.answer, scene.type) == (("900.jpg",), "kiosk", "query")
    assert scene.annotations is None  # ten times the same answer is one answer
    (function,) = clove_records(samples / "clove", "attribute", "train")
    assert function.answer == "green"


def test_nlvr2_records_have_two_pictures_and_a_label(samples: Path):
    (one,) = nlvr2_records(samples / "nlvr2", "train")
    assert one.pictures == ("12/train-90000-0-img0.png", "12/train-90000-0-img1.png")
    dev = list(nlvr2_records(samples / "nlvr2", "dev"))
    assert dev[0].pictures == ("dev-850-0-img0.png", "dev-850-0-img1.png")
    assert [r.answer for r in dev[:2]] == ["False", "True"]
    assert PAIR_LABELS == ("False", "True")


def test_snli_ve_labels_in_the_order_of_climb(samples: Path):
    records = list(snli_ve_records(samples / "snli_ve", "dev"))
    assert [ENTAILMENT_LABELS.index(r.answer) for r in records] == [0, 2, 1]
    assert records[0].pictures == ("9000000001.jpg",)
    assert records[0].question == "A person holds something."  # the hypothesis; the picture replaces the premise


def test_vcr_objects_become_words(samples: Path):
    (record,) = vcr_records(samples / "vcr", "train")
    assert record.question == "Why does person 1 lift cup 3 ?"
    assert record.choices is not None
    assert record.choices[2] == "person 2 told her to run ."
    assert (len(record.choices), record.answer) == (4, "0")
    assert record.pictures[0].startswith("lsmdc_9999_INVENTED_MOVIE/")


# What they refuse

VIZWIZ = {"image": "a.jpg", "question": "What is it?", "answer_type": "other", "answerable": 1}
TEN = [{"answer": "cup", "answer_confidence": "yes"}] * 10
CLOVE = {
    "question": "q?",
    "question_id": "g1",
    "answer": "a",
    "answers": ["a"] * 10,
    "image_id": "9",
    "stage": "object",
}
PAIR = {"identifier": "dev-1-0-0", "sentence": "Two dogs.", "label": "True"}
VE = {"Flickr30K_ID": "1", "gold_label": "neutral", "pairID": "1.jpg#0r1n", "sentence2": "A dog."}
VCR = {"annot_id": "val-0", "objects": ["person"], "question": ["Who", [0]], "answer_choices": [["a"]] * 4,
       "answer_label": 1, "img_fn": "m/a.jpg"}  # fmt: skip
ASKED = [{"question_id": 1, "image_id": 7, "question": "Is it?"}]
ANSWERED = [{"question_id": 1, "image_id": 7, "answer_type": "yes/no", "multiple_choice_answer": "yes", "answers": TEN}]


def vqa(folder: Path, asked: Any = ASKED, answered: Any = ANSWERED) -> list[Record]:
    write(folder / "v2_OpenEnded_mscoco_val2014_questions.json", {"info": {}, "questions": asked})
    write(folder / "v2_mscoco_val2014_annotations.json", {"annotations": answered, "license": {}})
    return list(vqa_records(folder, "val2014"))


def test_answers_are_normalised_and_the_file_names_the_right_one(tmp_path: Path):
    answers = [{"answer": a} for a in ["Two.", "two", "the cat", "T-shirt", *["dont know"] * 6]]
    (record,) = vqa(tmp_path, answered=[ANSWERED[0] | {"multiple_choice_answer": "Two", "answers": answers}])
    assert record.answer == "2"
    assert record.annotations == ("2", "2", "cat", "t shirt", *["don't know"] * 6)
    write(tmp_path / "val.json", [VIZWIZ | {"answers": answers}])
    (record,) = vizwiz_records(tmp_path, "val")  # which names none: the most frequent
    assert record.answer == "don't know"


@pytest.mark.parametrize(
    ("asked", "answered", "message"),
    [
        (ASKED * 2, ANSWERED, r"questions\.json, row 2: the question_id 1 is that of row 1 already"),
        (ASKED, ANSWERED * 2, r"annotations\.json, row 2: the question_id 1 is that of row 1"),
        (ASKED, [], r"expected answers in v2_mscoco_val2014_annotations\.json, got none to 1 questions: 1"),
        ([], ANSWERED, r"row 1: expected a question of v2_OpenEnded.*, got the question 1"),
        (ASKED, [ANSWERED[0] | {"image_id": 8}], "row 1: expected question 1 about picture 7, as in .*, got 8"),
        (ASKED, [ANSWERED[0] | {"answers": TEN[:9]}], "row 1: expected the answers of 10 annotators, got 9"),
        (ASKED, [ANSWERED[0] | {"answers": [{}] * 10}], "text as each annotator's 'answer', got None"),
        (
            [{"question_id": 1, "question": "Is it?"}],
            ANSWERED,
            "row 1: expected an integer of at least 0 as 'image_id'",
        ),
        ([ASKED[0] | {"question": " "}], ANSWERED, "row 1: expected a text as 'question', got ' '"),
    ],
)
def test_malformed_vqa_files_are_refused(tmp_path: Path, asked: Any, answered: Any, message: str):
    refuses(message, vqa, tmp_path, asked, answered)


Reader = Callable[[Path], Iterable[Record]]


@pytest.mark.parametrize(
    ("name", "rows", "read", "message"),
    [
        ("val.json", [VIZWIZ | {"answers": TEN + TEN[:1]}], lambda f: vizwiz_records(f, "val"), "row 1: .*got 11"),
        ("val.json", [VIZWIZ], lambda f: vizwiz_records(f, "val"), "a list of annotators as 'answers', got None"),
        ("val.json", [VIZWIZ | {"answers": TEN}] * 2, lambda f: vizwiz_records(f, "val"), r"row 2: the image 'a\.jpg'"),
        ("val.json", [VIZWIZ | {"answers": TEN, "image": "../a.jpg"}], lambda f: vizwiz_records(f, "val"), "way out"),
        ("val.json", [VIZWIZ | {"answers": TEN, "image": "/etc/a"}], lambda f: vizwiz_records(f, "val"), "way out"),
        ("val.json", [], lambda f: vizwiz_records(f, "test"), "split must be one of train, val, got 'test'"),
        ("val.json", [{"image": "a"}], lambda f: aqua_records(f, "val"), "true or false as 'need_external_knowledge'"),
        ("val.json", ["x"], lambda f: aqua_records(f, "val"), "row 1"),
        ("fcl_mmf_object_val.json", [CLOVE] * 2, lambda f: clove_records(f, "object", "val"), "question_id 'g1'"),
        ("fcl_mmf_logical_val.json", [CLOVE], lambda f: clove_records(f, "logical", "val"), "'logical', got 'obj"),
        ("fcl_mmf_object_val.json", [CLOVE | {"answers": ["a", "b"]}], lambda f: clove_records(f, "object", "val"),
         "row 1: expected the answers of 10 annotators, got 2"),
        ("x.json", [], lambda f: clove_records(f, "object", "test"), "split must be one of train, val, got 'test'"),
        ("x.json", [], lambda f: clove_records(f, "objects", "val"), "stage must be one of a#Shop.*got 'objects'"),
        ("x.json", [], lambda f: clove_records(f, "object", "val"), "object_val.json does not exist"),
        ("dev.json", [PAIR | {"label": "true"}], lambda f: nlvr2_records(f, "dev"), "row 1: .*got the label 'true'"),
        ("dev.json", [PAIR | {"identifier": "x"}], lambda f: nlvr2_records(f, "dev"), "got the identifier 'x'"),
        ("dev.json", [PAIR, PAIR], lambda f: nlvr2_records(f, "dev"), "row 2: the identifier 'dev-1-0-0'"),
        ("dev.json", [], lambda f: nlvr2_records(f, "val"), "split must be one of train, dev, test1, test2, got 'val'"),
        ("snli_ve_dev.jsonl", [VE | {"gold_label": "yes"}], lambda f: snli_ve_records(f, "dev"), "gold_label out of"),
        ("snli_ve_dev.jsonl", [VE, VE], lambda f: snli_ve_records(f, "dev"), "row 2: the pairID"),
        ("val.jsonl", [VCR | {"answer_choices": [["a"]] * 3}], lambda f: vcr_records(f, "val"), "expected 4 .* got 3"),
        ("val.jsonl", [VCR | {"answer_label": 4}], lambda f: vcr_records(f, "val"), "0 to 3 as .answer_label., got 4"),
        ("val.jsonl", [VCR | {"question": [[1]]}], lambda f: vcr_records(f, "val"), r"among the 1 objects, got \[1\]"),
        ("val.jsonl", [VCR | {"question": []}], lambda f: vcr_records(f, "val"), "a list of tokens as 'question'"),
        ("val.jsonl", [VCR], lambda f: vcr_records(f, "test"), "split must be one of train, val, got 'test'"),
    ],
)  # fmt: skip
def test_malformed_rows_of_questions_are_refused(
    tmp_path: Path, name: str, rows: list[Any], read: Reader, message: str
):
    write(tmp_path / name, rows, lines=name.endswith(".jsonl") or name == "dev.json")
    refuses(message, list, read(tmp_path))


def test_pickled_clove_is_refused_and_the_json_release_named(tmp_path: Path):
    folder = tmp_path / "npy/function"
    folder.mkdir(parents=True)
    (folder / "fcl_mmf_object_val.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(
        ValueError, match=r"expected json/function/fcl_mmf_object_val\.json, got .*npy; .*pickled objects"
    ):
        list(clove_records(tmp_path, "object", "val"))


def test_several_answers_of_clove_become_annotations(tmp_path: Path):
    answers = ["Stop."] * 7 + ["halt"] * 3
    write(tmp_path / "fcl_mmf_scenetext_val.json",
          [CLOVE | {"stage": "scenetext", "answer": "Stop.", "answers": answers}])  # fmt: skip
    (record,) = clove_records(tmp_path, "scenetext", "val")
    assert (record.answer, record.annotations) == ("stop", ("stop",) * 7 + ("halt",) * 3)


def test_disagreement_is_no_label_in_snli_ve(tmp_path: Path):
    write(tmp_path / "snli_ve_dev.jsonl", [VE | {"gold_label": "-"}, VE], lines=True)
    assert [r.row for r in snli_ve_records(tmp_path, "dev")] == [2]


def test_references_to_several_objects(tmp_path: Path):
    write(tmp_path / "val.jsonl", [VCR | {"objects": ["person", "dog"], "question": ["Do", [0, 1], "run"]}], lines=True)
    assert next(iter(vcr_records(tmp_path, "val"))).question == "Do person 1 and dog 2 run"


def cocoqa(folder: Path, **columns: str) -> Path:
    (folder / "train").mkdir(exist_ok=True)
    whole = {"img_ids": "1\n2\n", "questions": "what is it\nwho is it\n", "answers": "cat\nman\n", "types": "0\n0\n"}
    for name, content in (whole | columns).items():
        (folder / f"train/{name}.txt").write_text(content)
    return folder


def test_misaligned_cocoqa_files_are_refused(tmp_path: Path):
    assert len(list(cocoqa_records(cocoqa(tmp_path), "train"))) == 2
    for columns, message in (
        ({"answers": "cat\n"}, r"as many lines each, got img_ids.txt 2, questions.txt 2, answers.txt 1, types.txt 2"),
        ({"img_ids": "1\nx\n"}, r"img_ids.txt, row 2: expected a COCO number, got 'x'"),
        ({"types": "0\n4\n"}, r"types.txt, row 2: expected a type from 0 to 3, got '4'"),
        ({"answers": "cat\n\n"}, r"answers.txt, row 2: expected a text, got ''"),
    ):
        refuses(message, list, cocoqa_records(cocoqa(tmp_path, **columns), "train"))
    refuses(r"test/img_ids\.txt does not exist", list, cocoqa_records(tmp_path, "test"))


# Large and damaged JSON


def test_streams_equal_what_json_reads_at_every_place_of_a_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    items = [{"a": 'x"]}é', "b": [1, {"c": None}]}, 12345, -1.5e3, "", [], True]
    for size in (1, 2, 3, 7, 1000):
        monkeypatch.setattr("confed.data.intake.stream._CHUNK", size)
        write(tmp_path / "list.json", items)
        assert list(json_items(tmp_path / "list.json")) == list(enumerate(items, start=1))
        write(tmp_path / "object.json", {"info": {"rows": [1]}, "rows": items, "n": 4})
        assert list(json_items(tmp_path / "object.json", "rows")) == list(enumerate(items, start=1))
    whole = (tmp_path / "object.json").read_bytes()
    for cut in range(len(whole)):
        (tmp_path / "cut.json").write_bytes(whole[:cut])
        refuses(r"cut\.json", list, json_items(tmp_path / "cut.json", "rows"))


@pytest.mark.parametrize(
    ("content", "key", "message"),
    [
        (b"{}", None, "expected a list"),
        (b"[]", "rows", "expected an object with a list under 'rows'"),
        (b'{"x": []}', "rows", "expected an object with a list under 'rows'"),
        (b'{"rows": 3}', "rows", "expected an object with a list under 'rows'"),
        (b"[1] 2", None, "nothing behind the last value"),
        (b"[1; 2]", None, "expected ',' or '\\]' after row 1, got ';'"),
        (b'["\xff"]', None, "expected UTF-8"),
        (b'[1, {"a": 2', None, "row 2: the last value is incomplete.*cut off"),
        (b'[1, {"a"; 2}, 3]', None, "row 2: the last value is incomplete or no JSON"),
        (b'{"x": 1; "rows": []}', "rows", "expected ',' or '}' behind the value of 'x', got ';'"),
        (b"{3: 1}", "rows", "expected a key and ':', got 3"),
        (b"[" * 100_000, None, "nested too deeply|cut off"),
    ],
)
def test_damaged_json_files_are_named(tmp_path: Path, content: bytes, key: str | None, message: str):
    (tmp_path / "bad.json").write_bytes(content)
    refuses(rf"bad\.json.*({message})", list, json_items(tmp_path / "bad.json", key))


# Pools and down-sampling


def test_the_most_frequent_answers():
    answers = ["no", "no", "yes", "yes", "a", "b", ""]
    records = [Record(Path("f"), i, str(i), ("p",), "q", answer) for i, answer in enumerate(answers)]
    assert frequent_answers(records, 3) == ("no", "yes", "a")
    assert frequent_answers(records, 99) == ("no", "yes", "a", "b")


def test_questions_are_drawn_by_number_share_or_shots():
    answers = ["x"] * 50 + ["y"] * 30 + ["z"] * 2
    records = [Record(Path("f"), i, str(i), ("p",), "q", answer) for i, answer in enumerate(answers)]

    def drawn(shots: int | None = None, share: float | None = None, most: int | None = None) -> list[str]:
        rows = draw(records, [0], shots, share, most)
        assert [record.row for record in rows] == sorted({record.row for record in rows})
        return [record.answer for record in rows]

    assert len(drawn()) == 82
    assert len(drawn(most=10)) == 10
    assert len(drawn(share=0.05)) == 4
    assert Counter(drawn(shots=20)) == {"x": 20, "y": 20, "z": 2}
    assert len(drawn(shots=20, most=7)) == 7
    assert len(drawn(share=0.001)) == 1

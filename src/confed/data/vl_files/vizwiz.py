"""VizWiz-VQA (Gurari et al., 2018): photographs and questions of blind people, ten annotators each.

For GQA by scene see :mod:`confed.datasets.gqa_scenes`.

Questions and answers refer to detected objects by their position. Here they become the object's class and its number
from 1, as in "person 1". Boxes are not drawn into the pictures (CLiMB draws them and gives people invented names), so
a model has to guess which person is meant.

The release has every file twice: as JSON, and as NumPy files of pickled Python objects, which are refused.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from confed.data.intake.account import Account
from confed.data.intake.stream import json_items
from confed.data.intake.tables import read_jsonl
from confed.data.refusals import Distinct, check_choice, existing, read_text, refuse
from confed.data.vl_files.gqa_questions import question_files, questions_of
from confed.data.vl_files.records import Record, Row, check_split, find, rows_of

ENTAILMENT_LABELS = ("entailment", "contradiction", "neutral")
"""Answers in the order of their labels 0, 1 and 2, which is CLiMB's (ALBEF's is another)."""


def snli_ve_records(folder: Path, split: str, account: Account | None = None) -> Iterator[Record]:
    """The hypotheses (``sentence2``) of a split; a model sees the picture instead of the premise.

    Rows on which the annotators did not agree (``gold_label`` "-") are left out, and noted in the account.
    """
    check_split(split, ("train", "dev", "test"), "snli_ve")
    file = find(folder, [f"snli_ve_{split}.jsonl"], "snli_ve")
    distinct = Distinct("pairID")
    for entry in rows_of(file, read_jsonl(file)):
        label = entry.text("gold_label")
        if label == "-":
            if account is not None:
                account.count(file)
                account.leave("annotators do not agree", entry.where)
            continue
        if label not in ENTAILMENT_LABELS:
            refuse(entry, f"a gold_label out of {', '.join(ENTAILMENT_LABELS)} or -", label)
        key, picture = entry.text("pairID"), f"{entry.text('Flickr30K_ID')}.jpg"
        distinct.add(key, file, entry.row)
        yield Record(file, entry.row, f"snli_ve-{key}", (picture,), entry.text("sentence2"), label, "entailment")


# VizWiz-VQA (Gurari et al., 2018): photographs and questions of blind people, ten annotators each -----------

PAIR_LABELS = ("False", "True")
"""Answers in the order of their labels 0 and 1."""


def nlvr2_records(folder: Path, split: str) -> Iterator[Record]:
    """The sentences of a split, with the pictures of their left and right side.

    Pictures are ``<identifier without its last part>-img0.png`` and ``-img1.png``, below the training split's numbered
    directories ``<directory>/...``.
    """
    check_split(split, ("train", "dev", "test1", "test2"), "nlvr2")
    file = find(folder, [f"data/{split}.json", f"{split}.json", f"nlvr2/data/{split}.json"], "nlvr2")
    for entry in rows_of(file, read_jsonl(file), "identifier"):
        key, label = entry.text("identifier"), entry.text("label")
        pair, separator, _ = key.rpartition("-")
        if not separator or label not in PAIR_LABELS:
            what = f"the identifier {key!r}" if not separator else f"the label {label!r}"
            refuse(entry, "an identifier 'split-set-pair-sentence' and a label 'True' or 'False'", found=what)
        directory = entry.get("directory")
        below = f"{directory}/" if isinstance(directory, int) and split == "train" else ""
        pictures = (f"{below}{pair}-img0.png", f"{below}{pair}-img1.png")
        yield Record(file, entry.row, f"nlvr2-{key}", pictures, entry.text("sentence"), label, "pair")


# CLOVE (Lei et al., 2023): questions about photographs --------------------------------------------------------

SCENES = (
    "a#ShopAndDining",
    "b#Workplace",
    "c#HomeOrHotel",
    "d#Transportation",
    "e#SportAndLeisure",
    "f#Outdoors",
)
"""The six scenes, as file names have them."""

FUNCTIONS = ("attribute", "knowledge", "logical", "object", "relation", "scenetext")
"""The six functions, as file names have them."""


def clove_records(folder: Path, stage: str, split: str) -> Iterator[Record]:
    """The questions of one scene or function; types are the structural ones, pictures ``<image id>.jpg``.

    The questions on scene text have ten annotators each. Elsewhere the one answer of a question is repeated ten times
    and counts as one, as it is written.
    """
    check_split(split, ("train", "val"), "clove")
    check_choice("clove: stage", stage, (*SCENES, *FUNCTIONS))
    file = _file(folder, stage, split)
    for entry in rows_of(file, json_items(file), "question_id"):
        if entry.entry.get("stage", stage) != stage:
            refuse(entry, f"the stage {stage!r}", entry.get("stage"))
        picture, question = entry.text("image_id"), entry.text("question")
        answer, answers = entry.text("answer"), entry.texts("answers")
        several = None
        if stage == "scenetext" or not set(answers) <= {answer}:
            answer, several = entry.agreed(answers, answer)
        name = f"clove-{stage}-{split}-{entry.text('question_id')}"
        yield Record(file, entry.row, name, (f"{picture}.jpg",), question, answer, _type(entry), several)


def _type(entry: Row) -> str:
    types = entry.get("raw_question_type")
    kind = types.get("structural") if isinstance(types, dict) else None
    return kind if isinstance(kind, str) and kind else "other"


def _file(folder: Path, stage: str, split: str) -> Path:
    setting = "scene" if stage in SCENES else "function"
    name = f"fcl_mmf_{stage}_{split}"
    bases = [folder / subfolder for subfolder in (f"json/{setting}", setting, f"npy/{setting}", ".")]
    for base in bases:
        if (base / f"{name}.json").is_file():
            return base / f"{name}.json"
    for base in bases:
        if (base / f"{name}.npy").is_file():
            remedy = "take them from the JSON release, as pickled objects can run code when they are read"
            refuse("clove", f"json/{setting}/{name}.json", found=f"{base / name}.npy", remedy=remedy)
    return existing(bases[0] / f"{name}.json", f"clove: json/{setting}/{name}.json of the JSON release")


# Reader of VCR (Zellers et al., 2019), question to answer -----------------------------------------------------

CHOICES = 4
"""Answers offered with every question."""


def vcr_records(folder: Path, split: str) -> Iterator[Record]:
    """The questions of a split with their four answers."""
    check_split(split, ("train", "val"), "vcr")
    file = find(folder, [f"annotation/{split}.jsonl", f"{split}.jsonl"], "vcr")
    for entry in rows_of(file, read_jsonl(file), "annot_id"):
        objects, offered = entry.texts("objects"), entry.get("answer_choices")
        if not isinstance(offered, list) or len(offered) != CHOICES:
            count = len(offered) if isinstance(offered, list) else offered
            refuse(entry, f"{CHOICES} answers as 'answer_choices'", found=count)
        name, picture = f"vcr-{entry.text('annot_id')}", entry.text("img_fn")
        question = _words(entry.get("question"), objects, "question", entry)
        answer = str(entry.number("answer_label", below=CHOICES))
        texts = tuple(_words(tokens, objects, "answer_choices", entry) for tokens in offered)
        yield Record(file, entry.row, name, (picture,), question, answer, "choice", choices=texts)


def _words(tokens: Any, objects: list[str], key: str, row: Row) -> str:
    """Tokens as one text; a list of positions becomes the names of those objects."""
    if not isinstance(tokens, list) or not tokens:
        refuse(row, f"a list of tokens as {key!r}", tokens)
    words: list[str] = []
    for token in tokens:
        if isinstance(token, str):
            words.append(token)
            continue
        positions = token if isinstance(token, list) else [token]
        for position in positions:
            if not isinstance(position, int) or isinstance(position, bool) or not 0 <= position < len(objects):
                refuse(row, f"in {key!r} words or lists of positions among the {len(objects)} objects", token)
        words.append(" and ".join(f"{objects[position]} {position + 1}" for position in positions))
    return " ".join(words)


# Reader of GQA's balanced questions (Hudson and Manning, 2019) ------------------------------------------------


def gqa_records(folder: Path, split: str) -> Iterator[Record]:
    """The balanced questions of a split; types are the structural ones, pictures ``<image id>.jpg``."""
    check_split(split, ("train", "val"), "gqa")
    distinct = Distinct("question id")
    row = 1
    for source in question_files(folder)[split]:
        for question in questions_of(source):
            distinct.add(question.id, source, row)
            name, picture = f"gqa-{question.id}", (f"{question.image}.jpg",)
            yield Record(source, row, name, picture, question.question, question.answer, question.type)
            row += 1


# COCO-QA (Ren et al., 2015): four text files per split, aligned line by line ----------------------------------

TYPES = ("object", "number", "color", "location")
"""Question types by their numbers in ``types.txt``."""

_FILES = ("img_ids.txt", "questions.txt", "answers.txt", "types.txt")


def cocoqa_records(folder: Path, split: str) -> Iterator[Record]:
    """The questions of a split; a picture's name is its COCO number with twelve digits."""
    check_split(split, ("train", "test"), "cocoqa")
    columns = {name: _lines(folder / split / name) for name in _FILES}
    if len({len(lines) for lines in columns.values()}) > 1:
        counts = ", ".join(f"{name} {len(lines)}" for name, lines in columns.items())
        refuse(folder / split, "files with as many lines each", found=counts)
    for row, (image, question, answer, kind) in enumerate(zip(*columns.values(), strict=True), start=1):
        for name, value, pattern in (
            ("img_ids.txt", image, r"[0-9]{1,12}"),
            ("questions.txt", question, r".*\S.*"),
            ("answers.txt", answer, r".*\S.*"),
            ("types.txt", kind, r"[0-3]"),
        ):
            if not re.fullmatch(pattern, value):
                expected = {"img_ids.txt": "a COCO number", "types.txt": "a type from 0 to 3"}.get(name, "a text")
                refuse(f"{folder / split / name}, row {row}", f"{expected}", value)
        file, name = folder / split / "questions.txt", f"cocoqa-{split}-{row - 1}"
        yield Record(file, row, name, (f"{int(image):012d}",), question, answer, TYPES[int(kind)])


def _lines(file: Path) -> list[str]:
    lines = read_text(file).split("\n")
    return [line.strip() for line in (lines[:-1] if lines[-1] == "" else lines)]


# AQUA (Garcia et al., 2020): questions about paintings of SemArt ----------------------------------------------


def aqua_records(folder: Path, split: str) -> Iterator[Record]:
    """The questions of ``train.json``, ``val.json`` or ``test.json``.

    Types are "visual" and, where the answer needs the comment (external knowledge), "knowledge".
    """
    check_split(split, ("train", "val", "test"), "aqua")
    file = find(folder, [f"{split}.json", f"AQUA/{split}.json"], "aqua")
    for entry in rows_of(file, json_items(file)):
        knowledge = entry.get("need_external_knowledge")
        if not isinstance(knowledge, bool):
            refuse(entry, "true or false as 'need_external_knowledge'", knowledge)
        name, kind = f"aqua-{split}-{entry.row - 1}", "knowledge" if knowledge else "visual"
        picture, question, answer = (entry.text(key) for key in ("image", "question", "answer"))
        yield Record(file, entry.row, name, (picture,), question, answer, kind)


# VizWiz-VQA (Gurari et al., 2018): photographs and questions of blind people ----------------------------------


def vizwiz_records(folder: Path, split: str) -> Iterator[Record]:
    """The questions of ``train.json`` or ``val.json``, one per picture; "unanswerable" is an answer like others."""
    check_split(split, ("train", "val"), "vizwiz")
    file = find(folder, [f"{split}.json", f"Annotations/{split}.json"], "vizwiz")
    for entry in rows_of(file, json_items(file), "image"):
        picture, (answer, annotations) = entry.text("image"), entry.annotated()
        name = f"vizwiz-{split}-{Path(picture).stem}"
        question, kind = entry.text("question"), entry.text("answer_type")
        yield Record(file, entry.row, name, (picture,), question, answer, kind, annotations)

"""VQA v2 (Goyal et al., 2017) and the abstract scenes of VQA (Antol et al., 2015): a file of questions, one of answers.

Both have ten annotators per question. An answer counts as its normal form in every case, whereas the official
evaluation leaves annotations as they are where all ten agree letter by letter.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from confed.data.intake.stream import json_items, json_text
from confed.data.refusals import check_choice, refuse
from confed.data.vl_files.records import Record, Row, check_split, find, rows_of

Kind = Literal["vqa_v2", "vqa_abstract"]
"""Photographs of COCO (v2), or clip-art scenes."""


@dataclass(frozen=True)
class _Layout:
    splits: tuple[str, ...]
    questions: tuple[str, ...]
    annotations: tuple[str, ...]
    picture: str


_LAYOUTS: dict[str, _Layout] = {
    "vqa_v2": _Layout(
        ("train2014", "val2014"),
        ("v2_OpenEnded_mscoco_{}_questions.json", "OpenEnded_mscoco_{}_questions.json"),
        ("v2_mscoco_{}_annotations.json", "mscoco_{}_annotations.json"),
        "COCO_{}_{:012d}.jpg",
    ),
    "vqa_abstract": _Layout(
        ("train2015", "val2015"),
        ("OpenEnded_abstract_v002_{}_questions.json",),
        ("abstract_v002_{}_annotations.json",),
        "abstract_v002_{}_{:012d}.png",
    ),
}


def vqa_records(folder: Path, split: str, kind: Kind = "vqa_v2") -> Iterator[Record]:
    """The questions of one split in the order of the annotation file; question types are the answer types."""
    check_choice("kind", kind, _LAYOUTS)
    layout = _LAYOUTS[kind]
    check_split(split, layout.splits, kind)
    asked_in = find(folder, [name.format(split) for name in layout.questions], kind)
    answered_in = find(folder, [name.format(split) for name in layout.annotations], kind)
    for file, items in ((asked_in, "questions"), (answered_in, "annotations")):
        given = json_text(file, "data_subtype", items)
        if given not in ("", split):
            refuse(file, f"the split {split!r}", found=f"{given!r} (its 'data_subtype')")
    question_of_id: dict[int, tuple[int, str]] = {}
    for entry in rows_of(asked_in, json_items(asked_in, "questions"), "question_id", Row.number):
        question_of_id[entry.number("question_id")] = entry.number("image_id"), entry.text("question")
    for entry in rows_of(answered_in, json_items(answered_in, "annotations"), "question_id", Row.number):
        key = entry.number("question_id")
        if key not in question_of_id:
            refuse(entry, f"a question of {asked_in.name}", found=f"the question {key}")
        image, question = question_of_id.pop(key)
        if entry.number("image_id") != image:
            refuse(entry, f"question {key} about picture {image}, as in {asked_in.name}", found=entry.get("image_id"))
        answer, annotations = entry.annotated(entry.text("multiple_choice_answer"))
        name, picture = f"{kind}-{key}", layout.picture.format(split, image)
        yield Record(answered_in, entry.row, name, (picture,), question, answer, entry.text("answer_type"), annotations)
    if question_of_id:
        first = next(iter(question_of_id))
        refuse(asked_in, f"answers in {answered_in.name}", found=f"none to {len(question_of_id)} questions: {first}")

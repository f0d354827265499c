"""CLOVE (Lei et al., 2023): questions about photographs, by scene and by function.

The release has every file twice: as JSON, and as NumPy files of pickled Python objects, which are refused.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from confed.data.vl_files.records import Distinct, Record, agreed, check_split, text, texts
from confed.data.vl_files.stream import json_items

__all__ = ["FUNCTIONS", "SCENES", "clove_records"]

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

    Args:
        folder: the release, with ``json/scene`` and ``json/function``.
        stage: one of :data:`SCENES` or :data:`FUNCTIONS`.
        split: train or val; there is no other.

    Raises:
        ValueError: an unknown stage or split, a missing or damaged file, only the NumPy file, a question twice, or a
            row of another stage or with several answers that are not ten.
    """
    check_split(split, ("train", "val"), "clove")
    if stage not in (*SCENES, *FUNCTIONS):
        raise ValueError(f"clove: stage must be one of {', '.join((*SCENES, *FUNCTIONS))}, got {stage!r}")
    file = _file(folder, stage, split)
    distinct = Distinct("question_id")
    for row, entry in json_items(file):
        key = text(entry, "question_id", file, row)
        distinct.add(key, file, row)
        if entry.get("stage", stage) != stage:
            raise ValueError(f"{file}, row {row}: expected the stage {stage!r}, got {entry['stage']!r}")
        picture, question = text(entry, "image_id", file, row), text(entry, "question", file, row)
        answer, answers = text(entry, "answer", file, row), texts(entry, "answers", file, row)
        several = None
        if stage == "scenetext" or not set(answers) <= {answer}:
            answer, several = agreed(answers, file, row, answer)
        name = f"clove-{stage}-{split}-{key}"
        yield Record(file, row, name, (f"{picture}.jpg",), question, answer, _type(entry), several)


def _type(entry: Any) -> str:
    types = entry.get("raw_question_type")
    kind = types.get("structural") if isinstance(types, dict) else None
    return kind if isinstance(kind, str) and kind else "other"


def _file(folder: Path, stage: str, split: str) -> Path:
    setting = "scene" if stage in SCENES else "function"
    name = f"fcl_mmf_{stage}_{split}"
    bases = [folder / part for part in (f"json/{setting}", setting, f"npy/{setting}", ".")]
    for base in bases:
        if (base / f"{name}.json").is_file():
            return base / f"{name}.json"
    for base in bases:
        if (base / f"{name}.npy").is_file():
            raise ValueError(
                f"{base / name}.npy holds pickled Python objects, which can run code as they are read; "
                f"expected the same questions from the JSON release, json/{setting}/{name}.json"
            )
    raise ValueError(f"clove: expected json/{setting}/{name}.json in {folder}")

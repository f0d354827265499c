"""COCO-QA (Ren et al., 2015): four text files per split, aligned line by line; one answer of one word."""

import re
from collections.abc import Iterator
from pathlib import Path

from confed.data.vl_files.records import Record, check_split

__all__ = ["TYPES", "cocoqa_records"]

TYPES = ("object", "number", "color", "location")
"""Question types by their numbers in ``types.txt``."""

_FILES = ("img_ids.txt", "questions.txt", "answers.txt", "types.txt")


def cocoqa_records(folder: Path, split: str) -> Iterator[Record]:
    """The questions of a split; a picture's name is its COCO number with twelve digits.

    Args:
        folder: with the folders ``train`` and ``test``.
        split: train or test.

    Raises:
        ValueError: an unknown split, a missing file, files of different lengths, or a faulty line.
    """
    check_split(split, ("train", "test"), "cocoqa")
    columns = {name: _lines(folder / split / name) for name in _FILES}
    if len({len(lines) for lines in columns.values()}) > 1:
        counts = ", ".join(f"{name} {len(lines)}" for name, lines in columns.items())
        raise ValueError(f"{folder / split}: expected files with as many lines each, got {counts}")
    for row, (image, question, answer, kind) in enumerate(zip(*columns.values(), strict=True)):
        for name, value, pattern in (
            ("img_ids.txt", image, r"[0-9]{1,12}"),
            ("questions.txt", question, r".*\S.*"),
            ("answers.txt", answer, r".*\S.*"),
            ("types.txt", kind, r"[0-3]"),
        ):
            if not re.fullmatch(pattern, value):
                expected = {"img_ids.txt": "a COCO number", "types.txt": "a type from 0 to 3"}.get(name, "a text")
                raise ValueError(f"{folder / split / name}, row {row}: expected {expected}, got {value!r:.80}")
        file, name = folder / split / "questions.txt", f"cocoqa-{split}-{row}"
        yield Record(file, row, name, (f"{int(image):012d}",), question, answer, TYPES[int(kind)])


def _lines(file: Path) -> list[str]:
    if not file.is_file():
        raise ValueError(f"cocoqa: the file {file} does not exist")
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: expected UTF-8 text, got: {error}") from error
    return [line.strip() for line in (lines[:-1] if lines[-1] == "" else lines)]

"""Records of visual questions, and the checks that all readers share."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from confed.data.refusals import check_choice, check_inside, first_of, refuse
from confed.metrics.vqa import normalise_answer

ANNOTATORS = 10
"""Answers per question in VQA and VizWiz."""


@dataclass(frozen=True, slots=True)
class InFile:
    """What a row of a file says, with the row's number there, from 1."""

    file: Path
    row: int

    @property
    def where(self) -> str:
        """File and row, for messages."""
        return f"{self.file}, row {self.row}"

    def __str__(self) -> str:
        return self.where


@dataclass(frozen=True, slots=True)
class Record(InFile):
    """A question as its file has it.

    Attributes:
        name: identifier, distinct within the dataset.
        pictures: one picture's name, or two: a path below the dataset's folder of pictures.
        answer: the right answer; of several annotators the most frequent, normalised.
        annotations: all annotators' answers, normalised, where there are several.
        choices: the texts offered, where ``answer`` is the position of one of them.
    """

    name: str
    pictures: tuple[str, ...]
    question: str
    answer: str
    type: str = "other"
    annotations: tuple[str, ...] | None = None
    choices: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for picture in self.pictures:
            check_inside(picture, self)


def text(entry: Any, key: str, file: Path, row: int) -> str:
    """A text that is not empty."""
    value = entry.get(key) if isinstance(entry, dict) else None
    if not isinstance(value, str) or not value.strip():
        refuse(f"{file}, row {row}", f"a text as {key!r}", value)
    return value


def texts(entry: Any, key: str, file: Path, row: int) -> list[str]:
    """A list of texts."""
    value = entry.get(key) if isinstance(entry, dict) else None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        refuse(f"{file}, row {row}", f"a list of texts as {key!r}", value)
    return value


def number(entry: Any, key: str, file: Path, row: int, *, below: int | None = None) -> int:
    """An integer that is not negative."""
    value = entry.get(key) if isinstance(entry, dict) else None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0 or (below is not None and value >= below):
        expected = "an integer of at least 0" if below is None else f"an integer from 0 to {below - 1}"
        refuse(f"{file}, row {row}", f"{expected} as {key!r}", value)
    return value


def annotated(entry: Any, file: Path, row: int, main: str | None = None) -> tuple[str, tuple[str, ...]]:
    """The answers of ten annotators, normalised, and the one that counts as right."""
    given = entry.get("answers") if isinstance(entry, dict) else None
    if not isinstance(given, list):
        refuse(f"{file}, row {row}", "a list of annotators as 'answers'", given)
    answers: list[str] = []
    for one in given:
        value = one.get("answer") if isinstance(one, dict) else None
        if not isinstance(value, str):
            refuse(f"{file}, row {row}", "a text as each annotator's 'answer'", value)
        answers.append(value)
    return agreed(answers, file, row, main)


def agreed(given: Sequence[str], file: Path, row: int, main: str | None = None) -> tuple[str, tuple[str, ...]]:
    """The same of answers that are bare texts; see :func:`annotated`."""
    if len(given) != ANNOTATORS:
        refuse(f"{file}, row {row}", f"the answers of {ANNOTATORS} annotators", found=len(given))
    answers = [_normal_form(answer) for answer in given]
    right = Counter(answers).most_common(1)[0][0] if main is None else _normal_form(main)
    return right, tuple(answers)


@lru_cache(maxsize=1 << 16)
def _normal_form(answer: str) -> str:
    """Kept, because the ten answers to half a million questions are few different ones; they are one object each."""
    return normalise_answer(answer)


def check_split(split: str, known: Collection[str], dataset: str) -> None:
    """Check that a dataset has a split with answers."""
    check_choice(f"{dataset}: split", split, known)


def find(folder: Path, names: Sequence[str], dataset: str) -> Path:
    """The first of several possible files that is there."""
    return first_of([folder / name for name in names], f"the questions of {dataset}")

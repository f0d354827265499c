"""Records of visual questions, and the checks that all readers share."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from confed.data.intake.values import plain_text
from confed.data.refusals import Distinct, check_choice, check_inside, first_of, refuse
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


@dataclass(frozen=True, slots=True)
class Row(InFile):
    """A row of a file, whose columns are checked when a reader asks for them."""

    entry: Any

    def get(self, key: str) -> Any:
        """What stands there; None where there is nothing, or the row is no object."""
        return self.entry.get(key) if isinstance(self.entry, dict) else None

    def text(self, key: str) -> str:
        """A text that is not empty."""
        value = self.get(key)
        if not isinstance(value, str) or not value.strip():
            refuse(self.where, f"a text as {key!r}", value)
        return value

    def texts(self, key: str) -> list[str]:
        """A list of texts."""
        value = self.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            refuse(self.where, f"a list of texts as {key!r}", value)
        return value

    def optional(self, key: str) -> str:
        """A text that may be missing."""
        value = self.get(key)
        if value is None:
            return ""
        plain = value.strip() if isinstance(value, str) and value.isascii() else plain_text(value)
        return self.text(key) if plain is None else plain

    def number(self, key: str, *, below: int | None = None) -> int:
        """An integer that is not negative."""
        value = self.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0 or (below is not None and value >= below):
            expected = "an integer of at least 0" if below is None else f"an integer from 0 to {below - 1}"
            refuse(self.where, f"{expected} as {key!r}", value)
        return value

    def annotated(self, main: str | None = None) -> tuple[str, tuple[str, ...]]:
        """The answers of ten annotators, normalised, and the one that counts as right."""
        given = self.get("answers")
        if not isinstance(given, list):
            refuse(self.where, "a list of annotators as 'answers'", given)
        answers: list[str] = []
        for one in given:
            value = one.get("answer") if isinstance(one, dict) else None
            if not isinstance(value, str):
                refuse(self.where, "a text as each annotator's 'answer'", value)
            answers.append(value)
        return self.agreed(answers, main)

    def agreed(self, given: Sequence[str], main: str | None = None) -> tuple[str, tuple[str, ...]]:
        """The same of answers that are bare texts; see :meth:`annotated`."""
        if len(given) != ANNOTATORS:
            refuse(self.where, f"the answers of {ANNOTATORS} annotators", found=len(given))
        answers = [_normal_form(answer) for answer in given]
        right = Counter(answers).most_common(1)[0][0] if main is None else _normal_form(main)
        return right, tuple(answers)


def rows_of(
    file: Path, items: Iterable[tuple[int, Any]], key: str = "", read: Callable[[Row, str], object] = Row.text
) -> Iterator[Row]:
    """The rows of a file; with a key, no two of them have the same there."""
    distinct = Distinct(key)
    for number, entry in items:
        row = Row(file, number, entry)
        if key:
            distinct.add(read(row, key), file, number)
        yield row


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

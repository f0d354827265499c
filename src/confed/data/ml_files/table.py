"""Compact arrays of hundreds of thousands of labelled rows, grouped by user."""

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from confed.data.ml_files.records import LabelRecord
from confed.data.ragged import PackedTexts, Ragged, multi_hot, offsets_of
from confed.data.refusals import check_form, listed

_LISTED = 5
"""How many offenders a message names."""


@dataclass(frozen=True)
class MultiLabelTable:
    """N rows with any number of C labels each, in which a user's rows stand together.

    Attributes:
        labels: names of the C labels; a label's number is its position.
        present: the numbers of each row's labels, ascending, int32.
        pictures: N names of pictures, as :class:`~confed.data.ml_files.records.LabelRecord` has them; empty texts in a
            dataset of texts.
        texts: N texts, where the dataset has texts.
        users: U names of users, in the order of their first row; none if the dataset has no users.
        user_offsets: where each user's rows begin, and at last N, int64, shape (U + 1,); (1,) without users.
        unreadable: names of pictures that were left out because they could not be read.
    """

    labels: tuple[str, ...]
    present: Ragged
    names: PackedTexts
    pictures: PackedTexts
    texts: PackedTexts | None
    users: PackedTexts
    user_offsets: np.ndarray
    unreadable: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.present)

    def targets(self, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        """The labels of B rows as zeros and ones, float32, shape (B, C)."""
        return multi_hot(self.present, np.asarray(rows, dtype=np.int64), len(self.labels))

    def labels_of(self, row: int) -> tuple[str, ...]:
        """The names of one row's labels."""
        return tuple(self.labels[value] for value in self.present.row(row).tolist())

    def counts(self) -> np.ndarray:
        """Number of rows with each label, int64, shape (C,)."""
        return np.bincount(self.present.values, minlength=len(self.labels))

    def of_users(self) -> "UserRows":
        """User -> its rows, one client per user."""
        if not len(self.users):
            raise ValueError("the dataset has no users to take as clients: deal its rows instead")
        return UserRows(self.users, self.user_offsets)

    @property
    def sizes(self) -> np.ndarray:
        """Rows of each user, int64, shape (U,)."""
        return np.diff(self.user_offsets)

    @property
    def rows_without_labels(self) -> int:
        """Rows of which every label is absent."""
        return int((self.present.lengths == 0).sum())

    @property
    def users_without_labels(self) -> int:
        """Users in all of whose rows every label is absent. They are kept: what they lack is information too."""
        return int((np.diff(self.present.offsets[self.user_offsets]) == 0).sum()) if len(self.users) else 0

    @property
    def nbytes(self) -> int:
        """Bytes that the table holds."""
        parts = (self.present, self.names, self.pictures, self.users, self.texts)
        return self.user_offsets.nbytes + sum(column.nbytes for column in parts if column is not None)

    def keep(self, mask: np.ndarray) -> "MultiLabelTable":
        """The rows that a mask (N,) is true for; users without any row are left out."""
        check_form("the mask", mask, None, len(self))
        if mask.all():
            return self
        rows = np.flatnonzero(mask)
        kept_before = np.concatenate([[0], np.cumsum(mask)])[self.user_offsets]
        staying = np.flatnonzero(np.diff(kept_before))
        return replace(
            self,
            present=self.present.take(rows),
            names=self.names.take(rows),
            pictures=self.pictures.take(rows),
            texts=None if self.texts is None else self.texts.take(rows),
            users=self.users.take(staying),
            user_offsets=np.concatenate([kept_before[:1], kept_before[staying + 1]]),
        )

    def in_order(self, labels: tuple[str, ...]) -> "MultiLabelTable":
        """The same rows with label numbers that are positions in another list, which has all of the names."""
        position = {name: number for number, name in enumerate(labels)}
        numbers = np.array([position[name] for name in self.labels], dtype=np.int32)
        return replace(self, labels=labels, present=_renumbered(self.present, numbers))

    def facts(self) -> dict[str, str]:
        """Description of the table in words, for facts of the dataset."""
        per_row, n = self.present.lengths, len(self)
        facts = {
            "rows": f"{n} with {len(self.present.values) / max(n, 1):.2f} of {len(self.labels)} labels on average, "
            f"{self.rows_without_labels} without any, at most {int(per_row.max(initial=0))}",
            "labels": f"{int((self.counts() == 0).sum())} of {len(self.labels)} labels are on no row",
        }
        if len(self.users):
            facts["users"] = (
                f"{len(self.users)} with {np.median(self.sizes):g} rows in the median, at most {self.sizes.max()}; "
                f"{self.users_without_labels} without any label"
            )
        if self.unreadable:
            facts["unreadable"] = f"{len(self.unreadable)} pictures left out: {_first(self.unreadable)}"
        return facts


class UserRows(Mapping[str, np.ndarray]):
    """User -> row numbers, ascending; made when asked for, so that tens of thousands of users cost little."""

    def __init__(self, users: PackedTexts, offsets: np.ndarray) -> None:
        self._offsets = offsets
        self._numbers = {name: number for number, name in enumerate(users)}

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __getitem__(self, user: str) -> np.ndarray:
        number = self._numbers[user]
        return np.arange(self._offsets[number], self._offsets[number + 1])


def build_table(
    records: Iterable[LabelRecord],
    labels: Sequence[str] | None = None,
    *,
    level: Literal["labels", "fine"] = "labels",
) -> dict[str, MultiLabelTable]:
    """Records as tables, one per split, with the rows of each user together."""
    numbers: dict[str, int] = {}
    if labels is not None:
        _check_distinct(labels)
        numbers = {name: number for number, name in enumerate(labels)}
    parts: dict[str, _Part] = {}
    outside, places = Counter[str](), dict[str, str]()
    for record in records:
        if record.split not in parts:
            parts[record.split] = _Part()
        label_numbers = set[int]()
        for name in record.labels if level == "labels" else record.fine:
            number = numbers.get(name) if labels is not None else numbers.setdefault(name, len(numbers))
            if number is None:
                outside[name] += 1
                places.setdefault(name, record.where)
            else:
                label_numbers.add(number)
        parts[record.split].add(record, label_numbers)
    if outside:
        told = [f"{name!r} ({count} times, first in {places[name]})" for name, count in outside.items()]
        known = f"{len(outside)} labels are outside the {len(numbers)} that are known"
        raise ValueError(f"{known}: {listed(told, _LISTED)}")
    if not parts:
        raise ValueError("expected at least one picture or text with labels, got none")
    order = tuple(sorted(numbers)) if labels is None else tuple(labels)
    new = np.zeros(len(numbers), dtype=np.int32)
    for position, name in enumerate(order):
        new[numbers[name]] = position
    return {split: rows.table(order, new) for split, rows in parts.items()}


class _Part:
    """The rows of one split while they come in."""

    def __init__(self) -> None:
        self.offsets, self.values, self.user_of = array("q", [0]), array("i"), array("q")
        self.users: dict[str, int] = {}
        # Three growing blocks of bytes with the end of each text, instead of as many strings.
        self.texts = [(bytearray(), array("q", [0])) for _ in range(3)]

    def add(self, record: LabelRecord, labels: Iterable[int]) -> None:
        self.values.extend(labels)
        self.offsets.append(len(self.values))
        self.user_of.append(self.users.setdefault(record.user, len(self.users)))
        for (content, ends), text in zip(self.texts, (record.name, record.picture, record.text), strict=True):
            content.extend(text.encode("utf-8", "surrogatepass"))
            ends.append(len(content))

    def table(self, labels: tuple[str, ...], new: np.ndarray) -> MultiLabelTable:
        anonymous = "" in self.users
        if anonymous and len(self.users) > 1:
            raise ValueError("expected a user of every row, or of none; some rows have one and others do not")
        user_of = np.array(self.user_of, dtype=np.int64)
        order = np.argsort(user_of, kind="stable")
        present = Ragged(np.array(self.values, dtype=np.int32), np.array(self.offsets, dtype=np.int64)).take(order)
        names, pictures, texts = (
            PackedTexts(np.frombuffer(content, np.uint8), np.array(ends, dtype=np.int64)).take(order)
            for content, ends in self.texts
        )
        seen = set[str]()
        for name in names:
            if name in seen:
                raise ValueError(f"the identifier {name!r} comes twice")
            seen.add(name)
        sizes = np.zeros(0, np.int64) if anonymous else np.bincount(user_of, minlength=len(self.users))
        return MultiLabelTable(
            labels,
            _renumbered(present, new),
            names,
            pictures,
            texts if len(texts.values) else None,
            PackedTexts.of([] if anonymous else self.users),
            offsets_of(sizes),
        )


def _renumbered(present: Ragged, numbers: np.ndarray) -> Ragged:
    """Label numbers c as ``numbers[c]``, ascending within each row."""
    values = numbers[present.values]
    row = np.repeat(np.arange(len(present)), present.lengths)
    return replace(present, values=values[np.lexsort((values, row))])


def _check_distinct(labels: Sequence[str]) -> None:
    twice = [name for name, count in Counter(labels).items() if count > 1]
    if twice:
        raise ValueError(f"the names of labels must differ, got {_first(twice)} more than once")


def _first(names: Sequence[str]) -> str:
    return listed([*map(repr, names)], _LISTED)

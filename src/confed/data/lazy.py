"""Columns and mappings whose values are made when they are asked for: tens of thousands of users cost little."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Generic, TypeVar, overload

import numpy as np

from confed.data.refusals import check_length

Value = TypeVar("Value")
Other = TypeVar("Other")


class Taken(Sequence[Value], Generic[Value]):
    """Rows of a column that others share, read when they are asked for."""

    def __init__(self, column: Sequence[Value], rows: np.ndarray) -> None:
        self.column, self.rows = column, rows

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Value: ...
    @overload
    def __getitem__(self, index: slice) -> "Taken[Value]": ...
    def __getitem__(self, index: int | slice) -> "Value | Taken[Value]":
        return Taken(self.column, self.rows[index]) if isinstance(index, slice) else self.column[int(self.rows[index])]

    def __iter__(self) -> Iterator[Value]:
        return map(self.column.__getitem__, self.rows.tolist())

    def take(self, rows: np.ndarray) -> "Taken[Value]":
        """Some of these values."""
        return Taken(self.column, self.rows[rows])


class NoTexts(Sequence[str]):
    """N texts that are not there, in the place of a column of texts."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> "NoTexts": ...
    def __getitem__(self, index: int | slice) -> "str | NoTexts":
        return NoTexts(len(range(self._count)[index])) if isinstance(index, slice) else ""

    def __iter__(self) -> Iterator[str]:
        return repeat("", self._count)

    def take(self, rows: np.ndarray) -> "NoTexts":
        """As many as there are rows."""
        return NoTexts(len(rows))


def take_rows(column: Sequence[Value], rows: np.ndarray) -> Sequence[Value]:
    """The given rows of a column; those of a shared one are not made for it."""
    if isinstance(column, Taken | NoTexts):
        return column.take(rows)  # pyright: ignore[reportReturnType]
    return [column[row] for row in rows.tolist()]


def shared_columns(columns: "Sequence[Sequence[Value]]") -> list[Sequence[Value]]:
    """The whole columns of which some columns are rows, each once."""
    whole = [column.column if isinstance(column, Taken) else column for column in columns]
    return list({id(column): column for column in whole}.values())


class Lazy(Mapping[str, Value]):
    """Mapping whose values are made on access and not kept; ``sizes`` of clients are known without making them."""

    def __init__(
        self, keys: Mapping[str, object], make: Callable[[str], Value], sizes: np.ndarray | None = None
    ) -> None:
        check_length("sizes", sizes, len(keys), "client")
        self._keys, self._make, self.sizes = keys, make, sizes

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __getitem__(self, key: str) -> Value:
        if key not in self._keys:
            raise KeyError(key)
        return self._make(key)


def changed(values: Mapping[str, Value], change: Callable[[Value], Other]) -> Mapping[str, Other]:
    """A mapping with other values, which are made on access where the given ones are."""
    if isinstance(values, Lazy):
        return Lazy(values, lambda key: change(values[key]), values.sizes)
    return {key: change(value) for key, value in values.items()}


def without(values: Mapping[str, Value], names: Sequence[str]) -> Mapping[str, Value]:
    """A mapping without some of its keys; no value is made for it."""
    left_out = frozenset(names)
    stay = dict.fromkeys(key for key in values if key not in left_out)
    if not isinstance(values, Lazy):
        return {key: values[key] for key in stay}
    stays = np.array([key not in left_out for key in values], dtype=bool)
    return Lazy(stay, values.__getitem__, None if values.sizes is None else values.sizes[stays])


def known_sizes(clients: Mapping[str, object]) -> np.ndarray | None:
    """Training examples of each client, int64, shape (clients,), where they are known without making splits."""
    return clients.sizes if isinstance(clients, Lazy) else None

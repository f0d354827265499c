"""Rows of different lengths in one array: texts, labels, recordings, series."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self, TypeVar, overload

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Ragged:
    """M rows of different lengths, one behind the other; ``offsets`` int64 (M + 1,) says where each begins."""

    values: np.ndarray
    offsets: np.ndarray

    def __post_init__(self) -> None:
        offsets, length = self.offsets, len(self.values)
        if offsets.dtype != np.int64 or offsets.ndim != 1 or len(offsets) < 1:
            raise ValueError(f"offsets must be int64 of shape (M + 1,), got {offsets.dtype} {offsets.shape}")
        if offsets[0] != 0 or offsets[-1] != length:
            raise ValueError(f"offsets must go from 0 to {length}, got {offsets[0]} to {offsets[-1]}")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Length of each row, int64, shape (M,)."""
        return np.diff(self.offsets)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.values.nbytes + self.offsets.nbytes

    def row(self, number: int) -> np.ndarray:
        """One row, shape (length, ...); a view."""
        return self.values[self.offsets[number] : self.offsets[number + 1]]

    def take(self, rows: np.ndarray) -> Self:
        """The given rows, in that order; in time O(B and their values) for B rows, however many there are."""
        # Not lengths[rows]: tens of thousands of users would each walk through all rows.
        starts = self.offsets[:-1][rows]
        offsets = offsets_of(self.offsets[1:][rows] - starts)
        places = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], np.diff(offsets))
        return replace(self, values=self.values[places], offsets=offsets)

    def padded(self, rows: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """Rows side by side, float32 (B, longest, ...), zeros behind each, and their lengths, int64 (B,)."""
        numbers = rows.cpu().numpy()
        first, lengths = self.offsets[numbers], self.offsets[numbers + 1] - self.offsets[numbers]
        table = np.zeros((len(numbers), int(lengths.max(initial=0)), *self.values.shape[1:]), dtype=np.float32)
        for row, (start, length) in enumerate(zip(first.tolist(), lengths.tolist(), strict=True)):
            table[row, :length] = self.values[start : start + length]
        return torch.from_numpy(table * np.float32(scale)), torch.from_numpy(lengths)

    def check_filled(self, what: str) -> None:
        """Check that no row is empty."""
        if (empty := np.flatnonzero(self.lengths == 0)).size:
            raise ValueError(f"{what} number {int(empty[0])} is empty ({empty.size} such)")


class PackedTexts(Ragged, Sequence[str]):
    """N texts as bytes of UTF-8, ``values`` uint8, which take a fraction of what as many strings take."""

    @classmethod
    def of(cls, texts: Iterable[str]) -> "PackedTexts":
        """Packed texts of an iterator, which are never in memory together."""
        content, ends = bytearray(), array("q", [0])
        for text in texts:
            content += text.encode("utf-8", "surrogatepass")
            ends.append(len(content))
        return cls(np.frombuffer(bytes(content), np.uint8), np.array(ends, dtype=np.int64))

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> "PackedTexts": ...
    def __getitem__(self, index: int | slice) -> "str | PackedTexts":
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"text {index} of {len(self)}")
        return self.row(position).tobytes().decode("utf-8", "surrogatepass")


Rows = TypeVar("Rows", bound=Ragged)


def offsets_of(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Offsets of M rows of the given lengths, int64, shape (M + 1,)."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def end_to_end(parts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """At least one array (length, ...) as the values and offsets of a :class:`Ragged`."""
    return np.concatenate(parts), offsets_of(list(map(len, parts)))


def joined(tables: Sequence[Rows]) -> Rows:
    """The rows of several tables one behind the other; everything else is the first one's."""
    values = np.concatenate([table.values for table in tables])
    return replace(tables[0], values=values, offsets=offsets_of(np.concatenate([table.lengths for table in tables])))


def multi_hot(present: Ragged, rows: np.ndarray, classes: int) -> np.ndarray:
    """The labels of B chosen rows as zeros and ones, float32, shape (B, C)."""
    chosen = present.take(rows)
    result = np.zeros((len(rows), classes), dtype=np.float32)
    result[np.repeat(np.arange(len(rows)), chosen.lengths), chosen.values] = 1
    return result

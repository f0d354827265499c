"""Picture tables: in memory, in files, at another site, or without pixels."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor


class Pictures(Protocol):
    """A table of pictures that may lie elsewhere than in memory; a NumPy array is one."""

    dtype: np.dtype
    ndim: int

    @property
    def shape(self) -> tuple[int, ...]:
        """(M, H, W, 3)."""
        ...

    def __len__(self) -> int:
        """M."""
        ...

    def __getitem__(self, index: Any) -> np.ndarray:
        """One picture (H, W, 3), or those of an array of B indices (B, H, W, 3)."""
        ...


@dataclass(frozen=True)
class LeftOut:
    """Pictures that cannot be read, and how many examples were left out with them."""

    pictures: tuple[str, ...]
    of: int
    examples: Mapping[str, Mapping[str, int]]

    def __str__(self) -> str:
        total = sum(chain.from_iterable(roles.values() for roles in self.examples.values()))
        sentence = f"{len(self.pictures)} of {self.of} pictures cannot be read and are left out with {total} examples"
        return f"{sentence} ({by_place(self.examples)})" if total else sentence


def by_place(examples: Mapping[str, Mapping[str, int]]) -> str:
    """Counts as "park 2 train, 1 test; lake 1 unseen"."""
    lines: list[str] = []
    for place, roles in examples.items():
        lines.append(f"{place} " + ", ".join(f"{count} {role}" for role, count in roles.items()))
    return "; ".join(lines)


class StoredPictures:
    """:class:`Pictures` as a table of tensors (M, 3, H, W) that reads the rows it is asked for, and keeps none."""

    def __init__(self, pictures: Pictures) -> None:
        self.pictures = pictures

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, rows: Tensor) -> Tensor:
        """The pictures of B row numbers, uint8, shape (B, 3, H, W)."""
        return torch.from_numpy(np.ascontiguousarray(self.pictures[rows.cpu().numpy()].transpose(0, 3, 1, 2)))


class NoPictures:
    """M pictures that are not there, for a dataset that has features alone; in a picture table's place."""

    dtype = np.dtype(np.uint8)
    ndim = 4

    def __init__(self, count: int) -> None:
        self.shape = (count, 0, 0, 3)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> np.ndarray:
        """Access that always fails, as the dataset has region features and no pictures."""
        raise ValueError("the dataset has features of its pictures and not the pictures")


class PicturesBehind:
    """A table of pictures with K more behind its own."""

    dtype = np.dtype(np.uint8)
    ndim = 4

    def __init__(self, pictures: Pictures, more: np.ndarray | Pictures) -> None:
        self._pictures, self._more = pictures, more
        self.shape: tuple[int, ...] = (len(pictures) + len(more), *more.shape[1:])

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> np.ndarray:
        first = len(self._pictures)
        if np.ndim(index) == 0:
            return self._more[index - first] if index >= first else self._pictures[index]
        rows = np.asarray(index)
        from_first = rows < first
        pictures = np.empty((len(rows), *self.shape[1:]), dtype=np.uint8)
        if from_first.any():
            pictures[from_first] = self._pictures[rows[from_first]]
        pictures[~from_first] = self._more[rows[~from_first] - first]
        return pictures


def behind(images: np.ndarray | Pictures, more: np.ndarray | Pictures) -> np.ndarray | Pictures:
    """A table of pictures with more behind it, which are absent too where these are."""
    if isinstance(images, NoPictures):
        return NoPictures(len(images) + len(more))
    if isinstance(images, np.ndarray):
        # Channels come first in memory, so that the tensor made of it is a view.
        both = np.concatenate([part.transpose(0, 3, 1, 2) for part in (images, np.asarray(more))])
        return both.transpose(0, 2, 3, 1)
    return PicturesBehind(images, np.asarray(more))


def channels_first(images: np.ndarray | Pictures) -> Tensor | StoredPictures:
    """Pictures (M, H, W, 3) as a table of tensors (M, 3, H, W)."""
    if isinstance(images, NoPictures):
        raise ValueError(
            "the dataset has features of its pictures and not the pictures: choose a model that reads regions"
        )
    if not isinstance(images, np.ndarray):
        return StoredPictures(images)
    return torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))

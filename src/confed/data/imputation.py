"""Imputation of missing pictures and texts for models that need both."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from confed.data.examples import Examples, FederatedDataset, Split, presence
from confed.data.modalities import MODALITIES
from confed.data.picture_tables import NoPictures, Pictures
from confed.data.regions import HeldRegions, Regions, join

__all__ = ["Fill", "impute"]

Fill = Literal["zero", "mean"]

LOOKED_AT = 1000
"""Pictures of a client whose mean is taken; of more, so many that are spread evenly."""

_Key = tuple[str, str]
"""Client or place, and role."""
_Stored = tuple[int, int]
"""The identity of a table of pictures and of its regions."""


def impute(dataset: FederatedDataset, fill: Fill) -> FederatedDataset:
    """A dataset with stand-ins for missing pictures.

    Stand-ins are put behind the tables of pictures, and ``image_index`` names them; a missing text is an empty one
    already, of which a tokenizer makes what it makes of nothing. ``present`` still tells what was missing.

    Raises ``ValueError``: no example has a picture, pictures are of several sizes, or the dataset brings features of
    regions that are not in memory or whose mean is asked for.

    Args:
        dataset: the data.
        fill: "zero" for a black picture, or features of zeros; "mean" for the mean of the client's training pictures.
            An unseen place takes the mean of its own; a client without pictures gets a black one.
    """
    parts: dict[_Key, Examples] = {}
    for name, split in dataset.clients.items():
        parts |= {(name, "train"): split.train, (name, "validation"): split.validation, (name, "test"): split.test}
    parts |= {(name, "unseen"): examples for name, examples in dataset.unseen.items()}
    gone = {key: ~presence(examples)[:, MODALITIES.index("image")] for key, examples in parts.items()}
    if not any(rows.any() for rows in gone.values()):
        return dataset
    shape = _one_shape(dataset.name, parts.values())
    # Whose stand-ins each table needs, in a fixed order.
    wanted: dict[_Stored, list[str]] = {}
    for (name, role), rows in gone.items():
        examples = parts[name, role]
        names = wanted.setdefault(_stored(examples), [])
        bare = isinstance(examples.images, NoPictures) and examples.regions is None
        if (rows.any() or bare) and name not in names:
            names.append(name)
    made: dict[_Stored, tuple[np.ndarray | Pictures, Regions | None]] = {}

    def whole(key: _Key) -> Examples:
        examples, rows, name = parts[key], gone[key], key[0]
        names = wanted[_stored(examples)]
        if not names:
            return examples
        if _stored(examples) not in made:
            own = [parts.get((n, "train"), parts.get((n, "unseen"), examples)) for n in names]
            pictures = np.stack([_stand_in(e, fill, shape) for e in own])
            made[_stored(examples)] = _behind(examples, pictures, fill)
        images, regions = made[_stored(examples)]
        index = examples.image_index.copy()
        if rows.any():
            index[rows] = len(images) - len(names) + names.index(name)
        return replace(examples, images=images, regions=regions, image_index=index)

    clients = {n: Split(whole((n, "train")), whole((n, "validation")), whole((n, "test"))) for n in dataset.clients}
    return replace(dataset, clients=clients, unseen={name: whole((name, "unseen")) for name in dataset.unseen})


def _stored(examples: Examples) -> _Stored:
    return id(examples.images), id(examples.regions)


def _one_shape(name: str, parts: Iterable[Examples]) -> tuple[int, ...]:
    """The shape (H, W, 3) of all pictures; (0, 0, 3) where there are features alone."""
    shapes = {tuple(e.images.shape[1:]) for e in parts if not isinstance(e.images, NoPictures)}
    if not shapes and any(e.regions is not None for e in parts):
        return 0, 0, 3
    if len(shapes) != 1:
        raise ValueError(
            f"the model reads a picture of every example, and those that {name!r} lacks cannot be filled in: its "
            f"pictures must all have one size, got {', '.join(map(str, sorted(shapes))) or 'no pictures'}"
        )
    return next(iter(shapes))


def _stand_in(examples: Examples, fill: Fill, shape: tuple[int, ...]) -> np.ndarray:
    """One picture, uint8, in the place of those that are missing."""
    rows = np.flatnonzero(presence(examples)[:, MODALITIES.index("image")])
    if fill == "zero" or not len(rows):
        return np.zeros(shape, np.uint8)
    if isinstance(examples.images, NoPictures):
        raise ValueError("data.missing.fill must be 'zero' where a dataset has features and not the pictures")
    rows = rows[np.linspace(0, len(rows) - 1, min(len(rows), LOOKED_AT)).round().astype(np.int64)]
    total = np.zeros(shape, np.float64)
    for part in np.array_split(np.ravel(examples.image_index[rows]), -(-len(rows) // 100)):
        total += examples.images[part].sum(axis=0, dtype=np.float64)
    return np.rint(total / np.size(examples.image_index[rows])).astype(np.uint8)


def _behind(examples: Examples, pictures: np.ndarray, fill: Fill) -> tuple[np.ndarray | Pictures, Regions | None]:
    """A table of pictures, and of their regions, with K more behind it."""
    count, images, regions = len(pictures), examples.images, examples.regions
    if regions is not None:
        if not isinstance(regions, HeldRegions):
            raise ValueError("missing pictures can be filled in where features of regions are in memory only")
        if fill == "mean":
            raise ValueError("data.missing.fill must be 'zero' for a dataset with features of regions")
        _, most, width = regions.shape
        blank = HeldRegions(np.zeros((count, most, width), np.float32), np.zeros((count, most, 4)), regions.encoder)
        regions = join([regions, blank])
    if isinstance(images, NoPictures):
        # Without features these are the examples of a client without pictures: there are stand-ins alone.
        return (pictures, None) if regions is None else (NoPictures(len(images) + count), regions)
    if isinstance(images, np.ndarray):
        # Channels come first in memory, so that the tensor made of it is a view.
        both = np.concatenate([images.transpose(0, 3, 1, 2), pictures.transpose(0, 3, 1, 2)])
        return both.transpose(0, 2, 3, 1), regions
    return _Behind(images, pictures), regions


class _Behind:
    """A table of pictures with K more behind its own; implements :class:`confed.data.picture_tables.Pictures`."""

    dtype = np.dtype(np.uint8)
    ndim = 4

    def __init__(self, pictures: Pictures, more: np.ndarray) -> None:
        self._pictures, self._more = pictures, more
        self.shape: tuple[int, ...] = (len(pictures) + len(more), *more.shape[1:])

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> np.ndarray:
        first = len(self._pictures)
        if np.ndim(index) == 0:
            return self._more[index - first] if index >= first else self._pictures[index]
        rows = np.asarray(index)
        own = rows < first
        found = np.empty((len(rows), *self.shape[1:]), dtype=np.uint8)
        if own.any():
            found[own] = self._pictures[rows[own]]
        found[~own] = self._more[rows[~own] - first]
        return found

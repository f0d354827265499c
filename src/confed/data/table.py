"""Tensor tables of examples and batches of their rows."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor

from confed.data.picture_tables import StoredPictures
from confed.data.regions import Regions
from confed.data.targets import SoftTargets
from confed.federation.batches import gathered
from confed.federation.protocols import FromRows

# Batch of rows of a table whose tensors are gathered when they are read ---------------------------------------


class RowBatch(Mapping[str, Tensor], FromRows):
    """A batch that says which rows it has; a :class:`confed.federation.protocols.FromRows`.

    Where features of frozen layers are kept, nobody reads the pictures, and they are not gathered from memory or disk.
    A batch with anything else in it is made of copies: ``{**batch, "image": other}`` is an ordinary dictionary.
    """

    def __init__(self, source: object, rows: Tensor, parts: Mapping[str, Callable[[], Tensor]]) -> None:
        self.source, self.rows = source, rows
        self._parts = parts
        self._gathered: dict[str, Tensor] = {}

    @property
    def untouched(self) -> bool:
        """Whether no tensor was changed in place."""
        return all(tensor._version == 0 for tensor in self._gathered.values())

    def __getitem__(self, key: str) -> Tensor:
        if key not in self._gathered:
            self._gathered[key] = self._parts[key]()
        return self._gathered[key]

    def __contains__(self, key: object) -> bool:
        return key in self._parts

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


# Tensor tables of examples and batches of their rows ----------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """Examples as tensors: ``image`` (M, 3, H, W) uint8 or regions of M pictures, and per-question rows.

    Attributes:
        images: picture table, uint8, shape (M, 3, H, W), in memory or not; None where the model reads regions.
        image_index: (N,) int64, or (N, 2) for pairs of pictures, or (N, P) where rows have up to P.
        columns: further tensors with first dimension N, such as ``text`` and ``text_mask`` (N, L) and
            ``label`` (N,), all int64, and ``answerable`` (N,), bool. With ``image_count`` (N,), int64, rows have so
            many pictures each.
        regions: features of the M pictures, where the model reads those.
        targets: every annotator's answer, where there are several.
    """

    images: Tensor | StoredPictures | None
    image_index: Tensor
    columns: Mapping[str, Tensor]
    regions: Regions | None = None
    targets: SoftTargets | None = None

    def __len__(self) -> int:
        return len(self.image_index)

    def batch(self, rows: Tensor) -> dict[str, Tensor]:
        """The given rows as one batch, with their numbers under ``index``.

        Pictures are under ``image``, of pairs also under ``image2``; of conversations ``image`` is uint8
        (B, P, 3, H, W) with as many as the example with the most, the others' first ones again behind their own.
        Regions are under ``regions``, float32 (B, R, W), and ``boxes``, float32 (B, R, 4): x1, y1, x2, y2 in [0, 1] of
        the picture. Of several annotators, their answers are under ``annotated``, int64 (B, A), labels or C for one
        outside the vocabulary, and the scores that follow under ``target``, float32 (B, C).
        """
        return {name: gather() for name, gather in self._gathers(rows).items()}

    def sets(self) -> list[tuple[str, ...]]:
        """The sets of modalities that its examples have, each once, in the fixed order of modalities."""
        pictures = self.images is not None or self.regions is not None
        return [(*(["image"] if pictures else []), *(["text"] if "text" in self.columns else []))]

    def groups(self, rows: Tensor) -> list[Tensor]:
        """The given rows in groups that have one set of modalities each, in the order of their first rows."""
        return [rows]

    def inputs(self, modality: str) -> Tensor:
        """Identity of each example's input of a modality that it has, int64, first dimension N."""
        return self.image_index if modality == "image" else self.columns["text"] * self.columns["text_mask"]

    def row_batch(self, rows: Tensor, source: object) -> RowBatch:
        """The given rows as :meth:`batch` has them, each tensor gathered when it is read."""
        return RowBatch(source, rows, self._gathers(rows))

    def _gathers(self, rows: Tensor) -> dict[str, Callable[[], Tensor]]:
        """Name of each tensor of a batch -> what gathers it."""
        pictures = self.image_index[rows]
        first = pictures if pictures.ndim == 1 else pictures[:, 0]
        parts: dict[str, Callable[[], Tensor]] = {
            name: partial(gathered, column, rows) for name, column in self.columns.items()
        }
        if self.images is not None and "image_count" in self.columns:
            most = max(int(self.columns["image_count"][rows].max()), 1) if len(rows) else 1
            each = partial(_pictures, self.images, pictures[:, :most].flatten())
            parts["image"] = lambda: each().unflatten(0, (len(rows), most))
        elif self.images is not None:
            parts["image"] = partial(_pictures, self.images, first)
            if pictures.ndim == 2:
                parts["image2"] = partial(_pictures, self.images, pictures[:, 1])
        if (regions := self.regions) is not None:
            both = cache(lambda: tuple(map(torch.from_numpy, regions[first.cpu().numpy()])))
            parts |= {"regions": lambda: both()[0], "boxes": lambda: both()[1]}
        if (targets := self.targets) is not None:
            parts |= {"target": lambda: targets[rows], "annotated": lambda: targets.labels[rows]}
        parts["index"] = lambda: rows
        return parts

    def on(self, move: Callable[[Tensor], Tensor]) -> "Table":
        """The same rows with other tensors in place of pictures and columns.

        What is read from files, regions and annotators' answers stay on the host, as do the indices of pictures.
        """
        images = move(self.images) if isinstance(self.images, Tensor) else self.images
        return replace(self, images=images, columns={name: move(column) for name, column in self.columns.items()})

    def take(self, count: int) -> "Table":
        """The first ``count`` rows; the pictures are shared."""
        columns = {name: column[:count] for name, column in self.columns.items()}
        targets = None if self.targets is None else self.targets.take(count)
        return Table(self.images, self.image_index[:count], columns, self.regions, targets)

    def batches(self, batch_size: int, order: Tensor | None = None) -> Iterator[dict[str, Tensor]]:
        """All rows, in ``order`` (default: as stored); the last batch may be smaller."""
        order = torch.arange(len(self)) if order is None else order
        for rows in order.split(batch_size) if len(order) else ():
            yield self.batch(rows)

    def steps(self, batch_size: int, least: int = 1) -> int:
        """Number of batches per shuffled epoch with at least ``least`` examples."""
        whole, rest = divmod(len(self), batch_size)
        return whole * (batch_size >= least) + (rest >= max(least, 1))


def _pictures(table: Tensor | StoredPictures, numbers: Tensor) -> Tensor:
    return gathered(table, numbers) if isinstance(table, Tensor) else table[numbers]

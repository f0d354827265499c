"""Tensor tables of examples, batches of their rows, and several tables as one.

A modality that an example lacks is a key that its batch lacks: nothing stands in for it, and a batch costs what it
has. Models that need all their keys get tables without gaps instead (:mod:`confed.data.imputation`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from confed.data.picture_tables import StoredPictures
from confed.data.ragged import joined
from confed.data.refusals import check_same, refuse
from confed.data.regions import HeldRegions, Regions, join
from confed.data.sounds import Series, Sounds
from confed.data.targets import SoftTargets, SparseLabels
from confed.federation.batches import gathered
from confed.federation.ownership import MODALITIES
from confed.federation.protocols import FromRows

# Batch of rows of a table whose tensors are gathered when they are read ---------------------------------------


class RowBatch(Mapping[str, Tensor], FromRows):
    """A batch that says which rows it has; a :class:`confed.federation.protocols.FromRows`.

    Where features of frozen layers are kept, nobody reads the pictures, and they are not gathered from memory or disk.
    A batch with anything else in it is made of copies: ``{**batch, "image": other}`` is an ordinary dictionary.
    """

    def __init__(
        self,
        source: object,
        rows: Tensor,
        parts: Mapping[str, Callable[[], Tensor]],
        added: frozenset[str] = frozenset(),
    ) -> None:
        self.source, self.rows = source, rows
        self._parts, self._added = parts, added
        self._gathered: dict[str, Tensor] = {}

    def with_tensor(self, name: str, gather: Callable[[], Tensor]) -> "RowBatch":
        """The same rows with one more tensor."""
        return RowBatch(self.source, self.rows, {**self._parts, name: gather}, self._added | {name})

    def same_rows(self, names: Iterable[str]) -> bool:
        """Whether none of these tensors was added or changed in place."""
        unchanged = all(tensor._version == 0 for tensor in self._gathered.values())
        return unchanged and self._added.isdisjoint(names)

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

STORED_BYTES = 2**20  # of a picture that is read when it is asked for, at most about
BLOCK_BYTES = 2**20  # of a column, gathered for several batches at once


def _split(column: Tensor, rows: Tensor, batch_size: int) -> tuple[Tensor, ...]:
    return gathered(column, rows).split(batch_size)


_TEXT = ("text", "text_mask")
_BEFORE = ("before_text", "before_text_mask", "before_shown")


@dataclass(frozen=True)
class Table:
    """Examples as tensors: pictures, regions, sounds and series that rows refer to, and columns with a value per row.

    What is not None, and which columns there are, says what batches have.

    Attributes:
        images: picture table, uint8, shape (M, 3, H, W), in memory or not; None where the model reads regions.
        image_index: (N,) int64, or (N, 2) for pairs of pictures, or (N, P) where rows have up to P; of documents
            (N, 1 + P), the example's own picture and those of up to P turns before it.
        columns: further tensors with first dimension N, such as ``text`` and ``text_mask`` (N, L) and
            ``label`` (N,), all int64, and ``answerable`` (N,), bool. With ``image_count`` (N,), int64, rows have so
            many pictures each. With ``before_text`` and ``before_text_mask`` int64 (N, P, L), all zero for a turn
            without a text, and ``before_shown`` bool (N, P), whether a turn has a picture, some rows are documents.
        regions: features of the M pictures, where the model reads those.
        targets: every annotator's answer, where there are several.
        labels: where examples have any number of labels, those of the rows that ``image_index`` counts.
        present: which modalities each example has, in their fixed order, bool (N, 4); None where all have the same.
        sounds: recordings, where there are some.
        sound_index: (N,) int64.
        series: values of sensors, where there are some.
        series_index: (N,) int64.
    """

    images: Tensor | StoredPictures | None
    image_index: Tensor
    columns: Mapping[str, Tensor]
    regions: Regions | None = None
    targets: SoftTargets | None = None
    labels: SparseLabels | None = None
    present: Tensor | None = None
    sounds: Sounds | None = None
    sound_index: Tensor | None = None
    series: Series | None = None
    series_index: Tensor | None = None

    def __len__(self) -> int:
        return self.image_index.shape[0]  # the length of a tensor takes ten times as long

    @property
    def by_rows(self) -> bool:
        """Whether any rows may be one batch, of which each tensor can be gathered when it is read."""
        return self.present is None and "image_count" not in self.columns

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in a batch, where no tensor is as long as the longest of the batch needs; else 0."""
        others = (self.regions, self.targets, self.labels, self.sounds, self.series)
        if not self.by_rows or self.image_index.ndim > 1 or any(stored is not None for stored in others):
            return 0
        held = [*self.columns.values(), *(() if self.images is None else (self.images,))]
        return sum(tensor[:1].nbytes if isinstance(tensor, Tensor) else STORED_BYTES for tensor in held)

    def batch(self, rows: Tensor) -> dict[str, Tensor]:
        """The given rows as one batch, with their numbers under ``index``, without keys of modalities that they lack.

        Pictures are under ``image``, of pairs also under ``image2``; of conversations ``image`` is uint8
        (B, P, 3, H, W) with as many as the example with the most, the others' first ones again behind their own.
        Regions are under ``regions``, float32 (B, R, W), and ``boxes``, float32 (B, R, 4): x1, y1, x2, y2 in [0, 1] of
        the picture. Of several annotators, their answers are under ``annotated``, int64 (B, A), labels or C for one
        outside the vocabulary, and the scores that follow under ``target``, float32 (B, C). Labels are under
        ``labels``, float32 (B, C). Recordings are under ``audio``, float32 (B, T) in [-1, 1), with ``audio_length``
        (B,); values of sensors under ``series``, float32 (B, S, K), with ``series_length`` (B,); zeros stand behind the
        end of each. Documents have ``before_image`` uint8 (B, P, 3, H, W), unless none of their turns has a picture,
        besides the columns, all with P turns of the longest of them.
        """
        return {name: gather() for name, gather in self._gathers(rows).items()}

    def sets(self) -> list[tuple[str, ...]]:
        """The sets of modalities that its examples have, each once, in the fixed order of modalities."""
        if self.present is None:
            return [self._everything()]
        kinds: list[list[bool]] = torch.unique(self.present, dim=0).tolist() if len(self) else []
        return [_named(kind) for kind in kinds]

    def groups(self, rows: Tensor) -> list[Tensor]:
        """The given rows in groups that have one set of modalities each, in the order of their first rows."""
        if self.present is None:
            return [rows]
        rows_of_kind: dict[int, list[int]] = {}
        for row, kind in zip(rows.tolist(), self._kinds(self.present)[rows].tolist(), strict=True):
            rows_of_kind.setdefault(kind, []).append(row)
        return [torch.tensor(group, dtype=torch.int64) for group in rows_of_kind.values()]

    def inputs(self, modality: str) -> Tensor:
        """Identity of each example's input of a modality that it has, int64, first dimension N."""
        index = {"image": self.image_index, "audio": self.sound_index, "series": self.series_index}.get(modality)
        return self.columns["text"] * self.columns["text_mask"] if index is None else index

    def row_batches(self, order: Tensor, batch_size: int, source: object) -> Iterator[RowBatch]:
        """Batches of the given rows as :meth:`batch` has them, each tensor gathered when it is read."""
        if len(order) <= batch_size:
            yield from [RowBatch(source, order, self._gathers(order))] if len(order) else ()
            return
        row_bytes = [column.nbytes // max(len(column), 1) for column in self.columns.values()]
        batches = max(1, BLOCK_BYTES // max([batch_size, *(batch_size * size for size in row_bytes)]))
        for block in order.split(batches * batch_size):
            columns = {name: cache(partial(_split, column, block, batch_size)) for name, column in self.columns.items()}
            for place, rows in enumerate(block.split(batch_size) if len(block) else ()):
                gathers = {name: lambda parts=parts, place=place: parts()[place] for name, parts in columns.items()}
                yield RowBatch(source, rows, self._gathers(rows, gathers))

    @property
    def turns(self) -> Tensor:
        """Number of turns before each row, int64 (N,)."""
        if "before_shown" not in self.columns:
            return torch.zeros(len(self), dtype=torch.int64)
        filled = self.columns["before_shown"] | self.columns["before_text_mask"].any(2)
        return (filled * torch.arange(1, filled.shape[1] + 1)).amax(1) if filled.shape[1] else filled.long().sum(1)

    def _everything(self) -> tuple[str, ...]:
        pictures = self.images is not None or self.regions is not None
        return (*(["image"] if pictures else []), *(["text"] if "text" in self.columns else []))

    def _modalities(self, rows: Tensor) -> tuple[str, ...]:
        """The modalities that all of the rows have."""
        if self.present is None:
            return self._everything()
        kinds = self.present[rows]
        if len(kinds) and bool((kinds != kinds[0]).any()):
            raise ValueError("all examples of a batch must have the same modalities, got several sets in one batch")
        return _named((kinds[0] if len(kinds) else self.present.any(dim=0)).tolist())

    def _gathers(
        self, rows: Tensor, columns: Mapping[str, Callable[[], Tensor]] | None = None
    ) -> dict[str, Callable[[], Tensor]]:
        """Name of each tensor of a batch -> what gathers it."""
        here = self._modalities(rows)
        skipped = (*(() if "text" in here else _TEXT), *_BEFORE)
        if columns is None:
            columns = {name: partial(gathered, column, rows) for name, column in self.columns.items()}
        parts = {name: gather for name, gather in columns.items() if name not in skipped}
        if "image" in here:
            parts |= self._pictures(rows)
        if (targets := self.targets) is not None:
            parts |= {"target": lambda: targets[rows], "annotated": lambda: targets.labels[rows]}
        parts["index"] = lambda: rows
        if (labels := self.labels) is not None:
            parts["labels"] = lambda: labels[self.image_index[rows]]
        for name, clips, index in (
            ("audio", self.sounds, self.sound_index), ("series", self.series, self.series_index),
        ):  # fmt: skip
            if name in here and clips is not None and index is not None:
                both = cache(partial(clips.__getitem__, index[rows]))
                parts |= {name: lambda both=both: both()[0], f"{name}_length": lambda both=both: both()[1]}
        return parts | self._before(rows)

    def _pictures(self, rows: Tensor) -> dict[str, Callable[[], Tensor]]:
        pictures, parts = self.image_index[rows], dict[str, Callable[[], Tensor]]()
        first = pictures if pictures.ndim == 1 else pictures[:, 0]
        if self.images is not None and "image_count" in self.columns:
            most = max(int(self.columns["image_count"][rows].max()), 1) if len(rows) else 1
            each = partial(_pictures, self.images, pictures[:, :most].flatten())
            parts["image"] = lambda: each().unflatten(0, (len(rows), most))
        elif self.images is not None:
            parts["image"] = partial(_pictures, self.images, first)
            if pictures.ndim == 2 and "before_shown" not in self.columns:
                parts["image2"] = partial(_pictures, self.images, pictures[:, 1])
        if (regions := self.regions) is not None:
            both = cache(lambda: tuple(map(torch.from_numpy, regions[first.cpu().numpy()])))
            parts |= {"regions": lambda: both()[0], "boxes": lambda: both()[1]}
        return parts

    def _before(self, rows: Tensor) -> dict[str, Callable[[], Tensor]]:
        """What stands before the rows, if they are documents."""
        if "before_shown" not in self.columns:
            return {}
        turns = self.turns[rows]
        if len(turns) and bool(((turns > 0) != (turns[0] > 0)).any()):
            raise ValueError("the examples of a batch must all be documents, or none of them")
        if not len(turns) or not bool(turns[0] > 0):
            return {}
        most, parts = int(turns.max()), dict[str, Callable[[], Tensor]]()
        for name in _BEFORE:
            parts[name] = partial(gathered, self.columns[name][:, :most], rows)
        if bool(self.columns["before_shown"][rows].any()) and self.images is not None:
            numbers = self.image_index[rows, 1 : 1 + most]
            each = partial(_pictures, self.images, numbers.flatten())
            parts["before_image"] = lambda: each().unflatten(0, tuple(numbers.shape))
        return parts

    def on(self, move: Callable[[Tensor], Tensor]) -> "Table":
        """The same rows with other tensors in place of pictures and columns.

        What is read from files, regions, labels and annotators' answers stay on the host, as do the indices of
        pictures; so does everything where examples differ in what they have, which decides what a batch is made of.
        """
        if self.present is not None:
            return self
        images = move(self.images) if isinstance(self.images, Tensor) else self.images
        return replace(self, images=images, columns={name: move(column) for name, column in self.columns.items()})

    def take(self, count: int) -> "Table":
        """The first ``count`` rows; pictures, labels, recordings and values are shared."""
        return replace(
            self,
            image_index=self.image_index[:count],
            columns={name: column[:count] for name, column in self.columns.items()},
            targets=None if self.targets is None else self.targets.take(count),
            present=None if self.present is None else self.present[:count],
            sound_index=None if self.sound_index is None else self.sound_index[:count],
            series_index=None if self.series_index is None else self.series_index[:count],
        )

    def batches(self, batch_size: int, order: Tensor | None = None) -> Iterator[dict[str, Tensor]]:
        """All rows, in ``order`` (default: as stored), each batch of one set of modalities; a last one may be smaller.

        As stored, a batch also ends where the set changes. In an ``order``, rows wait for others of their set until a
        batch of these is full; what then still waits comes at the end, in the order of the sets' first rows.
        """
        for rows in self._rows_of_batches(batch_size, order):
            yield self.batch(rows)

    def _rows_of_batches(self, batch_size: int, order: Tensor | None) -> Iterator[Tensor]:
        stored = torch.arange(len(self))
        if self.present is None:
            order = stored if order is None else order
            yield from order.split(batch_size) if len(order) else ()
            return
        kinds = self._kinds(self.present)
        if order is None:
            ends = torch.nonzero(torch.diff(kinds)).flatten() + 1
            for run in torch.tensor_split(stored, ends):
                yield from run.split(batch_size) if len(run) else ()
            return
        waiting: dict[int, list[int]] = {}
        for row, kind in zip(order.tolist(), kinds[order].tolist(), strict=True):
            rows = waiting.setdefault(kind, [])
            rows.append(row)
            if len(rows) == batch_size:
                yield torch.tensor(rows, dtype=torch.int64)
                rows.clear()
        for rows in waiting.values():
            if rows:
                yield torch.tensor(rows, dtype=torch.int64)

    def steps(self, batch_size: int, least: int = 1) -> int:
        """Number of batches per shuffled epoch with at least ``least`` examples."""
        sizes = [len(self)] if self.present is None else torch.bincount(self._kinds(self.present)).tolist()
        total = 0
        for size in sizes:
            whole, rest = divmod(size, batch_size)
            total += whole * (batch_size >= least) + (rest >= max(least, 1))
        return total

    def _kinds(self, present: Tensor) -> Tensor:
        """Each row's set of modalities, and whether it is a document, as a number, int64 (N,)."""
        kinds = (present.long() << torch.arange(len(MODALITIES))).sum(dim=1)
        return kinds + ((self.turns > 0).long() << len(MODALITIES))


def _named(present: Sequence[bool]) -> tuple[str, ...]:
    return tuple(name for name, given in zip(MODALITIES, present, strict=True) if given)


def _pictures(table: Tensor | StoredPictures, numbers: Tensor) -> Tensor:
    return gathered(table, numbers) if isinstance(table, Tensor) else table[numbers]


# Several tables as one, for centralised training --------------------------------------------------------------


def concatenate_tables(tables: Sequence[Table]) -> Table:
    """All rows of several tables as one; what they share is not copied."""
    present = [table.present for table in tables if table.present is not None]
    soft = [table.targets for table in tables if table.targets is not None]
    for what, having in (("what examples have", present), ("annotators' answers", soft)):
        if 0 < len(having) < len(tables):
            refuse("tables put together", f"{what} of all, or of none", found=f"those of {len(having)}")
    names = tables[0].columns.keys()
    check_same("columns of tables", [frozenset(table.columns) for table in tables])
    sounds, sound_index = _pool_clips([(table.sounds, table.sound_index) for table in tables], tables)
    series, series_index = _pool_clips([(table.series, table.series_index) for table in tables], tables)
    columns: dict[str, Tensor] = {}
    for name in names:
        columns[name] = torch.cat([table.columns[name] for table in tables])
    return replace(
        _pool_pictures(tables),
        columns=columns,
        targets=SoftTargets.join(soft) if soft else None,
        present=torch.cat(present) if present else None,
        sounds=sounds,
        sound_index=sound_index,
        series=series,
        series_index=series_index,
    )


def _pool_pictures(tables: Sequence[Table]) -> Table:
    """Pictures, regions and labels of several tables, and the rows' places in them, without columns."""
    stores: dict[tuple[int, ...], Table] = {}
    starts: dict[tuple[int, ...], int] = {}
    for table in tables:
        key = _store(table)
        if key not in stores and _store_size(table) is not None:
            starts[key] = sum(_store_size(store) or 0 for store in stores.values())
            stores[key] = table
    shape = next(iter(stores.values()), tables[0]).image_index.shape[1:]
    index: list[Tensor] = []
    for table in tables:
        key = _store(table)
        none = table.image_index.new_zeros(len(table), *shape)
        index.append(table.image_index + starts[key] if key in starts else none)
    kept = list(stores.values())
    if len(kept) <= 1:
        return replace(kept[0] if kept else tables[0], image_index=torch.cat(index))
    images = [store.images for store in kept if isinstance(store.images, Tensor)]
    regions = [store.regions for store in kept if isinstance(store.regions, HeldRegions)]
    labels = [store.labels for store in kept if store.labels is not None]
    has_images = any(store.images is not None for store in kept)
    has_regions = any(store.regions is not None for store in kept)
    if (has_images and len(images) < len(kept)) or (has_regions and len(regions) < len(kept)):
        raise ValueError(f"tables over {len(kept)} picture tables can be pooled in memory only")
    return Table(
        torch.cat(images) if images else None, torch.cat(index), {}, join(regions) if regions else None,
        labels=SparseLabels(joined([store.present for store in labels]), labels[0].classes) if labels else None,
    )  # fmt: skip


def _store(table: Table) -> tuple[int, ...]:
    """Identity of what the rows' indices refer to."""
    return id(table.images), id(table.regions), id(table.labels and table.labels.present)


def _store_size(table: Table) -> int | None:
    """How many rows this has; None without any."""
    stored = table.regions if table.images is None else table.images
    if table.labels is not None:
        return len(table.labels.present)
    return None if stored is None else len(stored)


def _pool_clips(parts: Sequence[tuple[Any, Tensor | None]], tables: Sequence[Table]) -> tuple[Any, Tensor | None]:
    """Recordings or series of several tables one behind the other, and the rows' places in them."""
    clips: dict[int, Any] = {}
    starts: dict[int, int] = {}
    for stored, _ in parts:
        if stored is not None and id(stored) not in clips:
            starts[id(stored)] = sum(map(len, clips.values()))
            clips[id(stored)] = stored
    if not clips:
        return None, None
    index: list[Tensor] = []
    for (stored, rows), table in zip(parts, tables, strict=True):
        index.append(torch.zeros(len(table), dtype=torch.int64) if rows is None else rows + starts[id(stored)])
    whole = list(clips.values())
    return (whole[0] if len(whole) == 1 else whole[0].join(whole)), torch.cat(index)

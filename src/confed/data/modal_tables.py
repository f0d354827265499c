"""Examples of several modalities as tensors, in batches whose examples all have the same set of modalities.

A modality that an example lacks is a key that its batch lacks: nothing stands in for it, and a batch costs what it
has. Models that need all their keys get tables without gaps instead (:mod:`confed.data.missing`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from confed.data.examples import Examples, Table, pool
from confed.data.presence import MODALITIES, presence
from confed.data.sounds import Sounds
from confed.data.time_series import Series

__all__ = ["ModalTable", "pool_modal", "with_modalities"]

_TEXT = ("text", "text_mask")


@dataclass(frozen=True)
class ModalTable(Table):
    """N examples, each with some of the modalities.

    Attributes:
        present: what each example has, in the order of the modalities (:mod:`confed.data.presence`), bool, (N, 4).
        sounds: recordings, where there are some.
        sound_index: (N,) int64.
        series: values of sensors, where there are some.
        series_index: (N,) int64.
    """

    present: Tensor = field(kw_only=True)
    sounds: Sounds | None = field(default=None, kw_only=True)
    sound_index: Tensor | None = field(default=None, kw_only=True)
    series: Series | None = field(default=None, kw_only=True)
    series_index: Tensor | None = field(default=None, kw_only=True)

    def batch(self, rows: Tensor) -> dict[str, Tensor]:
        """The given rows as one batch: as of a table, without the keys of modalities that they lack.

        Recordings are under ``audio``, float32 (B, T) in [-1, 1), with ``audio_length`` (B,); values of sensors under
        ``series``, float32 (B, S, K), with ``series_length`` (B,); zeros stand behind the end of each.

        Raises:
            ValueError: the rows have different sets of modalities.
        """
        kinds = self.present[rows]
        if len(kinds) and bool((kinds != kinds[0]).any()):
            raise ValueError("all examples of a batch must have the same modalities, got several sets in one batch")
        there = (kinds[0] if len(kinds) else self.present.any(dim=0)).tolist()
        here = {name for name, given in zip(MODALITIES, there, strict=True) if given}
        seen = self if "image" in here else replace(self, images=None, regions=None)
        batch = Table.batch(seen, rows)
        if "text" not in here:
            for name in _TEXT:
                del batch[name]
        if "audio" in here and self.sounds is not None and self.sound_index is not None:
            batch["audio"], batch["audio_length"] = self.sounds[self.sound_index[rows]]
        if "series" in here and self.series is not None and self.series_index is not None:
            batch["series"], batch["series_length"] = self.series[self.series_index[rows]]
        return batch

    def groups(self, rows: Tensor) -> list[Tensor]:
        """The given rows in groups that have one set of modalities each, in the order of their first rows."""
        found: dict[int, list[int]] = {}
        for row, kind in zip(rows.tolist(), self._kinds()[rows].tolist(), strict=True):
            found.setdefault(kind, []).append(row)
        return [torch.tensor(group, dtype=torch.int64) for group in found.values()]

    def take(self, count: int) -> "ModalTable":
        """The first ``count`` rows; pictures, recordings and values are shared."""
        return replace(
            self,
            image_index=self.image_index[:count],
            columns={name: column[:count] for name, column in self.columns.items()},
            targets=None if self.targets is None else self.targets.take(count),
            present=self.present[:count],
            sound_index=None if self.sound_index is None else self.sound_index[:count],
            series_index=None if self.series_index is None else self.series_index[:count],
        )

    def batches(self, batch_size: int, order: Tensor | None = None) -> Iterator[dict[str, Tensor]]:
        """All rows, each batch of one set.

        As stored (``order`` is None), a batch also ends where the set changes. In an ``order``, rows wait for others of
        their set until a batch of these is full; what then still waits comes at the end, in the order of the sets'
        first rows.
        """
        kinds = self._kinds()
        if order is None:
            ends = torch.nonzero(torch.diff(kinds)).flatten() + 1
            for run in torch.tensor_split(torch.arange(len(self)), ends):
                for rows in run.split(batch_size) if len(run) else ():
                    yield self.batch(rows)
            return
        waiting: dict[int, list[int]] = {}
        for row, kind in zip(order.tolist(), kinds[order].tolist(), strict=True):
            rows = waiting.setdefault(kind, [])
            rows.append(row)
            if len(rows) == batch_size:
                yield self.batch(torch.tensor(rows, dtype=torch.int64))
                rows.clear()
        for rows in waiting.values():
            if rows:
                yield self.batch(torch.tensor(rows, dtype=torch.int64))

    def steps(self, batch_size: int, least: int = 1) -> int:
        """How many batches of ``least`` examples or more a shuffled epoch has."""
        total = 0
        for size in torch.bincount(self._kinds()).tolist():
            whole, rest = divmod(size, batch_size)
            total += whole * (batch_size >= least) + (rest >= max(least, 1))
        return total

    def _kinds(self) -> Tensor:
        """Each row's set as a number, (N,) int64."""
        return (self.present.long() << torch.arange(len(MODALITIES))).sum(dim=1)


def with_modalities(table: Table, examples: Examples) -> ModalTable:
    """A table of examples with what else they have.

    Args:
        table: the examples encoded; its pictures are left out where none of the examples has any.
        examples: them.

    Raises:
        ValueError: an example lacks its text, and texts are offered with it to choose from.
    """
    present = presence(examples)
    image, text = (present[:, MODALITIES.index(name)] for name in ("image", "text"))
    if "choices" in table.columns and not text.all():
        raise ValueError("where an answer is one of some texts offered with a question, the question cannot be missing")
    more: dict[str, Any] = {"images": table.images, "regions": table.regions} if image.any() or not len(image) else {}
    return ModalTable(
        image_index=table.image_index,
        columns=table.columns,
        targets=table.targets,
        present=torch.from_numpy(present),
        sounds=examples.sounds,
        sound_index=_tensor(examples.sound_index),
        series=examples.series,
        series_index=_tensor(examples.series_index),
        **{"images": None, **more},
    )


def _tensor(index: np.ndarray | None) -> Tensor | None:
    return None if index is None else torch.from_numpy(np.asarray(index, dtype=np.int64))


def pool_modal(tables: Sequence[ModalTable]) -> ModalTable:
    """All rows of several tables as one; what several tables share is not copied.

    Raises:
        ValueError: several picture tables of which one is not in memory, recordings of several rates, or series with
            other channels.
    """
    counts = [len(table) for table in tables]
    rest = pool([Table(None, torch.zeros(len(t), dtype=torch.int64), t.columns, None, t.targets) for t in tables])
    pictured = [t.images is not None or t.regions is not None for t in tables]
    seen = [Table(t.images, t.image_index, {}, t.regions) for t, there in zip(tables, pictured, strict=True) if there]
    pictures, index = None, rest.image_index
    if seen:
        pictures = pool(seen)
        shares = iter(pictures.image_index.split([len(table) for table in seen]))
        empty = pictures.image_index.new_zeros
        # Rows of tables without pictures have an index of no meaning, in the shape of the others'.
        shape = pictures.image_index.shape[1:]
        each = zip(pictured, counts, strict=True)
        index = torch.cat([next(shares) if there else empty(count, *shape) for there, count in each])
    sounds, sound_index = _pool_clips([(t.sounds, t.sound_index) for t in tables], counts)
    series, series_index = _pool_clips([(t.series, t.series_index) for t in tables], counts)
    return ModalTable(
        None if pictures is None else pictures.images,
        index,
        rest.columns,
        None if pictures is None else pictures.regions,
        rest.targets,
        present=torch.cat([table.present for table in tables]),
        sounds=sounds if isinstance(sounds, Sounds) else None,
        sound_index=sound_index,
        series=series if isinstance(series, Series) else None,
        series_index=series_index,
    )


def _pool_clips(
    parts: Sequence[tuple[Sounds | Series | None, Tensor | None]], counts: Sequence[int]
) -> tuple[Sounds | Series | None, Tensor | None]:
    """Recordings or series of several tables one behind the other, and the rows' places in them."""
    tables: dict[int, Sounds | Series] = {}
    starts: dict[int, int] = {}
    for table, _ in parts:
        if table is not None and id(table) not in tables:
            starts[id(table)] = sum(map(len, tables.values()))
            tables[id(table)] = table
    if not tables:
        return None, None
    index = torch.cat(
        [
            torch.zeros(count, dtype=torch.int64) if table is None or own is None else own + starts[id(table)]
            for (table, own), count in zip(parts, counts, strict=True)
        ]
    )
    return _joined(list(tables.values())), index


def _joined(tables: Sequence[Sounds | Series]) -> Sounds | Series:
    if len(tables) == 1:
        return tables[0]
    lengths = np.concatenate([np.diff(table.offsets) for table in tables])
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    sounds = [table for table in tables if isinstance(table, Sounds)]
    series = [table for table in tables if isinstance(table, Series)]
    kinds: set[Any] = {table.rate for table in sounds} | {table.channels for table in series}
    if len(kinds) > 1:
        what = "recordings must have one rate" if sounds else "series must have the same channels"
        raise ValueError(f"{what} to be put together, got {', '.join(map(str, sorted(kinds)))}")
    if sounds:
        return Sounds(np.concatenate([table.samples for table in sounds]), offsets, sounds[0].rate)
    return replace(series[0], values=np.concatenate([table.values for table in series]), offsets=offsets)

"""Concatenation of several clients' tables, for centralised training."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from confed.data.modal_tables import ModalTable
from confed.data.ragged import joined
from confed.data.regions import HeldRegions, join
from confed.data.sounds import Sounds
from confed.data.table import Table
from confed.data.targets import SoftTargets
from confed.data.time_series import Series


def concatenate_tables(tables: Sequence[Table]) -> Table:
    """All rows of several tables as one; what they share is not copied."""
    modal = [table for table in tables if isinstance(table, ModalTable)]
    if 0 < len(modal) < len(tables):
        raise ValueError(
            f"tables put together must all say what their examples have, or none; {len(modal)} of {len(tables)} do"
        )
    return _pool_modal(modal) if modal else _pool(tables)


def _pool(tables: Sequence[Table]) -> Table:
    """Rows that all have the same columns."""
    offsets: dict[tuple[int, int], int] = {}
    stores: list[Table] = []
    index: list[Tensor] = []
    for table in tables:
        key = id(table.images), id(table.regions)
        if key not in offsets:
            offsets[key] = sum(map(_pictures, stores))
            stores.append(table)
        index.append(table.image_index + offsets[key])
    columns: dict[str, Tensor] = {}
    for name in tables[0].columns:
        columns[name] = torch.cat([table.columns[name] for table in tables])
    soft = [table.targets for table in tables if table.targets is not None]
    if 0 < len(soft) < len(tables):
        raise ValueError(
            f"tables put together need annotators' answers of all tables, or of none, got {len(soft)} of {len(tables)}"
        )
    targets = SoftTargets.join(soft) if soft else None
    if len(stores) == 1:
        return Table(stores[0].images, torch.cat(index), columns, stores[0].regions, targets)
    images = [store.images for store in stores if isinstance(store.images, Tensor)]
    regions = [store.regions for store in stores if isinstance(store.regions, HeldRegions)]
    has_images = any(store.images is not None for store in stores)
    has_regions = any(store.regions is not None for store in stores)
    if (has_images and len(images) < len(stores)) or (has_regions and len(regions) < len(stores)):
        raise ValueError(f"tables over {len(stores)} picture tables can be pooled in memory only")
    return Table(
        torch.cat(images) if images else None,
        torch.cat(index),
        columns,
        join(regions) if regions else None,
        targets,
    )


def _pictures(table: Table) -> int:
    """M."""
    stored = table.images if table.images is not None else table.regions
    return 0 if stored is None else len(stored)


def _pool_modal(tables: Sequence[ModalTable]) -> ModalTable:
    """Rows of which some may have pictures, recordings or series, and others not."""
    counts = [len(table) for table in tables]
    rest = _pool([Table(None, torch.zeros(len(t), dtype=torch.int64), t.columns, None, t.targets) for t in tables])
    pictured = [t.images is not None or t.regions is not None for t in tables]
    seen = [
        Table(t.images, t.image_index, {}, t.regions)
        for t, has_pictures in zip(tables, pictured, strict=True)
        if has_pictures
    ]
    pictures, index = None, rest.image_index
    if seen:
        pictures = _pool(seen)
        shares = iter(pictures.image_index.split([len(table) for table in seen]))
        empty = pictures.image_index.new_zeros
        # Rows of tables without pictures have an index of no meaning, in the shape of the others'.
        shape = pictures.image_index.shape[1:]
        each = zip(pictured, counts, strict=True)
        index = torch.cat([next(shares) if has_pictures else empty(count, *shape) for has_pictures, count in each])
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
            torch.zeros(count, dtype=torch.int64)
            if table is None or has_clips is None
            else has_clips + starts[id(table)]
            for (table, has_clips), count in zip(parts, counts, strict=True)
        ]
    )
    return _joined(list(tables.values())), index


def _joined(tables: Sequence[Sounds | Series]) -> Sounds | Series:
    if len(tables) == 1:
        return tables[0]
    sounds = [table for table in tables if isinstance(table, Sounds)]
    series = [table for table in tables if isinstance(table, Series)]
    kinds: set[Any] = {table.rate for table in sounds} | {table.channels for table in series}
    if len(kinds) > 1:
        what = "recordings must have one rate" if sounds else "series must have the same channels"
        raise ValueError(f"{what} to be put together, got {', '.join(map(str, sorted(kinds)))}")
    return joined([replace(table, origin=None) for table in sounds]) if sounds else joined(series)

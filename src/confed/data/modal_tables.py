"""Tensor tables of multimodal examples, in batches of examples with the same set of modalities.

A modality that an example lacks is a key that its batch lacks: nothing stands in for it, and a batch costs what it
has. Models that need all their keys get tables without gaps instead (:mod:`confed.data.imputation`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from confed.data.examples import Examples, presence
from confed.data.modalities import MODALITIES
from confed.data.sounds import Sounds
from confed.data.table import Table
from confed.data.time_series import Series

_TEXT = ("text", "text_mask")


@dataclass(frozen=True)
class ModalTable(Table):
    """N examples, each with some of the modalities.

    Attributes:
        present: what each example has, in the order of the modalities (:mod:`confed.data.modalities`), bool, (N, 4).
        sounds: recordings, where there are some.
        series: values of sensors, where there are some.
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
        """
        kinds = self.present[rows]
        if len(kinds) and bool((kinds != kinds[0]).any()):
            raise ValueError("all examples of a batch must have the same modalities, got several sets in one batch")
        present = (kinds[0] if len(kinds) else self.present.any(dim=0)).tolist()
        here = {name for name, given in zip(MODALITIES, present, strict=True) if given}
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

    def on(self, move: Callable[[Tensor], Tensor]) -> "ModalTable":
        """Itself: what an example has decides on the host how a batch is put together."""
        return self

    def sets(self) -> list[tuple[str, ...]]:
        """See :class:`Table`; none without examples."""
        kinds: list[list[bool]] = torch.unique(self.present, dim=0).tolist() if len(self) else []
        result: list[tuple[str, ...]] = []
        for kind in kinds:
            result.append(tuple(name for name, present in zip(MODALITIES, kind, strict=True) if present))
        return result

    def groups(self, rows: Tensor) -> list[Tensor]:
        rows_of_kind: dict[int, list[int]] = {}
        for row, kind in zip(rows.tolist(), self._kinds()[rows].tolist(), strict=True):
            rows_of_kind.setdefault(kind, []).append(row)
        return [torch.tensor(group, dtype=torch.int64) for group in rows_of_kind.values()]

    def inputs(self, modality: str) -> Tensor:
        index = {"audio": self.sound_index, "series": self.series_index}.get(modality)
        return super().inputs(modality) if index is None else index

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
        """Number of batches per shuffled epoch with at least ``least`` examples."""
        total = 0
        for size in torch.bincount(self._kinds()).tolist():
            whole, rest = divmod(size, batch_size)
            total += whole * (batch_size >= least) + (rest >= max(least, 1))
        return total

    def _kinds(self) -> Tensor:
        """Each row's set as a number, (N,) int64."""
        return (self.present.long() << torch.arange(len(MODALITIES))).sum(dim=1)


def with_modalities(table: Table, examples: Examples) -> ModalTable:
    """A table of examples with their sounds, series and missing modalities."""
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

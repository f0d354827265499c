"""A client's data as three tables: training, validation and test examples."""

from collections.abc import Callable, Iterator
from copy import copy

import torch
from torch import Tensor

from confed.data.controls import controlled
from confed.data.table import Table
from confed.federation.protocols import Batch

__all__ = ["TableData"]


class Source:
    """What stands for one table: two are never equal."""


class TableData:
    """A client's data as tables; implements :class:`confed.federation.protocols.ClientData`."""

    deterministic = True

    def __init__(self, train: Table, validation: Table, test: Table) -> None:
        self.tables = (train, validation, test)
        self._train, self._validation, self._test = self._read = self.tables
        self._sources = (Source(), Source(), Source())

    def on(self, move: Callable[[Tensor], Tensor]) -> "TableData":
        """See :class:`confed.federation.protocols.Movable`; test examples with other inputs stay on the host."""
        there = copy(self)
        there._read = tuple(table.on(move) for table in self.tables)
        return there

    def __len__(self) -> int:
        return len(self._train)

    def shortened(self, train: int, others: int) -> "TableData":
        """The same with at most so many training examples, and so many validation and test examples."""
        fewer = copy(self)
        fewer.tables = (self._train.take(train), self._validation.take(others), self._test.take(others))
        fewer._train, fewer._validation, fewer._test = fewer._read = fewer.tables
        fewer._sources = (Source(), Source(), Source())
        return fewer

    def train(self, batch_size: int, rng: torch.Generator) -> Iterator[Batch]:
        """One shuffled epoch; see :class:`confed.federation.protocols.ClientData`."""
        return self._batches(0, batch_size, torch.randperm(len(self._train), generator=rng))

    def steps(self, batch_size: int, least: int = 1) -> int:
        """Number of training batches per epoch with at least ``least`` examples."""
        return self._train.steps(batch_size, least)

    def validation(self, batch_size: int) -> Iterator[Batch]:
        """Validation batches in stored order."""
        return self._batches(1, batch_size)

    def test(self, batch_size: int) -> Iterator[Batch]:
        """Test batches in stored order."""
        return self._batches(2, batch_size)

    def controlled_test(self, batch_size: int, control: str, rng: torch.Generator) -> Iterator[dict[str, Tensor]]:
        """Test batches with the inputs of a control condition; see :mod:`confed.data.controls`."""
        return controlled(self._test, batch_size, control, rng)

    def _batches(self, part: int, batch_size: int, order: Tensor | None = None) -> Iterator[Batch]:
        table = self._read[part]
        if type(table) is not Table or "image_count" in table.columns:
            return table.batches(batch_size, order)
        order = torch.arange(len(table)) if order is None else order
        return (table.row_batch(rows, self._sources[part]) for rows in order.split(batch_size) if len(rows))

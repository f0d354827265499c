"""Tensor tables of multi-label examples, encoded on access."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from confed.data.encode import Tokenizer
from confed.data.examples import TableData
from confed.data.labelled import LabelDataset, LabelExamples, known_sizes
from confed.data.ml_files.table import multi_hot
from confed.data.picture_tables import StoredPictures, channels_first
from confed.data.ragged import Ragged, joined
from confed.data.table import Table
from confed.federation.protocols import Batch
from confed.losses.label_states import label_states

Value = TypeVar("Value")

_LOOKED_AT = 1000
"""Clients whose examples are looked at to know which kinds there are; more share their tables."""


@dataclass(frozen=True)
class SparseLabels:
    """The labels of M rows, of which few of the C are present.

    Attributes:
        present: the numbers of each row's labels, int32.
    """

    present: Ragged
    classes: int

    def __getitem__(self, rows: Tensor) -> Tensor:
        """Zeros and ones of B rows, float32, shape (B, C)."""
        return torch.from_numpy(multi_hot(self.present, rows.cpu().numpy(), self.classes))


@dataclass(frozen=True)
class LabelTable(Table):
    """N examples with labels: a :class:`~confed.data.table.Table` whose pictures are the rows of its labels.

    Attributes:
        labels: of all rows of the picture table; of texts, of the rows that ``image_index`` counts.
    """

    labels: SparseLabels = field(kw_only=True)

    def batch(self, rows: Tensor) -> dict[str, Tensor]:
        """The given rows as one batch: as of a table, and ``labels``, float32 (B, C)."""
        return {**super().batch(rows), "labels": self.labels[self.image_index[rows]]}

    def take(self, count: int) -> "LabelTable":
        """The first ``count`` rows; pictures and labels are shared."""
        columns = {name: column[:count] for name, column in self.columns.items()}
        return replace(self, image_index=self.image_index[:count], columns=columns)


class LabelData(TableData):
    """A client's multi-label data, optionally with a random part of the labels known in training.

    Attributes:
        drawn: what is drawn anew in every epoch; see :class:`confed.federation.protocols.ClientData`.
    """

    def __init__(self, train: Table, validation: Table, test: Table, known: float = 0.0) -> None:
        super().__init__(train, validation, test)
        self.known = known
        self.drawn = ("known",) if known else ()

    def train(self, batch_size: int, rng: torch.Generator) -> Iterator[Batch]:
        """One shuffled epoch; with ``known``, batches have the labels' states under ``known``, int8 (B, C).

        The order is drawn from ``rng`` first and the key of the states after it, so that masking does not change it.
        """
        batches = super().train(batch_size, rng)
        if not self.known:
            return batches
        key = int(torch.randint(0, (1 << 63) - 1, (), generator=rng))
        return ({**batch, "known": label_states(batch["labels"], batch["index"], key, self.known)} for batch in batches)


class LazyTables(Mapping[str, LabelData]):
    """Mapping of clients to data as tables, encoded on access and not kept."""

    def __init__(
        self,
        names: Mapping[str, object],
        make: Callable[[str], LabelData],
        sizes: np.ndarray | None = None,
        known: float = 0.0,
        tests: bool = True,
    ) -> None:
        self._names, self._make, self._known, self._tests, self.sizes = names, make, known, tests, sizes

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __contains__(self, client: object) -> bool:
        return client in self._names

    def __getitem__(self, client: str) -> LabelData:
        data = self._make(client)
        train, validation, test = data.tables
        return LabelData(train, validation, test if self._tests else test.take(0), self._known)

    def masked(self, known: float) -> "LazyTables":
        """The same clients with a largest share of known labels in training."""
        return LazyTables(self._names, self._make, self.sizes, known, self._tests)

    def without_tests(self) -> "LazyTables":
        """The same clients without test examples."""
        return LazyTables(self._names, self._make, self.sizes, self._known, False)

    def without(self, names: Sequence[str]) -> "LazyTables":
        """The same clients but for some."""
        left_out = frozenset(names)
        stays = np.array([name not in left_out for name in self._names], dtype=bool)
        sizes = None if self.sizes is None else self.sizes[stays]
        return LazyTables(Selected(self._names, names), self._make, sizes, self._known, self._tests)


class Both(Mapping[str, Value]):
    """Two mappings as one; where both have a key, the second one's value counts."""

    def __init__(self, first: Mapping[str, Value], second: Mapping[str, Value]) -> None:
        self._first, self._second = first, second

    def __len__(self) -> int:
        return len(self._first) + sum(key not in self._first for key in self._second)

    def __iter__(self) -> Iterator[str]:
        yield from self._first
        yield from (key for key in self._second if key not in self._first)

    def __contains__(self, key: object) -> bool:
        return key in self._first or key in self._second

    def __getitem__(self, key: str) -> Value:
        return self._second[key] if key in self._second else self._first[key]


class Selected(Mapping[str, Value]):
    """A mapping without some of its keys, whose values stay where they are."""

    def __init__(self, values: Mapping[str, Value], without: Sequence[str]) -> None:
        left_out = frozenset(without)
        self._values, self._names = values, dict.fromkeys(name for name in values if name not in left_out)

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __contains__(self, key: object) -> bool:
        return key in self._names

    def __getitem__(self, key: str) -> Value:
        if key not in self._names:
            raise KeyError(key)
        return self._values[key]


def encode_labels(
    dataset: LabelDataset, tokenizer: Tokenizer
) -> tuple[LazyTables, dict[str, TableData], tuple[str, ...]]:
    """A dataset's clients and unseen places as tables. Pictures, texts and kinds are encoded once per table of rows."""
    if not dataset.clients:
        raise ValueError(f"dataset {dataset.name!r} has no clients; a federation needs at least one")
    sizes = known_sizes(dataset.clients)
    parts = _looked_at(dataset)
    for name, roles in parts.items():
        for examples in roles:
            dataset.check(name, examples)
    if sizes is None and len(parts) == len(dataset.clients):
        sizes = np.array([len(train) for train, _, _ in parts.values()], dtype=np.int64)
    everything = [*chain.from_iterable(parts.values()), *dataset.unseen.values()]
    types = _kinds(dataset, everything)
    encoder = _Encoder(tokenizer, types)

    def make(client: str) -> LabelData:
        split = dataset.clients[client]
        for examples in (split.train, split.validation, split.test):
            dataset.check(client, examples)
        train, validation, test = map(encoder.table, (split.train, split.validation, split.test))
        return LabelData(train, validation, test)

    # Whatever is wrong with a table is found before training; most examples are rows of one and the same.
    for examples in {(id(e.table), id(e.pictures), id(e.types)): e for e in everything}.values():
        encoder.table(examples.take(np.zeros(0, np.int64)))
    unseen = {name: encoder.table(examples) for name, examples in dataset.unseen.items()}
    places: dict[str, TableData] = {name: LabelData(rows, rows, rows) for name, rows in unseen.items()}
    return LazyTables(dataset.clients, make, sizes), places, types


def kinds_of(dataset: LabelDataset) -> tuple[str, ...]:
    """The names of the kinds of examples of the first thousand clients and of unseen places, sorted."""
    parts = list(chain.from_iterable(_looked_at(dataset).values()))
    return _kinds(dataset, [*parts, *dataset.unseen.values()])


def _looked_at(dataset: LabelDataset) -> dict[str, tuple[LabelExamples, LabelExamples, LabelExamples]]:
    names = [name for name, _ in zip(dataset.clients, range(_LOOKED_AT), strict=False)]
    splits = {name: dataset.clients[name] for name in names}
    return {name: (split.train, split.validation, split.test) for name, split in splits.items()}


def _kinds(dataset: LabelDataset, parts: Sequence[LabelExamples]) -> tuple[str, ...]:
    kinds = set(dataset.types)
    for column in {id(examples.types): examples.types for examples in parts}.values():
        kinds.update(map(str, np.unique(column)) if column is not None else ())
    return tuple(sorted(kinds))


class _Encoder:
    """Examples as tables; what belongs to all rows of a table is made once."""

    def __init__(self, tokenizer: Tokenizer, types: Sequence[str]) -> None:
        self._tokenizer, self._types = tokenizer, np.array(types, dtype=str)
        # Keyed by identity, with the object itself, so that no other one can come to its place in memory.
        self._pictures: dict[int, tuple[object, Tensor | StoredPictures]] = {}
        self._texts: dict[int, tuple[object, dict[str, Tensor]]] = {}
        self._kinds: dict[int, tuple[object, Tensor]] = {}

    def table(self, examples: LabelExamples) -> LabelTable:
        source, rows = examples.table, torch.from_numpy(examples.rows)
        pictures, kinds, columns = examples.pictures, examples.types, dict[str, Tensor]()
        if pictures is not None and id(pictures) not in self._pictures:
            self._pictures[id(pictures)] = (pictures, channels_first(pictures))
        if source.texts is not None and id(source) not in self._texts:
            text, mask = self._tokenizer(list(source.texts))
            self._texts[id(source)] = (source, {"text": text, "text_mask": mask})
        if source.texts is not None:
            columns |= {name: column[rows] for name, column in self._texts[id(source)][1].items()}
        if kinds is not None:
            if id(kinds) not in self._kinds:
                self._kinds[id(kinds)] = (kinds, self._positions(kinds))
            columns["type"] = self._kinds[id(kinds)][1][rows]
        labels = SparseLabels(source.present, len(source.labels))
        images = None if pictures is None else self._pictures[id(pictures)][1]
        return LabelTable(images, rows, columns, labels=labels)

    def _positions(self, kinds: np.ndarray) -> Tensor:
        names, inverse = np.unique(np.asarray(kinds, dtype=str), return_inverse=True)
        strange = [name for name in names.tolist() if name not in self._types]
        if strange:
            raise ValueError(
                f"the first {_LOOKED_AT} clients and unseen places have no examples of kind {strange[0]!r}"
            )
        return torch.from_numpy(np.searchsorted(self._types, names)[inverse].astype(np.int64))


def pool_labels(tables: Sequence[LabelTable]) -> LabelTable:
    """All rows of several tables as one; rows of one table of pictures share it."""
    first = tables[0]
    if any(t.columns.keys() != first.columns.keys() or (t.images is None) != (first.images is None) for t in tables):
        raise ValueError("multi-label examples put together must all be pictures or texts, and all have kinds or none")
    columns: dict[str, Tensor] = {}
    for name in first.columns:
        columns[name] = torch.cat([table.columns[name] for table in tables])
    parts: dict[tuple[int, int], LabelTable] = {}
    starts: dict[tuple[int, int], int] = {}
    index: list[Tensor] = []
    for table in tables:
        key = (id(table.images), id(table.labels.present))
        if key not in parts:
            starts[key] = sum(len(client_data.labels.present) for client_data in parts.values())
            parts[key] = table
        index.append(table.image_index + starts[key])
    if len(parts) == 1:
        return LabelTable(first.images, torch.cat(index), columns, labels=first.labels)
    images = [client_data.images for client_data in parts.values() if isinstance(client_data.images, Tensor)]
    if first.images is not None and len(images) < len(parts):
        raise ValueError(f"examples over {len(parts)} tables of pictures can be pooled in memory only")
    labels = SparseLabels(joined([client_data.labels.present for client_data in parts.values()]), first.labels.classes)
    return LabelTable(torch.cat(images) if images else None, torch.cat(index), columns, labels=labels)

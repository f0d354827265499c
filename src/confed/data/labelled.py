"""Multi-label datasets: pictures or texts with any number of labels, split by client.

Rows are numbers into one :class:`~confed.data.ml_files.table.MultiLabelTable`, and a client's split is made when it is
asked for, so that tens of thousands of users cost a few arrays.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np

from confed.data.intake.account import Account
from confed.data.ml_files.table import MultiLabelTable
from confed.data.picture_tables import Pictures
from confed.data.ragged import PackedTexts


@dataclass(frozen=True)
class LabelExamples:
    """N rows of a table.

    Attributes:
        table: labels, names and texts of M rows.
        pictures: uint8, shape (M, H, W, 3), in memory or read when they are asked for: row i's is ``pictures[i]``;
            None where the examples are texts.
        rows: which rows of the table these are, int64, shape (N,).
        types: the kind of each of the table's rows, such as its drawing style, M texts; each kind gets a line of the
            headline metric. None where there is one kind only.
    """

    table: MultiLabelTable
    pictures: np.ndarray | Pictures | None
    rows: np.ndarray
    types: np.ndarray | None = None

    def __post_init__(self) -> None:
        # Made for each client whenever it is asked for: checks must not walk through the rows.
        m = len(self.table)
        if self.rows.ndim != 1 or self.rows.dtype != np.int64:
            raise ValueError(f"rows must be int64 of shape (N,), got {self.rows.dtype} {self.rows.shape}")
        if self.pictures is None and self.table.texts is None:
            raise ValueError("multi-label examples need pictures or texts, got neither")
        if self.pictures is not None:
            p = self.pictures
            if p.dtype != np.uint8 or p.ndim != 4 or p.shape[-1] != 3 or len(p) != m:
                raise ValueError(f"pictures must be uint8 of shape ({m}, H, W, 3), got {p.dtype} {tuple(p.shape)}")
        if self.types is not None and len(self.types) != m:
            raise ValueError(f"types must have one entry per row of the table ({m}), got {len(self.types)}")

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, rows: Sequence[int] | np.ndarray) -> "LabelExamples":
        """The given ones of these N examples, in that order; table and pictures are shared."""
        return replace(self, rows=self.rows[np.asarray(rows, dtype=np.int64)])

    @property
    def names(self) -> PackedTexts:
        """Identifiers of the N examples, stable across runs."""
        return self.table.names.take(self.rows)

    def labels(self) -> np.ndarray:
        """Zeros and ones, float32, shape (N, C)."""
        return self.table.targets(self.rows)

    def counts(self) -> np.ndarray:
        """Number of examples with each label, int64, shape (C,), computed without a table (N, C)."""
        return np.bincount(self.table.present.take(self.rows).values, minlength=len(self.table.labels))


@dataclass(frozen=True)
class LabelSplit:
    """One client's examples, by role; any of them may be empty."""

    train: LabelExamples
    validation: LabelExamples
    test: LabelExamples

    @property
    def roles(self) -> dict[str, LabelExamples]:
        """Role -> its examples."""
        return {"train": self.train, "validation": self.validation, "test": self.test}


@dataclass(frozen=True)
class LabelDataset:
    """Multi-label federated dataset; the counterpart of ``FederatedDataset`` for questions.

    Attributes:
        name: the dataset's registered name.
        labels: names of the C labels; all tables number them like this.
        clients: client id -> its split, in a fixed order; may be made when asked for (:func:`lazy_clients`).
        unseen: place -> test examples of people or places that do not train.
        facts: what ``confed data describe`` prints beside the counts.
        words: of texts, the words that a tokenizer must know.
        coarse: label -> its coarse label, where there are two levels.
        types: kinds of examples that there are besides those of the examples here.
        elsewhere: where all examples are at the sites of a federation and a card stands for them here, unseen place ->
            number of its examples; None where they are here.
        account: what became of the rows of the files that it was read from.
    """

    name: str
    labels: tuple[str, ...]
    clients: Mapping[str, LabelSplit]
    unseen: Mapping[str, LabelExamples]
    facts: Mapping[str, str] = field(default_factory=dict[str, str])
    words: tuple[str, ...] = ()
    coarse: Mapping[str, str] = field(default_factory=dict[str, str])
    types: tuple[str, ...] = ()
    elsewhere: Mapping[str, int] | None = None
    account: Account | None = None

    def __post_init__(self) -> None:
        if not self.labels or len(set(self.labels)) != len(self.labels):
            raise ValueError(f"dataset {self.name!r} needs at least one label, each once, got {self.labels}")
        for place, examples in self.unseen.items():
            self.check(place, examples)
        strange = [label for label in self.coarse if label not in set(self.labels)]
        if strange:
            raise ValueError(f"dataset {self.name!r}: coarse names no label {strange[0]!r}")

    def check(self, place: str, examples: LabelExamples) -> None:
        """Check that examples of a client or place have the dataset's labels in the same order."""
        if examples.table.labels is not self.labels and examples.table.labels != self.labels:
            raise ValueError(
                f"dataset {self.name!r}: the examples of {place!r} must have the dataset's {len(self.labels)} labels "
                f"in its order, got {len(examples.table.labels)}: {', '.join(examples.table.labels[:5])} ..."
            )

    # What is asked of every dataset, also of questions with answers.

    @property
    def answers(self) -> tuple[str, ...]:
        """The labels: what the model's head gives a score each."""
        return self.labels

    @property
    def widest(self) -> int:
        """Scores that the head must give."""
        return len(self.labels)

    @property
    def outside(self) -> bool:
        """Whether examples have labels outside the list: False."""
        return False

    @property
    def answer_sets(self) -> Mapping[str, tuple[str, ...]]:
        """Empty: all clients have the same labels."""
        return {}

    @property
    def tasks(self) -> Mapping[str, str]:
        """Empty: all clients have the recipe's task."""
        return {}

    def answer_set(self, client: str) -> tuple[str, ...]:
        """The labels."""
        del client
        return self.labels


class LazyClients(Mapping[str, LabelSplit]):
    """Mapping of clients to splits that are made on access and not kept; see :func:`lazy_clients`."""

    def __init__(
        self,
        owners: Mapping[str, np.ndarray],
        make: Callable[[str, np.ndarray], LabelSplit],
        sizes: np.ndarray | None = None,
    ) -> None:
        if sizes is not None and sizes.shape != (len(owners),):
            raise ValueError(f"sizes must have one entry per client ({len(owners)}), got the shape {sizes.shape}")
        self._owners, self._make, self._sizes = owners, make, sizes

    def __len__(self) -> int:
        return len(self._owners)

    def __iter__(self) -> Iterator[str]:
        return iter(self._owners)

    def __contains__(self, client: object) -> bool:
        return client in self._owners

    def __getitem__(self, client: str) -> LabelSplit:
        return self._make(client, self._owners[client])

    @property
    def sizes(self) -> np.ndarray | None:
        """Training examples of each client, int64, shape (clients,), where they are known without making splits."""
        return self._sizes


@runtime_checkable
class _Sized(Protocol):
    sizes: np.ndarray | None


def known_sizes(clients: Mapping[str, LabelSplit]) -> np.ndarray | None:
    """Training examples of each client, int64, shape (clients,), where they are known without making splits."""
    return clients.sizes if isinstance(clients, _Sized) else None


def lazy_clients(
    owners: Mapping[str, np.ndarray],
    make: Callable[[str, np.ndarray], LabelSplit],
    sizes: np.ndarray | None = None,
) -> LazyClients:
    """Mapping of clients to splits that are made on access.

    Raises ``ValueError``: ``sizes`` has another length.
    """
    return LazyClients(owners, make, sizes)

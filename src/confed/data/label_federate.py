"""Partitioning of multi-label examples into the clients' splits, and baselines without input."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from confed.data.federate import ROLES, Deck, deal
from confed.data.label_partitions import label_sets
from confed.data.labelled import LabelExamples, LabelSplit
from confed.data.ml_files.table import MultiLabelTable
from confed.data.options import Options
from confed.data.picture_tables import Pictures


@dataclass(frozen=True)
class LabelPool:
    """All N rows of a dataset, before they are shared out.

    Attributes:
        pictures: row i's is ``pictures[i]``; None for texts.
        roles: "train", "val" or "test" of every row, shape (N,); "" leaves the row out.
        types: the kind of every row, shape (N,), or None.
        keys: partition name -> one key per row (N,), for partitions with one client per key.
        scenes: what the partition "users" cuts into users, one per row (N,), or None.
        together: what must stay together, one per row (N,), such as the captions of a picture; or None.
    """

    table: MultiLabelTable
    pictures: np.ndarray | Pictures | None
    roles: np.ndarray
    types: np.ndarray | None = None
    keys: Mapping[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])
    scenes: np.ndarray | None = None
    together: np.ndarray | None = None

    def examples(self, rows: np.ndarray) -> LabelExamples:
        """Rows of the table, by their numbers."""
        return LabelExamples(self.table, self.pictures, rows.astype(np.int64), self.types)


def federate_labels(
    pool: LabelPool, partition: str, *, clients: int = 10, test: float = 0.0, **options: Any
) -> dict[str, LabelSplit]:
    """The splits of every client; ``test`` is a share, and the other keywords are fields of ``Options``."""
    return share_labels(pool, Options(partition=partition, clients=clients, test_share=test, **options))


def share_labels(pool: LabelPool, options: Options) -> dict[str, LabelSplit]:
    """The splits of every client; see :func:`confed.data.federate.deal`."""
    _check(pool, options)
    present = pool.table.present
    classes = groups = np.arange(len(pool.table))
    if options.partition == "dirichlet":
        classes = label_sets(present.offsets, present.values, options.minimum)
    elif options.partition == "users" and pool.scenes is not None:
        classes = pool.scenes
    groups = groups if pool.together is None else pool.together
    deck = Deck(pool.roles, pool.keys, groups, classes, present, len(pool.table.labels))
    splits: dict[str, LabelSplit] = {}
    for name, rows in deal(deck, options).items():
        splits[name] = LabelSplit(*(pool.examples(rows[role]) for role in ROLES))
    return splits


def _check(pool: LabelPool, options: Options) -> None:
    partitions = [*pool.keys, "iid", "dirichlet", "label_skew", *(["users"] if pool.scenes is not None else [])]
    if options.partition not in partitions:
        raise ValueError(f"partition must be one of {', '.join(partitions)}, got {options.partition!r}")
    strange = sorted(set(pool.roles.tolist()) - {*ROLES, ""})
    if strange:
        raise ValueError(f"every row's role must be train, val, test or empty, got {strange[0]!r}")
    for name, share in (("validation", options.validation), ("test", options.test_share)):
        if not 0 <= share < 1:
            raise ValueError(f"{name} must be a share of the training rows in [0, 1), got {share}")
    if not (pool.roles == "train").any():
        raise ValueError("no training row is left to share out")


def label_facts(clients: Mapping[str, LabelSplit], unseen: Iterable[LabelExamples] = ()) -> dict[str, str]:
    """Facts of multi-label data: counts, baselines without input, and differences between clients.

    A score that is the same for all examples has the share of positives as average precision. Skew is half the sum of
    absolute differences between a client's shares of all labels and those of all clients together, the mean over
    clients weighted by their training rows: 0 where all are alike.
    """
    splits = list(clients.values())
    sizes: list[int] = []
    for role in ("train", "validation", "test"):
        sizes.append(sum(len(split.roles[role]) for split in splits))
    elsewhere = list(unseen)
    tests = [split.test for split in splits] + elsewhere
    positives, count = sum((examples.counts() for examples in tests), np.zeros(1)), sum(map(len, tests))
    train = np.stack([split.train.counts() for split in splits]).astype(float)
    overall = train.sum(0) / max(train.sum(), 1)
    client_totals = train.sum(1, keepdims=True)
    apart = 0.5 * np.abs(train / np.maximum(client_totals, 1) - overall).sum(1)
    weight = np.array([len(split.train) for split in splits]) * (client_totals[:, 0] > 0)
    beside = f" and {sum(map(len, elsewhere))} elsewhere" if elsewhere else ""
    clients_counted = f"{len(splits)} client{'' if len(splits) == 1 else 's'}"
    return {
        "counts": f"{clients_counted}; {sizes[0]} train, {sizes[1]} validation, {sizes[2]} test{beside}",
        "chance": f"C-AP {float(np.mean(positives / max(count, 1))):.3f} with the same score for all test examples",
        "skew": f"{float((apart * weight).sum() / max(weight.sum(), 1)):.3f} between a client's labels and everybody's",
    }

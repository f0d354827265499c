"""Partitioning of multi-label examples into the clients' splits, and baselines without input."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from confed.data.label_partitions import draw_preferences, label_sets, label_skew, users_within
from confed.data.labelled import LabelExamples, LabelSplit
from confed.data.ml_files.table import MultiLabelTable
from confed.data.partitions import Owners, by_key, dirichlet, hold_out, iid, mirror
from confed.data.picture_tables import Pictures

ROLES = ("train", "val", "test")


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


@dataclass(frozen=True)
class _Deal:
    partition: str
    clients: int
    alpha: float
    median: float
    sigma: float
    largest: int
    minimum: int


def federate_labels(
    pool: LabelPool,
    partition: str,
    *,
    clients: int = 10,
    alpha: float = 0.5,
    median: float = 16.0,
    sigma: float = 1.0,
    largest: int = 80,
    minimum: int = 10,
    validation: float = 0.0,
    test: float = 0.0,
    max_train: int | None = None,
    seed: int = 0,
) -> dict[str, LabelSplit]:
    """The splits of every client.

    Who owns which row and every test set are the same for all seeds, so that runs can be compared example by example.
    The seed chooses the validation rows, where none are given, and the training rows under ``max_train``.
    """
    deal = _Deal(partition, clients, alpha, median, sigma, largest, minimum)
    _check(pool, partition, validation=validation, test=test, max_train=max_train, seed=seed)
    rows = {role: np.flatnonzero(pool.roles == role) for role in ROLES}
    if not len(rows["train"]):
        raise ValueError("no training row is left to share out")
    owned = _owners(pool, deal, rows)
    splits: dict[str, LabelSplit] = {}
    for number, name in enumerate(owned["train"]):
        client_rows = owned["train"][name]
        parts = {"val": owned["val"][name], "test": owned["test"][name]}
        for role, share, stream in (("test", test, [2, number]), ("val", validation, [0, seed, number])):
            if not len(rows[role]) and share:
                units = client_rows if pool.together is None else pool.together[client_rows]
                held = hold_out(units, share, np.random.default_rng(stream))
                parts[role], client_rows = client_rows[held], client_rows[~held]
        client_rows = cap(client_rows, max_train, np.random.default_rng([1, seed, number]))
        splits[name] = LabelSplit(*map(pool.examples, (client_rows, parts["val"], parts["test"])))
    return splits


def cap(rows: np.ndarray, most: int | None, rng: np.random.Generator) -> np.ndarray:
    """At most ``most`` random rows, in their order."""
    return rows if most is None or len(rows) <= most else np.sort(rng.choice(rows, most, replace=False))


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


def _owners(pool: LabelPool, deal: _Deal, rows: Mapping[str, np.ndarray]) -> dict[str, Owners]:
    """Role -> client -> rows of the table. The generator is fixed: owners do not depend on a run's seed."""
    rng = np.random.default_rng(0)
    if deal.partition in pool.keys:
        keys = pool.keys[deal.partition]
        rows_by_key = {role: by_key(keys[role_rows]) for role, role_rows in rows.items()}
        nothing = np.zeros(0, dtype=np.int64)
        return {
            role: {name: role_rows[rows_by_key[role].get(name, nothing)] for name in rows_by_key["train"]}
            for role, role_rows in rows.items()
        }
    if deal.partition == "label_skew":
        preferences = draw_preferences(len(pool.table.labels), deal.clients, deal.alpha, rng)
        # A stream of its own for each role: generated training rows may differ between seeds, test rows do not.
        return {
            role: _skewed(
                pool, role_rows, preferences, deal.minimum if role == "train" else 0, np.random.default_rng(number)
            )
            for number, (role, role_rows) in enumerate(rows.items(), start=1)
        }
    first, together = rows["train"], pool.together
    classes = _classes(pool, deal)
    groups = None if together is None else together[first]
    if deal.partition == "dirichlet":
        owners = dirichlet(classes[first], deal.clients, deal.alpha, rng, deal.minimum, groups=groups)
    elif deal.partition == "users":
        owners = users_within(classes[first], rng, median=deal.median, sigma=deal.sigma, largest=deal.largest)
    else:
        owners = iid(len(first), deal.clients, rng, groups=groups)
    owned = {"train": {name: first[role_rows] for name, role_rows in owners.items()}}
    for role in ("val", "test"):
        role_rows = rows[role]
        groups_there = None if together is None else together[role_rows]
        if not len(role_rows):
            shares = dict.fromkeys(owners, role_rows)
        elif len(np.unique(groups_there) if groups_there is not None else role_rows) < len(owners):
            shares = _by_chance(owners, classes[first], classes[role_rows], groups_there, rng)
        elif deal.partition == "iid":
            shares = iid(len(role_rows), deal.clients, rng, groups=groups_there)
        else:  # as the training rows are: every class in the proportions in which the clients hold it there
            shares = mirror(owners, classes[first], classes[role_rows], rng, groups=groups, other_groups=groups_there)
        owned[role] = {name: role_rows[share] for name, share in shares.items()} if len(role_rows) else shares
    return owned


def _by_chance(
    owners: Owners, classes: np.ndarray, other: np.ndarray, groups: np.ndarray | None, rng: np.random.Generator
) -> Owners:
    """Fewer rows than clients: each group goes to a client drawn by its share of the class of the group's first row."""
    units = np.arange(len(other)) if groups is None else np.unique(groups, return_inverse=True)[1]
    held = {}
    for c in np.unique(other):
        held[c] = np.array([(classes[client_rows] == c).sum() for client_rows in owners.values()], float)
    sizes = np.array([len(client_rows) for client_rows in owners.values()], float)
    result = np.empty(len(other), dtype=np.int64)
    for unit in range(int(units.max()) + 1):
        rows = np.flatnonzero(units == unit)
        weight = held[other[rows[0]]]
        weight = weight if weight.sum() else sizes
        result[rows] = rng.choice(len(owners), p=weight / weight.sum())
    return {name: np.flatnonzero(result == number) for number, name in enumerate(owners)}


def _classes(pool: LabelPool, deal: _Deal) -> np.ndarray:
    """Class of each row for partitioning: its user, its set of labels, or one for all."""
    if deal.partition == "users":
        assert pool.scenes is not None
        return pool.scenes
    if deal.partition == "dirichlet":
        return label_sets(pool.table.present.offsets, pool.table.present.values, deal.minimum)
    return np.zeros(len(pool.table), dtype=np.int64)


def _skewed(
    pool: LabelPool, rows: np.ndarray, preferences: np.ndarray, minimum: int, rng: np.random.Generator
) -> Owners:
    if not len(rows):
        return {f"client-{client:02d}": rows for client in range(len(preferences))}
    present_labels = pool.table.present.take(rows)
    groups = None if pool.together is None else pool.together[rows]
    owners = label_skew(
        present_labels.offsets, present_labels.values, preferences, rng, minimum, groups=groups, rule="product"
    )
    return {name: rows[present_labels] for name, present_labels in owners.items()}


def _check(
    pool: LabelPool, partition: str, *, validation: float, test: float, max_train: int | None, seed: int
) -> None:
    partitions = [*pool.keys, "iid", "dirichlet", "label_skew", *(["users"] if pool.scenes is not None else [])]
    if partition not in partitions:
        raise ValueError(f"partition must be one of {', '.join(partitions)}, got {partition!r}")
    strange = sorted(set(pool.roles.tolist()) - {*ROLES, ""})
    if strange:
        raise ValueError(f"every row's role must be train, val, test or empty, got {strange[0]!r}")
    for name, share in (("validation", validation), ("test", test)):
        if not 0 <= share < 1:
            raise ValueError(f"{name} must be a share of the training rows in [0, 1), got {share}")
    if max_train is not None and max_train < 1:
        raise ValueError(f"max_train must be None or at least 1, got {max_train}")
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}")

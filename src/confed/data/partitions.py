"""Partitions of rows among clients: IID, Dirichlet label skew, quantity skew, and by key.

Every function returns disjoint row indices that cover all rows, in ascending order, and is deterministic in its
generator. Where ``groups`` is given (which picture a question is about), a group goes to one client as a whole.

Rows are arrays of :class:`confed.data.ml_files.table.MultiLabelTable`: ``offsets`` (N + 1,) and ``values``, the label
numbers of all rows. One client per user is ``MultiLabelTable.of_users``; equal random shares are
:func:`confed.data.partitions.iid`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal, NoReturn

import numpy as np

from confed.data.refusals import check_length

Owners = dict[str, np.ndarray]
TRIES = 1000


def iid(n: int, clients: int, rng: np.random.Generator, *, groups: Sequence | np.ndarray | None = None) -> Owners:
    """Equal random shares (their numbers of groups differ by at most one)."""
    unit, units = units_of(n, groups)
    check_clients(clients, units)
    owner = np.empty(units, dtype=np.int64)
    for client, share in enumerate(np.array_split(rng.permutation(units), clients)):
        owner[share] = client
    return _rows(owner[unit], clients)


def dirichlet(
    labels: Sequence | np.ndarray,
    clients: int,
    alpha: float,
    rng: np.random.Generator,
    minimum: int = 10,
    *,
    groups: Sequence | np.ndarray | None = None,
) -> Owners:
    """Label skew: every class is spread over the clients by its own draw from a Dirichlet(alpha).

    A client that already holds N/K rows gets no more of the later classes, and everything is drawn again
    until the smallest client has ``minimum`` rows (the balancing of Li et al., "Federated learning on non-IID
    data silos: an experimental study", ICDE 2022, and its published code). A group's class is the rarest of
    its rows' labels, the one that tells it from other groups.
    """
    labels = np.asarray(labels)
    n = len(labels)
    unit, units = units_of(n, groups)
    check_clients(clients, units)
    check_clients(clients, n, minimum)
    weight = np.bincount(unit, minlength=units)
    classes = by_key(_unit_class(labels, unit, units, labels)).values()
    for _ in range(TRIES):
        owner, held = np.empty(units, dtype=np.int64), np.zeros(clients)
        for members in classes:
            shuffled = rng.permutation(members)
            share = rng.dirichlet(np.full(clients, alpha)) * (held < n / clients)
            if share.sum() <= 0:  # a small alpha can put everything on clients that are full
                share = (held < n / clients).astype(float)
            cuts = (np.cumsum(share / share.sum())[:-1] * len(shuffled)).astype(int)
            for client, client_rows in enumerate(np.split(shuffled, cuts)):
                owner[client_rows] = client
                held[client] += weight[client_rows].sum()
        if held.min() >= minimum:
            return _rows(owner[unit], clients)
    no_draw(clients, minimum, n)


def quantity(
    n: int,
    clients: int,
    rng: np.random.Generator,
    sigma: float = 1.0,
    minimum: int = 64,
    *,
    groups: Sequence | np.ndarray | None = None,
) -> Owners:
    """Quantity skew: log-normal client sizes, random content."""
    unit, units = units_of(n, groups)
    check_clients(clients, units)
    check_clients(clients, n, minimum)
    share = rng.lognormal(0.0, sigma, clients)
    target = minimum + np.floor(share / share.sum() * (n - minimum * clients))
    weight, order = np.bincount(unit, minlength=units), rng.permutation(units)
    owner, start = np.full(units, -1, dtype=np.int64), 0
    # Smallest first: what whole groups add to a small client's target is missing only at the largest one.
    for client in np.argsort(target, kind="stable")[:-1]:
        reached = np.cumsum(weight[order[start:]])
        stop = start + int(np.searchsorted(reached, max(target[client], 1))) + 1
        owner[order[start:stop]] = client
        start = stop
    owner[owner < 0] = int(np.argsort(target, kind="stable")[-1])
    sizes = np.bincount(owner, weights=weight, minlength=clients)
    if sizes.min() < max(minimum, 1):
        raise ValueError(f"{clients} clients of at least {minimum} of {n} examples cannot be cut from {units} groups")
    return _rows(owner[unit], clients)


def by_key(keys: Sequence | np.ndarray) -> Owners:
    """One client per distinct key (a scene, a question type), in sorted order."""
    distinct, inverse, counts = np.unique(np.asarray(keys), return_inverse=True, return_counts=True)
    # A stable sort leaves the rows of a key ascending; to look for every key in all rows takes minutes with many users.
    rows = np.split(np.argsort(inverse.reshape(-1), kind="stable"), np.cumsum(counts)[:-1])
    return {str(key): key_rows for key, key_rows in zip(distinct, rows, strict=False)}


def mirror(
    owners: Mapping[str, np.ndarray],
    labels: Sequence | np.ndarray,
    other: Sequence | np.ndarray,
    rng: np.random.Generator,
    *,
    groups: Sequence | np.ndarray | None = None,
    other_groups: Sequence | np.ndarray | None = None,
) -> Owners:
    """Partition of a second table (the test split) with each client's label distribution of the first.

    Of each class a client gets its share of the first table's groups, rounded up or down at random
    (systematic sampling); every client gets at least one group.
    """
    labels, other, clients = np.asarray(labels), np.asarray(other), list(owners)
    unit, units = units_of(len(labels), groups)
    second, count = units_of(len(other), other_groups)
    check_clients(len(clients), count)
    owner = np.zeros(units, dtype=np.int64)
    for client, name in enumerate(clients):
        owner[unit[owners[name]]] = client
    first_class = _unit_class(labels, unit, units, labels)
    second_class = _unit_class(other, second, count, labels)
    result = np.empty(count, dtype=np.int64)
    for value in np.unique(second_class):
        members = rng.permutation(np.flatnonzero(second_class == value))
        held = np.bincount(owner[first_class == value], minlength=len(clients))
        held = held if held.sum() else np.bincount(owner, minlength=len(clients))
        cuts = np.floor(np.cumsum(held / held.sum())[:-1] * len(members) + rng.random()).astype(int)
        for client, client_rows in enumerate(np.split(members, cuts)):
            result[client_rows] = client
    for client in range(len(clients)):
        if not (result == client).any():
            result[np.flatnonzero(result == np.bincount(result).argmax())[0]] = client
    return {name: np.flatnonzero(result[second] == client) for client, name in enumerate(clients)}


def hold_out(groups: Sequence | np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """True for the rows of a random share of the groups (N,), for validation; at least one group is left."""
    distinct = np.unique(np.asarray(groups))
    count = min(round(share * len(distinct)), max(len(distinct) - 1, 0))
    return np.isin(groups, rng.permutation(distinct)[:count])


def units_of(n: int, groups: Sequence | np.ndarray | None) -> tuple[np.ndarray, int]:
    """Number of its group for every row, and how many groups there are."""
    if groups is None:
        return np.arange(n), n
    check_length("groups", groups, n, "row")
    distinct, unit = np.unique(np.asarray(groups), return_inverse=True)
    return unit, len(distinct)


def _unit_class(labels: np.ndarray, unit: np.ndarray, units: int, reference: np.ndarray) -> np.ndarray:
    """For every group the label of its rows that is rarest in ``reference`` (ties: alphabetical)."""
    classes, counts = np.unique(reference, return_counts=True)
    frequency = dict(zip(classes.tolist(), counts.tolist(), strict=True))
    ranked = sorted(set(labels.tolist()), key=lambda label: (frequency.get(label, 0), label))
    rank = {label: position for position, label in enumerate(ranked)}
    lowest = np.full(units, len(ranked))
    np.minimum.at(lowest, unit, np.array([rank[label] for label in labels.tolist()], dtype=np.int64))
    return np.asarray(ranked)[lowest]


def _rows(owner: np.ndarray, clients: int) -> Owners:
    return {f"client-{client:02d}": np.flatnonzero(owner == client) for client in range(clients)}


def check_clients(clients: int, units: int, minimum: int = 1) -> None:
    """Check that there is enough for all clients."""
    if minimum * clients > units:
        least = f" of at least {minimum}" if minimum > 1 else ""
        raise ValueError(f"{clients} clients{least} need more than the {units} that are shared out: take fewer")


def no_draw(clients: int, minimum: int, n: int) -> NoReturn:
    """Error where clients of the wanted sizes were not drawn."""
    raise ValueError(
        f"no draw out of {TRIES} gave each of {clients} clients {minimum} of the {n} examples: raise alpha or take "
        "fewer clients"
    )


# Label distributions of clients, for generated or paired data -------------------------------------------------

_SWEEPS = 2000
_LEAST = 1e-9
"""No label is altogether absent from a client: scaling rows and columns needs positive numbers."""


def label_shares(clients: int, labels: int, alpha: float | None, rng: np.random.Generator) -> np.ndarray:
    """Each client's shares of the labels, such that all clients together have all labels equally often.

    Every client's shares are a draw from a Dirichlet(alpha); then columns and rows are scaled in turns until both have
    equal sums (Sinkhorn, "A relationship between arbitrary positive matrices and doubly stochastic matrices", Annals
    of Mathematical Statistics 35, 1964). So clients differ in their labels and not in their sizes, and no label runs
    out.

    Returns:
        Shape (K, C); each row sums to 1.
    """
    if alpha is None:
        return np.full((clients, labels), 1 / labels)
    shares = rng.dirichlet(np.full(labels, alpha), clients) + _LEAST
    for _ in range(_SWEEPS):
        shares *= clients / labels / shares.sum(axis=0)
        shares /= shares.sum(axis=1, keepdims=True)
    return shares


def label_counts(total: int, shares: Sequence[float] | np.ndarray) -> np.ndarray:
    """A number of examples divided by shares, largest remainders first, int64, shape (C,); sums to ``total``."""
    exact = total * np.asarray(shares) / np.sum(shares)
    counts = np.floor(exact + 1e-9).astype(np.int64)
    order = np.argsort(counts - exact, kind="stable")
    counts[order[: total - int(counts.sum())]] += 1
    return counts


# Partitions of multi-label data among clients: label sets -----------------------------------------------------


def label_sets(offsets: np.ndarray, values: np.ndarray, minimum: int = 1) -> np.ndarray:
    """One class per row: its set of labels, for :func:`confed.data.partitions.dirichlet`.

    Returns:
        Texts such as "3 7" (a set), "3" (label 3 alone, or the rarest one of a rare set) or "" (no label), shape (N,).
    """
    bounds, numbers = offsets.tolist(), values.tolist()
    rows = [tuple(numbers[start:stop]) for start, stop in pairwise(bounds)]
    sizes, frequency = Counter(rows), Counter(numbers)
    classes = [
        row if sizes[row] >= minimum or not row else (min(row, key=lambda label: (frequency[label], label)),)
        for row in rows
    ]
    return np.array([" ".join(map(str, row)) for row in classes])


def draw_preferences(labels: int, clients: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """Preferences of clients for labels: for each label a draw from a Dirichlet(alpha) over the clients.

    Drawn once and used for training and test rows, so that a client's test rows are skewed as its training rows are.

    Returns:
        float64, shape (K, C); every column sums to 1.
    """
    return rng.dirichlet(np.full(clients, alpha), size=labels).T


def label_skew(
    offsets: np.ndarray,
    values: np.ndarray,
    preferences: np.ndarray,
    rng: np.random.Generator,
    minimum: int = 1,
    *,
    groups: Sequence | np.ndarray | None = None,
    rule: Literal["mean", "product"] = "mean",
) -> Owners:
    """Skew of single labels, for pictures and for texts: a row goes to a client that likes its labels.

    The probability of a client is the mean of its preferences for the row's labels, or proportional to their product,
    which keeps the skew where rows have many labels; a row without labels goes to any client alike. Other than with
    whole sets, clients differ in how often each label occurs however many sets there are. A group counts as one row
    with all its rows' labels.
    """
    n, (clients, labels) = len(offsets) - 1, preferences.shape
    unit, units = units_of(n, groups)
    check_clients(clients, units, minimum)
    # Distinct pairs of a group and a label, so that a label counts once in a group.
    pairs = np.unique(np.repeat(unit, np.diff(offsets)) * labels + values)
    of, label = pairs // labels, pairs % labels
    held = np.bincount(of, minlength=units)
    # A preference that is zero, or rounds to it, must not make a row that no client may have.
    weights = preferences if rule == "mean" else np.log(np.maximum(preferences, 1e-9))
    chance = np.empty((units, clients))
    for client in range(clients):
        liking = np.bincount(of, weights=weights[client, label], minlength=units)
        chance[:, client] = liking / np.maximum(held, 1) if rule == "mean" else liking
    if rule == "product":
        np.exp(chance - chance.max(axis=1, keepdims=True), out=chance)
    chance[held == 0] = 1 / clients
    cumulative = chance.cumsum(axis=1)
    cumulative /= cumulative[:, -1:]
    for _ in range(TRIES):
        owner = np.minimum((rng.random((units, 1)) >= cumulative).sum(axis=1), clients - 1)
        if np.bincount(owner, minlength=clients).min() >= minimum:
            return _rows(owner[unit], clients)
    no_draw(clients, minimum, units)


def users_within(
    groups: Sequence | np.ndarray,
    rng: np.random.Generator,
    *,
    median: float = 2.0,
    sigma: float = 1.0,
    largest: int = 40,
) -> Owners:
    """Division of groups (scenes) into users with few rows each, as in FLAIR.

    User sizes are log-normal, rounded, at least 1 and at most ``largest``; a group's last user takes what is left.
    """
    groups = np.asarray(groups)
    owners: Owners = {}
    for group in np.unique(groups):
        rows, start, number = rng.permutation(np.flatnonzero(groups == group)), 0, 0
        while start < len(rows):
            size = int(np.clip(np.rint(rng.lognormal(np.log(median), sigma)), 1, largest))
            owners[f"{group}-{number:03d}"] = np.sort(rows[start : start + size])
            start, number = start + size, number + 1
    return owners

"""Partitions of rows among clients: IID, Dirichlet label skew, quantity skew, and by key.

Every function returns disjoint row indices that cover all rows, in ascending order, and is deterministic in its
generator. Where ``groups`` is given (which picture a question is about), a group goes to one client as a whole.
"""

from collections.abc import Mapping, Sequence
from typing import NoReturn

import numpy as np

from confed.data.refusals import check_length

Owners = dict[str, np.ndarray]
TRIES = 1000


def iid(n: int, clients: int, rng: np.random.Generator, *, groups: Sequence | np.ndarray | None = None) -> Owners:
    """Equal random shares (their numbers of groups differ by at most one).

    Raises ``ValueError``: fewer than one client, more clients than groups, or ``groups`` of another length than n.
    """
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

    Raises ``ValueError``: the second table has fewer groups than there are clients.
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
    """A random share of the groups, for validation; at least one group is left.

    Returns:
        True for the rows of chosen groups, shape (N,).
    """
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

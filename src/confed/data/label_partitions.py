"""Partitions of multi-label data among clients: label sets, label skew and users.

Rows are arrays of :class:`confed.data.ml_files.table.MultiLabelTable`: ``offsets`` (N + 1,) and ``values``, the label
numbers of all rows. One client per user is ``MultiLabelTable.of_users``; equal random shares are
:func:`confed.data.partitions.iid`.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import numpy as np

from confed.data.partitions import Owners, check_clients, no_draw, units_of

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

_TRIES = 100


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
    for _ in range(_TRIES):
        owner = np.minimum((rng.random((units, 1)) >= cumulative).sum(axis=1), clients - 1)
        if np.bincount(owner, minlength=clients).min() >= minimum:
            row_owner = owner[unit]
            return {f"client-{client:02d}": np.flatnonzero(row_owner == client) for client in range(clients)}
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

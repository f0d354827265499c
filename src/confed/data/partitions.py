"""Sharing a dataset out among clients.

The first half deals rows to clients (:func:`iid`, :func:`dirichlet`, :func:`quantity`, :func:`by_key`,
:func:`mirror`): every function returns disjoint row indices that cover all rows, in ascending order, and is
deterministic in its generator. Where ``groups`` is given (which picture a question is about), a group goes to
one client as a whole. The second half (:func:`federate`) makes the splits of every client from a pool of
examples and says how far they can be answered without looking (:func:`floors`).
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from confed.data.examples import Examples, Split

__all__ = [
    "Pool",
    "by_key",
    "dirichlet",
    "federate",
    "floors",
    "hold_out",
    "iid",
    "mirror",
    "quantity",
    "words",
]

Owners = dict[str, np.ndarray]
_TRIES = 1000


def iid(
    n: int, clients: int, rng: np.random.Generator, *, groups: Sequence | np.ndarray | None = None
) -> Owners:
    """Equal random shares (their numbers of groups differ by at most one).

    Args:
        n: number of rows.
        clients: number of clients.
        rng: source of the shuffle.
        groups: what must stay together, one entry per row; default: every row for itself.

    Returns:
        Client id ("client-00", ...) -> row indices.

    Raises:
        ValueError: fewer than one client, more clients than groups, or ``groups`` of another length than n.
    """
    unit, units = _units(n, groups)
    _check_clients(clients, units)
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

    Args:
        labels: one label per row, N in all.
        clients: number of clients K.
        alpha: concentration; small is skewed, large is nearly IID.
        rng: source of the draws.
        minimum: smallest number of rows that a client may hold.
        groups: what must stay together, one entry per row.

    Returns:
        Client id -> row indices.

    Raises:
        ValueError: ``alpha`` is not positive, there are too many clients for the rows, or no draw gave every
            client its minimum.
    """
    labels = np.asarray(labels)
    n = len(labels)
    unit, units = _units(n, groups)
    _check_clients(clients, units)
    if not (np.isfinite(alpha) and alpha > 0):
        raise ValueError(f"alpha must be positive and finite, got {alpha}")
    if minimum * clients > n:
        raise ValueError(f"{clients} clients of at least {minimum} examples need more than the {n} there are")
    weight = np.bincount(unit, minlength=units)
    classes = by_key(_unit_class(labels, unit, units, labels)).values()
    for _ in range(_TRIES):
        owner, held = np.empty(units, dtype=np.int64), np.zeros(clients)
        for members in classes:
            shuffled = rng.permutation(members)
            share = rng.dirichlet(np.full(clients, alpha)) * (held < n / clients)
            if share.sum() <= 0:  # a small alpha can put everything on clients that are full
                share = (held < n / clients).astype(float)
            cuts = (np.cumsum(share / share.sum())[:-1] * len(shuffled)).astype(int)
            for client, part in enumerate(np.split(shuffled, cuts)):
                owner[part] = client
                held[client] += weight[part].sum()
        if held.min() >= minimum:
            return _rows(owner[unit], clients)
    raise ValueError(
        f"no draw out of {_TRIES} gave each of {clients} clients {minimum} of the {n} examples at alpha "
        f"{alpha}: raise alpha or take fewer clients"
    )


def quantity(
    n: int,
    clients: int,
    rng: np.random.Generator,
    sigma: float = 1.0,
    minimum: int = 64,
    *,
    groups: Sequence | np.ndarray | None = None,
) -> Owners:
    """Quantity skew: log-normal client sizes, random content.

    Args:
        n: number of rows.
        clients: number of clients.
        rng: source of the sizes and of the shuffle.
        sigma: standard deviation of the logarithm of a client's size above the minimum; 0 gives equal sizes.
        minimum: smallest number of rows that a client may hold.
        groups: what must stay together, one entry per row; sizes are then met to within one group.

    Returns:
        Client id -> row indices.

    Raises:
        ValueError: ``sigma`` is negative, or there are too many clients for the rows.
    """
    unit, units = _units(n, groups)
    _check_clients(clients, units)
    if not (np.isfinite(sigma) and sigma >= 0):
        raise ValueError(f"sigma must be finite and not negative, got {sigma}")
    if minimum * clients > n:
        raise ValueError(f"{clients} clients of at least {minimum} examples need more than the {n} there are")
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
        raise ValueError(
            f"{clients} clients of at least {minimum} of {n} examples cannot be cut from {units} groups"
        )
    return _rows(owner[unit], clients)


def by_key(keys: Sequence | np.ndarray) -> Owners:
    """One client per distinct key (a scene, a question type), in sorted order.

    Args:
        keys: one key per row.

    Returns:
        Key -> row indices.
    """
    keys = np.asarray(keys)
    return {str(key): np.flatnonzero(keys == key) for key in np.unique(keys)}


def mirror(
    owners: Mapping[str, np.ndarray],
    labels: Sequence | np.ndarray,
    other: Sequence | np.ndarray,
    rng: np.random.Generator,
    *,
    groups: Sequence | np.ndarray | None = None,
    other_groups: Sequence | np.ndarray | None = None,
) -> Owners:
    """Deals a second table (the test split) so that every client's label mix follows its share of the first.

    Of each class a client gets its share of the first table's groups, rounded up or down at random
    (systematic sampling); every client gets at least one group.

    Args:
        owners: client id -> rows of the first table.
        labels: labels of the first table's rows.
        other: labels of the second table's rows.
        rng: source of the shuffles and of the rounding.
        groups: what stays together in the first table.
        other_groups: what stays together in the second table.

    Returns:
        Client id -> rows of the second table.

    Raises:
        ValueError: the second table has fewer groups than there are clients.
    """
    labels, other, clients = np.asarray(labels), np.asarray(other), list(owners)
    unit, units = _units(len(labels), groups)
    second, count = _units(len(other), other_groups)
    _check_clients(len(clients), count)
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
        for client, part in enumerate(np.split(members, cuts)):
            result[part] = client
    for client in range(len(clients)):
        if not (result == client).any():
            result[np.flatnonzero(result == np.bincount(result).argmax())[0]] = client
    return {name: np.flatnonzero(result[second] == client) for client, name in enumerate(clients)}


def hold_out(groups: Sequence | np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """A random share of the groups, for validation; at least one group is left.

    Args:
        groups: one group per row, shape (N,).
        share: share of the distinct groups, in [0, 1).
        rng: source of the choice.

    Returns:
        True for the rows of chosen groups, shape (N,).

    Raises:
        ValueError: ``share`` is outside [0, 1).
    """
    if not 0 <= share < 1:
        raise ValueError(f"validation must be a share of the pictures in [0, 1), got {share}")
    distinct = np.unique(np.asarray(groups))
    count = min(round(share * len(distinct)), max(len(distinct) - 1, 0))
    return np.isin(groups, rng.permutation(distinct)[:count])


@dataclass(frozen=True)
class Pool:
    """All N questions of a dataset, before they are shared out.

    Attributes:
        examples: the questions.
        roles: "train", "val" or "test" for every question, shape (N,).
        scenes: what unseen scenes are held out by, one per question, shape (N,).
        keys: partition name -> one key per question (N,), for partitions with one client per key.
    """

    examples: Examples
    roles: np.ndarray
    scenes: np.ndarray
    keys: Mapping[str, np.ndarray]


def federate(
    pool: Pool,
    partition: str,
    *,
    unseen: Sequence[str],
    unseen_roles: Sequence[str] = ("test",),
    clients: int = 4,
    alpha: float = 0.5,
    sigma: float = 1.0,
    validation: float = 0.0,
    max_train: int | None = None,
    max_test: int | None = None,
    seed: int = 0,
) -> tuple[dict[str, Split], dict[str, Examples]]:
    """The splits of every client, and the tests of the unseen scenes.

    Who owns which picture and every test set are the same for all seeds, so that runs can be compared
    example by example. The seed chooses the validation pictures and, under ``max_train``, the training
    examples. Under the quantity partition all clients are thinned by one factor, so that the largest just
    meets the cap (and none falls below 64 for it).

    Args:
        pool: the questions.
        partition: a key of ``pool.keys``, "iid", "dirichlet" (over answers) or "quantity".
        unseen: scenes that nobody trains on, whatever the partition.
        unseen_roles: roles of the examples that unseen scenes are tested on.
        clients: number of clients (partitions without a key).
        alpha: concentration of "dirichlet".
        sigma: spread of "quantity".
        validation: share of a client's training pictures held out; used if no question has the role "val".
        max_train: most training examples per client.
        max_test: most test examples per client and per unseen scene.
        seed: see above.

    Returns:
        Client id -> split, and scene -> examples.

    Raises:
        ValueError: an unknown partition or scene, a limit out of range, or too few examples for the clients.
    """
    _check_federate(pool, partition, unseen, max_train=max_train, max_test=max_test, seed=seed)
    groups, seen = np.asarray(pool.examples.image_index), ~np.isin(pool.scenes, list(unseen))
    rows = {role: np.flatnonzero(seen & (pool.roles == role)) for role in ("train", "val", "test")}
    if not len(rows["train"]):
        raise ValueError(f"no training example is left beside the unseen scenes {list(unseen)}")
    owned = _deal(pool, partition, rows, clients=clients, alpha=alpha, sigma=sigma)
    train, held = owned["train"], owned["val"]
    if not len(rows["val"]):
        train, held = _validation(train, groups, validation, seed)
    limits = dict.fromkeys(train, max_train)
    if partition == "quantity" and max_train is not None:
        thin = min(1.0, max_train / max(map(len, train.values())))
        limits = {name: min(max_train, max(64, round(thin * len(own)))) for name, own in train.items()}
    take = pool.examples.take
    splits = {
        name: Split(
            take(_cap(own, limits[name], np.random.default_rng([1, seed, number]))),
            take(held[name]),
            take(_cap(owned["test"][name], max_test, np.random.default_rng([2, number]))),
        )
        for number, (name, own) in enumerate(train.items())
    }
    kept = np.isin(pool.roles, list(unseen_roles))
    tests = {
        scene: take(
            _cap(np.flatnonzero(kept & (pool.scenes == scene)), max_test, np.random.default_rng([3, number]))
        )
        for number, scene in enumerate(unseen)
    }
    return splits, tests


def floors(clients: Mapping[str, Split]) -> dict[str, str]:
    """Counts, and accuracies that need no picture, over all clients' test questions.

    "Majority" answers the most frequent training answer; "question only" the most frequent training answer to
    the same question, word for word (to an unknown question: the majority). Both with one table from all
    clients' training questions, and with one table per client, which personal models have to beat.

    Args:
        clients: client id -> split.
    """
    pooled, own, total = (Counter[str](), Counter[str](), 0)
    everyone = _Table([split.train for split in clients.values()])
    for split in clients.values():
        alone = _Table([split.train])
        for question, answer in zip(split.test.questions, split.test.answers, strict=True):
            total += 1
            for hits, table in ((pooled, everyone), (own, alone)):
                hits["majority"] += answer == table.majority
                hits["question"] += answer == table.by_question.get(question, table.majority)
    sizes = [
        sum(len(getattr(split, role)) for split in clients.values())
        for role in ("train", "validation", "test")
    ]

    def shares(kind: str) -> str:
        together, alone = pooled[kind] / max(total, 1), own[kind] / max(total, 1)
        return f"{together:.3f} (one for all clients), {alone:.3f} (one each)"

    return {
        "counts": f"{len(clients)} clients; {sizes[0]} train, {sizes[1]} validation, {sizes[2]} test",
        "majority floor": shares("majority"),
        "question-only floor": shares("question"),
    }


class _Table:
    """The most frequent answer, overall and to each question (ties: the first seen)."""

    def __init__(self, parts: Iterable[Examples]) -> None:
        overall, each = Counter[str](), defaultdict[str, Counter[str]](Counter)
        for part in parts:
            for question, answer in zip(part.questions, part.answers, strict=True):
                overall[answer] += 1
                each[question][answer] += 1
        self.majority = overall.most_common(1)[0][0] if overall else ""
        self.by_question = {question: counts.most_common(1)[0][0] for question, counts in each.items()}


def words(questions: Iterable[str]) -> tuple[str, ...]:
    """The distinct words of the questions: runs of letters, digits and apostrophes, lower-case, sorted."""
    return tuple(
        sorted({word for text in set(questions) for word in re.findall(r"\w+(?:'\w+)*", text.lower())})
    )


def _deal(
    pool: Pool, partition: str, rows: Mapping[str, np.ndarray], *, clients: int, alpha: float, sigma: float
) -> dict[str, Owners]:
    """Role -> client -> rows of the pool. The generator is fixed: owners do not depend on a run's seed."""
    rng, groups = np.random.default_rng(0), np.asarray(pool.examples.image_index)
    if partition in pool.keys:
        keys = pool.keys[partition]
        names = list(by_key(keys[rows["train"]]))
        return {role: {name: own[keys[own] == name] for name in names} for role, own in rows.items()}
    answers, first = np.asarray(pool.examples.answers), rows["train"]
    if partition == "dirichlet":
        owners = dirichlet(answers[first], clients, alpha, rng, groups=groups[first])
    elif partition == "quantity":
        owners = quantity(len(first), clients, rng, sigma, groups=groups[first])
    else:
        owners = iid(len(first), clients, rng, groups=groups[first])
    owned = {"train": owners}
    for role in ("val", "test"):
        own = rows[role]
        if not len(own):
            owned[role] = dict.fromkeys(owners, own)
        elif partition == "dirichlet":
            owned[role] = mirror(
                owners, answers[first], answers[own], rng, groups=groups[first], other_groups=groups[own]
            )
        else:
            owned[role] = iid(len(own), clients, rng, groups=groups[own])
    return {role: {name: rows[role][own] for name, own in shares.items()} for role, shares in owned.items()}


def _validation(train: Owners, groups: np.ndarray, share: float, seed: int) -> tuple[Owners, Owners]:
    """Training and validation rows; a picture is on the same side for every client that has it."""
    pictures = [np.unique(groups[own]) for own in train.values()]
    shared = sum(map(len, pictures)) > len(np.unique(np.concatenate(pictures)))
    cells = [np.concatenate(pictures)] if shared else pictures
    chosen = [
        cell[hold_out(cell, share, np.random.default_rng([0, seed, number]))]
        for number, cell in enumerate(cells)
    ]
    held = {name: np.isin(groups[own], np.concatenate(chosen)) for name, own in train.items()}
    return {name: own[~held[name]] for name, own in train.items()}, {
        name: own[held[name]] for name, own in train.items()
    }


def _cap(rows: np.ndarray, limit: int | None, rng: np.random.Generator) -> np.ndarray:
    return rows if limit is None or len(rows) <= limit else np.sort(rng.choice(rows, limit, replace=False))


def _check_federate(
    pool: Pool,
    partition: str,
    unseen: Sequence[str],
    *,
    max_train: int | None,
    max_test: int | None,
    seed: int,
) -> None:
    known = [*pool.keys, "iid", "dirichlet", "quantity", "words"]
    if partition not in known:
        raise ValueError(f"partition must be one of {', '.join(known)}, got {partition!r}")
    scenes = sorted(set(pool.scenes.tolist()))
    if isinstance(unseen, str) or len(set(unseen)) < len(unseen) or not set(unseen) <= set(scenes):
        raise ValueError(f"unseen must be distinct names out of {', '.join(scenes)}, got {unseen!r}")
    for label, limit in (("max_train", max_train), ("max_test", max_test)):
        if limit is not None and limit < 1:
            raise ValueError(f"{label} must be None or at least 1, got {limit}")
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}")


def _units(n: int, groups: Sequence | np.ndarray | None) -> tuple[np.ndarray, int]:
    """Number of its group for every row, and how many groups there are."""
    if groups is None:
        return np.arange(n), n
    if len(groups) != n:
        raise ValueError(f"groups must have one entry per row ({n}), got {len(groups)}")
    distinct, unit = np.unique(np.asarray(groups), return_inverse=True)
    return unit, len(distinct)


def _unit_class(labels: np.ndarray, unit: np.ndarray, units: int, reference: np.ndarray) -> np.ndarray:
    """For every group the label of its rows that is rarest in ``reference`` (ties: alphabetical)."""
    known, counts = np.unique(reference, return_counts=True)
    frequency = dict(zip(known.tolist(), counts.tolist(), strict=True))
    ranked = sorted(set(labels.tolist()), key=lambda label: (frequency.get(label, 0), label))
    rank = {label: position for position, label in enumerate(ranked)}
    lowest = np.full(units, len(ranked))
    np.minimum.at(lowest, unit, np.array([rank[label] for label in labels.tolist()], dtype=np.int64))
    return np.asarray(ranked)[lowest]


def _rows(owner: np.ndarray, clients: int) -> Owners:
    return {f"client-{client:02d}": np.flatnonzero(owner == client) for client in range(clients)}


def _check_clients(clients: int, units: int) -> None:
    if clients < 1:
        raise ValueError(f"clients must be at least 1, got {clients}")
    if clients > units:
        raise ValueError(f"clients must not outnumber what is shared out, got {clients} clients for {units}")

"""Partitioning of questions into the clients' splits, and accuracies of answers without the picture."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from confed.data.examples import Examples, Split
from confed.data.partitions import Owners, by_key, dirichlet, hold_out, iid, mirror, quantity


@dataclass(frozen=True)
class Pool:
    """All N questions of a dataset, before they are shared out.

    Attributes:
        roles: "train", "val" or "test" for every question, shape (N,).
        scenes: what unseen scenes are held out by, one per question, shape (N,).
        keys: partition name -> one key per question (N,), for partitions with one client per key.
        together: group of each question, int64 (N,); those of a group have one client and one role. By default those
            about one picture.
        skew: what "dirichlet" skews by, one value per question (N,); by default the answer.
    """

    examples: Examples
    roles: np.ndarray
    scenes: np.ndarray
    keys: Mapping[str, np.ndarray]
    together: np.ndarray | None = None
    skew: np.ndarray | None = None

    @property
    def groups(self) -> np.ndarray:
        """The group of each question, (N,)."""
        return np.asarray(self.examples.image_index if self.together is None else self.together)


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
    """
    _check_federate(pool, partition, unseen, max_train=max_train, max_test=max_test, seed=seed)
    groups, seen = pool.groups, ~np.isin(pool.scenes, list(unseen))
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
        limits = {name: min(max_train, max(64, round(thin * len(client_rows)))) for name, client_rows in train.items()}
    take = pool.examples.take
    splits = {
        name: Split(
            take(_cap(client_rows, limits[name], np.random.default_rng([1, seed, number]))),
            take(held[name]),
            take(_cap(owned["test"][name], max_test, np.random.default_rng([2, number]))),
        )
        for number, (name, client_rows) in enumerate(train.items())
    }
    kept = np.isin(pool.roles, list(unseen_roles))
    tests = {
        scene: take(_cap(np.flatnonzero(kept & (pool.scenes == scene)), max_test, np.random.default_rng([3, number])))
        for number, scene in enumerate(unseen)
    }
    return splits, tests


def floors(clients: Mapping[str, Split]) -> dict[str, str]:
    """Counts, and accuracies that need no picture, over all clients' test questions.

    "Majority" answers the most frequent training answer; "question only" the most frequent training answer to
    the same question, word for word (to an unknown question: the majority). Both with one table from all
    clients' training questions, and with one table per client, which personal models have to beat.
    """
    pooled, client_hits, total = (Counter[str](), Counter[str](), 0)
    everyone = AnswerTable([split.train for split in clients.values()])
    for split in clients.values():
        alone = AnswerTable([split.train])
        for question, answer in zip(split.test.questions, split.test.answers, strict=True):
            total += 1
            for hits, table in ((pooled, everyone), (client_hits, alone)):
                hits["majority"] += answer == table.majority
                hits["question"] += answer == table.by_question.get(question, table.majority)
    sizes: list[int] = []
    for role in ("train", "validation", "test"):
        sizes.append(sum(len(split.roles[role]) for split in clients.values()))

    def shares(kind: str) -> str:
        together, alone = pooled[kind] / max(total, 1), client_hits[kind] / max(total, 1)
        return f"{together:.3f} (one for all clients), {alone:.3f} (one each)"

    clients_counted = f"{len(clients)} client{'' if len(clients) == 1 else 's'}"
    return {
        "counts": f"{clients_counted}; {sizes[0]} train, {sizes[1]} validation, {sizes[2]} test",
        "majority floor": shares("majority"),
        "question-only floor": shares("question"),
    }


class AnswerTable:
    """The most frequent answer, overall and to each question (ties: the first seen).

    Attributes:
        majority: the most frequent answer; empty without examples.
        by_question: question, word for word -> its most frequent answer.
    """

    def __init__(self, parts: Iterable[Examples]) -> None:
        overall, each = Counter[str](), defaultdict[str, Counter[str]](Counter)
        for examples in parts:
            for question, answer in zip(examples.questions, examples.answers, strict=True):
                overall[answer] += 1
                each[question][answer] += 1
        self.majority = overall.most_common(1)[0][0] if overall else ""
        self.by_question = {question: counts.most_common(1)[0][0] for question, counts in each.items()}


def words(questions: Iterable[str]) -> tuple[str, ...]:
    """The distinct words of the questions: runs of letters, digits and apostrophes, lower-case, sorted."""
    return tuple(sorted(set(chain.from_iterable(re.findall(r"\w+(?:'\w+)*", text.lower()) for text in set(questions)))))


def _deal(
    pool: Pool, partition: str, rows: Mapping[str, np.ndarray], *, clients: int, alpha: float, sigma: float
) -> dict[str, Owners]:
    """Role -> client -> rows of the pool. The generator is fixed: owners do not depend on a run's seed."""
    rng, groups = np.random.default_rng(0), pool.groups
    if partition in pool.keys:
        keys = pool.keys[partition]
        names = list(by_key(keys[rows["train"]]))
        return {role: {name: role_rows[keys[role_rows] == name] for name in names} for role, role_rows in rows.items()}
    answers, first = np.asarray(pool.examples.answers if pool.skew is None else pool.skew), rows["train"]
    if partition == "dirichlet":
        owners = dirichlet(answers[first], clients, alpha, rng, groups=groups[first])
    elif partition == "quantity":
        owners = quantity(len(first), clients, rng, sigma, groups=groups[first])
    else:
        owners = iid(len(first), clients, rng, groups=groups[first])
    owned = {"train": owners}
    for role in ("val", "test"):
        role_rows = rows[role]
        if not len(role_rows):
            owned[role] = dict.fromkeys(owners, role_rows)
        elif partition == "dirichlet":
            owned[role] = mirror(
                owners, answers[first], answers[role_rows], rng, groups=groups[first], other_groups=groups[role_rows]
            )
        else:
            owned[role] = iid(len(role_rows), clients, rng, groups=groups[role_rows])
    dealt: dict[str, dict[str, np.ndarray]] = {}
    for role, shares in owned.items():
        dealt[role] = {name: rows[role][role_rows] for name, role_rows in shares.items()}
    return dealt


def _validation(train: Owners, groups: np.ndarray, share: float, seed: int) -> tuple[Owners, Owners]:
    """Training and validation rows; a picture is on the same side for every client that has it."""
    pictures = [np.unique(groups[client_rows]) for client_rows in train.values()]
    shared = sum(map(len, pictures)) > len(np.unique(np.concatenate(pictures)))
    cells = [np.concatenate(pictures)] if shared else pictures
    chosen = [
        cell[hold_out(cell, share, np.random.default_rng([0, seed, number]))] for number, cell in enumerate(cells)
    ]
    held = {name: np.isin(groups[client_rows], np.concatenate(chosen)) for name, client_rows in train.items()}
    return {name: client_rows[~held[name]] for name, client_rows in train.items()}, {
        name: client_rows[held[name]] for name, client_rows in train.items()
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
    partitions = [*pool.keys, "iid", "dirichlet", "quantity"]
    if partition not in partitions:
        raise ValueError(f"partition must be one of {', '.join(partitions)}, got {partition!r}")
    scenes = sorted(set(pool.scenes.tolist()))
    if isinstance(unseen, str) or len(set(unseen)) < len(unseen) or not set(unseen) <= set(scenes):
        raise ValueError(f"unseen must be distinct names out of {', '.join(scenes)}, got {unseen!r}")
    for label, limit in (("max_train", max_train), ("max_test", max_test)):
        if limit is not None and limit < 1:
            raise ValueError(f"{label} must be None or at least 1, got {limit}")
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}")

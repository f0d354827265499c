"""Few-shot classification for federated prompt learning: K shots per class, base and new classes, clients, domains.

Zhou et al., "Conditional prompt learning for vision-language models" (CoCoOp), CVPR 2022, for base and new classes: the
first half of the classes is learned, and the others are asked about among themselves. The harmonic mean of both
accuracies is 2 b n / (b + n).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

import numpy as np

from confed.data.examples import Examples, FederatedDataset, Split
from confed.data.federate import Pool, cap, federate, words
from confed.data.options import Options
from confed.data.picture_tables import Pictures
from confed.data.refusals import check_distinct

QUESTION = "what is it?"
NEW = "new classes"
"""The place whose examples are of classes that no client trains on."""

NewClasses = Literal["none", "half"]
"""Which classes are new: none, or all behind the first half (of an odd number the smaller half is new)."""

PartitionOfClasses = Literal["iid", "dirichlet", "classes", "domain"]
"""Equal random shares; skew of classes; as many classes for each client, of its own; a client per domain."""

Offer = Literal["base", "own"]
"""Among which classes clients' examples are classified: all base classes, or those that the client trains on."""


@dataclass(frozen=True)
class ClassPool:
    """All N pictures of a classification set, with labels int64 (N,), before they are shared out."""

    name: str
    classes: tuple[str, ...]
    images: np.ndarray | Pictures
    labels: np.ndarray
    roles: np.ndarray
    names: Sequence[str]
    domains: np.ndarray | None = None


def harmonic_mean(base: float, new: float) -> float:
    """2 b n / (b + n), 0 where both are 0."""
    return 2 * base * new / (base + new) if base + new else 0.0


def few_shot(
    pool: ClassPool,
    partition: PartitionOfClasses,
    *,
    shots: int | None = 8,
    validation_shots: int = 4,
    shots_in_total: bool = False,
    new: NewClasses = "half",
    offer: Offer = "base",
    clients: int = 4,
    alpha: float = 0.1,
    unseen: Sequence[str] = (),
    max_test: int | None = None,
    facts: Mapping[str, str] | None = None,
    seed: int = 0,
) -> FederatedDataset:
    """A federated classification set; answers are class names, and every example says which classes it is offered."""
    count = len(pool.classes)
    base = list(range(count if new == "none" else (count + 1) // 2))
    _check(pool, partition, clients, base, unseen)
    many = clients if partition in ("iid", "dirichlet") and not shots_in_total else 1
    domains = np.full(len(pool.labels), "all") if pool.domains is None else np.asarray(pool.domains)
    roles = _drawn(pool, domains, base, many, partition, shots, validation_shots, unseen, seed)
    keys = {"domain": domains}
    if partition == "classes":
        owner = {label: number * clients // len(base) for number, label in enumerate(base)}
        keys["classes"] = np.array([f"client-{owner.get(int(label), 0):02d}" for label in pool.labels])
    examples = _examples(pool, domains)
    splits, elsewhere = federate(
        Pool(examples, roles, domains, keys),
        Options(partition=partition, unseen=unseen, clients=clients, alpha=alpha, max_test=max_test, seed=seed),
    )
    named = tuple(pool.classes[label] for label in base)
    offered = dict.fromkeys(splits, named)
    if offer == "own":
        offered: dict[str, tuple[str, ...]] = {}
        for c, split in splits.items():
            offered[c] = tuple(n for n in named if n in set(split.train.answers))
    told = {client: _offering(split, offered[client]) for client, split in splits.items()}
    places = {place: replace(examples, offered=named) for place, examples in elsewhere.items()}
    if len(base) < len(pool.classes):
        fresh = np.flatnonzero(~np.isin(pool.labels, base) & (pool.roles == "test") & ~np.isin(domains, list(unseen)))
        if not len(fresh):
            raise ValueError(f"dataset {pool.name!r} has no test example of the new classes")
        others = tuple(name for name in pool.classes if name not in named)
        places[NEW] = replace(examples.take(cap(fresh, max_test, np.random.default_rng([8]))), offered=others)
    whose = " in all" if shots_in_total else " and client"
    counts = f"{len(told)} clients; {len(named)} base and {len(pool.classes) - len(named)} new classes"
    return FederatedDataset(
        pool.name, pool.classes, told, places, words([QUESTION]),
        {**(facts or {}), "classes": counts, "partition": partition,
         "shots": "all" if shots is None else f"{shots} per class{whose}, {validation_shots} to validate",
         "chance": f"{1 / len(named):.3f} among base classes", **_absent(told, named)},
    )  # fmt: skip


def with_other_sets(
    dataset: FederatedDataset, pools: Sequence[ClassPool], max_test: int | None = None
) -> FederatedDataset:
    """A classification set and test pictures of other sets, for evaluation across data sets (Zhou et al., CVPR 2022).

    Every other set is a place, asked about among its own classes. A class with the name of a known one is that class.
    """
    answers, places = list(dataset.answers), dict(dataset.unseen)
    learned = set(chain.from_iterable(split.train.answers for split in dataset.clients.values()))
    told: list[str] = []
    for pool in pools:
        _check_classes(pool)
        if pool.name in places or pool.name in dataset.clients:
            raise ValueError(f"there is a client or place {pool.name!r} already: other data sets need other names")
        answers += [name for name in pool.classes if name not in answers]
        rows = cap(np.flatnonzero(np.asarray(pool.roles) == "test"), max_test, np.random.default_rng([8]))
        examples = _examples(pool, np.full(len(pool.labels), pool.name))
        places[pool.name] = replace(examples.take(rows), offered=pool.classes)
        told.append(f"{pool.name}: {len(pool.classes)} classes, {len(learned & set(pool.classes))} of them learned")
    facts = {**dataset.facts, "other data sets": "; ".join(told)} if told else dataset.facts
    return replace(dataset, answers=tuple(answers), unseen=places, facts=facts)


def _absent(told: Mapping[str, Split], base: Sequence[str]) -> dict[str, str]:
    """Clients that are tested on classes of which they have no example to learn from; {} without any."""
    lacking = {client: set(split.test.answers) - set(split.train.answers) for client, split in told.items()}
    absent = {client: sorted(lacked & set(base)) for client, lacked in lacking.items() if lacked & set(base)}
    if not absent:
        return {}
    client, lacked = max(absent.items(), key=lambda pair: len(pair[1]))
    return {
        "not learned": f"{len(absent)} of {len(told)} clients are tested on classes of which they have no example to "
        f"learn from, at most {len(lacked)} ({client}: {', '.join(lacked[:3])}{', ...' if len(lacked) > 3 else ''})"
    }


def _drawn(
    pool: ClassPool,
    domains: np.ndarray,
    base: Sequence[int],
    many: int,
    partition: str,
    shots: int | None,
    validation_shots: int,
    unseen: Sequence[str],
    seed: int,
) -> np.ndarray:
    """Roles: shots train and validate, test examples are those of base classes, others are left out."""
    roles = np.where(np.isin(pool.labels, base) & (np.asarray(pool.roles) == "test"), "test", "").astype("<U5")
    seen = ~np.isin(domains, list(unseen))
    cells = [str(d) for d in np.unique(domains[seen])] if partition == "domain" else [""]
    for cell in cells:
        here = seen & (domains == cell if cell else True)
        for label in base:
            rng = np.random.default_rng([7, seed, label, cells.index(cell)])
            of_class = here & (pool.labels == label)
            rows = rng.permutation(np.flatnonzero(of_class & (np.asarray(pool.roles) == "train")))
            held = rng.permutation(np.flatnonzero(of_class & (np.asarray(pool.roles) == "val")))
            if shots is None:
                roles[rows], roles[held] = "train", "val"
                continue
            spare = len(held) or max(len(rows) - many * shots, 0)
            wanted = many * shots, many * validation_shots
            if len(rows) < wanted[0] or spare < wanted[1]:
                where = f" of domain {cell!r}" if cell else ""
                raise ValueError(
                    f"dataset {pool.name!r}: class {pool.classes[label]!r}{where} has {len(rows) + len(held)} examples "
                    f"to draw from, and {many} x ({shots} + {validation_shots}) shots are asked for: set data.shots "
                    "and data.validation_shots to fewer"
                )
            roles[rows[: wanted[0]]] = "train"
            roles[(held if len(held) else rows[wanted[0] :])[: wanted[1]]] = "val"
    return roles


def _examples(pool: ClassPool, domains: np.ndarray) -> Examples:
    answers = [pool.classes[label] for label in pool.labels]
    count = len(answers)
    kinds = [str(domain) for domain in domains] if pool.domains is not None else ["class"] * count
    return Examples(pool.images, np.arange(count), [QUESTION] * count, answers, kinds, list(pool.names))


def _offering(split: Split, classes: tuple[str, ...]) -> Split:
    offered = set(classes)
    parts = (split.train, split.validation, split.test)
    answerable: list[Examples] = []
    for examples in parts:
        rows = [row for row, answer in enumerate(examples.answers) if answer in offered]
        answerable.append(replace(examples.take(rows), offered=classes))
    return Split(*answerable)


def _check(
    pool: ClassPool,
    partition: str,
    clients: int,
    base: Sequence[int],
    unseen: Sequence[str],
) -> None:
    """Check of options before anything is drawn."""
    if len(base) < 2:
        raise ValueError(f"dataset {pool.name!r} needs at least two base classes, got {len(base)}")
    if partition == "classes" and clients > len(base):
        raise ValueError(f"clients must be at most the {len(base)} base classes for partition 'classes', got {clients}")
    if partition == "domain" and pool.domains is None:
        raise ValueError(f"partition 'domain' needs domains, and dataset {pool.name!r} has one only")
    _check_classes(pool)
    seen = ~np.isin([""] * len(pool.labels) if pool.domains is None else pool.domains, list(unseen))
    learned = set(pool.labels[seen & (np.asarray(pool.roles) == "train")].tolist())
    if bare := [pool.classes[label] for label in base if label not in learned]:
        common = "no class is both trained on and tested" if len(bare) == len(base) else f"{len(bare)} of {len(base)}"
        raise ValueError(
            f"dataset {pool.name!r}: base class {bare[0]!r} has no training example ({common}): its examples would be "
            "asked about and never learned; leave it out, or let the training list have it"
        )
    domains = sorted({str(d) for d in pool.domains}) if pool.domains is not None else []
    check_distinct("unseen", unseen, domains)


def _check_classes(pool: ClassPool) -> None:
    """Check that each class has a name of its own and a test example."""
    doubles = sorted({name for name in pool.classes if pool.classes.count(name) > 1})
    if doubles:
        raise ValueError(f"dataset {pool.name!r}: every class must have a name of its own, got {doubles[0]!r} twice")
    tested = set(pool.labels[np.asarray(pool.roles) == "test"].tolist())
    if bare := [name for number, name in enumerate(pool.classes) if number not in tested]:
        others = [name for name in pool.classes if name.casefold() == bare[0].casefold() and name != bare[0]]
        hint = f"; {others[0]!r} differs in case alone: data.fold_case = true makes them one" if others else ""
        raise ValueError(f"dataset {pool.name!r}: class {bare[0]!r} has no test example{hint}")
    if nameless := [number for number, name in enumerate(pool.classes) if not name.strip()]:
        raise ValueError(
            f"dataset {pool.name!r}: class number {nameless[0]} has no name, and names are what is learned"
        )

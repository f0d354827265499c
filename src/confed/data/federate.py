"""Partitioning of examples into the clients' splits, and accuracies of answers without the picture."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from confed.data.examples import Examples, Split
from confed.data.options import Options
from confed.data.partitions import (
    Owners,
    by_key,
    dirichlet,
    draw_preferences,
    hold_out,
    iid,
    label_sets,
    label_skew,
    mirror,
    quantity,
    users_within,
)
from confed.data.ragged import Ragged
from confed.data.refusals import check_choice, check_distinct

ROLES = ("train", "val", "test")
_NOTHING = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class Deck:
    """N rows to be dealt out to clients, whatever their examples are."""

    roles: np.ndarray
    keys: Mapping[str, np.ndarray]
    groups: np.ndarray
    classes: np.ndarray
    labels: Ragged | None = None
    label_count: int = 0


def deal(deck: Deck, options: Options) -> dict[str, dict[str, np.ndarray]]:
    """Client -> role -> its rows.

    Who owns which row and every test set are the same for all seeds, so that runs can be compared example by example.
    The seed chooses the validation rows, where none are given, and the training rows under ``max_train``. Under the
    quantity partition all clients are thinned by one factor, so that the largest just meets the cap (and none falls
    below 64 for it).
    """
    rows = {role: np.flatnonzero(deck.roles == role) for role in ROLES}
    owned = _owners(deck, options, rows)
    names = list(owned["train"])
    if not len(rows["test"]) and options.test_share:
        for number, name in enumerate(names):
            client_rows = owned["train"][name]
            held = hold_out(deck.groups[client_rows], options.test_share, np.random.default_rng([2, number]))
            owned["test"][name], owned["train"][name] = client_rows[held], client_rows[~held]
    if not len(rows["val"]):
        owned["train"], owned["val"] = _validation(deck, owned["train"], options)
    limits: dict[str, int | None] = dict.fromkeys(names, options.max_train)
    if options.partition == "quantity" and options.max_train is not None:
        thin = min(1.0, options.max_train / max(map(len, owned["train"].values())))
        for name, client_rows in owned["train"].items():
            limits[name] = min(options.max_train, max(64, round(thin * len(client_rows))))
    dealt: dict[str, dict[str, np.ndarray]] = {}
    for number, name in enumerate(names):
        dealt[name] = {
            "train": cap(owned["train"][name], limits[name], np.random.default_rng([1, options.seed, number])),
            "val": owned["val"][name],
            "test": cap(owned["test"][name], options.max_test, np.random.default_rng([2, number])),
        }
    return dealt


def cap(rows: np.ndarray, most: int | None, rng: np.random.Generator) -> np.ndarray:
    """At most ``most`` random rows, in their order."""
    return rows if most is None or len(rows) <= most else np.sort(rng.choice(rows, most, replace=False))


def _owners(deck: Deck, options: Options, rows: Mapping[str, np.ndarray]) -> dict[str, Owners]:
    """Role -> client -> rows of the deck. The generator is fixed: owners do not depend on a run's seed."""
    if options.partition is not None and options.partition in deck.keys:
        keys = deck.keys[options.partition]
        names = by_key(keys[rows["train"]])
        by_client: dict[str, Owners] = {}
        for role, role_rows in rows.items():
            of_role = by_key(keys[role_rows])
            by_client[role] = {name: role_rows[of_role.get(name, _NOTHING)] for name in names}
        return by_client
    rng = np.random.default_rng(0)
    if options.partition == "label_skew":
        preferences = draw_preferences(deck.label_count, options.clients, options.alpha, rng)
        # A stream of its own for each role: generated training rows may differ between seeds, test rows do not.
        streams = {role: np.random.default_rng(number) for number, role in enumerate(ROLES, start=1)}
        least = {"train": options.minimum, "val": 0, "test": 0}
        return {role: _skewed(deck, rows[role], preferences, least[role], streams[role]) for role in ROLES}
    first = rows["train"]
    owners = _training_owners(deck.classes[first], deck.groups[first], options, rng)
    owned = {"train": {name: first[client_rows] for name, client_rows in owners.items()}}
    for role in ("val", "test"):
        role_rows = rows[role]
        shares = _as_training(deck, owners, first, role_rows, options, rng) if len(role_rows) else {}
        owned[role] = {name: role_rows[shares.get(name, _NOTHING)] for name in owners}
    return owned


def _training_owners(classes: np.ndarray, groups: np.ndarray, options: Options, rng: np.random.Generator) -> Owners:
    if options.partition == "dirichlet":
        return dirichlet(classes, options.clients, options.alpha, rng, options.minimum, groups=groups)
    if options.partition == "quantity":
        return quantity(len(classes), options.clients, rng, options.sigma, groups=groups)
    if options.partition == "users":
        return users_within(classes, rng, median=options.median, sigma=options.sigma, largest=options.largest)
    return iid(len(classes), options.clients, rng, groups=groups)


def _as_training(
    deck: Deck, owners: Owners, first: np.ndarray, rows: np.ndarray, options: Options, rng: np.random.Generator
) -> Owners:
    """Validation or test rows: every class in the proportions in which the clients hold it in training."""
    groups = deck.groups[rows]
    if deck.labels is not None and len(np.unique(groups)) < len(owners):
        return _by_chance(owners, deck.classes[first], deck.classes[rows], groups, rng)
    if options.partition not in ("dirichlet", "users"):
        return iid(len(rows), options.clients, rng, groups=groups)
    return mirror(owners, deck.classes[first], deck.classes[rows], rng, groups=deck.groups[first], other_groups=groups)


def _by_chance(
    owners: Owners, classes: np.ndarray, other: np.ndarray, groups: np.ndarray, rng: np.random.Generator
) -> Owners:
    """Fewer rows than clients: each group goes to a client drawn by its share of the class of the group's first row."""
    units = np.unique(groups, return_inverse=True)[1]
    held: dict[Any, np.ndarray] = {}
    for value in np.unique(other):
        held[value] = np.array([(classes[client_rows] == value).sum() for client_rows in owners.values()], float)
    sizes = np.array([len(client_rows) for client_rows in owners.values()], float)
    result = np.empty(len(other), dtype=np.int64)
    for unit in range(int(units.max()) + 1):
        rows = np.flatnonzero(units == unit)
        weight = held[other[rows[0]]]
        weight = weight if weight.sum() else sizes
        result[rows] = rng.choice(len(owners), p=weight / weight.sum())
    return {name: np.flatnonzero(result == number) for number, name in enumerate(owners)}


def _skewed(deck: Deck, rows: np.ndarray, preferences: np.ndarray, minimum: int, rng: np.random.Generator) -> Owners:
    if not len(rows):
        return {f"client-{client:02d}": rows for client in range(len(preferences))}
    assert deck.labels is not None
    labels = deck.labels.take(rows)
    owners = label_skew(
        labels.offsets, labels.values, preferences, rng, minimum, groups=deck.groups[rows], rule="product"
    )
    return {name: rows[client_rows] for name, client_rows in owners.items()}


def _validation(deck: Deck, train: Owners, options: Options) -> tuple[Owners, Owners]:
    """Training and validation rows; a picture is on the same side for every client that has it."""
    pictures = [np.unique(deck.groups[client_rows]) for client_rows in train.values()]
    together = np.concatenate(pictures)
    shared = deck.labels is None and len(together) > len(np.unique(together))
    held: Owners = {}
    for number, (name, client_rows) in enumerate(train.items()):
        units = together if shared else pictures[number]
        stream = np.random.default_rng([0, options.seed, 0 if shared else number])
        held[name] = np.isin(deck.groups[client_rows], units[hold_out(units, options.validation, stream)])
    return (
        {name: client_rows[~held[name]] for name, client_rows in train.items()},
        {name: client_rows[held[name]] for name, client_rows in train.items()},
    )


@dataclass(frozen=True)
class Pool:
    """All N examples of a dataset, before they are shared out.

    Attributes:
        roles: "train", "val" or "test" for every example, shape (N,); "" leaves it out.
        scenes: what unseen scenes are held out by, and what the partition "users" cuts into users, one per example
            (N,); None without.
        keys: partition name -> one key per example (N,), for partitions with one client per key.
        together: group of each example, int64 (N,); those of a group have one client and one role. By default those
            about one picture.
        skew: what "dirichlet" skews by, one value per example (N,); by default the answer, or the set of labels.
        unseen_roles: roles of the examples that unseen scenes are tested on.
        newcomers: partitions with one client per key of which test examples of other keys are the place "newcomers".
    """

    examples: Examples
    roles: np.ndarray
    scenes: np.ndarray | None = None
    keys: Mapping[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])
    together: np.ndarray | None = None
    skew: np.ndarray | None = None
    unseen_roles: Sequence[str] = ("test",)
    newcomers: Sequence[str] = ()

    @property
    def partitions(self) -> list[str]:
        """Names of the ways to share the examples out."""
        if self.examples.labels is None:
            return [*self.keys, "iid", "dirichlet", "quantity"]
        return [*self.keys, "iid", "dirichlet", "label_skew", *(["users"] if self.scenes is not None else [])]

    def deck(self, roles: np.ndarray, options: Options) -> Deck:
        """Its rows, to be dealt out with these roles."""
        groups = np.asarray(self.examples.image_index if self.together is None else self.together)
        labels = self.examples.labels
        if labels is None:
            skew = np.asarray(self.examples.answers if self.skew is None else self.skew)
            return Deck(roles, self.keys, groups, skew)
        present, classes = labels.table.present, np.arange(len(labels))
        if options.partition == "dirichlet":
            classes = label_sets(present.offsets, present.values, options.minimum)
        elif options.partition == "users" and self.scenes is not None:
            classes = self.scenes
        return Deck(roles, self.keys, groups, classes, present, len(labels.names))


def federate(pool: Pool, options: Options) -> tuple[dict[str, Split], dict[str, Examples]]:
    """The splits of every client, and the tests of the unseen scenes and of newcomers; see :func:`deal`."""
    partition, unseen, roles = options.partition or "", list(options.unseen), pool.roles
    check_choice("partition", partition, pool.partitions)
    for role in np.unique(roles).tolist():
        check_choice("every row's role", role, (*ROLES, ""))
    scenes = np.full(len(roles), "") if pool.scenes is None else pool.scenes
    if unseen or pool.scenes is not None:
        check_distinct("unseen", options.unseen, sorted(set(scenes.tolist())))
    dealt_roles = np.where(np.isin(scenes, unseen), "", roles)
    if not (dealt_roles == "train").any():
        beside = f"beside the unseen scenes {unseen}" if unseen else "to share out"
        raise ValueError(f"no training example is left {beside}")
    take = pool.examples.take
    splits: dict[str, Split] = {}
    for name, rows in deal(pool.deck(dealt_roles, options), options).items():
        splits[name] = Split(take(rows["train"]), take(rows["val"]), take(rows["test"]))
    tested = np.isin(roles, list(pool.unseen_roles))
    tests: dict[str, Examples] = {}
    for number, scene in enumerate(unseen):
        rows = np.flatnonzero(tested & (scenes == scene))
        tests[scene] = take(cap(rows, options.max_test, np.random.default_rng([3, number])))
    if partition in pool.newcomers:
        others = (dealt_roles == "test") & ~np.isin(pool.keys[partition], list(splits))
        tests |= {"newcomers": take(np.flatnonzero(others))} if others.any() else {}
    return splits, tests


def tests_held_out(roles: np.ndarray, clients: np.ndarray, together: np.ndarray, share: float) -> np.ndarray:
    """Roles of rows of which, where none is a test, a share of each client's is; the same for all seeds."""
    if (roles == "test").any():
        return roles
    names = sorted(set(clients.tolist()))
    pairs = np.unique(np.stack([together, np.searchsorted(names, clients)]), axis=1)
    if len(np.unique(together)) < pairs.shape[1]:
        clients, names = np.full(len(clients), ""), [""]
    roles = roles.copy()
    for number, name in enumerate(names):
        rows = np.flatnonzero((clients == name) & (roles == "train"))
        roles[rows[hold_out(together[rows], share, np.random.default_rng([4, number]))]] = "test"
    return roles


def describe_splits(clients: Mapping[str, Split], unseen: Iterable[Examples] = ()) -> dict[str, str]:
    """Facts of shared-out examples: counts, and what is reached without looking at any input."""
    labelled = any(split.train.labels is not None for split in clients.values())
    return label_floors(clients, unseen) if labelled else floors(clients)


def _counts(clients: Mapping[str, Split], beside: str = "") -> str:
    sizes: list[int] = []
    for role in ("train", "validation", "test"):
        sizes.append(sum(len(split.roles[role]) for split in clients.values()))
    clients_counted = f"{len(clients)} client{'' if len(clients) == 1 else 's'}"
    return f"{clients_counted}; {sizes[0]} train, {sizes[1]} validation, {sizes[2]} test{beside}"


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

    def shares(kind: str) -> str:
        together, alone = pooled[kind] / max(total, 1), client_hits[kind] / max(total, 1)
        return f"{together:.3f} (one for all clients), {alone:.3f} (one each)"

    return {
        "counts": _counts(clients),
        "majority floor": shares("majority"),
        "question-only floor": shares("question"),
    }


def label_numbers(parts: Iterable[Examples]) -> np.ndarray:
    """Number of examples with each label, int64, shape (C,)."""
    return sum((part.labels.numbers() for part in parts if part.labels is not None), np.zeros(1, np.int64))


def label_floors(clients: Mapping[str, Split], unseen: Iterable[Examples] = ()) -> dict[str, str]:
    """Counts, baselines without input, and differences between clients of examples with labels.

    A score that is the same for all examples has the share of positives as average precision. Skew is half the sum of
    absolute differences between a client's shares of all labels and those of all clients together, the mean over
    clients weighted by their training rows: 0 where all are alike.
    """
    elsewhere = list(unseen)
    tests = [split.test for split in clients.values()] + elsewhere
    positives, count = label_numbers(tests), sum(map(len, tests))
    train = np.stack([label_numbers([split.train]) for split in clients.values()]).astype(float)
    overall = train.sum(0) / max(train.sum(), 1)
    client_totals = train.sum(1, keepdims=True)
    apart = 0.5 * np.abs(train / np.maximum(client_totals, 1) - overall).sum(1)
    weight = np.array([len(split.train) for split in clients.values()]) * (client_totals[:, 0] > 0)
    return {
        "counts": _counts(clients, f" and {sum(map(len, elsewhere))} elsewhere" if elsewhere else ""),
        "chance": f"C-AP {float(np.mean(positives / max(count, 1))):.3f} with the same score for all test examples",
        "skew": f"{float((apart * weight).sum() / max(weight.sum(), 1)):.3f} between a client's labels and everybody's",
    }


class AnswerTable:
    """The most frequent answer, overall and to each question (ties: the first seen)."""

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
    return tuple(sorted(set(re.findall(r"\w+(?:'\w+)*", "\n".join(set(questions)).lower()))))

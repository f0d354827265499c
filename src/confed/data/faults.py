"""Checks of a federated dataset for what is often wrong with people's own data."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import chain

import numpy as np

from confed.data.examples import Examples, FederatedDataset, Split, presence
from confed.data.labelled import LabelDataset, LabelSplit

RARE = 5
"""Training examples of an answer below which it is called rare."""
CLIENTS = 100
"""Clients that are looked at."""


def faults(dataset: FederatedDataset | LabelDataset) -> list[str]:
    """What is likely to be wrong with the examples, a sentence each; none where nothing was found.

    Found are clients without training or test examples, answers that occur in tests only or hardly at all, equal
    questions about one picture with different answers, and pictures that are both learned from and tested on. One
    picture is one number in one table of pictures: copies of it in other tables are not found.
    """
    return list(_of_labels(dataset) if isinstance(dataset, LabelDataset) else _of_questions(dataset))


def _of_questions(dataset: FederatedDataset) -> Iterator[str]:
    clients = dict(list(dataset.clients.items())[:CLIENTS])
    yield from _empty({name: _sizes(split) for name, split in clients.items()})
    trained = Counter(chain.from_iterable(split.train.answers for split in clients.values()))
    tested = Counter(chain.from_iterable(split.test.answers for split in clients.values()))
    unknown = {answer: count for answer, count in tested.items() if answer not in trained}
    if unknown:
        share = sum(unknown.values()) / max(sum(tested.values()), 1)
        yield (
            f"{len(unknown)} answers occur in test questions only, such as {next(iter(unknown))!r}: {share:.1%} of the "
            "test questions cannot be answered rightly by a model that chooses among learned answers"
        )
    rare = [answer for answer, count in trained.items() if count < RARE]
    if rare:
        yield f"{len(rare)} of {len(trained)} answers have fewer than {RARE} training examples, such as {rare[0]!r}"
    yield from _contradictions([split.train for split in clients.values()])
    yield from _shared({name: (split.train, split.test) for name, split in clients.items()})
    if len(trained) == 1:
        yield f"all training examples have the same answer, {next(iter(trained))!r}: there is nothing to learn"


def _sizes(split: Split | LabelSplit) -> dict[str, int]:
    return {role: len(examples) for role, examples in split.roles.items()}


def _empty(sizes: dict[str, dict[str, int]]) -> Iterator[str]:
    """Clients that lack a role."""
    for role, what in (("train", "training"), ("test", "test")):
        lacking = [name for name, roles in sizes.items() if not roles.get(role, 0)]
        if lacking:
            yield f"{len(lacking)} of {len(sizes)} clients have no {what} examples, such as {lacking[0]!r}"
    counts = [roles.get("train", 0) for roles in sizes.values() if roles.get("train", 0)]
    if counts and max(counts) > 20 * min(counts):
        yield f"clients differ much in size: {min(counts)} to {max(counts)} training examples"


def _contradictions(parts: list[Examples]) -> Iterator[str]:
    """Equal questions about one picture with different answers."""
    if any(examples.conversations is not None for examples in parts):
        return
    answers: dict[tuple[int, ...], set[str]] = defaultdict(set)
    first = ""
    for examples in parts:
        shown, table = (
            presence(examples)[:, 0],
            id(examples.images),
        )  # numbers of pictures mean something within a table only
        pictures = np.reshape(examples.image_index, (len(examples), -1))
        for row, (question, answer) in enumerate(zip(examples.questions, examples.answers, strict=True)):
            if shown[row] and question:
                told = answers[(table, *pictures[row].tolist(), hash(question))]
                told.add(answer)
                first = first or (f"{question!r} with {' and '.join(map(repr, sorted(told)))}" if len(told) > 1 else "")
    count = sum(len(told) > 1 for told in answers.values())
    if count:
        yield f"{count} training questions about one picture have different answers, such as {first}"


def _shared(parts: dict[str, tuple[Examples, Examples]]) -> Iterator[str]:
    """Pictures that are both in a training and in a test set."""

    def shown(examples: Examples) -> set[tuple[int, int]]:
        # Each client and role may have a table of its own, in which numbers begin anew.
        numbers = np.ravel(examples.image_index[presence(examples)[:, 0]])
        return {(id(examples.images), number) for number in numbers.tolist()}

    learned = {name: shown(train) for name, (train, _) in parts.items()}
    everywhere = set[tuple[int, int]]().union(*learned.values()) if learned else set[int]()
    shared_count = sum(len(learned[name] & shown(test)) for name, (_, test) in parts.items())
    others = sum(len(everywhere & shown(test)) for _, test in parts.values()) - shared_count
    if shared_count:
        yield f"{shared_count} pictures are in both training and test examples of one client: its test is no test"
    if others:
        yield f"{others} test pictures of a client are training pictures of another"


def _of_labels(dataset: LabelDataset) -> Iterator[str]:
    names = [name for name, _ in zip(dataset.clients, range(CLIENTS), strict=False)]
    splits = {name: dataset.clients[name] for name in names}
    yield from _empty({name: _sizes(split) for name, split in splits.items()})
    counts = {}
    for role in ("train", "test"):
        counts[role] = sum(
            (split.roles[role].counts() for split in splits.values()), np.zeros(len(dataset.labels), np.int64)
        )
    for label in [name for name, train in zip(dataset.labels, counts["train"], strict=True) if not train][:1]:
        none = int((counts["train"] == 0).sum())
        yield f"{none} of {len(dataset.labels)} labels have no training example, such as {label!r}"
    rare = [name for name, train in zip(dataset.labels, counts["train"], strict=True) if 0 < train < RARE]
    if rare:
        few = f"fewer than {RARE} training examples"
        yield f"{len(rare)} of {len(dataset.labels)} labels have {few}, such as {rare[0]!r}"
    bare = 0
    for split in splits.values():
        for row in split.roles["train"].rows.tolist():
            bare += not split.roles["train"].table.labels_of(row)
    if bare:
        yield f"{bare} training examples have no label"

"""Checks of a federated dataset for what is often wrong with people's own data."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path

import numpy as np

from confed.data.examples import Examples, FederatedDataset, Split, presence
from confed.data.federate import label_numbers
from confed.data.intake.opening import look
from confed.data.intake.walk import walk

MOST = 10_000
"""Files that are looked at, evenly spaced."""
_UNEVEN = 1.5
"""Proportions from which on a squeezed picture is spoken of."""
_FITS = {"squeeze": "squeezed", "crop": "cropped at the middle", "pad": "between bars of grey"}


def survey(folder: Path, side: int, fit: str) -> tuple[str, list[str]]:
    """Sizes of a folder's pictures, which become squares of ``side`` pixels, and warnings, a line each."""
    paths = walk(folder).pictures
    sizes: list[tuple[int, int]] = []
    kinds: dict[str, list[str]] = defaultdict(list)
    for parts in paths[:: -(-len(paths) // MOST) or 1]:
        seen = look(folder.joinpath(*parts))
        if seen is None:
            continue
        size, special = seen
        sizes.append(size)
        if max(size) < side:
            special.append(f"are smaller than the {side} x {side} pixels that the model reads")
        if fit == "squeeze" and max(size) > _UNEVEN * min(size):
            special.append('are far from square and are squeezed (data.fit = "crop" or "pad" keeps proportions)')
        for what in special:
            kinds[what].append("/".join(parts))
    if not sizes:
        return "", []
    sizes.sort(key=lambda size: size[0] * size[1])
    least, most = (f"{width} x {height}" for width, height in (sizes[0], sizes[-1]))
    between = least if least == most else f"{least} to {most}"
    told = f"{len(sizes)} of {len(paths)} looked at, {between} pixels; the model reads {side} x {side}, {_FITS[fit]}"
    return told, [f"{len(names)} pictures {what}, such as {names[0]}" for what, names in kinds.items()]


# Checks of a federated dataset for what is often wrong with people's own data -------------------------------

RARE = 5
"""Training examples of an answer below which it is called rare."""
CLIENTS = 100
"""Clients that are looked at."""


def faults(dataset: FederatedDataset) -> list[str]:
    """What is likely to be wrong with the examples, a sentence each; none where nothing was found.

    Found are clients without training or test examples, answers that occur in tests only or hardly at all, equal
    questions about one picture with different answers, and pictures that are both learned from and tested on. One
    picture is one number in one table of pictures: copies of it in other tables are not found.
    """
    clients = {name: dataset.clients[name] for name in islice(dataset.clients, CLIENTS)}
    targets = _of_labels(dataset.answers, clients) if dataset.kind == "labels" else _of_answers(clients)
    return [*_empty(clients), *targets]


def _of_answers(clients: Mapping[str, Split]) -> Iterator[str]:
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


def _empty(clients: Mapping[str, Split]) -> Iterator[str]:
    """Clients that lack a role."""
    for role, what in (("train", "training"), ("test", "test")):
        lacking = [name for name, split in clients.items() if not len(split.roles[role])]
        if lacking:
            yield f"{len(lacking)} of {len(clients)} clients have no {what} examples, such as {lacking[0]!r}"
    counts = [len(split.train) for split in clients.values() if len(split.train)]
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


def _of_labels(labels: Sequence[str], clients: Mapping[str, Split]) -> Iterator[str]:
    counts = dict(zip(labels, label_numbers(split.train for split in clients.values()).tolist(), strict=True))
    if none := [label for label, count in counts.items() if not count]:
        yield f"{len(none)} of {len(labels)} labels have no training example, such as {none[0]!r}"
    if rare := [label for label, count in counts.items() if 0 < count < RARE]:
        few = f"fewer than {RARE} training examples"
        yield f"{len(rare)} of {len(labels)} labels have {few}, such as {rare[0]!r}"
    bare = 0
    for split in clients.values():
        if split.train.labels is not None:
            bare += int((split.train.labels.table.present.take(split.train.labels.rows).lengths == 0).sum())
    if bare:
        yield f"{bare} training examples have no label"

"""Federations of several datasets: one dataset and one answer set per client."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Annotated
from zlib import crc32

import numpy as np

from confed.data.examples import Examples, FederatedDataset, Split
from confed.data.federate import floors, words
from confed.data.partitions import hold_out, iid
from confed.data.picture_files import Check, PictureFiles
from confed.data.refusals import refuse
from confed.data.vl_files.records import Record
from confed.federation.ranges import AT_LEAST_ONE, Range, check_fields


@dataclass(frozen=True)
class Amount:
    """Limits on the number of examples of a role, drawn at random; the smallest applies.

    Attributes:
        count: at most so many.
        share: that share of them.
        per_answer: so many of each answer.
    """

    count: Annotated[int | None, AT_LEAST_ONE] = None
    share: Annotated[float | None, Range(0, 1, above=True)] = None
    per_answer: Annotated[int | None, AT_LEAST_ONE] = None

    def __post_init__(self) -> None:
        check_fields(self, "")

    def draw(self, answers: Sequence[str], rng: np.random.Generator) -> np.ndarray:
        """Positions of the kept examples, ascending, int64."""
        rows = np.arange(len(answers))
        if self.per_answer is not None:
            given = np.asarray(answers)
            parts = [np.flatnonzero(given == answer) for answer in np.unique(given)]
            rows = (
                np.concatenate([_sample(answer_rows, self.per_answer, rng) for answer_rows in parts]) if parts else rows
            )
        if self.share is not None and len(rows):
            rows = _sample(rows, max(1, int(self.share * len(rows))), rng)
        return np.sort(rows if self.count is None else _sample(rows, self.count, rng))


def _sample(rows: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    return rows if len(rows) <= count else rng.choice(rows, count, replace=False)


@dataclass(frozen=True)
class Source:
    """One dataset, that of one client or, in shards, of several.

    Attributes:
        pictures: where a picture may lie below the root, tried in this order: paths with ``{path}`` for its name and
            ``{name}`` for the name's last part.
        validation: validation questions; where there are none, a share of the training pictures is held out, which
            needs questions about one picture each.
        amounts: role ("train", "validation" or "test") -> how much of it is used; all of it by default.
        answers: the answer set; by default the most frequent answers of the training questions.
        task: the registered task, where it is not the recipe's.
        test_is: what the test questions are in the official division, for the facts.
    """

    train: Sequence[Record]
    test: Sequence[Record]
    pictures: Sequence[str]
    validation: Sequence[Record] | None = None
    amounts: Mapping[str, Amount] | None = None
    answers: tuple[str, ...] | None = None
    task: str = ""
    test_is: str = "test"


def frequent_answers(records: Sequence[Record], count: int) -> tuple[str, ...]:
    """The most frequent right answers, most frequent first, equals in alphabetical order."""
    counts = Counter(record.answer for record in records if record.answer)
    return tuple(sorted(counts, key=lambda answer: (-counts[answer], answer))[:count])


def assemble(
    name: str,
    root: Path,
    sources: Mapping[str, Callable[[], Source]],
    *,
    answers: int = 100,
    validation: float = 0.1,
    image_size: int = 384,
    unreadable: float = 0.01,
    check: Check = "decoded",
    shards: int | None = None,
    shard_count: int = 5,
    seed: int = 0,
    facts: Mapping[str, str] | None = None,
) -> FederatedDataset:
    """A federation with one client per dataset.

    First the answer set of every client is made from all its training questions and questions with another answer
    are dropped; then examples are drawn. The seed chooses training and validation examples; test examples are the
    same for all seeds. With shards, the pictures of every dataset are dealt to ``shard_count`` clients and
    the first ``shards`` of them take part; these share an answer set and the test questions.
    """
    client_roles: dict[str, dict[str, list[Record]]] = {}
    answer_sets, tasks, counts = dict[str, tuple[str, ...]](), dict[str, str](), dict[str, str]()
    table = _Pictures(root, PictureFiles([], image_size, unreadable=unreadable, check=check))
    for source_name, make in sources.items():
        client_parts = _part(source_name, make(), answers, validation, (shards, shard_count), seed)
        for client, roles in client_parts.clients.items():
            client_roles[client], answer_sets[client] = roles, client_parts.answers
            if client_parts.task:
                tasks[client] = client_parts.task
            for records in roles.values():
                table.add(records, client_parts.pictures)
        counts[f"{source_name} (official files)"] = client_parts.counts
    splits: dict[str, Split] = {}
    for client, roles in client_roles.items():
        splits[client] = Split(**{role: table.examples(records) for role, records in roles.items()})
    # A word that no client trains on is unknown to a tokenizer of words, as it would be in use.
    learned = [split.train for split in splits.values()]
    choices = chain.from_iterable(examples.choices or () for examples in learned)
    questions = chain.from_iterable(examples.questions for examples in learned)
    spoken = words([*questions, *chain.from_iterable(choices)])
    union = tuple(dict.fromkeys(chain.from_iterable(answer_sets.values())))
    described = {**(facts or {}), **counts, "pictures seen in training": _seen(splits), **floors(splits)}
    return FederatedDataset(name, union, splits, {}, spoken, described, answer_sets=answer_sets, tasks=tasks)


@dataclass(frozen=True)
class _Part:
    """Drawn records of one dataset: its clients' by role, and its common parts."""

    clients: Mapping[str, dict[str, list[Record]]]
    answers: tuple[str, ...]
    task: str
    pictures: Sequence[str]
    counts: str


def _part(
    name: str, source: Source, answers: int, validation: float, sharding: tuple[int | None, int], seed: int
) -> _Part:
    shards, shard_count = sharding
    number = crc32(name.encode())  # the same draws whichever other clients take part
    answer_set = _answer_set(name, source, answers)
    roles = _answerable(name, source, answer_set)
    clients: dict[str, dict[str, list[Record]]] = {}
    for shard, shard_rows in enumerate(_shards(roles["train"], shards, shard_count)):
        client = name if shards is None else f"{name}-{shard + 1}"
        clients[client] = _draw(client, {**roles, "train": shard_rows}, source, validation, (seed, number, shard))
    before = {"train": source.train, "validation": source.validation or (), "test": source.test}
    counts = (
        f"{len(answer_set)} answers; with them "
        + ", ".join(f"{len(roles[r])} of {len(b)} {r}" for r, b in before.items() if b)
        + f" questions; tested on its official {source.test_is} split"
    )
    return _Part(clients, answer_set, source.task, source.pictures, counts)


def _answer_set(name: str, source: Source, count: int) -> tuple[str, ...]:
    source_answers = frequent_answers(source.train, count) if source.answers is None else source.answers
    if not source_answers:
        refuse(name, "training questions with answers", found=f"{len(source.train)} questions")
    return source_answers


def _answerable(name: str, source: Source, answers: Sequence[str]) -> dict[str, list[Record]]:
    """Role -> the questions whose answer is in the answer set."""
    answer_set = set(answers)
    roles: dict[str, list[Record]] = {}
    for role, records in (("train", source.train), ("validation", source.validation), ("test", source.test)):
        if records is not None:
            roles[role] = [record for record in records if record.answer in answer_set]
            if not roles[role]:
                first = f", such as {records[0].answer!r} ({records[0].where})" if len(records) else ""
                raise ValueError(
                    f"{name}: none of the {len(records)} {role} questions has an answer of the answer set of "
                    f"{len(answers)}, {', '.join(map(repr, answers[:3]))}...; their answers are others{first}"
                )
    return roles


def _shards(records: list[Record], shards: int | None, count: int) -> list[list[Record]]:
    """The clients' shares; a picture has one owner, whatever the seed."""
    if shards is None:
        return [records]
    owners = iid(len(records), count, np.random.default_rng(0), groups=_first_pictures(records))
    result = []
    for rows in list(owners.values())[:shards]:
        result.append([records[row] for row in rows])
    return result


def _draw(
    client: str, roles: Mapping[str, list[Record]], source: Source, share: float, seeds: tuple[int, int, int]
) -> dict[str, list[Record]]:
    """A client's examples by role."""
    seed, number, shard = seeds
    train, held = roles["train"], roles.get("validation")
    if held is None:
        pair = next((record for record in train if len(record.pictures) > 1), None)
        if pair is not None:  # its second picture could be another pair's first
            refuse(pair.where, "validation questions of their own for pairs of pictures", found="none")
        out = hold_out(_first_pictures(train), share, np.random.default_rng([0, seed, number, shard]))
        held = [record for record, chosen in zip(train, out, strict=True) if chosen]
        train = [record for record, chosen in zip(train, out, strict=True) if not chosen]
        if not held:
            pictures = len(set(_first_pictures(train)))
            raise ValueError(f"{client}: validation = {share} holds out none of the {pictures} training pictures")
    amounts, drawn = source.amounts or {}, dict[str, list[Record]]()
    streams = {"train": [1, seed, number, shard], "validation": [2, seed, number, shard], "test": [3, number]}
    for role, records in (("train", train), ("validation", held), ("test", roles["test"])):
        answers = [record.answer for record in records]
        chosen = amounts.get(role, Amount()).draw(answers, np.random.default_rng(streams[role]))
        drawn[role] = [records[row] for row in chosen]
    return drawn


def _first_pictures(records: Sequence[Record]) -> list[str]:
    return [record.pictures[0] for record in records]


def _seen(splits: Mapping[str, Split]) -> str:
    """Number of test pictures that are also training pictures, as some official splits are not disjoint."""
    trained = {client: set(split.train.image_index.ravel().tolist()) for client, split in splits.items()}
    anyone = set[int]().union(*trained.values())
    tested = {client: set(split.test.image_index.ravel().tolist()) for client, split in splits.items()}
    seen_at_home = sum(len(tested[client] & trained[client]) for client in splits)
    shared = sum(len(pictures & anyone) for pictures in tested.values())
    return (
        f"of {sum(map(len, tested.values()))} test pictures {seen_at_home} by the same client, {shared} by some client"
    )


class _Pictures:
    """One table of all pictures, of which each is looked for once; ``like`` is one without pictures."""

    def __init__(self, root: Path, like: PictureFiles) -> None:
        self._root, self._like = root, like
        self._numbers: dict[Path, int] = {}
        self._places: dict[tuple[tuple[str, ...], str], int] = {}
        self._of: dict[tuple[Path, int], list[int]] = {}
        self._table: PictureFiles | None = None

    def add(self, records: Sequence[Record], places: Sequence[str]) -> None:
        """Search for the pictures of these questions."""
        missing: dict[str, Record] = {}
        for record in records:
            numbers: list[int] = []
            for picture in record.pictures:
                key = (tuple(places), picture)
                if key not in self._places and (file := self._find(picture, places)) is not None:
                    self._places[key] = self._numbers.setdefault(file, len(self._numbers))
                if key in self._places:
                    numbers.append(self._places[key])
                else:
                    missing.setdefault(picture, record)
            self._of[record.file, record.row] = numbers
        if missing:
            picture, record = next(iter(missing.items()))
            others = f", and {len(missing) - 1} more pictures" if len(missing) > 1 else ""
            tried = ", ".join(str(self._root / place.format(path=picture, name=_last(picture))) for place in places)
            refuse(record.where, f"the picture {picture!r}{others}", found="none", remedy=f"looked for {tried}")

    def _find(self, picture: str, places: Sequence[str]) -> Path | None:
        candidates = (self._root / place.format(path=picture, name=_last(picture)) for place in places)
        return next((file for file in candidates if file.is_file()), None)

    def examples(self, records: Sequence[Record]) -> Examples:
        """These questions over the table, after :meth:`add` of all records."""
        if self._table is None:
            self._table = self._like.of(list(self._numbers))
        index = np.array([self._of[record.file, record.row] for record in records], dtype=np.int64)
        several = any(record.annotations is not None for record in records)
        offered = [record.choices for record in records if record.choices is not None]
        return Examples(
            self._table,
            index[:, 0] if index.ndim == 2 and index.shape[1] == 1 else index,
            [record.question for record in records],
            [record.answer for record in records],
            [record.type for record in records],
            [record.name for record in records],
            [record.annotations or (record.answer,) * 10 for record in records] if several else None,
            offered or None,
        )


def _last(picture: str) -> str:
    return PurePosixPath(picture).name

"""FedDAT's four benchmarks (Chen et al., AAAI 2024, section 4.1): domain, function, scene and task.

One folder holds everything under the names of the official releases; each function says what it reads. A picture may
lie in any of several places, so that folders as they come out of the archives serve, and those of CLiMB. Pictures stay
on disk and are decoded batch by batch.

What the paper leaves to its appendix follows its released code: answer sets of the 100 most frequent answers,
questions with other answers dropped, then about 2,500 training and 500 test questions per client. Four things differ.
An answer set has the most frequent right answers of the training questions (the released lists are not published).
Questions are kept by their right answer (the code also drops those to which any annotator gave a rarer answer of its
list). Exactly so many are drawn, instead of each with a probability. And validation questions are never test questions.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from pathlib import Path, PurePosixPath
from typing import Annotated
from zlib import crc32

import numpy as np

from confed.data.examples import Examples, FederatedDataset, Split
from confed.data.federate import floors, words
from confed.data.intake.account import Account, settled
from confed.data.options import SOME_OF_ALL, Options
from confed.data.partitions import hold_out, iid
from confed.data.picture_files import Check, PictureFiles
from confed.data.refusals import check_distinct, existing_folder, refuse
from confed.data.vl_files.records import Record
from confed.data.vl_files.vizwiz import (
    CHOICES,
    ENTAILMENT_LABELS,
    PAIR_LABELS,
    SCENES,
    aqua_records,
    clove_records,
    cocoqa_records,
    gqa_records,
    nlvr2_records,
    snli_ve_records,
    vcr_records,
    vizwiz_records,
)
from confed.data.vl_files.vqa import vqa_records
from confed.datasets.reader import reader
from confed.federation.ranges import AT_LEAST_ONE, Range, check_fields


@dataclass(frozen=True)
class Amount:
    """Limits on the examples of a role, drawn at random: a count, a share, and so many of each answer."""

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
    """One dataset; in each place ``{path}`` and ``{name}`` of a picture are put; ``answers``: else the usual."""

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
    answer_set = frequent_answers(source.train, answers) if source.answers is None else source.answers
    if not answer_set:
        refuse(name, "training questions with answers", found=f"{len(source.train)} questions")
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


_COCO_FOLDERS = ("coco/{split}/", "coco/", "coco/images/", "ms-coco/images/", "mscoco/{split}/")
_COCO = tuple(
    folder.replace("{split}", split) + "{name}" for split, folder in product(("train2014", "val2014"), _COCO_FOLDERS)
)
# COCO-QA gives bare numbers; its test pictures are COCO's validation pictures, which one loader calls test2015.
_COCO_NUMBERED = tuple(
    folder.replace("{split}", split) + f"COCO_{split}_" + "{name}.jpg"
    for split, folder in product(("train2014", "val2014", "test2015"), _COCO_FOLDERS)
)
_ABSTRACT = ("images/", "train2015/", "val2015/", *(f"scene_img_abstract_v002_{s}/" for s in ("train2015", "val2015")))
_GENOME = tuple(
    f"{folder}/{{name}}"
    for folder in ("gqa/images", "visual_genome/VG_100K", "visual_genome/VG_100K_2", "visual_genome", "clove/images")
)
_NLVR2_FOLDERS = tuple(
    f"nlvr2/{below}"
    for below in ("images/train/", "images/dev/", "images/test1/", "images/", "train/", "dev/", "test1/")
)
_NLVR2 = tuple(below + name for below, name in product(_NLVR2_FOLDERS, ("{path}", "{name}")))
_FACTS = {
    "benchmark": "FedDAT's; answer sets of the most frequent training answers, then down-sampled",
    "licence": "each dataset's own, and each picture's",
    "citation": 'H. Chen et al., "FedDAT: An approach for foundation model finetuning in multi-modal heterogeneous '
    'federated learning", AAAI 2024',
}
_FUNCTIONS = ("attribute", "knowledge", "logical", "object", "relation")
_OPTIONS = "image_size unreadable check seed"


Shards = Annotated[int | None, Range(1, 5)]
"""Of five equal shards of a client's pictures, how many take part."""


@reader(
    f"root * clients answers max_train max_test validation {_OPTIONS}",
    max_train=2500, max_test=500, validation=Annotated[float, SOME_OF_ALL, 0.1], image_size=384,
)  # fmt: skip
def feddat_domain(
    options: Options, clients: tuple[str, ...] = (), answers: Annotated[int, AT_LEAST_ONE] = 100
) -> FederatedDataset:
    """Five clients with a dataset each: paintings, clip-art scenes, photographs by the blind, COCO-QA and GQA.

    Below the root: ``aqua/{train,val,test}.json`` with pictures in ``aqua/images`` (or ``SemArt/Images``);
    ``vqa_abstract/`` with the four official files and ``images`` (or ``train2015``, ``val2015``);
    ``vizwiz/{train,val}.json`` with the folders ``train`` and ``val``; ``cocoqa/{train,test}/*.txt`` with
    ``coco/{train2014,val2014}``; ``gqa/{train,val}_balanced_questions.json`` with ``gqa/images``.

    Abstract scenes, VizWiz and GQA are tested on their validation split: their test splits have no answers, or, as in
    the released code, are not used.

    Raises ``ValueError``: a file or picture is missing or damaged (the message names file and row), or an option is out
    of range.

    Options:
        clients: which of art, abstract, vizwiz, cocoqa and gqa take part; all by default.
        answers: size of every client's answer set.
        max_test: most validation and most test questions per client.
        validation: share of the training pictures held out, where no official split is left for it.
    """
    base, amounts = options.folder, _amounts(options)
    paintings = [f"{f}/{{name}}" for f in ("aqua/images", "aqua/Images", "SemArt/Images", "aqua/SemArt/Images")]
    photographs = [f"vizwiz/{f}/{{name}}" for f in ("train", "val", "images", "Images")]
    drawings = [f"vqa_abstract/{f}{{name}}" for f in _ABSTRACT]
    abstract = partial(vqa_records, base / "vqa_abstract", kind="vqa_abstract")
    sources = {
        "art": _source(partial(aqua_records, base / "aqua"), ("train", "val", "test"), paintings, amounts),
        "abstract": _source(abstract, ("train2015", "val2015"), drawings, amounts),
        "vizwiz": _source(partial(vizwiz_records, base / "vizwiz"), ("train", "val"), photographs, amounts),
        "cocoqa": _source(partial(cocoqa_records, base / "cocoqa"), ("train", "test"), _COCO_NUMBERED, amounts),
        "gqa": _source(partial(gqa_records, base / "gqa"), ("train", "val"), _GENOME, amounts),
    }
    return _assembled(
        "feddat_domain", options, sources, clients, answers, "AQUA, VQA abstract scenes, VizWiz, COCO-QA, GQA"
    )


@reader(
    f"root * clients answers max_train max_test validation shards {_OPTIONS}",
    max_train=2500, max_test=500, validation=Annotated[float, SOME_OF_ALL, 0.1], image_size=384,
)  # fmt: skip
def feddat_function(
    options: Options, clients: tuple[str, ...] = (), answers: Annotated[int, AT_LEAST_ONE] = 100, shards: Shards = None
) -> FederatedDataset:
    """Five clients with one function of CLOVE each: attribute, knowledge, logical, object and relation.

    Below the root: ``clove/json/function/fcl_mmf_{function}_{train,val}.json``, and Visual Genome's pictures in
    ``visual_genome/VG_100K`` and ``VG_100K_2``, or in ``gqa/images``. CLOVE has no test split; its validation split is
    the test.

    Raises ``ValueError``: a file or picture is missing or damaged (the message names file and row), or an option is out
    of range.

    Options:
        clients: which functions take part; all five by default ("scenetext", which FedDAT drops, can be named).
        answers: size of every client's answer set.
        max_test: most validation and most test questions per client.
        validation: share of the training pictures held out.
        shards: of five equal shards of each function, how many take part, each a client: 5, 10, ... 25 clients
            (figure 6); by default each function is one client.
    """
    stages = {name: name for name in (*_FUNCTIONS, "scenetext")}
    return _clove("feddat_function", options, stages, clients or _FUNCTIONS, answers, shards)


@reader(
    f"root * clients answers max_train max_test validation shards {_OPTIONS}",
    max_train=2500, max_test=500, validation=Annotated[float, SOME_OF_ALL, 0.1], image_size=384,
)  # fmt: skip
def feddat_scene(
    options: Options, clients: tuple[str, ...] = (), answers: Annotated[int, AT_LEAST_ONE] = 100, shards: Shards = None
) -> FederatedDataset:
    """Six clients with one scene of CLOVE each, such as ShopAndDining and Outdoors.

    Below the root: ``clove/json/scene/fcl_mmf_{a#ShopAndDining,...}_{train,val}.json``; else as in
    :func:`feddat_function`.

    Raises ``ValueError``: a file or picture is missing or damaged (the message names file and row), or an option is out
    of range.

    Options:
        clients: which scenes take part, without their letter; all six by default.
        answers: size of every client's answer set.
        max_test: most validation and most test questions per client.
        validation: share of the training pictures held out.
        shards: of five equal shards of each scene, how many take part, each a client: 6, 12, ... 30 clients
            (figure 6); by default each scene is one client.
    """
    stages = {scene.partition("#")[2]: scene for scene in SCENES}
    return _clove("feddat_scene", options, stages, clients, answers, shards)


@reader(
    f"root * clients answers shots test_shots share max_train max_test validation {_OPTIONS}",
    things="examples", validation=Annotated[float, SOME_OF_ALL, 0.1], image_size=384,
)  # fmt: skip
def feddat_task(
    options: Options,
    clients: tuple[str, ...] = (),
    answers: Annotated[int, AT_LEAST_ONE] = 100,
    shots: Annotated[int, AT_LEAST_ONE] = 2048,
    test_shots: Annotated[int, AT_LEAST_ONE] = 256,
    share: float = 0.05,
) -> FederatedDataset:
    """Four clients with a task each: VQA, pairs of pictures (NLVR2), visual entailment, multiple choice (VCR).

    Below the root: ``vqa_v2/`` (or ``vqav2``) with the four official files of VQA v2 and ``coco/{train2014,val2014}``;
    ``nlvr2/{train,dev,test1}.json`` (or in ``nlvr2/data``) with ``nlvr2/images/{train/<directory>,dev,test1}``;
    ``snli_ve/`` (or ``snli-ve``) with ``snli_ve_{train,dev,test}.jsonl`` and ``flickr30k/flickr30k_images``;
    ``vcr/annotation/{train,val}.jsonl`` with ``vcr/vcr1images``. VQA v2 and VCR are tested on their validation split.

    Few examples as in CLiMB: so many per class of NLVR2 and SNLI-VE, and a share of VQA v2 and VCR.

    Raises ``ValueError``: a file or picture is missing or damaged (the message names file and row), or an option is out
    of range.

    Options:
        clients: which of vqa, nlvr2, snli_ve and vcr take part; all by default.
        answers: size of the answer set of VQA.
        shots: training examples per class of NLVR2 and SNLI-VE.
        test_shots: validation and test examples per class of NLVR2 and SNLI-VE.
        share: share of the training, validation and test questions of VQA v2 and VCR that is used, after those
            with another answer were dropped and validation was held out.
        max_test: most validation and most test examples per client.
        validation: share of the training pictures held out in VQA v2 and VCR.
    """
    base = options.folder
    amounts, few = _amounts(options, share), _amounts(options, per_answer=(shots, test_shots))
    photographs = [f"flickr30k/{f}/{{name}}" for f in ("flickr30k_images", "flickr30k-images", "images")]
    photographs.append("snli_ve/images/{name}")
    numbers = tuple(map(str, range(CHOICES)))
    vqa = partial(vqa_records, _folder(base, "vqa_v2", "vqav2"))
    pairs, account = partial(nlvr2_records, base / "nlvr2"), Account()
    entailment = partial(snli_ve_records, _folder(base, "snli_ve", "snli-ve"), account=account)
    choices = partial(vcr_records, base / "vcr")
    sources = {
        "vqa": _source(vqa, ("train2014", "val2014"), _COCO, amounts),
        "nlvr2": _source(pairs, ("train", "dev", "test1"), _NLVR2, few, PAIR_LABELS, "nlvr2"),
        "snli_ve": _source(entailment, ("train", "dev", "test"), photographs, few, ENTAILMENT_LABELS, "entailment"),
        "vcr": _source(choices, ("train", "val"), ["vcr/vcr1images/{path}"], amounts, numbers, "choice"),
    }
    origin = "VQA v2, NLVR2, SNLI-VE, VCR; boxes are not drawn into the pictures of VCR"
    return _assembled("feddat_task", options, sources, clients, answers, origin, account=account)


def _clove(
    name: str, options: Options, stages: Mapping[str, str], clients: Sequence[str], answers: int, shards: int | None
) -> FederatedDataset:
    """CLOVE with a client, or several shards, per stage."""
    folder, amounts = options.folder / "clove", _amounts(options)
    sources = {
        client: _source(partial(clove_records, folder, stage), ("train", "val"), _GENOME, amounts)
        for client, stage in stages.items()
    }
    return _assembled(name, options, sources, clients, answers, "CLOVE, on Visual Genome's pictures", shards)


def _source(
    read: Callable[[str], Iterable[Record]],
    splits: Sequence[str],
    places: Sequence[str],
    amounts: Mapping[str, Amount],
    answers: tuple[str, ...] | None = None,
    task: str = "",
) -> Callable[[], Source]:
    """The reader of a client's files: training, perhaps validation, and test questions."""

    def make() -> Source:
        train, *held, test = (list(read(split)) for split in splits)
        test_is = "validation" if splits[-1].startswith("val") else splits[-1]
        return Source(train, test, places, held[0] if held else None, amounts, answers, task, test_is)

    return make


def _assembled(
    name: str,
    options: Options,
    sources: Mapping[str, Callable[[], Source]],
    clients: Sequence[str],
    answers: int,
    origin: str,
    shards: Shards = None,
    account: Account | None = None,
) -> FederatedDataset:
    """The dataset of the chosen clients, in the order of the benchmark, with the account of their files."""
    chosen = list(clients) or list(sources)
    check_distinct("clients", clients, sources)
    existing_folder(options.folder)
    account = Account() if account is None else account

    def counted(make: Callable[[], Source]) -> Source:
        source = make()
        for record in chain(source.train, source.validation or (), source.test):
            account.use(record)
        return source

    dataset = assemble(
        name, options.folder, {client: partial(counted, make) for client, make in sources.items() if client in chosen},
        answers=answers, validation=options.validation, image_size=options.image_size, seed=options.seed,
        unreadable=options.unreadable, check=options.check, shards=shards, facts={**_FACTS, "origin": origin},
    )  # fmt: skip
    return settled(dataset, account, "answer outside the client's answer set, or not drawn")


def _amounts(
    options: Options, share: float | None = None, per_answer: tuple[int | None, int | None] = (None, None)
) -> dict[str, Amount]:
    test = Amount(options.max_test, share, per_answer[1])
    return {"train": Amount(options.max_train, share, per_answer[0]), "validation": test, "test": test}


def _folder(base: Path, *names: str) -> Path:
    return next((base / name for name in names if (base / name).is_dir()), base / names[0])

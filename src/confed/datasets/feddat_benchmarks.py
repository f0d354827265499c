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
from typing import Annotated, Any
from zlib import crc32

import numpy as np

from confed.data.examples import Examples, FederatedDataset, Split
from confed.data.federate import floors, words
from confed.data.intake.account import Account, settled
from confed.data.options import SOME_OF_ALL, Options
from confed.data.partitions import hold_out, iid
from confed.data.picture_files import PictureFiles
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
from confed.federation.ranges import AT_LEAST_ONE, Range


@dataclass(frozen=True)
class Source:
    """One dataset: what reads a split, its splits (training, perhaps validation, test), and where pictures may lie.

    In each place ``{path}`` and ``{name}`` of a picture are put. ``answers``: in place of the most frequent ones;
    ``shots``: of each answer so many training examples and so many of each other role; ``share``: of those, a share.
    """

    read: Callable[[str], Iterable[Record]]
    splits: tuple[str, ...]
    places: tuple[str, ...]
    answers: tuple[str, ...] = ()
    task: str = ""
    shots: tuple[int, int] | None = None
    share: float | None = None

    def roles(self) -> dict[str, list[Record]]:
        """Role -> all its questions."""
        names = ("train", "validation", "test") if len(self.splits) > 2 else ("train", "test")
        return {role: list(self.read(split)) for role, split in zip(names, self.splits, strict=True)}


def frequent_answers(records: Sequence[Record], count: int) -> tuple[str, ...]:
    """The most frequent right answers, most frequent first, equals in alphabetical order."""
    counts = Counter(record.answer for record in records if record.answer)
    return tuple(sorted(counts, key=lambda answer: (-counts[answer], answer))[:count])


def assemble(
    name: str,
    options: Options,
    sources: Mapping[str, Source],
    clients: Sequence[str],
    answers: int,
    origin: str,
    *,
    shards: int | None = None,
    account: Account | None = None,
) -> FederatedDataset:
    """A federation with one client per chosen dataset.

    First the answer set of every client is made from all its training questions and questions with another answer
    are dropped; then examples are drawn. The seed chooses training and validation examples; test examples are the
    same for all seeds. With shards, the pictures of every dataset are dealt to five clients and the first ``shards``
    of them take part; these share an answer set and the test questions.
    """
    check_distinct("clients", clients, sources)
    existing_folder(options.folder)
    account = Account() if account is None else account
    pictures, drawn = _Pictures(options.folder), dict[str, list[tuple[list[Record], np.ndarray]]]()
    answer_sets, tasks, facts = dict[str, tuple[str, ...]](), dict[str, str](), {**_FACTS, "origin": origin}
    for source_name, source in sources.items():
        if clients and source_name not in clients:
            continue
        known, shares, counts = _drawn(source_name, source, options, answers, shards, account)
        facts[f"{source_name} (official files)"] = counts
        for client, roles in shares.items():
            drawn[client] = [(records, pictures.numbers(records, source.places)) for records in roles.values()]
            answer_sets[client] = known
            tasks |= {client: source.task} if source.task else {}
    table = options.pictures(pictures.files)
    splits: dict[str, Split] = {}
    for client, parts in drawn.items():
        splits[client] = Split(*(_examples(records, index, table) for records, index in parts))
    # A word that no client trains on is unknown to a tokenizer of words, as it would be in use.
    learned = [split.train for split in splits.values()]
    choices = chain.from_iterable(examples.choices or () for examples in learned)
    questions = chain.from_iterable(examples.questions for examples in learned)
    spoken = words([*questions, *chain.from_iterable(choices)])
    union = tuple(dict.fromkeys(chain.from_iterable(answer_sets.values())))
    facts |= {"pictures seen in training": _seen(splits), **floors(splits)}
    dataset = FederatedDataset(name, union, splits, {}, spoken, facts, answer_sets=answer_sets, tasks=tasks)
    return settled(dataset, account, "answer outside the client's answer set, or not drawn")


def _drawn(
    name: str, source: Source, options: Options, answers: int, shards: int | None, account: Account
) -> tuple[tuple[str, ...], dict[str, dict[str, list[Record]]], str]:
    """A dataset's answer set, its clients' examples by role, and how many of the official questions can be had."""
    official = source.roles()
    for record in chain.from_iterable(official.values()):
        account.use(record)
    ranked_answers = source.answers or frequent_answers(official["train"], answers)
    if not ranked_answers:
        refuse(name, "training questions with answers", found=f"{len(official['train'])} questions")
    answer_set, roles = set(ranked_answers), dict[str, list[Record]]()
    for role, records in official.items():
        roles[role] = [record for record in records if record.answer in answer_set]
        if not roles[role]:
            first = f", such as {records[0].answer!r} ({records[0].where})" if records else ""
            raise ValueError(
                f"{name}: none of the {len(records)} {role} questions has an answer of the answer set of "
                f"{len(ranked_answers)}, {', '.join(map(repr, ranked_answers[:3]))}...; their answers are others{first}"
            )
    number = crc32(name.encode())  # the same draws whichever other clients take part
    clients: dict[str, dict[str, list[Record]]] = {}
    for shard, train in enumerate(_shards(roles["train"], shards)):
        client = name if shards is None else f"{name}-{shard + 1}"
        clients[client] = _share(client, {**roles, "train": train}, source, options, [options.seed, number, shard])
    counts = ", ".join(f"{len(roles[role])} of {len(records)} {role}" for role, records in official.items())
    tested = "validation" if source.splits[-1].startswith("val") else source.splits[-1]
    told = f"{len(ranked_answers)} answers; with them {counts} questions; tested on its official {tested} split"
    return ranked_answers, clients, told


def _shards(records: list[Record], shards: int | None) -> list[list[Record]]:
    """The clients' shares; a picture has one owner, whatever the seed."""
    if shards is None:
        return [records]
    owners = iid(len(records), _SHARDS, np.random.default_rng(0), groups=_first_pictures(records))
    shares: list[list[Record]] = []
    for rows in list(owners.values())[:shards]:
        shares.append([records[row] for row in rows])
    return shares


def _share(
    client: str, roles: Mapping[str, list[Record]], source: Source, options: Options, seeds: list[int]
) -> dict[str, list[Record]]:
    """A client's examples by role; where none are to validate on, those of a share of its training pictures are."""
    train, held = roles["train"], roles.get("validation")
    if held is None:
        out = hold_out(_first_pictures(train), options.validation, np.random.default_rng([0, *seeds]))
        held = [record for record, chosen in zip(train, out, strict=True) if chosen]
        train = [record for record, chosen in zip(train, out, strict=True) if not chosen]
        if not held:
            count = len(set(_first_pictures(train)))
            raise ValueError(f"{client}: validation = {options.validation} holds out none of the {count} training "
                             "pictures")  # fmt: skip
    shots, other_shots = source.shots or (None, None)
    return {
        "train": draw(train, [1, *seeds], shots, source.share, options.max_train),
        "validation": draw(held, [2, *seeds], other_shots, source.share, options.max_test),
        "test": draw(roles["test"], [3, seeds[1]], other_shots, source.share, options.max_test),
    }


def draw(
    records: Sequence[Record], stream: Sequence[int], shots: int | None, share: float | None, most: int | None
) -> list[Record]:
    """Questions drawn at random, in their order: at most so many of each answer, a share of them, so many in all."""
    rng, rows = np.random.default_rng(stream), np.arange(len(records))
    if shots is not None:
        given = np.array([record.answer for record in records])
        of_answers = [_sample(np.flatnonzero(given == answer), shots, rng) for answer in np.unique(given)]
        rows = np.concatenate(of_answers)
    if share is not None:
        rows = _sample(rows, max(1, int(share * len(rows))), rng)
    return [records[row] for row in np.sort(rows if most is None else _sample(rows, most, rng))]


def _sample(rows: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    return rows if len(rows) <= count else rng.choice(rows, count, replace=False)


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
    """The picture files of all questions, of which each is looked for once."""

    def __init__(self, root: Path) -> None:
        self._root, self.files = root, dict[Path, int]()
        self._known: dict[tuple[tuple[str, ...], str], Path] = {}

    def numbers(self, records: Sequence[Record], places: tuple[str, ...]) -> np.ndarray:
        """Numbers of the questions' pictures, int64 (N,), or (N, 2) of pairs."""
        numbers: list[int] = []
        missing: dict[str, Record] = {}
        for record in records:
            for picture in record.pictures:
                file = self._known.get((places, picture)) or self._find(picture, places)
                if file is None:
                    missing.setdefault(picture, record)
                else:
                    self._known[places, picture] = file
                    numbers.append(self.files.setdefault(file, len(self.files)))
        if missing:
            picture, record = next(iter(missing.items()))
            others = f", and {len(missing) - 1} more pictures" if len(missing) > 1 else ""
            tried = ", ".join(map(str, self._candidates(picture, places)))
            refuse(record.where, f"the picture {picture!r}{others}", found="none", remedy=f"looked for {tried}")
        index = np.array(numbers, dtype=np.int64)
        return index.reshape(len(records), 2) if len(index) > len(records) else index

    def _find(self, picture: str, places: tuple[str, ...]) -> Path | None:
        return next((file for file in self._candidates(picture, places) if file.is_file()), None)

    def _candidates(self, picture: str, places: tuple[str, ...]) -> list[Path]:
        name = PurePosixPath(picture).name
        return [self._root / place.format(path=picture, name=name) for place in places]


def _examples(records: Sequence[Record], index: np.ndarray, pictures: PictureFiles) -> Examples:
    several = any(record.annotations is not None for record in records)
    offered = [record.choices for record in records if record.choices is not None]
    return Examples(
        pictures,
        index,
        [record.question for record in records],
        [record.answer for record in records],
        [record.type for record in records],
        [record.name for record in records],
        [record.annotations or (record.answer,) * 10 for record in records] if several else None,
        offered or None,
    )


_COCO_FOLDERS = ("coco/{split}/", "coco/", "coco/images/", "ms-coco/images/", "mscoco/{split}/")
_COCO = tuple(
    folder.replace("{split}", split) + "{name}" for split, folder in product(("train2014", "val2014"), _COCO_FOLDERS)
)
# COCO-QA gives bare numbers; its test pictures are COCO's validation pictures, which one loader calls test2015.
_COCO_NUMBERED = tuple(
    folder.replace("{split}", split) + f"COCO_{split}_" + "{name}.jpg"
    for split, folder in product(("train2014", "val2014", "test2015"), _COCO_FOLDERS)
)
_PARTS = ("train2015", "val2015")
_ABSTRACT_FOLDERS = ("images", *_PARTS, *(f"scene_img_abstract_v002_{part}" for part in _PARTS))
_ABSTRACT = tuple(f"vqa_abstract/{folder}/{{name}}" for folder in _ABSTRACT_FOLDERS)
_PAINTINGS = tuple(f"{f}/{{name}}" for f in ("aqua/images", "aqua/Images", "SemArt/Images", "aqua/SemArt/Images"))
_VIZWIZ = tuple(f"vizwiz/{f}/{{name}}" for f in ("train", "val", "images", "Images"))
_FLICKR = (
    *(f"flickr30k/{f}/{{name}}" for f in ("flickr30k_images", "flickr30k-images", "images")),
    "snli_ve/images/{name}",
)
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
_SHARDS = 5
_FUNCTIONS = ("attribute", "knowledge", "logical", "object", "relation")
_OPTIONS = "image_size unreadable check seed"


_USUAL: dict[str, Any] = {
    "max_train": 2500, "max_test": 500, "validation": Annotated[float, SOME_OF_ALL, 0.1], "image_size": 384,
}  # fmt: skip
Shards = Annotated[int | None, Range(1, 5)]
"""Of five equal shards of a client's pictures, how many take part."""


@reader(
    f"root * clients answers max_train max_test validation {_OPTIONS}",
    **_USUAL,
)
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
    base = options.folder
    abstract = partial(vqa_records, base / "vqa_abstract", kind="vqa_abstract")
    sources = {
        "art": Source(partial(aqua_records, base / "aqua"), ("train", "val", "test"), _PAINTINGS),
        "abstract": Source(abstract, ("train2015", "val2015"), _ABSTRACT),
        "vizwiz": Source(partial(vizwiz_records, base / "vizwiz"), ("train", "val"), _VIZWIZ),
        "cocoqa": Source(partial(cocoqa_records, base / "cocoqa"), ("train", "test"), _COCO_NUMBERED),
        "gqa": Source(partial(gqa_records, base / "gqa"), ("train", "val"), _GENOME),
    }
    origin = "AQUA, VQA abstract scenes, VizWiz, COCO-QA, GQA"
    return assemble("feddat_domain", options, sources, clients, answers, origin)


@reader(
    f"root * clients answers max_train max_test validation shards {_OPTIONS}",
    **_USUAL,
)
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
    **_USUAL,
)
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
    things="examples", validation=_USUAL["validation"], image_size=_USUAL["image_size"],
)  # fmt: skip
def feddat_task(
    options: Options,
    clients: tuple[str, ...] = (),
    answers: Annotated[int, AT_LEAST_ONE] = 100,
    shots: Annotated[int, AT_LEAST_ONE] = 2048,
    test_shots: Annotated[int, AT_LEAST_ONE] = 256,
    share: Annotated[float, Range(0, 1, above=True)] = 0.05,
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
    base, few, account = options.folder, (shots, test_shots), Account()
    numbers = tuple(map(str, range(CHOICES)))
    vqa = partial(vqa_records, _folder(base, "vqa_v2", "vqav2"))
    pairs = partial(nlvr2_records, base / "nlvr2")
    entailment = partial(snli_ve_records, _folder(base, "snli_ve", "snli-ve"), account=account)
    choices = partial(vcr_records, base / "vcr")
    sources = {
        "vqa": Source(vqa, ("train2014", "val2014"), _COCO, share=share),
        "nlvr2": Source(pairs, ("train", "dev", "test1"), _NLVR2, PAIR_LABELS, "nlvr2", few),
        "snli_ve": Source(entailment, ("train", "dev", "test"), _FLICKR, ENTAILMENT_LABELS, "entailment", few),
        "vcr": Source(choices, ("train", "val"), ("vcr/vcr1images/{path}",), numbers, "choice", share=share),
    }
    origin = "VQA v2, NLVR2, SNLI-VE, VCR; boxes are not drawn into the pictures of VCR"
    return assemble("feddat_task", options, sources, clients, answers, origin, account=account)


def _clove(
    name: str, options: Options, stages: Mapping[str, str], clients: Sequence[str], answers: int, shards: int | None
) -> FederatedDataset:
    """CLOVE with a client, or several shards, per stage."""
    sources: dict[str, Source] = {}
    for client, stage in stages.items():
        sources[client] = Source(partial(clove_records, options.folder / "clove", stage), ("train", "val"), _GENOME)
    origin = "CLOVE, on Visual Genome's pictures"
    return assemble(name, options, sources, clients, answers, origin, shards=shards)


def _folder(base: Path, *names: str) -> Path:
    return next((base / name for name in names if (base / name).is_dir()), base / names[0])

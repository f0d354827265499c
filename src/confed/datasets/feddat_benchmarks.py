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

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Annotated

from confed.data.examples import FederatedDataset
from confed.data.intake.account import Account, settled
from confed.data.options import SOME_OF_ALL, Options
from confed.data.refusals import check_distinct, existing_folder
from confed.data.vl_files import nlvr2, snli_ve
from confed.data.vl_files.assemble import Amount, Source, assemble
from confed.data.vl_files.nlvr2 import nlvr2_records
from confed.data.vl_files.records import Record
from confed.data.vl_files.snli_ve import snli_ve_records
from confed.data.vl_files.vizwiz import (
    CHOICES,
    SCENES,
    aqua_records,
    clove_records,
    cocoqa_records,
    gqa_records,
    vcr_records,
    vizwiz_records,
)
from confed.data.vl_files.vqa import vqa_records
from confed.datasets.reader import reader
from confed.federation.ranges import AT_LEAST_ONE, Range

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
        root: see above.
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
        root: see above.
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
        root: see above.
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
        root: see above.
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
        "nlvr2": _source(pairs, ("train", "dev", "test1"), _NLVR2, few, nlvr2.LABELS, "nlvr2"),
        "snli_ve": _source(entailment, ("train", "dev", "test"), photographs, few, snli_ve.LABELS, "entailment"),
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
            account.rows[str(record.file)] = account.rows.get(str(record.file), 0) + 1
            account.used[record.name] = record.where
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

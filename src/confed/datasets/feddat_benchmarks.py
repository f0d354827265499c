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

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from confed.data.examples import FederatedDataset
from confed.data.picture_files import Check
from confed.data.vl_files import nlvr2, snli_ve
from confed.data.vl_files.assemble import Amount, Source, assemble
from confed.data.vl_files.nlvr2 import nlvr2_records
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
from confed.registry import register_dataset

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
_NLVR2_FOLDERS = ("images/train/", "images/dev/", "images/test1/", "images/", "train/", "dev/", "test1/")
_NLVR2 = tuple(f"nlvr2/{below}{{{part}}}" for below, part in product(_NLVR2_FOLDERS, ("path", "name")))
_FACTS = {
    "benchmark": "FedDAT's; answer sets of the most frequent training answers, then down-sampled",
    "licence": "each dataset's own, and each picture's",
    "citation": 'H. Chen et al., "FedDAT: An approach for foundation model finetuning in multi-modal heterogeneous '
    'federated learning", AAAI 2024',
}
_FUNCTIONS = ("attribute", "knowledge", "logical", "object", "relation")


@register_dataset
def feddat_domain(
    root: Path | str,
    *,
    clients: tuple[str, ...] = (),
    answers: int = 100,
    max_train: int | None = 2500,
    max_test: int | None = 500,
    validation: float = 0.1,
    image_size: int = 384,
    unreadable: float = 0.01,
    check: Check = "decoded",
    seed: int = 0,
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

    Args:
        root: see above.
        clients: which of art, abstract, vizwiz, cocoqa and gqa take part; all by default.
        answers: size of every client's answer set.
        max_train: most training questions per client.
        max_test: most validation and most test questions per client.
        validation: share of the training pictures held out, where no official split is left for it.
        image_size: side of the pictures in pixels; other proportions are squeezed.
        unreadable: share of the pictures that may be left out because they cannot be read, with their examples.
        check: "decoded" or "present", see :class:`confed.data.picture_files.PictureFiles`.
        seed: chooses training and validation questions; the test questions are the same for all seeds.
    """
    base = Path(root)
    amounts = _amounts(max_train, max_test)

    def art() -> Source:
        train, held, test = (list(aqua_records(base / "aqua", split)) for split in ("train", "val", "test"))
        places = [f"{f}/{{name}}" for f in ("aqua/images", "aqua/Images", "SemArt/Images", "aqua/SemArt/Images")]
        return Source(train, test, places, held, amounts)

    def abstract() -> Source:
        train, test = (list(vqa_records(base / "vqa_abstract", f"{s}2015", "vqa_abstract")) for s in ("train", "val"))
        return Source(
            train, test, [f"vqa_abstract/{f}{{name}}" for f in _ABSTRACT], None, amounts, test_is="validation"
        )

    def vizwiz() -> Source:
        train, test = (list(vizwiz_records(base / "vizwiz", split)) for split in ("train", "val"))
        places = [f"vizwiz/{f}/{{name}}" for f in ("train", "val", "images", "Images")]
        return Source(train, test, places, None, amounts, test_is="validation")

    def cocoqa() -> Source:
        train, test = (list(cocoqa_records(base / "cocoqa", split)) for split in ("train", "test"))
        return Source(train, test, _COCO_NUMBERED, None, amounts)

    def gqa() -> Source:
        train, test = (list(gqa_records(base / "gqa", split)) for split in ("train", "val"))
        return Source(train, test, _GENOME, None, amounts, test_is="validation")

    makers = {"art": art, "abstract": abstract, "vizwiz": vizwiz, "cocoqa": cocoqa, "gqa": gqa}
    sources = _sources(base, makers, clients)
    return assemble(
        "feddat_domain", base, sources, answers=answers, validation=validation, image_size=image_size, seed=seed,
        unreadable=unreadable, check=check,
        facts={**_FACTS, "origin": "AQUA, VQA abstract scenes, VizWiz, COCO-QA, GQA"},
    )  # fmt: skip


@register_dataset
def feddat_function(
    root: Path | str,
    *,
    clients: tuple[str, ...] = (),
    answers: int = 100,
    max_train: int | None = 2500,
    max_test: int | None = 500,
    validation: float = 0.1,
    shards: int | None = None,
    image_size: int = 384,
    unreadable: float = 0.01,
    check: Check = "decoded",
    seed: int = 0,
) -> FederatedDataset:
    """Five clients with one function of CLOVE each: attribute, knowledge, logical, object and relation.

    Below the root: ``clove/json/function/fcl_mmf_{function}_{train,val}.json``, and Visual Genome's pictures in
    ``visual_genome/VG_100K`` and ``VG_100K_2``, or in ``gqa/images``. CLOVE has no test split; its validation split is
    the test.

    Raises ``ValueError``: a file or picture is missing or damaged (the message names file and row), or an option is out
    of range.

    Args:
        root: see above.
        clients: which functions take part; all five by default ("scenetext", which FedDAT drops, can be named).
        answers: size of every client's answer set.
        max_train: most training questions per client.
        max_test: most validation and most test questions per client.
        validation: share of the training pictures held out.
        shards: of five equal shards of each function, how many take part, each a client: 5, 10, ... 25 clients
            (figure 6); by default each function is one client.
        image_size: side of the pictures in pixels; other proportions are squeezed.
        unreadable: share of the pictures that may be left out because they cannot be read, with their examples.
        check: "decoded" or "present", see :class:`confed.data.picture_files.PictureFiles`.
        seed: chooses training and validation questions; the test questions are the same for all seeds.
    """
    makers = {name: name for name in (*_FUNCTIONS, "scenetext")}
    return _clove(
        "feddat_function", Path(root), makers, clients or _FUNCTIONS, _amounts(max_train, max_test),
        answers=answers, validation=validation, shards=shards, image_size=image_size, seed=seed,
        unreadable=unreadable, check=check,
    )  # fmt: skip


@register_dataset
def feddat_scene(
    root: Path | str,
    *,
    clients: tuple[str, ...] = (),
    answers: int = 100,
    max_train: int | None = 2500,
    max_test: int | None = 500,
    validation: float = 0.1,
    shards: int | None = None,
    image_size: int = 384,
    unreadable: float = 0.01,
    check: Check = "decoded",
    seed: int = 0,
) -> FederatedDataset:
    """Six clients with one scene of CLOVE each, such as ShopAndDining and Outdoors.

    Below the root: ``clove/json/scene/fcl_mmf_{a#ShopAndDining,...}_{train,val}.json``; else as in
    :func:`feddat_function`.

    Raises ``ValueError``: a file or picture is missing or damaged (the message names file and row), or an option is out
    of range.

    Args:
        root: see above.
        clients: which scenes take part, without their letter; all six by default.
        answers: size of every client's answer set.
        max_train: most training questions per client.
        max_test: most validation and most test questions per client.
        validation: share of the training pictures held out.
        shards: of five equal shards of each scene, how many take part, each a client: 6, 12, ... 30 clients
            (figure 6); by default each scene is one client.
        image_size: side of the pictures in pixels; other proportions are squeezed.
        unreadable: share of the pictures that may be left out because they cannot be read, with their examples.
        check: "decoded" or "present", see :class:`confed.data.picture_files.PictureFiles`.
        seed: chooses training and validation questions; the test questions are the same for all seeds.
    """
    makers = {scene.partition("#")[2]: scene for scene in SCENES}
    return _clove(
        "feddat_scene", Path(root), makers, clients, _amounts(max_train, max_test),
        answers=answers, validation=validation, shards=shards, image_size=image_size, seed=seed,
        unreadable=unreadable, check=check,
    )  # fmt: skip


@register_dataset
def feddat_task(
    root: Path | str,
    *,
    clients: tuple[str, ...] = (),
    answers: int = 100,
    shots: int = 2048,
    test_shots: int = 256,
    share: float = 0.05,
    max_train: int | None = None,
    max_test: int | None = None,
    validation: float = 0.1,
    image_size: int = 384,
    unreadable: float = 0.01,
    check: Check = "decoded",
    seed: int = 0,
) -> FederatedDataset:
    """Four clients with a task each: VQA, pairs of pictures (NLVR2), visual entailment, multiple choice (VCR).

    Below the root: ``vqa_v2/`` (or ``vqav2``) with the four official files of VQA v2 and ``coco/{train2014,val2014}``;
    ``nlvr2/{train,dev,test1}.json`` (or in ``nlvr2/data``) with ``nlvr2/images/{train/<directory>,dev,test1}``;
    ``snli_ve/`` (or ``snli-ve``) with ``snli_ve_{train,dev,test}.jsonl`` and ``flickr30k/flickr30k_images``;
    ``vcr/annotation/{train,val}.jsonl`` with ``vcr/vcr1images``. VQA v2 and VCR are tested on their validation split.

    Few examples as in CLiMB: so many per class of NLVR2 and SNLI-VE, and a share of VQA v2 and VCR.

    Raises ``ValueError``: a file or picture is missing or damaged (the message names file and row), or an option is out
    of range.

    Args:
        root: see above.
        clients: which of vqa, nlvr2, snli_ve and vcr take part; all by default.
        answers: size of the answer set of VQA.
        shots: training examples per class of NLVR2 and SNLI-VE.
        test_shots: validation and test examples per class of NLVR2 and SNLI-VE.
        share: share of the training, validation and test questions of VQA v2 and VCR that is used, after those
            with another answer were dropped and validation was held out.
        max_train: most training examples per client.
        max_test: most validation and most test examples per client.
        validation: share of the training pictures held out in VQA v2 and VCR.
        image_size: side of the pictures in pixels; other proportions are squeezed.
        unreadable: share of the pictures that may be left out because they cannot be read, with their examples.
        check: "decoded" or "present", see :class:`confed.data.picture_files.PictureFiles`.
        seed: chooses training and validation examples; the test examples are the same for all seeds.
    """
    base = Path(root)
    amounts = _amounts(max_train, max_test, share=share)
    few = _amounts(max_train, max_test, per_answer=(shots, test_shots))

    def vqa() -> Source:
        folder = _folder(base, "vqa_v2", "vqav2")
        train, test = (list(vqa_records(folder, split)) for split in ("train2014", "val2014"))
        return Source(train, test, _COCO, None, amounts, test_is="validation")

    def pairs() -> Source:
        train, held, test = (list(nlvr2_records(base / "nlvr2", split)) for split in ("train", "dev", "test1"))
        return Source(train, test, _NLVR2, held, few, nlvr2.LABELS, "nlvr2", "test1")

    def entailment() -> Source:
        folder = _folder(base, "snli_ve", "snli-ve")
        train, held, test = (list(snli_ve_records(folder, split)) for split in ("train", "dev", "test"))
        places = [f"{f}/{{name}}" for f in ("flickr30k/flickr30k_images", "flickr30k/flickr30k-images")]
        places += ["flickr30k/images/{name}", "snli_ve/images/{name}"]
        return Source(train, test, places, held, few, snli_ve.LABELS, "entailment")

    def vcr() -> Source:
        train, test = (list(vcr_records(base / "vcr", split)) for split in ("train", "val"))
        labels = tuple(map(str, range(CHOICES)))
        return Source(train, test, ["vcr/vcr1images/{path}"], None, amounts, labels, "choice", "validation")

    sources = _sources(base, {"vqa": vqa, "nlvr2": pairs, "snli_ve": entailment, "vcr": vcr}, clients)
    return assemble(
        "feddat_task", base, sources, answers=answers, validation=validation, image_size=image_size, seed=seed,
        unreadable=unreadable, check=check,
        facts={**_FACTS, "origin": "VQA v2, NLVR2, SNLI-VE, VCR; boxes are not drawn into the pictures of VCR"},
    )  # fmt: skip


def _clove(
    name: str,
    base: Path,
    stages: Mapping[str, str],
    clients: Sequence[str],
    amounts: Mapping[str, Amount],
    **options: Any,
) -> FederatedDataset:
    """CLOVE with a client, or several shards, per stage."""

    def maker(stage: str) -> Callable[[], Source]:
        def source() -> Source:
            train, test = (list(clove_records(base / "clove", stage, split)) for split in ("train", "val"))
            return Source(train, test, _GENOME, None, amounts, test_is="validation")

        return source

    sources = _sources(base, {client: maker(stage) for client, stage in stages.items()}, clients)
    return assemble(name, base, sources, facts={**_FACTS, "origin": "CLOVE, on Visual Genome's pictures"}, **options)


def _sources(
    base: Path, makers: Mapping[str, Callable[[], Source]], clients: Sequence[str]
) -> dict[str, Callable[[], Source]]:
    """The readers of the chosen clients' files, in the order of the benchmark."""
    chosen = list(clients) or list(makers)
    if isinstance(clients, str) or len(set(chosen)) < len(chosen) or not set(chosen) <= set(makers):
        raise ValueError(f"clients must be distinct names out of {', '.join(makers)}, got {clients!r}")
    if not base.is_dir():
        raise ValueError(f"data.root: the folder {base} does not exist")
    return {client: make for client, make in makers.items() if client in chosen}


def _amounts(
    max_train: int | None,
    max_test: int | None,
    *,
    share: float | None = None,
    per_answer: tuple[int | None, int | None] = (None, None),
) -> dict[str, Amount]:
    given = {"max_train": max_train, "max_test": max_test, "shots": per_answer[0], "test_shots": per_answer[1]}
    for name, limit in given.items():
        if limit is not None and limit < 1:
            raise ValueError(f"{name} must be at least 1, got {limit}")
    test = Amount(max_test, share, per_answer[1])
    return {"train": Amount(max_train, share, per_answer[0]), "validation": test, "test": test}


def _folder(base: Path, *names: str) -> Path:
    return next((base / name for name in names if (base / name).is_dir()), base / names[0])

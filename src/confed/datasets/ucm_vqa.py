"""Questions about aerial photographs (UC Merced land use), made from its object labels.

The folder holds ``vqa_derived.jsonl`` (questions built from the labels by templates: presence, count, land
use, logic), ``labels.jsonl`` (land use and split of every picture), and the pictures, either in
``images.tar``, which is read in place, or in a folder ``images/``.
"""

from collections.abc import Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np

from confed.data.examples import Examples
from confed.data.federate import Pool
from confed.data.intake.account import Account
from confed.data.intake.tables import read_jsonl
from confed.data.options import Options
from confed.data.pictures import empty_table, fill_table, read_folder, read_tar
from confed.data.refusals import existing, existing_folder, first_of, refuse
from confed.datasets.reader import Reading, reader

_LABELS = 17
_KEYS = ("split", "scene", "land_use")
_LAYOUTS = (
    "understood are vqa_derived.jsonl and labels.jsonl with the pictures packed in images.tar, or with the "
    "pictures in a folder images/"
)
_FACTS = {
    "origin": "UC Merced land use (Yang and Newsam) with the labels of Chaudhuri et al.; questions derived "
    "from the labels by templates; pictures reduced to 96 x 96",
    "licence": "pictures: public domain (USGS National Map); labels: for download with a request to cite",
    "citation": 'Y. Yang, S. Newsam, "Bag-of-visual-words and spatial extensions for land-use '
    'classification", ACM SIGSPATIAL GIS 2010; B. Chaudhuri et al., "Multilabel remote sensing image '
    'retrieval using a semisupervised graph-theoretic method", IEEE TGRS 56(2), 2018',
}


@reader(
    "root partition * unseen clients alpha sigma max_train max_test image_size seed",
    partition=Literal["scene", "land_use", "iid", "dirichlet", "quantity"],
    unseen=("commercial", "water"), max_train=1500, max_test=1000, image_size=64,
)  # fmt: skip
def ucm_vqa(options: Options) -> Reading:
    """Aerial photographs shared out among clients; splits are the given ones, stratified by land use.

    Pictures of unseen scenes are held out of every partition; since no client trains on them, they are tested on
    their test and validation questions together. No picture has two clients.

    Raises ``ValueError``: a file or picture is missing or damaged, an answer is outside the vocabulary, or an option is
    out of range.

    Options:
        partition: one client per scene (six) or per land use (21), less the unseen scenes, or ``clients``
            clients that are IID, skewed by answer (``alpha``) or by size (``sigma``).
        unseen: scenes that no client trains on.
    """
    root = options.folder
    _require(root)
    labels, file = root / "labels.jsonl", root / "vqa_derived.jsonl"
    pictures: dict[str, dict[str, Any]] = {}
    for number, row in read_jsonl(labels, ("image", *_KEYS)):
        if row["split"] not in ("train", "val", "test"):
            refuse(f"{labels}, row {number}", "the split train, val or test", row["split"])
        pictures[str(row["image"])] = row
    names = list(pictures)
    questions = dict(_questions(file, pictures))
    index = {name: number for number, name in enumerate(names)}
    table, tar = empty_table(len(pictures), options.image_size), root / "images.tar"
    fill_table(table, read_tar(tar, names) if tar.is_file() else read_folder(root / "images", names))
    rows = list(questions.values())
    examples = Examples(
        table,
        np.array([index[row["image"]] for row in rows], dtype=np.int64),
        [str(row["question"]) for row in rows],
        [row["answer"] for row in rows],
        [str(row["type"]) for row in rows],
        [f"ucm-{row['question_id']}" for row in rows],
    )
    of_pictures = itemgetter(*_KEYS)
    columns = zip(*(of_pictures(pictures[row["image"]]) for row in rows), strict=True)
    split, scene, land_use = map(np.array, columns)
    roles = ", ".join(f"{(split == role).sum()} {role}" for role in ("train", "val", "test"))
    published = f"{len(rows)} questions ({roles}) about {len(table)} pictures, {len(set(examples.answers))} answers"
    unseen = f"pictures of scene {', '.join(options.unseen)}; test and validation splits, since nobody trains on them"
    return Reading(
        Pool(examples, split, scene, {"scene": scene, "land_use": land_use}, unseen_roles=("val", "test")),
        Account({str(file): len(rows)}, used=dict(zip(examples.names, questions, strict=True))),
        "beyond max_train or max_test, or about training pictures of unseen scenes",
        facts={**_FACTS, "published": published},
        notes={"unseen": unseen} if options.unseen else {},
    )


def _questions(file: Path, pictures: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each row of the questions stands, and the row."""
    uses = {row["land_use"] for row in pictures.values()}
    allowed = {"yes", "no", *uses, *map(str, range(_LABELS + 1))}
    for number, row in read_jsonl(file, ("question_id", "image", "question", "answer", "type")):
        where = f"{file}, row {number}"
        if row["image"] not in pictures:
            refuse(where, "a picture of labels.jsonl", row["image"])
        if row["answer"] not in allowed:
            refuse(where, f"yes, no, a number up to {_LABELS} or one of {len(uses)} land uses as answer", row["answer"])
        yield where, row


def _require(root: Path) -> None:
    existing_folder(root, _LAYOUTS)
    for file in (root / "vqa_derived.jsonl", root / "labels.jsonl"):
        existing(file, _LAYOUTS)
    first_of([root / "images.tar", root / "images"], "the pictures", _LAYOUTS)

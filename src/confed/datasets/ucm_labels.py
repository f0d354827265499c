"""Multi-label UC Merced: real aerial photographs with 17 labels of objects and surfaces.

The folder is that of :func:`confed.datasets.ucm_vqa.ucm_vqa`: ``labels.jsonl`` (labels, land use, scene and split of
every picture), and the pictures in ``images.tar``, which is read in place, or in a folder ``images/``.

Pictures: Y. Yang, S. Newsam, "Bag-of-visual-words and spatial extensions for land-use classification", ACM SIGSPATIAL
GIS 2010. Labels: B. Chaudhuri et al., "Multilabel remote sensing image retrieval using a semisupervised graph-theoretic
method", IEEE TGRS 56(2), 2018.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from confed.data.examples import Examples
from confed.data.federate import Pool
from confed.data.intake.account import account_of
from confed.data.ml_files.records import LabelRecord, line_records
from confed.data.ml_files.table import build_table
from confed.data.options import Options
from confed.data.refusals import refuse
from confed.datasets.reader import Reading, reader, with_readable_pictures

UCM_LABELS = (
    "airplane", "bare-soil", "buildings", "cars", "chaparral", "court", "dock", "field", "grass", "mobile-home",
    "pavement", "sand", "sea", "ship", "tanks", "trees", "water",
)  # fmt: skip
"""The 17 labels in alphabetical order."""


def ucm_records(folder: Path, user: Literal["scene", "land_use", ""] = "scene") -> Iterator[LabelRecord]:
    """All pictures in the order of ``labels.jsonl``; they lie in ``images.tar`` or in ``images/``."""
    for record in line_records(folder / "labels.jsonl", user=user, prefix="ucm-"):
        if record.split not in ("train", "val", "test"):
            refuse(record.where, "the split train, val or test", record.split)
        if user and not record.user:
            refuse(record.where, f"a text as {user!r}", found="none")
        yield record


# Multi-label UC Merced: real aerial photographs with 17 labels of objects and surfaces ----------------------

_FACTS = {
    "origin": "UC Merced land use (Yang and Newsam) with the multi-labels of Chaudhuri et al.; pictures reduced to "
    "96 x 96",
    "licence": "pictures: public domain (USGS National Map); labels: for download with a request to cite",
    "citation": 'Y. Yang, S. Newsam, "Bag-of-visual-words and spatial extensions for land-use classification", ACM '
    'SIGSPATIAL GIS 2010; B. Chaudhuri et al., "Multilabel remote sensing image retrieval using a semisupervised '
    'graph-theoretic method", IEEE TGRS 56(2), 2018',
}


@reader(
    "root partition * unseen clients alpha median sigma largest minimum max_train unreadable image_size seed",
    things="pictures", kind="labels",
    partition=Literal["scene", "land_use", "users", "iid", "dirichlet", "label_skew"],
    clients=6, image_size=64,
)  # fmt: skip
def ucm_labels(options: Options) -> Reading:
    """Aerial photographs shared out among clients; splits are the given ones, stratified by land use.

    Test and validation pictures are dealt as training pictures are: a client that has much of a scene or of a set of
    labels in training has much of it in its test. Owners and test sets are the same for all seeds.

    Options:
        partition: one client per scene (six) or per land use (21); "users", scenes cut into users of log-normal sizes,
            as FLAIR's users are; or ``clients`` clients that are IID, or skewed by whole sets of labels or by single
            labels (``alpha``).
        unseen: scenes that no client trains on, whatever the partition; tested on all their pictures but the training
            ones.
        sigma: standard deviation of the logarithm of their number.

    Raises ``ValueError``: a file is missing or faulty, a label is none of the 17, too many pictures cannot be read, or
    an option is out of range.
    """
    folder = options.folder
    if not (folder / "labels.jsonl").is_file():
        refuse("ucm_labels", f"labels.jsonl and images.tar or images/ in {folder}", found="no labels")
    records = list(ucm_records(folder, "scene"))
    uses = {record.name: record.user for record in ucm_records(folder, "land_use")}
    scenes = {record.name: record.user for record in records}
    splits = {record.name: record.split for record in records}
    # One table for all splits: users and splits are dealt with here.
    whole = build_table((replace(r, split="") for r in ucm_records(folder, "")), UCM_LABELS)[""]
    tar = folder / "images.tar"
    table, pictures = with_readable_pictures(whole, tar if tar.is_file() else folder / "images", options)
    names = list(table.names)
    scene, land_use, split = (np.array([*map(of.__getitem__, names)]) for of in (scenes, uses, splits))
    examples = Examples.labelled(table, pictures, np.arange(len(table)), scene.tolist())
    return Reading(
        Pool(examples, split, scene, {"scene": scene, "land_use": land_use}, unseen_roles=("val", "test")),
        account_of(records).keep(table.names, "picture cannot be read"),
        "beyond max_train, training pictures of unseen scenes, or of no client that trains",
        {**_FACTS, **table.facts()},
    )

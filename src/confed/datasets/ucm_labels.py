"""Multi-label UC Merced: real aerial photographs with 17 labels of objects and surfaces.

The folder is that of :func:`confed.datasets.ucm_vqa.ucm_vqa`: ``labels.jsonl`` (labels, land use, scene and split of
every picture), and the pictures in ``images.tar``, which is read in place, or in a folder ``images/``.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from confed.data.label_federate import LabelPool, federate_labels, label_facts
from confed.data.labelled import LabelDataset
from confed.data.ml_files.pictures import drop_unreadable
from confed.data.ml_files.table import build_table
from confed.data.ml_files.ucm import UCM_LABELS, ucm_records
from confed.registry import register_dataset

HELD = 1 << 28
"""Bytes of pictures that are kept in memory."""

_FACTS = {
    "origin": "UC Merced land use (Yang and Newsam) with the multi-labels of Chaudhuri et al.; pictures reduced to "
    "96 x 96",
    "licence": "pictures: public domain (USGS National Map); labels: for download with a request to cite",
    "citation": 'Y. Yang, S. Newsam, "Bag-of-visual-words and spatial extensions for land-use classification", ACM '
    'SIGSPATIAL GIS 2010; B. Chaudhuri et al., "Multilabel remote sensing image retrieval using a semisupervised '
    'graph-theoretic method", IEEE TGRS 56(2), 2018',
}


@register_dataset
def ucm_labels(
    root: Path | str,
    partition: Literal["scene", "land_use", "users", "iid", "dirichlet", "label_skew"] = "scene",
    *,
    unseen: Sequence[str] = (),
    clients: int = 6,
    alpha: float = 0.5,
    median: float = 16.0,
    sigma: float = 1.0,
    largest: int = 80,
    minimum: int = 10,
    max_train: int | None = None,
    unreadable: float = 0.01,
    image_size: int = 64,
    seed: int = 0,
) -> LabelDataset:
    """Aerial photographs shared out among clients; splits are the given ones, stratified by land use.

    Test and validation pictures are dealt as training pictures are: a client that has much of a scene or of a set of
    labels in training has much of it in its test. Owners and test sets are the same for all seeds.

    Args:
        root: the data set's folder.
        partition: one client per scene (six) or per land use (21); "users", scenes cut into users of log-normal sizes,
            as FLAIR's users are; or ``clients`` clients that are IID, or skewed by whole sets of labels or by single
            labels (``alpha``).
        unseen: scenes that no client trains on, whatever the partition; tested on all their pictures but the training
            ones.
        clients: number of clients of "iid", "dirichlet" and "label_skew".
        alpha: concentration of the last two.
        median: median training pictures of a user ("users").
        sigma: standard deviation of the logarithm of their number.
        largest: most training pictures of a user.
        minimum: fewest training pictures of a client ("dirichlet" and "label_skew").
        max_train: most training pictures per client, chosen by the seed.
        unreadable: share of the pictures that may be left out because they cannot be read.
        image_size: side of the pictures in pixels.
        seed: see ``max_train``.

    Raises:
        ValueError: a file is missing or faulty, a label is none of the 17, too many pictures cannot be read, or an
            option is out of range.
    """
    folder = Path(root)
    if not (folder / "labels.jsonl").is_file():
        raise ValueError(f"ucm_labels: expected labels.jsonl and images.tar or images/ in {folder}, found no labels")
    scene_of: dict[str, tuple[str, str, str]] = {}
    for record, again in zip(ucm_records(folder, "scene"), ucm_records(folder, "land_use"), strict=True):
        scene_of[record.name] = (record.user, again.user, record.split)
    # One table for all splits: users and splits are dealt with here.
    whole = build_table((replace(r, split="") for r in ucm_records(folder, "")), UCM_LABELS)[""]
    tar = folder / "images.tar"
    source = tar if tar.is_file() else folder / "images"
    table, pictures = drop_unreadable(whole, source, image_size, at_most=unreadable, hold=HELD)
    scene, land_use, split = (np.array(column) for column in zip(*(scene_of[n] for n in table.names), strict=True))
    scenes = sorted(set(scene.tolist()))
    if isinstance(unseen, str) or len(set(unseen)) < len(unseen) or not set(unseen) <= set(scenes):
        raise ValueError(f"unseen must be distinct names out of {', '.join(scenes)}, got {unseen!r}")
    seen = ~np.isin(scene, list(unseen))
    keys = {"scene": scene, "land_use": land_use}
    pool = LabelPool(table, pictures, np.where(seen, split, ""), scene, keys, scene)
    splits = federate_labels(
        pool,
        partition,
        clients=clients,
        alpha=alpha,
        median=median,
        sigma=sigma,
        largest=largest,
        minimum=minimum,
        max_train=max_train,
        seed=seed,
    )
    places = {place: pool.examples(np.flatnonzero((scene == place) & (split != "train"))) for place in unseen}
    facts = {**_FACTS, **table.facts(), **label_facts(splits, places.values())}
    return LabelDataset("ucm_labels", UCM_LABELS, splits, places, facts)

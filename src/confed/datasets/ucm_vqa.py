"""Questions about aerial photographs (UC Merced land use), made from its object labels.

The folder holds ``vqa_derived.jsonl`` (questions built from the labels by templates: presence, count, land
use, logic), ``labels.jsonl`` (land use and split of every picture), and the pictures, either in
``images.tar``, which is read in place, or in a folder ``images/``.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from confed.data.examples import Examples, FederatedDataset
from confed.data.federate import Pool, federate, floors, words
from confed.data.intake.tables import read_jsonl
from confed.data.pictures import empty_table, fill_table, read_folder, read_tar
from confed.registry import register_dataset

_LABELS = 17
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


@register_dataset
def ucm_vqa(
    root: Path | str,
    partition: Literal["scene", "land_use", "iid", "dirichlet", "quantity"] = "scene",
    *,
    unseen: Sequence[str] = ("commercial", "water"),
    clients: int = 4,
    alpha: float = 0.5,
    sigma: float = 1.0,
    max_train: int | None = 1500,
    max_test: int | None = 1000,
    image_size: int = 64,
    seed: int = 0,
) -> FederatedDataset:
    """Aerial photographs shared out among clients; splits are the given ones, stratified by land use.

    Pictures of unseen scenes are held out of every partition; since no client trains on them, they are tested on
    their test and validation questions together. No picture has two clients.

    Raises ``ValueError``: a file or picture is missing or damaged, an answer is outside the vocabulary, or an option is
    out of range.

    Args:
        root: the data set's folder.
        partition: one client per scene (six) or per land use (21), less the unseen scenes, or ``clients``
            clients that are IID, skewed by answer (``alpha``) or by size (``sigma``).
        unseen: scenes that no client trains on.
        clients: number of clients of "iid", "dirichlet" and "quantity".
        alpha: concentration of "dirichlet".
        sigma: standard deviation of the log sizes of "quantity".
        max_train: most training questions per client.
        max_test: most test questions per client and unseen scene.
        image_size: side of the pictures in pixels.
        seed: chooses the training questions under ``max_train``; owners and test sets are the same for all.
    """
    examples, column = _read(Path(root), image_size)
    splits, tests = federate(
        Pool(examples, column["split"], column["scene"], {key: column[key] for key in ("scene", "land_use")}),
        partition,
        unseen=unseen,
        unseen_roles=("val", "test"),
        clients=clients,
        alpha=alpha,
        sigma=sigma,
        max_train=max_train,
        max_test=max_test,
        seed=seed,
    )
    vocabulary = tuple(sorted(set(examples.answers)))
    roles = ", ".join(f"{(column['split'] == role).sum()} {role}" for role in ("train", "val", "test"))
    facts = {
        **_FACTS,
        "published": f"{len(examples)} questions ({roles}) about {len(examples.images)} pictures, "
        f"{len(vocabulary)} answers",
        **floors(splits),
    }
    if unseen:
        facts["unseen"] = (
            f"pictures of scene {', '.join(unseen)}; test and validation splits, since nobody trains on them"
        )
    return FederatedDataset("ucm_vqa", vocabulary, splits, tests, words(examples.questions), facts)


def _read(root: Path, image_size: int) -> tuple[Examples, dict[str, np.ndarray]]:
    """All questions, and the split, scene and land use of each, shape (N,)."""
    _require(root)
    keys = ("split", "scene", "land_use")
    pictures: dict[str, dict[str, Any]] = {}
    labels, questions = root / "labels.jsonl", root / "vqa_derived.jsonl"
    for number, row in read_jsonl(labels, ("image", *keys)):
        if row["split"] not in ("train", "val", "test"):
            raise ValueError(f"{labels}, row {number}: expected the split train, val or test, got {row['split']!r}")
        pictures[str(row["image"])] = row
    index = {name: number for number, name in enumerate(pictures)}
    uses = {row["land_use"] for row in pictures.values()}
    allowed = {"yes", "no", *uses, *map(str, range(_LABELS + 1))}
    rows = []
    for number, row in read_jsonl(questions, ("question_id", "image", "question", "answer", "type")):
        where = f"{questions}, row {number}"
        if row["image"] not in index:
            raise ValueError(f"{where}: expected a picture of labels.jsonl, got {row['image']!r}")
        if row["answer"] not in allowed:
            raise ValueError(
                f"{where}: expected yes, no, a number up to {_LABELS} or one of {len(uses)} land uses "
                f"as answer, got {row['answer']!r}"
            )
        rows.append(row)
    table = empty_table(len(pictures), image_size)
    tar, names = root / "images.tar", list(pictures)
    fill_table(table, read_tar(tar, names) if tar.is_file() else read_folder(root / "images", names))
    examples = Examples(
        table,
        np.array([index[row["image"]] for row in rows], dtype=np.int64),
        [str(row["question"]) for row in rows],
        [row["answer"] for row in rows],
        [str(row["type"]) for row in rows],
        [f"ucm-{row['question_id']}" for row in rows],
    )
    columns: dict[str, np.ndarray] = {}
    for key in keys:
        columns[key] = np.array([pictures[row["image"]][key] for row in rows])
    return examples, columns


def _require(root: Path) -> None:
    if not root.is_dir():
        raise ValueError(f"ucm_vqa: no data at {root}: the folder does not exist; {_LAYOUTS}")
    for file in (root / "vqa_derived.jsonl", root / "labels.jsonl"):
        if not file.is_file():
            raise ValueError(f"ucm_vqa: the file {file} is missing; {_LAYOUTS}")
    if not (root / "images.tar").is_file() and not (root / "images").is_dir():
        raise ValueError(f"ucm_vqa: neither {root / 'images.tar'} nor the folder {root / 'images'} exists; {_LAYOUTS}")

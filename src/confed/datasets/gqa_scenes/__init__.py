"""GQA by scene (Hudson and Manning, 2019): questions about photographs of six scenes, as in FedVQA.

``confed data prepare gqa-scenes`` makes the folder that this dataset reads, and its manifest has the sizes
and hashes of all files. Pictures stay on disk and are decoded batch by batch.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np

from confed.data.examples import Examples
from confed.data.federate import Pool
from confed.data.intake.account import Account
from confed.data.intake.stream import json_object
from confed.data.intake.tables import read_jsonl
from confed.data.options import Options
from confed.data.picture_files import PictureFiles, find_pictures
from confed.data.refusals import check_distinct, check_nothing_lacks, existing, refuse
from confed.datasets.gqa_scenes.places import FORMAT, SCENES, digest
from confed.datasets.reader import Reading, reader

SCENARIOS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "A": (("transport", "sports", "educational", "natural"), ("home", "commercial")),
    "B": (("sports", "home", "natural", "commercial"), ("transport", "educational")),
}
"""The paper's clients and unseen scenes (Tables 8.2 and 8.3)."""

_HINT = "make it with `confed data prepare gqa-scenes`"
_PARTS = {"files", "images", "options"}
_KEYS = ("question_id", "image_id", "question", "answer", "type")
_FACTS = {
    "origin": "GQA, whose pictures are Visual Genome's, sorted into scenes by a classifier of Places365",
    "licence": "as stated by GQA and Visual Genome; each picture has its author's",
    "citation": 'D. A. Hudson, C. D. Manning, "GQA: a new dataset for real-world visual reasoning and compositional '
    'question answering", CVPR 2019; B. Zhou et al., "Places: a 10 million image database for scene recognition", '
    "IEEE TPAMI 40(6), 2018",
}


@reader(
    "root images * scenario clients unseen max_train max_test validation image_size unreadable check unanswerable seed",
    validation=0.1, image_size=384,
)  # fmt: skip
def gqa_scenes(
    options: Options,
    images: Path | None = None,
    scenario: Literal["A", "B"] = "A",
    clients: tuple[str, ...] = (),
    unseen: tuple[str, ...] = (),
    unanswerable: Literal["wrong", "drop"] = "wrong",
) -> Reading:
    """Four clients with one scene each, and scenes that no client trains on.

    No model can answer test questions whose answer is outside the vocabulary. They count as wrong, unless they are
    to be dropped; the facts say how many there are.

    Options:
        root: the folder that ``confed data prepare gqa-scenes`` wrote.
        images: the folder of GQA's pictures; default: ``root/images`` if it is there, else where they were when
            the folder was made.
        scenario: the paper's scenario A or B.
        clients: scenes with a client each, instead of the scenario's.
        unseen: with ``clients``: scenes that no client trains on.
        validation: share of a client's training pictures held out (the paper mentions no validation set).
        unanswerable: what becomes of test questions whose answer is outside the vocabulary: counted as wrong, or
            dropped, which makes accuracy too high by their share.

    Raises ``ValueError``: the folder is missing, incomplete, or does not fit its manifest; pictures are missing; or an
    option is out of range.
    """
    if unseen and not clients:
        refuse("unseen", "clients beside it, as both replace the scenario's", unseen)
    for given in (clients, unseen, [*clients, *unseen]):
        check_distinct("clients and unseen", given, SCENES)
    seen, held_out = (tuple(clients), tuple(unseen)) if clients else SCENARIOS[scenario]
    base, account = options.folder, Account()
    file = base / "manifest.json"
    manifest = json_object(existing(file, _HINT), sorted(_PARTS))
    if manifest.get("format") != FORMAT:
        refuse(file, f"the format {FORMAT!r}", manifest.get("format"), remedy=_HINT)
    vocabulary = tuple(json.loads(_checked(base, "answers.json", manifest).read_text(encoding="utf-8")))
    answer_set = set(vocabulary)
    rows: list[dict[str, str]] = []
    places: list[tuple[str, str]] = []
    outside: list[str] = []
    for scene, role in [*product(seen, ("train", "test")), *((scene, "test") for scene in held_out)]:
        name = f"{scene}/{role}.jsonl"
        scene_rows, unanswered = _rows(base, name, manifest), 0
        account.rows[str(base / name)] = len(scene_rows)
        for where, row in scene_rows.items():
            answerable = row["answer"] in answer_set
            unanswered += not answerable
            if answerable or (role == "test" and unanswerable == "wrong"):
                rows.append(row)
                places.append((scene, role))
                account.used[f"gqa-{row['question_id']}"] = where
            else:
                account.leave("answer outside the vocabulary", where)
        if role == "test":
            outside.append(f"{scene} {unanswered} of {len(scene_rows)}")
    examples = _examples(rows, _pictures(images, base, manifest), options.pictures())
    scenes, roles = (np.array(column) for column in zip(*places, strict=True))
    facts = {
        **_FACTS,
        "threshold": f"{manifest['options']['threshold']} (the paper: not given)",
        "outside the vocabulary": f"test questions {'left out' if unanswerable == 'drop' else 'counted as wrong'}: "
        + ", ".join(outside),
    }
    return Reading(
        Pool(examples, roles, scenes, {"scene": scenes}), account, "beyond max_train or max_test", facts,
        answers=vocabulary, outside=unanswerable == "wrong", order=seen,
        options=replace(options, partition="scene", unseen=held_out),
    )  # fmt: skip


def _checked(base: Path, name: str, manifest: Mapping[str, Any]) -> Path:
    """A file, once its size and hash are those of the manifest."""
    file, expected = base / name, manifest["files"].get(name)
    file_digest = digest(existing(file, _HINT))
    if file_digest != expected:
        refuse(file, f"the file of the manifest, {expected}", found=file_digest, remedy=_HINT)
    return file


def _rows(base: Path, name: str, manifest: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Where each row stands -> the row."""
    rows = {f"{base / name}, row {number}": row for number, row in read_jsonl(_checked(base, name, manifest))}
    for row in rows.values():
        if not all(isinstance(row.get(key), str) for key in _KEYS):
            refuse(base / name, f"texts for {', '.join(_KEYS)}", row)
    return rows


def _pictures(images: Path | None, base: Path, manifest: Mapping[str, Any]) -> Path:
    if images is not None:
        return images
    return base / "images" if (base / "images").is_dir() else Path(manifest["images"])


def _examples(rows: Sequence[Mapping[str, str]], folder: Path, like: PictureFiles) -> Examples:
    ids = sorted({row["image_id"] for row in rows})
    picture_files = find_pictures(folder, ids)
    missing = [image for image in ids if image not in picture_files]
    remedy = "give data.images, or make the dataset again from the pictures that are there"
    check_nothing_lacks("pictures", missing, len(ids), folder, remedy)
    index = {image: number for number, image in enumerate(ids)}
    return Examples(
        like.of([picture_files[image] for image in ids]),
        np.array([index[row["image_id"]] for row in rows], dtype=np.int64),
        [row["question"] for row in rows],
        [row["answer"] for row in rows],
        [row["type"] for row in rows],
        [f"gqa-{row['question_id']}" for row in rows],
    )

"""UC Merced: real aerial photographs with questions made from object labels, or with 17 labels of objects and surfaces.

The folder holds ``labels.jsonl`` (labels, land use, scene and split of every picture), the pictures, either in
``images.tar``, which is read in place, or in a folder ``images/``, and for questions ``vqa_derived.jsonl`` (built from
the labels by templates: presence, count, land use, logic). Questions with composed answers, more than 500 of them, are
made here from the labels alone: what a picture has of two things, and what it has besides one; so are questions about
positions, on pictures of four photographs each.

Pictures: Y. Yang, S. Newsam, "Bag-of-visual-words and spatial extensions for land-use classification", ACM SIGSPATIAL
GIS 2010. Labels: B. Chaudhuri et al., "Multilabel remote sensing image retrieval using a semisupervised graph-theoretic
method", IEEE TGRS 56(2), 2018.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np

from confed.data.examples import Examples
from confed.data.federate import Pool
from confed.data.intake.account import Account, account_of
from confed.data.intake.tables import read_jsonl
from confed.data.ml_files.records import LabelRecord, line_records
from confed.data.ml_files.table import build_table
from confed.data.options import Options
from confed.data.picture_files import in_memory, open_pictures
from confed.data.pictures import empty_table
from confed.data.ragged import PackedTexts
from confed.data.refusals import check_inside, existing, existing_folder, first_of, refuse
from confed.data.seeding import generator
from confed.datasets.reader import Reading, reader, with_readable_pictures

UCM_LABELS = (
    "airplane", "bare-soil", "buildings", "cars", "chaparral", "court", "dock", "field", "grass", "mobile-home",
    "pavement", "sand", "sea", "ship", "tanks", "trees", "water",
)  # fmt: skip
"""The 17 labels in alphabetical order."""
Questions = Literal["derived", "composed", "positions"]
CORNERS = ("top left", "top right", "bottom left", "bottom right")
_KEYS = ("split", "scene", "land_use")
_LAYOUTS = (
    "understood are vqa_derived.jsonl and labels.jsonl with the pictures packed in images.tar, or with the "
    "pictures in a folder images/"
)
_ORIGIN = "UC Merced land use (Yang and Newsam) with the"
_ASKED = (
    f"{_ORIGIN} labels of Chaudhuri et al.; questions derived from the labels by templates; pictures reduced to 96 x 96"
)
_LABELLED = f"{_ORIGIN} multi-labels of Chaudhuri et al.; pictures reduced to 96 x 96"
_FACTS = {
    "licence": "pictures: public domain (USGS National Map); labels: for download with a request to cite",
    "citation": 'Y. Yang, S. Newsam, "Bag-of-visual-words and spatial extensions for land-use classification", ACM '
    'SIGSPATIAL GIS 2010; B. Chaudhuri et al., "Multilabel remote sensing image retrieval using a semisupervised '
    'graph-theoretic method", IEEE TGRS 56(2), 2018',
}


def _packed(root: Path) -> Path:
    """Where the pictures are."""
    tar = root / "images.tar"
    return tar if tar.is_file() else root / "images"


# Questions ----------------------------------------------------------------------------------------------------


@reader(
    "root partition * questions unseen clients alpha sigma max_train max_test image_size seed",
    partition=Literal["scene", "land_use", "iid", "dirichlet", "quantity"],
    unseen=("commercial", "water"), max_train=1500, max_test=1000, image_size=64,
)  # fmt: skip
def ucm_vqa(options: Options, questions: Questions = "derived") -> Reading:
    """Aerial photographs shared out among clients; splits are the given ones, stratified by land use.

    Pictures of unseen scenes are held out of every partition; since no client trains on them, they are tested on
    their test and validation questions together. No picture has two clients; of pictures of four, the photographs may.

    Raises ``ValueError``: a file or picture is missing or damaged, an answer is outside the vocabulary, or an option is
    out of range.

    Options:
        partition: one client per scene (six) or per land use (21), less the unseen scenes, or ``clients``
            clients that are IID, skewed by answer (``alpha``) or by size (``sigma``).
        questions: those of ``vqa_derived.jsonl``, or up to five about each picture with answers composed of labels, for
            which ``labels.jsonl`` is enough; "positions": four photographs of one scene and split are a picture, and it
            is asked where a land use is, what is in a corner, and whether a corner has a label.
        unseen: scenes that no client trains on.
    """
    root = options.folder
    labels = root / "labels.jsonl"
    file = root / "vqa_derived.jsonl" if questions == "derived" else labels
    _require(root, file)
    pictures: dict[str, dict[str, Any]] = {}
    extra = () if questions == "derived" else ("labels",)
    for number, row in read_jsonl(labels, ("image", *_KEYS, *extra)):
        if row["split"] not in ("train", "val", "test"):
            refuse(f"{labels}, row {number}", "the split train, val or test", row["split"])
        check_inside(str(row["image"]), f"{labels}, row {number}")
        pictures[str(row["image"])] = row
    names = list(pictures)
    index = {name: number for number, name in enumerate(names)}
    corners = _corners(pictures) if questions == "positions" else {}
    if corners and options.image_size % 2:
        refuse("data.image_size", "an even number where a picture is four photographs", options.image_size)
    if questions == "derived":
        asked = dict(_questions(file, pictures))
    else:
        asked = dict(_positions(file, pictures, corners) if corners else _composed(file, pictures))
    # A picture of four has its name from one of them, and is as large as one alone.
    side = options.image_size // (2 if corners else 1)
    table = in_memory(open_pictures(_packed(root), PackedTexts.of(names), side))
    if corners:
        numbers = [index[tile] for tile in chain.from_iterable(corners.values())]
        table = _mosaics(table, np.array(numbers).reshape(len(names), len(CORNERS)))
    rows = list(asked.values())
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
        Account({str(file): len(rows)}, used=dict(zip(examples.names, asked, strict=True))),
        "beyond max_train or max_test, or about training pictures of unseen scenes",
        facts={"origin": _ASKED, **_FACTS, "published": published},
        notes={"unseen": unseen} if options.unseen else {},
    )


def _questions(file: Path, pictures: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each row of the questions stands, and the row."""
    uses = {row["land_use"] for row in pictures.values()}
    allowed = {"yes", "no", *uses, *map(str, range(len(UCM_LABELS) + 1))}
    for number, row in read_jsonl(file, ("question_id", "image", "question", "answer", "type")):
        where = f"{file}, row {number}"
        if row["image"] not in pictures:
            refuse(where, "a picture of labels.jsonl", row["image"])
        if row["answer"] not in allowed:
            refuse(
                where,
                f"yes, no, a number up to {len(UCM_LABELS)} or one of {len(uses)} land uses as answer",
                row["answer"],
            )
        yield where, row


def _composed(file: Path, pictures: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Questions with composed answers, the same for all seeds, and what each was made from."""
    for image, row in pictures.items():
        present = sorted(set(row["labels"]))
        absent = sorted(set(UCM_LABELS).difference(present))
        if not present or not set(present) <= set(UCM_LABELS):
            refuse(f"{file}, picture {image}", "some of the 17 labels", str(row["labels"]))
        rng = generator(0, "ucm", "composed", image)
        here, away = (list(map(str, rng.permutation(labels))) for labels in (present, absent))
        pairs = [(here[0], away[0]), (away[1], here[-1]), (away[2], away[3]), (here[0], here[-1])]
        if len(here) == 1:
            pairs = pairs[:3]
        answers = {
            f"what is there of {_words(one)} and {_words(other)}?": _told(one, other, present) for one, other in pairs
        }
        rest = [label for label in present if label != here[0]]
        answers[f"what can be seen besides {_words(here[0])}?"] = " and ".join(rest) or "nothing"
        for number, (question, answer) in enumerate(answers.items()):
            where = f"{file}, question {number + 1} about {image}"
            yield where, _question(image, number, question, answer, "composed")


def _question(image: str, number: int, question: str, answer: str, kind: str) -> dict[str, Any]:
    return {
        "question_id": f"{image}-{number}", "image": image, "question": question, "answer": answer, "type": kind,
    }  # fmt: skip


def _corners(pictures: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Photographs in the four corners of each photograph's picture: itself and three others of its scene and split."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, row in pictures.items():
        groups.setdefault((row["scene"], row["split"]), []).append(name)
    corners: dict[str, list[str]] = {}
    for name, row in pictures.items():
        rng = generator(0, "ucm", "positions", name)
        elsewhere = [other for other in groups[row["scene"], row["split"]] if other != name]
        drawn = [name, *map(str, rng.permutation(elsewhere)[:3])]
        if len(drawn) < len(CORNERS):
            refuse(f"scene {row['scene']}, split {row['split']}", "four pictures for the four corners", len(drawn))
        corners[name] = [drawn[place] for place in rng.permutation(len(CORNERS))]
    return corners


def _mosaics(tiles: np.ndarray, corners: np.ndarray) -> np.ndarray:
    """Pictures of four tiles each, uint8 (M, 2s, 2s, 3), of tiles (M, s, s, 3) by their numbers (M, 4)."""
    side = tiles.shape[1]
    table = empty_table(len(corners), 2 * side)
    for corner in range(len(CORNERS)):
        top, left = side * (corner // 2), side * (corner % 2)
        table[:, top : top + side, left : left + side] = tiles[corners[:, corner]]
    return table


def _positions(
    file: Path, pictures: Mapping[str, Mapping[str, Any]], corners: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Questions about the corners of pictures of four, the same for all seeds, and what each was made from."""
    for image, tiles in corners.items():
        rng = generator(0, "ucm", "corners", image)
        uses = [str(pictures[tile]["land_use"]) for tile in tiles]
        once = [corner for corner in range(len(CORNERS)) if uses.count(uses[corner]) == 1]
        what, has, lacks = (int(corner) for corner in rng.permutation(len(CORNERS))[:3])
        present = sorted(map(str, pictures[tiles[has]]["labels"]))
        absent = sorted(set(UCM_LABELS).difference(pictures[tiles[lacks]]["labels"]))
        asked = [
            ("what", f"what kind of area is at the {CORNERS[what]}?", uses[what]),
            ("has", f"has the {CORNERS[has]} {_words(str(rng.choice(present)))}?", "yes"),
            ("has", f"has the {CORNERS[lacks]} {_words(str(rng.choice(absent)))}?", "no"),
        ]
        if once:
            corner = int(rng.choice(once))
            asked.append(("where", f"where is the {uses[corner]}?", CORNERS[corner]))
        for number, (kind, question, answer) in enumerate(asked):
            yield f"{file}, question {number + 1} about {image}", _question(image, number, question, answer, kind)


def _told(one: str, other: str, present: Sequence[str]) -> str:
    """Which of two labels a picture has, in words."""
    if one in present and other in present:
        return " and ".join(sorted((one, other)))
    if one in present:
        return f"{one} without {other}"
    return f"{other} without {one}" if other in present else " and ".join(sorted((f"no {one}", f"no {other}")))


def _words(label: str) -> str:
    return label.replace("-", " ")


def _require(root: Path, questions: Path) -> None:
    existing_folder(root, _LAYOUTS)
    for file in (questions, root / "labels.jsonl"):
        existing(file, _LAYOUTS)
    first_of([root / "images.tar", root / "images"], "the pictures", _LAYOUTS)


# Labels -------------------------------------------------------------------------------------------------------


def ucm_records(folder: Path, user: Literal["scene", "land_use", ""] = "scene") -> Iterator[LabelRecord]:
    """All pictures in the order of ``labels.jsonl``; they lie in ``images.tar`` or in ``images/``."""
    for record in line_records(folder / "labels.jsonl", user=user, prefix="ucm-"):
        if record.split not in ("train", "val", "test"):
            refuse(record.where, "the split train, val or test", record.split)
        if user and not record.user:
            refuse(record.where, f"a text as {user!r}", found="none")
        yield record


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
    table, pictures = with_readable_pictures(whole, _packed(folder), options)
    names = list(table.names)
    scene, land_use, split = (np.array([*map(of.__getitem__, names)]) for of in (scenes, uses, splits))
    examples = Examples.labelled(table, pictures, np.arange(len(table)), scene.tolist())
    return Reading(
        Pool(examples, split, scene, {"scene": scene, "land_use": land_use}, unseen_roles=("val", "test")),
        account_of(records).keep(table.names, "picture cannot be read"),
        "beyond max_train, training pictures of unseen scenes, or of no client that trains",
        {"origin": _LABELLED, **_FACTS, **table.facts()},
    )

"""easy-VQA: 13 answers about 64 x 64 pictures of one coloured shape (V. Zhou, 2019).

Two layouts are read. *Published*: ``train/`` and ``test/`` with ``images/<id>.png`` and ``questions.json`` (a
list of [question, answer, image id]), and ``answers.txt`` beside or above them, as the data set's repository
has it under ``data/``. *Packed*: ``images.npz``, ``questions.jsonl.gz``, ``images.jsonl``, ``answers.txt``.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from confed.data.bounded_files import npz_arrays
from confed.data.examples import Examples
from confed.data.federate import Pool
from confed.data.intake.account import Account
from confed.data.intake.opening import read_picture
from confed.data.intake.tables import read_jsonl
from confed.data.options import Options
from confed.data.pictures import empty_table, fill_table
from confed.data.refusals import existing, existing_folder, expecting, first_of, refuse
from confed.datasets.reader import Reading, reader

COLORS = ("black", "blue", "brown", "gray", "green", "red", "teal", "yellow")
SHAPES = ("circle", "rectangle", "triangle")

_ROLES = ("train", "test")
_LAYOUTS = (
    "understood are the published layout ({train,test}/questions.json, {train,test}/images/<id>.png, "
    "answers.txt) and the packed one (images.npz, questions.jsonl.gz, images.jsonl, answers.txt)"
)
_FACTS = {
    "origin": "GitHub vzhou842/easy-VQA",
    "licence": "MIT (Copyright 2019 Victor Zhou)",
    "citation": 'V. Zhou, "Easy Visual Question Answering", 2019',
}


class _Question(NamedTuple):
    """A row of a file of questions; ``image`` counts the split's pictures."""

    text: str
    answer: str
    type: str
    name: str
    image: int
    where: str


@dataclass
class _Part:
    """One split: pictures, their colours, and the questions about them."""

    pictures: Sequence[np.ndarray] | np.ndarray
    colors: list[str]
    questions: list[_Question]


@reader(
    "root partition * unseen clients alpha sigma max_train validation max_test image_size seed",
    partition=Literal["color", "type", "iid", "dirichlet", "quantity"],
    unseen=("yellow", "teal"), max_train=1500, validation=0.1, max_test=1000, image_size=64,
)  # fmt: skip
def easy_vqa(options: Options) -> Reading:
    """easy-VQA shared out among clients.

    Pictures of unseen colours are held out of every partition. In the partition "type" the four clients ask
    about the same pictures (validation pictures are the same for all); otherwise no picture has two clients.

    Raises ``ValueError``: a file is missing or damaged, an answer is not in ``answers.txt``, a picture's answers
    contradict each other, or an option is out of range.

    Options:
        root: the data set's folder, or the folder above its ``data``.
        partition: one client per colour or per question type, or ``clients`` clients that are IID, skewed by
            answer (``alpha``) or by size (``sigma``).
        unseen: colours that no client trains on; tested on the published test split.
    """
    base, packed = _find(options.folder)
    file = first_of([base / "answers.txt", base.parent / "answers.txt"], "the answers", _LAYOUTS)
    vocabulary = tuple(line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip())
    if not vocabulary or len(set(vocabulary)) < len(vocabulary):
        refuse(file, "distinct answers, one per line", found=f"{len(vocabulary)} lines")
    parts = _read_packed(base) if packed else {role: _read_published(base / role) for role in _ROLES}
    examples, roles, colors = _examples(parts, options.image_size)
    for name, answer in zip(examples.names, examples.answers, strict=True):
        if answer not in vocabulary:
            refuse(f"question {name!r}", f"one of the {len(vocabulary)} answers in answers.txt", answer)
    published = (
        f"{(roles == 'train').sum()} train and {(roles == 'test').sum()} test questions about {len(examples.images)} "
        f"pictures, {len(vocabulary)} answers"
    )
    unseen = (
        f"pictures of colour {', '.join(options.unseen)}; test split only. Nobody's training pictures show these "
        "colours, so their names are right answers in no training question"
    )
    return Reading(
        Pool(examples, roles, colors, {"color": colors, "type": np.array(examples.types)}),
        _account(parts),
        "beyond max_train or max_test, or about training pictures of unseen colours",
        facts={**_FACTS, "published": published},
        notes={"unseen": unseen} if options.unseen else {},
        answers=vocabulary,
    )


def _account(parts: Mapping[str, _Part]) -> Account:
    account = Account()
    for question in chain.from_iterable(part_rows.questions for part_rows in parts.values()):
        file = question.where.rpartition(", row ")[0]
        account.count(file)
        account.used[question.name] = question.where
    return account


def _examples(parts: Mapping[str, _Part], image_size: int) -> tuple[Examples, np.ndarray, np.ndarray]:
    """All questions over one table of pictures, with the role (N,) and the colour (N,) of each."""
    table = empty_table(sum(len(role_rows.pictures) for role_rows in parts.values()), image_size)
    image_index: list[int] = []
    roles: list[str] = []
    colors: list[str] = []
    first = 0
    for role, role_rows in parts.items():
        fill_table(table, role_rows.pictures, first)
        image_index += [first + question.image for question in role_rows.questions]
        roles += [role] * len(role_rows.questions)
        colors += [role_rows.colors[question.image] for question in role_rows.questions]
        first += len(role_rows.pictures)
    questions = list(chain.from_iterable(role_rows.questions for role_rows in parts.values()))
    texts, answers, types, names, _, _ = map(list, zip(*questions, strict=True))
    index = np.array(image_index, dtype=np.int64)
    return Examples(table, index, texts, answers, types, names), np.array(roles), np.array(colors)


def question_type(question: str, answer: str) -> str:
    """yesno_color, yesno_shape, open_color or open_shape: how it is answered, and what about."""
    tokens = set(question.rstrip("?").split())
    if answer in ("yes", "no"):
        return "yesno_color" if tokens & set(COLORS) else "yesno_shape"
    return "open_color" if "color" in tokens else "open_shape"


def foreground(picture: np.ndarray) -> np.ndarray:
    """Mean colour of what differs from the most frequent colour of the border by more than 40, float64 (3,)."""
    border = np.concatenate([picture[0], picture[-1], picture[:, 0], picture[:, -1]])
    values, counts = np.unique(border, axis=0, return_counts=True)
    background = values[counts.argmax()].astype(np.int64)
    pixels = picture.reshape(-1, 3)
    apart = np.abs(pixels.astype(np.int64) - background).max(axis=1) > 40
    return (pixels[apart] if apart.any() else pixels).mean(axis=0)


def settle_colors(
    questions: Sequence[Sequence[tuple[str, str]]], pictures: Sequence[np.ndarray] | np.ndarray
) -> list[str]:
    """The colour of every picture's shape, which the data set does not state.

    It is the colour of the only pairs (colour, shape) that agree with all answers about the picture. Where
    several colours are left, the one whose settled pictures are nearest in mean :func:`foreground`.
    """
    possible: list[list[str]] = []
    settled: dict[str, list[np.ndarray]] = {}
    for number, pairs in enumerate(questions):
        colors_left: set[str] = set()
        for color, shape in product(COLORS, SHAPES):
            if all(_agrees(*pair, color, shape) for pair in pairs):
                colors_left.add(color)
        if not colors_left:
            refuse(f"picture {number}", f"a colour and shape that agree with its {len(pairs)} answers", found="none")
        possible.append(sorted(colors_left))
    if all(len(fits) == 1 for fits in possible):
        return [fits[0] for fits in possible]
    for fits, picture in zip(possible, pictures, strict=True):
        if len(fits) == 1:
            settled.setdefault(fits[0], []).append(foreground(picture))
    centre = {color: np.mean(values, axis=0) for color, values in settled.items()}
    colors: list[str] = []
    for number, (fits, picture) in enumerate(zip(possible, pictures, strict=True)):
        candidates = [color for color in fits if len(fits) == 1 or color in centre]
        if not candidates:
            refuse(f"picture {number}", f"another that settles which of {fits} its colour is", found="none")
        distance: dict[str, float] = {}
        for color in candidates:
            distance[color] = float(np.linalg.norm(foreground(picture) - centre[color])) if len(fits) > 1 else 0.0
        colors.append(min(candidates, key=distance.__getitem__))
    return colors


def _agrees(question: str, answer: str, color: str, shape: str) -> bool:
    """Whether a picture of that colour and shape gives that answer and has what the question presupposes."""
    tokens = question.rstrip("?").split()
    named = [token for token in tokens if token in COLORS or token in SHAPES]
    shown = all(token in (color, shape) for token in named)
    if answer in ("yes", "no"):
        return (shown != ("not" in tokens or "no" in tokens)) == (answer == "yes")
    return shown and answer in (color, shape)


def _find(root: Path) -> tuple[Path, bool]:
    """The folder that holds the data, and whether its layout is the packed one."""
    for base in (root, root / "data"):
        if (base / "questions.jsonl.gz").is_file() or (base / "images.npz").is_file():
            _require(*(base / name for name in ("images.npz", "questions.jsonl.gz", "images.jsonl", "answers.txt")))
            return base, True
        if any((base / role).is_dir() for role in _ROLES):
            _require(*(base / role / "questions.json" for role in _ROLES))
            return base, False
    refuse(existing_folder(root, _LAYOUTS), "train/questions.json or images.npz", found="neither", remedy=_LAYOUTS)


def _require(*files: Path) -> None:
    for file in files:
        existing(file, _LAYOUTS)


def _read_published(folder: Path) -> _Part:
    """One split as published; picture numbers are those of the sorted image ids."""
    file = folder / "questions.json"
    with expecting(file, "a list of [question, answer, image id]", ValueError, TypeError):
        rows = json.loads(file.read_text(encoding="utf-8"))
        triples = [(str(question), str(answer), int(image)) for question, answer, image in rows]
    ids = sorted({image for _, _, image in triples})
    index = {image: position for position, image in enumerate(ids)}
    pictures = [read_picture(folder / "images" / f"{image}.png") for image in ids]
    pairs: list[list[tuple[str, str]]] = [[] for _ in ids]
    questions: list[_Question] = []
    for number, (text, answer, image) in enumerate(triples):
        pairs[index[image]].append((text, answer))
        name, where = f"{folder.name}-{number}", f"{file}, row {number + 1}"
        questions.append(_Question(text, answer, question_type(text, answer), name, index[image], where))
    with expecting(file, "answers that settle colours", ValueError, remedy="pictures are counted in order of ids"):
        return _Part(pictures, settle_colors(pairs, pictures), questions)


def _read_packed(base: Path) -> dict[str, _Part]:
    pictures = npz_arrays(base / "images.npz", {role: (np.uint8, role, "H", "W", 3) for role in _ROLES})
    parts = {role: _Part(pictures[role], [""] * len(pictures[role]), []) for role in _ROLES}
    images, file = base / "images.jsonl", base / "questions.jsonl.gz"
    for number, row in read_jsonl(images, ("split", "image_index", "color")):
        _member(parts, row, f"{images}, row {number}").colors[row["image_index"]] = row["color"]
    for role, role_rows in parts.items():
        for number, color in enumerate(role_rows.colors):
            if color not in COLORS:
                refuse(f"{images}: {role} picture {number}", f"a colour out of {', '.join(COLORS)}", color)
    for number, row in read_jsonl(file, ("question_id", "split", "image_index", "question", "answer", "type")):
        where = f"{file}, row {number}"
        text, answer, kind, name = (str(row[key]) for key in ("question", "answer", "type", "question_id"))
        _member(parts, row, where).questions.append(_Question(text, answer, kind, name, row["image_index"], where))
    return parts


def _member(parts: Mapping[str, _Part], row: Mapping[str, Any], where: str) -> _Part:
    """The split that a row belongs to, once its picture number is known to be valid."""
    role_rows, number = parts.get(str(row["split"])), row["image_index"]
    if role_rows is None or not isinstance(number, int) or not 0 <= number < len(role_rows.pictures):
        refuse(
            where,
            f"a picture of train ({len(parts['train'].pictures)}) or test ({len(parts['test'].pictures)})",
            found=f"{row['split']!r} {number!r}",
        )
    return role_rows

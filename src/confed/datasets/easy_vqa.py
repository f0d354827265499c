"""easy-VQA: 13 answers about 64 x 64 pictures of one coloured shape (V. Zhou, 2019).

Two layouts are read. *Published*: ``train/`` and ``test/`` with ``images/<id>.png`` and ``questions.json`` (a
list of [question, answer, image id]), and ``answers.txt`` beside or above them, as the data set's repository
has it under ``data/``. *Packed*: ``images.npz``, ``questions.jsonl.gz``, ``images.jsonl``, ``answers.txt``.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import chain, product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from confed.data.bounded_files import load_npz
from confed.data.examples import Examples, FederatedDataset
from confed.data.federate import Pool, federate, floors, words
from confed.data.intake.tables import read_jsonl
from confed.data.pictures import empty_table, fill_table, read_folder
from confed.registry import register_dataset

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


class _Part(NamedTuple):
    """One published split: pictures, their colours, and the questions about them."""

    pictures: Sequence[np.ndarray] | np.ndarray
    colors: list[str]
    questions: list[str]
    answers: list[str]
    types: list[str]
    names: list[str]
    image_index: list[int]


@register_dataset
def easy_vqa(
    root: Path | str,
    partition: Literal["color", "type", "iid", "dirichlet", "quantity"] = "color",
    *,
    unseen: Sequence[str] = ("yellow", "teal"),
    clients: int = 4,
    alpha: float = 0.5,
    sigma: float = 1.0,
    max_train: int | None = 1500,
    validation: float = 0.1,
    max_test: int | None = 1000,
    image_size: int = 64,
    seed: int = 0,
) -> FederatedDataset:
    """easy-VQA shared out among clients.

    Pictures of unseen colours are held out of every partition. In the partition "type" the four clients ask
    about the same pictures (validation pictures are the same for all); otherwise no picture has two clients.

    Raises ``ValueError``: a file is missing or damaged, an answer is not in ``answers.txt``, a picture's answers
    contradict each other, or an option is out of range.

    Args:
        root: the data set's folder, or the folder above its ``data``.
        partition: one client per colour or per question type, or ``clients`` clients that are IID, skewed by
            answer (``alpha``) or by size (``sigma``).
        unseen: colours that no client trains on; tested on the published test split.
        clients: number of clients of "iid", "dirichlet" and "quantity".
        alpha: concentration of "dirichlet".
        sigma: standard deviation of the log sizes of "quantity".
        max_train: most training questions per client.
        validation: share of a client's training pictures held out.
        max_test: most test questions per client and unseen colour.
        image_size: side of the pictures in pixels.
        seed: chooses validation pictures and training questions; owners and test sets are the same for all.
    """
    base, packed = _find(Path(root))
    vocabulary = _vocabulary(base)
    parts = _read_packed(base) if packed else {role: _read_published(base / role) for role in _ROLES}
    examples, roles, colors = _examples(parts, image_size)
    _check_answers(examples, vocabulary)
    splits, tests = federate(
        Pool(examples, roles, colors, {"color": colors, "type": np.array(examples.types)}),
        partition,
        unseen=unseen,
        clients=clients,
        alpha=alpha,
        sigma=sigma,
        validation=validation,
        max_train=max_train,
        max_test=max_test,
        seed=seed,
    )
    facts = {
        **_FACTS,
        "published": f"{(roles == 'train').sum()} train and {(roles == 'test').sum()} test questions about "
        f"{len(examples.images)} pictures, {len(vocabulary)} answers",
        **floors(splits),
    }
    if unseen:
        facts["unseen"] = (
            f"pictures of colour {', '.join(unseen)}; test split only. Nobody's training pictures show these "
            "colours, so their names are right answers in no training question"
        )
    return FederatedDataset("easy_vqa", vocabulary, splits, tests, words(examples.questions), facts)


def _examples(parts: Mapping[str, _Part], image_size: int) -> tuple[Examples, np.ndarray, np.ndarray]:
    """All questions over one table of pictures, with the role (N,) and the colour (N,) of each."""
    table = empty_table(sum(len(role_rows.pictures) for role_rows in parts.values()), image_size)
    first, image_index = 0, []
    for role_rows in parts.values():
        fill_table(table, role_rows.pictures, first)
        image_index += [first + number for number in role_rows.image_index]
        first += len(role_rows.pictures)
    examples = Examples(
        table,
        np.array(image_index, dtype=np.int64),
        list(chain.from_iterable(role_rows.questions for role_rows in parts.values())),
        list(chain.from_iterable(role_rows.answers for role_rows in parts.values())),
        list(chain.from_iterable(role_rows.types for role_rows in parts.values())),
        list(chain.from_iterable(role_rows.names for role_rows in parts.values())),
    )
    roles = np.repeat(list(parts), [len(role_rows.questions) for role_rows in parts.values()])
    return (
        examples,
        roles,
        np.array([role_rows.colors[n] for role_rows in parts.values() for n in role_rows.image_index]),
    )


def _check_answers(examples: Examples, vocabulary: Sequence[str]) -> None:
    answer_set = set(vocabulary)
    for name, answer in zip(examples.names, examples.answers, strict=True):
        if answer not in answer_set:
            raise ValueError(
                f"question {name!r}: the answer {answer!r} is none of the {len(answer_set)} in answers.txt"
            )


def question_type(question: str, answer: str) -> str:
    """yesno_color, yesno_shape, open_color or open_shape: how it is answered, and what about."""
    tokens = set(question.rstrip("?").split())
    if answer in ("yes", "no"):
        return "yesno_color" if tokens & set(COLORS) else "yesno_shape"
    return "open_color" if "color" in tokens else "open_shape"


def foreground(picture: np.ndarray) -> np.ndarray:
    """Mean colour of what stands out from the background (the most frequent colour of the border).

    Returns:
        Mean over pixels that differ by more than 40 of 255 in some channel (the whole picture if none does),
        float64, shape (3,).
    """
    border = np.concatenate([picture[0], picture[-1], picture[:, 0], picture[:, -1]])
    values, counts = np.unique(border, axis=0, return_counts=True)
    background = values[counts.argmax()].astype(np.int64)
    pixels = picture.reshape(-1, 3)
    apart = np.abs(pixels.astype(np.int64) - background).max(axis=1) > 40
    return (pixels[apart] if apart.any() else pixels).mean(axis=0)


def settle_colors(asked: Sequence[Sequence[tuple[str, str]]], pictures: Sequence[np.ndarray] | np.ndarray) -> list[str]:
    """The colour of every picture's shape, which the data set does not state.

    It is the colour of the only pairs (colour, shape) that agree with all answers about the picture. Where
    several colours are left, the one whose settled pictures are nearest in mean :func:`foreground`.
    """
    left = []
    for number, pairs in enumerate(asked):
        fits = {
            color for color, shape in product(COLORS, SHAPES) if all(_agrees(*pair, color, shape) for pair in pairs)
        }
        if not fits:
            raise ValueError(f"picture {number}: no colour and shape agree with its {len(pairs)} answers")
        left.append(sorted(fits))
    if all(len(fits) == 1 for fits in left):
        return [fits[0] for fits in left]
    settled: dict[str, list[np.ndarray]] = {}
    for fits, picture in zip(left, pictures, strict=True):
        if len(fits) == 1:
            settled.setdefault(fits[0], []).append(foreground(picture))
    centre = {color: np.mean(values, axis=0) for color, values in settled.items()}
    colors = []
    for number, (fits, picture) in enumerate(zip(left, pictures, strict=True)):
        candidates = [color for color in fits if len(fits) == 1 or color in centre]
        if not candidates:
            raise ValueError(f"picture {number}: its colour is one of {fits}, and no other picture settles which")
        if len(fits) > 1:
            own = foreground(picture)
            candidates.sort(key=lambda color, own=own: float(np.linalg.norm(own - centre[color])))
        colors.append(candidates[0])
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
    where = "the folder does not exist" if not root.is_dir() else "neither train/questions.json nor images.npz is there"
    raise ValueError(f"easy_vqa: no data at {root}: {where}; {_LAYOUTS}")


def _require(*files: Path) -> None:
    for file in files:
        if not file.is_file():
            raise ValueError(f"easy_vqa: the file {file} is missing; {_LAYOUTS}")


def _vocabulary(base: Path) -> tuple[str, ...]:
    file = next((at for at in (base / "answers.txt", base.parent / "answers.txt") if at.is_file()), None)
    if file is None:
        raise ValueError(f"easy_vqa: the file {base / 'answers.txt'} is missing; {_LAYOUTS}")
    answers = tuple(line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip())
    if not answers or len(set(answers)) < len(answers):
        raise ValueError(f"{file}: expected distinct answers, one per line, got {len(answers)} lines")
    return answers


def _read_published(folder: Path) -> _Part:
    """One split as published; picture numbers are those of the sorted image ids."""
    file = folder / "questions.json"
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))
        triples = [(str(question), str(answer), int(image)) for question, answer, image in rows]
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file}: expected a list of [question, answer, image id], got: {error}") from error
    ids = sorted({image for _, _, image in triples})
    index = {image: position for position, image in enumerate(ids)}
    pictures = list(read_folder(folder / "images", [f"{image}.png" for image in ids]))
    asked: list[list[tuple[str, str]]] = [[] for _ in ids]
    for question, answer, image in triples:
        asked[index[image]].append((question, answer))
    try:
        colors = settle_colors(asked, pictures)
    except ValueError as error:
        raise ValueError(f"{file} (pictures counted in order of their ids): {error}") from error
    return _Part(
        pictures,
        colors,
        [question for question, _, _ in triples],
        [answer for _, answer, _ in triples],
        [question_type(question, answer) for question, answer, _ in triples],
        [f"{folder.name}-{number}" for number in range(len(triples))],
        [index[image] for _, _, image in triples],
    )


def _read_packed(base: Path) -> dict[str, _Part]:
    pictures = _npz(base / "images.npz")
    parts = {role: _Part(pictures[role], [""] * len(pictures[role]), [], [], [], [], []) for role in _ROLES}
    images, questions = base / "images.jsonl", base / "questions.jsonl.gz"
    for number, row in read_jsonl(images, ("split", "image_index", "color")):
        _member(parts, row, f"{images}, row {number}").colors[row["image_index"]] = row["color"]
    for role, role_rows in parts.items():
        if not set(role_rows.colors) <= set(COLORS):
            bad = next(number for number, color in enumerate(role_rows.colors) if color not in COLORS)
            raise ValueError(
                f"{images}: {role} picture {bad}: expected a colour out of "
                f"{', '.join(COLORS)}, got {role_rows.colors[bad]!r}"
            )
    for number, row in read_jsonl(questions, ("question_id", "split", "image_index", "question", "answer", "type")):
        role_rows = _member(parts, row, f"{questions}, row {number}")
        role_rows.questions.append(str(row["question"]))
        role_rows.answers.append(str(row["answer"]))
        role_rows.types.append(str(row["type"]))
        role_rows.names.append(str(row["question_id"]))
        role_rows.image_index.append(row["image_index"])
    return parts


def _npz(file: Path) -> dict[str, np.ndarray]:
    try:
        archive = load_npz(file, _ROLES)
        pictures = {role: archive[role] for role in _ROLES}
    except (KeyError, ValueError) as error:
        raise ValueError(f"{file}: expected an npz archive with arrays 'train' and 'test', got: {error}") from error
    for role, array in pictures.items():
        if array.dtype != np.uint8 or array.ndim != 4 or array.shape[-1] != 3:
            raise ValueError(f"{file}: {role} must be uint8 of shape (M, H, W, 3), got {array.dtype} {array.shape}")
    return pictures


def _member(parts: Mapping[str, _Part], row: Mapping[str, Any], where: str) -> _Part:
    """The split that a row belongs to, once its picture number is known to be valid."""
    role_rows, number = parts.get(str(row["split"])), row["image_index"]
    if role_rows is None or not isinstance(number, int) or not 0 <= number < len(role_rows.pictures):
        raise ValueError(
            f"{where}: expected a picture of train ({len(parts['train'].pictures)}) or test "
            f"({len(parts['test'].pictures)}), got {row['split']!r} {number!r}"
        )
    return role_rows

"""Removal of examples with unreadable picture files before a run.

Examples are left out after they were dealt to clients, so that a damaged picture changes no other client's. Tables of
pictures in memory are complete already, and tables of one's own kinds are left alone: only
:class:`~confed.data.picture_files.NamedPictures` are checked.
"""

import warnings
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from confed.data.chat import pictures_shown
from confed.data.examples import Examples, FederatedDataset, Turn
from confed.data.federate import floors
from confed.data.intake.account import settled
from confed.data.ml_files.integrity import check_share, unreadable_rows
from confed.data.picture_files import NamedPictures, in_memory
from confed.data.picture_tables import LeftOut


def leave_out_unreadable(dataset: FederatedDataset) -> FederatedDataset:
    """Removal of examples with unreadable pictures from all roles, with a warning in one line.

    All pictures of a table are checked, not only those of the examples at hand, so that the verdict serves every seed.
    Where no region features come with the pictures, tables are made anew without those that were left out. Rows with
    labels were checked before they were shared out.
    """
    if dataset.elsewhere is not None or dataset.unreadable is not None or dataset.kind == "labels":
        return dataset
    tables = {id(e.images): e.images for _, _, e in dataset.placed() if isinstance(e.images, NamedPictures)}
    if not tables:
        return dataset
    lost = {key: _unreadable(images) for key, images in tables.items()}
    names: list[str] = []
    for key, rows in lost.items():
        for row in sorted(rows):
            names.append(tables[key].names[row])
    count = sum(map(len, tables.values()))
    if not names:
        return replace(dataset, unreadable=LeftOut((), count, {}))
    smaller = {key: _without(tables[key], rows) for key, rows in lost.items() if rows}
    left: dict[str, dict[str, int]] = {}

    def readable(examples: Examples, name: str, role: str) -> Examples:
        if id(examples.images) not in smaller:
            return examples
        sound = _readable(examples, *smaller[id(examples.images)])
        if fewer := len(examples) - len(sound):
            left.setdefault(name, {})[role] = fewer
        if role == "train" and len(examples) and not len(sound):
            raise ValueError(f"client {name!r} has no training example whose picture can be read: {_first(lost)}")
        return sound

    fewer = dataset.changed(readable)
    out = LeftOut(tuple(names), count, left)
    warnings.warn(f"{dataset.name}: {out}; the first: {_first(lost)}", stacklevel=2)
    # What is said of all examples is said of those that are left.
    counts = floors(fewer.clients) if "question-only floor" in dataset.facts else {}
    fewer = replace(fewer, facts={**dataset.facts, **counts, "unreadable": str(out)}, unreadable=out)
    return settled(fewer, dataset.account, "picture cannot be read")


def with_held_pictures(dataset: FederatedDataset) -> FederatedDataset:
    """The same with all pictures in memory."""
    tables: dict[int, np.ndarray] = {}
    for files in {id(examples.images): examples.images for examples in dataset.everything}.values():
        tables[id(files)] = in_memory(files)
    return dataset.changed(lambda examples, _, __: replace(examples, images=tables[id(examples.images)]))


def _first(lost: Mapping[int, Mapping[int, str]]) -> str:
    return next(rows[min(rows)] for rows in lost.values() if rows)


def _unreadable(images: NamedPictures) -> dict[int, str]:
    """Why pictures cannot be read, by their rows."""
    lost = unreadable_rows(images, images.check)
    if lost:
        check_share(len(lost), len(images), f"in {images.source}", images.unreadable, lost[min(lost)])
    return lost


def _without(images: NamedPictures, lost: Mapping[int, str]) -> tuple[NamedPictures, np.ndarray]:
    """The table without some rows, and the new row of each old one, -1 for those."""
    readable = np.ones(len(images), dtype=bool)
    readable[list(lost)] = False
    return images.take(np.flatnonzero(readable)), np.where(readable, np.cumsum(readable) - 1, -1)


def _readable(examples: Examples, images: NamedPictures, new: np.ndarray) -> Examples:
    """The examples none of whose pictures is lost, also of those that are shown before them."""
    readable = np.ones(len(examples), dtype=bool)
    if examples.present is not None and "image" in examples.present:
        readable = examples.present["image"]
    each = readable.reshape(-1, *[1] * (np.ndim(examples.image_index) - 1))
    if examples.conversations is not None:  # a row without pictures has an index of no meaning
        each = np.array([pictures_shown(turns) > 0 for turns in examples.conversations], dtype=bool).reshape(-1, 1)
    index = np.where(each, new[np.where(each, examples.image_index, 0)], 0)
    sound = np.array(np.all(index >= 0, axis=tuple(range(1, index.ndim))))
    for row, turns in enumerate(examples.before or ()):
        sound[row] &= all(turn.picture < 0 or new[turn.picture] >= 0 for turn in turns)
    rows = np.flatnonzero(sound)
    fewer = examples.take(rows)
    if examples.regions is not None:  # they belong to the rows of the whole table
        return fewer
    turned: list[list[Turn]] | None = None if fewer.before is None else []
    for turns in fewer.before or ():
        if turned is not None:
            turned.append([Turn(int(new[number]) if number >= 0 else number, text) for number, text in turns])
    return replace(fewer, images=images, image_index=index[rows], before=turned)

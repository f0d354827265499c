"""FLAIR (Song et al., NeurIPS 2022): photographs of 51,414 users with 17 coarse and 1,628 fine labels.

Understood are the metadata file with a folder of pictures, and the HDF5 files that the published scripts make of
them: grouped by user, with labels as joined texts (FLAIR's own) or as index pairs (pfl-research's), or not grouped.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from confed.data.bounded_files import hdf5_array
from confed.data.intake.stream import json_items
from confed.data.ml_files.records import LabelRecord
from confed.data.refusals import Distinct, existing, expecting, library, refuse
from confed.data.vl_files.records import text, texts

FLAIR_LABELS = (
    "animal", "art", "celebration", "equipment", "fire", "food", "games", "interior_room", "light", "liquid",
    "material", "music", "outdoor", "plant", "recreation", "religion", "structure",
)  # fmt: skip
"""The 17 coarse labels in alphabetical order, as pfl-research numbers them; FedLGT numbers them by first occurrence."""

_SPLITS = ("train", "val", "test")


def flair_records(file: Path) -> Iterator[LabelRecord]:
    """All pictures of the metadata file in its order, read value by value.

    Raises ``ValueError``: a missing or cut-off file, a faulty entry, a picture twice, or a user in two partitions (the
    message names the row).
    """
    distinct, home = Distinct("image_id"), dict[str, str]()
    for row, entry in json_items(file):
        image, user, split = (text(entry, key, file, row) for key in ("image_id", "user_id", "partition"))
        distinct.add(image, file, row)
        _check_home(home, user, split, f"{file}, row {row}")
        yield LabelRecord(
            file,
            row,
            image,
            tuple(texts(entry, "labels", file, row)),
            tuple(texts(entry, "fine_grained_labels", file, row)),
            f"{image}.jpg",
            user=user,
            split=split,
        )


def flair_relationship(file: Path) -> dict[str, str]:
    """Every fine label's coarse one, from ``label_relationship.txt``: "fine -> coarse" a line.

    Where there is no arrow, a comma or a tab between the two, and brackets around them, are understood as well.
    """
    existing(file)
    coarse_of: dict[str, str] = {}
    for number, line in enumerate(file.read_text(encoding="utf-8-sig", errors="replace").splitlines(), start=1):
        if not line.strip():
            continue
        # An arrow alone divides: names may have commas and brackets.
        halves = line.split("->") if "->" in line else re.split(r"[\t,]", line.strip().strip("()"))
        parts = [half.strip(" '\"\t") for half in halves]
        if len(parts) != 2 or not all(parts):
            refuse(f"{file}, row {number}", "'fine label -> coarse label'", line)
        fine, coarse = parts
        if coarse not in FLAIR_LABELS:
            refuse(f"{file}, row {number}", "one of the 17 coarse labels", coarse)
        if coarse_of.setdefault(fine, coarse) != coarse:
            refuse(f"{file}, row {number}", f"{coarse_of[fine]!r}, as before, for {fine!r}", coarse)
    return coarse_of


def flair_fine_labels(file: Path) -> tuple[str, ...]:
    """The fine labels of ``label_relationship.txt`` in alphabetical order."""
    return tuple(sorted(flair_relationship(file)))


def flair_hdf5_records(file: Path) -> Iterator[LabelRecord]:
    """All pictures of an HDF5 file, user by user; labels are read, pictures are not."""
    h5py = library("h5py", existing(file), "data")
    distinct, home, row = Distinct("image_id"), dict[str, str](), 1
    try:
        with h5py.File(file, "r") as content:
            mappings = _mappings(content, file)
            splits = [split for split in _SPLITS if split in content]
            if not splits:
                refuse(file, f"the groups {', '.join(_SPLITS)}", found=", ".join(content))
            for split in splits:
                for key in content[split]:
                    where = f"{file}, /{split}/{key}"
                    for image, user, picture, labels, fine in _group(content[split][key], key, split, where, mappings):
                        distinct.add(image, file, row)
                        _check_home(home, user, split, where)
                        yield LabelRecord(file, row, image, labels, fine, picture, user=user, split=split)
                        row += 1
    except (OSError, KeyError, RuntimeError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: expected a complete HDF5 file of FLAIR, got: {error}") from error


_Labels = tuple[str, ...]


def _group(
    group: Any, key: str, split: str, where: str, mappings: dict[str, list[str]]
) -> Iterator[tuple[str, str, str, _Labels, _Labels]]:
    """Picture's id, user, key of its pixels, labels and fine labels, of each picture of a group."""
    if "image" in group:
        coarse, fine = (_joined(hdf5_array(group, level, where)[()]) for level in ("labels", "fine_grained_labels"))
        yield key, _decoded(hdf5_array(group, "user_id", where)[()]), f"{split}/{key}/image", coarse, fine
        return
    if "images" not in group or "image_ids" not in group:
        refuse(where, "images and image_ids", found=", ".join(group))
    names = [_decoded(name) for name in hdf5_array(group, "image_ids", where)[()]]
    if len(group["images"]) != len(names):
        refuse(where, "as many pictures as names", found=f"{len(group['images'])} and {len(names)}")
    levels = [_level(group, level, len(names), where, mappings) for level in ("labels", "fine_grained_labels")]
    for number, name in enumerate(names):
        yield name, key, f"{split}/{key}/images#{number}", levels[0][number], levels[1][number]


def _level(group: Any, level: str, count: int, where: str, mappings: dict[str, list[str]]) -> list[_Labels]:
    if level in group:
        labels = [_joined(value) for value in hdf5_array(group, level, where)[()]]
        if len(labels) != count:
            refuse(where, f"the {level} of {count} pictures", found=f"those of {len(labels)}")
        return labels
    if f"{level}_row" not in group or f"{level}_col" not in group or level not in mappings:
        refuse(where, f"{level}, or {level}_row, {level}_col and their names under /metadata", found=", ".join(group))
    labels_of_picture, names = [list[str]() for _ in range(count)], mappings[level]
    rows, columns = (
        hdf5_array(group, f"{level}_row", where)[()].tolist(),
        hdf5_array(group, f"{level}_col", where)[()].tolist(),
    )
    inside = all(0 <= row < count for row in rows) and all(0 <= column < len(names) for column in columns)
    if len(rows) != len(columns) or not inside:
        refuse(where, f"{level} of {count} pictures and {len(names)} labels", found="others")
    for row, column in zip(rows, columns, strict=True):
        labels_of_picture[row].append(names[column])
    return [tuple(labels) for labels in labels_of_picture]


def _mappings(content: Any, file: Path) -> dict[str, list[str]]:
    """The names behind label indices, where the file has them."""
    mappings: dict[str, list[str]] = {}
    metadata = content.get("metadata", {})
    for level, key in (("labels", "label_mapping"), ("fine_grained_labels", "fine_grained_label_mapping")):
        if key in metadata:
            with expecting(f"{file}, /metadata/{key}", "JSON text", ValueError):
                mapping = json.loads(metadata[key][()])
            # Files that are not grouped by user hold counts under this name, and need no mapping.
            if isinstance(mapping, dict) and {*map(str, mapping.values())} == {*map(str, range(len(mapping)))}:
                mappings[level] = sorted(mapping, key=lambda name, ids=mapping: ids[name])
    return mappings


def _joined(value: Any) -> _Labels:
    joined = _decoded(value)
    return tuple(joined.split("|")) if joined else ()


def _decoded(value: Any) -> str:
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)


def _check_home(home: dict[str, str], user: str, split: str, where: str) -> None:
    if split not in _SPLITS:
        refuse(where, "the partition train, val or test", split)
    if home.setdefault(user, split) != split:
        refuse(where, f"the partition {home[user]}, as before, for the user {user}", found=split)

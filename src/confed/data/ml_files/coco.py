"""COCO (Lin et al., ECCV 2014): objects as labels of pictures, and of the captions about them.

Chen et al., "Microsoft COCO captions", arXiv:1504.00325, give about five captions to a picture.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from confed.data.intake.stream import json_items, json_lists
from confed.data.intake.values import plain_path
from confed.data.ml_files.records import LabelRecord
from confed.data.refusals import Distinct, refuse
from confed.data.vl_files.records import Row, rows_of

COCO_LABELS = (
    "person", "bicycle", "car", "motorcycle", "airplane", "bus", "train", "truck", "boat", "traffic light",
    "fire hydrant", "stop sign", "parking meter", "bench", "bird", "cat", "dog", "horse", "sheep", "cow", "elephant",
    "bear", "zebra", "giraffe", "backpack", "umbrella", "handbag", "tie", "suitcase", "frisbee", "skis", "snowboard",
    "sports ball", "kite", "baseball bat", "baseball glove", "skateboard", "surfboard", "tennis racket", "bottle",
    "wine glass", "cup", "fork", "knife", "spoon", "bowl", "banana", "apple", "sandwich", "orange", "broccoli",
    "carrot", "hot dog", "pizza", "donut", "cake", "chair", "couch", "potted plant", "bed", "dining table", "toilet",
    "tv", "laptop", "mouse", "remote", "keyboard", "cell phone", "microwave", "oven", "toaster", "sink",
    "refrigerator", "book", "clock", "vase", "scissors", "teddy bear", "hair drier", "toothbrush",
)  # fmt: skip
"""The 80 categories in the order of their ids."""

COCO_SUPERCATEGORIES = (
    "person", "vehicle", "outdoor", "animal", "accessory", "sports", "kitchen", "food", "furniture", "electronic",
    "appliance", "indoor",
)  # fmt: skip
"""Their 12 groups in the order of the ids."""

_GROUP_SIZES = (1, 8, 5, 10, 5, 10, 7, 10, 6, 6, 5, 7)

COCO_GROUPS: dict[str, str] = dict(
    zip(COCO_LABELS, np.repeat(COCO_SUPERCATEGORIES, _GROUP_SIZES).tolist(), strict=True)
)
"""Category -> its group; the categories of a group have neighbouring ids."""


_IDS = 2**63
"""Identifiers are below this, to be held in 64 bits each."""


@dataclass
class _Instances:
    """An instances file without boxes and outlines."""

    images: dict[int, str] = field(default_factory=dict[int, str])
    rows: dict[int, int] = field(default_factory=dict[int, int])
    categories: dict[int, tuple[str, str]] = field(default_factory=dict[int, tuple[str, str]])
    of_image: array = field(default_factory=lambda: array("q"))
    of_category: array = field(default_factory=lambda: array("q"))


def coco_records(
    file: Path,
    *,
    level: Literal["category", "supercategory"] = "category",
) -> Iterator[LabelRecord]:
    """The pictures of an instances file, in its order; labels are the categories of a picture's objects.

    The file is read value by value: outlines, most of its hundreds of megabytes, are never in memory together.
    """
    content = _instances(file)
    for image, labels in _labels(content, level):
        yield LabelRecord(file, content.rows[image], f"coco-{image}", labels, picture=content.images[image])


def coco_categories(file: Path) -> dict[str, str]:
    """The categories that an instances file of any dataset lists, in the order of their ids, with their groups."""
    categories, distinct = dict[int, tuple[str, str]](), Distinct("category's name")
    for entry in rows_of(file, json_items(file, "categories")):
        name = entry.text("name")
        distinct.add(name, file, entry.row)
        categories[entry.number("id")] = name, entry.optional("supercategory")
    return dict(categories[key] for key in sorted(categories))


def _instances(file: Path) -> _Instances:
    """Content of the three lists, read in one pass in any order."""
    content, distinct = _Instances(), Distinct("id")
    for key, row, entry in json_lists(file, ("images", "annotations", "categories")):
        _add(content, key, Row(file, row, entry), distinct)
    return content


def _add(content: _Instances, key: str, entry: Row, annotations: Distinct) -> None:
    entry_id = entry.number("id", below=_IDS)
    if key == "images":
        if entry_id in content.images:
            refuse(f"{entry} of images", "an id of its own", found=f"that of row {content.rows[entry_id]}")
        content.images[entry_id], content.rows[entry_id] = plain_path(entry.text("file_name")), entry.row
    elif key == "categories":
        if entry_id in content.categories:
            refuse(f"{entry} of categories", "an id of its own", found=f"{entry_id} again")
        content.categories[entry_id] = entry.text("name"), str(entry.get("supercategory") or "")
    else:
        annotations.add(entry_id, entry.file, entry.row)
        content.of_image.append(entry.number("image_id", below=_IDS))
        content.of_category.append(entry.number("category_id", below=_IDS))


def _labels(content: _Instances, level: str) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Every picture's id and labels, each once, in the order of the categories' ids."""
    images, categories = (
        np.array(name_position, dtype=np.int64) for name_position in (content.of_image, content.of_category)
    )
    for what, ids, declared in (("picture", images, content.images), ("category", categories, content.categories)):
        strange = np.setdiff1d(ids, np.fromiter(declared, dtype=np.int64, count=len(declared)))
        if len(strange):
            refuse("objects", f"each {what} described in the file", found=f"{strange[0]} ({len(strange)} such ids)")
    # One sorted row per picture and category: all labels of a picture stand together.
    pairs = np.unique(np.stack([images, categories], axis=1), axis=0) if len(images) else np.zeros((0, 2), np.int64)
    starts = np.searchsorted(pairs[:, 0], np.fromiter(content.images, dtype=np.int64), side="left")
    stops = np.searchsorted(pairs[:, 0], np.fromiter(content.images, dtype=np.int64), side="right")
    name_position = 0 if level == "category" else 1
    for image, start, stop in zip(content.images, starts.tolist(), stops.tolist(), strict=True):
        names = [content.categories[category][name_position] for category in pairs[start:stop, 1].tolist()]
        yield image, tuple(dict.fromkeys(names))

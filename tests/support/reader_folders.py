"""Small folders in the layouts of published data sets, as several tests read them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

CATEGORIES = {"person": (1, "person"), "cat": (17, "animal"), "dog": (18, "animal"), "unicorn": (19, "animal")}


def picture(file: Path, shade: int = 0, size: tuple[int, int] = (6, 8)) -> None:
    """A plain picture, by default of 8 x 6 pixels."""
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((*size, 3), shade, np.uint8)).save(file)


def write(file: Path, content: Any, *, lines: bool = False) -> Path:
    """A file with a text or bytes as they are, else JSON, or JSON lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if not isinstance(content, str | bytes):
        content = "".join(f"{json.dumps(row)}\n" for row in content) if lines else json.dumps(content)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


def coco_split(root: Path, split: str, pictures: Mapping[int, Sequence[str]]) -> None:
    """Objects of a split in COCO's layout, by the numbers of its pictures; each picture's shade is its number."""
    objects: list[dict[str, int]] = []
    for key, names in pictures.items():
        picture(root / split / f"{key:012d}.png", key)
        for name in names:
            objects.append({"id": len(objects) + 1, "image_id": key, "category_id": CATEGORIES[name][0], "iscrowd": 0})
    listed = [name for name in CATEGORIES if name != "unicorn" or "unicorn" in next(iter(pictures.values()))]
    content = {
        "images": [{"id": key, "file_name": f"{key:012d}.png"} for key in pictures],
        "annotations": objects,
        "categories": [{"id": CATEGORIES[x][0], "name": x, "supercategory": CATEGORIES[x][1]} for x in listed],
    }
    write(root / "annotations" / f"instances_{split}.json", content)


def voc_year(root: Path, year: str, split: str, pictures: Mapping[str, Sequence[tuple[str, int]]]) -> None:
    """Objects of a list of a year in PASCAL VOC's layout: picture -> what is on it, and whether it is difficult."""
    for folder in ("Annotations", "ImageSets/Main", "JPEGImages"):
        (root / year / folder).mkdir(parents=True, exist_ok=True)
    (root / year / "ImageSets" / "Main" / f"{split}.txt").write_text("\n".join(pictures))
    for number, (name, things) in enumerate(pictures.items()):
        inside = "".join(f"<object><name>{n}</name><difficult>{d}</difficult></object>" for n, d in things)
        xml = f"<annotation><filename>{name}.png</filename>{inside}</annotation>"
        (root / year / "Annotations" / f"{name}.xml").write_text(xml)
        picture(root / year / "JPEGImages" / f"{name}.png", number)


def flair_folder(root: Path, users: Mapping[str, tuple[str, Sequence[tuple[Sequence[str], Sequence[str]]]]]) -> Path:
    """FLAIR: user -> its partition, and the coarse and fine labels of its pictures."""
    rows: list[dict[str, Any]] = []
    for user, (split, pictures) in users.items():
        for number, (coarse, fine) in enumerate(pictures):
            key = f"{user}{number}"
            labels = {"labels": list(coarse), "fine_grained_labels": list(fine)}
            rows.append({"user_id": user, "image_id": key, "partition": split, **labels})
            picture(root / "small_images" / f"{key}.jpg", 10 * len(rows))
    write(root / "labels_and_metadata.json", rows)
    return root

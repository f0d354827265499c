"""PASCAL VOC (Everingham et al., IJCV 2010): an XML file per picture, lists of pictures per split."""

import re
from collections.abc import Iterator
from pathlib import Path

from confed.data.intake.stream import read_xml
from confed.data.ml_files.records import LabelRecord
from confed.data.refusals import Distinct, existing, refuse

VOC_LABELS = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog",
    "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)  # fmt: skip
"""The 20 classes in alphabetical order."""


def voc_records(folder: Path, split: str) -> Iterator[LabelRecord]:
    """The pictures of one split; the class of an object that is not marked as difficult is a label of its picture.

    Pictures lie in ``JPEGImages``. For the years 2007 and 2012 together, read both folders; names tell them apart.
    """
    listed = folder / "ImageSets" / "Main" / f"{split}.txt"
    distinct = Distinct("picture")
    for row, line in enumerate(
        existing(listed).read_text(encoding="utf-8-sig", errors="replace").splitlines(), start=1
    ):
        if not line.strip():
            continue
        name = line.strip()
        if not re.fullmatch(r"[\w-]+", name):
            refuse(f"{listed}, row {row}", "one picture's name a line", line)
        distinct.add(name, listed, row)
        annotation = folder / "Annotations" / f"{name}.xml"
        file_name, labels = _read(existing(annotation, f"row {row} of {listed} names its picture"))
        yield LabelRecord(annotation, row, f"{folder.name}-{name}", labels, picture=file_name, split=split)


def _read(file: Path) -> tuple[str, tuple[str, ...]]:
    """A picture's file name and the names of its objects, each once, in the order of their first object."""
    root = read_xml(file)
    if root.tag != "annotation":
        refuse(file, "an <annotation>", found=f"<{root.tag}>")
    names = dict[str, None]()
    for number, entry in enumerate(root.iter("object")):
        name, hard = (entry.findtext("name") or "").strip(), (entry.findtext("difficult") or "0").strip()
        if not name or hard not in ("0", "1"):
            refuse(file, f"a name and difficult 0 or 1 of object {number}", found=f"{name!r:.40} and {hard!r:.40}")
        if hard == "0":
            names[name] = None
    return (root.findtext("filename") or "").strip() or f"{file.stem}.jpg", tuple(names)

"""PASCAL VOC (Everingham et al., IJCV 2010): an XML file per picture, lists of pictures per split."""

import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from confed.data.ml_files.records import LabelRecord
from confed.data.vl_files.records import Distinct

VOC_LABELS = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog",
    "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)  # fmt: skip
"""The 20 classes in alphabetical order."""


def voc_records(folder: Path, split: str, *, difficult: bool = False) -> Iterator[LabelRecord]:
    """The pictures of one split; an object's class is a label of its picture.

    Pictures lie in ``JPEGImages``. For the years 2007 and 2012 together, read both folders; names tell them apart.
    """
    listed = folder / "ImageSets" / "Main" / f"{split}.txt"
    if not re.fullmatch(r"\w+", split) or not listed.is_file():
        raise ValueError(f"voc: expected the list of split {split!r} at {listed}")
    distinct = Distinct("picture")
    for row, line in enumerate(listed.read_text(encoding="utf-8-sig", errors="replace").splitlines(), start=1):
        if not line.strip():
            continue
        name = line.strip()
        if not re.fullmatch(r"[\w-]+", name):
            raise ValueError(f"{listed}, row {row}: expected one picture's name a line, got {line!r:.80}")
        distinct.add(name, listed, row)
        annotation = folder / "Annotations" / f"{name}.xml"
        if not annotation.is_file():
            raise ValueError(f"{listed}, row {row}: the picture {name} has no annotation {annotation}")
        file_name, labels = _read(annotation, difficult)
        yield LabelRecord(annotation, row, f"{folder.name}-{name}", labels, picture=file_name, split=split)


def _read(file: Path, difficult: bool) -> tuple[str, tuple[str, ...]]:
    """A picture's file name and the names of its objects, each once, in the order of their first object."""
    try:
        root = ElementTree.fromstring(file.read_bytes())
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        raise ValueError(f"{file}: expected an XML file, got: {error}; is it cut off?") from error
    if root.tag != "annotation":
        raise ValueError(f"{file}: expected an <annotation>, got <{root.tag}>")
    names = dict[str, None]()
    for number, entry in enumerate(root.iter("object")):
        name, hard = (entry.findtext("name") or "").strip(), (entry.findtext("difficult") or "0").strip()
        if not name or hard not in ("0", "1"):
            raise ValueError(
                f"{file}: expected a name and difficult 0 or 1 of object {number}, got {name!r:.40} and {hard!r:.40}"
            )
        if difficult or hard == "0":
            names[name] = None
    return (root.findtext("filename") or "").strip() or f"{file.stem}.jpg", tuple(names)

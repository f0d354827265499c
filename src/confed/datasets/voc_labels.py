"""PASCAL VOC as multi-label classification of 20 classes.

Below ``root``: one folder per year (``VOC2007``, as ``VOCdevkit`` has them) with ``Annotations``, ``ImageSets/Main``
and ``JPEGImages``.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from confed.data.examples import Examples
from confed.data.federate import Pool
from confed.data.intake.account import Account, account_of, joined
from confed.data.intake.stream import read_xml
from confed.data.ml_files.records import LabelRecord
from confed.data.ml_files.table import MultiLabelTable, build_table
from confed.data.options import Options
from confed.data.picture_files import NamedPictures
from confed.data.refusals import Distinct, check_apart, existing, refuse
from confed.datasets.reader import Reading, reader, with_readable_pictures

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
        file_name, labels = _read_annotation(existing(annotation, f"row {row} of {listed} names its picture"))
        yield LabelRecord(annotation, row, f"{folder.name}-{name}", labels, picture=file_name, split=split)


def _read_annotation(file: Path) -> tuple[str, tuple[str, ...]]:
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


# PASCAL VOC as multi-label classification of 20 classes -----------------------------------------------------

_FACTS = {
    "origin": "PASCAL VOC (Everingham et al.), objects as labels of pictures; difficult objects do not count",
    "licence": "pictures: Flickr's terms; annotations: for research",
    "citation": 'M. Everingham et al., "The PASCAL visual object classes (VOC) challenge", IJCV 88(2), 2010',
}
_PUBLISHED = {2_501, 2_510, 5_011, 4_952, 5_717, 5_823, 11_540, 16_551}
"""Pictures of the published lists of 2007, 2012 and both; other lists in their format are somebody's own."""


@reader(
    "root partition * train test clients alpha minimum validation test_share max_train unreadable check "
    "image_size seed",
    things="pictures", kind="labels",
    partition=Literal["iid", "dirichlet", "label_skew"], clients=50, test_share=0.2, image_size=256,
)  # fmt: skip
def voc(
    options: Options,
    train: Sequence[str] = ("VOC2007:trainval",),
    test: Sequence[str] = ("VOC2007:test",),
) -> Reading:
    """Photographs shared out among clients, and a test set in one place, as FedLGT has them.

    FedLGT's code reads 2007 alone; its paper counts 21,503 pictures, which are those of 2007 together with 2012's
    "trainval". Owners and test sets are the same for all seeds.

    Options:
        root: the folder of the years' folders.
        partition: equal random shares; or skewed by whole sets of labels, or by single labels (``alpha``).
        train: "year:list" of what is shared out, such as "VOC2007:trainval" and "VOC2012:trainval".
        test: "year:list" of what is the place "test"; none: each client's own pictures are divided (``test_share``).

    Raises ``ValueError``: a file is missing or faulty, a class is none of the 20, a picture is in both parts, too many
    pictures cannot be read, or an option is out of range.
    """
    accounts: list[Account] = []

    def read(parts: Sequence[str], what: str) -> tuple[MultiLabelTable, NamedPictures | np.ndarray]:
        records = list(_records(options.folder, parts, what))
        table, pictures = with_readable_pictures(build_table(records, VOC_LABELS)[""], options.folder, options)
        accounts.append(account_of(records).keep(table.names, "picture cannot be read"))
        return table, pictures

    table, pictures = read(train, "train")
    places: dict[str, Examples] = {}
    origin = {"origin": f"objects of {len(table)} pictures in PASCAL VOC's format"}
    facts = {**(_FACTS if len(table) in _PUBLISHED else origin), **table.facts()}
    if test:
        central, shown = read(test, "test")
        check_apart("pictures", table.names, central.names)
        places["test"] = Examples.labelled(central, shown, np.arange(len(central)))
        facts |= {f"test: {key}": value for key, value in central.facts().items()}
    return Reading(
        Pool(Examples.labelled(table, pictures, np.arange(len(table))), np.full(len(table), "train")),
        joined(accounts), "beyond max_train", facts, places=places,
        options=replace(options, test_share=0.0) if test else options,
    )  # fmt: skip


def _records(root: Path, parts: Sequence[str], what: str) -> Iterator[LabelRecord]:
    """The pictures of all lists, their names below ``root``."""
    for split_name in [""] if isinstance(parts, str) else parts or [""]:
        year, separator, split = split_name.partition(":")
        if not separator or not re.fullmatch(r"\w+", split) or Path(year).name != year:
            refuse(f"data.{what}", "names of lists such as 'VOC2007:trainval'", parts)
        for record in voc_records(root / year, split):
            yield replace(record, picture=f"{year}/JPEGImages/{record.picture}", split="")

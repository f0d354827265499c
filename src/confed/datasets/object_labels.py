"""Objects of pictures as multi-label classification: COCO's 80 categories or their 12 groups, PASCAL VOC's 20 classes.

Below ``root``, COCO: ``instances_{split}.json``, also in ``annotations/``, and the split's pictures in a folder of its
name, in ``images/`` or in ``images.tar``. PASCAL VOC: one folder per year (``VOC2007``, as ``VOCdevkit`` has them) with
``Annotations``, ``ImageSets/Main`` and ``JPEGImages``.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from confed.data.intake.account import Account, account_of, joined
from confed.data.intake.stream import read_xml
from confed.data.ml_files.coco import COCO_GROUPS, coco_categories, coco_records
from confed.data.ml_files.records import LabelRecord
from confed.data.ml_files.table import MultiLabelTable, build_table
from confed.data.options import Options
from confed.data.ragged import PackedTexts
from confed.data.refusals import Distinct, check_apart, existing, first_of, refuse
from confed.datasets.reader import Labelled, Reading, labelled_reading, reader, with_readable_pictures

# COCO ---------------------------------------------------------------------------------------------------------

_COCO = {
    "origin": "COCO (Lin et al.), object annotations as labels of pictures",
    "licence": "annotations: CC BY 4.0; every picture keeps its own Flickr licence",
    "citation": 'T.-Y. Lin et al., "Microsoft COCO: common objects in context", ECCV 2014',
}
_COCO_PUBLISHED = {82_783, 82_081, 40_504, 40_137, 118_287, 117_266, 5_000, 4_952}
"""Pictures of the published files, all or those with objects; other files in their format are somebody's own."""


@reader(
    "root partition * train test level categories clients alpha minimum validation test_share unlabelled max_train "
    "unreadable check image_size seed",
    things="pictures", kind="labels",
    partition=Literal["iid", "dirichlet", "label_skew"], clients=50, test_share=0.2, image_size=256,
)  # fmt: skip
def coco(
    options: Options,
    train: str = "train2014",
    test: str = "val2014",
    level: Literal["category", "supercategory"] = "category",
    categories: Literal["coco80", "file"] = "coco80",
    unlabelled: bool = False,
) -> Reading:
    """Photographs shared out among clients, and a test set in one place, as FedLGT has them.

    Owners and test sets are the same for all seeds.

    Options:
        partition: equal random shares; or skewed by whole sets of labels, or by single labels (``alpha``).
        train: the split that is shared out.
        test: the split that is the place "test", which no client trains on. Empty: each client's own pictures are
            divided (``test_share``).
        level: 80 categories or their 12 groups.
        categories: COCO's own 80, or those that the file of ``train`` lists, for other datasets in COCO's format.
        unlabelled: keep pictures without any object; published multi-label results leave them out.

    Raises ``ValueError``: a file is missing or faulty, a category is none of the list, a picture is in both parts (as
    2014's test pictures are in 2017's training part), too many pictures cannot be read, or an option is out of range.
    """
    folder = options.folder
    groups = COCO_GROUPS if categories == "coco80" else coco_categories(_annotations(folder, train))
    bare = [name for name, group in groups.items() if not group]
    if level == "supercategory" and bare:
        refuse(train, "a supercategory of every category for this level", found=f"none of {bare[0]!r}")
    labels = tuple(groups) if level == "category" else tuple(dict.fromkeys(groups.values()))
    accounts = {split: Account() for split in (train, test) if split}

    def labelled(split: str) -> Iterator[LabelRecord]:
        for record in coco_records(_annotations(folder, split), level=level):
            if record.labels or unlabelled:
                accounts[split].use(record)
                yield record
            else:
                accounts[split].count(record.file)
                accounts[split].leave("no object", record.where)

    def read(split: str) -> Labelled:
        table = build_table(labelled(split), labels)[""]
        table, pictures = with_readable_pictures(table, _coco_pictures(folder, split), options)
        accounts[split] = accounts[split].keep(table.names, "picture cannot be read")
        return table, pictures

    table, pictures = read(train)
    tested: Labelled | None = None
    published = categories == "coco80" and len(table) in _COCO_PUBLISHED
    origin = {"origin": f"objects of {len(table)} pictures in COCO's format"}
    if test:
        central, shown = read(test)
        same = _same_ids(table, central)
        both = [name for name, row, other in same if np.array_equal(pictures[row], shown[other])]
        check_apart("pictures", both, both)
        if same:  # numbers of their own in each file
            central = replace(central, names=PackedTexts.of(f"{test}-{name}" for name in central.names))
            accounts[test].used = {f"{test}-{name}": row for name, row in accounts[test].used.items()}
        tested = central, shown
    # Of other datasets, groups may be missing.
    coarse = groups if level == "category" and not bare else {}
    facts = _COCO if published else origin
    return labelled_reading((table, pictures), tested, joined(accounts.values()), facts, options, coarse=coarse)


def _same_ids(table: MultiLabelTable, other: MultiLabelTable) -> list[tuple[str, int, int]]:
    """Names of pictures in both tables, with their rows in each."""
    rows = {name: row for row, name in enumerate(table.names)}
    return [(name, rows[name], row) for row, name in enumerate(other.names) if name in rows]


def _annotations(root: Path, split: str) -> Path:
    places = [folder / f"instances_{split}.json" for folder in (root, root / "annotations")]
    return first_of(places, f"the objects of split {split!r}")


def _coco_pictures(root: Path, split: str) -> Path:
    return first_of([root / split, root / "images", root / "images.tar"], f"the pictures of split {split!r}")


# PASCAL VOC ---------------------------------------------------------------------------------------------------

VOC_LABELS = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog",
    "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)  # fmt: skip
"""The 20 classes in alphabetical order."""


def voc_records(folder: Path, split: str) -> Iterator[LabelRecord]:
    """The pictures of one split; the class of an object that is not marked as difficult is a label of its picture."""
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


_VOC = {
    "origin": "PASCAL VOC (Everingham et al.), objects as labels of pictures; difficult objects do not count",
    "licence": "pictures: Flickr's terms; annotations: for research",
    "citation": 'M. Everingham et al., "The PASCAL visual object classes (VOC) challenge", IJCV 88(2), 2010',
}
_VOC_PUBLISHED = {2_501, 2_510, 5_011, 4_952, 5_717, 5_823, 11_540, 16_551}
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

    def read(parts: Sequence[str], what: str) -> Labelled:
        records = list(_voc_records(options.folder, parts, what))
        table, pictures = with_readable_pictures(build_table(records, VOC_LABELS)[""], options.folder, options)
        accounts.append(account_of(records).keep(table.names, "picture cannot be read"))
        return table, pictures

    table, pictures = read(train, "train")
    tested = read(test, "test") if test else None
    if tested is not None:
        check_apart("pictures", table.names, tested[0].names)
    origin = {"origin": f"objects of {len(table)} pictures in PASCAL VOC's format"}
    facts = _VOC if len(table) in _VOC_PUBLISHED else origin
    return labelled_reading((table, pictures), tested, joined(accounts), facts, options)


def _voc_records(root: Path, parts: Sequence[str], what: str) -> Iterator[LabelRecord]:
    """The pictures of all lists, their names below ``root``."""
    for split_name in [""] if isinstance(parts, str) else parts or [""]:
        year, separator, split = split_name.partition(":")
        if not separator or not re.fullmatch(r"\w+", split) or Path(year).name != year:
            refuse(f"data.{what}", "names of lists such as 'VOC2007:trainval'", parts)
        for record in voc_records(root / year, split):
            yield replace(record, picture=f"{year}/JPEGImages/{record.picture}", split="")

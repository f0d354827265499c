"""COCO as multi-label classification of 80 categories, or of their 12 groups.

Below ``root``: ``instances_{split}.json``, also in ``annotations/``, and the split's pictures in a folder of its name,
in ``images/`` or in ``images.tar``.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from confed.data.examples import Examples
from confed.data.federate import Pool
from confed.data.intake.account import Account, joined
from confed.data.ml_files.coco import COCO_GROUPS, coco_categories, coco_records
from confed.data.ml_files.records import LabelRecord
from confed.data.ml_files.table import MultiLabelTable, build_table
from confed.data.options import Options
from confed.data.picture_files import NamedPictures
from confed.data.ragged import PackedTexts
from confed.data.refusals import check_apart, first_of, refuse
from confed.datasets.reader import Reading, reader, with_readable_pictures

_FACTS = {
    "origin": "COCO (Lin et al.), object annotations as labels of pictures",
    "licence": "annotations: CC BY 4.0; every picture keeps its own Flickr licence",
    "citation": 'T.-Y. Lin et al., "Microsoft COCO: common objects in context", ECCV 2014',
}
_PUBLISHED = {82_783, 82_081, 40_504, 40_137, 118_287, 117_266, 5_000, 4_952}
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
        file, account = _annotations(folder, split), accounts[split]
        for record in coco_records(file, level=level):
            account.rows[str(file)] = account.rows.get(str(file), 0) + 1
            if record.labels or unlabelled:
                account.used[record.name] = record.where
                yield replace(record, split="")
            else:
                account.leave("no object", record.where)

    def read(split: str) -> tuple[MultiLabelTable, NamedPictures | np.ndarray]:
        table = build_table(labelled(split), labels)[""]
        table, pictures = with_readable_pictures(table, _pictures(folder, split), options)
        accounts[split] = accounts[split].keep(table.names, "picture cannot be read")
        return table, pictures

    table, pictures = read(train)
    places: dict[str, Examples] = {}
    published = categories == "coco80" and len(table) in _PUBLISHED
    origin = {"origin": f"objects of {len(table)} pictures in COCO's format"}
    facts = {**(_FACTS if published else origin), **table.facts()}
    if test:
        central, shown = read(test)
        same = _same_ids(table, central)
        both = [name for name, row, other in same if np.array_equal(pictures[row], shown[other])]
        check_apart("pictures", both, both)
        if same:  # numbers of their own in each file
            central = replace(central, names=PackedTexts.of(f"{test}-{name}" for name in central.names))
            accounts[test].used = {f"{test}-{name}": row for name, row in accounts[test].used.items()}
        places["test"] = Examples.labelled(central, shown, np.arange(len(central)))
        facts |= {f"test: {key}": value for key, value in central.facts().items()}
    return Reading(
        Pool(Examples.labelled(table, pictures, np.arange(len(table))), np.full(len(table), "train")),
        joined(accounts.values()), "beyond max_train", facts, places=places,
        # Of other datasets, groups may be missing.
        coarse=groups if level == "category" and not bare else {},
        options=replace(options, test_share=0.0) if test else options,
    )  # fmt: skip


def _same_ids(table: MultiLabelTable, other: MultiLabelTable) -> list[tuple[str, int, int]]:
    """Names of pictures in both tables, with their rows in each."""
    rows = {name: row for row, name in enumerate(table.names)}
    return [(name, rows[name], row) for row, name in enumerate(other.names) if name in rows]


def _annotations(root: Path, split: str) -> Path:
    places = [folder / f"instances_{split}.json" for folder in (root, root / "annotations")]
    return first_of(places, f"the objects of split {split!r}")


def _pictures(root: Path, split: str) -> Path:
    return first_of([root / split, root / "images", root / "images.tar"], f"the pictures of split {split!r}")

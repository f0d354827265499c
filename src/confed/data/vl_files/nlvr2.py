"""Reader of NLVR2 (Suhr et al., 2019): statements about pairs of photographs, true or false."""

from collections.abc import Iterator
from pathlib import Path

from confed.data.intake.tables import read_jsonl
from confed.data.refusals import Distinct, refuse
from confed.data.vl_files.records import Record, check_split, find, text

LABELS = ("False", "True")
"""Answers in the order of their labels 0 and 1."""


def nlvr2_records(folder: Path, split: str) -> Iterator[Record]:
    """The sentences of a split, with the pictures of their left and right side.

    Pictures are ``<identifier without its last part>-img0.png`` and ``-img1.png``, below the training split's numbered
    directories ``<directory>/...``.
    """
    check_split(split, ("train", "dev", "test1", "test2"), "nlvr2")
    file = find(folder, [f"data/{split}.json", f"{split}.json", f"nlvr2/data/{split}.json"], "nlvr2")
    distinct = Distinct("identifier")
    for row, entry in read_jsonl(file):
        key, label = text(entry, "identifier", file, row), text(entry, "label", file, row)
        distinct.add(key, file, row)
        pair, separator, _ = key.rpartition("-")
        if not separator or label not in LABELS:
            what = f"the identifier {key!r}" if not separator else f"the label {label!r}"
            refuse(
                f"{file}, row {row}",
                "an identifier 'split-set-pair-sentence' and a label 'True' or 'False'",
                found=what,
            )
        directory = entry.get("directory")
        below = f"{directory}/" if isinstance(directory, int) and split == "train" else ""
        pictures = (f"{below}{pair}-img0.png", f"{below}{pair}-img1.png")
        yield Record(file, row, f"nlvr2-{key}", pictures, text(entry, "sentence", file, row), label, "pair")

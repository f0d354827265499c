r"""Multi-label pictures from a folder of the user's.

Below ``root``: ``labels.jsonl``, one object a line with ``image``, a file's name, and ``labels``, a list of names that
may be empty, or ``labels.csv`` with such columns and labels like "cat;sofa"; if wanted ``user``, whose picture it is,
``split`` ("train", "validation" or "test"), ``id`` (:func:`confed.data.ml_files.records.line_records`), and ``patient``
and ``document``, which keep what is theirs on one side of a split::

    {"image": "0001.jpg", "labels": ["cat", "sofa"], "user": "anna"}

The pictures, of any size and of all formats that Pillow reads, in ``images/``, in an uncompressed ``images.tar``, or
beside the file. Or a folder per user, or per split, each with such a file and its pictures.
If wanted, ``labels.txt`` with one label a line, in the order that reports have; without it labels are those that occur,
in alphabetical order. Then::

    confed data describe labelled_pictures root=DIR --out sheet.png
    confed run fedlgt_ucm data.name=labelled_pictures data.root=DIR

Naming another dataset drops the recipe's keys of ``[data]``, so that only those given here count. The others stay:
cohorts of 12 clients, or all where there are fewer, drawn by their size. With text embeddings of the labels, FedLGT as
published is the row "fedlgt_ule"::

    confed data prepare label-embeddings DIR/labels.txt labels.safetensors --width 64
    confed run fedlgt_ucm data.name=labelled_pictures data.root=DIR 'study.methods=["fedctran", "fedlgt_ule"]' \
      methods.fedlgt_ule.model.embeddings=labels.safetensors

The first command loads CLIP's text encoder; ``--encoder mini`` in place of ``--width 64`` needs no download, but knows
few words. The models of ``fedlgt_ucm`` take pictures of 64 x 64. Those of the paper, which need a GPU, take 256 x 256,
and embeddings made without ``--width``::

    confed run fedlgt_coco data.name=labelled_pictures data.root=DIR data.image_size=256 \
      model.embeddings=labels.safetensors
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Literal

import numpy as np

from confed.data.examples import Examples
from confed.data.federate import Pool
from confed.data.intake.account import Account
from confed.data.intake.identity import joined_groups, note_copies, warn_of_sides
from confed.data.intake.layouts import Layout, layout_records
from confed.data.intake.values import path_below
from confed.data.intake.walk import ROLES, role_of, said_by_folders
from confed.data.ml_files.records import LabelRecord, labels_files, line_records, listed_labels
from confed.data.ml_files.table import MultiLabelTable, build_table
from confed.data.options import Options
from confed.data.owners import with_owner
from confed.data.picture_files import NamedPictures, open_pictures
from confed.data.refusals import Distinct, existing, first_of, refuse
from confed.datasets.reader import Reading, reader, with_readable_pictures


@reader(
    "root partition * layout user_key clients alpha minimum validation test_share max_train fold_case unreadable check "
    "image_size seed",
    things="pictures", kind="labels", partition=Literal["user", "iid", "dirichlet", "label_skew"] | None,
    clients=10, validation=0.2, test_share=0.2, image_size=64,
)  # fmt: skip
def labelled_pictures(
    options: Options, layout: Layout = "lines", user_key: str = "user", fold_case: bool = False
) -> Reading:
    """Pictures of one's own, one client per user or shared out. Owners and test sets are the same for all seeds.

    Users who have no label on any picture are clients like others.

    Options:
        partition: "user", one client per user who has training pictures: the test pictures of the others are the place
            "newcomers", their validation pictures are left out. Equal random shares; or skewed by whole sets of
            labels, or by single labels (``alpha``). None: "user" where lines have users, otherwise "iid".
        layout: "lines" for ``labels.jsonl`` or ``labels.csv``, or what another tool has written below ``root``: "yolo",
            "roboflow" (COCO's objects beside each split's pictures), "coco" (one file of them), "cvat" (for images),
            "createml", "label_studio" (JSON), "voc" and "labelme" (a file per picture), "boxes", a table with a box per
            row, or "one_hot", one with a column of zeros and ones per label.
        user_key: what that file calls whose a picture is; pictures that are nobody's are left out by "user".
        validation: where no line is of the split "validation", the share of each client's pictures, those of its test
            aside, held out for it; chosen by the seed.
        test_share: where no line is of the split "test", the share of each client's pictures that are its test. One
            training picture stays in any case.
        fold_case: whether labels that differ in case alone are one, spelled as in ``labels.txt`` or as most are.

    Raises ``ValueError``: a file is missing or faulty, a line has no picture, another one's picture or an unknown split
    (names it), a label is not in ``labels.txt`` (the first few are listed, with their counts), there is no label at
    all, too many pictures cannot be read, or an option is out of range.
    """
    folder = options.folder
    listed = folder / "labels.txt"
    labels = listed_labels(listed) if listed.is_file() else None
    account = Account()
    if layout == "lines":
        records = _records(folder, user_key, account, fold_case, labels or ())
    else:
        records = layout_records(folder, layout, account, fold_case, labels or ())
        account.check_remains(len(records))
    has_users = any(record.user for record in records)
    chosen = options.partition or ("user" if has_users else "iid")
    if chosen == "user":
        if not has_users:
            refuse(labels_files(folder)[0], f"a {user_key} of pictures for the partition 'user'", found="none")
        records = with_owner(records, [record.user for record in records], user_key)
        account = account.keep([record.name for record in records], f"no {user_key}")
    # Identifiers are the keys here: a table puts the rows of a user together, and unreadable ones are left out of it.
    records_by_name = {record.name: record for record in records}
    # One table for all splits, of pictures alone: splits are dealt with here, and texts are for tagged_texts.
    owned = all(record.user.strip() for record in records)
    bare = (replace(record, split="", text="", user=record.user.strip() if owned else "") for record in records)
    whole = build_table(bare, labels)[""]
    if not whole.labels:
        refuse(labels_files(folder)[0], f"labels on some picture, or in {listed}", found="none")
    places = [folder / "images.tar", folder / "images"] if layout == "lines" else []
    if not places or any((folder / record.picture).is_file() for record in records):
        places.append(folder)
    source = first_of(places, "the pictures")
    table, pictures = with_readable_pictures(whole, source, options)
    account = account.keep(table.names, "picture cannot be read")
    roles = np.array([ROLES.get(records_by_name[name].split.casefold(), "train") for name in table.names], dtype=str)
    users = np.array([records_by_name[name].user.strip() for name in table.names], dtype=str)
    picture_table = open_pictures(source, table.pictures, options.image_size)
    together = _together(table, picture_table, records_by_name, roles, account)
    pool = Pool(
        Examples.labelled(table, pictures, np.arange(len(table))), roles, keys={"user": users} if owned else {},
        together=together, newcomers=("user",),
    )  # fmt: skip
    facts = {"origin": "pictures and labels of a folder", "partition": chosen, **table.facts()}
    left_out = "beyond max_train, or validation of no client that trains"
    return Reading(pool, account, left_out, facts, options=replace(options, partition=chosen))


def _together(
    table: MultiLabelTable,
    pictures: NamedPictures,
    records: Mapping[str, LabelRecord],
    roles: np.ndarray,
    account: Account,
) -> np.ndarray | None:
    """Group of each row, those of one picture, patient or document; None where each row stands for itself."""
    firsts = pictures.first_copies()
    note_copies(account, table.pictures, firsts)
    united = [records[name].united for name in table.names]
    groups = joined_groups((("picture", first), *names) for first, names in zip(firsts, united, strict=True))
    if (roles == "test").any():
        described = [" and ".join(names) or f"the picture {table.pictures[row]}" for row, names in enumerate(united)]
        warn_of_sides(groups, roles.tolist(), described)
    return groups if len(np.unique(groups)) < len(groups) else None


def _records(
    folder: Path, user_key: str, account: Account, fold_case: bool, labels: Sequence[str]
) -> list[LabelRecord]:
    """The lines, each with a picture of its own and a known split."""
    records, distinct, files = list[LabelRecord](), Distinct("image"), labels_files(folder)
    existing(files[0], "labelled_pictures reads labels.jsonl or labels.csv, and pictures")
    for file, told in zip(files, said_by_folders(folder, files), strict=True):
        prefix = f"{file.parent.name}/" if file.parent != folder else ""
        of_file = line_records(file, user=user_key, prefix=prefix, account=account, fold_case=fold_case, known=labels)
        for record in of_file:
            if not record.picture:
                refuse(record.where, "a picture's name as 'image'", found="none")
            picture = path_below(folder, file, record.picture)
            # A picture on two lines, which an id allows, could train and be tested on at once.
            distinct.add(str(PurePosixPath(picture)), file, record.row)
            split = record.split or told.get("split", "")
            role_of(split, record.where)
            user = record.user or told.get("client", "")
            records.append(replace(record, picture=picture, user=user, split=split))
    account.check_remains(len(records))
    return records

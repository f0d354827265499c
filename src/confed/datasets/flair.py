"""FLAIR (Song et al., NeurIPS 2022): photographs of 51,414 Flickr users, with 17 coarse and 1,628 fine labels.

Below ``root``: ``labels_and_metadata.json`` with the pictures in ``small_images/`` or ``small_images.tar``, or one HDF5
file; and ``label_relationship.txt`` for the fine labels. Users are clients. Those of the official splits "val" and
"test" do not train: they are the places "validation" and "test".
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal
from zlib import crc32

import numpy as np

from confed.data.examples import Examples, FederatedDataset, Split
from confed.data.federate import cap
from confed.data.intake.account import Account, account_facts
from confed.data.intake.walk import visible
from confed.data.lazy import Lazy
from confed.data.ml_files.flair import (
    FLAIR_LABELS,
    flair_fine_labels,
    flair_hdf5_records,
    flair_records,
    flair_relationship,
)
from confed.data.ml_files.records import LabelRecord
from confed.data.ml_files.table import MultiLabelTable, build_table
from confed.data.options import Options
from confed.data.partitions import hold_out
from confed.data.picture_files import NamedPictures
from confed.data.refusals import refuse
from confed.datasets.reader import reader, with_readable_pictures

_METADATA, _RELATIONSHIP, _PICTURES = "labels_and_metadata.json", "label_relationship.txt", "small_images"
_ENDINGS = (".hdf5", ".h5")
_FACTS = {
    "origin": "FLAIR (Song, Granqvist and Talwar): photographs of Flickr users, one client each",
    "licence": "annotations: CC BY-NC 4.0; every picture keeps its own Flickr licence",
    "citation": 'C. Song, F. Granqvist, K. Talwar, "FLAIR: federated learning annotated image repository", NeurIPS '
    "2022",
}


@reader(
    "root * level validation max_train unreadable check image_size seed",
    things="pictures", kind="labels", image_size=256,
)  # fmt: skip
def flair(options: Options, level: Literal["coarse", "fine"] = "coarse") -> FederatedDataset:
    """One client per training user; splits are made when a client is asked for.

    Users who have no label on any picture are clients like others. Clients have no test pictures: as published, tests
    are about other people's pictures.

    Options:
        level: 17 coarse labels, or the 1,628 fine ones, each with its coarse one.
        validation: share of each training user's pictures held out for validation, rounded, so that users with few
            have none; chosen by the seed. Published results train on all and look at the place "validation".
        max_train: most training pictures per user, chosen by the seed (FLAIR's benchmark: 512).
        unreadable: share of the pictures of a split that may be left out because they cannot be read.
        check: as for :func:`confed.datasets.coco_labels.coco`.
        image_size: side of the pictures in pixels.
        seed: see ``validation`` and ``max_train``.

    Raises ``ValueError``: a file is missing or faulty, a label is outside the ontology (the first few are listed), too
    many pictures cannot be read, no client has training examples, or an option is out of range.
    """
    folder = options.folder
    coarse = flair_relationship(folder / _RELATIONSHIP) if level == "fine" else {}
    labels = flair_fine_labels(folder / _RELATIONSHIP) if level == "fine" else FLAIR_LABELS
    records, source = _sources(folder)
    account = Account()
    tables = build_table(_counted(records, account), labels, level="fine" if level == "fine" else "labels")
    if "train" not in tables:
        refuse("flair", f"users of the partition train in {folder}", found=", ".join(tables))
    readable = {split: with_readable_pictures(table, source, options) for split, table in tables.items()}
    table, pictures = readable["train"]
    users = _Users(table, pictures, options)
    places: dict[str, Examples] = {}
    facts = {**_FACTS, **table.facts()}
    for split, place in (("val", "validation"), ("test", "test")):
        if split in readable:
            other, shown = readable[split]
            places[place] = Examples.labelled(other, shown, np.arange(len(other)))
            facts |= {f"{place}: {key}": value for key, value in other.facts().items()}
    rows = table.of_users()
    clients = Lazy(rows, lambda user: users.split(user, rows[user]), users.sizes)
    lost: dict[str, str] = {}
    for split, before in tables.items():
        if len(before) > len(readable[split][0]):
            lost |= dict.fromkeys({*before.names} - {*readable[split][0].names}, "picture cannot be read")
    if options.max_train is not None:
        dealt: set[str] = set()
        for client in clients.values():
            dealt.update(*(examples.names for examples in client.roles.values()))
        lost |= dict.fromkeys({*table.names} - dealt, "beyond max_train")
    _leave(folder, lost, account)
    facts |= account_facts(account)
    return FederatedDataset("flair", labels, clients, places, facts=facts, coarse=coarse, account=account)


def _counted(records: Iterable[LabelRecord], account: Account) -> Iterator[LabelRecord]:
    for record in records:
        account.rows[str(record.file)] = account.rows.get(str(record.file), 0) + 1
        yield record


def _leave(folder: Path, lost: Mapping[str, str], account: Account) -> None:
    """Notes pictures that are left out, and why; rows of pictures are not kept, so that the files are read again."""
    account.counted = sum(account.rows.values()) - len(lost)
    for record in _sources(folder)[0] if lost else ():
        if record.name in lost:
            account.leave(lost[record.name], record.where)


def flair_fine_names(root: Path | str) -> dict[str, tuple[str, ...]]:
    """Every coarse label's fine names, the most frequent on training pictures first, for text embeddings.

    Names without any training picture come last; equally frequent ones are in alphabetical order. FedLGT's released
    code counts the pictures of validation and test users too.
    """
    folder = Path(root)
    relationship = flair_relationship(folder / _RELATIONSHIP)
    records, _ = _sources(folder)
    training = (set(record.fine) for record in records if record.split == "train")
    counts = Counter(chain.from_iterable(training))
    names: dict[str, list[str]] = {label: [] for label in FLAIR_LABELS}
    for fine in sorted(relationship, key=lambda name: (-counts[name], name)):
        names[relationship[fine]].append(fine)
    lacking = [label for label, its in names.items() if not its]
    if lacking:
        refuse(folder / _RELATIONSHIP, f"a fine label of {lacking[0]!r}", found="none")
    return {label: tuple(its) for label, its in names.items()}


@dataclass(frozen=True)
class _Users:
    """Rows of a training user's split."""

    table: MultiLabelTable
    pictures: NamedPictures | np.ndarray
    options: Options

    @property
    def sizes(self) -> np.ndarray:
        """Training pictures of every user, int64, shape (U,), as :meth:`split` deals them."""
        n, most = self.table.sizes, self.options.max_train
        # The count of confed.data.partitions.hold_out.
        held = np.minimum(np.rint(self.options.validation * n).astype(np.int64), np.maximum(n - 1, 0))
        return n - held if most is None else np.minimum(n - held, most)

    def split(self, user: str, rows: np.ndarray) -> Split:
        """A function of the user's name, its rows and the options alone."""
        seed, name = self.options.seed, crc32(user.encode())
        held = np.zeros(len(rows), dtype=bool)
        if self.options.validation:
            held = hold_out(rows, self.options.validation, np.random.default_rng([0, seed, name]))
        training_rows = cap(rows[~held], self.options.max_train, np.random.default_rng([1, seed, name]))
        parts = (training_rows, rows[held], rows[:0])
        return Split(*(Examples.labelled(self.table, self.pictures, part_rows) for part_rows in parts))


def _sources(root: Path) -> tuple[Iterator[LabelRecord], Path]:
    """All records, and where their pictures lie."""
    if (root / _METADATA).is_file():
        packed = root / f"{_PICTURES}.tar"
        return flair_records(root / _METADATA), packed if packed.is_file() else root / _PICTURES
    packed = visible(root, *_ENDINGS) if root.is_dir() else [root]
    if len(packed) != 1 or packed[0].suffix not in _ENDINGS:
        refuse(root, f"{_METADATA} and {_PICTURES}, or one HDF5 file", found=f"{len(packed)} files")
    return flair_hdf5_records(packed[0]), packed[0]

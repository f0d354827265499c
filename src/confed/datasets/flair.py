"""FLAIR (Song et al., NeurIPS 2022): photographs of 51,414 Flickr users, with 17 coarse and 1,628 fine labels.

Below ``root``: ``labels_and_metadata.json`` with the pictures in ``small_images/`` or ``small_images.tar``, or one HDF5
file; and ``label_relationship.txt`` for the fine labels. Users are clients. Those of the official splits "val" and
"test" do not train: they are the places "validation" and "test".

Understood are the metadata file with a folder of pictures, and the HDF5 files that the published scripts make of
them: grouped by user, with labels as joined texts (FLAIR's own) or as index pairs (pfl-research's), or not grouped.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

import numpy as np

from confed.data.bounded_files import hdf5_array
from confed.data.examples import Examples, FederatedDataset, Split
from confed.data.federate import cap
from confed.data.intake.account import Account, account_facts
from confed.data.intake.stream import json_items
from confed.data.intake.walk import visible
from confed.data.lazy import Lazy
from confed.data.ml_files.records import LabelRecord
from confed.data.ml_files.table import MultiLabelTable, build_table
from confed.data.options import Options
from confed.data.partitions import hold_out
from confed.data.picture_files import NamedPictures
from confed.data.refusals import Distinct, existing, expecting, library, refuse
from confed.data.vl_files.records import rows_of
from confed.datasets.reader import reader, with_readable_pictures

FLAIR_LABELS = (
    "animal", "art", "celebration", "equipment", "fire", "food", "games", "interior_room", "light", "liquid",
    "material", "music", "outdoor", "plant", "recreation", "religion", "structure",
)  # fmt: skip
"""The 17 coarse labels in alphabetical order, as pfl-research numbers them; FedLGT numbers them by first occurrence."""

_SPLITS = ("train", "val", "test")


def flair_records(file: Path) -> Iterator[LabelRecord]:
    """All pictures of the metadata file in its order, read value by value."""
    home = dict[str, str]()
    for entry in rows_of(file, json_items(file), "image_id"):
        image, user, split = (entry.text(key) for key in ("image_id", "user_id", "partition"))
        _check_home(home, user, split, entry.where)
        labels, fine = (tuple(entry.texts(key)) for key in ("labels", "fine_grained_labels"))
        yield LabelRecord(file, entry.row, image, labels, fine, f"{image}.jpg", user=user, split=split)


def flair_relationship(file: Path) -> dict[str, str]:
    """Every fine label's coarse one, from ``label_relationship.txt``: "fine -> coarse" a line."""
    existing(file)
    coarse_of: dict[str, str] = {}
    for number, line in enumerate(file.read_text(encoding="utf-8-sig", errors="replace").splitlines(), start=1):
        if not line.strip():
            continue
        # An arrow alone divides: names may have commas and brackets.
        halves = line.split("->") if "->" in line else re.split(r"[\t,]", line.strip().strip("()"))
        parts = [half.strip(" '\"\t") for half in halves]
        if len(parts) != 2 or not all(parts):
            refuse(f"{file}, row {number}", "'fine label -> coarse label'", line)
        fine, coarse = parts
        if coarse not in FLAIR_LABELS:
            refuse(f"{file}, row {number}", "one of the 17 coarse labels", coarse)
        if coarse_of.setdefault(fine, coarse) != coarse:
            refuse(f"{file}, row {number}", f"{coarse_of[fine]!r}, as before, for {fine!r}", coarse)
    return coarse_of


def flair_fine_labels(file: Path) -> tuple[str, ...]:
    """The fine labels of ``label_relationship.txt`` in alphabetical order."""
    return tuple(sorted(flair_relationship(file)))


def flair_hdf5_records(file: Path) -> Iterator[LabelRecord]:
    """All pictures of an HDF5 file, user by user; labels are read, pictures are not."""
    h5py = library("h5py", existing(file), "data")
    distinct, home, row = Distinct("image_id"), dict[str, str](), 1
    try:
        with h5py.File(file, "r") as content:
            mappings = _mappings(content, file)
            splits = [split for split in _SPLITS if split in content]
            if not splits:
                refuse(file, f"the groups {', '.join(_SPLITS)}", found=", ".join(content))
            for split in splits:
                for key in content[split]:
                    where = f"{file}, /{split}/{key}"
                    for image, user, picture, labels, fine in _group(content[split][key], key, split, where, mappings):
                        distinct.add(image, file, row)
                        _check_home(home, user, split, where)
                        yield LabelRecord(file, row, image, labels, fine, picture, user=user, split=split)
                        row += 1
    except (OSError, KeyError, RuntimeError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: expected a complete HDF5 file of FLAIR, got: {error}") from error


_Labels = tuple[str, ...]


def _group(
    group: Any, key: str, split: str, where: str, mappings: dict[str, list[str]]
) -> Iterator[tuple[str, str, str, _Labels, _Labels]]:
    """Picture's id, user, key of its pixels, labels and fine labels, of each picture of a group."""
    if "image" in group:
        coarse, fine = (_joined(hdf5_array(group, level, where)[()]) for level in ("labels", "fine_grained_labels"))
        yield key, _decoded(hdf5_array(group, "user_id", where)[()]), f"{split}/{key}/image", coarse, fine
        return
    if "images" not in group or "image_ids" not in group:
        refuse(where, "images and image_ids", found=", ".join(group))
    names = [_decoded(name) for name in hdf5_array(group, "image_ids", where)[()]]
    if len(group["images"]) != len(names):
        refuse(where, "as many pictures as names", found=f"{len(group['images'])} and {len(names)}")
    levels = [_level(group, level, len(names), where, mappings) for level in ("labels", "fine_grained_labels")]
    for number, name in enumerate(names):
        yield name, key, f"{split}/{key}/images#{number}", levels[0][number], levels[1][number]


def _level(group: Any, level: str, count: int, where: str, mappings: dict[str, list[str]]) -> list[_Labels]:
    if level in group:
        labels = [_joined(value) for value in hdf5_array(group, level, where)[()]]
        if len(labels) != count:
            refuse(where, f"the {level} of {count} pictures", found=f"those of {len(labels)}")
        return labels
    if f"{level}_row" not in group or f"{level}_col" not in group or level not in mappings:
        refuse(where, f"{level}, or {level}_row, {level}_col and their names under /metadata", found=", ".join(group))
    labels_of_picture, names = [list[str]() for _ in range(count)], mappings[level]
    rows, columns = (
        hdf5_array(group, f"{level}_row", where)[()].tolist(),
        hdf5_array(group, f"{level}_col", where)[()].tolist(),
    )
    inside = all(0 <= row < count for row in rows) and all(0 <= column < len(names) for column in columns)
    if len(rows) != len(columns) or not inside:
        refuse(where, f"{level} of {count} pictures and {len(names)} labels", found="others")
    for row, column in zip(rows, columns, strict=True):
        labels_of_picture[row].append(names[column])
    return [tuple(labels) for labels in labels_of_picture]


def _mappings(content: Any, file: Path) -> dict[str, list[str]]:
    """The names behind label indices, where the file has them."""
    mappings: dict[str, list[str]] = {}
    metadata = content.get("metadata", {})
    for level, key in (("labels", "label_mapping"), ("fine_grained_labels", "fine_grained_label_mapping")):
        if key in metadata:
            with expecting(f"{file}, /metadata/{key}", "JSON text", ValueError):
                mapping = json.loads(metadata[key][()])
            # Files that are not grouped by user hold counts under this name, and need no mapping.
            if isinstance(mapping, dict) and {*map(str, mapping.values())} == {*map(str, range(len(mapping)))}:
                mappings[level] = sorted(mapping, key=lambda name, ids=mapping: ids[name])
    return mappings


def _joined(value: Any) -> _Labels:
    joined = _decoded(value)
    return tuple(joined.split("|")) if joined else ()


def _decoded(value: Any) -> str:
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)


def _check_home(home: dict[str, str], user: str, split: str, where: str) -> None:
    if split not in _SPLITS:
        refuse(where, "the partition train, val or test", split)
    if home.setdefault(user, split) != split:
        refuse(where, f"the partition {home[user]}, as before, for the user {user}", found=split)


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
    account.counted = sum(account.rows.values()) - len(lost)
    for record in _sources(folder)[0] if lost else ():
        if record.name in lost:
            account.leave(lost[record.name], record.where)
    facts |= account_facts(account)
    return FederatedDataset("flair", labels, clients, places, facts=facts, coarse=coarse, account=account)


def _counted(records: Iterable[LabelRecord], account: Account) -> Iterator[LabelRecord]:
    for record in records:
        account.count(record.file)
        yield record


def flair_fine_names(root: Path | str) -> dict[str, tuple[str, ...]]:
    """Every coarse label's fine names, the most frequent on training pictures first, for text embeddings."""
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

"""Data sets of the Hugging Face hub, or of the library ``datasets`` in a folder, as conversations about pictures.

Columns are mapped in the recipe, such as ``data.columns = {image = "img", question = "query", answer = "label"}``; what
is not mapped is found under its own name. Understood are the columns of :mod:`confed.data.chat_files`: ``question``
with ``answer`` or ``answers``, ``messages``, ``conversations``, or ``prompt`` and ``completion``; ``image`` or
``images``; ``system``, ``id``, ``client``, ``place`` and ``type``.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from confed.data.bounded_files import most_array_bytes
from confed.data.chat_federate import ChatOptions, Partition, share_conversations
from confed.data.chat_files import ChatRecord, as_list, records_of
from confed.data.examples import FederatedDataset
from confed.data.intake.account import Account
from confed.data.intake.opening import read_picture
from confed.data.intake.tables import COLUMNS, check_columns, check_header
from confed.data.intake.values import find_file
from confed.data.intake.walk import ROLES
from confed.data.ml_files.integrity import check_share
from confed.data.pictures import empty_table, resize
from confed.data.refusals import check_distinct, expecting, library, refuse
from confed.data.tables import Tables, undecoded
from confed.datasets.reader import reader
from confed.federation.ranges import AT_LEAST_ONE

_LAYOUTS = "columns image, question and answer, or messages, conversations, or prompt and completion"


@reader(
    "source partition * revision config columns question splits most clients alpha skew unseen validation test_share "
    "max_train max_test turns fold_case image_size unreadable seed",
    things="examples", partition=Partition | None,
)  # fmt: skip
def hub(
    how: ChatOptions,
    source: str | Tables,
    revision: str = "",
    config: str = "",
    splits: Sequence[str] = (),
    most: Annotated[int, AT_LEAST_ONE] = 20_000,
) -> FederatedDataset:
    """A data set of the hub shared out among clients. Owners and test sets are the same for all seeds.

    Rows of splits called train, validation (or val) and test have these roles. Pictures are kept in memory, three bytes
    a pixel, equal ones once.

    Options:
        source: a name on the hub (owner/name), or a folder: written by ``save_to_disk``, or one that ``load_dataset``
            reads; in Python also a table of the session, whose pictures may be paths anywhere.
        partition: one client per "client", "place" or "type", or per "cluster" of pictures that look alike; equal
            random shares; "dirichlet", skewed by ``skew``; or "quantity", of different sizes. None: "client" where
            rows have one, otherwise "iid".
        revision: commit, tag or branch of the name on the hub.
        config: name of a configuration, where there are several.
        columns: what a column is here -> its name in the data set.
        splits: which splits are read; default: all.
        most: most rows that are read of each split, drawn at random from all of it.

    Raises ``ValueError``: the library is not installed, the data set cannot be read, a column or a split is not there,
    a row is faulty (names it), too many pictures cannot be read, or an option is out of range.
    """
    session = isinstance(source, Tables)
    name = source.name if isinstance(source, Tables) else source
    local = Path(name).resolve() if Path(name).is_dir() else None
    folder = Path.cwd() if session else local
    table = PictureTable(how.image_size, folder, session)
    mapped = dict(how.columns or {})
    check_columns(mapped)
    records, account = list[ChatRecord](), Account()
    for split, rows in _splits(source, revision, config, splits).items():
        of_split = _entries(rows, f"{name}, split {split!r}", mapped, most, table, how.question, account)
        role = split if split.casefold() in ROLES else "train"
        for record in records_of(of_split, how.question, split, account, how.fold_case):
            records.append(replace(record, columns={"split": role, **record.columns}))
    records = table.readable(records, f"of {name}", how.unreadable, account)
    facts = {"origin": name + (f" at {revision}" if revision else "")}
    return share_conversations("hub", records, table.pictures(), table.index, how, facts, account)


@dataclass
class PictureTable:
    """Pictures by the hash of their bytes, each decoded once."""

    side: int
    folder: Path | None = None
    anywhere: bool = False
    index: dict[str, int] = field(default_factory=dict[str, int])
    rows: list[np.ndarray] = field(default_factory=list[np.ndarray])

    def _read(self, path: str) -> bytes | None:
        """A picture's file below the folder, of at most as many bytes as an array may have; else None."""
        if self.folder is None:
            return None
        try:
            place = (self.folder / path).resolve()
            if not place.is_file() and (other := find_file((self.folder,), path)) is not None:
                place = other.resolve()
            inside = (self.anywhere or place.is_relative_to(self.folder)) and place.is_file()
            return place.read_bytes() if inside and place.stat().st_size <= most_array_bytes() else None
        except OSError:
            return None

    def add(self, picture: Any, where: str) -> str:
        """The picture's name in the table."""
        content = picture.get("bytes") if isinstance(picture, dict) else picture
        content = content if isinstance(content, bytes) else None
        path = picture.get("path") if isinstance(picture, dict) else picture
        if content is None and isinstance(path, str) and path:
            content = self._read(path) or path.encode()  # which cannot be decoded, and is counted with those
        if not isinstance(content, bytes):
            refuse(where, "a picture", picture)
        name = sha256(content).hexdigest()
        if name not in self.index:
            try:
                self.rows.append(resize(read_picture(content, name=where), self.side))
                self.index[name] = len(self.rows) - 1
            except ValueError:
                self.index[name] = -1
        return name

    def readable(self, records: Sequence[ChatRecord], where: str, at_most: float, account: Account) -> list[ChatRecord]:
        """Conversations without those whose pictures cannot be read, which are counted; too many are an error."""
        lost = {picture for picture, row in self.index.items() if row < 0}
        left = [record for record in records if lost & set(record.pictures)]
        for record in left:
            account.leave("picture cannot be read", record.where)
        if lost:
            text = check_share(len(lost), len(self.index), where, at_most)
            warnings.warn(f"{text} with {len(left)} conversations", stacklevel=3)
        return [record for record in records if not lost & set(record.pictures)]

    def pictures(self) -> np.ndarray:
        """All pictures, uint8 (M, S, S, 3)."""
        table = empty_table(len(self.rows), self.side)
        for row, picture in enumerate(self.rows):
            table[row] = picture
        return table


def _splits(source: str | Tables, revision: str, config: str, wanted: Sequence[str]) -> dict[str, Any]:
    """Split -> its rows, pictures not decoded."""
    name = source.name if isinstance(source, Tables) else source
    splits = dict(source.splits) if isinstance(source, Tables) else _loaded(source, revision, config)
    check_distinct(f"data.splits of {name!r}", wanted, splits)
    return {split: undecoded(rows) for split, rows in splits.items() if not wanted or split in wanted}


def _loaded(source: str, revision: str, config: str) -> dict[str, Any]:
    """The splits of a data set of the hub or of a folder."""
    hub_library = library("datasets", "the dataset 'hub'", "hub")
    folder = Path(source).expanduser()
    written = any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))
    faults = (OSError, ValueError, KeyError, RuntimeError, hub_library.exceptions.DatasetsError)
    with expecting(repr(source), "a data set that can be read", *faults, remedy="is it there?"):
        if written:
            loaded = hub_library.load_from_disk(str(folder))
        else:
            name = str(folder) if folder.is_dir() else source
            loaded = hub_library.load_dataset(name, config or None, revision=revision or None)
    return dict(loaded) if isinstance(loaded, dict) else {"train": loaded}


def _entries(
    rows: Any, where: str, mapped: Mapping[str, str], most: int, table: PictureTable, question: str, account: Account
) -> list[tuple[str, dict[str, Any]]]:
    """Rows of a split with their pictures in the table; beyond ``most`` they are drawn from the whole split."""
    column_names = rows.column_names
    check_header(where, mapped.values(), column_names)
    by_column = table.anywhere or "split" in mapped  # otherwise rows have the role of their split
    columns_read = [key for key in COLUMNS if key != "split" or by_column]
    names = {key: mapped.get(key, key) for key in columns_read if mapped.get(key, key) in column_names}
    if not question and not {"question", "messages", "conversations", "prompt"} & set(names):
        remedy = f"name them in data.columns, such as {{question = {column_names[0]!r}}}"
        refuse(where, _LAYOUTS, found=", ".join(column_names), remedy=remedy)
    labels = {key: getattr(rows.features[name], "int2str", None) for key, name in names.items()}
    account.rows[where] = len(rows)
    chosen = range(len(rows)) if len(rows) <= most else np.random.default_rng(0).permutation(len(rows))[:most]
    drawn = set(map(int, chosen))
    entries: list[tuple[str, dict[str, Any]]] = []
    for number in range(len(rows)):
        place = f"{where}, row {number + 1}"
        if number not in drawn:
            account.leave(f"beyond data.most = {most}, drawn at random", place)
            continue
        row = rows[number]
        entry = {key: row[name] for key, name in names.items() if row[name] is not None}
        for key, as_text in labels.items():  # numbers of classes stand for their names
            if as_text is not None and isinstance(entry.get(key), int):
                entry[key] = as_text(entry[key])
        shown = entry.pop("images", None) or entry.pop("image", None)
        entry.pop("image", None)
        entry["images"] = [table.add(picture, place) for picture in as_list(shown)]
        entries.append((place, entry))
    return entries

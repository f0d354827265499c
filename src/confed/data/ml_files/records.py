"""Records of multi-label pictures and texts, and their JSON-lines layout."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from confed.data.intake.account import Account, Blank
from confed.data.intake.identity import united_by
from confed.data.intake.tables import read_cells, read_jsonl
from confed.data.intake.values import Spellings, plain_path, plain_text
from confed.data.intake.walk import visible
from confed.data.owners import owner_text
from confed.data.refusals import Distinct, check_inside, read_text, refuse
from confed.data.vl_files.records import InFile, Row


@dataclass(frozen=True, slots=True)
class LabelRecord(InFile):
    """A picture, a text, or both, with their labels.

    Attributes:
        name: identifier, distinct within the dataset.
        labels: names of the labels that are present; may be empty.
        fine: names of finer labels, where the dataset has two levels.
        picture: a path below the dataset's folder of pictures; in an HDF5 file the array's key, and behind "#" the row
            where it holds several; empty if there is none.
        text: empty if there is none.
        user: whose it is; empty if the dataset has no users.
        split: empty if the file has no splits.
        united: patient and document, as far as the file names them.
    """

    name: str
    labels: tuple[str, ...]
    fine: tuple[str, ...] = ()
    picture: str = ""
    text: str = ""
    user: str = ""
    split: str = ""
    united: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.picture:
            check_inside(self.picture, self)
        elif not self.text:
            refuse(self.where, "a picture or a text", found="neither")
        for label in (*self.labels, *self.fine):
            if not label.strip():
                refuse(self.where, "the names of labels", found="an empty one")


def labels_files(folder: Path) -> list[Path]:
    """A folder's file of labels, JSON lines or a table; else those in the folders in it; else where it would be."""
    names = ("labels.jsonl", "labels.csv", "labels.tsv")
    files: list[Path] = []
    inside = [place for place in visible(folder) if place.is_dir()] if folder.is_dir() else []
    for place in [folder, *inside]:
        files += [place / name for name in names if (place / name).is_file()][:1]
        if files and place == folder:
            break
    return files or [folder / names[0]]


def label_rows(file: Path, strict: bool = True) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a file of labels; in a table semicolons, bars or commas stand between several labels of a cell."""
    if file.suffix.lower() not in (".csv", ".tsv"):
        yield from read_jsonl(file, strict=strict)
        return
    for row, entry in read_cells(file)[0]:
        yield row, {**entry, "labels": re.split(r"[;|,]", entry["labels"])} if "labels" in entry else entry


def line_records(
    file: Path,
    *,
    user: str = "user",
    prefix: str = "",
    account: Account | None = None,
    fold_case: bool = False,
    known: Sequence[str] = (),
) -> Iterator[LabelRecord]:
    """Rows of a JSON-lines file or a table, for multi-label pictures and for multi-label texts.

    One object a line, or a row of a table (:func:`label_rows`): ``labels``, a list of names that may be empty, and
    ``image`` (a picture's path below the folder of pictures), ``text``, or both. Optional: ``id`` (text; by default the
    picture's name, or the line's number from 0), ``fine_labels`` (list), ``user`` (text or number) and ``split``
    (text). Other keys are left alone.
    With an account rows whose labels are missing or blank are left out and counted; an empty list is no label at all.

    Raises ``ValueError``: a missing or cut-off file, a faulty line, or an identifier twice (the message names file and
    row).
    """
    distinct = Distinct("id")
    entries: Iterable[tuple[int, dict[str, Any]]] = label_rows(file, strict=account is None)
    spelled: Spellings | None = None
    if account is not None:
        entries = [*entries]
        account.rows[str(file)] = len(entries)
        given = [entry["labels"] for _, entry in entries if isinstance(entry.get("labels"), list | dict)]
        texts_given = (label for label in chain.from_iterable(given) if plain_text(label) is not None)
        spelled = Spellings("labels", texts_given, fold_case, known)
        account.note_encoding(file)
        account.note(*spelled.notes)
    place = str(file)
    for number, given in entries:
        row, where = Row(file, number, given), f"{place}, row {number}"
        try:
            labels = tuple(row.texts("labels")) if spelled is None else _labels(given, where, spelled)
        except Blank as blank:
            assert account is not None
            account.leave(str(blank), where)
            continue
        picture, words = plain_path(row.optional("image")), row.optional("text")
        key = row.optional("id") or picture or str(number - 1)
        distinct.add(key, file, number)
        if account is not None:
            account.used[f"{prefix}{key}"] = where
        fine = tuple(row.texts("fine_labels")) if "fine_labels" in given else ()
        owner = owner_text(given, user, where) if user else ""
        yield LabelRecord(
            file, number, f"{prefix}{key}", labels, fine, picture, words, owner, row.optional("split"), united_by(given)
        )


def _labels(entry: dict[str, Any], where: str, spelled: Spellings) -> tuple[str, ...]:
    """The labels of a row, each once and without blank ones, in their normal form."""
    given = entry.get("labels")
    if isinstance(given, dict) and all(isinstance(value, bool | int | float) for value in given.values()):
        given = [label for label, value in given.items() if value > 0]
    if not isinstance(given, list) and plain_text(given) == "":
        raise Blank("no labels")
    if not isinstance(given, list) or any(plain_text(label) is None for label in given):
        refuse(where, "a list of texts as 'labels'", given, remedy="write them as [...]")
    labels = tuple(dict.fromkeys(filter(None, (spelled[label] for label in given))))
    if given and not labels:
        raise Blank("blank labels")
    return labels


def listed_labels(file: Path) -> tuple[str, ...]:
    """The names of labels in a text file with one a line, in their order; empty lines are left out."""
    lines = read_text(file).splitlines()
    labels = tuple(filter(None, map(plain_text, lines)))
    if not labels:
        refuse(file, "one label a line", found="none")
    return labels

"""Records of multi-label pictures and texts, and their JSON-lines layout."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from confed.data.owners import owner_text
from confed.data.record_files import read_jsonl
from confed.data.vl_files.records import Distinct, text, texts


@dataclass(frozen=True, slots=True)
class LabelRecord:
    """A picture, a text, or both, with their labels.

    Attributes:
        row: its row there, from 0.
        name: identifier, distinct within the dataset.
        labels: names of the labels that are present; may be empty.
        fine: names of finer labels, where the dataset has two levels.
        picture: a path below the dataset's folder of pictures; in an HDF5 file the array's key, and behind "#" the row
            where it holds several; empty if there is none.
        text: empty if there is none.
        user: whose it is; empty if the dataset has no users.
        split: empty if the file has no splits.
    """

    file: Path
    row: int
    name: str
    labels: tuple[str, ...]
    fine: tuple[str, ...] = ()
    picture: str = ""
    text: str = ""
    user: str = ""
    split: str = ""

    def __post_init__(self) -> None:
        # A name without a folder, which most have, is checked without parsing it: there are hundreds of thousands.
        if self.picture in (".", "..") or ("/" in self.picture and not _stays_inside(PurePosixPath(self.picture))):
            raise ValueError(
                f"{self.where}: expected a picture's name, without a way out of its folder, got {self.picture!r}"
            )
        if not self.picture and not self.text:
            raise ValueError(f"{self.where}: expected a picture or a text, got neither")
        for label in (*self.labels, *self.fine):
            if not label.strip():
                raise ValueError(f"{self.where}: expected the names of labels, got an empty one")

    @property
    def where(self) -> str:
        """File and row, for messages."""
        return f"{self.file}, row {self.row}"


def _stays_inside(path: PurePosixPath) -> bool:
    return not path.is_absolute() and ".." not in path.parts and bool(path.name)


def optional_text(entry: dict[str, Any], key: str, file: Path, row: int) -> str:
    """A text that may be missing.

    Raises ``ValueError``: the value under this key is no text (the message names file, row and key).
    """
    return text(entry, key, file, row) if entry.get(key) not in (None, "") else ""


def line_records(file: Path, *, user: str = "user", prefix: str = "") -> Iterator[LabelRecord]:
    """Rows of a JSON-lines file, for multi-label pictures and for multi-label texts.

    One object a line: ``labels``, a list of names that may be empty, and ``image`` (a picture's path below the
    folder of pictures), ``text``, or both. Optional: ``id`` (text; by default the picture's name, or the line's
    number), ``fine_labels`` (list), ``user`` (text or number) and ``split`` (text). Other keys are left alone.

    Raises ``ValueError``: a missing or cut-off file, a faulty line, or an identifier twice (the message names file and
    row).
    """
    distinct = Distinct("id")
    for row, entry in read_jsonl(file):
        picture, words = optional_text(entry, "image", file, row), optional_text(entry, "text", file, row)
        key = optional_text(entry, "id", file, row) or picture or str(row)
        distinct.add(key, file, row)
        yield LabelRecord(
            file,
            row,
            f"{prefix}{key}",
            tuple(texts(entry, "labels", file, row)),
            tuple(texts(entry, "fine_labels", file, row)) if "fine_labels" in entry else (),
            picture,
            words,
            owner_text(entry, user, f"{file}, row {row}: ") if user else "",
            optional_text(entry, "split", file, row),
        )


def listed_labels(file: Path) -> tuple[str, ...]:
    """The names of labels in a text file with one a line, in their order; empty lines are left out."""
    if not file.is_file():
        raise ValueError(f"the file {file} does not exist")
    try:
        # Editors that mark a file as UTF-8 must not make the mark a part of the first label.
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: expected UTF-8 text, got: {error}") from error
    labels = tuple(line.strip() for line in lines if line.strip())
    if not labels:
        raise ValueError(f"{file}: expected one label a line, got none")
    return labels

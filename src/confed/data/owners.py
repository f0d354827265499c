"""Columns that say whose an example is: which look like one, what their cells mean, and what is to be said of them."""

import math
import re
import unicodedata
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from confed.data.refusals import refuse

Row = TypeVar("Row")

OWNER_NAMES = (
    "client", "hospital", "site", "clinic", "center", "centre", "institution", "organisation", "organization",
    "company", "department", "ward", "branch", "station", "school", "sender", "owner", "user", "author", "customer",
    "patient", "subject", "participant", "person", "writer", "speaker", "photographer", "device",
)  # fmt: skip
"""What columns of owners are called, the likelier first; with "id", "name" or "code" behind it too."""
_OTHER_IDS = ("image", "picture", "photo", "file", "question", "answer", "example", "sample", "row", "record", "item",
              "category", "class", "label", "type", "annotation", "caption", "conversation", "message")  # fmt: skip


def is_owner_column(name: str) -> bool:
    """Whether a column is called as one that says whose rows are: "hospital", "SenderID", "group_id"."""
    words = _owner_words(name)
    stem = "_".join(words[:-1] if words[-1:] in (["id"], ["name"], ["code"]) else words)
    return stem in OWNER_NAMES or (words[-1:] == ["id"] and len(words) > 1 and stem not in _OTHER_IDS)


def by_likelihood(names: Iterable[str]) -> list[str]:
    """Those of some columns that are called like owners, the likeliest first."""
    places = {name: place for place, name in enumerate(OWNER_NAMES)}
    return sorted(filter(is_owner_column, names), key=lambda name: places.get(_owner_words(name)[0], len(places)))


def _owner_words(name: str) -> list[str]:
    return re.sub(r"(?<=[a-z])(?=[A-Z])|[_-]", " ", name).casefold().split() or [name]


def owner_text(entry: Mapping[str, Any], key: str, where: str = "") -> str:
    """The text of an owner's cell, as it stands there; empty for what other tools write into blank cells."""
    value = entry.get(key)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if not isinstance(value, str | int | float):
        refuse(where or "a row", f"a text as {key!r}", value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value if value.isascii() else unicodedata.normalize("NFC", value)
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def says_owners(cells: Sequence[str]) -> bool:
    """Whether cells may say whose rows are: several names that come again, and not one in each row."""
    counts = Counter(filter(None, map(str.strip, cells)))
    return 1 < len(counts) <= counts.total() / 2


def notes_on_owners(cells: Sequence[str], what: str) -> list[str]:
    """What is to be said of a column of owners: blank cells, blanks around names, names that are nearly equal."""
    counts = Counter(cell.strip() for cell in cells)
    notes = [f"{counts['']} of {len(cells)} rows have no {what} and are left out"] if counts[""] else []
    padded = Counter(cell.strip() for cell in cells if cell.strip() and cell != cell.strip())
    if padded:
        name = next(iter(padded))
        notes.append(f"{padded.total()} rows have blanks around their {what}, such as {name!r}, which are not counted")
    alike: dict[str, list[str]] = {}
    for name in sorted(filter(None, counts)):
        letters = filter(str.isalnum, unicodedata.normalize("NFKC", name).casefold())
        alike.setdefault("".join(letters) or name, []).append(name)
    for names in alike.values():
        if len(names) > 1:
            listed = ", ".join(f"{name!r} ({counts[name]})" for name in names)
            notes.append(f"nearly equal names are different clients: {listed}; make them equal where they are one")
    return notes


def with_owner(rows: Sequence[Row], cells: Sequence[str], what: str) -> list[Row]:
    """The rows that have an owner; what is to be said of the column is a warning."""
    for note in notes_on_owners(cells, what):
        warnings.warn(note, stacklevel=3)
    return [row for row, cell in zip(rows, cells, strict=True) if cell.strip()]

"""One normal form of texts, labels, names, paths and values, whatever tool and system they come from."""

import math
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

PICTURE_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")
_WHOLE = re.compile(r"[+-]?\d+(\.0*)?")
_DRIVE = re.compile(r"[A-Za-z]:/")


def plain_text(value: Any) -> str | None:
    """A text, number or truth value as text: NFC, without outer blanks; empty for a blank cell, None for others."""
    if isinstance(value, str):
        text = value.strip()
        return text if text.isascii() else unicodedata.normalize("NFC", text).strip("\ufeff\u200b ")
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else None


def whole_numbers(values: Iterable[Any]) -> bool:
    """Whether a column holds numbers without fractions and blank cells alone, such as ids that a tool made floats."""
    some = False
    for value in values:
        text = plain_text(value)
        if text is None or (text and not _WHOLE.fullmatch(text)):
            return False
        some = some or bool(text and "." in text)
    return some


def without_fraction(value: Any) -> Any:
    """A whole number of a column of :func:`whole_numbers` as text without its fraction; other values as they are."""
    text = plain_text(value)
    return text.partition(".")[0] if text else value


def plain_path(path: str) -> str:
    r"""A path as this system writes it: of ``.\a\b.png``, ``file://a/b.png`` and ``./a/b.png`` it is ``a/b.png``."""
    path = path.strip()
    if path.startswith("file://"):
        path = unquote(path.removeprefix("file://").removeprefix("localhost"))
    path = path.replace("\\", "/")
    while path.startswith("./"):
        path = path[2:].lstrip("/")
    return path if path.isascii() else unicodedata.normalize("NFC", path)


def find_file(folders: Sequence[Path], name: str) -> Path | None:
    """The file of a name in the first of some folders that has it; None where there is none.

    Tried are the name as it is, as a path of another system or a part of an address, in another Unicode form or, where
    one file alone has it, another case, and, of an absolute path of another machine, what its end names here.
    """
    path = plain_path(name)
    spellings = list(dict.fromkeys((name, path, unquote(path) if "%" in path else path)))
    for spelling in spellings:
        for folder in folders:
            if _is_file(place := os.path.join(folder, spelling)) and not spelling.startswith("/"):
                return Path(place)
    steps = [step for step in path.split("/") if step]
    ends = range(1, len(steps)) if path.startswith("/") or _DRIVE.match(path) else range(1)
    if ".." in steps:
        return None
    for first in ends:
        for folder in folders:
            place = _stored(str(folder), steps[first:])
            if place and _is_file(place):
                return Path(place)
    return None


def file_in(folders: Sequence[Path], name: str) -> Path:
    """The file of a name as :func:`find_file` has it; where there is none, where it should be."""
    return find_file(folders, name) or folders[0] / name


def find_picture(folder: Path, name: str) -> Path | None:
    """A picture below a folder, below its ``images/``, or below the only other folder in it that has it."""
    names = [name] if "." in name.rpartition("/")[2] else [name, *(f"{name}{ending}" for ending in PICTURE_ENDINGS)]
    for spelled in names:
        if (place := find_file((folder, folder / "images"), spelled)) is not None:
            return place
    others = [below for below in _folders_in(str(folder), os.stat(folder).st_mtime_ns) if below.name != "images"]
    for spelled in names:
        places = [place for below in others if (place := find_file((below,), spelled)) is not None]
        if len(places) == 1:
            return places[0]
    return None


def path_below(folder: Path, file: Path, picture: str) -> str:
    """The path below a folder of a picture that a file names, which may lie in a folder in it, beside its pictures."""
    place = find_picture(file.parent, picture) if file.parent != folder else None
    return picture if place is None else place.relative_to(folder).as_posix()


@lru_cache(maxsize=8)
def _folders_in(folder: str, changed: int) -> tuple[Path, ...]:
    """The folders in a folder, without hidden ones."""
    del changed  # tells one state of the folder from another
    return tuple(place for place in sorted(Path(folder).iterdir()) if place.is_dir() and place.name[0] not in "._")


def _is_file(path: str) -> bool:
    try:
        return os.path.isfile(path)
    except ValueError:  # a name with a NUL
        return False


def _stored(folder: str, steps: Sequence[str]) -> str:
    """The path below a folder whose steps are these in any Unicode form or case; empty where there is none."""
    for step in steps:
        try:
            names = _names_in(folder, os.stat(folder).st_mtime_ns)
        except (OSError, ValueError):
            return ""
        plain = unicodedata.normalize("NFC", step)
        if not (name := names.get(plain) or names.get(plain.casefold(), "")):
            return ""
        folder = os.path.join(folder, name)
    return folder


@lru_cache(maxsize=64)
def _names_in(folder: str, changed: int) -> Mapping[str, str]:
    """The names in a folder by their normal form, and by that without case where it is one name's alone."""
    del changed  # tells one state of the folder from another
    names = {unicodedata.normalize("NFC", name): name for name in os.listdir(folder)}
    alike = Counter(name.casefold() for name in names)
    return {plain.casefold(): name for plain, name in names.items() if alike[plain.casefold()] == 1} | names


def stored_name(folder: Path, name: str) -> str:
    """A picture's name as a folder has it, where it has it in another Unicode form or case."""
    if _is_file(os.path.join(folder, name)):
        return name
    place = find_file((folder,), name)
    return name if place is None else str(place.relative_to(folder))


class Spellings:
    """The spellings of labels, answers or clients, and which of them are read as one."""

    def __init__(self, what: str, values: Iterable[Any], fold_case: bool = False, known: Iterable[str] = ()) -> None:
        self.what, self._of = what, dict[Any, str]()
        counts = Counter(values)
        plain = Counter[str]()
        whole = whole_numbers(counts)
        for value, count in counts.items():
            self._of[value] = plain_text(without_fraction(value) if whole else value) or ""
            plain[self._of[value]] += count
        self.alike: dict[str, list[str]] = {}
        for text in known if fold_case else ():
            self.alike.setdefault(text.casefold(), []).append(text)
        for text, _ in sorted(plain.items(), key=lambda pair: (-pair[1], pair[0])):
            if text:
                self.alike.setdefault(text.casefold(), []).append(text)
        if fold_case:
            self._of = {value: self.alike[text.casefold()][0] if text else "" for value, text in self._of.items()}
        self.folded, self.counts, self._plain = fold_case, counts, plain

    def __getitem__(self, value: Any) -> str:
        """The normal form of a value; empty for a blank one."""
        return self._of[value]

    @property
    def notes(self) -> list[str]:
        """What is to be said of these names: which became one, and which differ in case alone."""
        notes: list[str] = []
        merged = {value: count for value, count in self.counts.items() if value != self._of[value] and self._of[value]}
        changed = {value: count for value, count in merged.items() if isinstance(value, str)}
        if changed:
            first = next(iter(changed))
            listed = f"{first!r} as {self._of[first]!r}"
            notes.append(f"{sum(changed.values())} of {self.counts.total()} {self.what} are read in another "
                         f"spelling, such as {listed}")  # fmt: skip
        several = [texts for texts in self.alike.values() if len(texts) > 1]
        if several and not self.folded:
            listed = ", ".join(f"{text!r} ({self._plain[text]})" for text in several[0])
            more = f" and {len(several) - 1} more" if len(several) > 1 else ""
            notes.append(f"{self.what} that differ in case alone are different ones: {listed}{more}; "
                         "data.fold_case = true makes them one")  # fmt: skip
        return notes

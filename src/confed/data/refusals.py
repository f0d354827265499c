"""Refusals of data and of their options: one form for each kind of fault, with thing, expectation and what came."""

from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

import numpy as np


def refuse(where: object, expected: str, got: object = None, *, found: object = "", remedy: str = "") -> NoReturn:
    """A ValueError about what stands at a place: ``got`` as Python writes it, or ``found`` in words."""
    came = str(found) or f"{got!r:.80}"
    raise ValueError(f"{where}: expected {expected}, got {came}" + (f"; {remedy}" if remedy else ""))


@contextmanager
def expecting(where: object, expected: str, *faults: type[Exception], remedy: str = "is it cut off?") -> Iterator[None]:
    """Context in which what a library raises of a file's content is a ValueError that names the file."""
    try:
        yield
    except faults as error:
        if isinstance(error, MemoryError) and MemoryError not in faults:  # says nothing about the file
            raise
        why = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(f"{where}: expected {expected}, got: {why}" + (f"; {remedy}" if remedy else "")) from error


def existing(place: Path, remedy: str = "") -> Path:
    """A file that must be there."""
    if not place.is_file():
        raise ValueError(f"the file {place} does not exist" + (f"; {remedy}" if remedy else ""))
    return place


def read_text(file: Path) -> str:
    """A text file in UTF-8."""
    with expecting(file, "UTF-8 text", UnicodeDecodeError, remedy="save it in that encoding"):
        return existing(file).read_text(encoding="utf-8-sig")


def existing_folder(place: Path, remedy: str = "") -> Path:
    """A folder that must be there."""
    if not place.is_dir():
        raise ValueError(f"the folder {place} does not exist" + (f"; {remedy}" if remedy else ""))
    return place


def first_of(places: Iterable[Path], what: str, remedy: str = "") -> Path:
    """The first of some files or folders that is there."""
    tried = list(places)
    for place in tried:
        if place.exists():
            return place
    refuse(what[:1].upper() + what[1:], " or ".join(map(str, tried)), found="neither" if len(tried) == 2 else "none",
           remedy=remedy)  # fmt: skip


def library(name: str, what: object, extra: str) -> Any:
    """A library that only some readers need."""
    try:
        return import_module(name)
    except ImportError as error:
        needed = name.partition(".")[0]
        raise ValueError(f"{what} needs the package {needed}: pip install '.[{extra}]' -c constraints.txt") from error


def check_choice(option: str, given: object, choices: Iterable[object]) -> None:
    """Check of an option with one of several values."""
    known = list(choices)
    if given not in known:
        raise ValueError(f"{option} must be one of {_listed(known)}, got {given!r}{_near(given, known)}")


def check_distinct(option: str, names: Sequence[str], valid: Iterable[str], least: int = 0) -> None:
    """Check of an option that lists names, each once, out of the valid ones."""
    valid = list(valid)
    if isinstance(names, str) or not least <= len(set(names)) == len(names) or not set(names) <= set(valid):
        some = f", at least {least}," if least else ""
        near = "".join(_near(name, valid) for name in names if name not in valid)
        raise ValueError(f"{option} must be distinct names{some} out of {_listed(valid)}, got {names!r}{near}")


def _listed(values: Sequence[object], most: int = 20) -> str:
    """Values in words, of many the first."""
    more = f" and {len(values) - most} more" if len(values) > most else ""
    return (", ".join(str(value) or "''" for value in values[:most]) or "none") + more


def _near(name: object, valid: Sequence[object]) -> str:
    near = get_close_matches(str(name), list(map(str, valid)), 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def left_for_clients(names: Iterable[str], unseen: Collection[str]) -> list[str]:
    """The names that are not unseen, which must be some."""
    known = list(names)
    left = [name for name in known if name not in unseen]
    if not left:
        raise ValueError(f"unseen must leave one of {', '.join(known)} for a client, got all of them")
    return left


def check_nothing_lacks(what: str, lacking: Sequence[object], total: int, where: object, remedy: str = "") -> None:
    """Check that nothing of what is asked for is missing."""
    if lacking:
        refuse(where, f"all {total} {what}", found=f"all but {len(lacking)}: {_listed(lacking, 5)}", remedy=remedy)


def check_apart(what: str, train: Collection[str], test: Collection[str]) -> None:
    """Check that nothing is in both parts."""
    both = sorted(set(train) & set(test))
    if both:
        refuse("train and test", f"{what} of their own", found=f"{len(both)} in both, {both[0]!r} is one")


def check_inside(name: str, where: object) -> None:
    """Check of a picture's name, which must not lead out of its folder."""
    # A name without a folder, which most have, is checked without parsing it: there are hundreds of thousands.
    if name and "/" not in name and name not in (".", ".."):
        return
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.name:
        refuse(where, "a picture's name, without a way out of its folder", name)


class Distinct:
    """Check of identifiers for duplicates."""

    def __init__(self, what: str) -> None:
        self.what, self._rows = what, dict[Any, int]()

    def add(self, value: Any, file: object, row: int) -> None:
        """Notes an identifier."""
        first = self._rows.setdefault(value, row)
        if first != row:
            raise ValueError(f"{file}, row {row}: the {self.what} {value!r} is that of row {first} already")


def check_form(what: str, values: Any, kind: type | None, *extents: int | str) -> None:
    """Check of an array's dtype (None: any) and shape, whose extents are numbers, or names of free ones."""
    fits = values.ndim == len(extents) and (kind is None or values.dtype == kind)
    for extent, expected in zip(values.shape, extents, strict=False):
        fits = fits and (isinstance(expected, str) or extent == expected)
    if not fits:
        shape = f"({', '.join(map(str, extents))}{',' if len(extents) == 1 else ''})"
        of_kind = f"{np.dtype(kind)} of shape" if kind is not None else "of shape"
        raise ValueError(f"{what} must be {of_kind} {shape}, got {values.dtype} {values.shape}")


def check_length(what: str, given: Sized | None, count: int, each: str) -> None:
    """Check of a column that may be missing."""
    if given is not None and len(given) != count:
        raise ValueError(f"{what} must have one entry per {each} ({count}), got {len(given)}")


def check_rows(what: str, rows: np.ndarray, count: int) -> None:
    """Check of row numbers of a table."""
    if len(rows) and not (int(rows.min()) >= 0 and int(rows.max()) < count):
        raise ValueError(f"{what} must lie in [0, {count}), got {rows.min()} to {rows.max()}")


def check_finite(what: object, values: np.ndarray) -> None:
    """Check that an array has neither NaN nor infinities."""
    if not np.isfinite(values).all():
        raise ValueError(f"{what} must be finite numbers, got some that are not")


def check_same(what: str, values: Iterable[Hashable]) -> None:
    """Check that parts which are put together agree."""
    different = list(dict.fromkeys(values))
    if len(different) > 1:
        raise ValueError(f"{what} must agree to be put together, got {', '.join(map(str, different))}")

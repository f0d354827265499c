"""The identity of examples: what shows the same picture, patient or document stays on one side of a split."""

import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from confed.data.intake.account import Account
from confed.data.intake.values import plain_text

UNITING = ("patient", "document")
"""Columns whose rows of one value stay on one side of a split."""
_BEGINNING = 1 << 14
"""Bytes by which files of one size are told apart before the whole of them is read."""


def united_by(entry: Mapping[str, Any]) -> tuple[str, ...]:
    """Patient and document of a row, as far as it names them by a text or a number."""
    names: list[str] = []
    for key in UNITING:
        if name := plain_text(entry.get(key)):
            names.append(f"{key} {name!r}")
    return tuple(names)


def first_copies(sizes: Sequence[int], read: Callable[[int, int], bytes]) -> list[int]:
    """The first row with the same bytes as each row; rows of no bytes are copies of none."""
    firsts = list(range(len(sizes)))
    rows_of_size: dict[int, list[int]] = {}
    for row, size in enumerate(sizes):
        if size > 0:
            rows_of_size.setdefault(size, []).append(row)
    for rows in rows_of_size.values():
        for alike in _alike(rows, read, _BEGINNING):
            for equal in _alike(alike, read, -1):
                for row in equal:
                    firsts[row] = equal[0]
    return firsts


def _alike(rows: Sequence[int], read: Callable[[int, int], bytes], most: int) -> list[list[int]]:
    """Groups of at least two rows whose bytes are equal."""
    if len(rows) < 2:
        return []
    groups: dict[bytes, list[int]] = {}
    for row in rows:
        groups.setdefault(sha256(read(row, most)).digest(), []).append(row)
    return [group for group in groups.values() if len(group) > 1]


def first_copies_of_files(files: Sequence[Path]) -> list[int]:
    """The first file with the same bytes as each file, by its place in the list."""

    def size(file: Path) -> int:
        try:
            return file.stat().st_size
        except (OSError, ValueError):  # of a name with a NUL it is a ValueError
            return 0

    def read(row: int, most: int) -> bytes:
        with files[row].open("rb") as stream:
            return stream.read(most)

    return first_copies([size(file) for file in files], read)


def note_copies(account: Account, names: Sequence[str], firsts: Sequence[int]) -> None:
    """Notes how many pictures are copies of others."""
    copies = [row for row, first in enumerate(firsts) if first != row]
    if copies:
        account.note(
            f"{len(copies)} pictures have the content of others and stay on their side of splits, such as "
            f"{names[copies[0]]} that of {names[firsts[copies[0]]]}"
        )


def joined_groups(keys: Iterable[Iterable[Hashable]]) -> np.ndarray:
    """Number of each row's group, int64 (N,): rows that share a key, directly or by others between them."""
    parent: list[int] = []

    def root(node: int) -> int:
        while parent[node] != node:
            parent[node] = node = parent[parent[node]]
        return node

    first_row: dict[Hashable, int] = {}
    for row, row_keys in enumerate(keys):
        parent.append(row)
        for key in row_keys:
            parent[root(row)] = root(first_row.setdefault(key, row))
    return np.array([root(row) for row in range(len(parent))], dtype=np.int64)


def warn_of_sides(groups: np.ndarray, roles: Sequence[str], described: Sequence[str]) -> None:
    """Warning of groups that the data's own splits tear apart; ``described`` says what each row shares."""
    sides: dict[int, set[str]] = {}
    for group, role in zip(groups.tolist(), roles, strict=True):
        sides.setdefault(group, set()).add(role)
    torn = [row for row, group in enumerate(groups.tolist()) if len(sides[group]) > 1]
    if torn:
        count = len(set(groups[torn].tolist()))
        warnings.warn(
            f"{count} patients, documents or pictures are in several of the splits that the data give, such as "
            f"{described[torn[0]]}",
            stacklevel=3,
        )

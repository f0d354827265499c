"""Removal of rows of a :class:`~confed.data.ml_files.table.MultiLabelTable` whose pictures cannot be read."""

import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np

from confed.data.ml_files.integrity import check_share, unreadable_rows
from confed.data.ml_files.table import MultiLabelTable
from confed.data.picture_files import Check, NamedPictures, open_pictures
from confed.data.pictures import empty_table

_CHANGED = "it could be read when all pictures were checked"


def drop_unreadable(
    table: MultiLabelTable,
    source: Path,
    size: int,
    *,
    at_most: float = 0.01,
    check: Check = "decoded",
    hold: int = 0,
) -> tuple[MultiLabelTable, NamedPictures | np.ndarray]:
    """Removal of rows with unreadable pictures, with a warning, or an error if there are too many.

    Raises ``ValueError``: more than ``at_most`` cannot be read (the message names the first one), the share is outside
    [0, 1], the check is unknown, or there is nothing at ``source``.
    """
    pictures = open_pictures(source, table.pictures, size)
    held = empty_table(len(table), size) if len(table) * size * size * 3 <= hold else None
    lost = unreadable_rows(pictures, check) if held is None else _read_into(held, pictures)
    readable = np.ones(len(table), dtype=bool)
    if lost:
        warnings.warn(check_share(len(lost), len(table), f"in {source}", at_most, lost[min(lost)]), stacklevel=2)
        readable[list(lost)] = False
        names = tuple(table.pictures[row] for row in sorted(lost))
        table = replace(table.keep(readable), unreadable=(*table.unreadable, *names))
    if held is not None:
        if lost:
            held, whole = empty_table(len(table), size), held
            held[:] = whole[readable]
        return table, held
    if lost:
        pictures = pictures.take(np.flatnonzero(readable))
    pictures.advice = 'data.check = "decoded" would leave it out' if check == "present" else _CHANGED
    return table, pictures


def _read_into(held: np.ndarray, pictures: NamedPictures) -> dict[int, str]:
    """Decoding of all pictures into a table (M, S, S, 3); the result has errors by row."""
    lost: dict[int, str] = {}
    for row in range(len(pictures)):
        try:
            held[row] = pictures[row]
        except ValueError as error:
            lost[row] = str(error)
    return lost

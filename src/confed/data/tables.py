"""Tables of a Python session as splits of rows: pandas data frames, and data sets of the library ``datasets``."""

import io
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from confed.data.intake.opening import read_picture

_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")


@dataclass(frozen=True)
class Tables:
    """Rows by split.

    Attributes:
        splits: split -> rows that have ``column_names``, ``features``, a length and items that are dictionaries.
    """

    name: str
    splits: Mapping[str, Any]


@dataclass(frozen=True)
class _Frame:
    """Rows of a data frame, as the library ``datasets`` has them, blank cells as None."""

    column_names: Sequence[str]
    features: Mapping[str, None]
    records: Sequence[Mapping[str, Any]]

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        return self.records[row]


def is_table(value: object) -> bool:
    """Whether a value is a data frame of pandas, or a ``Dataset`` or ``DatasetDict``."""
    return _of(value, "pandas", "DataFrame") or _of(value, "datasets", "Dataset", "DatasetDict")


def tables_of(value: Any) -> Tables:
    """The splits of a table; one without splits is all of "train"."""
    name = type(value).__name__
    if _of(value, "datasets", "DatasetDict"):
        return Tables(name, {split: undecoded(rows) for split, rows in value.items()})
    return Tables(name, {"train": _frame(value) if _of(value, "pandas", "DataFrame") else undecoded(value)})


def undecoded(rows: Any) -> Any:
    """Rows with pictures as bytes."""
    for name, feature in rows.features.items():
        inner: Any = getattr(feature, "feature", None)
        if _of(feature, "datasets", "Image"):
            rows = rows.cast_column(name, type(feature)(decode=False))
        elif _of(inner, "datasets", "Image"):
            rows = rows.cast_column(name, type(feature)(type(inner)(decode=False)))
    return rows


def _of(value: object, module: str, *names: str) -> bool:
    """Whether a value is of a class of a library that this process may not have imported."""
    library = sys.modules.get(module)
    return library is not None and isinstance(value, tuple(vars(library)[name] for name in names))


def _frame(frame: Any) -> _Frame:
    names = [str(name) for name in frame.columns]
    filled = [frame.iloc[:, column].notna().tolist() for column in range(len(names))]
    cells = [frame.iloc[:, column].tolist() for column in range(len(names))]
    records: list[dict[str, Any | None]] = []
    for row in range(len(frame)):
        records.append(
            {name: _cell(cells[column][row]) if filled[column][row] else None for column, name in enumerate(names)}
        )
    return _Frame(names, dict.fromkeys(names), records)


def _cell(cell: Any) -> Any:
    """A cell with pictures as bytes and paths as texts."""
    if isinstance(cell, Image.Image):
        buffer = io.BytesIO()
        if cell.mode in _PNG_MODES:
            cell.save(buffer, "PNG", exif=cell.getexif())
        else:
            Image.fromarray(read_picture(cell)).save(buffer, "PNG")
        return buffer.getvalue()
    if isinstance(cell, list | tuple | np.ndarray):
        return [_cell(one) for one in cell]
    return os.fspath(cell) if isinstance(cell, os.PathLike) else cell

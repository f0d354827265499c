"""Files with a record per row, as dictionaries: JSON lines, JSON lists, CSV, TSV and Parquet, with columns renamed."""

import csv
from collections.abc import Collection, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from confed.data.json_lines import read_jsonl
from confed.data.vl_files.stream import json_items

__all__ = ["COLUMNS", "ENDINGS", "check_columns", "read_records", "renamed"]

ENDINGS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
"""Files that are read, by the endings of their names."""
COLUMNS = (
    "image", "images", "question", "answer", "answers", "messages", "conversations", "prompt", "completion", "system",
    "id", "client", "place", "type", "split",
)  # fmt: skip
"""What columns can be mapped to."""


def read_records(file: Path, columns: Mapping[str, str] | None = None) -> Iterator[tuple[int, Any]]:
    """The records of a file with their rows from 0; empty cells of tables are left out.

    Args:
        file: of a kind among :data:`ENDINGS`; JSON lines where the name ends otherwise.
        columns: what a column is here -> its name in the file.

    Raises:
        ValueError: the file is missing, damaged or not UTF-8, a table lacks a mapped column, or Parquet is read without
            the library pyarrow.
    """
    ending, mapped = file.suffix.lower(), columns or {}
    if not file.is_file():
        raise ValueError(f"the file {file} does not exist")
    read = {".json": json_items, ".csv": _table, ".tsv": _table, ".parquet": _parquet}.get(ending, read_jsonl)
    rows: Iterator[tuple[int, Any]] = read(file) if read in (json_items, read_jsonl) else read(file, mapped.values())
    for row, entry in rows:
        yield row, renamed(entry, mapped) if isinstance(entry, dict) else entry


def renamed(entry: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """A record with its columns under the names that they have here.

    Args:
        entry: column -> value.
        columns: what a column is here -> its name in the record.
    """
    taken = set(columns.values())
    kept = {key: value for key, value in entry.items() if key not in taken and key not in columns}
    return {**kept, **{key: entry[name] for key, name in columns.items() if name in entry}}


def check_columns(columns: Mapping[str, str]) -> None:
    """Check of what columns are mapped to.

    Raises:
        ValueError: a name that means nothing here.
    """
    if strange := [name for name in columns if name not in COLUMNS]:
        raise ValueError(f"data.columns maps to {', '.join(COLUMNS)}; got {strange[0]!r}")


def _table(file: Path, needed: Collection[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows of a CSV or TSV file with a header."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.DictReader(stream, delimiter="\t" if file.suffix.lower() == ".tsv" else ",", strict=True)
            _check_there(file, needed, reader.fieldnames or ())
            for row, entry in enumerate(reader):
                if None in entry or None in entry.values():
                    raise ValueError(f"{file}, row {row}: expected {len(reader.fieldnames or ())} cells, as the header")
                yield row, {key: value for key, value in entry.items() if value}
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{file}: expected a table in UTF-8 with a header: {error}") from error


def _parquet(file: Path, needed: Collection[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows of a Parquet file."""
    try:
        arrow: Any = import_module("pyarrow")
        library: Any = import_module("pyarrow.parquet")
    except ImportError as error:
        raise ValueError(
            f"{file}: Parquet needs the package pyarrow: pip install '.[data]' -c constraints.txt"
        ) from error
    try:
        with library.ParquetFile(file) as table:
            _check_there(file, needed, table.schema_arrow.names)
            row = 0
            for batch in table.iter_batches(1024):
                for entry in batch.to_pylist():
                    yield row, {key: value for key, value in entry.items() if value is not None}
                    row += 1
    except (arrow.ArrowException, OSError) as error:
        raise ValueError(f"{file}: expected a Parquet file: {' '.join(str(error).split())[:200]}") from error


def _check_there(file: Path, needed: Collection[str], there: Collection[str]) -> None:
    """Check that a table has the columns that a recipe maps."""
    if not there:
        raise ValueError(f"{file}: expected a header with the names of columns, found none")
    if missing := [name for name in needed if name not in there]:
        raise ValueError(f"{file}: data.columns names {missing[0]!r}, and there are {', '.join(map(str, there))}")

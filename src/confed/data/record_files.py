"""Files with a record per row, as dictionaries: JSON lines, JSON lists, CSV, TSV and Parquet, with columns renamed."""

import csv
import gzip
import json
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from confed.data.vl_files.stream import json_items

# Streaming reader of JSON lines, plain or compressed with gzip or Zstandard -----------------------------------


def read_jsonl(file: Path, keys: Collection[str] = ()) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file with one JSON object a line, with their rows from 0; empty lines count and are left out."""
    if not file.is_file():
        raise ValueError(f"the file {file} does not exist")
    row = -1
    with _opened(file) as lines:
        try:
            for row, line in enumerate(lines):
                if not line.strip():
                    continue
                entry = json.loads(line)
                if not isinstance(entry, dict):
                    raise ValueError(f"{file}, row {row}: expected an object, got {entry!r:.80}")
                if missing := [key for key in keys if key not in entry]:
                    raise ValueError(f"{file}, row {row}: expected the key {missing[0]!r}, got {entry!r:.80}")
                yield row, entry
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}: expected UTF-8 text, got: {error}") from error
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{file}, row {row}: expected one JSON object, got: {error}; is it cut off?") from error


@contextmanager
def _opened(file: Path) -> Iterator[TextIO]:
    """The file's lines, decompressed where they are compressed."""
    ending = file.suffix.lower()
    if ending not in (".gz", ".zst", ".zstd"):
        with file.open(encoding="utf-8") as lines:
            yield lines
        return
    library: Any = gzip if ending == ".gz" else _zstandard(file)
    faults = (OSError, zlib.error) if library is gzip else (library.ZstdError,)
    try:
        with library.open(file, "rt", encoding="utf-8") as lines:
            yield lines
    except (EOFError, *faults) as error:
        raise ValueError(f"{file}: expected a complete compressed file, got: {error}; is it cut off?") from error


def _zstandard(file: Path) -> Any:
    """Python's own module where it has one, or the same for older Pythons."""
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return import_module(name)
        except ImportError:
            continue
    raise ValueError(f"reading {file} needs the package backports.zstd: pip install '.[captions]' -c constraints.txt")


# Files with a record per row, as dictionaries: JSON lines, JSON lists, CSV ------------------------------------

ENDINGS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
"""Files that are read, by the endings of their names."""
COLUMNS = (
    "image", "images", "question", "answer", "answers", "messages", "conversations", "prompt", "completion", "system",
    "id", "client", "place", "type", "split",
)  # fmt: skip
"""What columns can be mapped to."""


def read_records(file: Path, columns: Mapping[str, str] | None = None) -> Iterator[tuple[int, Any]]:
    """The records of a file with their rows from 0; empty cells of tables are left out."""
    ending, mapped = file.suffix.lower(), columns or {}
    if not file.is_file():
        raise ValueError(f"the file {file} does not exist")
    read = {".json": json_items, ".csv": _table, ".tsv": _table, ".parquet": _parquet}.get(ending, read_jsonl)
    rows: Iterator[tuple[int, Any]] = read(file) if read in (json_items, read_jsonl) else read(file, mapped.values())
    for row, entry in rows:
        yield row, renamed(entry, mapped) if isinstance(entry, dict) else entry


def renamed(entry: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """A record with its columns under the names that they have here."""
    taken = set(columns.values())
    kept = {key: value for key, value in entry.items() if key not in taken and key not in columns}
    return {**kept, **{key: entry[name] for key, name in columns.items() if name in entry}}


def check_columns(columns: Mapping[str, str]) -> None:
    """Check of what columns are mapped to."""
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

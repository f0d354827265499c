"""One reader of files with a record per row: JSON lines, JSON, CSV, TSV and Parquet.

Delimiter, quoting and encoding are found out and said. Rows count as an editor shows them: lines from 1, so that the
header of a table is row 1; of a JSON list and of Parquet, whose rows are no lines, the first entry is row 1.
"""

import csv
import gzip
import json
import unicodedata
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from confed.data.intake.stream import encoding_of, json_items, opened_text
from confed.data.intake.values import whole_numbers, without_fraction
from confed.data.intake.walk import ROLES
from confed.data.refusals import check_choice, existing, expecting, library, refuse

# JSON lines, plain or compressed with gzip or Zstandard -------------------------------------------------------


def read_jsonl(file: Path, keys: Collection[str] = (), *, strict: bool = True) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file with one JSON object a line, with the numbers of their lines; empty lines are left out."""
    with _opened(file, strict) as lines, expecting(file, "UTF-8 text", UnicodeDecodeError):
        for row, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except (json.JSONDecodeError, RecursionError) as error:
                refuse(f"{file}, row {row}", "one JSON object", found=error, remedy="is it cut off?")
            if not isinstance(entry, dict):
                refuse(f"{file}, row {row}", "an object", entry)
            if missing := [key for key in keys if key not in entry]:
                refuse(f"{file}, row {row}", f"the key {missing[0]!r}", entry)
            yield row, entry


@contextmanager
def _opened(file: Path, strict: bool) -> Iterator[TextIO]:
    """The file's lines, decompressed where they are compressed."""
    ending = file.suffix.lower()
    if ending not in (".gz", ".zst", ".zstd"):
        with opened_text(file, strict=strict) as lines:
            yield lines
        return
    module: Any = gzip if ending == ".gz" else _zstandard(existing(file))
    faults = (OSError, zlib.error) if module is gzip else (module.ZstdError,)
    expected = expecting(file, "a complete compressed file", EOFError, *faults)
    with expected, module.open(existing(file), "rt", encoding="utf-8-sig") as lines:
        yield lines


def _zstandard(file: Path) -> Any:
    """Python's own module where it has one, or the same for older Pythons."""
    try:
        return import_module("compression.zstd")
    except ImportError:
        return library("backports.zstd", file, "captions")


# Files with a record per row, as dictionaries -----------------------------------------------------------------

ENDINGS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
"""Files that are read, by the endings of their names."""
COLUMNS = (
    "image", "images", "question", "answer", "answers", "messages", "conversations", "prompt", "completion", "system",
    "id", "client", "place", "type", "split", "patient", "document",
)  # fmt: skip
"""What columns can be mapped to."""
_OBJECT = 1 << 28
"""Bytes of a JSON object, at most, in which rows are looked for."""
_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}


@dataclass(frozen=True)
class Records:
    """The rows of a file."""

    file: Path
    rows: Sequence[tuple[int, Any]]
    how_read: str = ""


def read_records(file: Path, columns: Mapping[str, str] | None = None) -> Records:
    """The records of a file; ids and classes that another tool has made floats are whole numbers again."""
    ending, mapped = existing(file).suffix.lower(), columns or {}
    if ending in (".csv", ".tsv"):
        rows, how_read = read_cells(file, mapped.values())
    elif ending == ".parquet":
        rows, how_read = list(parquet_rows(file, mapped.values())), ""
    else:
        if ending != ".json" or _has_lines(file):
            rows = list(read_jsonl(file, strict=False))
        else:
            rows = _object_rows(file) or list(json_items(file, strict=False))
        how_read = encoding_of(file).how_read if ending in (".json", ".jsonl") else ""
    entries = [entry for _, entry in rows if isinstance(entry, dict)]
    for name in dict.fromkeys(chain.from_iterable(entries[:100])):
        if whole_numbers(entry.get(name) for entry in entries):
            for entry in entries:
                if name in entry:
                    entry[name] = without_fraction(entry[name])
    if mapped:
        rows = [(row, renamed(entry, mapped) if isinstance(entry, dict) else entry) for row, entry in rows]
    return Records(file, rows, how_read and f"{file.name} is read as {how_read}")


def holds_records(file: Path) -> bool:
    """Whether a file may have rows: a .json file with an object may be anything."""
    if file.suffix.lower() != ".json" or _has_lines(file):
        return True
    return _first_sign(file) == "[" or bool(_object_rows(file))


def _first_sign(file: Path) -> str:
    encoding = encoding_of(file)
    with file.open(encoding=encoding.name, errors=encoding.errors) as lines:
        return next((line for line in lines if line.strip()), "").lstrip()[:1]


def _object_rows(file: Path) -> list[tuple[int, Any]]:
    """Rows of an object: one list of objects, lists by split, rows by id, or columns by row as pandas writes them."""
    if _first_sign(file) != "{" or file.stat().st_size > _OBJECT:
        return []
    encoding = encoding_of(file)
    try:
        content: Any = json.loads(file.read_text(encoding=encoding.name, errors=encoding.errors))
    except (ValueError, RecursionError):
        return []
    lists = [value for value in content.values() if isinstance(value, list) and isinstance((value or [0])[0], dict)]
    if len(lists) == 1:
        return list(enumerate(lists[0], start=1))
    entries: list[Any] = []
    if len(lists) > 1 and len(lists) == len(content) and all(key.casefold() in ROLES for key in content):
        for split, listed in content.items():
            entries += [{"split": split, **entry} if isinstance(entry, dict) else entry for entry in listed]
    columns = [value for value in content.values() if isinstance(value, dict)]
    if len(columns) > 1 and len(columns) == len(content):
        if any(name in COLUMNS for name in columns[0]):
            entries = [{"id": key, **value} for key, value in content.items()]
        elif all(column.keys() == columns[0].keys() for column in columns):
            for key in columns[0]:
                entries.append({name: column[key] for name, column in content.items()})
    return list(enumerate(entries, start=1))


def _has_lines(file: Path) -> bool:
    """Whether a .json file has an object a line, as some tools name such files."""
    encoding = encoding_of(file)
    with file.open(encoding=encoding.name, errors=encoding.errors) as lines:
        first = next(lines, "")
        if not first.lstrip().startswith("{") or not next(lines, "").lstrip().startswith("{"):
            return False
        try:
            return isinstance(json.loads(first), dict)
        except (ValueError, RecursionError):
            return False


def renamed(entry: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """A record with its columns under the names that they have here."""
    taken = set(columns.values())
    unmapped = {key: value for key, value in entry.items() if key not in taken and key not in columns}
    return {**unmapped, **{key: entry[name] for key, name in columns.items() if name in entry}}


def check_columns(columns: Mapping[str, str], known: Collection[str] = COLUMNS) -> None:
    """Check of what columns are mapped to."""
    for name in columns:
        check_choice("what data.columns maps to", name, known)


# Tables of text: CSV, TSV and their dialects ------------------------------------------------------------------


def read_cells(
    file: Path, needed: Collection[str] = (), *, blank: bool = False
) -> tuple[list[tuple[int, dict[str, str]]], str]:
    """The rows of a table of text with a header, and how it is read; blank cells are left out, or empty."""
    encoding = encoding_of(file)
    with expecting(file, "a table in UTF-8 with a header", UnicodeDecodeError):
        text = file.read_text(encoding=encoding.name, errors=encoding.errors)
    lines = text.split("\n")  # line ends of all systems are these by now
    start = 0
    given = lines[0].removeprefix("sep=") if lines[0].startswith("sep=") else ""
    while start < len(lines) - 1 and (not lines[start].strip() or (start == 0 and given)):
        start += 1
    usual = "\t" if file.suffix.lower() == ".tsv" else ","
    titles = 0
    while not given and start < len(lines) - 1 and _is_title(lines[start], lines[start + 1]):
        start, titles = start + 1, titles + 1
    delimiter = given[:1] or _delimiter(lines[start:], usual)
    header = [unicodedata.normalize("NFC", cell.strip()) for cell in _cells(lines[start], delimiter)]
    check_header(file, needed, [name for name in header if name])
    rows: list[tuple[int, dict[str, str]]] = []
    for row, cells in _rows(file, lines, start + 1, delimiter, len(header)):
        entry = {name: cell for name, cell in zip(header, cells, strict=True) if name and cell and not cell.isspace()}
        if entry:
            rows.append((row, {**dict.fromkeys(filter(None, header), ""), **entry} if blank else entry))
    between = f"a table with {_DELIMITERS.get(delimiter, repr(delimiter))} between cells"
    above = f"a table below {titles} line{'s' if titles > 1 else ''} left out"
    notes = [between if delimiter != usual else "", above if titles else "", encoding.how_read]
    return rows, " in ".join(filter(None, notes))


def _is_title(line: str, following: str) -> bool:
    """Whether a line above a header is a comment or a title: one filled cell, and more of them in the next line."""
    filled = max(_filled(following, delimiter) for delimiter in _DELIMITERS)
    alone = max(_filled(line, delimiter) for delimiter in _DELIMITERS) == 1
    return filled > 1 and (line.startswith("#") or (alone and any(sign in line for sign in _DELIMITERS)))


def _filled(line: str, delimiter: str) -> int:
    return sum(bool(cell.strip()) for cell in _cells(line, delimiter))


def _delimiter(lines: Sequence[str], usual: str) -> str:
    """The delimiter by which most lines have as many cells as the header; of equals the one with most cells."""
    best, most = usual, (0, 1, 0)
    for delimiter in _DELIMITERS:
        width = len(_cells(lines[0], delimiter))
        fitting = sum(len(_cells(line, delimiter)) == width for line in lines[:100]) if width > 1 else 0
        most, best = max((most, best), ((fitting, width, int(delimiter == usual)), delimiter))
    return best


def _cells(line: str, delimiter: str) -> list[str]:
    """The cells of one line; a quote that nothing closes is a sign like others."""
    if '"' in line:
        try:
            return next(csv.reader([line], delimiter=delimiter, strict=True))
        except csv.Error:
            pass
    return [_unquoted(cell) for cell in line.split(delimiter)]


def _unquoted(cell: str) -> str:
    inner = cell[1:-1]
    whole = len(cell) > 1 and cell[0] == cell[-1] == '"' and '"' not in inner.replace('""', "")
    return inner.replace('""', '"') if whole else cell


def _rows(
    file: Path, lines: Sequence[str], start: int, delimiter: str, width: int
) -> Iterator[tuple[int, Sequence[str]]]:
    """The cells of each row.

    A quoted cell may go on over lines. But where every line is a row as wide as the header, quotes that hold whole
    rows, or of a table with tabs any lines, are signs in texts.
    """
    body = lines[start:]
    if not any('"' in line for line in body):
        yield from _checked(file, ((row, line.split(delimiter)) for row, line in _numbered(body, start)), width)
        return
    rows, fits = list[tuple[int, list[str]]](), False
    for escapes in ({}, {"escapechar": "\\", "doublequote": False}):
        try:
            rows = list(_quoted(body, start, delimiter, escapes))
            fits = all(len(cells) == width for _, cells in rows)
        except csv.Error:
            rows = []
        if fits:
            break
    whole_table = chain.from_iterable(cells for _, cells in rows)
    over_lines = [cell for cell in whole_table if "\n" in cell]
    if not fits or over_lines:
        each = [(row, _cells(line, delimiter)) for row, line in _numbered(body, start)]
        inside = chain.from_iterable(cell.split("\n")[1:-1] for cell in over_lines)
        whole = delimiter == "\t" or any(len(_cells(line, delimiter)) == width for line in inside)
        if not fits or (whole and all(len(cells) == width for _, cells in each)):
            rows = each
    yield from _checked(file, rows, width)


def _numbered(body: Sequence[str], start: int) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(body, start=start + 1):
        if line.strip():
            yield number, line


def _quoted(
    body: Sequence[str], start: int, delimiter: str, escapes: Mapping[str, Any]
) -> Iterator[tuple[int, list[str]]]:
    """Rows with the numbers of the lines that they begin in."""
    reader = csv.reader([line + "\n" for line in body], delimiter=delimiter, strict=True, **escapes)
    first = start + 1
    for cells in reader:
        if cells:
            yield first, cells
        first = start + 1 + reader.line_num


def _checked(
    file: Path, rows: Iterator[tuple[int, Sequence[str]]] | Sequence[tuple[int, Sequence[str]]], width: int
) -> Iterator[tuple[int, Sequence[str]]]:
    for row, given in rows:
        cells = given if any(cell.strip() for cell in given[width:]) else given[:width]
        if len(cells) != width:
            refuse(
                f"{file}, row {row}",
                f"{width} cells, as the header",
                found=len(cells),
                remedy="put quotes around cells that hold the delimiter",
            )
        yield row, cells


# Parquet ------------------------------------------------------------------------------------------------------


def parquet_rows(file: Path, needed: Collection[str] = ()) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows of a Parquet file."""
    arrow = library("pyarrow", file, "data")
    with opened_parquet(file) as table, expecting(file, "a Parquet file", arrow.ArrowException, OSError):
        check_header(file, needed, table.schema_arrow.names)
        row = 1
        for batch in table.iter_batches(1024):
            for entry in batch.to_pylist():
                yield row, {key: value for key, value in entry.items() if value is not None}
                row += 1


def opened_parquet(file: Path) -> Any:
    """A Parquet file of which nothing but its description is read."""
    arrow = library("pyarrow", file, "data")
    with expecting(file, "a complete Parquet file", arrow.ArrowException, OSError):
        return library("pyarrow.parquet", file, "data").ParquetFile(file)


def check_header(file: object, needed: Collection[str], names: Sequence[str]) -> None:
    """Check that a table has columns with names of their own, and those that are needed."""
    if not names:
        refuse(file, "a header with the names of columns", found="none")
    if twice := [name for name in names if names.count(name) > 1]:
        refuse(file, "a name of its own for each column", found=f"{twice[0]!r} twice")
    if missing := [name for name in needed if name not in names]:
        refuse(file, f"the column {missing[0]!r} that data.columns names", found=", ".join(map(str, names)))

"""Streaming reader of JSON lines, plain or compressed with gzip or Zstandard."""

import gzip
import json
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

__all__ = ["read_jsonl"]


def read_jsonl(file: Path, keys: Collection[str] = ()) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file with one JSON object a line, with their rows from 0; empty lines count and are left out.

    Args:
        file: compressed where the name ends in ``.gz``, ``.zst`` or ``.zstd``.
        keys: what every object must have.

    Raises:
        ValueError: the file is missing, cut off, damaged or not UTF-8, or a line is no JSON object with the keys
            (names the row).
    """
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

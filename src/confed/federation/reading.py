"""One-line errors of readers: damaged or foreign content becomes a ValueError that names the file."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

MOST_JSON = 256 * 2**20
"""Bytes of a JSON or TOML file of a run, a study or an export; parsed it takes about ten times as much memory."""
MOST_HEADER = 16 * 2**20  # bytes of the header of a safetensors file
FAULTS = (ValueError, TypeError, AttributeError, LookupError, RecursionError, ArithmeticError, NotImplementedError)
"""What readers of JSON, TOML, CSV and safetensors raise of content in another form than they expect."""


def read_bounded(path: Path, most: int = MOST_JSON) -> bytes:
    """Content of a file of at most ``most`` bytes; a ValueError about a larger one, before it is read."""
    parts, size, told = list[bytes](), 0, path.stat().st_size  # a pipe tells no size beforehand
    with path.open("rb") as file:
        while max(size, told) <= most and (chunk := file.read(2**20)):
            parts.append(chunk)
            size += len(chunk)
    if max(size, told) > most:
        raise ValueError(f"{path} is too large: at most {most / 2**20:,.0f} MiB are read")
    return b"".join(parts)


def check_header(path: Path) -> None:
    """Check of a safetensors file's length of header before the library parses it; a longer one is a ValueError."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if length > MOST_HEADER:
        raise ValueError(f"{path} has a header of {length:,} bytes: at most {MOST_HEADER:,} are read")


@contextmanager
def faults_of(what: object, expected: str = "") -> Generator[None]:
    """Errors of a reader about malformed content as a ValueError that names the file, within the ``with`` block."""
    try:
        yield
    except FAULTS as error:
        if type(error) is ValueError:  # a sentence of our own
            raise
        why = str(error) or type(error).__name__
        if isinstance(error, RecursionError):
            why = "it is nested too deeply"
        elif isinstance(error, KeyError):
            why = f"it has no {error}"
        raise ValueError(f"{what} must be {expected or 'readable'}: {' '.join(why.split())[:300]}") from error


def check_entries(content: Any, kinds: Mapping[str, type | tuple[type, ...]], where: object) -> None:
    """Check of an object that a reader of JSON gave: the keys that it must have, and the types of their values."""
    if not isinstance(content, Mapping):
        raise ValueError(f"{where} must be an object, got {str(content)[:40]!r}")
    entries = cast("Mapping[str, Any]", content)
    for key, kind in kinds.items():
        if key not in entries:
            raise ValueError(f"{where} lacks the key {key!r}")
        value = entries[key]
        allowed = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            names = " or ".join("null" if one is type(None) else one.__name__ for one in allowed)
            raise ValueError(f"{where}: {key} must be {names}, got {str(value)[:40]!r}")

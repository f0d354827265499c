"""Files of a run folder, read as far as they are there and whole.

``predictions.safetensors`` holds ``names/<place>``, int64 (N,), and of questions with answers ``truth/<place>`` and
``answers/<place>``, int64 (N,), beside the rows of every view. Rows may stand in another order for another seed
(examples that lack modalities are sorted by what they have), so comparisons pair them by these hashes and never by
position.
"""

import hashlib
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from confed.federation.reading import read_bounded

NAMES, TRUTH, ANSWERS = "names", "truth", "answers"
"""Starts of the names of predictions that say which test example each row is."""


def name_hashes(names: Iterable[str]) -> np.ndarray:
    """A 64-bit hash of each name, the first 8 bytes of BLAKE2b, little-endian: int64, shape (N,)."""
    digests = (hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest() for name in names)
    return np.frombuffer(b"".join(digests), dtype="<i8").astype(np.int64)


MOST_HISTORY = 2**30  # bytes of a history; one of 100,000 clients has about 10 MB a round
_NUMBERS = ("loss", "bytes_up", "bytes_down", "errors")
_PLACES = (*_NUMBERS, "personal", "global", "unseen", "pooled")

# File -> what a report lacks without it.
EXPECTED: Mapping[str, str] = {
    "recipe.toml": "the settings of the run",
    "metrics.jsonl": "learning curves",
    "timings.jsonl": "time and memory per round",
    "summary.json": "final test results",
    "predictions.safetensors": "tests over examples",
    "gallery.json": "sample predictions",
}


def read_json(path: Path) -> Any:
    """Content of a JSON file; None if it is missing or damaged. One that is too large is a ValueError."""
    data = _bytes(path)
    try:
        return json.loads(data.decode())
    except (ValueError, RecursionError):
        return None


def read_toml(path: Path) -> Mapping[str, Any]:
    """Content of a TOML file; empty if it is missing or damaged. One that is too large is a ValueError."""
    data = _bytes(path)
    try:
        return tomllib.loads(data.decode())
    except (ValueError, RecursionError):
        return {}


def lines_of(path: Path, most: int | None = MOST_HISTORY) -> Iterator[Mapping[str, Any]]:
    """The objects of a JSON Lines file, each with its digest; a line that a crash cut off is left out."""
    if not path.is_file():
        return
    if most is not None and path.stat().st_size > most:
        raise ValueError(f"{path} is too large: at most {most / 2**20:,.0f} MiB are read")
    with path.open("rb") as file:
        for line in file:
            try:
                content = json.loads(line.decode("utf-8", errors="replace"))
            except (ValueError, RecursionError):
                continue
            if isinstance(content, Mapping):
                _check_line(content, path)
                yield {**content, "digest": line_digest(line, content)}


def line_digest(line: bytes, content: Any) -> str:
    """Digest of an object as JSON, which its line in a file is already where that has no escapes."""
    if b"\\" in line:
        line = json.dumps(content, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return hashlib.sha256(line.strip()).hexdigest()[:16]


def _check_line(line: Mapping[str, Any], path: Path) -> None:
    """What curves and tables read of a line, wherever they are drawn."""
    if line.keys() & {"round", "event", "seconds"} and type(line.get("round")) is not int:
        raise ValueError(f"{path}: round must be a whole number, got {str(line.get('round'))[:40]!r}")
    for key in _PLACES:
        places = line.get(key) or {}
        values = [places] if key in _NUMBERS else [places, *(places.values() if isinstance(places, Mapping) else ())]
        if not all(isinstance(value, Mapping) for value in values):
            raise ValueError(f"{path}: {key} of round {line.get('round')} must be values per place, got other JSON")


def _bytes(path: Path) -> bytes:
    """A file's content; nothing where it is missing or cannot be read."""
    try:
        return read_bounded(path)
    except OSError:
        return b""

"""Files of a run folder, read as far as they are there and whole.

``predictions.safetensors`` holds ``names/<place>``, int64 (N,), and of questions with answers ``truth/<place>`` and
``answers/<place>``, int64 (N,), beside the rows of every view. Rows may stand in another order for another seed
(examples that lack modalities are sorted by what they have), so comparisons pair them by these hashes and never by
position.
"""

import hashlib
import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from confed.federation.reading import MOST_JSON, read_bounded

NAMES, TRUTH, ANSWERS = "names", "truth", "answers"
"""Starts of the names of predictions that say which test example each row is."""


def name_hashes(names: Iterable[str]) -> np.ndarray:
    """A 64-bit hash of each name, the same on every machine: the first 8 bytes of BLAKE2b, little-endian.

    Returns:
        int64, shape (N,).
    """
    digests = (hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest() for name in names)
    return np.frombuffer(b"".join(digests), dtype="<i8").astype(np.int64)


MOST_HISTORY = 2**30
"""Bytes of a history; one of 100,000 clients has about 10 MB a round."""
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


def provisional(
    recipe: Mapping[str, Any],
    rounds: Sequence[Mapping[str, Any]],
    evaluations: Sequence[Mapping[str, Any]],
    folder: Path,
) -> dict[str, Any]:
    """What is known of a run that did not write its summary; its test results are not."""
    section, tail = recipe.get("run", {}), folder.name.removeprefix("seed-")
    clients = dict.fromkeys(chain.from_iterable([*line.get("loss", {}), *line.get("errors", {})] for line in rounds))
    personal = dict.fromkeys(chain.from_iterable(line.get("personal", {}) for line in evaluations))
    unseen = dict.fromkeys(chain.from_iterable(line.get("unseen", {}) for line in evaluations))
    errors: list[dict[str, Any]] = []
    for line in rounds:
        for client, error in line.get("errors", {}).items():
            errors.append({"round": line["round"], "client": client, "error": error})
    return {
        "algorithm": recipe.get("algorithm", {}).get("name", folder.name),
        "recipe": recipe.get("name", ""),
        "seed": section.get("seed", int(tail) if tail.isdigit() else 0),
        "rounds": max((int(line["round"]) for line in rounds if line["event"] == "round"), default=0),
        "planned_rounds": section.get("rounds"),
        "clients": list(personal or clients),
        "scenes": list(unseen),
        "bytes_up": {str(line["round"]): line.get("bytes_up", {}) for line in rounds},
        "bytes_down": {str(line["round"]): line.get("bytes_down", {}) for line in rounds},
        "errors": errors,
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


def read_lines(path: Path) -> tuple[Mapping[str, Any], ...]:
    """The objects of a JSON Lines file; a line that a crash cut off is left out.

    A file that is too large, a round that is no number and values per place that are no mapping are a ValueError.
    """
    lines: list[Mapping[str, Any]] = []
    for line in _bytes(path, MOST_HISTORY).decode("utf-8", errors="replace").splitlines():
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(content, Mapping):
            _check_line(content, path)
            lines.append(content)
    return tuple(lines)


def _check_line(line: Mapping[str, Any], path: Path) -> None:
    """What curves and tables read of a line, wherever they are drawn."""
    if line.keys() & {"round", "event", "seconds"} and type(line.get("round")) is not int:
        raise ValueError(f"{path}: round must be a whole number, got {str(line.get('round'))[:40]!r}")
    for key in _PLACES:
        places = line.get(key) or {}
        values = [places] if key in _NUMBERS else [places, *(places.values() if isinstance(places, Mapping) else ())]
        if not all(isinstance(value, Mapping) for value in values):
            raise ValueError(f"{path}: {key} of round {line.get('round')} must be values per place, got other JSON")


def _bytes(path: Path, most: int = MOST_JSON) -> bytes:
    """A file's content; nothing where it is missing or cannot be read."""
    try:
        return read_bounded(path, most)
    except OSError:
        return b""

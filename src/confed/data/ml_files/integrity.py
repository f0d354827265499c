"""Integrity check of picture files: each is decoded once, and results are cached between runs.

The verdict is a JSON file in ``$XDG_CACHE_HOME/confed/pictures``, by default ``~/.cache/confed/pictures``. Its name is
a digest of where the pictures lie, of every one's name, size and time of change, and of Pillow's version, so that a
changed data set is looked at again; the file may be deleted at any time.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import PIL

from confed.data.picture_files import Check, NamedPictures
from confed.data.preparation import step
from confed.federation.checkpoint import write_atomically
from confed.federation.reading import FAULTS

_AT_ONCE = 64
"""Pictures that a thread takes at once."""
_MOST_THREADS = 16
"""Beyond these, threads wait for each other: Pillow lets others work while it decodes, but not while it converts."""
_FORMAT = 1

_T = TypeVar("_T")


def cache_folder() -> Path:
    """Folder of the cached results; it need not exist."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if given.is_absolute():  # as its specification has it, others do not count
        return given / "confed" / "pictures"
    try:
        return Path.home() / ".cache" / "confed" / "pictures"
    except RuntimeError as error:
        raise OSError(f"there is no home folder: {error}") from error


def unreadable_rows(pictures: NamedPictures, check: Check) -> dict[int, str]:
    """Why pictures cannot be read, by their rows; with ``check`` "present" those that are missing or empty.

    Otherwise all are decoded by as many threads as there are cores, unless the verdict on the same files is
    remembered. Those that could not be read then are tried again: they are few, and it may have been the disk or the
    network that failed. A verdict that is damaged does not count. One that cannot be written is warned of.
    """
    rows = range(len(pictures))
    if check == "present":
        absent = (row for row in rows if not pictures.present(row))
        return {row: f"picture {pictures.names[row]}: it is missing or empty" for row in absent}
    if not rows:
        return {}
    key = _digest(pictures, _in_threads(pictures.version, rows))
    remembered = _remembered(key, pictures)
    suspects = rows if remembered is None else remembered
    if remembered is None:
        with step(f"checking the pictures in {pictures.source.name}", len(rows)) as done:
            reasons = _in_threads(pictures.fault, rows, done)
    else:
        reasons = [pictures.fault(row) for row in suspects]
    lost = {row: reason for row, reason in zip(suspects, reasons, strict=True) if reason}
    if remembered is None or len(lost) < len(suspects):
        _remember(key, pictures, lost)
    return lost


def check_share(lost: int, count: int, where: str, at_most: float, first: str = "") -> str:
    """How many pictures cannot be read, or an error if these are more than a share."""
    told, named = f"{lost} of {count} pictures {where} cannot be read", f"; the first: {first}" if first else ""
    if lost > at_most * count:
        raise ValueError(f"{told}, more than the share of {at_most:g} that may be left out (data.unreadable){named}")
    return f"{told} and are left out{named}"


def _in_threads(
    call: Callable[[int], _T], rows: Sequence[int], done: Callable[[int], None] = lambda _: None
) -> list[_T]:
    """Results of ``call`` for each row, in order, with progress told to ``done``."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parts = [rows[start : start + _AT_ONCE] for start in range(0, len(rows), _AT_ONCE)]
    answers: list[list[_T]] = []
    count = 0
    # The pool does not outlive the call: a process with threads cannot be forked safely.
    pool = ThreadPoolExecutor(max(min(cores, _MOST_THREADS, len(parts)), 1))
    try:
        for row_group in pool.map(lambda row_group: [call(row) for row in row_group], parts):
            answers.append(row_group)
            count += len(row_group)
            done(count)
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C the rest is not waited for
    return list(chain.from_iterable(answers))


def _digest(pictures: NamedPictures, versions: Sequence[tuple[int, ...]]) -> str:
    """Fingerprint of these pictures, in their order and current versions."""
    source = pictures.source.resolve()
    status = source.stat()
    # A folder changes with every file that is put beside the pictures; an archive is the pictures.
    size_and_time = () if source.is_dir() else (status.st_size, status.st_mtime_ns)
    digest = hashlib.sha256(
        json.dumps([_FORMAT, PIL.__version__, type(pictures).__name__, str(source), size_and_time]).encode()
    )
    for name, version in zip(pictures.names, versions, strict=True):
        digest.update(json.dumps([name, *version]).encode())
    return digest.hexdigest()


def _remembered(key: str, pictures: NamedPictures) -> list[int] | None:
    """The rows that could not be read, ascending; None if there is no sound verdict."""
    try:
        content: Any = json.loads((cache_folder() / f"{key}.json").read_bytes())
        if content["pictures"] != len(pictures):
            return None
        rows = {int(row): name for row, name in content["unreadable"].items()}
        sound = all(0 <= row < len(pictures) and pictures.names[row] == name for row, name in rows.items())
    except (OSError, *FAULTS):
        return None  # as if no picture had been checked yet
    return sorted(rows) if sound else None


def _remember(key: str, pictures: NamedPictures, reasons: dict[int, str]) -> None:
    content = {
        "source": str(pictures.source),
        "pictures": len(pictures),
        "unreadable": {str(row): pictures.names[row] for row in sorted(reasons)},
    }
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / f"{key}.json", json.dumps(content, indent=1).encode())
    except OSError as error:
        # Neither file nor split is named, so that a data set of several is warned of once.
        warnings.warn(
            "which pictures can be read cannot be remembered, so the next run decodes all of them again (XDG_CACHE_HOME"
            f" may name a folder to keep it in): {error.strerror or error}",
            stacklevel=2,
        )

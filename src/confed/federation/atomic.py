"""Files written in one step, folders of their owner alone, and removal of what killed processes left."""

import os
import shutil
from pathlib import Path

__all__ = ["private_folder", "remove_unfinished", "write_atomically"]

_LOCK = "lock.json"
"""See :mod:`confed.system.folder_lock`, which this package may not import."""


def write_atomically(path: Path, data: bytes, *, sync: bool = False) -> None:
    """Atomic write: under a temporary name, then renamed; a reader sees the old file or the new one, never a part.

    Raises:
        OSError: the file cannot be written; the temporary one is removed.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def private_folder(path: Path) -> None:
    """A folder that only its owner can read; an existing one stays as it is."""
    if not path.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)


def remove_unfinished(folder: Path, pattern: str = "**/.*.tmp") -> None:
    """Removal of temporary files that killed processes left.

    Args:
        folder: where no other process is writing: this one has locked it.
        pattern: which files and folders; those of locks, and of this process, stay.
    """
    own = f".{os.getpid()}.tmp"
    for path in list(folder.glob(pattern)):
        if path.name.endswith(own) or path.name.startswith(f".{_LOCK}."):
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

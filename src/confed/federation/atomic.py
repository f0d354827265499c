"""Files written in one step, folders of their owner alone, and removal of what killed processes left."""

import os
import shutil
from collections.abc import Iterable
from functools import partial
from pathlib import Path


def write_atomically(path: Path, data: bytes | Iterable[bytes], *, sync: bool = False, mode: int = 0o666) -> None:
    """Atomic write: under a temporary name, then renamed; a reader sees the old file or the new one, never a part.

    After an :class:`OSError`, as after any other that comes between, the temporary file is removed.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb", opener=partial(os.open, mode=mode)) as file:
            file.writelines((data,) if isinstance(data, bytes) else data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def private_folder(path: Path) -> None:
    """A folder that only its owner can read; an existing one stays as it is."""
    if not path.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)


def remove_unfinished(folder: Path, pattern: str = "**/.*.tmp") -> None:
    """Removal of temporary files that killed processes left."""
    suffix = f".{os.getpid()}.tmp"
    for path in list(folder.glob(pattern)):
        if path.name.endswith(suffix):
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

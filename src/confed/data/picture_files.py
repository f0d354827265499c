"""Lazily read picture files, for datasets larger than memory."""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from confed.data.pictures import read_picture, resize

__all__ = ["Check", "PictureFiles", "check_unreadable", "find_pictures"]

Check = Literal["decoded", "present"]
"""How pictures are checked before a run; see :class:`PictureFiles`."""

_ENDINGS = (".jpg", ".jpeg", ".png")


class PictureFiles:
    """M picture files as a table (M, S, S, 3); implements :class:`confed.data.examples.Pictures`.

    Every access decodes and resizes, so equal indices give equal bytes and nothing is kept. A batch is decoded
    by as many threads as torch uses in this process (``run.threads``). A run leaves out the examples whose pictures
    cannot be read (:mod:`confed.data.readable`).

    Args:
        files: one file per picture.
        size: side of the square pictures in pixels; other proportions are squeezed.
        unreadable: share of the pictures that a run may leave out because they cannot be read.
        check: "decoded" decodes all pictures once, before the first round; the verdict is remembered until a file
            changes. "present" only looks whether they are there and not empty: a damaged one then leaves its client
            out of rounds, or ends the run in an evaluation.

    Raises:
        ValueError: ``size`` is not positive, the share is outside [0, 1], or the check is unknown.
    """

    dtype = np.dtype(np.uint8)
    ndim = 4

    def __init__(self, files: Sequence[Path], size: int, *, unreadable: float = 0.01, check: Check = "decoded") -> None:
        if size < 1:
            raise ValueError(f"image_size must be at least 1 pixel, got {size}")
        check_unreadable(unreadable, check)
        self.unreadable = unreadable
        self.check: Check = check
        self.files, self.size = tuple(files), size
        self.shape = (len(self.files), size, size, 3)

    def __len__(self) -> int:
        return len(self.files)

    def of(self, files: Sequence[Path]) -> "PictureFiles":
        """Other files with the same options."""
        return PictureFiles(files, self.size, unreadable=self.unreadable, check=self.check)

    def __getitem__(self, index: int | np.ndarray) -> np.ndarray:
        """One picture (S, S, 3), or those of B indices (B, S, S, 3), uint8.

        Raises ``ValueError``: a file is missing or unreadable (the message names it).
        """
        if isinstance(index, int | np.integer):
            return _decode(self.files[index], self.size)
        chosen = [self.files[i] for i in index]
        if not chosen:
            return np.zeros((0, *self.shape[1:]), dtype=np.uint8)
        threads = min(torch.get_num_threads(), len(chosen))
        if threads == 1:
            return np.stack([_decode(file, self.size) for file in chosen])
        # The pool lives for one batch: one that outlives a fork has no threads in the child.
        with ThreadPoolExecutor(threads) as pool:
            return np.stack(list(pool.map(_decode, chosen, repeat(self.size))))


def _decode(file: Path, size: int) -> np.ndarray:
    return resize(read_picture(file), size)


def check_unreadable(at_most: float, check: str) -> None:
    """Check of the options ``unreadable`` and ``check``.

    Raises:
        ValueError: the share is outside [0, 1], or the check is unknown.
    """
    if not 0 <= at_most <= 1:
        raise ValueError(f"unreadable must be a share of the pictures in [0, 1], got {at_most}")
    if check not in ("decoded", "present"):
        raise ValueError(f"check must be decoded or present, got {check!r}")


def find_pictures(folder: Path, names: Iterable[str] | None = None) -> dict[str, Path]:
    """The picture files (.jpg, .jpeg or .png) of a folder by their names without ending.

    Args:
        folder: where they lie; subfolders are not searched.
        names: which to look for; default: all. Those without a file are left out.

    Raises:
        ValueError: the folder does not exist.
    """
    if not folder.is_dir():
        raise ValueError(f"the folder of pictures {folder} does not exist")
    wanted = None if names is None else set(names)
    found: dict[str, tuple[int, Path]] = {}
    for file in folder.iterdir():
        ending = file.suffix.lower()
        if ending in _ENDINGS and (wanted is None or file.stem in wanted):
            # A name with several endings is the .jpg, as the official archive has it.
            found[file.stem] = min(found.get(file.stem, (len(_ENDINGS), file)), (_ENDINGS.index(ending), file))
    return {stem: file for stem, (_, file) in sorted(found.items())}

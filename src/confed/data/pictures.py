"""Sizes and tables of pictures, uint8 arrays (H, W, 3)."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, get_args

import numpy as np
from PIL import Image

from confed.data.refusals import check_choice

Fit = Literal["squeeze", "crop", "pad"]
"""How a picture of other proportions becomes a square: squeezed, cropped at its middle, or between bars of grey."""

_GREY = 127
_fit: ContextVar[Fit] = ContextVar("fit", default="squeeze")


@contextmanager
def fitted(fit: Fit) -> Iterator[None]:
    """Context in which datasets are made whose pictures become squares in this way."""
    check_choice("data.fit", fit, get_args(Fit))
    before = _fit.set(fit)
    try:
        yield
    finally:
        _fit.reset(before)


def current_fit() -> Fit:
    """That of :func:`fitted`."""
    return _fit.get()


def resize(picture: np.ndarray, size: int, fit: Fit | None = None) -> np.ndarray:
    """The picture as a square, antialiased bicubic; a picture that has that size already is returned as is."""
    height, width = picture.shape[:2]
    if (height, width) == (size, size):
        return picture
    fit = fit or _fit.get()
    if fit == "pad" and height != width:
        side = max(height, width)
        top, left = (side - height) // 2, (side - width) // 2
        square = np.full((side, side, 3), _GREY, dtype=np.uint8)
        square[top : top + height, left : left + width] = picture
        picture, height, width = square, side, side
    # As processors of transformers have it: the shorter edge first, then the middle of the longer one.
    short = min(height, width) if fit == "crop" else 0
    across, down = (int(size * width / short), int(size * height / short)) if short else (size, size)
    resized = Image.fromarray(picture).resize((across, down), Image.Resampling.BICUBIC)
    left, top = (across - size) // 2, (down - size) // 2
    return np.array(resized.crop((left, top, left + size, top + size)), dtype=np.uint8)


def empty_table(count: int, size: int) -> np.ndarray:
    """Room for square pictures, uint8 of shape (count, size, size, 3)."""
    return np.zeros((count, 3, size, size), dtype=np.uint8).transpose(0, 2, 3, 1)


def fill_table(table: np.ndarray, pictures: Iterable[np.ndarray], first: int = 0) -> None:
    """Storage of pictures in consecutive rows of a table, resized to its pictures' size."""
    for row, picture in enumerate(pictures, start=first):
        table[row] = resize(picture, table.shape[1])

"""Decoding of picture files to uint8 arrays (H, W, 3), with errors that name the file."""

import tarfile
from collections.abc import Iterable, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from struct import error as StructError

import numpy as np
from PIL import Image

from confed.data.bounded_files import check_pixels, formats, tar_members

_EIGHT_BIT = {"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBX", "RGBa", "CMYK", "YCbCr", "HSV", "LAB"}
# What Pillow's readers raise of damaged files differs by format: of AVIF a RuntimeError, of QOI an IndexError.
_UNREADABLE = (
    OSError, SyntaxError, ValueError, EOFError, StructError, Image.DecompressionBombError,
    Image.DecompressionBombWarning, RuntimeError, LookupError, TypeError, AttributeError, ArithmeticError,
    AssertionError,
)  # fmt: skip


PictureSource = Path | str | bytes | np.ndarray | Image.Image
"""A picture: a file, the bytes of one, an array, or what PIL has opened."""


def read_picture(source: PictureSource, *, name: str | None = None) -> np.ndarray:
    """One picture, decoded to the last row.

    Returns:
        uint8, shape (H, W, 3); greyscale, palette and CMYK are converted, an alpha channel is dropped.
    """
    if isinstance(source, np.ndarray):
        return _of_array(source)
    if isinstance(source, Image.Image):
        return _pixels(source)
    if isinstance(source, bytes):
        name, file = name or "a picture in memory", BytesIO(source)
    else:
        name, file = name or str(source), Path(source)
        if not file.is_file():
            raise ValueError(f"picture {name}: expected a picture file, found {_what_is(file)}")
    try:
        # Only formats of pixels: some others are handed to another program.
        with Image.open(file, formats=formats()) as image:
            return _pixels(image)
    except _UNREADABLE as error:
        raise ValueError(f"picture {name}: expected a complete, readable picture file, got: {error}") from error


def _pixels(image: Image.Image) -> np.ndarray:
    """Decoding to uint8 (H, W, 3)."""
    check_pixels(*image.size)
    image.load()
    if image.mode not in _EIGHT_BIT:
        raise ValueError(f"expected at most 8 bits a channel, got mode {image.mode}")
    # A palette with transparency would be converted with a warning unless it passes through RGBA.
    flat = image.convert("RGBA") if "transparency" in image.info else image
    return np.array(flat.convert("RGB"), dtype=np.uint8)


def _of_array(picture: np.ndarray) -> np.ndarray:
    """A picture in memory."""
    if picture.ndim == 2:
        picture = np.repeat(picture[..., None], 3, axis=2)
    if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[-1] != 3 or not picture.size:
        raise ValueError(f"a picture must be uint8 of shape (H, W, 3) or (H, W), got {picture.dtype} {picture.shape}")
    return picture


def _what_is(path: Path) -> str:
    return "a folder" if path.is_dir() else "nothing there"


def resize(picture: np.ndarray, size: int) -> np.ndarray:
    """The picture as a square, antialiased bicubic; a picture that has that size already is returned as is."""
    if size < 1:
        raise ValueError(f"image_size must be at least 1 pixel, got {size}")
    if picture.shape[:2] == (size, size):
        return picture
    return np.array(Image.fromarray(picture).resize((size, size), Image.Resampling.BICUBIC), dtype=np.uint8)


def empty_table(count: int, size: int) -> np.ndarray:
    """Room for square pictures, uint8 of shape (count, size, size, 3).

    The memory behind it is channel-first, as models want it: turning the table into a (count, 3, size, size)
    tensor is then a view, and all clients of a dataset share one copy.
    """
    if size < 1:
        raise ValueError(f"image_size must be at least 1 pixel, got {size}")
    return np.zeros((count, 3, size, size), dtype=np.uint8).transpose(0, 2, 3, 1)


def fill_table(table: np.ndarray, pictures: Iterable[np.ndarray], first: int = 0) -> None:
    """Storage of pictures in consecutive rows of a table, resized to its pictures' size."""
    for row, picture in enumerate(pictures, start=first):
        table[row] = resize(picture, table.shape[1])


def read_folder(folder: Path, names: Sequence[str]) -> Iterator[np.ndarray]:
    """The named pictures of a folder, in that order, each uint8 (H, W, 3)."""
    for name in names:
        if Path(name).name != name:
            raise ValueError(f"picture {name!r}: expected a file name inside {folder}, not a path")
        yield read_picture(folder / name)


def read_tar(archive: Path, names: Sequence[str]) -> Iterator[np.ndarray]:
    """The named pictures of an uncompressed tar archive, in that order, each uint8 (H, W, 3).

    Members are read in place; nothing is extracted to disk.
    """
    try:
        with tarfile.open(archive, "r:") as tar:
            members = {member.name.removeprefix("./"): member for member in tar_members(tar, archive)}
            for name in names:
                stream = tar.extractfile(members[name]) if name in members else None
                if stream is None:
                    raise ValueError(f"picture {name!r}: expected it among the {len(members)} files of {archive}")
                yield read_picture(stream.read(), name=f"{archive}:{name}")
    except (OSError, tarfile.TarError) as error:
        raise ValueError(f"{archive}: expected a complete, uncompressed tar archive, got: {error}") from error

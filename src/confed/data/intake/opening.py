"""The one opening of pictures: uint8 RGB as a viewer shows it, whatever the file is, with errors that name the file.

Turned as EXIF says; on white where it is transparent; deep grey scaled to 8 bits; CMYK and embedded colour profiles
converted to sRGB; of animated pictures the first frame.
"""

import warnings
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from struct import error as StructError
from typing import Any

import numpy as np
from PIL import Image, ImageCms, UnidentifiedImageError

from confed.data.bounded_files import check_pixels, formats
from confed.data.refusals import refuse

PictureSource = Path | str | bytes | np.ndarray | Image.Image
"""A picture: a file, the bytes of one, an array, or what PIL has opened."""

# What Pillow's readers raise of damaged files differs by format: of AVIF a RuntimeError, of QOI an IndexError.
_UNREADABLE = (
    OSError, SyntaxError, ValueError, EOFError, StructError, Image.DecompressionBombError,
    Image.DecompressionBombWarning, RuntimeError, LookupError, TypeError, AttributeError, ArithmeticError,
    AssertionError,
)  # fmt: skip
_DEEP = {"I;16", "I;16L", "I;16B", "I;16N", "I", "F"}
_ORIENTATION, _BITS = 0x0112, 258
_EXIF = {"exif", "Raw profile type exif", "xmp", "XML:com.adobe.xmp"}
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # fmt: skip
_SPACES = {"RGB": "RGB ", "RGBA": "RGB ", "L": "GRAY", "CMYK": "CMYK", "LAB": "Lab "}
_OTHERS = (
    (0, b"\0\5\x16\7", "a file of macOS beside a picture: delete it"),
    (0, b"<!DOCTYPE", "a web page: download the picture again"),
    (0, b"<html", "a web page: download the picture again"),
    (0, b"version https://git-lfs", "a pointer of Git LFS: fetch the file with `git lfs pull`"),
    (0, b"%PDF", "a PDF: save its pages as .png"),
    (0, b"<svg", "a drawing (SVG): save it as .png"),
    (4, b"ftyphei", "a picture in HEIC: save it as .jpg or .png"),
    (4, b"ftypmif1", "a picture in HEIF: save it as .jpg or .png"),
    (128, b"DICM", 'a DICOM file: data.name = "dicom_folders" reads such'),
)
"""What files that are no pictures begin with: offset, bytes, what it is and the remedy."""


def read_picture(source: PictureSource, *, name: str | None = None) -> np.ndarray:
    """One picture, decoded to the last row, as a viewer shows it: uint8, shape (H, W, 3)."""
    if isinstance(source, np.ndarray):
        return _of_array(source)
    if isinstance(source, Image.Image):
        return _pixels(source)
    if isinstance(source, bytes):
        name, file = name or "a picture in memory", BytesIO(source)
    else:
        name, file = name or str(source), Path(source)
        if not file.is_file():
            what = "a folder" if file.is_dir() else "nothing there"
            refuse(f"picture {name}", "a picture file", found=what)
    try:
        # Only formats of pixels: some others are handed to another program.
        with Image.open(file, formats=formats()) as image:
            return _pixels(image)
    except _UNREADABLE as error:
        fault = _fault(file, error)
        raise ValueError(f"picture {name}: expected a complete, readable picture file, got: {fault}") from error


def look(file: Path) -> tuple[tuple[int, int], list[str]] | None:
    """Size of a picture as it will be read, and what is special about it, by its header; None if unreadable."""
    try:
        with Image.open(file, formats=formats()) as image:
            turned = orientation(image)
            special = {
                "are turned as their EXIF says": turned in _TURNS,
                "are animated or have pages, of which the first is read": is_animated(image),
                "have an alpha channel and white behind what is transparent": image.has_transparency_data,
                "have 16 bits or fractions and are scaled to 8 bits": image.mode in _DEEP,
                "are in CMYK and become sRGB": image.mode == "CMYK",
            }
            width, height = image.size
            size = (height, width) if turned >= 5 else (width, height)
            return size, [what for what, holds in special.items() if holds]
    except _UNREADABLE:
        return None


def _fault(file: Path | BytesIO, error: Exception) -> str:
    """What is wrong with a file that cannot be decoded, and the remedy."""
    head = file.getvalue()[:256] if isinstance(file, BytesIO) else b""
    if isinstance(file, Path):
        try:
            with file.open("rb") as stream:
                head = stream.read(256)
        except OSError:
            return str(error)
    if not head:
        return "an empty file: copy it again"
    for start, mark, what in _OTHERS:
        if head[start:].startswith(mark):
            return what
    if isinstance(error, UnidentifiedImageError):
        return "a file that is no picture of a format that is read: save it as .jpg or .png"
    bounded = isinstance(error, ValueError) and "CONFED_MOST_PIXELS" in str(error)
    return str(error) if bounded else f"{error}; copy it again, or delete it"


def _pixels(image: Image.Image) -> np.ndarray:
    """Decoding to uint8 (H, W, 3)."""
    check_pixels(*image.size)
    if is_animated(image):
        warnings.warn("animated pictures are read as their first frame", stacklevel=3)
    image.load()
    turn = _TURNS.get(orientation(image))
    image = image if turn is None else image.transpose(turn)
    if image.mode in _DEEP:
        grey = _eight_bits(np.array(image), image)
        return np.repeat(grey[..., None], 3, axis=2)
    if image.has_transparency_data and image.mode != "RGBA":
        image = image.convert("RGBA")
    if image.mode == "P":
        image = image.convert("RGB")
    image = _in_srgb(image)
    return _on_white(np.array(image)) if image.mode == "RGBA" else np.array(image.convert("RGB"), dtype=np.uint8)


def is_animated(image: Image.Image) -> bool:
    """Whether an opened picture has several frames or pages; the second picture of a camera's file is none."""
    try:
        return image.format != "MPO" and bool(getattr(image, "is_animated", False))
    except _UNREADABLE:
        return False


def orientation(image: Image.Image) -> int:
    """How a camera was held, 1 to 8; 1 where nothing or nonsense says it."""
    # Pillow looks through a whole file for EXIF that is not there; in a TIFF it is the file's own tags.
    if image.format not in (None, "TIFF") and not _EXIF & image.info.keys():
        return 1
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except _UNREADABLE:
        return 1


def _eight_bits(values: np.ndarray, image: Image.Image) -> np.ndarray:
    """Deep grey as uint8: whole numbers by the bits that the file has, fractions by [0, 1], [0, 255] or their range."""
    finite = np.isfinite(values)
    values = np.where(finite, values, 0).astype(np.float64)
    low, high = float(values.min()), float(values.max())
    if image.mode == "F":
        limits = (0.0, 1.0 if high <= 1 else 255.0) if low >= 0 and high <= 255 else (low, high)
    else:
        tags: Any = getattr(image, "tag_v2", {})
        bits = tags.get(_BITS, (16,))[0]
        limits = (0.0, 2.0 ** min(bits, 16) - 1) if low >= 0 and high < 2**16 else (low, high)
        if 0 < high < limits[1] / 16:
            warnings.warn("pictures of 16 bits that use a 16th of their range are black: stretch them", stacklevel=4)
    grey = np.rint(255 * (values - limits[0]) / max(limits[1] - limits[0], 1e-30)).astype(np.uint8)
    if "transparency" in image.info:
        grey[values == image.info["transparency"]] = 255
    return grey


def _on_white(pixels: np.ndarray) -> np.ndarray:
    """Pixels (H, W, 4) on white (H, W, 3), those of a picture without any visible pixel as they are."""
    colours, alpha = pixels[..., :3], pixels[..., 3:]
    if alpha.min() == 255 or not alpha.any():
        return np.ascontiguousarray(colours)
    mixed = colours.astype(np.uint16) * alpha + 255 * (255 - alpha.astype(np.uint16))
    return ((mixed + 127) // 255).astype(np.uint8)


def _in_srgb(image: Image.Image) -> Image.Image:
    """The colours of an embedded profile as sRGB; a profile that is damaged or of other colours counts for nothing."""
    profile = image.info.get("icc_profile") or b""
    if image.mode not in _SPACES or not (profile or image.mode == "LAB"):
        return image
    try:
        transform = _transform(b"" if image.mode == "LAB" else profile, image.mode)
        return image if transform is None else transform.apply(image)
    except (ImageCms.PyCMSError, *_UNREADABLE):
        return image


@lru_cache(maxsize=16)
def _transform(profile: bytes, mode: str) -> Any:
    """Conversion of a profile's colours to sRGB; None where they are sRGB, or not of this mode."""
    given: Any = ImageCms.ImageCmsProfile(BytesIO(profile)) if profile else ImageCms.createProfile("LAB")
    core = given.profile if profile else given
    if core.xcolor_space != _SPACES[mode] or "srgb" in (core.profile_description or "").lower():
        return None
    out = "RGBA" if mode == "RGBA" else "RGB"
    return ImageCms.buildTransform(given, ImageCms.createProfile("sRGB"), mode, out)


def _of_array(picture: np.ndarray) -> np.ndarray:
    """A picture in memory."""
    if picture.ndim == 2 and picture.dtype == np.uint8:
        picture = np.repeat(picture[..., None], 3, axis=2)
    if picture.dtype == np.uint8 and picture.ndim == 3 and picture.shape[-1] == 4 and picture.size:
        picture = _on_white(picture)
    if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[-1] != 3 or not picture.size:
        raise ValueError(
            f"a picture must be uint8 of shape (H, W, 3), (H, W, 4) or (H, W), got {picture.dtype} {picture.shape}"
        )
    return picture

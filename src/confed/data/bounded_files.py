"""Memory limits for readers of data files, checked against file headers before decoding.

Half a megabyte of PNG can be 13,300 pixels square, a few hundred bytes of an archive can announce a terabyte, and some
formats name other files or other programs. Readers of pictures, NumPy arrays, tar archives and HDF5 files ask here
first. The environment variables ``CONFED_MOST_PIXELS`` and ``CONFED_MOST_ARRAY_BYTES`` set other bounds.
"""

import lzma
import os
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
from PIL import Image

from confed.data.refusals import check_form, existing, expecting, refuse
from confed.federation.reading import FAULTS

FORMATS = ("JPEG", "MPO", "PNG", "GIF", "BMP", "DIB", "WEBP", "TIFF", "PPM", "JPEG2000", "AVIF", "TGA", "ICO", "QOI")
"""Picture formats that are decoded; not among them those that start another program (EPS) or are no pixels (WMF)."""

MOST_MEMBERS = 10_000_000
"""Files that a tar archive may hold; of a zip archive a thousandth."""

_PIXELS, _BYTES = 64_000_000, 8 * 2**30
_RANK = 16
# What a damaged part of a zip archive raises, by the way it was packed.
_UNPACKING = (zlib.error, lzma.LZMAError)


def most_pixels() -> int:
    """Largest number of pixels of a picture: 64 million, or ``CONFED_MOST_PIXELS``."""
    return _bound("CONFED_MOST_PIXELS", _PIXELS)


def most_array_bytes() -> int:
    """Largest size of an array in memory in bytes: 8 GiB, or ``CONFED_MOST_ARRAY_BYTES``."""
    return _bound("CONFED_MOST_ARRAY_BYTES", _BYTES)


def _bound(name: str, usual: int) -> int:
    given = os.environ.get(name, "").strip()
    if not given:
        return usual
    if not given.isascii() or not given.isdigit() or not 0 < len(given) < 19 or not int(given):
        raise ValueError(f"the environment variable {name} must be a positive whole number, got {given[:40]!r}")
    return int(given)


# Pictures ---------------------------------------------------------------------------------------------------


def formats() -> list[str]:
    """The picture formats of :data:`FORMATS` that this installation of Pillow can decode."""
    Image.init()
    return [name for name in FORMATS if name in Image.OPEN]


def check_pixels(width: int, height: int) -> None:
    """Check of a picture's number of pixels, by its header."""
    if width * height > most_pixels():
        raise ValueError(
            f"at most {most_pixels():,} pixels, got {width:,} x {height:,} (CONFED_MOST_PIXELS sets another bound)"
        )


# NumPy arrays -----------------------------------------------------------------------------------------------


def array_header(stream: Any, where: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of an array in NumPy's format, without reading its values."""
    with expecting(where, "arrays in NumPy's format", MemoryError, SyntaxError, TokenError, *FAULTS):
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, kind = read(stream)
    if kind.hasobject:
        refuse(where, "numbers", found="Python objects", remedy="reading those would run what is in them: save it as "
               "a plain array of numbers")  # fmt: skip
    check_array(shape, kind, where)
    return shape, kind


def check_array(shape: Sequence[int], kind: np.dtype[Any], where: str) -> int:
    """The bytes of an array."""
    if len(shape) > _RANK or min(shape, default=0) < 0:
        refuse(where, f"at most {_RANK} extents, none negative", found=str(shape)[:80])
    size = prod(shape) * kind.itemsize
    if size > most_array_bytes():
        refuse(
            where, f"at most {most_array_bytes():,} bytes (CONFED_MOST_ARRAY_BYTES sets another bound)",
            found=f"an array of {str(tuple(shape))[:80]} {kind}, {size:,} bytes",
        )  # fmt: skip
    return size


def load_npy(file: Path) -> np.ndarray:
    """An ``.npy`` file's array; its size is compared with its header before memory is taken."""
    with expecting(file, "a complete .npy file", ValueError, OSError, EOFError), file.open("rb") as stream:
        _check_complete(stream, "its header", file.stat().st_size)
        return np.load(file, allow_pickle=False)


def npz_arrays(file: Path, forms: Mapping[str, tuple[Any, ...]]) -> dict[str, np.ndarray]:
    """Arrays of an ``.npz`` file by their declared dtypes and extents; equal names of extents are equal numbers."""
    arrays = load_npz(existing(file), tuple(forms))
    extents: dict[int | str, int] = {}
    for name, (kind, *wanted) in forms.items():
        if name not in arrays:
            refuse(file, f"the arrays {', '.join(forms)}", found=", ".join(arrays) or "none")
        check_form(f"{file}: {name}", arrays[name], kind, *(extents.get(one, one) for one in wanted))  # pyright: ignore[reportArgumentType]
        extents |= dict(zip(wanted, arrays[name].shape, strict=True))
    return arrays


def load_npz(file: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """The named arrays of an ``.npz`` file; those that it does not have are left out."""
    faults = (ValueError, OSError, EOFError, KeyError, RuntimeError, zipfile.BadZipFile, *_UNPACKING)
    with expecting(file, "a complete .npz file without objects", *faults):
        with zipfile.ZipFile(file) as archive:
            if len(archive.infolist()) > MOST_MEMBERS // 1000:
                refuse("an archive", f"at most {MOST_MEMBERS // 1000:,} arrays", found=len(archive.infolist()))
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            if len(members) < len(archive.infolist()):  # which of them NumPy would read is not which was measured
                refuse("an archive", "a name for every array", found="some twice, with or without .npy")
            for name in names:
                if name in members:
                    with archive.open(members[name]) as stream:
                        _check_complete(stream, f"the header of {name}", members[name].file_size)
        with np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in names if name in members}


def _check_complete(stream: Any, where: object, size: int) -> None:
    """Check that an array is as long as its header says."""
    shape, kind = array_header(stream, str(where))
    if stream.tell() + prod(shape) * kind.itemsize > size:
        refuse(where, f"{shape} {kind}, as its header says", found=f"only {size:,} bytes")


# Archives and HDF5 ------------------------------------------------------------------------------------------


PLAIN_TAR = "a complete, uncompressed tar archive"


def tar_members(archive: tarfile.TarFile, file: Path) -> Iterator[tarfile.TarInfo]:
    """The plain files in an uncompressed tar archive."""
    size = file.stat().st_size
    for number, member in enumerate(archive):
        if number >= MOST_MEMBERS:
            refuse(file, f"at most {MOST_MEMBERS:,} files in an archive", found="more")
        if not member.isfile():
            continue
        if member.issparse():
            refuse(file, "plain files", found=f"{member.name!r}, which is sparse", remedy="pack it as a plain file")
        if member.offset_data + member.size > size:
            refuse(file, f"all of {member.name!r}", found="its beginning", remedy="is it cut off?")
        yield member


def hdf5_array(content: Any, key: str, where: str, rows: bool = False) -> Any:
    """An array of an open HDF5 file, not read yet, that lies in this file and nowhere else."""
    dataset = content[key]
    if not hasattr(dataset, "dtype"):
        refuse(f"{where}, {key}", "an array", found="a group")
    if dataset.file.filename != content.file.filename or dataset.external is not None or dataset.is_virtual:
        refuse(f"{where}, {key}", "an array that is stored in this file", found="one that refers to another")
    check_array(dataset.shape[1:] if rows else dataset.shape, dataset.dtype, f"{where}, {key}")
    return dataset

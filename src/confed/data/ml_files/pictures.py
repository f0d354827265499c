"""Lazily read pictures of a :class:`~confed.data.ml_files.table.MultiLabelTable`.

They lie in a folder, in an uncompressed tar archive, or in an HDF5 file. Nothing is kept and no file stays open, so
that memory does not grow and processes may fork.
"""

import tarfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from confed.data.bounded_files import check_pixels, hdf5_array, tar_members
from confed.data.ml_files.integrity import faults
from confed.data.ml_files.table import MultiLabelTable, PackedTexts
from confed.data.picture_files import Check, PictureFiles, check_unreadable
from confed.data.pictures import empty_table, read_picture, resize

__all__ = ["Check", "Hdf5Pictures", "LazyPictures", "NamedPictures", "TarPictures", "drop_unreadable", "open_pictures"]

_CHANGED = "it could be read when all pictures were checked"


class LazyPictures:
    """Pictures that stay where they are, the base of three kinds; :class:`confed.data.picture_tables.Pictures`.

    Args:
        source: where the pictures lie.
        names: their names there, M.
        size: side of the square pictures in pixels; other proportions are squeezed.

    Attributes:
        advice: what errors about pictures end with.
        unreadable: for questions and captions, share of the pictures that a run may leave out; see
            :mod:`confed.data.readable`.
        check: how that is found out before a run; see :class:`confed.data.picture_files.PictureFiles`.

    Raises:
        ValueError: ``size`` is not positive, or there is nothing at ``source``.
    """

    dtype = np.dtype(np.uint8)
    ndim = 4
    advice = ""
    unreadable: float = 0.01
    check: Check = "decoded"

    def __init__(self, source: Path, names: PackedTexts, size: int) -> None:
        if size < 1:
            raise ValueError(f"image_size must be at least 1 pixel, got {size}")
        if not source.exists():
            raise ValueError(f"the pictures {source} do not exist")
        self.source, self.names, self.size = source, names, size

    def __len__(self) -> int:
        return len(self.names)

    @property
    def shape(self) -> tuple[int, ...]:
        """(M, S, S, 3)."""
        return len(self.names), self.size, self.size, 3

    def __getitem__(self, index: int | np.ndarray) -> np.ndarray:
        """One picture (S, S, 3), or those of B indices (B, S, S, 3), uint8.

        Raises:
            ValueError: a picture is missing or unreadable (names it).
        """
        try:
            if isinstance(index, int | np.integer):
                return self._read([int(index)])[0]
            rows = np.asarray(index).tolist()
            return self._read(rows) if rows else np.zeros((0, *self.shape[1:]), dtype=np.uint8)
        except ValueError as error:
            if self.advice:
                raise ValueError(f"{error}; {self.advice}") from error
            raise

    def _read(self, rows: Sequence[int]) -> np.ndarray:
        raise NotImplementedError

    def fault(self, row: int) -> str:
        """Why a picture cannot be read; empty if it can. It is decoded, in any thread."""
        try:
            self._read([row])
        except ValueError as error:
            return str(error)
        return ""

    def present(self, row: int) -> bool:
        """Whether there is a picture that is not empty; it is not read."""
        raise NotImplementedError

    def version(self, row: int) -> tuple[int, ...]:
        """Version of a picture beyond that of the file :attr:`source`; the picture is not read."""
        raise NotImplementedError


class NamedPictures(LazyPictures):
    """Picture files below a folder; a batch is decoded by as many threads as torch uses."""

    def _read(self, rows: Sequence[int]) -> np.ndarray:
        files = [self.source / self.names[row] for row in rows]
        return PictureFiles(files, self.size)[np.arange(len(files))]

    def present(self, row: int) -> bool:
        """See :meth:`LazyPictures.present`."""
        return self.version(row)[0] > 0

    def version(self, row: int) -> tuple[int, ...]:
        """The size in bytes and the time of the last change in ns, zeros for a picture that is not there."""
        try:
            status = (self.source / self.names[row]).stat()
        except (OSError, ValueError):  # of a name with a NUL it is a ValueError
            return 0, 0
        return status.st_size, status.st_mtime_ns


class TarPictures(LazyPictures):
    """Members of an uncompressed tar archive, which is read in place.

    Raises:
        ValueError: as above, or the archive cannot be read.
    """

    def __init__(self, source: Path, names: PackedTexts, size: int) -> None:
        super().__init__(source, names, size)
        try:
            status = source.stat()
            members = _members(source, status.st_mtime_ns, status.st_size)
        except (OSError, tarfile.TarError) as error:
            raise ValueError(f"{source}: expected a complete, uncompressed tar archive, got: {error}") from error
        spans = [members.get(name.removeprefix("./"), (0, 0)) for name in names]
        self._spans = np.array(spans, dtype=np.int64).reshape(-1, 2)

    def _read(self, rows: Sequence[int]) -> np.ndarray:
        pictures: list[np.ndarray] = []
        with self.source.open("rb") as archive:
            for row in rows:
                if not self.present(row):
                    raise ValueError(f"picture {self.names[row]!r}: expected it in {self.source}")
                start, length = self._spans[row].tolist()
                archive.seek(start)
                picture = read_picture(archive.read(length), name=f"{self.source}:{self.names[row]}")
                pictures.append(resize(picture, self.size))
        return np.stack(pictures)

    def present(self, row: int) -> bool:
        """See :meth:`LazyPictures.present`."""
        return bool(self._spans[row, 1] > 0)

    def version(self, row: int) -> tuple[int, ...]:
        """Offset and size of the picture in bytes."""
        return tuple(self._spans[row].tolist())


@lru_cache(maxsize=1)  # of hundreds of thousands of pictures it takes seconds, and every split asks for it
def _members(source: Path, changed: int, size: int) -> Mapping[str, tuple[int, int]]:
    """Offset and size in bytes of each file of a tar archive."""
    del changed, size  # they tell one state of the file from another
    with tarfile.open(source, "r:") as tar:
        return {
            member.name.removeprefix("./"): (member.offset_data, member.size) for member in tar_members(tar, source)
        }


class Hdf5Pictures(LazyPictures):
    """Arrays (H, W, 3), or rows of arrays (M, H, W, 3), of an HDF5 file, uint8.

    Arrays that are neither compressed nor have checksums can be read whatever their bytes are: damage to those is not
    detected.

    Raises:
        ValueError: as above, or h5py is not installed.
    """

    def __init__(self, source: Path, names: PackedTexts, size: int) -> None:
        super().__init__(source, names, size)
        try:
            self._h5py: Any = import_module("h5py")
        except ImportError as error:
            raise ValueError(f"reading {source} needs the package h5py: pip install h5py") from error

    def _read(self, rows: Sequence[int]) -> np.ndarray:
        try:
            with self._h5py.File(self.source, "r") as content:
                return np.stack([self._one(content, self.names[row]) for row in rows])
        except (OSError, KeyError, IndexError, RuntimeError) as error:
            names = ", ".join(self.names[row] for row in rows[:3])
            raise ValueError(f"{self.source}: expected the pictures {names} ..., got: {error}") from error

    def _one(self, content: Any, key: str) -> np.ndarray:
        name, _, number = key.partition("#")
        stored = hdf5_array(content, name, str(self.source), rows=bool(number))
        if stored.ndim == 3 + bool(number):
            check_pixels(*stored.shape[bool(number) : 2 + bool(number)])
        picture = np.asarray(stored[int(number)] if number else stored[()])
        if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3:
            raise ValueError(
                f"{self.source}, {key}: expected a picture (H, W, 3) of uint8, got {picture.dtype} {picture.shape}"
            )
        return resize(picture, self.size)

    def present(self, row: int) -> bool:
        """See :meth:`LazyPictures.present`. The reader of the labels has met the array already."""
        return True

    def version(self, row: int) -> tuple[int, ...]:
        """Nothing: the file's own size and time of change are those of all its pictures."""
        return ()


def open_pictures(source: Path, names: PackedTexts, size: int) -> LazyPictures:
    """The pictures of M names in a folder, a tar archive (``.tar``) or an HDF5 file (``.h5``, ``.hdf5``).

    Raises ``ValueError``: there is nothing at ``source``, or it cannot be read.
    """
    makers: dict[str, Callable[[Path, PackedTexts, int], LazyPictures]] = {
        ".tar": TarPictures,
        ".h5": Hdf5Pictures,
        ".hdf5": Hdf5Pictures,
    }
    return (NamedPictures if source.is_dir() else makers.get(source.suffix.lower(), NamedPictures))(source, names, size)


def drop_unreadable(
    table: MultiLabelTable,
    source: Path,
    size: int,
    *,
    at_most: float = 0.01,
    check: Check = "decoded",
    hold: int = 0,
) -> tuple[MultiLabelTable, LazyPictures | np.ndarray]:
    """Removal of rows with unreadable pictures, with a warning, or an error if there are too many.

    Raises ``ValueError``: more than ``at_most`` cannot be read (the message names the first one), the share is outside
    [0, 1], the check is unknown, or there is nothing at ``source``.

    Args:
        table: rows with pictures.
        source: where these lie.
        size: side of the square pictures in pixels.
        at_most: share of the rows that may be left out.
        check: "decoded" decodes every picture once and remembers the verdict, see
            :mod:`confed.data.ml_files.integrity`. "present" only looks whether it is there and not empty: a damaged one
            then leaves its client out of every round that this one is drawn for, and ends the run in an evaluation,
            with an error that names it.
        hold: keep all pictures in memory, as uint8 (M, S, S, 3), if they take at most so many bytes; they are then
            decoded whatever ``check`` says, and only once.

    Returns:
        The table without them, with their names in ``unreadable``, and its pictures.
    """
    check_unreadable(at_most, check)
    pictures = open_pictures(source, table.pictures, size)
    held = empty_table(len(table), size) if len(table) * size * size * 3 <= hold else None
    if held is not None:
        lost = _read_into(held, pictures)
    elif check == "decoded":
        lost = faults(pictures)
    else:
        absent = (row for row in range(len(table)) if not pictures.present(row))
        lost = {row: f"picture {table.pictures[row]}: it is missing or empty" for row in absent}
    readable = np.ones(len(table), dtype=bool)
    if lost:
        _speak_of(lost, len(table), source, at_most)
        readable[list(lost)] = False
        names = tuple(table.pictures[row] for row in sorted(lost))
        table = replace(table.keep(readable), unreadable=(*table.unreadable, *names))
    if held is not None:
        if lost:
            held, whole = empty_table(len(table), size), held
            held[:] = whole[readable]
        return table, held
    if lost:
        pictures = open_pictures(source, table.pictures, size)
    pictures.advice = 'data.check = "decoded" would leave it out' if check == "present" else _CHANGED
    return table, pictures


def _speak_of(lost: Mapping[int, str], count: int, source: Path, at_most: float) -> None:
    """Warning of unreadable pictures, or an error if there are too many.

    Raises:
        ValueError: more than the share ``at_most`` cannot be read.
    """
    told, first = f"{len(lost)} of {count} pictures in {source} cannot be read", lost[min(lost)]
    if len(lost) > at_most * count:
        raise ValueError(f"{told}, more than the share of {at_most:g} that may be left out; the first: {first}")
    warnings.warn(f"{told} and are left out; the first: {first}", stacklevel=3)


def _read_into(held: np.ndarray, pictures: LazyPictures) -> dict[int, str]:
    """Decoding of all pictures into a table (M, S, S, 3); the result has errors by row."""
    lost: dict[int, str] = {}
    for row in range(len(pictures)):
        try:
            held[row] = pictures[row]
        except ValueError as error:
            lost[row] = str(error)
    return lost

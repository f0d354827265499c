"""Pictures that are read when they are asked for: in files, in an uncompressed tar archive, or in an HDF5 file."""

import os
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from unicodedata import normalize

import numpy as np
import torch

from confed.data.bounded_files import PLAIN_TAR, check_pixels, hdf5_array, tar_members
from confed.data.intake.identity import first_copies, first_copies_of_files
from confed.data.intake.opening import read_picture
from confed.data.intake.values import stored_name
from confed.data.intake.walk import ENDINGS, visible
from confed.data.picture_tables import Pictures
from confed.data.pictures import Fit, current_fit, empty_table, resize
from confed.data.ragged import PackedTexts
from confed.data.refusals import existing_folder, expecting, first_of, library, refuse
from confed.federation.ranges import SHARE, check_value

HELD = 1 << 28
"""Bytes of pictures that readers of people's own files keep in memory."""
Check = Literal["decoded", "present"]
"""How pictures are checked before a run; see :class:`PictureFiles`."""


class NamedPictures(ABC):
    """M pictures of one folder or archive by their names there, a table (M, S, S, 3), uint8; the base of all on disk.

    They are read when they are asked for, and checked before a run, which leaves out the examples whose pictures cannot
    be read (:mod:`confed.data.readable`).

    Attributes:
        unreadable: for questions and captions, share of the pictures that a run may leave out because they cannot be
            read.
        check: "decoded" decodes all pictures once, before the first round; the verdict is remembered until a file
            changes. "present" only looks whether they are there and not empty: a damaged one then leaves its client
            out of rounds, or ends the run in an evaluation.
    """

    dtype = np.dtype(np.uint8)
    ndim = 4
    advice = ""
    unreadable: float = 0.01
    check: Check = "decoded"

    def __init__(self, source: Path, names: PackedTexts, size: int) -> None:
        first_of([source], "the pictures")
        self.source, self.names, self.size = source, names, size
        self.fit: Fit = current_fit()

    def __len__(self) -> int:
        return len(self.names)

    @property
    def shape(self) -> tuple[int, ...]:
        """(M, S, S, 3)."""
        return len(self), self.size, self.size, 3

    def __getitem__(self, index: int | np.ndarray) -> np.ndarray:
        """One picture (S, S, 3), or those of B indices (B, S, S, 3), uint8."""
        try:
            if isinstance(index, int | np.integer):
                return self._read([int(index)])[0]
            rows = np.asarray(index).tolist()
            return self._read(rows) if rows else np.zeros((0, *self.shape[1:]), dtype=np.uint8)
        except ValueError as error:
            if self.advice:
                raise ValueError(f"{error}; {self.advice}") from error
            raise

    @abstractmethod
    def _read(self, rows: Sequence[int]) -> np.ndarray:
        """The pictures of at least one row, (B, S, S, 3)."""

    def take(self, rows: np.ndarray) -> Self:
        """The pictures of some rows, in their order, with the same options."""
        fewer = copy(self)
        fewer.names = self.names.take(rows)
        return fewer

    def fault(self, row: int) -> str:
        """Why a picture cannot be read; empty if it can. It is decoded, in any thread."""
        try:
            self._read([row])
        except ValueError as error:
            return str(error)
        return ""

    def first_copies(self) -> list[int]:
        """The first row with the same bytes as each row; of pictures that are no files of their own the row itself."""
        return list(range(len(self)))

    @abstractmethod
    def present(self, row: int) -> bool:
        """Whether there is a picture that is not empty; it is not read."""

    @abstractmethod
    def version(self, row: int) -> tuple[int, ...]:
        """Version of a picture beyond that of the file :attr:`source`; the picture is not read."""


class PictureFiles(NamedPictures):
    """Picture files; a batch is decoded by as many threads as torch uses in this process (``run.threads``)."""

    def __init__(
        self,
        files: Iterable[Path | str],
        size: int,
        *,
        below: Path | None = None,
        unreadable: float = 0.01,
        check: Check = "decoded",
    ) -> None:
        source, names = _below_one_folder(files) if below is None else (below, files)
        super().__init__(source, names if isinstance(names, PackedTexts) else PackedTexts.of(map(str, names)), size)
        check_value(unreadable, Annotated[float, SHARE], "unreadable")
        check_value(check, Check, "check")
        self.unreadable = unreadable
        self.check: Check = check

    def of(self, files: Iterable[Path | str]) -> "PictureFiles":
        """Other files with the same options."""
        same = PictureFiles(files, self.size, unreadable=self.unreadable, check=self.check)
        same.fit = self.fit
        return same

    def file(self, row: int) -> Path:
        """Path of a picture."""
        return self.source / self.names[row]

    def _read(self, rows: Sequence[int]) -> np.ndarray:
        threads = min(torch.get_num_threads(), len(rows))
        if threads == 1:
            return np.stack([self._one(row) for row in rows])
        # The pool lives for one batch: one that outlives a fork has no threads in the child.
        with ThreadPoolExecutor(threads) as pool:
            return np.stack(list(pool.map(self._one, rows)))

    def opened(self, row: int) -> np.ndarray:
        """A picture of its own size, uint8 (H, W, 3); readers of other formats override it."""
        return read_picture(self.file(row))

    def _one(self, row: int) -> np.ndarray:
        return resize(self.opened(row), self.size, self.fit)

    def first_copies(self) -> list[int]:
        return first_copies_of_files([self.file(row) for row in range(len(self))])

    def present(self, row: int) -> bool:
        return self.version(row)[0] > 0

    def version(self, row: int) -> tuple[int, ...]:
        """The size in bytes and the time of the last change in ns, zeros for a picture that is not there."""
        try:
            status = self.file(row).stat()
        except (OSError, ValueError):  # of a name with a NUL it is a ValueError
            return 0, 0
        return status.st_size, status.st_mtime_ns


def _below_one_folder(files: Iterable[Path | str]) -> tuple[Path, Iterable[str]]:
    """The folder that all files lie in, and their names below."""
    here = os.getcwd()
    paths = [os.path.join(here, file) for file in files]  # of half a million files, Path objects take seconds
    if not paths:
        return Path(), ()
    try:
        folder = Path(os.path.commonpath({os.path.dirname(path) for path in paths}))
    except ValueError:  # they lie on several drives
        folder = Path(paths[0]).parent
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    start = os.path.join(folder, "")
    return folder, (path.removeprefix(start) for path in paths)  # elsewhere an absolute name stays what it is


class TarPictures(NamedPictures):
    """Members of an uncompressed tar archive, which is read in place."""

    def __init__(self, source: Path, names: PackedTexts, size: int) -> None:
        super().__init__(source, names, size)
        self._spans = tar_spans(source, names)

    def _read(self, rows: Sequence[int]) -> np.ndarray:
        pictures: list[np.ndarray] = []
        with self.source.open("rb") as archive:
            for row in rows:
                if not self.present(row):
                    refuse(f"picture {self.names[row]!r}", f"it in {self.source}", found="none")
                start, length = self._spans[row].tolist()
                archive.seek(start)
                picture = read_picture(archive.read(length), name=f"{self.source}:{self.names[row]}")
                pictures.append(resize(picture, self.size, self.fit))
        return np.stack(pictures)

    def take(self, rows: np.ndarray) -> Self:
        fewer = super().take(rows)
        fewer._spans = self._spans[rows]
        return fewer

    def first_copies(self) -> list[int]:
        with self.source.open("rb") as archive:

            def read(row: int, most: int) -> bytes:
                start, length = self._spans[row].tolist()
                archive.seek(start)
                return archive.read(length if most < 0 else min(length, most))

            return first_copies(self._spans[:, 1].tolist(), read)

    def present(self, row: int) -> bool:
        return bool(self._spans[row, 1] > 0)

    def version(self, row: int) -> tuple[int, ...]:
        """Offset and size of the picture in bytes."""
        return tuple(self._spans[row].tolist())


def tar_spans(source: Path, names: Iterable[str]) -> np.ndarray:
    """First byte and size of each of M files in a tar archive, int64 (M, 2); zeros of one that is not there."""
    with expecting(source, PLAIN_TAR, OSError, tarfile.TarError):
        status = source.stat()
        members = _members(source, status.st_mtime_ns, status.st_size)
    spans = [members.get(normalize("NFC", name.removeprefix("./")), (0, 0)) for name in names]
    return np.array(spans, dtype=np.int64).reshape(-1, 2)


@lru_cache(maxsize=1)  # of hundreds of thousands of pictures it takes seconds, and every split asks for it
def _members(source: Path, changed: int, size: int) -> Mapping[str, tuple[int, int]]:
    """Offset and size in bytes of each file of a tar archive."""
    del changed, size  # they tell one state of the file from another
    with tarfile.open(source, "r:") as tar:
        return {
            normalize("NFC", member.name.removeprefix("./")): (member.offset_data, member.size)
            for member in tar_members(tar, source)
        }


class Hdf5Pictures(NamedPictures):
    """Arrays (H, W, 3), or rows of arrays (M, H, W, 3), of an HDF5 file, uint8."""

    def __init__(self, source: Path, names: PackedTexts, size: int) -> None:
        super().__init__(source, names, size)
        self._h5py = library("h5py", source, "data")

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
            refuse(f"{self.source}, {key}", "a picture (H, W, 3) of uint8", found=f"{picture.dtype} {picture.shape}")
        return resize(picture, self.size, self.fit)

    def present(self, row: int) -> bool:
        """See :meth:`NamedPictures.present`. The reader of the labels has met the array already."""
        return True

    def version(self, row: int) -> tuple[int, ...]:
        """Nothing: the file's own size and time of change are those of all its pictures."""
        return ()


def open_pictures(source: Path, names: PackedTexts, size: int) -> NamedPictures:
    """The pictures of M names in a folder, a tar archive (``.tar``) or an HDF5 file (``.h5``, ``.hdf5``)."""
    makers = {".tar": TarPictures, ".h5": Hdf5Pictures, ".hdf5": Hdf5Pictures}
    maker = None if source.is_dir() else makers.get(source.suffix.lower())
    stored = names if maker else PackedTexts.of(stored_name(source, name) for name in names)
    return PictureFiles(stored, size, below=source) if maker is None else maker(source, names, size)


def in_memory(pictures: np.ndarray | Pictures) -> np.ndarray:
    """All pictures of a table (M, S, S, 3), in memory."""
    held = empty_table(len(pictures), pictures.shape[1])
    for row in range(len(pictures)):
        held[row] = pictures[row]
    return held


def find_pictures(folder: Path, names: Iterable[str] | None = None) -> dict[str, Path]:
    """The picture files of a folder by their names without ending."""
    existing_folder(folder)
    wanted = None if names is None else set(names)
    files: dict[str, Path] = {}
    for file in visible(folder, *ENDINGS):
        if wanted is None or file.stem in wanted:
            # A name with several endings is the .jpg, as the official archive has it.
            files[file.stem] = min(files.get(file.stem, file), file, key=_jpg_first)
    return dict(sorted(files.items()))


def _jpg_first(file: Path) -> tuple[bool, str]:
    return file.suffix.lower() != ".jpg", file.suffix.lower()

"""Readers of published region features: one file per picture (.npz, .npy), or HDF5.

* A .npz file per picture, as openvqa, bottom-up-attention.pytorch and makers of grid features write them: ``x`` or
  ``features`` of shape (R, W) or (W, R); ``bbox`` or ``boxes`` (R, 4); ``image_h`` and ``image_w``, unless the boxes
  are fractions of the picture already.
* A .npy file per picture: (R, W), or a grid (W, h, w). It has no boxes: they are the whole picture, or the cells.
* HDF5 with as many regions of every picture: ``image_features`` or ``features`` (M, R, W); ``image_bb`` or ``boxes``
  (M, R, 4) with ``image_h`` and ``image_w`` (M,), or ``spatial_features``, whose first four are fractions.
* HDF5 with 10 to 100 regions a picture: the same, all pictures one behind the other, (N, W) and (N, 4); ``pos_boxes``
  (M, 2) has every picture's first row and the one behind its last.

The number of a picture is at the end of its file's name (``COCO_train2014_000000000009.jpg.npz``); of HDF5 it is in
``image_ids``, or in a JSON file beside it, ``NAME_imgid2idx.json``, that maps numbers to rows. Arrays of Python objects
and pickle files are refused: reading them runs what is in them.
"""

import json
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from confed.data.bounded_files import array_header, check_array, hdf5_array, load_npy, load_npz
from confed.data.regions import grid_boxes

__all__ = ["PictureRegions", "read_layout"]

_FEATURES = ("x", "features", "image_features", "feat")
_BOXES = ("bbox", "boxes", "image_bb", "bboxes")
_HEIGHT, _WIDTH = ("image_h", "height", "h"), ("image_w", "width", "w")
_IDS = ("image_ids", "image_id", "ids")
_SUFFIXES = (".h5", ".hdf5")
_MARGIN = 0.02
"""How far, as a share of its side, a box may reach over the picture before it is taken for an error."""
_PICTURE = (".jpg", ".jpeg", ".png")


@dataclass(frozen=True)
class PictureRegions:
    """One picture's regions in a file.

    Attributes:
        image: the picture's number.
        where: file, or file and row, for messages.
        count: regions, R.
        width: features per region, W.
        read: gives features (R, W) and boxes (R, 4) in [0, 1] of the picture, float32, both checked.
    """

    image: int
    where: str
    count: int
    width: int
    read: Callable[[], tuple[np.ndarray, np.ndarray]]


def read_layout(path: Path) -> Iterator[PictureRegions]:
    """The pictures of a folder with a file for each, or of an HDF5 file; arrays are read when they are asked for.

    Args:
        path: the folder or the file.

    Raises:
        ValueError: nothing there is understood, an array is missing, damaged, of objects or of another shape, or a
            file's name has no number (names the file).
    """
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in (".npz", ".npy"))
        if not files:
            raise ValueError(f"expected .npz or .npy files, one per picture, in {path}, found none")
        for file in files:
            yield _npz(file) if file.suffix == ".npz" else _npy(file)
    elif path.is_file() and path.suffix in _SUFFIXES:
        yield from _hdf5(path)
    else:
        raise ValueError(f"features must be a folder with .npz or .npy files, or a file .h5 or .hdf5, got {path}")


# One file per picture ---------------------------------------------------------------------------------------


def _number(file: Path) -> int:
    stem = file.name.removesuffix(file.suffix)
    for ending in _PICTURE:
        stem = stem.removesuffix(ending)
    digits = re.search(r"(\d+)$", stem)
    if digits is None:
        raise ValueError(f"{file}: expected a name that ends in the picture's number, such as 000000000009.npz")
    return int(digits[1])


def _npz(file: Path) -> PictureRegions:
    try:
        with zipfile.ZipFile(file) as archive:
            names = {name.removesuffix(".npy"): name for name in archive.namelist()}
            features, boxes = (_key(names, keys, file) for keys in (_FEATURES, _BOXES))
            shape = _header(archive, names[features], file)
            boxed = _header(archive, names[boxes], file)
    except (zipfile.BadZipFile, OSError, EOFError) as error:
        raise ValueError(f"{file} must be a complete .npz file: {error}") from error
    if len(shape) != 2 or len(boxed) != 2 or boxed[1] != 4 or boxed[0] not in shape:
        raise ValueError(
            f"{file}: expected {features!r} of shape (R, W) or (W, R) and {boxes!r} of shape (R, 4), got {shape} and "
            f"{boxed}"
        )
    # openvqa's files have a region per column.
    turned = shape[0] != boxed[0]

    def read() -> tuple[np.ndarray, np.ndarray]:
        held = load_npz(file, (features, boxes, *_HEIGHT, *_WIDTH))
        values = held[features].T if turned else held[features]
        return _checked(values, _fractions(held[boxes], _size(held), str(file)), str(file))

    count, width = shape[::-1] if turned else shape
    return PictureRegions(_number(file), str(file), count, width, read)


def _npy(file: Path) -> PictureRegions:
    with file.open("rb") as stream:
        shape = _array_header(stream, file)
    if len(shape) not in (2, 3):
        raise ValueError(f"{file}: expected features of shape (R, W), or a grid (W, h, w), got {shape}")
    if len(shape) == 3:
        width, rows, columns = shape
        boxes = grid_boxes(rows, columns)
    else:
        rows, width = shape
        columns, boxes = 1, np.tile(np.array([0, 0, 1, 1], dtype=np.float32), (rows, 1))

    def read() -> tuple[np.ndarray, np.ndarray]:
        values = load_npy(file)
        return _checked(values.reshape(width, -1).T if values.ndim == 3 else values, boxes, str(file))

    return PictureRegions(_number(file), str(file), rows * columns, width, read)


def _key(there: Mapping[str, Any], keys: Sequence[str], file: Path) -> str:
    found = [key for key in keys if key in there]
    if not found:
        raise ValueError(f"{file}: expected an array {' or '.join(map(repr, keys))}, got {', '.join(there) or 'none'}")
    return found[0]


def _header(archive: zipfile.ZipFile, name: str, file: Path) -> tuple[int, ...]:
    with archive.open(name) as stream:
        return _array_header(stream, file)


def _array_header(stream: Any, file: Path) -> tuple[int, ...]:
    """The shape of an array in NumPy's format, without reading its values."""
    return array_header(stream, str(file))[0]


# HDF5 -------------------------------------------------------------------------------------------------------


def _hdf5(file: Path) -> Iterator[PictureRegions]:
    try:
        h5py: Any = import_module("h5py")
    except ImportError as error:
        raise ValueError(f"reading {file} needs the package h5py: pip install h5py") from error
    try:
        content = h5py.File(file, "r")
    except OSError as error:
        raise ValueError(f"{file} must be a complete HDF5 file: {error}") from error
    # It stays open as long as a picture of it may still be read.
    features = hdf5_array(content, _key(content, _FEATURES, file), str(file), rows=True)
    scaled = next((key for key in _BOXES if key in content), None)
    boxes = hdf5_array(content, scaled or _key(content, ("spatial_features", *_BOXES), file), str(file), rows=True)
    ends = hdf5_array(content, "pos_boxes", str(file))[:] if "pos_boxes" in content else None
    if features.ndim != (3 if ends is None else 2) or boxes.shape[:-1] != features.shape[:-1] or boxes.shape[-1] < 4:
        expected = "(M, R, W)" if ends is None else "(N, W)"
        raise ValueError(
            f"{file}: expected features of shape {expected} and as many boxes, of at least 4 numbers, got "
            f"{features.shape} and {boxes.shape}"
        )
    images = _hdf5_ids(content, file, len(features) if ends is None else len(ends))
    sizes = {
        key: hdf5_array(content, name, str(file))[:] for key, names in (("image_h", _HEIGHT), ("image_w", _WIDTH))
        for name in names if name in content
    }  # fmt: skip
    for row, image in enumerate(images):
        where = f"{file}, row {row}"
        at = row if ends is None else slice(int(ends[row][0]), int(ends[row][1]))
        if isinstance(at, slice) and not 0 <= at.start <= at.stop <= len(features):
            raise ValueError(f"{where}: expected regions among 0 to {len(features)}, got {at.start} to {at.stop}")

        def read(row: int = row, at: Any = at, where: str = where) -> tuple[np.ndarray, np.ndarray]:
            own = boxes[at][:, :4]
            size = _size({key: values[row] for key, values in sizes.items()})
            return _checked(features[at], own if scaled is None else _fractions(own, size, where), where)

        count = features.shape[1] if isinstance(at, int) else at.stop - at.start
        check_array((count, features.shape[-1]), features.dtype, where)
        yield PictureRegions(image, where, count, features.shape[-1], read)


def _hdf5_ids(content: Any, file: Path, count: int) -> list[int]:
    """The numbers of the pictures in the order of the rows."""
    beside = file.with_name(f"{file.stem}_imgid2idx.json")
    key = next((key for key in _IDS if key in content), None)
    if key is None and not beside.is_file():
        raise ValueError(
            f"{file}: expected the pictures' numbers in 'image_ids', or beside it a JSON object {beside.name} that "
            "maps them to rows (a .pkl file is not read: write it anew as JSON)"
        )
    source = file if key is not None else beside
    try:
        if key is not None:
            ids = [int(image) for image in content[key][:]]
            rows = list(range(len(ids)))
        else:
            given: dict[str, int] = json.loads(beside.read_text(encoding="utf-8"))
            ids, rows = [int(image) for image in given], [int(row) for row in given.values()]
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{source}: expected the numbers of pictures (and their rows), got: {error}") from error
    if len(ids) != count:
        raise ValueError(f"{source}: expected the numbers of {count} pictures, got {len(ids)}")
    if sorted(rows) != list(range(count)):
        raise ValueError(f"{source}: expected the rows 0 to {count - 1}, each once")
    return [image for _, image in sorted(zip(rows, ids, strict=True))]


# Checks -----------------------------------------------------------------------------------------------------


def _size(held: Mapping[str, Any]) -> tuple[float, float] | None:
    """(height, width) in pixels."""
    found = [next((float(np.max(held[key])) for key in keys if key in held), 0.0) for keys in (_HEIGHT, _WIDTH)]
    return (found[0], found[1]) if min(found) > 0 else None


def _fractions(boxes: np.ndarray, size: tuple[float, float] | None, where: str) -> np.ndarray:
    """Boxes in [0, 1] of the picture."""
    boxes = boxes.astype(np.float32)
    if boxes.size and boxes.max() > 1 + _MARGIN:
        if size is None:
            raise ValueError(
                f"{where}: boxes are in pixels (up to {boxes.max():g}) and the picture's size is missing: expected "
                f"'{_HEIGHT[0]}' and '{_WIDTH[0]}'"
            )
        boxes = boxes / np.array([size[1], size[0], size[1], size[0]], dtype=np.float32)
    return boxes


def _checked(features: np.ndarray, boxes: np.ndarray, where: str) -> tuple[np.ndarray, np.ndarray]:
    features, boxes = features.astype(np.float32), boxes.astype(np.float32)
    if not np.isfinite(features).all():
        raise ValueError(f"{where}: features must be finite numbers, got some that are not")
    if not ((boxes >= -_MARGIN) & (boxes <= 1 + _MARGIN)).all():
        raise ValueError(f"{where}: boxes must lie inside the picture, got {boxes.min():g} to {boxes.max():g} of it")
    return features, boxes.clip(0, 1)

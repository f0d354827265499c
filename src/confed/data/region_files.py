"""Memory-mapped files of region features, of which only the requested rows are read.

``NAME.safetensors`` holds ``features`` (M, R, W), float16 or float32, and ``boxes`` (M, R, 4), float32;
``NAME.json`` says whose rows these are.

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
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from confed.data.bounded_files import array_header, check_array, hdf5_array, load_npy, load_npz
from confed.data.intake.walk import visible
from confed.data.refusals import check_choice, check_finite, existing, expecting, library, refuse
from confed.data.regions import grid_boxes
from confed.federation.reading import FAULTS, check_header

# Readers of published region features: one file per picture (.npz, .npy) --------------------------------------

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
    """One picture's regions in a file."""

    image: int
    where: str
    count: int
    width: int
    read: Callable[[], tuple[np.ndarray, np.ndarray]]


def read_layout(path: Path) -> Iterator[PictureRegions]:
    """The pictures of a folder with a file for each, or of an HDF5 file; arrays are read when they are asked for."""
    if path.is_dir():
        files = visible(path, ".npz", ".npy")
        if not files:
            refuse(path, ".npz or .npy files, one per picture", found="none")
        for file in files:
            yield _npz(file) if file.suffix == ".npz" else _npy(file)
    elif path.is_file() and path.suffix in _SUFFIXES:
        yield from _hdf5(path)
    else:
        refuse("features", "a folder with .npz or .npy files, or a file .h5 or .hdf5", found=path)


# One file per picture ---------------------------------------------------------------------------------------


def _number(file: Path) -> int:
    stem = file.name.removesuffix(file.suffix)
    for ending in _PICTURE:
        stem = stem.removesuffix(ending)
    digits = re.search(r"(\d+)$", stem)
    if digits is None:
        refuse("features", "files whose names end in the picture's number, such as 000000000009.npz", found=file)
    return int(digits[1])


def _npz(file: Path) -> PictureRegions:
    faults = (zipfile.BadZipFile, OSError, EOFError)
    with expecting(file, "a complete .npz file", *faults), zipfile.ZipFile(file) as archive:
        names = {name.removesuffix(".npy"): name for name in archive.namelist()}
        features, boxes = (_key(names, keys, file) for keys in (_FEATURES, _BOXES))
        with archive.open(names[features]) as stream:
            shape, _ = array_header(stream, str(file))
        with archive.open(names[boxes]) as stream:
            boxed, _ = array_header(stream, str(file))
    if len(shape) != 2 or len(boxed) != 2 or boxed[1] != 4 or boxed[0] not in shape:
        refuse(
            file, f"{features!r} of shape (R, W) or (W, R) and {boxes!r} of shape (R, 4)", found=f"{shape} and {boxed}"
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
        shape, _ = array_header(stream, str(file))
    if len(shape) not in (2, 3):
        refuse(file, "features of shape (R, W), or a grid (W, h, w)", found=shape)
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


def _key(arrays: Mapping[str, Any], keys: Sequence[str], file: Path) -> str:
    present_keys = [key for key in keys if key in arrays]
    if not present_keys:
        refuse(file, f"an array {' or '.join(map(repr, keys))}", found=", ".join(arrays) or "none")
    return present_keys[0]


# HDF5 -------------------------------------------------------------------------------------------------------


def _hdf5(file: Path) -> Iterator[PictureRegions]:
    h5py = library("h5py", file, "data")
    with expecting(file, "a complete HDF5 file", OSError):
        content = h5py.File(file, "r")
    # It stays open as long as a picture of it may still be read.
    features = hdf5_array(content, _key(content, _FEATURES, file), str(file), rows=True)
    scaled = next((key for key in _BOXES if key in content), None)
    boxes = hdf5_array(content, scaled or _key(content, ("spatial_features", *_BOXES), file), str(file), rows=True)
    ends = hdf5_array(content, "pos_boxes", str(file))[:] if "pos_boxes" in content else None
    if features.ndim != (3 if ends is None else 2) or boxes.shape[:-1] != features.shape[:-1] or boxes.shape[-1] < 4:
        expected = "(M, R, W)" if ends is None else "(N, W)"
        refuse(
            file,
            f"features of shape {expected} and as many boxes, of at least 4 numbers",
            found=f"{features.shape} and {boxes.shape}",
        )
    images = _hdf5_ids(content, file, len(features) if ends is None else len(ends))
    sizes: dict[str, np.ndarray] = {}
    for key, names in (("image_h", _HEIGHT), ("image_w", _WIDTH)):
        for name in filter(content.__contains__, names):
            sizes[key] = hdf5_array(content, name, str(file))[:]
    for row, image in enumerate(images):
        where = f"{file}, row {row}"
        at = row if ends is None else slice(int(ends[row][0]), int(ends[row][1]))
        if isinstance(at, slice) and not 0 <= at.start <= at.stop <= len(features):
            refuse(where, f"regions among 0 to {len(features)}", found=f"{at.start} to {at.stop}")

        def read(row: int = row, at: Any = at, where: str = where) -> tuple[np.ndarray, np.ndarray]:
            corners = boxes[at][:, :4]
            size = _size({key: values[row] for key, values in sizes.items()})
            return _checked(features[at], corners if scaled is None else _fractions(corners, size, where), where)

        count = features.shape[1] if isinstance(at, int) else at.stop - at.start
        check_array((count, features.shape[-1]), features.dtype, where)
        yield PictureRegions(image, where, count, features.shape[-1], read)


def _hdf5_ids(content: Any, file: Path, count: int) -> list[int]:
    """The numbers of the pictures in the order of the rows."""
    beside = file.with_name(f"{file.stem}_imgid2idx.json")
    key = next((key for key in _IDS if key in content), None)
    if key is None and not beside.is_file():
        expected = f"the pictures' numbers in 'image_ids', or a JSON object {beside.name} that maps them to rows"
        refuse(file, expected, found="neither", remedy="a .pkl file is not read: write it anew as JSON")
    source = file if key is not None else beside
    with expecting(source, "the numbers of pictures (and their rows)", AttributeError, TypeError, ValueError):
        if key is not None:
            ids = [int(image) for image in content[key][:]]
            rows = list(range(len(ids)))
        else:
            given: dict[str, int] = json.loads(beside.read_text(encoding="utf-8"))
            ids, rows = [int(image) for image in given], [int(row) for row in given.values()]
    if sorted(rows) != list(range(count)):
        refuse(source, f"the numbers of {count} pictures, each in a row of its own", found=len(ids))
    return [image for _, image in sorted(zip(rows, ids, strict=True))]


# Checks -----------------------------------------------------------------------------------------------------


def _size(held: Mapping[str, Any]) -> tuple[float, float] | None:
    """(height, width) in pixels."""
    sizes: list[float] = []
    for keys in (_HEIGHT, _WIDTH):
        sizes.append(next((float(np.max(held[key])) for key in keys if key in held), 0.0))
    return (sizes[0], sizes[1]) if min(sizes) > 0 else None


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
    check_finite(f"{where}: features", features)
    if not ((boxes >= -_MARGIN) & (boxes <= 1 + _MARGIN)).all():
        raise ValueError(f"{where}: boxes must lie inside the picture, got {boxes.min():g} to {boxes.max():g} of it")
    return features, boxes.clip(0, 1)


# Memory-mapped files of region features -----------------------------------------------------------------------

_FORMAT = 1


@dataclass(frozen=True)
class RegionIndex:
    """Index of the pictures whose regions a file holds."""

    images: tuple[int, ...]
    regions: int
    width: int
    encoder: str = ""
    padded: int = 0


class StoredRegions:
    """Regions in a file; implements :class:`confed.data.regions.Regions`."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.index = _read_index(file.with_suffix(".json"))
        self.encoder = self.index.encoder  # name of the feature extractor; empty if unknown
        self.shape = (len(self.index.images), self.index.regions, self.index.width)
        for name, shape in (("features", self.shape), ("boxes", (*self.shape[:2], 4))):
            stored = tuple(self._tables[name].shape)
            if stored != shape:
                raise ValueError(f"{file}: {name} must have shape {shape} as {file.stem}.json says, got {stored}")

    @cached_property
    def _tables(self) -> dict[str, Tensor]:
        """Both tables, of which only the rows that are asked for come into memory."""
        faults = (SafetensorError, *FAULTS)
        with expecting(existing(self.file), "a safetensors file of region features", *faults):
            check_header(self.file)
            with safe_open(self.file, "pt") as content:
                return {name: content.get_tensor(name) for name in ("features", "boxes")}

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = torch.from_numpy(index)
        return self._tables["features"][rows].float().numpy(), self._tables["boxes"][rows].float().numpy()


def write_regions(
    file: Path, index: RegionIndex, rows: Iterable[tuple[np.ndarray, np.ndarray]], precision: str = "float16"
) -> None:
    """Writing of a region file row by row, for any number of pictures; it and its index appear only when complete."""
    kinds = {"float16": "F16", "float32": "F32"}
    check_choice("precision", precision, kinds)
    shape = (len(index.images), index.regions)
    features_end = prod(shape) * index.width * np.dtype(precision).itemsize
    end = features_end + prod(shape) * 4 * 4
    header = json.dumps({
        "features": {"dtype": kinds[precision], "shape": [*shape, index.width], "data_offsets": [0, features_end]},
        "boxes": {"dtype": "F32", "shape": [*shape, 4], "data_offsets": [features_end, end]},
    }).encode()  # fmt: skip
    header += b" " * (-len(header) % 8)
    start = 8 + len(header)
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished, beside = file.with_name(file.name + ".part"), file.with_suffix(".json")
    try:
        with unfinished.open("wb") as out:
            out.write(struct.pack("<Q", len(header)) + header)
            out.truncate(start + end)
        features = np.memmap(unfinished, np.dtype(precision), "r+", start, (*shape, index.width))
        boxes = np.memmap(unfinished, np.float32, "r+", start + features_end, (*shape, 4))
        _write_rows(features, boxes, index, rows)
        del features, boxes
    except BaseException:
        unfinished.unlink()
        raise
    beside.unlink(missing_ok=True)  # between the two renamings the old index must not be beside the new file
    unfinished.replace(file)
    content = {
        "format": _FORMAT, "regions": index.regions, "width": index.width, "encoder": index.encoder,
        "padded": index.padded, "images": list(index.images),
    }  # fmt: skip
    beside.write_text(json.dumps(content) + "\n", encoding="utf-8")


def _write_rows(
    features: np.ndarray, boxes: np.ndarray, index: RegionIndex, rows: Iterable[tuple[np.ndarray, np.ndarray]]
) -> None:
    """Writing of both tables, which are zeros before."""
    count, written = len(index.images), 0
    for written, (values, corners) in enumerate(rows, start=1):
        if written > count:
            break
        image = index.images[written - 1]
        if len(values) > index.regions or values.shape[1] != index.width or corners.shape != (len(values), 4):
            raise ValueError(
                f"picture {image} must have at most {index.regions} regions of {index.width} features, got "
                f"{values.shape} with boxes {corners.shape}"
            )
        with np.errstate(over="ignore"):  # what is beyond float16 becomes infinite
            features[written - 1, : len(values)] = values
        if not np.isfinite(features[written - 1]).all():
            raise ValueError(f"a feature of picture {image} is beyond float16; write float32")
        boxes[written - 1, : len(corners)] = corners
    if written != count:
        raise ValueError(f"expected the regions of {count} pictures, got {'more' if written > count else written}")


def _read_index(file: Path) -> RegionIndex:
    existing(file)
    with expecting(file, "an index of region features", *FAULTS, remedy="write it anew"):
        content = json.loads(file.read_text(encoding="utf-8"))
        check_choice("its format", content["format"], [_FORMAT])
        images: Sequence[int] = content["images"]
        return RegionIndex(
            tuple(map(int, images)), content["regions"], content["width"], content["encoder"], content["padded"]
        )


REGIONS = "regions.safetensors"
"""The file's name below the data set's folder."""


def image_number(picture: str) -> int:
    """The number in the name of one of COCO's pictures (COCO_train2014_000000000009.jpg)."""
    return int(Path(picture).stem.rpartition("_")[2])

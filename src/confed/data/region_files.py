"""Memory-mapped files of region features, of which only the requested rows are read.

``NAME.safetensors`` holds ``features`` (M, R, W), float16 or float32, and ``boxes`` (M, R, 4), float32;
``NAME.json`` says whose rows these are.
"""

import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import numpy as np

__all__ = ["REGIONS", "RegionIndex", "StoredRegions", "image_number", "write_regions"]

_FORMAT = 1
_KINDS = {"F16": np.dtype("<f2"), "F32": np.dtype("<f4")}


@dataclass(frozen=True)
class RegionIndex:
    """Index of the pictures whose regions a file holds.

    Attributes:
        images: the number of every row's picture, M.
        regions: R.
        width: W.
        encoder: what made them; empty if unknown.
        padded: pictures with fewer than R regions.
    """

    images: tuple[int, ...]
    regions: int
    width: int
    encoder: str = ""
    padded: int = 0


class StoredRegions:
    """Regions in a file; implements :class:`confed.data.regions.Regions`.

    Args:
        file: written by :func:`write_regions`.

    Attributes:
        index: whose rows they are.

    Raises:
        ValueError: the file or its index is missing, damaged, or does not belong to the other.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.index = _read_index(file.with_suffix(".json"))
        self.shape = (len(self.index.images), self.index.regions, self.index.width)
        self._tables = _header(file)
        for name, shape in (("features", self.shape), ("boxes", (*self.shape[:2], 4))):
            if self._tables[name][1] != shape:
                raise ValueError(
                    f"{file}: {name} must have shape {shape} as {file.stem}.json says, got {self._tables[name][1]}"
                )

    @property
    def encoder(self) -> str:
        """Name of the feature extractor; empty if unknown."""
        return self.index.encoder

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See :class:`confed.data.regions.Regions`."""
        features, boxes = (table[index].astype(np.float32) for table in self._mapped)
        return features, boxes

    @cached_property
    def _mapped(self) -> tuple[np.ndarray, np.ndarray]:
        features, boxes = (
            np.memmap(self.file, dtype=kind, mode="r", offset=start, shape=shape)
            for kind, shape, start in (self._tables[name] for name in ("features", "boxes"))
        )
        return features, boxes


def write_regions(
    file: Path, index: RegionIndex, rows: Iterable[tuple[np.ndarray, np.ndarray]], precision: str = "float16"
) -> None:
    """Writing of a region file row by row, for any number of pictures; it and its index appear only when complete.

    Args:
        file: where to; the index goes beside it.
        index: whose rows they are.
        rows: features (r, W) and boxes (r, 4) of every picture, r at most R; the rest is filled with zeros.
        precision: float16 (half the space; features keep three digits) or float32.

    Raises:
        ValueError: another precision, fewer or more rows than pictures, a row of another shape, or values beyond
            float16. An older file is then left as it was.
    """
    kinds = {"float16": "F16", "float32": "F32"}
    if precision not in kinds:
        raise ValueError(f"precision must be float16 or float32, got {precision!r}")
    m, kind = len(index.images), _KINDS[kinds[precision]]
    sizes = (m * index.regions * index.width * kind.itemsize, m * index.regions * 16)
    entries = {
        "features": {"dtype": kinds[precision], "shape": [m, index.regions, index.width]},
        "boxes": {"dtype": "F32", "shape": [m, index.regions, 4]},
    }
    starts = (0, sizes[0], sum(sizes))
    for number, entry in enumerate(entries.values()):
        entry["data_offsets"] = [starts[number], starts[number + 1]]
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished, beside = file.with_name(file.name + ".part"), file.with_suffix(".json")
    try:
        with unfinished.open("wb") as out:
            out.write(struct.pack("<Q", len(header)) + header)
            out.truncate(out.tell() + starts[-1])
            _write_rows(out, index, rows, kind, out.tell())
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
    out: BinaryIO, index: RegionIndex, rows: Iterable[tuple[np.ndarray, np.ndarray]], kind: np.dtype, first: int
) -> None:
    """Writing of the rows of both tables, of which the first begins at the byte ``first``."""
    m, written = len(index.images), 0
    boxes_at = first + m * index.regions * index.width * kind.itemsize
    for written, (features, boxes) in enumerate(rows, start=1):
        if written > m:
            break
        image = index.images[written - 1]
        if len(features) > index.regions or features.shape[1] != index.width or boxes.shape != (len(features), 4):
            raise ValueError(
                f"picture {image} must have at most {index.regions} regions of {index.width} features, got "
                f"{features.shape} with boxes {boxes.shape}"
            )
        values = _filled(features, index.regions, index.width, kind)
        if not np.isfinite(values).all():
            raise ValueError(f"a feature of picture {image} is beyond float16; write float32")
        out.seek(first + (written - 1) * values.nbytes)
        out.write(values.tobytes())
        framed = _filled(boxes, index.regions, 4, _KINDS["F32"])
        out.seek(boxes_at + (written - 1) * framed.nbytes)
        out.write(framed.tobytes())
    if written != m:
        raise ValueError(f"expected the regions of {m} pictures, got {'more' if written > m else written}")


def _filled(values: np.ndarray, rows: int, width: int, kind: np.dtype) -> np.ndarray:
    whole = np.zeros((rows, width), dtype=kind)
    with np.errstate(over="ignore"):  # what is beyond float16 becomes infinite, which the caller looks for
        whole[: len(values)] = values
    return whole


def _read_index(file: Path) -> RegionIndex:
    if not file.is_file():
        raise ValueError(f"expected the index of region features at {file}, found none")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise ValueError(f"its format must be {_FORMAT}, got {content['format']}")
        images: Sequence[int] = content["images"]
        return RegionIndex(
            tuple(map(int, images)), content["regions"], content["width"], content["encoder"], content["padded"]
        )
    except (KeyError, TypeError, ValueError, RecursionError, OverflowError) as error:
        raise ValueError(f"{file} must be an index of region features: {repr(error)[:300]}") from error


def _header(file: Path) -> dict[str, tuple[np.dtype, tuple[int, ...], int]]:
    """Kind, shape and first byte of the two tables."""
    if not file.is_file():
        raise ValueError(f"expected region features at {file}, found none")
    with file.open("rb") as stream:
        try:
            (length,) = struct.unpack("<Q", stream.read(8))
            entries = json.loads(stream.read(length))
            start, end = 8 + length, 0
            found: dict[str, tuple[np.dtype, tuple[int, ...], int]] = {}
            for name in ("features", "boxes"):
                if not all(type(extent) is int for extent in entries[name]["shape"]):
                    raise ValueError(f"{name} must have a shape of whole numbers, got {entries[name]['shape']!r:.80}")
                kind, (first, last) = _KINDS[entries[name]["dtype"]], entries[name]["data_offsets"]
                if type(first) is not int or type(last) is not int or not 0 <= first <= last:
                    raise ValueError(f"{name} must have two offsets, got {first!r:.80} and {last!r:.80}")
                found[name], end = (kind, tuple(entries[name]["shape"]), start + first), max(end, start + last)
        except (
            struct.error, LookupError, TypeError, ValueError, OverflowError, MemoryError, RecursionError,
        ) as error:  # fmt: skip
            raise ValueError(f"{file} must be a safetensors file of region features: {repr(error)[:300]}") from error
    if file.stat().st_size < end:
        raise ValueError(f"{file} is cut off: expected {end} bytes, got {file.stat().st_size}")
    return found


REGIONS = "regions.safetensors"
"""The file's name below the data set's folder."""


def image_number(picture: str) -> int:
    """The number in the name of one of COCO's pictures (COCO_train2014_000000000009.jpg)."""
    return int(Path(picture).stem.rpartition("_")[2])

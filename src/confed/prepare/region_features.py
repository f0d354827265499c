"""Region features of all pictures of VQA v2 in one file, from published features or from pictures."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from confed.data.picture_files import find_pictures
from confed.data.refusals import check_nothing_lacks, refuse
from confed.data.region_files import REGIONS, PictureRegions, RegionIndex, image_number, read_layout, write_regions
from confed.data.vl_files.vqa import vqa_records
from confed.federation.ranges import AT_LEAST_ONE, check_fields
from confed.system.events import Progress, StepProgress, ignore

SPLITS = ("train2014", "val2014")
_SHOWN = 5


@dataclass(frozen=True)
class Options:
    """Options of the preparation."""

    regions: Annotated[int, AT_LEAST_ONE] | None = None
    width: Annotated[int, AT_LEAST_ONE] | None = None
    precision: str = "float16"
    grid: Annotated[int, AT_LEAST_ONE] = 10
    device: str = "cpu"

    def __post_init__(self) -> None:
        check_fields(self, "")


def prepare(
    root: Path,
    features: Sequence[Path] = (),
    images: Sequence[Path] = (),
    encoder: str | None = None,
    out: Path | None = None,
    options: Options | None = None,
    progress: Progress = ignore,
) -> dict[str, Any]:
    """Check of the official files of VQA v2, and one file with the regions of all their pictures."""
    options = options or Options()
    if bool(features) == (encoder is not None):
        refuse("regions", "either features or an encoder", found="both" if features else "neither")
    if encoder is not None and not images:
        refuse(f"the encoder {encoder!r}", "folders of pictures (images)", found="none")
    file = root / REGIONS if out is None else out
    if file.suffix != ".safetensors":
        refuse("out", "a file .safetensors", found=file)
    needed, facts = _needed(root, progress)
    if encoder is not None:
        made = _encode(needed, images, encoder, file, options, progress)
    else:
        made = _collect(needed, features, file, options, progress)
    return {**facts, **made, "file": str(file)}


def _needed(root: Path, progress: Progress) -> tuple[list[int], dict[str, Any]]:
    """The pictures that questions are about, ascending, and counts."""
    every: set[int] = set()
    questions: dict[str, int] = {}
    pictures: dict[str, int] = {}
    for split in SPLITS:
        picture_ids: set[int] = set()
        for number, record in enumerate(vqa_records(root, split), start=1):
            picture_ids.add(image_number(record.pictures[0]))
            questions[split] = number
            if number % 10000 == 0:
                progress(StepProgress(f"reading {split}", number, 0))
        if not picture_ids:
            refuse(root, f"questions in the files of {split}", found="none")
        pictures[split] = len(picture_ids)
        every |= picture_ids
    return sorted(every), {"questions": questions, "pictures": pictures}


def _collect(
    needed: Sequence[int], sources: Sequence[Path], file: Path, options: Options, progress: Progress
) -> dict[str, Any]:
    """One file of all regions, whose shapes are all checked first, and their values one by one while writing."""
    wanted, unused = set(needed), 0
    regions_of: dict[int, PictureRegions] = {}
    width = options.width
    for source in sources:
        for picture in read_layout(source):
            if picture.image not in wanted:
                unused += 1
                continue
            if picture.image in regions_of:
                first = regions_of[picture.image].where
                refuse(picture.where, "another picture", found=f"{picture.image}, that of {first} already")
            width = width or picture.width
            if picture.width != width:
                refuse(picture.where, f"{width} features per region", found=picture.width)
            if options.regions is not None and picture.count != options.regions:
                refuse(picture.where, f"{options.regions} regions", found=picture.count)
            if picture.count < 1:
                refuse(picture.where, "at least one region", found="none")
            regions_of[picture.image] = picture
            if len(regions_of) % 1000 == 0:
                progress(StepProgress("checking features", len(regions_of), len(wanted)))
    _check_missing(needed, regions_of, "features")
    most = max(picture.count for picture in regions_of.values())
    padded = sum(picture.count < most for picture in regions_of.values())
    index = RegionIndex(tuple(needed), most, width or 0, "", padded)
    rows = (regions_of[image].read() for image in needed)
    write_regions(file, index, _watched(rows, len(needed), progress), options.precision)
    return {"regions": most, "width": width, "padded": padded, "unused": unused}


def _encode(
    needed: Sequence[int], folders: Sequence[Path], encoder: str, file: Path, options: Options, progress: Progress
) -> dict[str, Any]:
    from confed.models.grid_features import load_vision_encoder

    pictures: dict[int, Path] = {}
    for folder in folders:
        for name, path in find_pictures(folder).items():
            if name.rpartition("_")[2].isdigit():
                pictures[image_number(name)] = path
    _check_missing(needed, pictures, "a picture")
    model = load_vision_encoder(encoder, options.grid, options.device)
    rows = model.files([pictures[image] for image in needed])
    first = next(rows)
    index = RegionIndex(tuple(needed), first[0].shape[0], first[0].shape[1], model.name)
    write_regions(file, index, _watched(chain([first], rows), len(needed), progress), options.precision)
    return {"regions": index.regions, "width": index.width, "padded": 0, "unused": len(pictures) - len(needed)}


def _check_missing(needed: Sequence[int], present: Iterable[int], what: str) -> None:
    lacking = sorted(set(needed) - set(present))
    check_nothing_lacks("pictures that questions are about", lacking, len(needed), what)


def _watched(
    rows: Iterable[tuple[np.ndarray, np.ndarray]], total: int, progress: Progress
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for number, row in enumerate(rows, start=1):
        yield row
        if number % 500 == 0:
            progress(StepProgress("writing features", number, total))

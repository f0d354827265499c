"""The one walk of a folder: the same pictures are proposed, described and read; what is left out is counted."""

import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from confed.data.refusals import refuse

ENDINGS = frozenset({
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm",
    ".jp2", ".avif", ".tga",
})  # fmt: skip
"""Endings of pictures that are read."""

ROLES = {
    "train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "test": "test",
    "testing": "test",
}  # fmt: skip
"""What splits are called -> their role."""


def role_of(split: str, where: str) -> str:
    """The role "train", "val" or "test" that a row gives in any case; empty for a blank one."""
    name = split.strip().casefold()
    if name and name not in ROLES:
        refuse(where, "the split train, validation or test", split)
    return ROLES.get(name, "")


_UNREAD = {".heic", ".heif", ".dng", ".cr2", ".nef", ".arw", ".psd", ".svg", ".eps", ".exr", ".hdr", ".jxl"}
_LITTER = {
    "__macosx", "thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r", "@eadir", "#recycle", "@recycle", "$recycle.bin",
    "system volume information", "lost+found", "__pycache__", "_gsdata_", "synofile_thumb_m.jpg",
}  # fmt: skip
_IMAGES = {"images", "image", "imgs", "img", "imagestr", "imagests", "jpegimages", "pictures", "photos"}
_MASKS = {
    "masks", "mask", "segmentation", "segmentations", "segmentationclass", "segmentationobject", "seg", "segs", "gt",
    "groundtruth", "ground_truth", "labels", "label", "labelstr", "annotations",
}  # fmt: skip
_MASK_OF = re.compile(r"(.+?)[ _-](?:masks?|seg|segmentation|gt|label)(?:[ _-]?\d+)?", re.IGNORECASE)

LITTER, MASKS, LINKS = (
    "hidden files and litter of systems and tools",
    "masks of pictures",
    "links to folders read already",
)
_SAVE = "which are not read (save them as .jpg or .png)"
BARE = "pictures of splits without a folder of a class"
SHALLOW = "pictures above the folders of classes"


def is_litter(name: str) -> bool:
    """Whether an operating system or a tool put this name into a folder."""
    return name.startswith((".", "~$")) or name.casefold() in _LITTER


def visible(folder: Path, *endings: str) -> list[Path]:
    """What lies in a folder without litter, in order of names; of given endings only."""
    return sorted(p for p in folder.iterdir() if not is_litter(p.name) and p.name.lower().endswith(endings or ("",)))


def said_by_folders(folder: Path, files: Sequence[Path]) -> list[dict[str, str]]:
    """What the folders of files say of their rows: a split, or, where several others are there, whose they are."""
    names = [file.parent.name if file.parent != folder else "" for file in files]
    owners = {name for name in names if name and name.casefold() not in ROLES}
    told: list[dict[str, str]] = []
    for file, name in zip(files, names, strict=True):
        owned = {"client": name} if len(owners) > 1 and name in owners else {}
        role = next((text for text in (name, file.stem) if text.casefold() in ROLES), "")
        told.append({"split": role, **owned} if role else owned)
    return told


@dataclass(frozen=True)
class Walk:
    """Pictures below a folder, their paths as parts; and why what was left out."""

    pictures: Sequence[tuple[str, ...]]
    left: Mapping[str, Sequence[str]]

    def notes(self) -> list[str]:
        """What was left out, a line each."""
        return [f"{len(paths)} {why}, such as {paths[0]}" for why, paths in self.left.items()]


def walk(folder: Path) -> Walk:
    """All pictures below a folder. Links are followed, each folder is read once."""
    pictures, left = list[tuple[str, ...]](), defaultdict[str, list[str]](list)
    visited = {os.path.realpath(folder)}
    for place, inside, files in os.walk(folder, onerror=_refuse, followlinks=True):
        parts = Path(place).relative_to(folder).parts
        masked = bool(_IMAGES & {name.casefold() for name in inside})
        entered: list[str] = []
        for name in sorted(inside, key=lambda name: (os.path.islink(os.path.join(place, name)), name)):
            true_place, why = os.path.realpath(os.path.join(place, name)), ""
            if is_litter(name):
                why = LITTER
            elif masked and name.casefold() in _MASKS:
                why = MASKS
            elif true_place in visited:
                why = LINKS
            if why:
                left[why].append("/".join((*parts, name, "")))
            else:
                visited.add(true_place)
                entered.append(name)
        inside[:] = entered
        stems = {os.path.splitext(name)[0] for name in files if not is_litter(name)}
        for name in sorted(files):
            stem, ending = os.path.splitext(name)
            mask, ending = _MASK_OF.fullmatch(stem), ending.lower()
            if is_litter(name):
                left[LITTER].append("/".join((*parts, name)))
            elif ending in _UNREAD:
                left[f"{ending} files, {_SAVE}"].append("/".join((*parts, name)))
            elif ending in ENDINGS and mask is not None and mask[1] in stems:
                left[MASKS].append("/".join((*parts, name)))
            elif ending in ENDINGS:
                pictures.append((*parts, name))
    return Walk(sorted(pictures), dict(left))


def _refuse(error: OSError) -> None:
    raise ValueError(f"the folder {error.filename} cannot be listed ({error.strerror}): allow it, or move it elsewhere")


class ClassPath(NamedTuple):
    """A picture below the folder of its class: whole path, role or "", and path below the folder of the role."""

    parts: tuple[str, ...]
    role: str
    below: tuple[str, ...]


def in_classes(folder: Path, depth: int = 2) -> tuple[list[ClassPath], Walk]:
    """Pictures in folders of classes, at least ``depth`` deep, and the walk, which says what was left out."""
    walked = walk(folder)
    deep = [parts for parts in walked.pictures if len(parts) >= depth]
    tops = {parts[0].lower() for parts in deep}
    # A class may be called "train", like the bus: a split has classes below it, or nothing but splits beside it.
    split = any(parts[0].lower() in ROLES for parts in deep if len(parts) > depth) or tops <= ROLES.keys()
    paths: list[ClassPath] = []
    bare: list[str] = []
    shallow = ["/".join(parts) for parts in walked.pictures if len(parts) < depth]
    for parts in deep:
        role = ROLES.get(parts[0].lower(), "") if split else ""
        if role and len(parts) == depth:
            bare.append("/".join(parts))
        else:
            paths.append(ClassPath(parts, role, parts[1:] if role else parts))
    if bare and not paths:
        raise ValueError(
            f"{folder}: {', '.join(sorted(tops))} are splits and no classes, and their {len(bare)} pictures, such as "
            f"{bare[0]}, have none: put them in a folder per class (train/CLASS/picture), or name each one's class in "
            "labels.jsonl with the pictures in images/"
        )
    if MASKS in walked.left and deep and tops <= _IMAGES:
        names = ", ".join(sorted(tops))
        raise ValueError(
            f"{folder}: {names} beside {walked.left[MASKS][0]} are pictures with masks or boxes, no classes: put the "
            "pictures in a folder per class, or name each one's class in labels.jsonl beside images/"
        )
    if not deep and (unread := [note for note in walked.notes() if _SAVE in note]):
        refuse(folder, "pictures that are read", found="; ".join(unread))
    without_class = {why: pictures for why, pictures in ((BARE, bare), (SHALLOW, shallow)) if pictures}
    return paths, Walk(walked.pictures, {**walked.left, **without_class})

"""Pictures with labels as other tools write them, from YOLO and COCO to tables of boxes and of zeros and ones.

What objects a picture shows are its labels; boxes and outlines are left alone.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from confed.data.intake.account import Account
from confed.data.intake.stream import opened_text, read_xml, text_of
from confed.data.intake.tables import read_cells, read_records
from confed.data.intake.values import PICTURE_ENDINGS, Spellings, find_file, find_picture, plain_path
from confed.data.intake.walk import LITTER, ROLES, visible, walk
from confed.data.ml_files.coco import coco_records
from confed.data.ml_files.records import LabelRecord
from confed.data.refusals import expecting, refuse

Layout = Literal[
    "lines", "yolo", "roboflow", "coco", "cvat", "createml", "label_studio", "voc", "labelme", "boxes", "one_hot"
]
"""How labels are written: ``labels.jsonl``, or as one of the tools does."""
_LARGEST = 1 << 27
"""Bytes of a file of COCO's objects that is read at once to know what it holds."""


class _Shown(NamedTuple):
    """What a picture may be called, its labels, their row, its split if no folder says it, and how many more rows."""

    names: Sequence[str]
    labels: Sequence[str]
    row: int = 1
    split: str = ""
    merged: int = 0


def layout_of(folder: Path) -> Layout | None:
    """The layout of a folder that one of the tools has written; None for any other one."""
    return next((layout for layout in get_args(Layout)[1:] if _LAYOUTS[layout][0](folder)), None)


def layout_records(
    folder: Path, layout: Layout, account: Account, fold_case: bool = False, known: Sequence[str] = ()
) -> list[LabelRecord]:
    """The pictures of a folder in one of the layouts, by their paths below it."""
    find_files, read = _LAYOUTS[layout]
    if not (files := find_files(folder)):
        refuse(folder, f"files in the layout {layout!r}", found="none")
    shown: list[tuple[Path, _Shown]] = []
    for file in files:
        shown += [(file, one) for one in read(file)]
    if litter := walk(folder).left.get(LITTER):
        account.note(f"left out: {len(litter)} {LITTER}, such as {litter[0]}")
    spelled = Spellings("labels", chain.from_iterable(one.labels for _, one in shown), fold_case, known)
    account.note(*spelled.notes)
    records: list[LabelRecord] = []
    for file, one in shown:
        where = f"{file}, row {one.row}"
        account.rows[str(file)] = account.rows.get(str(file), 0) + 1 + one.merged
        for _ in range(one.merged):
            account.merge("objects of one picture")
        picture = next(filter(None, (_find(folder, file, name) for name in one.names)), None)
        if picture is None:
            account.leave("picture is missing", where)
            continue
        name = picture.relative_to(folder).as_posix()
        if name in account.used:
            refuse(where, "a picture of its own", found=f"{name!r}, that of {account.used[name]} already")
        account.used[name] = where
        labels = tuple(dict.fromkeys(filter(None, (spelled[label] for label in one.labels))))
        split = one.split or _split_of(file.parent, folder)
        records.append(LabelRecord(file, one.row, name, labels, picture=name, split=split))
    return records


def _find(folder: Path, file: Path, name: str) -> Path | None:
    """The picture of a name, beside the file that tells of it, in a folder of pictures, or elsewhere below a folder."""
    places = [file.parent]
    for above in (folder if file.parent == folder else file.parent.parent, folder):
        places += [above / below for below in ("images", "JPEGImages", "imgs", "")]
    return (find_file(places, name) or find_picture(folder, name)) if name else None


def _split_of(place: Path, folder: Path) -> str:
    """The split that a folder on the way to a file is named after."""
    return next((ROLES[step] for step in map(str.casefold, place.relative_to(folder).parts) if step in ROLES), "")


def _beside(folder: Path, ending: str) -> list[Path]:
    """Files of an ending in a folder, and in the folders in it."""
    files = visible(folder, ending)
    for below in filter(Path.is_dir, visible(folder)):
        files += visible(below, ending)
    return files


def _holding(files: Iterable[Path], sign: str, *patterns: str) -> list[Path]:
    """The files that begin with a sign and hold all of some patterns."""
    found: list[Path] = []
    for file in files:
        with opened_text(file) as stream:
            begins = stream.read(1000).lstrip().startswith(sign)
        found += [file] if begins and all(re.search(pattern, text_of(file)) for pattern in patterns) else []
    return found


# YOLO: a text file per picture, and the names of the classes ---------------------------------------------------


def _yolo_files(folder: Path) -> list[Path]:
    names = [*sorted(folder.glob("*.y*ml")), *sorted(folder.glob("classes.txt")), *sorted(folder.glob("*.names"))]
    if not names:
        return []
    labels = any(place.is_dir() and any(place.rglob("*.txt")) for place in folder.rglob("labels"))
    beside = any(folder.joinpath(*parts).with_suffix(".txt").is_file() for parts in walk(folder).pictures)
    return names[:1] if labels or beside else []


def _yolo(file: Path) -> Iterator[_Shown]:
    names, folder = _yolo_names(file), file.parent
    for row, steps in enumerate(walk(folder).pictures, start=1):
        parts = list(Path(*steps).with_suffix(".txt").parts)
        if "images" in parts:
            parts[len(parts) - 1 - parts[::-1].index("images")] = "labels"
        elif not folder.joinpath(*parts).is_file():
            continue
        listed, labels = folder.joinpath(*parts), list[str]()
        for number, line in enumerate(text_of(listed).splitlines() if listed.is_file() else (), start=1):
            digits = line.split()[:1]
            if digits and not (digits[0].isdigit() and int(digits[0]) < len(names)):
                expected = f"a class from 0 to {len(names) - 1} of {file.name}"
                refuse(f"{listed}, row {number}", expected, line)
            labels += [names[int(digit)] for digit in digits]
        yield _Shown(["/".join(steps)], labels, row, _split_of(folder.joinpath(*steps[:-1]), folder))


def _yolo_names(file: Path) -> list[str]:
    """Names of classes: a line each, or the key ``names`` of YAML as a list or by number."""
    lines = text_of(file).splitlines()
    if file.suffix in (".txt", ".names"):
        return [line.strip() for line in lines if line.strip()]
    start = next((row for row, line in enumerate(lines) if line.startswith("names:")), len(lines))
    after = lines[start].partition(":")[2] if start < len(lines) else ""
    body = " ".join([after, *(line for line in lines[start + 1 :] if re.match(r"\s*-|\s+\S", line))])
    items = re.findall(r"""(?:\d+\s*:\s*|-\s+|[\[,{]\s*)(?:\d+\s*:\s*)?("[^"]*"|'[^']*'|[^\s,\]}'"][^,\]}]*?)"""
                       r"""(?=\s*(?:[,\]}]|\d+\s*:|-\s|$))""", body)  # fmt: skip
    if not items:
        refuse(file, "the names of classes under 'names'", found="none")
    return [item.strip("\"' ") for item in items]


# COCO's objects: in one file, whatever it is called, or beside the pictures of each split (Roboflow) ---------------


def _coco_files(folder: Path) -> list[Path]:
    # COCO's own are far larger, and have names by which they are known.
    files = [file for file in visible(folder, ".json") if not file.name.startswith("instances_")]
    small = (file for file in files if file.stat().st_size < _LARGEST)
    return _holding(small, "{", '"images"', '"annotations"', '"categories"')


def _coco(file: Path) -> Iterator[_Shown]:
    for record in coco_records(file):
        yield _Shown([record.picture], record.labels, record.row)


# Files beside each picture: Pascal VOC's XML, LabelMe's JSON ---------------------------------------------------


def _voc(file: Path) -> Iterator[_Shown]:
    root = read_xml(file)
    labels = [one.findtext("name") or "" for one in root.iter("object")]
    yield _Shown(_about(file, root.findtext("filename")), labels)


def _labelme_files(folder: Path) -> list[Path]:
    files = _beside(folder, ".json")
    return files if _holding(files[:1], "", '"shapes"', '"imagePath"') else []


def _labelme(file: Path) -> Iterator[_Shown]:
    faults = (ValueError, RecursionError, KeyError, TypeError)
    with expecting(file, "a file of LabelMe with shapes and their labels", *faults):
        content: Any = json.loads(text_of(file))
        labels = [str(shape["label"]) for shape in content["shapes"]]
    yield _Shown(_about(file, content.get("imagePath")), labels)


def _about(file: Path, name: object) -> list[str]:
    """What the picture that a file is about may be called."""
    named = plain_path(name).rpartition("/")[2] if isinstance(name, str) else ""
    return [named, *(f"{file.stem}{ending}" for ending in PICTURE_ENDINGS)]


# One file of all pictures: XML of CVAT for images, lists of CreateML and, complete or short, of Label Studio ------


def _cvat(file: Path) -> Iterator[_Shown]:
    for row, image in enumerate(read_xml(file).iter("image"), start=1):
        labels = [shape.get("label", "") for shape in image]
        split = ROLES.get(image.get("subset", "").casefold(), "")
        yield _Shown([image.get("name", "")], labels, row, split)


def _createml(file: Path) -> Iterator[_Shown]:
    for row, entry in read_records(file).rows:
        named = entry.get("image", entry.get("imagefilename")) if isinstance(entry, dict) else None
        if not isinstance(named, str) or not isinstance(entry.get("annotations"), list):
            refuse(f"{file}, row {row}", "a picture and its annotations", entry)
        labels = [str(one.get("label", "")) for one in entry["annotations"] if isinstance(one, dict)]
        yield _Shown([named], labels, row)


def _label_studio(file: Path) -> Iterator[_Shown]:
    for row, entry in read_records(file).rows:
        if not isinstance(entry, dict):
            refuse(f"{file}, row {row}", "a task of Label Studio", entry)
        nested: Any = entry.get("data")
        data: dict[str, Any] = nested if isinstance(nested, dict) else entry
        named = next((data[key] for key in ("image", "img", "picture", "photo") if isinstance(data.get(key), str)), "")
        path = plain_path(named).partition("?d=")[2] or plain_path(named)
        bare = re.sub(r"(^|.*/)[0-9a-f]{8}-", "", path)
        made = chain.from_iterable(one.get("result") or () for one in entry.get("annotations") or ())
        results = [result.get("value") for result in made]
        chosen = results or [value for key, value in entry.items() if key not in ("data", "image", "id", "annotator")]
        yield _Shown([path, bare], [*_chosen(chosen)], row)


def _chosen(values: Any) -> Iterator[str]:
    """The labels in what was chosen: texts under "choices" or "...labels", or the short form's texts."""
    for value in values:
        if isinstance(value, dict):
            for key, listed in value.items():
                if key == "choices" or key.endswith("labels"):
                    yield from listed if isinstance(listed, list) else [str(listed)]
        elif isinstance(value, list):
            yield from _chosen(value)
        elif isinstance(value, str) and not re.match(r"\d{4}-\d\d-\d\d", value):
            yield value


# Tables with a box per row, or of zeros and ones as Kaggle and Roboflow have them --------------------------------

_CORNERS = {"xmin", "ymin", "xmax", "ymax"}
_NAMED_BY = ("filename", "image", "imageid", "imagepath", "img", "file", "path")
_CLASS = ("class", "label", "labelname", "category", "classname", "name")


def _box_columns(names: Iterable[str]) -> tuple[str, str]:
    """The columns of pictures and of classes in a table of boxes; empty where it is none."""
    plain = {name.casefold().replace("_", ""): name for name in names}
    picture = next((plain[name] for name in _NAMED_BY if name in plain), "")
    label = next((plain[name] for name in _CLASS if name in plain), "")
    return (picture, label) if plain.keys() >= _CORNERS and picture and label else ("", "")


def _boxes_files(folder: Path) -> list[Path]:
    tables = ((file, read_cells(file)[0]) for file in _beside(folder, ".csv"))
    return [file for file, rows in tables if rows and any(_box_columns(rows[0][1]))]


def _boxes(file: Path) -> Iterator[_Shown]:
    rows, _ = read_cells(file)
    picture, label = _box_columns(rows[0][1])
    rows_of: dict[str, list[tuple[int, str]]] = {}
    for row, entry in rows:
        rows_of.setdefault(entry.get(picture, ""), []).append((row, entry.get(label, "")))
    for name, listed in rows_of.items():
        yield _Shown([name], [label for _, label in listed], listed[0][0], merged=len(listed) - 1)


_ABSENT, _PRESENT = {"0", "0.0", "-1", "false"}, {"1", "1.0", "true"}


def _one_hot_files(folder: Path) -> list[Path]:
    beside = sorted(folder.glob("*/_classes.csv"))
    return beside or [file for file in sorted(folder.glob("*.csv")) if _label_columns(read_cells(file)[0])[1]]


def _label_columns(rows: Sequence[tuple[int, Mapping[str, str]]]) -> tuple[str, list[str]]:
    """The column of pictures, which is the first, and those of labels, two at least, with zeros and ones alone."""
    columns: dict[str, set[str]] = {}
    for _, entry in rows:
        for name, cell in entry.items():
            columns.setdefault(name, set()).add(cell.strip().casefold())
    picture, *others = [*columns, ""]
    if {"question", "answer"} & {name.casefold() for name in columns}:
        return picture, []
    labels = [name for name in others if name and columns[name] <= _ABSENT | _PRESENT]
    return picture, labels if len(labels) > 1 else []


def _one_hot(file: Path) -> Iterator[_Shown]:
    rows, _ = read_cells(file)
    picture, labels = _label_columns(rows)
    for row, entry in rows:
        name = entry.get(picture, "")
        names = [f"{name}{ending}" for ending in ("", *PICTURE_ENDINGS) if name]
        chosen = [label for label in labels if entry.get(label, "0").strip().casefold() in _PRESENT]
        yield _Shown(names, chosen, row, ROLES.get(entry.get("split", "").casefold(), ""))


_LAYOUTS: Mapping[str, tuple[Callable[[Path], list[Path]], Callable[[Path], Iterator[_Shown]]]] = {
    "yolo": (_yolo_files, _yolo),
    "roboflow": (lambda folder: sorted(folder.glob("*/_annotations.coco.json")), _coco),
    "coco": (_coco_files, _coco),
    "cvat": (lambda folder: _holding(folder.glob("annotations.xml"), "", "<image "), _cvat),
    "createml": (lambda folder: _holding(_beside(folder, ".json"), "[", '"coordinates"', '"annotations"'), _createml),
    "label_studio": (
        lambda folder: _holding(sorted(folder.glob("*.json")), "[", '"annotations"|"annotation_id"'),
        _label_studio,
    ),
    "voc": (lambda folder: _holding(_beside(folder, ".xml"), "", "<annotation", "<object|<filename"), _voc),
    "labelme": (_labelme_files, _labelme),
    "boxes": (_boxes_files, _boxes),
    "one_hot": (_one_hot_files, _one_hot),
}
"""Layout -> what finds its files, and what reads one of them."""

"""Datasets as files that other programs read: a table of examples, pictures, and Croissant metadata about both."""

import csv
import hashlib
import io
import json
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from confed.data.examples import Examples, FederatedDataset, presence
from confed.data.lazy import NoTexts

METADATA = "croissant.json"
_TABLE, _PICTURES = "examples.csv", "pictures.zip"
_COLUMNS: Mapping[str, str] = {
    "id": "identifier of the example, stable across versions",
    "client": "client that has the example; empty for places that no client trains on",
    "place": "the client, or the place that no client trains on",
    "split": "train, validation or test",
    "image": "picture, its path in the archive",
    "image2": "second picture of a pair",
    "question": "question, statement or text to be judged",
    "answer": "right answer; with choices its position among them",
    "type": "kind of question",
    "answers": "all answers that people gave, a JSON list",
    "choices": "texts to choose from, a JSON list",
    "captions": "texts that people wrote about the picture, a JSON list",
    "labels": "names of the labels that are present, a JSON list",
}
_TERMS = (
    "citeAs", "column", "equivalentProperty", "extract", "field", "fileProperty", "fileObject", "fileSet", "format",
    "includes", "isLiveDataset", "jsonPath", "key", "md5", "parentField", "path", "recordSet", "references", "regex",
    "repeated", "replace", "samplingRate", "separator", "source", "subField", "transform",
)  # fmt: skip
_CONTEXT: Mapping[str, Any] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "conformsTo": "dct:conformsTo",
    "cr": "http://mlcommons.org/croissant/",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "dct": "http://purl.org/dc/terms/",
    "examples": {"@id": "cr:examples", "@type": "@json"},
    "sc": "https://schema.org/",
    **{term: f"cr:{term}" for term in _TERMS},
}


def write_croissant(dataset: FederatedDataset, folder: Path, source: str = "") -> list[Path]:
    """Table of examples, archive of pictures and Croissant metadata of a dataset."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists already; name a folder that does not")
    _check(dataset)
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, str]] = []
    pictures: dict[tuple[int, int], str] = {}
    parts = list(dataset.placed())  # all at once, so that no two tables of pictures have one number
    with zipfile.ZipFile(folder / _PICTURES, "w", zipfile.ZIP_STORED) as archive:
        for place, role, examples in parts:
            unseen = role == "unseen"
            placed = {"client": "" if unseen else place, "place": place, "split": "test" if unseen else role}
            path = partial(_path, archive, pictures, examples.images)
            rows += [placed | row for row in _records(examples, path)]
    filled = {name for name, text in chain.from_iterable(map(dict.items, rows)) if text}
    columns = [name for name in _COLUMNS if name in filled]
    with (folder / _TABLE).open("w", encoding="utf-8", newline="") as file:
        # Ends of lines as in RFC 4180: with "\n" alone a carriage return in a text would not be put in quotes.
        writer = csv.DictWriter(file, columns, restval="", extrasaction="ignore", lineterminator="\r\n")
        writer.writeheader()
        writer.writerows(rows)
    if not pictures:
        (folder / _PICTURES).unlink()
    unique = len({row["id"] for row in rows}) == len(rows)
    metadata = _metadata(dataset, folder, columns, source, pictures=bool(pictures), unique=unique)
    (folder / METADATA).write_text(json.dumps(metadata, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return [folder / name for name in (METADATA, _TABLE, *([_PICTURES] if pictures else []))]


def _path(archive: zipfile.ZipFile, paths: dict[tuple[int, int], str], table: Any, row: int) -> str:
    """Path of a picture in the archive, where it is put as PNG if it is not there."""
    key = (id(table), row)
    if key not in paths:
        content = io.BytesIO()
        Image.fromarray(np.asarray(table[row])).save(content, "PNG")
        paths[key] = f"pictures/{len(paths):06d}.png"
        # The date of zip's beginning: equal datasets have equal archives.
        archive.writestr(zipfile.ZipInfo(paths[key]), content.getvalue())
    return paths[key]


def _check(dataset: FederatedDataset) -> None:
    if dataset.elsewhere is not None:
        raise ValueError(f"the examples of {dataset.name!r} are not here, a card stands for them")
    for place, _, examples in dataset.placed():
        lacking = {
            "recordings": examples.sounds, "series": examples.series, "conversations": examples.conversations,
            "texts before examples": examples.before,
        }  # fmt: skip
        kind = next((name for name, held in lacking.items() if held is not None), "")
        if examples.labels is None and not examples.has_pictures:
            kind = kind or "features in place of pictures"
        if kind:
            raise ValueError(f"{dataset.name!r} cannot be written as Croissant: the examples of {place!r} have {kind}")


def _records(examples: Examples, path: Callable[[int], str]) -> Iterator[dict[str, str]]:
    lists = {"answers": examples.annotations, "choices": examples.choices, "captions": examples.captions}
    texts = {"question": examples.questions, "answer": examples.answers, "type": examples.types}
    texts = {key: column for key, column in texts.items() if not isinstance(column, NoTexts)}
    has_picture = presence(examples)[:, 0]
    for row, name in enumerate(examples.names):
        record = {"id": name} | {key: column[row] for key, column in texts.items()}
        pictures = np.atleast_1d(examples.image_index[row]).tolist() if has_picture[row] else []
        record |= {key: path(number) for key, number in zip(("image", "image2"), pictures, strict=False)}
        record |= {key: _list(held[row]) for key, held in lists.items() if held is not None}
        yield record if examples.labels is None else {**record, "labels": _list(examples.labels.of(row))}


def _list(values: Any) -> str:
    return json.dumps([*values], ensure_ascii=False)


def _metadata(
    dataset: FederatedDataset, folder: Path, columns: Sequence[str], source: str, *, pictures: bool, unique: bool
) -> dict[str, Any]:
    facts = " ".join(f"{key}: {value}." for key, value in dataset.facts.items())
    made = f" Made by confed from {source}." if source else ""
    clients, unseen = len(dataset.clients), len(dataset.unseen)
    licence = dataset.facts.get("licence") or dataset.facts.get("license")
    archive = [_file(folder / _PICTURES, "application/zip"), _FILE_SET] if pictures else []
    examples = {
        "@type": "cr:RecordSet", "@id": "examples", "name": "examples",
        "description": "An example in each row, with the client that has it.",
        **({"key": {"@id": "examples/id"}} if unique else {}),
        "field": [_column(name, pictures) for name in columns],
    }  # fmt: skip
    return {
        "@context": _CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": "http://mlcommons.org/croissant/1.0",
        "name": dataset.name,
        "description": f"Federated dataset of {clients} clients and {unseen} unseen places.{made} {facts}".strip(),
        **({"license": licence} if licence else {}),
        "version": "1.0.0",
        "distribution": [_file(folder / _TABLE, "text/csv"), *archive],
        "recordSet": [examples, *([_PICTURE_RECORDS] if pictures else [])],
    }


_FILE_SET: Mapping[str, Any] = {
    "@type": "cr:FileSet", "@id": "picture-files", "name": "picture-files", "containedIn": {"@id": _PICTURES},
    "encodingFormat": "image/png", "includes": "pictures/*.png",
}  # fmt: skip
_PICTURE_RECORDS: Mapping[str, Any] = {
    "@type": "cr:RecordSet", "@id": "pictures", "name": "pictures", "description": "The pictures by their paths.",
    "key": {"@id": "pictures/path"},
    "field": [
        {
            "@type": "cr:Field", "@id": f"pictures/{name}", "name": name, "description": text, "dataType": kind,
            "source": {"fileSet": {"@id": "picture-files"}, "extract": {"fileProperty": prop}},
        }
        for name, text, kind, prop in (
            ("path", "path in the archive", "sc:Text", "fullpath"),
            ("content", "the picture", "sc:ImageObject", "content"),
        )
    ],
}  # fmt: skip


def _column(name: str, pictures: bool) -> dict[str, Any]:
    refers = pictures and name in ("image", "image2")
    return {
        "@type": "cr:Field", "@id": f"examples/{name}", "name": name, "description": _COLUMNS[name],
        "dataType": "sc:Text", "source": {"fileObject": {"@id": _TABLE}, "extract": {"column": name}},
        **({"references": {"field": {"@id": "pictures/path"}}} if refers else {}),
    }  # fmt: skip


def _file(path: Path, kind: str) -> dict[str, Any]:
    content = path.read_bytes()
    return {
        "@type": "cr:FileObject", "@id": path.name, "name": path.name, "contentUrl": path.name,
        "contentSize": f"{len(content)} B", "encodingFormat": kind, "sha256": hashlib.sha256(content).hexdigest(),
    }  # fmt: skip

"""Datasets as files that other programs read: a table of examples, pictures, and Croissant metadata about both.

Croissant is MLCommons' vocabulary for datasets (version 1.0, https://docs.mlcommons.org/croissant/docs/croissant-spec.html):
a JSON-LD file with the digest of every file and the meaning of every column. The table's columns have the names that
:mod:`confed.data.intake.tables` reads, so that the folder, with its archive unpacked, is a dataset of one's own again.
"""

import csv
import hashlib
import io
import json
import zipfile
from collections.abc import Iterator, Mapping
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
_CONTEXT: Mapping[str, Any] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "citeAs": "cr:citeAs",
    "column": "cr:column",
    "conformsTo": "dct:conformsTo",
    "cr": "http://mlcommons.org/croissant/",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "dct": "http://purl.org/dc/terms/",
    "equivalentProperty": "cr:equivalentProperty",
    "examples": {"@id": "cr:examples", "@type": "@json"},
    "extract": "cr:extract",
    "field": "cr:field",
    "fileProperty": "cr:fileProperty",
    "fileObject": "cr:fileObject",
    "fileSet": "cr:fileSet",
    "format": "cr:format",
    "includes": "cr:includes",
    "isLiveDataset": "cr:isLiveDataset",
    "jsonPath": "cr:jsonPath",
    "key": "cr:key",
    "md5": "cr:md5",
    "parentField": "cr:parentField",
    "path": "cr:path",
    "recordSet": "cr:recordSet",
    "references": "cr:references",
    "regex": "cr:regex",
    "repeated": "cr:repeated",
    "replace": "cr:replace",
    "samplingRate": "cr:samplingRate",
    "sc": "https://schema.org/",
    "separator": "cr:separator",
    "source": "cr:source",
    "subField": "cr:subField",
    "transform": "cr:transform",
}


def write_croissant(dataset: FederatedDataset, folder: Path, source: str = "") -> list[Path]:
    """Table of examples, archive of pictures and Croissant metadata of a dataset."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists already; name a folder that does not")
    _check(dataset)
    folder.mkdir(parents=True, exist_ok=True)
    archive, rows = _Archive(folder / _PICTURES), list[dict[str, str]]()
    with archive:
        for place, role, examples in dataset.placed():
            unseen = role == "unseen"
            placed = {"client": "" if unseen else place, "place": place, "split": "test" if unseen else role}
            rows += [placed | row for row in _records(examples, archive)]
    used: list[str] = []
    for name in _COLUMNS:
        if any(row.get(name) for row in rows):
            used.append(name)
    with (folder / _TABLE).open("w", encoding="utf-8", newline="") as file:
        # Ends of lines as in RFC 4180: with "\n" alone a carriage return in a text would not be put in quotes.
        writer = csv.DictWriter(file, used, restval="", extrasaction="ignore", lineterminator="\r\n")
        writer.writeheader()
        writer.writerows(rows)
    if not archive.count:
        (folder / _PICTURES).unlink()
    row_ids = {row["id"] for row in rows}
    metadata = _metadata(dataset, folder, used, source, pictures=archive.count > 0, unique=len(row_ids) == len(rows))
    text = json.dumps(metadata, indent=1, ensure_ascii=False) + "\n"
    (folder / METADATA).write_text(text, encoding="utf-8")
    return [folder / METADATA, folder / _TABLE, *([folder / _PICTURES] if archive.count else [])]


class _Archive:
    """Pictures as PNG in a zip archive, each row of a picture table once."""

    def __init__(self, path: Path) -> None:
        self._zip, self.count = zipfile.ZipFile(path, "w", zipfile.ZIP_STORED), 0
        self._names: dict[tuple[int, int], str] = {}
        self._kept: list[Any] = []  # so that no other table gets the number of one

    def __enter__(self) -> "_Archive":
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()

    def name(self, table: Any, row: int) -> str:
        """Path of a picture in the archive, where it is put if it is not there."""
        key = (id(table), row)
        if key not in self._names:
            content = io.BytesIO()
            Image.fromarray(np.asarray(table[row])).save(content, "PNG")
            self._names[key] = f"pictures/{self.count:06d}.png"
            self._kept.append(table)
            # The date of zip's beginning: equal datasets have equal archives.
            self._zip.writestr(zipfile.ZipInfo(self._names[key]), content.getvalue())
            self.count += 1
        return self._names[key]


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


def _records(examples: Examples, archive: _Archive) -> Iterator[dict[str, str]]:
    lists = {"answers": examples.annotations, "choices": examples.choices, "captions": examples.captions}
    texts = {"question": examples.questions, "answer": examples.answers, "type": examples.types}
    texts = {key: column for key, column in texts.items() if not isinstance(column, NoTexts)}
    has_picture = presence(examples)[:, 0]
    for row, name in enumerate(examples.names):
        record = {"id": name} | {key: column[row] for key, column in texts.items()}
        pictures = np.atleast_1d(examples.image_index[row]).tolist() if has_picture[row] else []
        record |= {key: archive.name(examples.images, p) for key, p in zip(("image", "image2"), pictures, strict=False)}
        record |= {key: _list(held[row]) for key, held in lists.items() if held is not None}
        yield record if examples.labels is None else {**record, "labels": _list(examples.labels.of(row))}


def _list(values: Any) -> str:
    return json.dumps([*values], ensure_ascii=False)


def _metadata(
    dataset: FederatedDataset,
    folder: Path,
    columns: list[str],
    source: str,
    *,
    pictures: bool,
    unique: bool,
) -> dict[str, Any]:
    facts = " ".join(f"{key}: {value}." for key, value in dataset.facts.items())
    made = f" Made by confed from {source}." if source else ""
    clients, unseen = len(dataset.clients), len(dataset.unseen)
    what = f"Federated dataset of {clients} clients and {unseen} unseen places.{made} {facts}".strip()
    licence = dataset.facts.get("licence") or dataset.facts.get("license")
    files = [_file(folder / _TABLE, "text/csv")]
    records: list[Mapping[str, Any]] = [
        {
            "@type": "cr:RecordSet", "@id": "examples", "name": "examples",
            "description": "An example in each row, with the client that has it.",
            **({"key": {"@id": "examples/id"}} if unique else {}),
            "field": [_column(name, pictures) for name in columns],
        }
    ]  # fmt: skip
    if pictures:
        files += [_file(folder / _PICTURES, "application/zip"), _FILE_SET]
        records.append(_PICTURE_RECORDS)
    return {
        "@context": _CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": "http://mlcommons.org/croissant/1.0",
        "name": dataset.name,
        "description": what,
        **({"license": licence} if licence else {}),
        "version": "1.0.0",
        "distribution": files,
        "recordSet": records,
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

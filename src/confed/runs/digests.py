"""SHA-256 digests of what a run computes from, and of what comes of it, for repeating published results."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from confed.data.examples import FederatedDataset
from confed.data.lazy import Taken
from confed.data.picture_tables import NoPictures, Pictures
from confed.data.ragged import Ragged
from confed.results.folder import RunFolder
from confed.system.packages import code_digest, digest_of, packages

LOOKED_AT = 64  # rows that count for the digest of pictures in files and of features of regions, spread evenly


def source_digests(dataset: FederatedDataset) -> dict[str, str]:
    """Digests of what decides a run's numbers beside its recipe: "code", "packages" and, if here, "data"."""
    data = {} if dataset.elsewhere is not None else {"data": data_digest(dataset)}
    return {"code": code_digest(), "packages": digest_of(packages()), **data}


def result_digests(folder: RunFolder) -> dict[str, str]:
    """Digests of a finished run's "history", "predictions" and "models", as far as it has them."""
    files = {"history": folder.metrics, "predictions": folder.predictions}
    digests = {name: file_digest([file]) for name, file in files.items() if file.is_file()}
    models = sorted(folder.models.rglob("*.safetensors"))
    return digests | ({"models": file_digest(models, folder.models)} if models else {})


def file_digest(files: Sequence[Path], root: Path | None = None) -> str:
    """SHA-256 of files one behind the other."""
    hasher = hashlib.sha256()
    for path in files:
        if root is not None:
            hasher.update(f"{path.relative_to(root).as_posix()}\n{path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                hasher.update(block)
    return hasher.hexdigest()


def data_digest(dataset: FederatedDataset) -> str:
    """SHA-256 over all examples: texts, answers, who has them in which role, and inputs, of files :data:`LOOKED_AT`."""
    parts = _label_parts(dataset) if dataset.kind == "labels" else _question_parts(dataset)
    hasher = hashlib.sha256()
    for field in parts:
        hasher.update(f"{len(field)}\n".encode())
        hasher.update(field)
    return hasher.hexdigest()


def _question_parts(dataset: FederatedDataset) -> Iterator[bytes]:
    tables: dict[int, tuple[bytes, object]] = {}  # the table is kept, so that no other one gets its number

    def table(of: Any) -> bytes:
        if id(of) not in tables:
            tables[id(of)] = (_table(of), of)
        return tables[id(of)][0]

    yield _json([dataset.name, dataset.answers, dict(dataset.answer_sets), dict(dataset.tasks)])
    for place, role, examples in dataset.placed():
        columns = (
            examples.names, examples.questions, examples.answers, examples.types, examples.annotations,
            examples.choices, examples.captions, examples.before, examples.conversations,
        )  # fmt: skip
        yield _json([place, role, *(None if column is None else [*column] for column in columns)])
        for held in (examples.images, examples.regions, examples.sounds, examples.series):
            yield b"" if held is None else table(held)
        for index in (examples.image_index, examples.sound_index, examples.series_index):
            yield b"" if index is None else _array(index)
        for name, present in (examples.present or {}).items():
            yield name.encode() + _array(present)


def _label_parts(dataset: FederatedDataset) -> Iterator[bytes]:
    yield _json([dataset.name, dataset.answers, dict(dataset.coarse)])
    tables: dict[int, object] = {}  # the table is kept, so that no other one gets its number
    for place, role, examples in dataset.placed():
        assert examples.labels is not None
        table = examples.labels.table
        if id(table) not in tables:  # once, and not for each of tens of thousands of clients
            tables[id(table)] = table
            held = [table.present, table.names, *([] if table.texts is None else [table.texts])]
            pictures = _table(examples.images) if examples.tables["image"] else b""
            kinds = _json(list(examples.types.column)) if isinstance(examples.types, Taken) else b""
            yield b"".join([*map(_table, held), pictures, kinds])
        yield _json([place, role]) + _array(examples.labels.rows)


def _table(held: Any) -> bytes:
    """SHA-256 of a table of pictures, features, recordings, series or packed rows."""
    hasher = hashlib.sha256()
    if isinstance(held, Ragged):
        hasher.update(_array(held.offsets) + _array(held.values))
    elif isinstance(held, np.ndarray):
        hasher.update(_array(held))
    else:
        hasher.update(_json(list(held.shape)))
        if len(held) and not isinstance(held, NoPictures):
            for row in np.unique(np.linspace(0, len(held) - 1, LOOKED_AT).astype(np.int64)):
                for array in _row(held, row):
                    hasher.update(_array(array))
    return hasher.digest()


def _row(held: Pictures | Any, row: int) -> Sequence[np.ndarray]:
    """A row of a table that lies in files; nothing of a picture that cannot be read."""
    try:
        taken = held[np.array([row])]
    except (OSError, ValueError):
        return ()
    return taken if isinstance(taken, tuple) else [taken]


def _array(values: np.ndarray | Tensor) -> bytes:
    array = np.ascontiguousarray(values)
    head = f"{array.dtype.str} {array.shape}\n".encode()
    return head + hashlib.sha256(array.data if array.size else b"").digest()


@cache
def _encoder() -> json.JSONEncoder:
    return json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def _json(value: Any) -> bytes:
    return _encoder().encode(value).encode("utf-8", "surrogatepass")

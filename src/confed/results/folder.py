"""A run folder: what a run leaves behind, and in which files.

``recipe.toml``, ``begun.toml`` and ``begun.json`` (:mod:`confed.runs.same_recipe`), ``data.json`` (of multi-label
data), ``metrics.jsonl``, the journal from which a killed run goes on (the same bytes however often it was killed and
with however many workers), ``timings.jsonl``, ``records/`` (:mod:`confed.results.stored`) and, made of these,
``summary.json`` and ``predictions.safetensors``; ``gallery.json``, ``checkpoint/``, ``models/``.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import save
from torch import Tensor

from confed.federation.checkpoint import write_atomically
from confed.federation.file_names import path_of
from confed.federation.reading import faults_of
from confed.system.folder_lock import without_lock
from confed.system.plain_text import visible

Kind = Literal["run", "federation", "study", "sweep", ""]

MEMBERS = "members.json"  # who takes part in a federation across machines, in its run folder

PAGE_TOKEN = "page.token"  # of a server's page, made before its run begins
FINAL = "final.json"
"""What the final models do at a federation's sites, by model; :mod:`confed.deployment.server`."""

SWEEPS = ("sweep.json", "models.json")  # index of a sweep; the second is what version 0.1 called that of several models

SCORES = "scores.json"
"""In place of a summary: validation scores of a run without test data, such as a configuration of ``confed tune``."""


class RunFolder:
    """Paths and writers of one run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.recipe = root / "recipe.toml"
        self.begun = root / "begun.toml"
        self.begun_with = root / "begun.json"
        self.data = root / "data.json"
        self.metrics = root / "metrics.jsonl"
        self.timings = root / "timings.jsonl"
        self.timeline = root / "timeline.jsonl"
        self.summary = root / "summary.json"
        self.records = root / "records"
        self.predictions = root / "predictions.safetensors"
        self.gallery = root / "gallery.json"
        self.similarity = root / "similarity.json"
        self.checkpoint = root / "checkpoint"
        self.models = root / "models"

    @classmethod
    def create(cls, root: Path, recipe: str) -> "RunFolder":
        """A new run folder with its recipe."""
        if root.exists() and (not root.is_dir() or {path.name for path in without_lock(root)} - {PAGE_TOKEN}):
            raise ValueError(
                f"{root} exists already; continue it with `confed resume {root}` or give another folder with --out"
            )
        root.mkdir(parents=True, exist_ok=True)
        folder = cls(root)
        write_atomically(folder.recipe, recipe.encode())
        return folder

    def personal_model(self, client: str) -> Path:
        """The file of a client's own model."""
        return path_of(self.models / "personal", client) / "trained.safetensors"

    def append(self, path: Path, line: Mapping[str, Any]) -> bytes:
        """Adds one line of JSON, on disk when this returns: a checkpoint must never be ahead of its history."""
        written = visible(json.dumps(line, ensure_ascii=False)).encode()
        with path.open("ab") as file:
            file.write(written + b"\n")
            file.flush()
            os.fsync(file.fileno())
        return written

    def history_bytes(self) -> int:
        """Length of ``metrics.jsonl``."""
        return self.metrics.stat().st_size if self.metrics.exists() else 0

    def truncate(self, history_bytes: int, rounds: int) -> None:
        """Takes the history back to a checkpoint: the first bytes of the metrics, the timings up to a round."""
        shutil.rmtree(self.records, ignore_errors=True)  # of a run that had come to its end
        with self.metrics.open("ab") as file:
            file.truncate(history_bytes)
        lines = [line for line in read_jsonl(self.timings) if line["round"] <= rounds]
        write_atomically(self.timings, b"".join(json.dumps(line).encode() + b"\n" for line in lines))
        if rounds < 1 and self.timeline.is_file():
            self.timeline.unlink()  # the first round, which it shows, comes again

    def write_json(self, path: Path, value: Any) -> None:
        """Writes JSON atomically."""
        write_atomically(path, visible(json.dumps(value, indent=1, ensure_ascii=False)).encode())

    def write_tensors(self, path: Path, tensors: Mapping[str, Tensor], **metadata: str) -> None:
        """Writes a safetensors file atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        flat = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
        write_atomically(path, save(flat, {"format": "1", **metadata}))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The lines of a file; none if it is missing. A torn last line (a killed run) is left out."""
    if not path.exists():
        return []
    with faults_of(path, "lines of JSON"):
        entries: list[Any] = [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
        for entry in entries:
            if not isinstance(entry, dict):
                raise ValueError(f"expected an object in every line, got {str(entry)[:40]}")
        return entries


def kind_of(folder: Path) -> Kind:
    """Kind of a results folder."""
    if any((folder / name).is_file() for name in SWEEPS):
        return "sweep"
    if "runs" in _index(folder):
        return "study"
    if (folder / MEMBERS).is_file():
        return "federation"
    return "run" if (folder / "recipe.toml").is_file() else ""


def _index(folder: Path) -> Mapping[str, Any]:
    """Content of ``summary.json``; empty if there is none."""
    file = folder / "summary.json"
    if not file.is_file():
        return {}
    with faults_of(file, "a JSON object"):
        content = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise TypeError(f"got {str(content)[:40]}")
        return content  # pyright: ignore[reportUnknownVariableType]


def is_finished(folder: Path) -> bool:
    """Whether a run has come to its end."""
    return (folder / "summary.json").is_file() or (folder / SCORES).is_file()


def run_folders(folder: Path) -> list[Path]:
    """The run folders in a run or study folder."""
    kind = kind_of(folder)
    if kind == "study":
        with faults_of(folder / "summary.json", "a study's index"):
            return [folder / run["folder"] for run in _index(folder)["runs"]]
    if kind in ("run", "federation"):
        return [folder]
    raise ValueError(f"{folder} is neither a run folder (recipe.toml) nor a study folder (summary.json with runs)")

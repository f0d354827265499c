"""Cells of a study or sweep: its runs, numbered from 1, for processes that share nothing but a file system.

``cells.json`` in the folder lists the cells with the versions of confed and of libraries, and a digest of each recipe.
Cells keep their numbers: what a study gains later is added at the end. A run that the swept setting does not concern is
the same at every value of a sweep; it is one cell, and copied when results are gathered
(:func:`confed.studies.runner.borrow`).
"""

import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from confed.federation.checkpoint import write_atomically
from confed.federation.reading import faults_of
from confed.recipes.recipe import Recipe
from confed.results.folder import RunFolder, kind_of, read_jsonl
from confed.results.settings import flat
from confed.results.sweep import read_sweep
from confed.runs.summary import versions
from confed.studies.runner import error_of, note_refusals
from confed.studies.study import INDIFFERENT, Job, StudyFolder, begun, growing
from confed.system.folder_lock import exclusive, holder_of

CELLS = "cells.json"
"""The list of cells, in the folder of a study or sweep."""

State = Literal["done", "running", "stopped", "failed", "waiting"]


@dataclass(frozen=True)
class Cell:
    """One run of a study or sweep.

    Attributes:
        study: folder of its study within the sweep's; empty in a study.
        method: row of the study.
        recipe: digest of its recipe when it was listed.
    """

    number: int
    study: str
    method: str
    seed: int
    recipe: str


@dataclass(frozen=True)
class Cells:
    """Content of ``cells.json``.

    Attributes:
        root: folder of the study or sweep.
        cells: in the order of their numbers.
        versions: of confed and of libraries, when the list was written.
        refused: "row/seed-n", after the point of a sweep -> why it is no cell; known only to who listed them.
    """

    root: Path
    cells: tuple[Cell, ...]
    versions: Mapping[str, str]
    refused: Mapping[str, str]


@dataclass(frozen=True)
class CellStatus:
    """What is known of a cell from its folder.

    Attributes:
        title: its run in words.
        state: "running": a process holds the lease of its folder; "stopped": it was begun, and no process does;
            "failed": it went wrong; "waiting": nothing is there.
        round: number of finished rounds.
        text: where it runs, or what went wrong.
    """

    cell: Cell
    title: str
    state: State
    round: int
    rounds: int
    text: str = ""


def studies_of(root: Path) -> dict[str, StudyFolder]:
    """Folder within the root -> study that grows: those of a sweep, or the one in the root itself, called ""."""
    if kind_of(root) == "sweep":
        studies = {point.folder: growing(root / point.folder) for point in read_sweep(root).points}
        return {folder: study for folder, study in studies.items() if study is not None}
    study = growing(root)
    if study is None:
        raise ValueError(f"{root} must be a study of `confed compare --recipe`, or a sweep")
    return {"": study}


def number_cells(root: Path) -> Cells:
    """Numbers for all runs of a study or sweep that have none yet; written into ``cells.json``.

    Rows that cannot be run get none; why is written into their study's index.

    Faulty data and another process that works on the study as a whole are a ValueError.
    """
    refused: dict[str, str] = {}
    for folder, study in studies_of(root).items():
        refused |= {"/".join(filter(None, (folder, cell))): why for cell, why in note_refusals(study.root).items()}
    # Numbers stay; recipes of cells that were not begun may have changed.
    with exclusive(root):
        numbered = {
            (c.study, c.method, c.seed): c for c in (read_cells(root).cells if (root / CELLS).is_file() else ())
        }
        shared = kind_of(root) == "sweep" and not read_sweep(root).models
        seen: dict[str, tuple[str, str, int]] = {}
        listed: dict[int, Cell] = {}
        following = len(numbered)
        for folder, study, job in _runs(root):
            key, digest = (folder, job.method, job.seed), _digest(study.recipe_of(job))
            if "/".join(filter(None, (folder, job.cell))) in refused and key not in numbered:
                continue
            if key not in numbered and shared and digest in seen:
                continue
            seen.setdefault(digest, key)
            number = numbered[key].number if key in numbered else (following := following + 1)
            listed[number] = Cell(number, folder, job.method, job.seed, digest)
        cells = Cells(root, tuple(listed[number] for number in sorted(listed)), versions(), refused)
        content = {"versions": dict(cells.versions), "cells": [asdict(cell) for cell in cells.cells]}
        write_atomically(root / CELLS, json.dumps(content, indent=1, ensure_ascii=False).encode())
    return cells


def read_cells(root: Path) -> Cells:
    """The cells of a study or sweep."""
    file = root / CELLS
    if not file.is_file():
        raise ValueError(
            f"{root} has no {CELLS}; write it with `confed compare --recipe RECIPE --on script`, or `confed sweep`, "
            "and the same --out"
        )
    with faults_of(file, "a list of cells"):
        content: Any = json.loads(file.read_text(encoding="utf-8"))
        cells = tuple(Cell(**entry) for entry in content["cells"])
        for number, cell in enumerate(cells, 1):
            texts = (cell.study, cell.method, cell.recipe)
            if cell.number != number or type(cell.seed) is not int or not all(isinstance(text, str) for text in texts):
                raise ValueError(f"{file} must be a list of cells numbered from 1, got {asdict(cell)}")
        return Cells(root, cells, {str(name): str(value) for name, value in content["versions"].items()}, {})


def find_cell(root: Path, number: int) -> tuple[StudyFolder, Job, str]:
    """The study and run of a cell, and a note on versions of libraries that differ, if any do."""
    cells = read_cells(root)
    if not 1 <= number <= len(cells.cells):
        raise ValueError(f"{root} has cells 1 to {len(cells.cells)}, got {number}")
    here, versions_before = versions(), cells.versions
    if versions_before.get("confed") != here["confed"]:
        raise ValueError(
            f"{root}/{CELLS} was written by confed {versions_before.get('confed')}, and this is confed "
            f"{here['confed']}; tasks "
            "must have the version that wrote it (see --before), or write it again"
        )
    cell = cells.cells[number - 1]
    study = studies_of(root).get(cell.study)
    job = (
        None if study is None else next((j for j in study.jobs if (j.method, j.seed) == (cell.method, cell.seed)), None)
    )
    if study is None or job is None:
        raise ValueError(f"{root} has no run {cell.study}/{cell.method}/seed-{cell.seed}, which is cell {number}")
    if _digest(study.recipe_of(job)) != cell.recipe:
        raise ValueError(
            f"cell {number} of {root} has another recipe than when {CELLS} was written; write it again with the "
            "command that changed the recipe and `--on script`"
        )
    other = [
        f"{name} {versions_before[name]}, here {here[name]}"
        for name in here
        if name in versions_before and versions_before[name] != here[name]
    ]
    note = f"{CELLS} was written with {', '.join(other)}: numbers need not agree to the last digit" if other else ""
    return study, job, note


def statuses(root: Path) -> list[CellStatus]:
    """Status of every cell, in the order of their numbers, from what is in their folders."""
    studies = studies_of(root)
    cell_statuses: list[CellStatus] = []
    for cell in read_cells(root).cells:
        study = studies.get(cell.study)
        for job in () if study is None else study.jobs:
            if study is not None and (job.method, job.seed) == (cell.method, cell.seed):
                cell_statuses.append(_status(cell, study, job))
    return cell_statuses


def _status(cell: Cell, study: StudyFolder, job: Job) -> CellStatus:
    folder = study.root / job.folder
    titles = [cell.study, study.labels[job.method], f"seed {job.seed}"]
    title, rounds = ", ".join(filter(None, titles)), study.recipe_of(job).run.rounds
    if study.finished(job):
        return CellStatus(cell, title, "done", rounds, rounds)
    lines = read_jsonl(RunFolder(folder).metrics)
    round = max((int(line["round"]) for line in lines if line.get("event") == "round"), default=0)
    holder = holder_of(folder) if folder.is_dir() else None
    if holder is not None and holder.alive:
        text = f"{holder.who}, last sign of life {holder.silent:.0f} s ago"
        return CellStatus(cell, title, "running", round, rounds, text)
    if error := error_of(folder):
        return CellStatus(cell, title, "failed", round, rounds, error)
    if begun(folder) or round:
        return CellStatus(cell, title, "stopped", round, rounds, "goes on when its task runs again")
    return CellStatus(cell, title, "waiting", 0, rounds)


def _runs(root: Path) -> Iterator[tuple[str, StudyFolder, Job]]:
    for folder, study in studies_of(root).items():
        for job in study.jobs:
            yield folder, study, job


def _digest(recipe: Recipe) -> str:
    """Digest of the settings of a single-run recipe, those apart that change no figure."""
    settings = {key: value for key, value in flat(tomllib.loads(recipe.to_toml())).items() if key not in INDIFFERENT}
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:16]

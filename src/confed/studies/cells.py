"""Cells of a study or sweep: its runs, numbered from 1, for processes that share nothing but a file system.

``cells.json`` in the folder lists the cells with the versions of confed and of libraries, and a digest of each recipe.
Cells keep their numbers: what a study gains later is added at the end. A run that the swept setting does not concern is
the same at every value of a sweep; it is one cell, and copied when results are gathered
(:func:`confed.studies.runner.borrow`). Tasks of an array compute them (:mod:`confed.studies.cluster`), or actors on a
Ray cluster whose nodes share a file system with this process (:func:`compute_on_ray`).
"""

import hashlib
import json
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from confed.federation.checkpoint import write_atomically
from confed.federation.reading import faults_of
from confed.recipes.recipe import Recipe
from confed.results.folder import kind_of
from confed.results.settings import flat
from confed.results.stored import read_records
from confed.results.sweep import read_sweep
from confed.runs.run import needing_ray
from confed.runs.summary import versions
from confed.studies.pool import attempt, headline
from confed.studies.runner import complete, error_of, leave_error, note_refusals
from confed.studies.study import INDIFFERENT, Job, StudyFolder, begun, study_in
from confed.system.events import Event, JobEnded, JobsPlanned, Progress, to_json
from confed.system.folder_lock import Occupied, exclusive, holder_of

if TYPE_CHECKING:
    from confed.engines.ray.placement import Wanted

CELLS = "cells.json"
"""The list of cells, in the folder of a study or sweep."""

State = Literal["done", "running", "stopped", "failed", "waiting"]


@dataclass(frozen=True)
class Cell:
    """One run of a study or sweep."""

    number: int
    study: str  # folder of its study within the sweep's; empty in a study
    method: str  # row of the study
    seed: int
    recipe: str  # digest of its recipe when it was listed


@dataclass(frozen=True)
class Cells:
    """Content of ``cells.json``."""

    root: Path  # folder of the study or sweep
    cells: tuple[Cell, ...]  # in the order of their numbers
    versions: Mapping[str, str]  # of confed and of libraries, when the list was written
    refused: Mapping[str, str]  # "row/seed-n", after the point of a sweep -> why it is no cell; for who listed them


@dataclass(frozen=True)
class CellStatus:
    """What is known of a cell from its folder."""

    cell: Cell
    title: str  # its run in words
    # "running": a process holds the lease of its folder; "stopped": it was begun, and no process does; "failed": it
    # went wrong; "waiting": nothing is there
    state: State
    round: int  # number of finished rounds
    rounds: int
    text: str = ""  # where it runs, or what went wrong


def studies_of(root: Path) -> dict[str, StudyFolder]:
    """Folder within the root -> study: those of a sweep, or the one in the root itself, called ""."""
    if kind_of(root) == "sweep":
        studies = {point.folder: study_in(root / point.folder) for point in read_sweep(root).points}
        return {folder: study for folder, study in studies.items() if study is not None}
    study = study_in(root)
    if study is None:
        raise ValueError(f"{root} must be a study or a sweep")
    return {"": study}


def number_cells(root: Path) -> Cells:
    """Numbers for all runs of a study or sweep that have none yet and can be run; written into ``cells.json``."""
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
        raise ValueError(f"{root} has no {CELLS}; write it with `confed compare RECIPE --on script` and the same --out")
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
    here, before = versions(), cells.versions
    if before.get("confed") != here["confed"]:
        raise ValueError(
            f"{root}/{CELLS} was written by confed {before.get('confed')}, and this is confed {here['confed']}; tasks "
            "must have the version that wrote it (see --before), or write it again"
        )
    cell = cells.cells[number - 1]
    study = studies_of(root).get(cell.study)
    job = None if study is None else study.job(cell.method, cell.seed)
    if study is None or job is None:
        raise ValueError(f"{root} has no run {cell.study}/{cell.method}/seed-{cell.seed}, which is cell {number}")
    if _digest(study.recipe_of(job)) != cell.recipe:
        raise ValueError(
            f"cell {number} of {root} has another recipe than when {CELLS} was written; write it again with the "
            "command that changed the recipe and `--on script`"
        )
    other = [
        f"{name} {before[name]}, here {version}"
        for name, version in here.items()
        if before.get(name, version) != version
    ]
    note = f"{CELLS} was written with {', '.join(other)}: numbers need not agree to the last digit" if other else ""
    return study, job, note


def statuses(root: Path) -> list[CellStatus]:
    """Status of every cell, in the order of their numbers, from what is in their folders."""
    studies = studies_of(root)
    cell_statuses: list[CellStatus] = []
    for cell in read_cells(root).cells:
        study = studies.get(cell.study)
        if study is not None and (job := study.job(cell.method, cell.seed)) is not None:
            cell_statuses.append(_status(cell, study, job))
    return cell_statuses


def _status(cell: Cell, study: StudyFolder, job: Job) -> CellStatus:
    folder = study.root / job.folder
    titles = [cell.study, study.labels[job.method], f"seed {job.seed}"]
    title, rounds = ", ".join(filter(None, titles)), study.recipe_of(job).run.rounds
    if study.finished(job):
        return CellStatus(cell, title, "done", rounds, rounds)
    round = read_records(folder).reached
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


# Cells as jobs on a Ray cluster -----------------------------------------------------------------------------------

SEEN = 30.0
"""Seconds after which every node of a network file system sees a file as it is."""


def compute_on_ray(
    root: Path, address: str, workers: int, progress: Progress, refused: Callable[[str, str], None]
) -> Cells:
    """Execution of the cells that are missing, each in an actor on a Ray cluster; lost ones go on elsewhere."""
    with needing_ray("--on ray"):
        from confed.engines.ray.actor import JobSource
        from confed.engines.ray.jobs import carry_out
    from confed.engines.workers import free_cores

    cells = number_cells(root)
    for cell, why in cells.refused.items():
        refused(cell, why)
    missing = [status for status in statuses(root) if status.state != "done"]
    titles = [status.title for status in missing]
    progress(JobsPlanned(titles, len(cells.cells) - len(missing)))
    place = root.resolve()
    terms = {"root": str(place), "digest": _digest_of_list(root)}
    source = JobSource("confed.studies.cells:shares_folder", "confed.studies.cells:run_cell_on_ray", terms)
    wanted, jobs = (
        _wanted(root, workers, len(missing)),
        [{"root": str(place), "number": s.cell.number} for s in missing],
    )
    cores = workers * wanted.threads or free_cores()
    carry_out(source, jobs, titles, wanted, address, cores, _noting(root, missing, progress))
    return cells


def shares_folder(root: str, digest: str) -> str:
    """Why a process cannot work on cells: it does not see their folder as the process that wrote it; or ""."""
    until = time.monotonic() + SEEN
    while (Path(root) / CELLS).is_file():
        if _digest_of_list(Path(root)) == digest:
            return ""
        if time.monotonic() > until:
            break
        time.sleep(1.0)
    return f"it does not see {root}/{CELLS} as it was written: the folder must be on a file system that all nodes share"


def run_cell_on_ray(job: Mapping[str, Any], tell: Callable[[Mapping[str, Any]], None]) -> dict[str, str]:
    """Execution or continuation of a cell; returns its outcome as :class:`confed.system.events.JobEnded` has it."""
    outcome, text = attempt(_complete, job, lambda event: tell(to_json(event)))
    return {"outcome": outcome, "text": text}


def _complete(job: Mapping[str, Any], progress: Progress) -> str:
    """One cell, after an earlier attempt on a node that was lost if there was one."""
    study, run, _ = find_cell(Path(job["root"]), job["number"])
    try:
        return headline(complete(study, run, progress, outlast=True))
    except Occupied as error:  # no fault of the recipe
        raise RuntimeError(str(error)) from error


def _wanted(root: Path, workers: int, cells: int) -> "Wanted":
    """What an actor needs; memory is that of this process, which has read the data and made every method's model."""
    import psutil

    from confed.engines.ray.placement import Wanted

    recipes = [study.recipe.run for study in studies_of(root).values()]
    return Wanted(
        min(workers, cells) or cells,
        max(run.threads for run in recipes),
        {"cpu": False, "cuda": True, "auto": None}[recipes[0].device],
        psutil.Process().memory_info().rss,
    )


def _noting(root: Path, missing: list[CellStatus], progress: Progress) -> Progress:
    """Progress callback that leaves why a cell failed in its folder, where its process did not come to that."""
    studies = studies_of(root)

    def note(event: Event) -> None:
        if isinstance(event, JobEnded) and event.outcome != "done":
            cell = missing[event.job].cell
            run = studies[cell.study].job(cell.method, cell.seed)
            folder = studies[cell.study].root / (run.folder if run else "")
            if run and not error_of(folder):
                folder.mkdir(parents=True, exist_ok=True)
                leave_error(folder, f"{event.text}\n")
        progress(event)

    return note


def _digest_of_list(root: Path) -> str:
    return hashlib.sha256((root / CELLS).read_bytes()).hexdigest()

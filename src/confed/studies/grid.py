"""Grids of methods and seeds that can grow: finished cells are reused, missing cells are run.

A grid is a study folder whose cells (one method, one seed) are run side by side. Asked for again with more methods or
seeds, it gets the missing cells; a cell that was run with other settings is never passed off as what was asked for.
A cell that goes wrong is marked in the index and the others go on.
"""

import contextlib
import json
import shutil
import tomllib
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from confed.federation.checkpoint import write_atomically
from confed.recipes.recipe import Recipe, load_recipe
from confed.results.folder import RunFolder, is_run, is_study
from confed.results.settings import flat
from confed.runs.same_recipe import check_same_recipe
from confed.studies import pool as cells
from confed.studies.study import Job, cell_folder, is_free, read_study, write_study
from confed.system.events import Event, JobEnded, JobsPlanned, Progress
from confed.system.folder_lock import exclusive

__all__ = [
    "Grid",
    "borrow",
    "differing",
    "is_grid",
    "joined",
    "keep",
    "open_grid",
    "refusals",
    "rows_of",
    "run_cell",
    "run_grid",
]

INDIFFERENT = (
    "name", "run.workers", "run.checkpoint_every", "run.checkpoint_seconds", "run.keep_checkpoints", "run.gallery",
    "run.modality_matrix",
)  # fmt: skip
"""Settings that change no figure."""


@dataclass
class Grid:
    """Outcome of a grid.

    Attributes:
        folder: where it is.
        summaries: of all finished cells.
        errors: "row/seed-n" -> why it is not there.
        failed: those of ``errors`` that broke on the way, instead of being refused beforehand.
        tuned: row -> the tuned values it was run with.
    """

    folder: Path
    summaries: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    errors: dict[str, str] = field(default_factory=dict[str, str])
    failed: set[str] = field(default_factory=set[str])
    tuned: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])


def rows_of(recipe: Recipe, wanted: str | None) -> tuple[str, ...]:
    """Rows that a command's ``--methods`` names.

    Args:
        recipe: the recipe.
        wanted: names with commas between them, "all" among them for the recipe's table, for its study's methods where
            it has no table, or for every registered method where it has neither; None for its table, its study's
            methods, or its one method: the first that there is.

    Raises:
        ValueError: no name at all.
    """
    from confed.registry import algorithms

    if wanted is None:
        return recipe.table or recipe.methods or (recipe.sections["algorithm"]["name"],)
    names: dict[str, None] = {}
    for name in filter(None, map(str.strip, wanted.split(","))):
        everything = recipe.table or recipe.methods or algorithms.names()
        names |= dict.fromkeys(everything if name == "all" else [name])
    if not names:
        raise ValueError(f"methods must name at least one method, got {wanted!r}")
    return tuple(names)


def is_grid(folder: Path) -> bool:
    """Whether a folder is a grid's: a study whose index also marks cells that went wrong."""
    if not is_study(folder) or is_free(folder):
        return False
    return "errors" in json.loads((folder / "summary.json").read_text(encoding="utf-8"))


def open_grid(
    recipe: Recipe, root: Path, seeds: Sequence[int], tuned: Mapping[str, Mapping[str, Any]] | None = None
) -> None:
    """A new grid's folder, or an existing one with further rows and seeds; no run is started.

    A folder that holds something else or in which another process works, faulty data, and a cell that was run with
    other settings are a ValueError.

    Args:
        recipe: with the wanted rows as its methods; see :meth:`confed.recipes.recipe.Recipe.with_rows`.
        root: the grid's folder.
        seeds: of the wanted cells.
        tuned: row -> values that tuning chose; they are in ``recipe`` already, and kept here to be shown.
    """
    from confed.runs.run import load_data

    if not is_grid(root):
        _check_free(root)
        # Faulty data must not leave a folder behind.
        load_data(recipe.with_run(seed=seeds[0]))
        root.mkdir(parents=True, exist_ok=True)
    with exclusive(root):  # another process may have made the grid meanwhile
        _open(recipe, root, seeds, tuned or {})


def keep(root: Path, **entries: Any) -> None:
    """Further entries of a grid's index, such as how its methods are to be judged."""
    index = json.loads((root / "summary.json").read_text(encoding="utf-8")) | entries
    write_atomically(root / "summary.json", json.dumps(index, indent=1, ensure_ascii=False).encode())


def _check_free(root: Path) -> None:
    if not is_free(root):
        raise ValueError(f"{root} exists already and is no grid of `confed compare`; give another folder with --out")


def _open(recipe: Recipe, root: Path, seeds: Sequence[int], tuned: Mapping[str, Mapping[str, Any]]) -> None:
    if is_grid(root):
        before, index = read_study(root)
        old = [Job(**run) for run in index["runs"]]
        used = {row: values for row, values in index["tuned"].items() if row not in recipe.methods} | dict(tuned)
    else:
        _check_free(root)
        before, old, used = recipe, [], dict(tuned)
    merged = joined(before, recipe)
    rows = merged.methods
    wanted = {(job.method, job.seed) for job in old} | {(row, seed) for row in recipe.methods for seed in seeds}
    # All methods of one seed share its data, so a process that goes through them in this order reads them once.
    order = {row: number for number, row in enumerate(rows)}
    there = {(job.method, job.seed): job.folder for job in old}
    jobs = [
        Job(row, seed, there.get((row, seed), cell_folder(row, seed)))
        for row, seed in sorted(wanted, key=lambda c: (c[1], order[c[0]]))
    ]
    _check_settings(merged, root, jobs)
    write_study(merged, rows, root, jobs, errors={}, tuned={row: used[row] for row in rows if row in used})


def joined(before: Recipe, recipe: Recipe) -> Recipe:
    """A recipe with its rows and those that a folder holds already, in the order of its table where they are in it."""
    rows = list(dict.fromkeys([*before.methods, *recipe.methods]))
    if set(rows) <= set(recipe.table):
        rows.sort(key=recipe.table.index)
    kept = {row: values for row, values in before.overrides.items() if row not in recipe.methods}
    return recipe.with_rows(rows, {**kept, **recipe.overrides})


def _check_settings(recipe: Recipe, root: Path, jobs: Sequence[Job]) -> None:
    """Check that finished cells were run with the settings that they would be run with now.

    Raises:
        ValueError: a cell was run with other settings; names them.
    """
    found: list[str] = []
    for job in jobs:
        folder = root / job.folder
        if not _begun(folder):
            continue
        different = differing(load_recipe(folder / "recipe.toml"), _cell(recipe, job))
        if different:
            found.append(f"{job.folder} was run with {different}")
    if found:
        more = f" (and {len(found) - 1} more cells differ)" if len(found) > 1 else ""
        raise ValueError(
            f"{root}: {found[0]}{more}; give the new settings a row of another name ([methods.NAME] with name = "
            "METHOD), or another folder with --out"
        )


def differing(before: Recipe, now: Recipe) -> str:
    """The settings in which two single-run recipes differ, as "key=before, not now", those apart that change no figure.

    Returns:
        The empty text if there are none.
    """
    there, wanted = (flat(tomllib.loads(recipe.to_toml())) for recipe in (before, now))
    keys = [key for key in dict.fromkeys([*there, *wanted]) if key not in INDIFFERENT]
    return ", ".join(
        f"{key}={there.get(key, 'unset')}, not {wanted.get(key, 'unset')}"
        for key in keys
        if there.get(key) != wanted.get(key)
    )


def _cell(recipe: Recipe, job: Job) -> Recipe:
    """Recipe of one cell: its process computes alone, side by side with the others."""
    return recipe.method(job.method).with_run(seed=job.seed, workers=1)


def _begun(folder: Path) -> bool:
    """Whether a cell holds work: results, or a checkpoint to go on from."""
    return (folder / "summary.json").is_file() or any((folder / "checkpoint").glob("round-*"))


def refusals(recipe: Recipe, seed: int) -> dict[str, str]:
    """Rows that cannot be run with this recipe -> the reason; determined without training.

    A row that breaks instead of refusing (a mistake in a method's own code) is not among them: it breaks again where
    it is run, which is where the traceback is kept.

    Faulty data are a ValueError.
    """
    from confed.runs.run import load_data, prepare

    refused: dict[str, str] = {}
    load_data(recipe.with_run(seed=seed))
    for row in recipe.methods:
        try:
            prepare(recipe.method(row).with_run(seed=seed))
        except ValueError as error:
            refused[row] = str(error)
        except Exception:  # the other rows go on
            continue
    return refused


def borrow(root: Path, others: Sequence[Path]) -> list[str]:
    """Copies of finished cells of other grids that would be run here with the same settings.

    Another process that is working in the folder is a ValueError.

    Args:
        root: a folder made by :func:`open_grid`.
        others: other such folders.

    Returns:
        The cells that were copied, as "row/seed-n".
    """
    found: list[str] = []
    with exclusive(root):
        recipe, index = read_study(root)
        for job in (Job(**run) for run in index["runs"]):
            if (root / job.folder).exists():
                continue
            wanted = _cell(recipe, job)
            for other in (folder / job.folder for folder in others):
                if (other / "summary.json").is_file() and not differing(load_recipe(other / "recipe.toml"), wanted):
                    # Whole or not at all: a cell that has its summary counts as finished.
                    unfinished = (root / job.folder).with_name(f".{Path(job.folder).name}.part")
                    shutil.rmtree(unfinished, ignore_errors=True)
                    shutil.copytree(other, unfinished)
                    unfinished.replace(root / job.folder)
                    found.append(job.folder)
                    break
    return found


def run_grid(root: Path, workers: int, progress: Progress) -> Grid:
    """Execution of all cells of a grid that are missing or unfinished.

    Faulty data and another process in the folder are a ValueError. A KeyboardInterrupt is passed on after every cell
    under way has been stopped in good order.

    Args:
        root: a folder made by :func:`open_grid`.
        workers: cells at a time, each in a separate process.
        progress: called with the planned cells, and with every event of each.
    """
    with exclusive(root):
        recipe, index = read_study(root)
        everything = [Job(**run) for run in index["runs"]]
        for job in everything:  # none of its cells may be joined by others with another recipe
            check_same_recipe(RunFolder(root / job.folder), _cell(recipe, job))
        todo = [job for job in everything if not (root / job.folder / "summary.json").is_file()]
        outcome = Grid(root, tuned=index.get("tuned", {}))
        try:
            if todo:
                _run_missing(recipe, root, todo, workers, progress, len(everything) - len(todo), outcome)
        finally:
            refused = [cell for cell in outcome.errors if cell not in outcome.failed]
            index = {**index, "errors": outcome.errors, "refused": refused}
            write_atomically(root / "summary.json", json.dumps(index, indent=1, ensure_ascii=False).encode())
        for job in everything:
            if (root / job.folder / "summary.json").is_file():
                outcome.summaries.append(json.loads((root / job.folder / "summary.json").read_text(encoding="utf-8")))
    return outcome


def _run_missing(
    recipe: Recipe,
    root: Path,
    todo: Sequence[Job],
    workers: int,
    progress: Progress,
    there: int,
    outcome: Grid,
) -> None:
    from confed.runs.encode import load_run_data

    refused = refusals(recipe.with_rows(list(dict.fromkeys(job.method for job in todo))), todo[0].seed)
    outcome.errors |= {job.cell: refused[job.method] for job in todo if job.method in refused}
    if workers > 1:
        load_run_data.cache_clear()  # the processes read the data themselves
    jobs = [job for job in todo if job.method not in refused]
    progress(JobsPlanned([f"{recipe.label(job.method)}, seed {job.seed}" for job in jobs], there))

    def note(event: Event) -> None:
        if isinstance(event, JobEnded) and event.outcome != "done":
            job = jobs[event.job]
            outcome.errors[job.cell] = event.text
            if event.outcome == "failed":
                outcome.failed.add(job.cell)
            else:
                refused[job.method] = event.text
        progress(event)

    def wanted(number: int) -> bool:
        job = jobs[number]
        if job.method in refused:
            outcome.errors[job.cell] = refused[job.method]
        return job.method not in refused

    entries = [{"root": str(root), "method": job.method, "seed": job.seed, "folder": job.folder} for job in jobs]
    cells.carry_out("confed.studies.grid:run_cell", entries, workers, note, wanted)


def run_cell(job: Mapping[str, Any], progress: Progress) -> str:
    """Execution or continuation of one cell; returns its results in one line.

    A traceback of what goes wrong is left in its folder as ``error.txt``.

    Args:
        job: "root" (the grid's folder), "method", "seed" and "folder" (within the root).
        progress: called with every progress event.

    Raises:
        ValueError: the cell's folder leads out of the root.
    """
    from confed.runs.run import run
    from confed.studies.progress import headline

    root = Path(job["root"])
    folder = root / job["folder"]
    if folder.exists() and not _begun(folder):
        if not folder.resolve().is_relative_to(root.resolve()):
            raise ValueError(f"{folder} leads out of {root}, so nothing is deleted there")
        shutil.rmtree(folder)  # an attempt that came to nothing
    (folder / "error.txt").unlink(missing_ok=True)
    recipe = _cell(read_study(root)[0], Job(job["method"], job["seed"], job["folder"]))
    try:
        return headline(run(recipe, folder, resume=is_run(folder), progress=progress))
    except Exception:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):
            (folder / "error.txt").write_text(traceback.format_exc(), encoding="utf-8")
        raise

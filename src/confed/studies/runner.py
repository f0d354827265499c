"""Execution of studies: what is missing is run, one run after another or several side by side."""

import contextlib
import json
import shutil
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from confed.federation.checkpoint import remove_unfinished, write_atomically
from confed.recipes.recipe import Recipe, load_recipe
from confed.results.folder import RunFolder, kind_of
from confed.results.watching import ERROR, error_of
from confed.runs.encode import load_run_data
from confed.runs.run import load_data, prepare, run, run_locked
from confed.runs.same_recipe import check_same_recipe
from confed.studies import pool
from confed.studies.pool import headline
from confed.studies.study import Job, StudyFolder, begun, differing, read_study
from confed.system.events import Event, JobEnded, JobsPlanned, JobStarted, Note, Progress, ignore, of_job
from confed.system.folder_lock import Occupied, exclusive, without_lock


@dataclass
class Outcome:
    """Outcome of a study."""

    folder: Path
    summaries: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])  # of all finished runs
    errors: dict[str, str] = field(default_factory=dict[str, str])  # "row/seed-n" -> why it is not there
    failed: set[str] = field(default_factory=set[str])  # errors that broke on the way, and were not refused beforehand
    # row -> the tuned values it was run with
    tuned: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])


def run_study(root: Path, progress: Progress = ignore, workers: int = 1) -> Outcome:
    """Execution of all runs of a study folder that are missing or unfinished."""
    with exclusive(root):
        remove_unfinished(root, ".*.tmp")  # of the study's own files; every run sees to its own
        study = read_study(root)
        for job in study.jobs:  # none of its runs may be joined by others with another recipe
            check_same_recipe(RunFolder(root / job.folder), study.recipe_of(job))
        outcome = Outcome(root, tuned=study.index.get("tuned", {}))
        try:
            _run_missing(study, progress, workers if study.side_by_side else 1, outcome)
        finally:
            _write_errors(study, outcome)
        outcome.summaries += _summaries(study)
    return outcome


def gather(root: Path) -> Outcome:
    """Outcome of a study whose runs other processes make, as :func:`run_study` leaves it."""
    with exclusive(root):
        study = read_study(root)
        outcome = Outcome(root, tuned=study.index.get("tuned", {}))
        refused = study.index.get("refused", ())
        for job in study.jobs:
            check_same_recipe(RunFolder(root / job.folder), study.recipe_of(job))
            if study.finished(job):
                continue
            if job.cell in refused and job.cell in study.errors:
                outcome.errors[job.cell] = study.errors[job.cell]
            elif text := error_of(root / job.folder):
                outcome.errors[job.cell] = text
                outcome.failed.add(job.cell)
        _write_errors(study, outcome)
        outcome.summaries += _summaries(study)
    return outcome


def note_refusals(root: Path) -> dict[str, str]:
    """Cells of a study which cannot be run with its recipe -> the reason, written into its index."""
    with exclusive(root):
        study = read_study(root)
        todo = [job for job in study.jobs if not study.finished(job)]
        outcome = Outcome(root, errors={} if not todo else _refused_cells(study, todo))
        _write_errors(study, outcome)
    return outcome.errors


def _refused_cells(study: StudyFolder, todo: Sequence[Job]) -> dict[str, str]:
    rows = list(dict.fromkeys(job.method for job in todo))
    refused = refusals(study.recipe.with_rows(rows), todo[0].seed)
    return {job.cell: refused[job.method] for job in todo if job.method in refused}


def _write_errors(study: StudyFolder, outcome: Outcome) -> None:
    """Write what went wrong into the index of a study."""
    refused = [cell for cell in outcome.errors if cell not in outcome.failed]
    index = {**study.index, "side_by_side": study.side_by_side, "errors": outcome.errors, "refused": refused}
    write_atomically(study.root / "summary.json", json.dumps(index, indent=1, ensure_ascii=False).encode())


def _summaries(study: StudyFolder) -> list[dict[str, Any]]:
    """Summaries of the finished runs, with their rows' names in tables."""
    labels = study.labels
    return [
        {**_summary(study.root / job.folder), "label": labels[job.method]} for job in study.jobs if study.finished(job)
    ]


def _run_missing(study: StudyFolder, progress: Progress, workers: int, outcome: Outcome) -> None:
    todo = [job for job in study.jobs if not study.finished(job)]
    if todo:
        outcome.errors |= _refused_cells(study, todo)
    refused = {job.method: outcome.errors[job.cell] for job in todo if job.cell in outcome.errors}
    for row, why in refused.items():
        progress(Note(f"without {study.labels[row]}: {why}"))
    if workers > 1:
        load_run_data.cache_clear()  # the processes read the data themselves
    jobs = [job for job in todo if job.method not in refused]
    titles = [f"{study.labels[job.method]}, seed {job.seed}" for job in jobs]
    progress(JobsPlanned(titles, len(study.jobs) - len(todo)))

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

    entries = [{"root": str(study.root), **vars(job)} for job in jobs]
    pool.carry_out("confed.studies.runner:run_cell", entries, workers, note, wanted)


def refusals(recipe: Recipe, seed: int) -> dict[str, str]:
    """Rows that cannot be run with this recipe -> the reason; determined without training."""
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
    """Copies of finished runs of other studies that would be run here with the same settings."""
    borrowed: list[str] = []
    with exclusive(root):
        study = read_study(root)
        for job in study.jobs:
            if (root / job.folder).exists():
                continue
            wanted = study.recipe_of(job)
            for other in (folder / job.folder for folder in others):
                if (other / "summary.json").is_file() and not differing(load_recipe(other / "recipe.toml"), wanted):
                    # Whole or not at all: a run that has its summary counts as finished.
                    unfinished = (root / job.folder).with_name(f".{Path(job.folder).name}.part")
                    shutil.rmtree(unfinished, ignore_errors=True)
                    shutil.copytree(other, unfinished)
                    unfinished.replace(root / job.folder)
                    borrowed.append(job.folder)
                    break
    return borrowed


def run_cell(job: Mapping[str, Any], progress: Progress) -> str:
    """Execution or continuation of one run of a study; returns its results in one line."""
    return in_one_line(read_study(Path(job["root"])), Job(job["method"], job["seed"], job["folder"]), progress)


def in_one_line(study: StudyFolder, job: Job, progress: Progress, *, outlast: bool = False) -> str:
    """:func:`complete` with the results in one line; a run that another process makes is no fault of the recipe."""
    try:
        return headline(complete(study, job, progress, outlast=outlast))
    except Occupied as error:
        raise RuntimeError(str(error)) from error


def complete(
    study: StudyFolder,
    job: Job,
    progress: Progress = ignore,
    *,
    outlast: bool = False,
    stopping: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Execution or continuation of one run of a study, in this process; what goes wrong is left as ``error.txt``."""
    folder = study.root / job.folder
    if folder.exists() and not folder.resolve().is_relative_to(study.root.resolve()):
        raise ValueError(f"{folder} leads out of {study.root}, so nothing is deleted or written there")
    with exclusive(folder):
        if study.finished(job):
            return _summary(folder)
        resuming = goes_on(folder)
        try:
            recipe = study.recipe_of(job)
            if outlast and not recipe.run.checkpoint_every:  # what is stopped for a time limit must be able to go on
                recipe = recipe.with_run(checkpoint_every=1)
            return run_locked(recipe, folder, resume=resuming, progress=progress, stopping=stopping)
        except Exception as error:
            text = f"{type(error).__name__}: {' '.join(str(error).split())}\n\n{traceback.format_exc()}"
            leave_error(folder, text)
            raise


def goes_on(folder: Path) -> bool:
    """Whether a folder that this process has locked holds a run to go on with; else it is empty afterwards."""
    if not begun(folder):
        _empty(folder)  # an attempt that came to nothing
    (folder / ERROR).unlink(missing_ok=True)
    return kind_of(folder) == "run"


def leave_error(folder: Path, text: str) -> None:
    """Writes why a run could not be made into its folder, where :func:`error_of` and people find it."""
    with contextlib.suppress(OSError):
        (folder / ERROR).write_text(text, encoding="utf-8")


def _empty(folder: Path) -> None:
    """Removal of everything but the lock from a folder that this process has locked."""
    for path in without_lock(folder):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def run_single(recipe: Recipe, folder: Path, progress: Progress = ignore) -> dict[str, Any]:
    """Execution or continuation of a single-run recipe, with events as those of a study of one run."""

    def work(progress: Progress) -> dict[str, Any]:
        return run(recipe, folder, resume=kind_of(folder) == "run", progress=progress)

    return one_job(progress, f"{recipe.label(recipe.sections['algorithm']['name'])}, seed {recipe.run.seed}", work)


def one_job(progress: Progress, title: str, work: Callable[[Progress], dict[str, Any]]) -> dict[str, Any]:
    """Summary of a run that ``work`` makes, with events as those of a study of one run."""
    progress(JobsPlanned([title]))
    progress(JobStarted(0))
    summary = work(of_job(progress, 0))
    progress(JobEnded(0, 0, "done", headline(summary)))
    return summary


def resume(root: Path, progress: Progress = ignore) -> Sequence[Mapping[str, Any]]:
    """Continuation of a run or study folder; returns the summaries of its runs."""
    kind = kind_of(root)
    if kind == "study":
        return run_study(root, progress).summaries
    if kind == "run":
        done = (root / "summary.json").is_file()
        return [_summary(root) if done else run_single(load_recipe(root / "recipe.toml"), root, progress)]
    raise ValueError(f"{root} is neither a run folder (recipe.toml) nor a study folder (summary.json with runs)")


def _summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))

"""Runs of a study or sweep as cells of a cluster: the job script or Ray, what is there, and one cell of an array."""

import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import typer
from rich.markup import escape

from confed.cli.app import (
    INTERRUPTED,
    allowed_modules,
    answer,
    complain,
    console,
    handling,
    is_json,
    print_table,
    remark,
    say,
    showing,
    table_of,
)
from confed.cli.study import finish, show_gathered

if TYPE_CHECKING:
    from confed.studies.cells import BatchOptions

_RAY = {"run.engine": "run.engine=local", "run.address": 'run.address=""'}
"""Key -> override with which runs are made without Ray."""
LISTED = 30  # cells that are shown one by one


@dataclass(frozen=True)
class Cluster:
    """Where the runs of a study or sweep are made, as options say it; a fault is a ValueError."""

    on: str = ""
    slurm: list[str] | None = None
    submit: bool = False
    before: list[str] | None = None
    options: "BatchOptions" = field(init=False)

    def __post_init__(self) -> None:
        from confed.studies.cells import parse_options

        if self.on not in ("", "slurm", "script", "ray"):
            raise ValueError(f"--on must be slurm, script or ray, got {self.on!r}")
        if self.on in ("", "ray") and (self.slurm or self.submit or self.before):
            raise ValueError("--slurm, --submit and --before need --on slurm")
        if self.on == "script" and (self.slurm or self.submit):
            raise ValueError(
                "--slurm and --submit need --on slurm; other schedulers take their options with the script"
            )
        object.__setattr__(self, "options", parse_options(self.slurm or []))


# Runs on a cluster: a job script or Ray, and what is there ------------------------------------------------------


def with_address(on: str, recipe: str, overrides: list[str]) -> tuple[str, list[str]]:
    """Address of the Ray cluster in ``run.address``, and overrides by which one process computes each run."""
    from confed.recipes.recipe import load_recipe

    if on != "ray":
        return "", overrides
    rest = [text for text in overrides if text.partition("=")[0].strip() not in _RAY]
    return load_recipe(recipe, [*overrides, "run.engine=ray"]).run.address, [*rest, *_RAY.values()]


def carry_out(root: Path, cluster: Cluster, address: str, workers: int | None) -> None:
    """Executes what is missing of a study or sweep: on this machine, on Ray, or as a job script that is written."""
    if cluster.on == "ray":
        from confed.studies.cells import compute_on_ray

        with showing(root) as display:
            compute_on_ray(root, address, workers or 0, display, _refused)
        show_gathered(root)
    elif cluster.on:
        _distribute(root, cluster)
    else:
        finish(root, workers)


def _refused(cell: str, why: str) -> None:
    complain(f"{cell}: {why}", "without")


def _distribute(root: Path, cluster: Cluster) -> None:
    """Job script for the missing cells of a study or sweep, which are numbered; submitted if asked."""
    from confed.studies.cells import number_cells, ranges, script_of, statuses, submit, write_script

    cells = number_cells(root)
    for cell, why in cells.refused.items():
        _refused(cell, why)
    missing = [status.cell.number for status in statuses(root) if status.state != "done"]
    script, job = None, None
    if not missing:
        say(f"all {len(cells.cells)} cells are there; `confed compare {escape(str(root))}` shows them")
    else:
        text = script_of(root, missing, cluster.options, cluster.before or [], allowed_modules())
        script = write_script(root, text)
        job = submit(script) if cluster.submit else None
        if not is_json():
            _say_how(root, script, len(cells.cells), ranges(missing), cluster.on, job or "")
    script_name = script and str(script)
    answer({"folder": str(root), "cells": len(cells.cells), "missing": missing, "script": script_name, "job": job})


def _say_how(root: Path, script: Path, count: int, missing: str, on: str, job: str) -> None:
    """What was written, how to submit it, and how to see what is there."""
    which = f"all {count} cells" if missing == f"1-{count}" else f"cells {missing} of {count}"
    lines = [f"{script}: {which}"]
    if job:
        lines.append(f"submitted as job {job}")
    elif on == "slurm":
        lines.append(f"submit it with:   sbatch {script}")
    else:
        # PBS Pro and Grid Engine take one range; cells that are finished end at once.
        span = missing if "," not in missing else f"{missing.partition('-')[0].partition(',')[0]}-{count}"
        span = span if "-" in span else f"{span}-{span}"
        lines += [
            f"PBS:          qsub -J {span} -r y {script}",
            f'LSF:          bsub -J "{root.name}[{missing}]" -r -Q 75 < {script}',
            f"Grid Engine:  qsub -t {span} -r y {script}",
            f"Kubernetes:   an indexed Job of {count} completions with the command: confed resume {root} --cell array",
        ]
    lines.append(f"see what is there with:   confed compare {root}")
    for line in lines:
        console.print(escape(line), soft_wrap=True, highlight=False)


def show_cells(root: Path) -> None:
    """State of a study's or sweep's cells, and the tables and the report of those that are finished."""
    from confed.studies.cells import statuses

    cell_statuses = statuses(root)
    counts = Counter(status.state for status in cell_statuses)
    words = ", ".join(
        f"{counts[state]} {state}" for state in ("done", "running", "stopped", "failed", "waiting") if counts[state]
    )
    more = {"cells": [asdict(status) for status in cell_statuses]}
    if not counts["done"]:
        answer({"folder": str(root), **more})
    remark(f"{len(cell_statuses)} cells: {words}")
    listed = [status for status in cell_statuses if status.state in ("running", "stopped", "failed")]
    if listed:
        table = table_of("cell", "run", "state", "round", "where or why", right=("cell", "round"))
        for status in listed[:LISTED]:
            place = f"{status.round}/{status.rounds}"
            table.add_row(str(status.cell.number), escape(status.title), status.state, place, escape(status.text))
        print_table(table)
        if len(listed) > LISTED:
            remark(f"and {len(listed) - LISTED} more")
    if counts["done"]:
        show_gathered(root, **more)


# Cells: one run of a study, as an array task of a cluster computes it ---------------------------------------------

AGAIN = 75
"""Exit code of a cell that stopped before its end and goes on when it is started again (EX_TEMPFAIL of sysexits.h)."""


def compute_cell(study: Path, number: str, grace: float) -> None:
    """Execution or continuation of one run of a study or sweep: the cell of a number, or of this array task."""
    from confed.api.progress import Display
    from confed.federation.checkpoint import CorruptCheckpoint
    from confed.studies.cells import array_index, find_cell
    from confed.studies.runner import complete, one_job
    from confed.system.events import Progress

    if not grace >= 0:
        raise ValueError(f"--grace must be at least 0 seconds, got {grace}")
    if number != "array" and not number.isdecimal():
        raise ValueError(f'--cell must be the number of a cell, or "array" for that of this array task, got {number!r}')
    wanted = array_index(os.environ) if number == "array" else int(number)
    if wanted is None:
        raise ValueError(f"give the number of a cell: confed resume {study} --cell NUMBER (this is no array task)")
    study_folder, job, note = find_cell(study, wanted)
    if note:
        complain(note, "warning")
    folder = study_folder.root / job.folder
    if study_folder.finished(job):
        say(f"cell {wanted} is there already: {escape(str(folder))}")
        return
    before = _saved(folder)
    with _stopping(grace) as stop, Display(console, rounds=True) as display:

        def work(progress: Progress) -> dict[str, object]:
            return complete(study_folder, job, progress, outlast=True, stopping=stop.honoured)

        try:
            one_job(display, f"cell {wanted}, {study_folder.labels[job.method]}, seed {job.seed}", work)
            return
        except KeyboardInterrupt:
            pass
        except CorruptCheckpoint as error:
            raise ValueError(str(error)) from error
    _stopped(wanted, folder, before, stop.announced)


@dataclass
class _Stop:
    """Whether the scheduler has announced the end of the time limit."""

    announced: bool = False

    def honoured(self) -> bool:
        """Whether to stop now, between two rounds: what is saved then is not cut short by the end of the grace."""
        if self.announced:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return self.announced


@contextmanager
def _stopping(grace: float) -> Iterator[_Stop]:
    """SIGUSR1 as the wish to stop after the round under way, or ``grace`` seconds later; a second one: at once."""
    stop = _Stop()
    if not hasattr(signal, "SIGUSR1"):  # Windows, where no scheduler sends it
        yield stop
        return

    def announce(signum: int, frame: FrameType | None) -> None:
        if stop.announced or not grace:
            stop.announced = True
            raise KeyboardInterrupt
        stop.announced = True
        signal.setitimer(signal.ITIMER_REAL, grace)

    def over(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with handling({signal.SIGUSR1: announce, signal.SIGALRM: over}):
        try:
            yield stop
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


def _saved(folder: Path) -> int:
    """Round of the newest checkpoint; 0 without one."""
    from confed.federation.checkpoint import Checkpoints

    return max(Checkpoints(folder / "checkpoint").rounds(), default=0)


def _stopped(number: int, folder: Path, before: int, limit: bool) -> None:
    """What follows a stop: the task is queued again if it was the time limit, and some round was finished."""
    from confed.studies.cells import requeue
    from confed.studies.runner import leave_error

    now = _saved(folder)
    if not limit:
        say(f"[yellow]stopped[/] after round {now}; cell {number} goes on there when it is started again")
        raise typer.Exit(INTERRUPTED)
    if now <= before:
        why = (
            f"cell {number} could not finish one round, or the final evaluation, in its time, and would not in the "
            "same time again: give it a longer time limit (--slurm time=...)"
        )
        leave_error(folder, f"RuntimeError: {why}\n")
        raise RuntimeError(why)
    again = requeue()
    how = "is queued again" if again else "goes on there when it is started again"
    say(f"[yellow]stopped[/] after round {now} for the time limit; cell {number} {how}")
    raise typer.Exit(AGAIN)

"""Verb that computes one run of a study, as an array task of a cluster does: cell."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.markup import escape

from confed.cli.app import INTERRUPTED, app, complain, console, say

AGAIN = 75
"""Exit code of a cell that stopped before its end and goes on when it is started again (EX_TEMPFAIL of sysexits.h)."""


@app.command(rich_help_panel="Train")
def cell(
    study: Annotated[Path, typer.Argument(help="Folder of a study or sweep, written with --on.")],
    number: Annotated[
        int | None, typer.Argument(help="Of the cell, from 1. [default: of this array task]", show_default=False)
    ] = None,
    grace: Annotated[
        float, typer.Option(help="Seconds after SIGUSR1 within which the round under way may end.")
    ] = 90.0,
) -> None:
    """Compute or continue one run of a study, such as an array task of a cluster does.

    `confed compare --recipe RECIPE --on slurm` writes the study and a job script whose tasks call this. Exit codes: 0
    done, 75 stopped before the end (SIGUSR1) and to be started again, 143 asked to end (SIGTERM).
    """
    from confed.api.progress import Display
    from confed.federation.checkpoint import CorruptCheckpoint
    from confed.studies.cells import find_cell
    from confed.studies.cluster import array_index
    from confed.studies.pool import headline
    from confed.studies.runner import complete
    from confed.system.events import JobEnded, JobsPlanned, JobStarted, of_job

    if not grace >= 0:
        raise ValueError(f"--grace must be at least 0 seconds, got {grace}")
    wanted = array_index(os.environ) if number is None else number
    if wanted is None:
        raise ValueError(f"give the number of a cell: confed cell {study} NUMBER (this is no array task)")
    study_folder, job, note = find_cell(study, wanted)
    if note:
        complain(note, "warning")
    folder = study_folder.root / job.folder
    if study_folder.finished(job):
        say(f"cell {wanted} is there already: {escape(str(folder))}")
        return
    before = _saved(folder)
    with _stopping(grace) as stop, Display(console, rounds=True) as display:
        display(JobsPlanned([f"cell {wanted}, {study_folder.labels[job.method]}, seed {job.seed}"]))
        display(JobStarted(0))
        try:
            summary = complete(study_folder, job, of_job(display, 0), outlast=True, stopping=stop.honoured)
        except KeyboardInterrupt:
            summary = None
        except CorruptCheckpoint as error:
            raise ValueError(str(error)) from error
        else:
            display(JobEnded(0, 0, "done", headline(summary)))
    if summary is None:
        _stopped(wanted, folder, before, stop.asked)


@dataclass
class _Stop:
    """Whether the scheduler has announced the end of the time limit."""

    asked: bool = False

    def honoured(self) -> bool:
        """Whether to stop now, between two rounds: what is saved then is not cut short by the end of the grace."""
        if self.asked:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return self.asked


@contextmanager
def _stopping(grace: float) -> Iterator[_Stop]:
    """SIGUSR1 as the wish to stop after the round under way, or ``grace`` seconds later; a second one: at once."""
    stop = _Stop()
    if not hasattr(signal, "SIGUSR1"):  # Windows, where no scheduler sends it
        yield stop
        return

    def announced(signum: int, frame: FrameType | None) -> None:
        if stop.asked or not grace:
            stop.asked = True
            raise KeyboardInterrupt
        stop.asked = True
        signal.setitimer(signal.ITIMER_REAL, grace)

    def over(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, announced), signal.signal(signal.SIGALRM, over)
    try:
        yield stop
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGUSR1, before[0])
        signal.signal(signal.SIGALRM, before[1])


def _saved(folder: Path) -> int:
    """Round of the newest checkpoint; 0 without one."""
    from confed.federation.checkpoint import Checkpoints

    return max(Checkpoints(folder / "checkpoint").rounds(), default=0)


def _stopped(number: int, folder: Path, before: int, limit: bool) -> None:
    """What follows a stop: the task is queued again if it was the time limit, and some round was finished."""
    from confed.studies.cluster import requeue
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

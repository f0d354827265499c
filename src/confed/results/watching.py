"""State of runs under way, from what they write: rounds, losses, accuracy, speed, and who is at work."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from confed.results.folder import is_finished, kind_of, run_folders
from confed.results.history import evaluations, loss
from confed.results.runs import RunResults, load
from confed.results.summary import average, number
from confed.results.sweep import read_sweep
from confed.results.views import View
from confed.system.folder_lock import holder_of

State = Literal["waiting", "running", "stopped", "failed", "finished"]
"""Not begun; a process is at work; none is; an error was written down; there is a result."""

ERROR = "error.txt"  # in the folder of a run that went wrong: the error in one line, then the traceback


@dataclass(frozen=True)
class RunState:
    """How far a run is."""

    name: str  # of the run within its study or sweep
    state: State
    round: int = 0  # the last finished one
    rounds: int = 0  # of the recipe; 0 where the run has none yet
    loss: float | None = None  # mean training loss of the clients in that round
    metric: str = ""  # name of the task's metric; empty before the first evaluation
    # Mean of the metric over clients, a fraction: of a finished run the headline on test data, before on validation
    # data, of personal models where there are any.
    value: float | None = None
    seconds: float | None = None  # of the last round, with its evaluation
    left: float | None = None  # seconds until the last round, at the mean speed so far
    text: str = ""  # first line of an error; empty where there is none


def states_of(folder: Path) -> list[RunState]:
    """State of every run in a run, study or sweep folder, in the order in which they are made."""
    if not kind_of(folder):
        raise ValueError(f"{folder} is neither a run, a study nor a sweep (see `confed list runs`)")
    at_work = _held(folder)
    return [_state(name, place, at_work) for name, place in folders_of(folder)]


def folders_of(folder: Path, before: str = "") -> Iterator[tuple[str, Path]]:
    """Names and folders of all runs in a run, study or sweep folder, in the order in which they are made."""
    if kind_of(folder) == "sweep":
        for point in read_sweep(folder).points:
            if kind_of(folder / point.folder):
                yield from folders_of(folder / point.folder, f"{point.folder}/")
            else:
                yield point.folder, folder / point.folder
        return
    for place in run_folders(folder):
        yield before + (str(place.relative_to(folder)) if place != folder else folder.name), place


def error_of(folder: Path) -> str:
    """What went wrong in a run, in one line; empty if nothing did."""
    try:
        return (folder / ERROR).read_text(encoding="utf-8", errors="replace").partition("\n")[0]
    except OSError:
        return ""


def _held(folder: Path) -> bool:
    holder = holder_of(folder)
    return holder is not None and holder.alive


def _state(name: str, place: Path, at_work: bool) -> RunState:
    if (place / ERROR).is_file() and not is_finished(place):
        return RunState(name, "failed", text=error_of(place))
    if not (place / "recipe.toml").is_file():
        return RunState(name, "waiting")
    run = load(place).runs[0]
    rounds = int(run.recipe.get("run", {}).get("rounds", 0))
    reached = run.records.reached
    seconds = [
        (number(line.get("seconds")) or 0.0) + (number(line.get("evaluation_seconds")) or 0.0) for line in run.timings
    ]
    mean = average(seconds[1:] or seconds)  # the first round also warms caches
    losses = loss(run)
    state: State = "running" if at_work or _held(place) else "stopped"
    state = "finished" if is_finished(place) else state
    return RunState(
        name,
        state,
        reached,
        rounds,
        losses.get(max(losses)) if losses else None,
        *_value(run),
        seconds[-1] if seconds else None,
        None if mean is None or state == "finished" else mean * max(rounds - reached, 0),
    )


def _value(run: RunResults) -> tuple[str, float | None]:
    """Metric and its mean over clients; of a part of them it says of how many."""
    if run.complete:
        view = View.PERSONAL if run.summary.values(View.PERSONAL) else View.SEEN
        return run.summary.over_clients(run.summary.metric), run.summary.headline(view.mean)
    evaluated = run.records.evaluations
    silent = len(evaluated[-1].get("unanswered") or ()) if evaluated else 0
    for view in ("personal", "global"):
        curve_values = evaluations(run, view)
        if curve_values:
            values = curve_values[max(curve_values)]
            over = f", {len(values)} of {len(values) + silent} clients" if silent else ""
            return f"{run.summary.metric}{over}", average(list(values.values()))
    return "", None

"""Tracking of a folder, once or for as long as runs in it are under way."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from confed.tracking.backends import backend_of
from confed.tracking.records import Names, TrackedRun, tracked_runs


@dataclass(frozen=True)
class Tracked:
    """What was sent of one run."""

    project: str
    name: str  # of the run, after its group and a slash
    state: str
    round: int
    values: int  # number of values that were new to the tool
    where: str  # where the tool keeps the run


def track(
    folder: Path,
    to: str,
    *,
    at: str = "",
    names: Names | None = None,
    files: bool = True,
    follow: bool = False,
    every: float = 2.0,
) -> Iterator[Tracked]:
    """Runs of a folder sent to a tracking tool; what it has already is not sent again."""
    backend = backend_of(to)
    send = backend.load()
    seen: dict[str, TrackedRun] = {}
    while True:
        runs = tracked_runs(folder, names, files)
        for run in runs:
            current = run.whole if backend.whole_rounds else run
            if seen.get(run.id) != current:
                seen[run.id] = current
                try:
                    sent = send(current, at)
                except ImportError as error:
                    raise ValueError(f"{backend.package} is installed and cannot be imported: {error}") from error
                yield Tracked(run.project, run.title, run.state, max(run.rounds, default=0), sent.values, sent.where)
        if not follow or all(run.state != "running" for run in runs):
            return
        time.sleep(every)

"""Showing how a run or a study goes on: bars on a terminal, one line per round elsewhere."""

import json
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from confed.experiment import Progress, Watch
from confed.results.folder import is_study
from confed.study import Job, StudyWatch

__all__ = ["Display", "headline"]


class Display(StudyWatch):
    """Bars of the study and of its current run, and a line for every finished run; a context manager.

    Args:
        console: where to write; bars need a terminal, elsewhere every round is a line.
        folder: the run or study folder, to read finished runs' results from.
        quiet: only warnings.
    """

    def __init__(self, console: Console, folder: Path, quiet: bool = False) -> None:
        self._console, self._folder, self._quiet = console, folder, quiet
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[text]}"),
        )
        self._live = console.is_terminal and not quiet
        self._bars = Bars(*columns, console=console, disable=not self._live, transient=True)
        self._overall: TaskID | None = None
        self._current: TaskID | None = None

    def __enter__(self) -> "Display":
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def __call__(self, number: int, jobs: int, job: Job) -> Watch:
        """A watcher for job ``number`` of ``jobs``."""
        title = (f"[{number + 1}/{jobs}] " if jobs > 1 else "") + f"{job.method}, seed {job.seed}"
        # A run on its own is a job too, whose folder is not below itself.
        own = self._folder / job.folder
        file = (own if is_study(self._folder) else self._folder) / "summary.json"
        if self._live:
            if jobs > 1 and self._overall is None:
                self._overall = self._bars.add_task("all runs", total=jobs, text="")
            self._current = self._bars.add_task(escape(title), total=None, text="preparing data")
            if self._overall is not None:
                self._bars.update(self._overall, completed=number)
        else:
            self._line(f"{title}: preparing data")
        shown: set[tuple[int, str]] = set()

        def update(progress: Progress) -> None:
            text = progress.text
            if "left out" in text or "damaged" in text:
                self._console.print(f"[yellow]warning:[/] {escape(text)}", soft_wrap=True, highlight=False)
            elif text == "done":
                self._done(number, title, file)
            elif self._live and self._current is not None:
                self._bars.update(self._current, completed=progress.round, total=progress.rounds, text=escape(text))
            elif text.startswith(("loss", "evaluating")) and (progress.round, text) not in shown:
                shown.add((progress.round, text))
                self._line(f"{title}: round {progress.round}/{progress.rounds}, {text}")

        return update

    def _done(self, number: int, title: str, file: Path) -> None:
        if self._current is not None:
            self._bars.remove_task(self._current)
            self._current = None
        if self._overall is not None:
            self._bars.update(self._overall, completed=number + 1)
        self._line(f"{title}: {headline(json.loads(file.read_text(encoding='utf-8')))}")

    def _line(self, text: str) -> None:
        if not self._quiet:
            self._console.print(escape(text), soft_wrap=True, highlight=False)


def headline(summary: dict[str, Any]) -> str:
    """A run's results in one line."""
    names = {
        "personal_mean": "personal",
        "personal_worst": "worst client",
        "global_seen_mean": "global on seen",
        "global_unseen_mean": "on unseen",
    }
    values = [f"{text} {summary[key]:.1%}" for key, text in names.items() if summary.get(key) is not None]
    return ", ".join([*values, f"{summary['seconds']:.0f} s"])

"""Showing how a run, a study or a grid goes on: bars on a terminal, lines elsewhere."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.markup import escape as markup
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from confed.data.preparation import Show, shown
from confed.results.folder import is_study
from confed.runs.progress import Progress, Watch
from confed.studies.pool import Event, Listen
from confed.studies.progress import headline
from confed.studies.study import Job, StudyWatch
from confed.system.plain_text import visible

__all__ = ["Display", "GridDisplay", "escape"]


def escape(text: str) -> str:
    """Text of others as markup that a terminal shows and does not obey: titles, names of clients, what went wrong."""
    return markup(visible(text))


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
        self._open = ExitStack()

    def __enter__(self) -> "Display":
        self._open.enter_context(shown(_steps(self._bars, self._line)))
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()
        self._open.close()

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
            elif text.startswith("fine-tuning"):
                self._line(f"{title}: {text}")
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


class GridDisplay:
    """One bar for all jobs with the time that is left, and one per process; elsewhere a line per finished job.

    A context manager. Called with the jobs' titles and the number of jobs that are done already, it returns who is
    to be told of their events.

    Args:
        console: where to write; bars need a terminal.
        quiet: only warnings.
    """

    def __init__(self, console: Console, quiet: bool = False) -> None:
        self._console, self._quiet = console, quiet
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}"),
        )
        self._live = console.is_terminal and not quiet
        # Jobs take long: the speed that the remaining time is worked out from is that of the last hour.
        self._bars = Bars(
            *columns, console=console, disable=not self._live, transient=True, speed_estimate_period=3600.0
        )
        self._workers: dict[int, TaskID] = {}
        self._titles: Sequence[str] = ()
        self._done = self._there = 0
        self._began = time.monotonic()
        self._open = ExitStack()

    def __enter__(self) -> "GridDisplay":
        self._open.enter_context(shown(_steps(self._bars, self._line)))
        self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bars.stop()
        self._open.close()

    def __call__(self, titles: Sequence[str], there: int) -> Listen:
        """Begins with these jobs."""
        self._titles, self._there, self._began = titles, there, time.monotonic()
        if there:
            self._line(f"{there} of {there + len(titles)} are there already")
        overall = self._bars.add_task("all", total=there + len(titles), completed=there, text="")

        def listen(event: Event) -> None:
            if event.kind == "progress":
                self._progress(event)
            elif event.kind == "started":
                self._start(event)
            else:
                self._end(event)
                self._bars.update(overall, completed=self._there + self._done)

        return listen

    def _start(self, event: Event) -> None:
        if event.worker in self._workers:
            self._bars.remove_task(self._workers.pop(event.worker))
        title = escape(self._titles[event.job])
        self._workers[event.worker] = self._bars.add_task(title, total=None, text="preparing data")

    def _progress(self, event: Event) -> None:
        if "left out" in event.text or "damaged" in event.text:
            text = f"{self._titles[event.job]}: {event.text}"
            self._console.print(f"[yellow]warning:[/] {escape(text)}", soft_wrap=True, highlight=False)
        else:
            self._bars.update(
                self._workers[event.worker], completed=event.round, total=event.rounds, text=escape(event.text)
            )

    def _end(self, event: Event) -> None:
        self._done += 1
        left = len(self._titles) - self._done
        seconds = (time.monotonic() - self._began) / self._done * left
        place = f"[{self._there + self._done}/{self._there + len(self._titles)}] {self._titles[event.job]}"
        text = event.text if event.kind == "done" else f"{event.kind}: {event.text}"
        when = f" (about {seconds / 60:.0f} min left)" if seconds > 60 and not self._live else ""
        self._line(f"{place}: {text}{when}")

    def _line(self, text: str) -> None:
        if not self._quiet:
            self._console.print(escape(text), soft_wrap=True, highlight=False)


def _steps(bars: Bars, line: Callable[[str], None]) -> Show:
    """Shows steps of a dataset's preparation, each as a bar while it lasts; elsewhere as a line."""

    @contextmanager
    def show(what: str, total: int) -> Iterator[Callable[[int], None]]:
        if bars.disable:
            line(f"{what}: {total}")
        task = bars.add_task(escape(what), total=total, text="")
        try:
            yield lambda done: bars.update(task, completed=done)
        finally:
            bars.remove_task(task)

    return show

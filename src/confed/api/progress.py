"""Progress displays: bars on a terminal, lines otherwise."""

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from html import escape as escape_html
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape as markup
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Column

from confed.data.preparation import Show, shown
from confed.engines.workers import start_method
from confed.federation.checkpoint import CorruptCheckpoint
from confed.recipes.recipe import Recipe
from confed.results.folder import kind_of
from confed.system.events import (
    Caution,
    Event,
    JobEnded,
    JobProgress,
    JobsPlanned,
    JobStarted,
    Note,
    Progress,
    RunProgress,
    ignore,
)
from confed.system.plain_text import visible


def escape(text: str) -> str:
    """Markup that shows a text of others unchanged: titles, names of clients, errors."""
    return markup(visible(text))


class Display:
    """Progress callback for a series of jobs, such as the runs of a study; a context manager.

    A terminal has a bar for all jobs with the time that is left, and one for each job under way. Elsewhere every
    finished job is a line.

    Args:
        console: where to write.
        quiet: only warnings.
        rounds: without a terminal, print a line per round.
    """

    def __init__(self, console: Console, quiet: bool = False, rounds: bool = False) -> None:
        self._console, self._quiet = console, quiet
        # The text gives way on a narrow terminal, then the title; the bar and the times stay.
        columns = (
            TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", max_width=28)),
            BarColumn(bar_width=min(24, max(8, console.width // 8)), table_column=Column(min_width=8)),
            MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=5)),
            TimeElapsedColumn(table_column=Column(no_wrap=True, min_width=7)),
            TextColumn("left", table_column=Column(no_wrap=True, min_width=4)),
            TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=7)),
            TextColumn("{task.fields[text]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
        )
        self._live = console.is_terminal and not self._quiet
        self._rounds = rounds and not self._live
        # Jobs take long: the speed that the remaining time is worked out from is that of the last hour.
        self._bars = Bars(
            *columns, console=console, disable=not self._live, transient=True, speed_estimate_period=3600.0, expand=True
        )
        self._workers: dict[int, TaskID] = {}
        self._plan = JobsPlanned(())
        self._overall: TaskID | None = None
        self._done = 0
        self._began = time.monotonic()
        self._said: set[tuple[int, RunProgress]] = set()
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

    def __call__(self, event: Event) -> None:
        """Shows one event."""
        if isinstance(event, Caution):
            self._warn(event.text)
        elif isinstance(event, Note):
            self._line(event.text)
        elif isinstance(event, JobsPlanned):
            self._begin(event)
        elif isinstance(event, JobStarted):
            self._start(event)
        elif isinstance(event, JobProgress):
            self._progress(event)
        elif isinstance(event, JobEnded):
            self._end(event)

    @property
    def _total(self) -> int:
        return self._plan.finished + len(self._plan.titles)

    def _begin(self, event: JobsPlanned) -> None:
        self._plan, self._done, self._began = event, 0, time.monotonic()
        if event.finished:
            self._line(f"{event.finished} of {self._total} are there already")
        if self._total > 1:
            self._overall = self._bars.add_task("all", total=self._total, completed=event.finished, text="")

    def _start(self, event: JobStarted) -> None:
        title = self._plan.titles[event.job]
        if event.worker in self._workers:  # a job that began again, as its process was lost
            self._bars.remove_task(self._workers[event.worker])
        self._workers[event.worker] = self._bars.add_task(escape(title), total=None, text="preparing data")
        if self._rounds:
            self._line(f"{self._numbered(event.job)}: preparing data")

    def _numbered(self, job: int) -> str:
        """A job's title, with its number where there are several."""
        place = f"[{self._plan.finished + job + 1}/{self._total}] " if self._total > 1 else ""
        return place + self._plan.titles[job]

    def _progress(self, event: JobProgress) -> None:
        inner = event.event
        if isinstance(inner, Caution):
            text = f"{self._plan.titles[event.job]}: {inner.text}" if self._total > 1 else inner.text
            self._warn(text)
        elif isinstance(inner, RunProgress):
            self._bars.update(
                self._workers[event.worker], completed=inner.round + inner.share, total=inner.rounds,
                text=escape(inner.text),
            )  # fmt: skip
            if self._rounds and (event.job, inner) not in self._said:
                self._said.add((event.job, inner))
                self._round(self._numbered(event.job), inner)

    def _round(self, title: str, event: RunProgress) -> None:
        if event.stage == "fine-tuning":
            self._line(f"{title}: {event.text}")
        elif event.stage in ("training", "evaluating"):
            self._line(f"{title}: round {event.round}/{event.rounds}, {event.text}")

    def _end(self, event: JobEnded) -> None:
        self._done += 1
        self._bars.remove_task(self._workers.pop(event.worker))
        if self._overall is not None:
            self._bars.update(self._overall, completed=self._plan.finished + self._done)
        left = len(self._plan.titles) - self._done
        seconds = (time.monotonic() - self._began) / self._done * left
        text = event.text if event.outcome == "done" else f"{event.outcome}: {event.text}"
        when = f" (about {seconds / 60:.0f} min left)" if seconds > 60 and not self._live else ""
        if self._rounds:
            self._line(f"{self._numbered(event.job)}: {text}")
        else:
            place = f"[{self._plan.finished + self._done}/{self._total}] {self._plan.titles[event.job]}"
            self._line(f"{place}: {text}{when}")

    def _warn(self, text: str) -> None:
        self._console.print(f"[yellow]warning:[/] {escape(text)}", soft_wrap=True, highlight=False)

    def _line(self, text: str) -> None:
        if not self._quiet:
            self._console.print(escape(text), soft_wrap=True, highlight=False)


def _steps(bars: Bars, line: Callable[[str], None]) -> Show:
    """Shows steps of a dataset's preparation, each as a bar on a terminal, otherwise as a line."""

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


# Progress display in a notebook -------------------------------------------------------------------------------

_BAR = (
    '<div><progress max="{total}" value="{done}" style="width:16em;vertical-align:middle"></progress> '
    "{done}/{total} <b>{title}</b> {text}</div>"
)


class NotebookDisplay:
    """Progress callback that keeps one output of a notebook cell up to date; a context manager.

    It has a bar for each job under way, one for all where there are several, and a line for each finished job, warning
    and note.
    """

    def __init__(self) -> None:
        self._plan, self._done = JobsPlanned(()), 0
        self._bars: dict[object, dict[str, Any]] = {}
        self._lines: list[str] = []
        self._handle: Any = None
        self._drawn = 0.0
        self._open = ExitStack()

    def __enter__(self) -> "NotebookDisplay":
        from IPython.display import HTML, display

        self._handle = display(HTML(""), display_id=True)
        # tqdm, which transformers imports, asks for widgets that nothing here needs.
        self._open.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "IProgress not found")
        self._open.enter_context(shown(self._steps()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()
        self._bars.clear()
        self._show()

    def __call__(self, event: Event) -> None:
        """Shows one event."""
        if isinstance(event, Note):
            self._line(event.text)
        elif isinstance(event, Caution):
            self._line(f"warning: {event.text}")
        elif isinstance(event, JobsPlanned):
            self._plan, self._done = event, 0
            if event.finished:
                self._line(f"{event.finished} of {self._total} are there already")
        elif isinstance(event, JobStarted):
            self._bars[event.worker] = self._bar(self._plan.titles[event.job], 1, 0, "preparing data")
        elif isinstance(event, JobProgress):
            self._progress(event)
        elif isinstance(event, JobEnded):
            self._done += 1
            self._bars.pop(event.worker, None)
            outcome = "" if event.outcome == "done" else f"{event.outcome}: "
            self._line(f"{self._plan.titles[event.job]}: {outcome}{event.text}")
        self._show()

    @property
    def _total(self) -> int:
        return self._plan.finished + len(self._plan.titles)

    def _progress(self, event: JobProgress) -> None:
        inner, title = event.event, self._plan.titles[event.job]
        if isinstance(inner, Caution):
            self._line(f"warning: {title}: {inner.text}")
        elif isinstance(inner, RunProgress):
            self._bars[event.worker] = self._bar(title, inner.rounds, inner.round, inner.text)

    def _bar(self, title: str, total: int, done: int, text: str) -> dict[str, Any]:
        return {"title": title, "total": total, "done": done, "text": text}

    def _line(self, text: str) -> None:
        self._lines.append(text)

    def _show(self) -> None:
        """The output as it is now, drawn again."""
        from IPython.display import HTML

        self._drawn = monotonic()
        bars = list(self._bars.values())
        if self._total > 1 and bars:
            bars.insert(0, self._bar("all", self._total, self._plan.finished + self._done, ""))
        drawn = "".join(
            _BAR.format(total=bar["total"], done=bar["done"], title=_html(bar["title"]), text=_html(bar["text"]))
            for bar in bars
        )
        lines = "".join(f"<div>{_html(line)}</div>" for line in self._lines)
        if self._handle is not None:
            self._handle.update(HTML(lines + drawn))

    def _steps(self) -> Show:
        """Shows steps of a dataset's preparation, each as a bar."""

        @contextmanager
        def show(what: str, total: int) -> Iterator[Callable[[int], None]]:
            key = object()

            def update(done: int) -> None:
                self._bars[key] = self._bar(what, total, done, "")
                if monotonic() - self._drawn > 0.2:
                    self._show()

            self._drawn = 0.0
            update(0)
            try:
                yield update
            finally:
                self._bars.pop(key, None)
                self._show()

        return show


def _html(text: str) -> str:
    """HTML that shows a text of others unchanged."""
    return escape_html(visible(text))


# Progress callbacks of the Python interface -------------------------------------------------------------------

Shown = bool | Progress  # whether progress is shown, or a callback that is called with every progress event


@contextmanager
def display(wanted: Shown) -> Iterator[Progress]:
    """Progress callback within the ``with`` block: bars in a notebook or on a terminal, lines elsewhere.

    Args:
        wanted: True for these, False for none, or a callback of the caller's.
    """
    if not isinstance(wanted, bool):
        yield wanted
        return
    if not wanted:
        yield ignore
        return
    from rich.console import Console

    console = Console(stderr=True)
    with NotebookDisplay() if console.is_jupyter else Display(console, rounds=True) as shown:
        yield shown


@contextmanager
def threads_kept() -> Iterator[None]:
    """The caller's number of threads is the same after the ``with`` block; runs set their own."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def interruptible(folder: Path, again: str) -> Iterator[None]:
    """Interruptions within the ``with`` block say how to go on.

    Args:
        folder: of the run or study.
        again: Python expression that goes on.

    Raises:
        KeyboardInterrupt: Ctrl-C, or the button of a notebook.
        ValueError: a damaged checkpoint.
    """
    try:
        yield
    except KeyboardInterrupt:
        if not kind_of(folder):
            raise KeyboardInterrupt("stopped before anything was saved") from None
        raise KeyboardInterrupt(
            f"stopped; everything up to the last finished round is saved. Go on with {again}"
        ) from None
    except CorruptCheckpoint as error:
        raise ValueError(str(error)) from error


def in_this_session(recipe: Recipe, progress: Progress) -> Recipe:
    """A recipe as this session can run it, with a note where it names objects that no file can hold.

    Worker processes that are spawned do not have such objects, so that this process computes all clients then.

    Args:
        recipe: what is to be run.
        progress: called with the note.

    Raises:
        ValueError: such objects on a Ray cluster.
    """
    if not recipe.session_only:
        return recipe
    names = ", ".join(recipe.session_only)
    if recipe.run.engine == "ray":
        raise ValueError(f"run.engine must be 'local' with objects of this session ({names}), which nodes do not have")
    progress(
        Note(
            f"recipe.toml cannot hold {names}: the run goes on, and its models can be used, in a Python session that "
            "has made the same objects"
        )
    )
    return recipe.with_run(workers=1) if start_method(recipe.run.start_method) == "spawn" else recipe

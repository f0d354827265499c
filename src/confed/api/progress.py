"""Progress displays: bars on a terminal or in a notebook, lines otherwise, and a table of a federation's sites."""

import errno
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from html import escape as escape_html
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from rich.markup import escape as markup
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Column, Table

from confed.data.preparation import shown
from confed.engines.workers import start_method
from confed.federation.checkpoint import CorruptCheckpoint
from confed.recipes.recipe import Recipe
from confed.results.folder import kind_of
from confed.system import format as formats
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
    SiteStates,
    SiteStatus,
    ignore,
)
from confed.system.plain_text import visible


def escape(text: str) -> str:
    """Markup that shows a text of others unchanged: titles, names of clients, errors."""
    return markup(visible(text))


class _Jobs(ABC):
    """What displays of a series of jobs have in common: titles, counts, and which text an event is."""

    def __init__(self) -> None:
        self._plan, self._done = JobsPlanned(()), 0
        self._open = ExitStack()

    def __call__(self, event: Event) -> None:
        """Shows one event."""
        if isinstance(event, Caution):
            self._warn(event.text)
        elif isinstance(event, Note):
            self._line(event.text)
        elif isinstance(event, JobsPlanned):
            self._plan, self._done = event, 0
            if event.finished:
                self._line(f"{event.finished} of {self._total} are there already")
            self._begin()
        elif isinstance(event, JobStarted):
            self._start(event, self._plan.titles[event.job])
        elif isinstance(event, JobProgress) and isinstance(event.event, Caution):
            self._warn(self._about(self._plan.titles[event.job], event.event.text))
        elif isinstance(event, JobProgress) and isinstance(event.event, RunProgress):
            self._progress(event, self._plan.titles[event.job], event.event)
        elif isinstance(event, JobEnded):
            self._done += 1
            outcome = "" if event.outcome == "done" else f"{event.outcome}: "
            self._end(event, self._plan.titles[event.job], outcome + event.text)

    @property
    def _total(self) -> int:
        return self._plan.finished + len(self._plan.titles)

    def _about(self, title: str, text: str) -> str:
        """A text about one job."""
        return f"{title}: {text}"

    @abstractmethod
    def _line(self, text: str) -> None:
        """A line above what is under way."""

    def _warn(self, text: str) -> None:
        self._line(f"warning: {text}")

    def _begin(self) -> None:  # noqa: B027 - not every display has something to begin
        """All jobs begin."""

    @abstractmethod
    def _start(self, event: JobStarted, title: str) -> None:
        """A job begins."""

    @abstractmethod
    def _progress(self, event: JobProgress, title: str, run: RunProgress) -> None:
        """A job goes on."""

    @abstractmethod
    def _end(self, event: JobEnded, title: str, text: str) -> None:
        """A job has ended."""


class Display(_Jobs):
    """Progress callback for a series of jobs, such as the runs of a study; a context manager.

    A terminal has a bar for all jobs with the time that is left, and one for each job under way. Elsewhere every
    finished job is a line, and with ``rounds`` every round. ``quiet`` leaves warnings only.
    """

    def __init__(self, console: Console, quiet: bool = False, rounds: bool = False) -> None:
        super().__init__()
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
        self._overall: TaskID | None = None
        self._began = time.monotonic()
        self._printed: set[tuple[int, RunProgress]] = set()

    def __enter__(self) -> "Display":
        self._open.enter_context(shown(self._step))
        self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bars.stop()
        self._open.close()

    def _begin(self) -> None:
        self._began = time.monotonic()
        if self._total > 1:
            self._overall = self._bars.add_task("all", total=self._total, completed=self._plan.finished, text="")

    def _start(self, event: JobStarted, title: str) -> None:
        if event.worker in self._workers:  # a job that began again, as its process was lost
            self._bars.remove_task(self._workers[event.worker])
        self._workers[event.worker] = self._bars.add_task(escape(title), total=None, text="preparing data")
        if self._rounds:
            self._line(f"{self._numbered(event.job)}: preparing data")

    def _numbered(self, job: int) -> str:
        """A job's title, with its number where there are several."""
        place = f"[{self._plan.finished + job + 1}/{self._total}] " if self._total > 1 else ""
        return place + self._plan.titles[job]

    def _about(self, title: str, text: str) -> str:
        return f"{title}: {text}" if self._total > 1 else text

    def _progress(self, event: JobProgress, title: str, run: RunProgress) -> None:
        self._bars.update(
            self._workers[event.worker], completed=run.round + run.share, total=run.rounds, text=escape(run.text)
        )
        if not self._rounds or (event.job, run) in self._printed:
            return
        self._printed.add((event.job, run))
        if run.stage == "fine-tuning":
            self._line(f"{self._numbered(event.job)}: {run.text}")
        elif run.stage in ("training", "evaluating"):
            self._line(f"{self._numbered(event.job)}: round {run.round}/{run.rounds}, {run.text}")

    def _end(self, event: JobEnded, title: str, text: str) -> None:
        self._bars.remove_task(self._workers.pop(event.worker))
        if self._overall is not None:
            self._bars.update(self._overall, completed=self._plan.finished + self._done)
        if self._rounds:
            self._line(f"{self._numbered(event.job)}: {text}")
            return
        seconds = (time.monotonic() - self._began) / self._done * (len(self._plan.titles) - self._done)
        when = f" (about {seconds / 60:.0f} min left)" if seconds > 60 and not self._live else ""
        self._line(f"[{self._plan.finished + self._done}/{self._total}] {title}: {text}{when}")

    def _warn(self, text: str) -> None:
        _print_warning(self._console, text)

    def _line(self, text: str) -> None:
        if not self._quiet:
            self._console.print(escape(text), soft_wrap=True, highlight=False)

    @contextmanager
    def _step(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        """A step of a dataset's preparation: a bar on a terminal, otherwise a line."""
        if self._bars.disable:
            self._line(f"{what}: {total}")
        task = self._bars.add_task(escape(what), total=total, text="")
        try:
            yield lambda done: self._bars.update(task, completed=done)
        finally:
            self._bars.remove_task(task)


def _print_warning(console: Console, text: str) -> None:
    console.print(f"[yellow]warning:[/] {escape(text)}", soft_wrap=True, highlight=False)


_BAR = (
    '<div><progress max="{total}" value="{done}" style="width:16em;vertical-align:middle"></progress> '
    "{done}/{total} <b>{title}</b> {text}</div>"
)


class NotebookDisplay(_Jobs):
    """Progress callback that keeps one output of a notebook cell up to date; a context manager.

    It has a bar for each job under way, one for all where there are several, and a line for each finished job, warning
    and note.
    """

    def __init__(self) -> None:
        super().__init__()
        self._bars: dict[object, str] = {}
        self._lines: list[str] = []
        self._handle: Any = None
        self._drawn = 0.0

    def __enter__(self) -> "NotebookDisplay":
        from IPython.display import HTML, display

        self._handle = display(HTML(""), display_id=True)
        # tqdm, which transformers imports, asks for widgets that nothing here needs.
        self._open.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "IProgress not found")
        self._open.enter_context(shown(self._step))
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()
        self._bars.clear()
        self._show()

    def __call__(self, event: Event) -> None:
        """Shows one event."""
        super().__call__(event)
        self._show()

    def _start(self, event: JobStarted, title: str) -> None:
        self._bars[event.worker] = self._bar(title, 1, 0, "preparing data")

    def _progress(self, event: JobProgress, title: str, run: RunProgress) -> None:
        self._bars[event.worker] = self._bar(title, run.rounds, run.round, run.text)

    def _end(self, event: JobEnded, title: str, text: str) -> None:
        self._bars.pop(event.worker, None)
        self._line(f"{title}: {text}")

    def _bar(self, title: str, total: int, done: int, text: str) -> str:
        return _BAR.format(total=total, done=done, title=_html(title), text=_html(text))

    def _line(self, text: str) -> None:
        self._lines.append(text)

    def _show(self) -> None:
        """The output as it is now, drawn again."""
        from IPython.display import HTML

        self._drawn = monotonic()
        bars = list(self._bars.values())
        if self._total > 1 and bars:
            bars.insert(0, self._bar("all", self._total, self._plan.finished + self._done, ""))
        lines = [f"<div>{_html(line)}</div>" for line in self._lines]
        if self._handle is not None:
            self._handle.update(HTML("".join([*lines, *bars])))

    @contextmanager
    def _step(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        """A step of a dataset's preparation, as a bar."""
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


def _html(text: str) -> str:
    """HTML that shows a text of others unchanged."""
    return escape_html(visible(text))


class StatusPage:
    """Connected sites of a server, the round, what each is doing, and bytes: a table on a terminal, otherwise lines."""

    def __init__(self, console: Console, folder: Path, quiet: bool = False) -> None:
        self._console, self._folder, self._quiet = console, folder, quiet
        self._live: Live | None = None
        if console.is_terminal and not quiet:
            self._live = Live(console=console, auto_refresh=False, transient=True)
        self._printed: dict[str, tuple[str, str]] = {}
        self._text, self._shown = "", 0.0

    def __enter__(self) -> "StatusPage":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, event: Event) -> None:
        """Shows one event."""
        if isinstance(event, SiteStates):
            self._show_sites(event.sites)
        elif isinstance(event, Caution):
            _print_warning(self._console, event.text)
        elif isinstance(event, Note):
            self.line(event.text)
        elif isinstance(event, RunProgress):
            self._text = f"round {event.round}/{event.rounds}: {event.text}"
            if self._live is None:
                self.line(self._text)

    def _show_sites(self, sites: Mapping[str, SiteStatus]) -> None:
        """Shows the sites' states; on a terminal at most five times a second."""
        for name, site in sites.items():
            connection = "away" if site.state == "away" else "connected"
            if self._printed.get(name, ("away", "")) != (connection, site.note):
                self._printed[name] = connection, site.note
                self.line(f"site {name}: {connection}" + (f" ({site.note})" if site.note else ""))
        if self._live is not None and monotonic() - self._shown > 0.2:
            self._shown = monotonic()
            self._live.update(self._table(sites), refresh=True)

    def line(self, text: str) -> None:
        """One line."""
        if not self._quiet:
            self._console.print(escape(text), soft_wrap=True, highlight=False)

    def _table(self, sites: Mapping[str, SiteStatus]) -> Table:
        columns = ("site", "doing", "sent to it", "came from it", "last trouble")
        table = Table(*columns, title=escape(f"{self._folder}  {self._text}"), title_justify="left")
        for name, site in sorted(sites.items()):
            texts = (name, site.state, formats.size(site.down), formats.size(site.up), site.note[:80])
            table.add_row(*map(escape, texts))
        return table


Shown = bool | Progress  # whether progress is shown, or a callback that is called with every progress event


@contextmanager
def display(wanted: Shown) -> Iterator[Progress]:
    """Progress callback of a call: the caller's own, or bars in a notebook or on a terminal, lines elsewhere."""
    if not isinstance(wanted, bool):
        yield wanted
        return
    if not wanted:
        yield ignore
        return
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
    """Interruptions of work in a folder, and a full disk, say what goes on; a damaged checkpoint is a ValueError."""
    try:
        yield
    except KeyboardInterrupt:
        text = f"stopped; everything up to the last finished round is saved. Go on with {again}"
        raise KeyboardInterrupt(text if kind_of(folder) else "stopped before anything was saved") from None
    except CorruptCheckpoint as error:
        raise ValueError(str(error)) from error
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise RuntimeError(
            f"no space left on the device while writing to {folder}. The last checkpoint is whole; make room and go on "
            f"with: {again}"
        ) from error


@contextmanager
def showing(folder: Path, progress: Shown, kind: str) -> Iterator[Progress]:
    """Progress callback of a call that works in the folder of a run or study, which :func:`interruptible` guards."""
    again = f"confed.load_{kind}({str(folder)!r}).resume()"
    with display(progress) as shown, threads_kept(), interruptible(folder, again):
        yield shown


def in_this_session(recipe: Recipe, progress: Progress) -> Recipe:
    """A recipe as this session can run it, with a note where it names objects that no file can hold."""
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

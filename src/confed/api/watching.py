"""Progress callbacks of the Python interface, and what a run changes in the calling process."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from html import escape
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any

import torch

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
    return escape(visible(text))


# Progress callbacks of the Python interface -------------------------------------------------------------------

Shown = bool | Progress
"""Whether progress is shown, or a callback that is called with every progress event."""


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

    from confed.api.progress import Display

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

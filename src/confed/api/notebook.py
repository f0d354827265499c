"""Progress display in a notebook."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from html import escape
from time import monotonic
from types import TracebackType
from typing import Any

from confed.data.preparation import Show, shown
from confed.system.events import Caution, Event, JobEnded, JobProgress, JobsPlanned, JobStarted, Note, RunProgress
from confed.system.plain_text import visible

__all__ = ["NotebookDisplay"]

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

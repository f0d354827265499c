"""Progress of long steps in a dataset's preparation."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

Show = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Given what a step does and how many things there are, a context in which to tell how many are done."""


def _unseen(what: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
    del what, total
    return nullcontext(lambda done: None)


_show: ContextVar[Show] = ContextVar("show", default=_unseen)


def step(what: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
    """A context that gives a function to be told how many of ``total`` things are done."""
    return _show.get()(what, total)


@contextmanager
def shown(show: Show) -> Iterator[None]:
    """Context in which ``show`` receives the progress of steps in this thread."""
    before = _show.set(show)
    try:
        yield
    finally:
        _show.reset(before)

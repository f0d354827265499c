"""Progress callbacks of the Python interface, and what a run changes in the calling process."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from confed.engines.workers import start_method
from confed.federation.checkpoint import CorruptCheckpoint
from confed.recipes.recipe import Recipe
from confed.results.folder import kind_of
from confed.system.events import Note, Progress, ignore

__all__ = ["Shown", "display", "in_this_session", "interruptible", "threads_kept"]

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

    from confed.api.notebook import NotebookDisplay
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

"""Progress in a notebook: one output, kept up to date."""

import sys
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from command_line import Patch
from confed.api.progress import Display, NotebookDisplay, display
from confed.data.preparation import step
from confed.system.events import Caution, JobEnded, JobProgress, JobsPlanned, JobStarted, Note, RunProgress, ignore


@pytest.fixture
def outputs(monkeypatch: Patch) -> list[str]:
    """What an output of a cell shows, one after the other."""
    shown: list[str] = []
    module: Any = ModuleType("IPython.display")

    class Handle:
        def update(self, html: str) -> None:
            shown.append(html)

    module.HTML = str
    module.display = lambda html, display_id: Handle()
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return shown


def test_bars_come_and_go_and_lines_stay(outputs: list[str]) -> None:
    with NotebookDisplay() as told:
        told(JobsPlanned(["A <b>", "B"], 1))
        told(JobStarted(0, 0))
        told(JobProgress(0, 0, RunProgress(1, 2, "training", "loss 1.5")))
        assert "A &lt;b&gt;</b> loss 1.5" in outputs[-1]
        assert 'max="2" value="1"' in outputs[-1]
        assert 'max="3" value="1"' in outputs[-1]  # all of them
        told(JobProgress(0, 0, Caution("client 'a' left out")))
        with step("reading <pictures>", 10) as done:
            assert "reading &lt;pictures&gt;" in outputs[-1]
            done(10)
        assert "reading" not in outputs[-1]
        told(JobEnded(0, 0, "done", "personal 50.0%"))
        told(JobStarted(1, 0))
        told(JobEnded(1, 0, "failed", "broke"))
        told(Note("a note"))
    last = outputs[-1]
    assert "<progress" not in last
    assert all(
        line in last
        for line in (
            "1 of 3 are there already",
            "personal 50.0%",
            "B: failed: broke",
            "a note",
            "warning: A &lt;b&gt;:",
        )
    )


def test_the_display_fits_the_place(outputs: list[str], monkeypatch: Patch) -> None:
    del outputs
    with display(False) as shown:
        assert shown is ignore
    with display(print) as shown:
        assert shown is print
    with display(True) as shown:
        assert isinstance(shown, Display)
    monkeypatch.setattr(Console, "is_jupyter", property(lambda self: True, lambda self, value: None), raising=False)
    with display(True) as shown:
        assert isinstance(shown, NotebookDisplay)

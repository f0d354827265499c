"""What runs say on terminals and in notebooks."""

import io
import json
import re
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from command_line import Patch
from confed.api.progress import Display, NotebookDisplay, display
from confed.data.preparation import step
from confed.recipes.recipe import load_recipe
from confed.runs.run import run
from confed.system.events import Caution, JobEnded, JobProgress, JobsPlanned, JobStarted, Note, RunProgress, ignore
from tiny_runs import TINY


def test_a_display_has_a_line_per_process_or_per_job() -> None:
    told = [
        JobsPlanned(["A, seed 0", "B, seed 0", "A, seed 1"], 4),
        JobStarted(0, 0),
        JobStarted(1, 1),
        JobProgress(0, 0, RunProgress(1, 2, "training", "loss 1.5")),
        JobProgress(1, 1, Caution("client 'a' left out of round 1")),
        JobEnded(0, 0, "done", "personal 50.0%"),
        JobStarted(2, 0),
        JobEnded(1, 1, "failed", "broke"),
        JobEnded(2, 0, "refused", "cannot"),
    ]
    for terminal in (False, True):
        shown = Console(file=io.StringIO(), force_terminal=terminal, width=100)
        with Display(shown) as display:
            for event in told:
                display(event)
        text = shown.file.getvalue()  # type: ignore[attr-defined]
        lines = ["4 of 7 are there already", "[5/7] A, seed 0: personal 50.0%", "[6/7] B, seed 0: failed: broke",
                 "[7/7] A, seed 1: refused: cannot", "B, seed 0: client 'a' left out"]  # fmt: skip
        plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
        assert all(line in plain for line in lines)
        assert ("left" in plain.replace("left out", "")) == terminal  # the time that is left


@pytest.mark.parametrize("width", [60, 80])
def test_bar_and_times_stay_on_a_narrow_terminal(width: int) -> None:
    shown = Console(file=io.StringIO(), force_terminal=True, width=width)
    with Display(shown) as display:
        display(JobsPlanned(["A method with a long name, seed 0"]))
        display(JobStarted(0, 0))
        display(JobProgress(0, 0, RunProgress(1, 4, "evaluating", "evaluating on test data of many clients " * 3)))
        display._bars.refresh()
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.file.getvalue())  # type: ignore[attr-defined]
    (line, *_) = [line for line in re.split(r"[\r\n]", lines) if "1/4" in line]
    assert "━" * 4 in line
    assert re.search(r"0:00:00 left \S", line)
    assert len(line) <= width


def test_progress_within_the_first_round_tells_the_time_left() -> None:
    shown = Console(file=io.StringIO(), force_terminal=True, width=120)
    with Display(shown) as display:
        display(JobsPlanned(["A"]))
        display(JobStarted(0, 0))
        for replies in (1, 2, 3):
            event = RunProgress(0, 2, "answering", f"round 1: {replies} of 4 clients", replies / 4)
            display(JobProgress(0, 0, event))
            time.sleep(0.02)
        (bar,) = display._bars.tasks
        assert bar.completed == 0.75
        assert bar.time_remaining is not None
    assert "round 1: 3 of 4 clients" in shown.file.getvalue()  # type: ignore[attr-defined]


def test_a_run_reports_every_clients_reply(tmp_path: Path) -> None:
    told: list[RunProgress] = []
    options = {**TINY, "run.rounds": 2, "algorithm.name": "fedavg", "study.methods": []}
    recipe = load_recipe("fedvqa_scenes", [f"{key}={json.dumps(value)}" for key, value in options.items()])
    run(recipe, tmp_path / "run", progress=lambda event: told.append(event) if isinstance(event, RunProgress) else None)
    within = [event for event in told if event.stage == "answering"]
    assert {event.round for event in within} == {0, 1}
    assert all(0 < event.share < 1 and "clients" in event.text for event in within)


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

"""Progress displays of a series of jobs."""

import io
import json
import re
import time
from pathlib import Path

import pytest
from rich.console import Console

from confed.api.progress import Display
from confed.recipes.recipe import load_recipe
from confed.runs.run import run
from confed.system.events import Caution, JobEnded, JobProgress, JobsPlanned, JobStarted, RunProgress
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

"""Progress displays of a series of jobs."""

import io
import re

from rich.console import Console

from confed.api.progress import Display
from confed.system.events import Caution, JobEnded, JobProgress, JobsPlanned, JobStarted, RunProgress


def test_the_display_has_a_line_per_process_on_a_terminal_and_per_job_elsewhere() -> None:
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

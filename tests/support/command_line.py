"""The command in this process, its exit code, and what is refused."""

import os
import sys
import warnings
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from children import forked

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # typer's, about a newer click
    from confed.cli import main

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


def confed(*arguments: object) -> int:
    """Exit code of a command."""
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    assert isinstance(stop.value.code, int)
    return stop.value.code


def started_command(log: Path, *arguments: object) -> int:
    """Process number of a child that runs a command in a session of its own; its standard error goes to a file."""

    def work() -> None:
        os.setsid()
        sys.stderr = log.open("w", buffering=1, encoding="utf-8")
        os.dup2(sys.stderr.fileno(), 2)
        os._exit(confed(*arguments))

    return forked(work)


def refusal(capture: Capture, *arguments: object) -> str:
    """What a command with bad input says on standard error, on one line."""
    assert confed(*arguments) == 2
    return " ".join(capture.readouterr().err.split())


def refused(message: str) -> AbstractContextManager[object]:
    """That what is done within the ``with`` block is a ValueError with this message, a pattern."""
    return pytest.raises(ValueError, match=message)

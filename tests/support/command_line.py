"""The command in this process, its exit code, and what is refused."""

import warnings
from contextlib import AbstractContextManager

import pytest

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


def refusal(capture: Capture, *arguments: object) -> str:
    """What a command with bad input says on standard error, on one line."""
    assert confed(*arguments) == 2
    return " ".join(capture.readouterr().err.split())


def refused(message: str) -> AbstractContextManager[object]:
    """That what is done within the ``with`` block is a ValueError with this message, a pattern."""
    return pytest.raises(ValueError, match=message)

"""The command ``confed`` within a test's process."""

import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # typer's, about a newer click
    from confed.cli import main


def command(*words: object) -> int:
    """The status with which the command ends."""
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    code = stop.value.code
    assert code is None or isinstance(code, int)
    return code or 0

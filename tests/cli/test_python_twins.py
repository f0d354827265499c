"""Commands and the calls of Python that do the same: every option has its argument, or says why not."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

import confed
from confed.api.check import check_file
from confed.api.run import Trackable
from confed.cli.app import command_line

TWINS: dict[str, tuple[Callable[..., Any], ...]] = {
    "run": (confed.run, confed.study),
    "resume": (confed.Run.resume, confed.Study.resume),
    "report": (confed.Run.report, confed.Study.report),
    "track": (Trackable.track,),
    "predict": (confed.Run.predict,),
    "export": (confed.Run.export,),
    "compare": (confed.study, confed.Study.compare),
    "check": (check_file,),
    "dossier": (confed.dossier,),
}
"""Command -> what does the same in Python; a command with two of them has the options of both."""

CALLED = {
    ("run", "out"): "folder",
    ("compare", "out"): "folder",
    ("predict", "picture2"): "image2",
    ("predict", "choice"): "choices",
    ("export", "target"): "folder",
    ("dossier", "folder"): "run",
    ("compare", "sources"): "recipe",
}
"""Command and its option -> the argument, where that has another name."""

PRINTS = {"plan": "it only prints"}
OF_COMMANDS: dict[str, dict[str, str]] = {
    "run": {"seed": "run.seed is a setting: seed=1"},
    "resume": {"folder": "self", "cell": "a scheduler starts processes", "grace": "of a scheduler's signal"},
    "report": {"folder": "self", "figures": "Run.plot", "methods": "of figures' files"},
    "track": {"folder": "self"},
    "predict": {"folder": "self", "page": "it only writes a page"},
    "export": {
        "hub": "uploads ask for a token of the shell", "private": "of an upload", "personal": "of an upload",
        "folder": "self",
    },
    "compare": {
        "over": "a loop", "along": "a loop", "split": "a loop", "models": "a loop", "gates": "of several studies",
        "tuned": "a file of confed tune", "on": "of clusters", "slurm": "of clusters", "submit": "of clusters",
        "before": "of clusters", "relative": "Comparison.relative", "results": "files of confed reproduce",
    },
}  # fmt: skip
"""Command -> option without an argument -> why."""

OF_PYTHON = {
    "self": "the folder", "progress": "--quiet", "settings": "overrides", "method": "--methods takes one, too",
    "question": "several in a conversation", "overrides": "of a recipe",
}  # fmt: skip
"""Argument that no option need have -> why."""

MUST = inspect.Parameter.empty
EMPTY = (None, (), "", MUST)


def options(command: str) -> dict[str, Any]:
    """Option -> its default."""
    callback = command_line().commands[command].callback
    return {name: one.default for name, one in inspect.signature(callback).parameters.items()}


@pytest.mark.parametrize("command", TWINS)
def test_every_option_has_its_argument(command: str) -> None:
    arguments: dict[str, Any] = {}
    for twin in TWINS[command]:
        arguments |= {name: one.default for name, one in inspect.signature(twin).parameters.items()}
    without = PRINTS | OF_COMMANDS.get(command, {})
    missing = set(arguments) - set(OF_PYTHON)
    for option, default in options(command).items():
        argument = CALLED.get((command, option), option)
        if option in without and argument not in missing:
            continue
        assert argument in arguments, f"confed {command} --{option} has no argument in Python"
        same = default in (MUST, arguments[argument]) or (default in EMPTY and arguments[argument] in EMPTY)
        assert same, f"confed {command} --{option} is {default!r} by default, in Python {arguments[argument]!r}"
        missing.discard(argument)
    assert not missing, f"confed {command} lacks options for the arguments {sorted(missing)}"


def test_commands_without_a_twin_are_named() -> None:
    """A new command gets a call in Python, or stands here."""
    alone = {
        "init", "watch", "tune", "reproduce", "attack", "forget", "evaluate", "list", "show", "doctor",
        "data", "weights", "client", "server", "federation",
    }  # fmt: skip
    assert set(command_line().commands) == {*TWINS, *alone}

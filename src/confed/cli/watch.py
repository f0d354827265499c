"""Verb that follows runs under way: watch."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group
from rich.markup import escape

from confed.cli.app import FAILED, Json, app, plain, print_json
from confed.cli.completion import complete_folder

if TYPE_CHECKING:
    from confed.results.watching import RunState

_STYLE = {"finished": "green", "running": "bold", "failed": "red", "stopped": "yellow", "waiting": "dim"}


@app.command(rich_help_panel="Train")
def watch(
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="A run, study or sweep folder. [default: the newest under ./runs]", autocompletion=complete_folder
        ),
    ] = None,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between looks at the files.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print the state and stop.")] = False,
    as_json: Json = False,
) -> None:
    """Follow a run, study or sweep from its files: rounds, loss, accuracy, time left; also one of another process.

    Ends when nothing is under way any more; Ctrl-C ends the watching, never the run. With --json the state is printed
    once. Exit code 1 where a run has failed.
    """
    from confed.results.watching import states_of

    place = folder or _newest(Path("runs"))
    states = states_of(place)
    if as_json:
        print_json(plain({"folder": str(place), "runs": [asdict(state) for state in states]}))
    elif once:
        Console(highlight=False).print(_table(place, states))
    else:
        states = _follow(place, states, every)
    if any(state.state == "failed" for state in states):
        raise typer.Exit(FAILED)


def _follow(place: Path, states: "list[RunState]", every: float) -> "list[RunState]":
    """Shows the state until nothing is under way: a live table on a terminal, otherwise a line per change."""
    from rich.live import Live

    from confed.results.watching import states_of

    console = Console(highlight=False)
    if console.is_terminal:
        with Live(_table(place, states), console=console, refresh_per_second=4) as live:
            while _under_way(states):
                time.sleep(every)
                states = states_of(place)
                live.update(_table(place, states))
        return states
    shown_lines: dict[str, tuple[str, int]] = {}
    while True:
        for state in states:
            if shown_lines.get(state.name) != (state.state, state.round):
                shown_lines[state.name] = (state.state, state.round)
                console.print(escape(_line(state)), soft_wrap=True)
        if not _under_way(states):
            return states
        time.sleep(every)
        states = states_of(place)


def _under_way(states: "Sequence[RunState]") -> bool:
    """Whether a process is at work; runs that wait are begun by it."""
    return any(state.state == "running" for state in states)


def _line(state: "RunState") -> str:
    parts = [f"{state.name}: {state.state}"]
    parts += [f"round {state.round}/{state.rounds}"] if state.rounds else []
    parts += [f"loss {state.loss:.4f}"] if state.loss is not None else []
    parts += [f"{state.metric} {state.value:.1%}"] if state.value is not None else []
    return ", ".join([*parts, *([state.text] if state.text else [])])


def _table(place: Path, states: "Sequence[RunState]") -> Group:
    """Table of the runs under a line that says how many are finished."""
    from rich.table import Table
    from rich.text import Text

    done = sum(state.state == "finished" for state in states)
    # A title of the table would be broken at the table's width.
    heading = Text(f"{place}: {done} of {len(states)} finished", no_wrap=True, overflow="ignore")
    table = Table(box=None, pad_edge=False)
    table.add_column("run")
    table.add_column("state")
    for column in ("round", "loss", "accuracy", "s/round", "left"):
        table.add_column(column, justify="right", no_wrap=True)
    metrics = {state.metric for state in states if state.metric}
    if len(metrics) == 1:
        table.columns[4].header = metrics.pop()
    for state in states:
        table.add_row(
            escape(state.name),
            f"[{_STYLE[state.state]}]{state.state}[/]",
            f"{state.round}/{state.rounds}" if state.rounds else "",
            "" if state.loss is None else f"{state.loss:.4f}",
            "" if state.value is None else f"{state.value:.1%}",
            "" if state.seconds is None else f"{state.seconds:.1f}",
            "" if state.left is None or state.state != "running" else _duration(state.left),
        )
        if state.text:
            table.add_row("", escape(state.text))
    return Group(heading, table)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _newest(runs: Path) -> Path:
    """The folder under ``runs/`` that was changed last."""
    from confed.results.folder import kind_of

    folders = [path for path in runs.iterdir() if path.is_dir() and kind_of(path)] if runs.is_dir() else []
    if not folders:
        raise ValueError("there is no run under ./runs: give a folder, confed watch FOLDER")
    return max(folders, key=_changed)


def _changed(folder: Path) -> float:
    """Time of the last change of a run's history, or of the folder itself."""
    files = [*folder.glob("metrics.jsonl"), *folder.glob("*/*/metrics.jsonl"), *folder.glob("*/*/*/metrics.jsonl")]
    return max([folder.stat().st_mtime, *(file.stat().st_mtime for file in files)])

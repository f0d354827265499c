"""Verbs that check and run things, follow them and tell of them: check, run, resume, report, watch, track."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.markup import escape

from confed.cli.app import (
    FAILED,
    answer,
    app,
    argument,
    complain,
    for_people,
    is_json,
    is_quiet,
    option,
    remark,
    show,
    showing,
    table_of,
    tell_asks,
)
from confed.cli.completion import complete_folder
from confed.cli.options import Methods, Overrides, Plan, RecipeName, Workers
from confed.system.collector import collector_at_rest
from confed.system.format import duration
from confed.tracking.backends import BACKENDS

if TYPE_CHECKING:
    from confed.results.watching import RunState

Every = Annotated[float, option("Seconds between looks at the files.", min=0.2)]
_PLACES = "; ".join(f"{name}: {backend.place}" for name, backend in BACKENDS.items())
_STYLE = {"finished": "green", "running": "bold", "failed": "red", "stopped": "yellow", "waiting": "dim"}


@app.command()
def check(
    file: Annotated[Path, argument("Python file of your own; its code is run.")],
    overrides: Annotated[
        list[str] | None, argument("What the recipe is to have instead.", metavar="[SECTION.KEY=VALUE]...")
    ] = None,
    recipe: Annotated[
        str, option("Recipe to run it with; by default drawn scenes and a tiny model.", show_default=False)
    ] = "",
) -> None:
    """Check a method, model, dataset, task or measure of your own.

    It keeps the contract of its kind, and runs for a round.
    """
    from confed.api.check import check_file

    console, faulty, all_checked = for_people(), False, []
    for checked in check_file(file, overrides or (), recipe):
        faulty = faulty or bool(checked.fault)
        all_checked.append(asdict(checked))
        console.print(f"[bold]{escape(checked.name)}[/] ({checked.kind})")
        for name, verdict in checked.verdicts:
            console.print(f"  {'[green]✓[/]' if verdict == 'passed' else '–'} {escape(name)}: {escape(verdict)}")
        if checked.fault:
            console.print(f"  [red]✗[/] {escape(checked.fault)}")
    answer(all_checked)
    if faulty:
        raise typer.Exit(FAILED)


@app.command()
def run(
    recipe: RecipeName = "fedvqa_scenes",
    overrides: Overrides = None,
    methods: Methods = None,
    seed: Annotated[int | None, option("The first seed. [default: the recipe's]")] = None,
    seeds: Annotated[int, option("Number of seeds, counted from the first.")] = 1,
    workers: Annotated[int | None, option("Processes of a run; 0: one per core.")] = None,
    out: Annotated[Path | None, option("Folder; must not exist. [default: runs/NAME]")] = None,
    plan: Plan = False,
) -> None:
    """Run a recipe; without arguments, the built-in benchmark.

    Several methods or seeds make a study folder with one run folder each.

    Ctrl-C stops; `confed resume FOLDER` goes on exactly there.
    """
    with collector_at_rest():
        from confed.cli.grids import finish, rows_of_study, show_plan, tell_account
        from confed.engines.workers import free_cores
        from confed.recipes.recipe import load_recipe
        from confed.studies.runner import run_single
        from confed.studies.study import free_folder, is_free, load_rows, open_study

    overrides = list(overrides or [])
    # `confed run algorithm.lam=0.5` means the default recipe
    if "=" in recipe or (recipe.startswith("~") and "/" not in recipe):
        overrides.insert(0, recipe)
        recipe = "fedvqa_scenes"
    overrides += [f"run.{key}={value}" for key, value in (("seed", seed), ("workers", workers)) if value is not None]
    with collector_at_rest():  # methods, models and datasets are imported here
        loaded = load_recipe(recipe, overrides) if methods is None else load_rows(recipe, overrides, methods)
    tell_asks(loaded, recipe)
    if plan:
        show_plan(rows_of_study(loaded), seeds, loaded.run.workers or free_cores(), False, None)
        return
    folder = out or free_folder(loaded.name)
    if loaded.methods or seeds != 1:
        if not is_free(folder):
            again = f"continue it with `confed resume {folder}` or give another folder with --out"
            raise ValueError(f"{folder} exists already; {again}")
        if seeds < 1:
            raise ValueError(f"seeds must be at least 1, got {seeds}")
        open_study(loaded, folder, range(loaded.run.seed, loaded.run.seed + seeds), side_by_side=False)
        finish(folder, None)
        return
    with showing(folder, rounds=True) as display:
        summary = run_single(loaded, folder, display)
    tell_account(summary)
    show(folder, [summary])


@app.command()
def resume(
    folder: Annotated[Path, argument("Of a run, study, sweep or tuning.", autocompletion=complete_folder)],
    workers: Workers = None,
    cell: Annotated[
        str, option("Only this run of a grid made with --on, or the array task's.", metavar="NUMBER|array")
    ] = "",
    grace: Annotated[float, option("With --cell: seconds after SIGUSR1 for the round under way.")] = 90.0,
) -> None:
    """Continue a run, study, sweep or tuning where it stopped.

    The result is that of a run in one go. Tasks of a job array (`confed compare RECIPE --on slurm`) call this with
    --cell array. Its exit codes: 0 done, 75 stopped before the end (SIGUSR1) and to be started again, 143 asked to end
    (SIGTERM).
    """
    from confed.cli.grids import compute_cell, finish

    if cell:
        compute_cell(folder, cell, grace)
    else:
        finish(folder, workers)


@app.command()
def report(
    folder: Annotated[Path, argument("Of a run, study or sweep, finished or not.", autocompletion=complete_folder)],
    figures: Annotated[bool, option("Also write figures/, as PNG and SVG.", "--figures")] = False,
    methods: Annotated[str | None, option("With --figures: only these rows, a,b,c.")] = None,
) -> None:
    """Write report.html again and show the table."""
    from confed.cli.tables import show_sweep, show_tuning
    from confed.report.report import save_figures
    from confed.results.folder import kind_of, run_folders
    from confed.results.runs import load
    from confed.results.sweep import read_sweep
    from confed.studies.tune import is_tuning, tuned_so_far

    if is_tuning(folder):
        show_tuning(folder, tuned_so_far(folder))
        return
    if kind_of(folder) == "sweep":
        if figures or methods:
            first = folder / next((point.folder for point in read_sweep(folder).points), "STUDY")
            raise ValueError(f"figures are of one study: give the folder of one in {folder}, such as {first}")
        show_sweep(folder)
        return
    folders = run_folders(folder)
    # Rows of one method are told apart by the study's labels, which a run does not know.
    labels = {run.folder: run.label for run in load(folder).runs if run.complete}
    summaries: list[dict[str, Any]] = []
    for place in folders:
        if place in labels:
            summary = json.loads((place / "summary.json").read_text(encoding="utf-8"))
            summaries.append({**summary, "label": labels[place]})
    chosen = [name.strip() for name in (methods or "").split(",") if name.strip()]
    if chosen and not figures:
        raise ValueError("--methods needs --figures")
    if figures and not save_figures(folder, methods=chosen):
        complain(f"{folder} has no results to draw yet", "note")
    show(folder, summaries)


@app.command()
def watch(
    folder: Annotated[
        Path | None,
        argument("Of a run, study or sweep. [default: the newest under runs]", autocompletion=complete_folder),
    ] = None,
    every: Every = 2.0,
    once: Annotated[bool, option("Print the state and stop.", "--once")] = False,
) -> None:
    """Follow a run, study or sweep while it is under way.

    Rounds, loss, accuracy and time left are read from the folder's files, also of another process. Ends when nothing is
    under way any more; Ctrl-C ends the watching, never the run. With --json the state is printed once. Exit code 1
    where a run has failed.
    """
    from confed.results.watching import states_of

    place = folder or _newest(Path("runs"))
    states = states_of(place)
    answer({"folder": str(place), "runs": [asdict(state) for state in states]})
    if once:
        for_people().print(_states_table(place, states))
    elif not is_json():
        states = _follow(place, states, every)
    if any(state.state == "failed" for state in states):
        raise typer.Exit(FAILED)


def _follow(place: Path, states: "list[RunState]", every: float) -> "list[RunState]":
    """Shows the state until nothing is under way: a live table on a terminal, otherwise a line per change."""
    from rich.live import Live

    from confed.results.watching import states_of

    console = Console(highlight=False)
    if console.is_terminal:
        with Live(_states_table(place, states), console=console, refresh_per_second=4) as live:
            while any(state.state == "running" for state in states):
                time.sleep(every)
                states = states_of(place)
                live.update(_states_table(place, states))
        return states
    shown_lines: dict[str, tuple[str, int]] = {}
    while True:
        for state in states:
            if shown_lines.get(state.name) != (state.state, state.round):
                shown_lines[state.name] = (state.state, state.round)
                console.print(escape(_line(state)), soft_wrap=True)
        if all(state.state != "running" for state in states):
            return states
        time.sleep(every)
        states = states_of(place)


def _line(state: "RunState") -> str:
    parts = [f"{state.name}: {state.state}"]
    parts += [f"round {state.round}/{state.rounds}"] if state.rounds else []
    parts += [f"loss {state.loss:.4f}"] if state.loss is not None else []
    parts += [f"{state.metric} {state.value:.1%}"] if state.value is not None else []
    return ", ".join([*parts, *([state.text] if state.text else [])])


def _states_table(place: Path, states: "Sequence[RunState]") -> Group:
    """Table of the runs under a line that says how many are finished."""
    from rich.text import Text

    done = sum(state.state == "finished" for state in states)
    # A title of the table would be broken at the table's width.
    heading = Text(f"{place}: {done} of {len(states)} finished", no_wrap=True, overflow="ignore")
    table = table_of("run", "state")
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
            "" if state.left is None or state.state != "running" else duration(state.left),
        )
        if state.text:
            table.add_row("", escape(state.text))
    return Group(heading, table)


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


def _complete_tool(incomplete: str) -> list[str]:
    return [name for name in BACKENDS if name.startswith(incomplete)]


@app.command()
def track(
    folder: Annotated[
        Path, argument("Of a run, study or sweep, or a site's private one.", autocompletion=complete_folder)
    ],
    to: Annotated[str, option(f"The tool: {', '.join(BACKENDS)}.", autocompletion=_complete_tool)] = "trackio",
    at: Annotated[str, option(f"Where it keeps runs. {_PLACES}.")] = "",
    follow: Annotated[bool, option("Go on while a process is at work there.", "--follow")] = False,
    every: Every = 2.0,
    project: Annotated[str, option("Name of the project. [default: the recipe's]")] = "",
    group: Annotated[str, option("Name of the group. [default: the study folder's]")] = "",
    name: Annotated[str, option("Name of a run on its own. [default: its folder's]")] = "",
    files: Annotated[bool, option("Send recipe, summary and report as well.")] = True,
) -> None:
    """Send metrics and files of runs to a tracking tool.

    Runs know nothing of it: their files are read, while they run (--follow) or later. What the tool has already is not
    sent twice. Reports hold sample pictures: --no-files keeps them here.
    """
    from confed.deployment.site import site_of
    from confed.tracking.follow import track as tracking
    from confed.tracking.records import Names

    site = site_of(folder)
    place = site[0] if site else folder
    names = Names(project, group, name or (site[1] if site else ""))
    tracked = []
    for sent in tracking(place, to, at=at, names=names, files=files, follow=follow, every=every):
        tracked.append(sent)
        if not is_quiet():
            new = f"{sent.values:,} new values" if sent.values else "no new values"
            remark(f"{escape(sent.name)}: {sent.state}, round {sent.round}, {new}")
    answer({"folder": str(place), "to": to, "runs": [asdict(sent) for sent in tracked]})
    if tracked:
        see = BACKENDS[to].show.format(where=tracked[-1].where, project=tracked[-1].project)
        remark(escape(f"{to}: project {tracked[-1].project}, {tracked[-1].where}" + (f"; see `{see}`" if see else "")))
    else:
        remark("no run has begun here")

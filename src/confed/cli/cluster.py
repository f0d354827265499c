"""Studies and sweeps on a cluster: options of the verbs that open them, job script or Ray, and what is there."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from confed.cli.app import (
    allowed_modules,
    complain,
    console,
    interruptible,
    is_quiet,
    plain,
    print_json,
    print_table,
    say,
)
from confed.cli.study import finish, show_gathered

On = Annotated[
    str,
    typer.Option(
        "--on",
        help="ray: runs on the nodes of a Ray cluster (run.address). slurm, or script (PBS, LSF, ...): write a job "
        "script, a task per run, in place of running.",
    ),
]
Slurm = Annotated[
    list[str] | None,
    typer.Option("--slurm", help="Options of sbatch: partition=gpu,gres=gpu:1,time=4:00:00. Repeatable."),
]
Submit = Annotated[bool, typer.Option("--submit", help="With --on slurm: also submit the script.")]
Before = Annotated[
    list[str] | None,
    typer.Option("--before", help='A line of shell before each task, such as "module load cuda". Repeatable.'),
]

_RAY = {"run.engine": "run.engine=local", "run.address": 'run.address=""'}
"""Key -> override with which runs are made without Ray."""

LISTED = 30  # cells that are shown one by one


def check_cluster(on: str, slurm: list[str] | None, submit: bool, before: list[str] | None) -> None:
    """Check of the options about clusters, before a folder is made; a fault is a ValueError."""
    from confed.studies.cluster import parse_options

    if on not in ("", "slurm", "script", "ray"):
        raise ValueError(f"--on must be slurm, script or ray, got {on!r}")
    if on in ("", "ray") and (slurm or submit or before):
        raise ValueError("--slurm, --submit and --before need --on slurm")
    if on == "script" and (slurm or submit):
        raise ValueError("--slurm and --submit need --on slurm; other schedulers take their options with the script")
    parse_options(slurm or [])


def with_address(on: str, recipe: str, overrides: list[str]) -> tuple[str, list[str]]:
    """Address of the Ray cluster that a recipe or overrides name in ``run.address``, and overrides without Ray.

    With them each run of a study is computed by one process, whatever the recipe says.
    """
    from confed.recipes.recipe import load_recipe

    if on != "ray":
        return "", overrides
    rest = [text for text in overrides if text.partition("=")[0].strip() not in _RAY]
    return load_recipe(recipe, [*overrides, "run.engine=ray"]).run.address, [*rest, *_RAY.values()]


def carry_out(
    root: Path,
    on: str,
    address: str,
    workers: int | None,
    slurm: list[str] | None,
    submit: bool,
    before: list[str] | None,
    as_json: bool,
) -> None:
    """Executes what is missing of a study or sweep: on this machine, on Ray, or as a job script that is written."""
    if on == "ray":
        _compute(root, address, workers, as_json)
    elif on:
        _distribute(root, on, slurm, submit, before, as_json)
    else:
        finish(root, workers, as_json)


def _compute(root: Path, address: str, workers: int | None, as_json: bool) -> None:
    """Computes the cells of a study or sweep that are missing on a Ray cluster, and shows what is there."""
    from confed.api.progress import Display
    from confed.studies.on_ray import compute_on_ray

    with interruptible(root), Display(console, quiet=as_json or is_quiet()) as display:
        compute_on_ray(root, address, workers or 0, display, lambda cell, why: complain(f"{cell}: {why}", "without"))
    show_gathered(root, as_json, {})


def _distribute(
    root: Path, on: str, slurm: list[str] | None, submit: bool, before: list[str] | None, as_json: bool
) -> None:
    """Job script for the missing cells of a study or sweep, which are numbered; submitted if asked."""
    from confed.studies.cells import number_cells, statuses
    from confed.studies.cluster import parse_options, ranges, script_of, write_script
    from confed.studies.cluster import submit as submit_script

    cells = number_cells(root)
    for cell, why in cells.refused.items():
        complain(f"{cell}: {why}", "without")
    missing = [status.cell.number for status in statuses(root) if status.state != "done"]
    result: dict[str, object] = {
        "folder": str(root),
        "cells": len(cells.cells),
        "missing": missing,
        "script": None,
        "job": None,
    }
    if not missing:
        say(f"all {len(cells.cells)} cells are there; `confed compare {escape(str(root))}` shows them")
    else:
        script = write_script(
            root, script_of(root, missing, parse_options(slurm or []), before or [], allowed_modules())
        )
        result["script"] = str(script)
        if submit:
            result["job"] = submit_script(script)
        if not as_json:
            _say_how(root, script, len(cells.cells), ranges(missing), on, str(result["job"] or ""))
    if as_json:
        print_json(plain(result))


def _say_how(root: Path, script: Path, count: int, missing: str, on: str, job: str) -> None:
    """What was written, how to submit it, and how to see what is there."""
    which = f"all {count} cells" if missing == f"1-{count}" else f"cells {missing} of {count}"
    lines = [f"{script}: {which}"]
    if job:
        lines.append(f"submitted as job {job}")
    elif on == "slurm":
        lines.append(f"submit it with:   sbatch {script}")
    else:
        # PBS Pro and Grid Engine take one range; cells that are finished end at once.
        span = missing if "," not in missing else f"{missing.partition('-')[0].partition(',')[0]}-{count}"
        span = span if "-" in span else f"{span}-{span}"
        lines += [
            f"PBS:          qsub -J {span} -r y {script}",
            f'LSF:          bsub -J "{root.name}[{missing}]" -r -Q 75 < {script}',
            f"Grid Engine:  qsub -t {span} -r y {script}",
            f"Kubernetes:   an indexed Job of {count} completions with the command: confed cell {root}",
        ]
    lines.append(f"see what is there with:   confed compare {root}")
    for line in lines:
        console.print(escape(line), soft_wrap=True, highlight=False)


def show_cells(root: Path, as_json: bool) -> None:
    """State of a study's or sweep's cells, and the tables and the report of those that are finished."""
    from rich.table import Table

    from confed.studies.cells import statuses

    cell_statuses = statuses(root)
    counts = Counter(status.state for status in cell_statuses)
    words = ", ".join(
        f"{counts[state]} {state}" for state in ("done", "running", "stopped", "failed", "waiting") if counts[state]
    )
    more = {"cells": [asdict(status) for status in cell_statuses]}
    if as_json and counts["done"]:
        show_gathered(root, True, more)
        return
    if as_json:
        print_json(plain({"folder": str(root), **more}))
        return
    say(f"{len(cell_statuses)} cells: {words}")
    listed = [status for status in cell_statuses if status.state in ("running", "stopped", "failed")]
    if listed:
        table = Table(box=None, pad_edge=False)
        for column in ("cell", "run", "state", "round", "where or why"):
            table.add_column(column, justify="right" if column in ("cell", "round") else "left")
        for status in listed[:LISTED]:
            place = f"{status.round}/{status.rounds}"
            table.add_row(str(status.cell.number), escape(status.title), status.state, place, escape(status.text))
        print_table(table)
        if len(listed) > LISTED:
            say(f"and {len(listed) - LISTED} more")
    if counts["done"]:
        show_gathered(root, False, {})

"""Plans of ``--plan``: what runs will compute, send, keep and take."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from confed.cli.app import (
    answer,
    complain,
    console,
    default_workers,
    is_json,
    print_line,
    print_table,
    remark,
    table_of,
)

if TYPE_CHECKING:
    from confed.recipes.recipe import Recipe
    from confed.runs.plan import RunPlan
    from confed.studies.cells import BatchOptions
    from confed.studies.study import Grid


def rows_of_study(recipe: "Recipe", title: str = "") -> "dict[str, Recipe]":
    """Title of each row of a study, after that of a sweep's point -> its single-run recipe."""
    rows = recipe.methods or (recipe.sections["algorithm"]["name"],)
    return {", ".join(filter(None, (title, recipe.label(row)))): recipe.method(row) for row in rows}


def show_grid_plan(grid: "Grid", workers: int | None, options: "BatchOptions") -> None:
    """Plan of a grid, in which a run that the swept setting does not concern is made once."""
    from confed.results.sweep import MODELS
    from confed.studies.study import differing

    rows: dict[str, Recipe] = {}
    again = 0
    for point in grid.points:
        for title, row in rows_of_study(grid.recipes[point.folder][0], point.title).items():
            if grid.over in ("", MODELS) or all(differing(before, row) for before in rows.values()):
                rows[title] = row
            else:
                again += 1
    if again:
        complain(f"runs of each seed that are the same at an earlier value and count once: {again}", "note")
    show_plan(rows, grid.seeds, workers or default_workers(grid.first), True, options)


def show_plan(
    rows: "Mapping[str, Recipe]", seeds: int, workers: int, beside: bool, options: "BatchOptions | None"
) -> None:
    """Measures the runs and prints their plan."""
    from confed.runs.plan import plan_run

    plans: dict[str, RunPlan] = {}
    refused: dict[str, str] = {}
    for title, recipe in rows.items():
        remark(f"measuring {escape(title)}")
        try:
            plans[title] = plan_run(recipe)
        except (ValueError, RuntimeError) as error:
            refused[title] = str(error)
    for title, why in refused.items():
        complain(f"{title}: {why}", "without")
    if not plans:
        raise ValueError("nothing can be planned: " + next(iter(refused.values()), "there is no run"))
    totals = _totals(plans, seeds, workers, beside)
    each = {
        title: {**vars(plan), "seconds": plan.seconds(), "round_seconds": plan.round_seconds()}
        for title, plan in plans.items()
    }
    answer({"runs": each, "seeds": seeds, **totals, "refused": refused})
    _print(plans, seeds, totals)
    if options is not None and options.seconds is not None and not is_json():
        _compare_with_limit(plans, options)


def _totals(plans: "Mapping[str, RunPlan]", seeds: int, workers: int, beside: bool) -> dict[str, Any]:
    from confed.runs.plan import makespan

    # As runs are made: all rows of the first seed, then of the second.
    cells: list[float] = []
    for _ in range(seeds):
        for plan in plans.values():
            cells.append(plan.seconds())
    side = makespan(cells, workers) if beside else seeds * sum(plan.seconds(workers) for plan in plans.values())
    return {
        "cells": len(cells),
        "calls": seeds * sum(plan.calls for plan in plans.values()),
        "bytes": seeds * sum(plan.bytes_up + plan.bytes_down for plan in plans.values()),
        "memory_per_process": max(plan.memory for plan in plans.values()),
        "device_data": max(plan.device_data for plan in plans.values()),
        "device_memory": max(plan.device_memory for plan in plans.values()),
        "disk": seeds * sum(plan.disk for plan in plans.values()),
        "workers": workers,
        "seconds_of_one_process": sum(cells),
        "seconds_of_workers": side,
        "seconds_of_an_array": max(cells),
    }


def _print(plans: "Mapping[str, RunPlan]", seeds: int, totals: Mapping[str, Any]) -> None:
    from confed.system.format import count, counted, duration, size

    numbers = ("clients", "per round", "rounds", "calls", "up", "down", "memory", "disk", "a round", "time")
    table = table_of("run", *numbers, right=numbers)
    for title, plan in plans.items():
        table.add_row(
            escape(title), count(plan.clients), f"{plan.cohort:g}", str(plan.rounds), count(plan.calls),
            size(plan.bytes_up),
            size(plan.bytes_down), size(plan.memory), size(plan.disk), duration(plan.round_seconds()),
            duration(plan.seconds()),
        )  # fmt: skip
    print_table(table)
    gpu = f", {size(totals['device_memory'])} of the GPU" if totals["device_memory"] else ""
    gpu += f" and up to {size(totals['device_data'])} of it for clients' examples" if totals["device_data"] else ""
    lines = [
        f"{counted(totals['cells'], 'run')} ({counted(seeds, 'seed')}): {count(totals['calls'])} calls, "
        f"{size(totals['bytes'])} sent, {size(totals['disk'])} on disk, {size(totals['memory_per_process'])} of memory "
        f"per process{gpu}",
        f"one process: {duration(totals['seconds_of_one_process'])}",
    ]
    if totals["workers"] > 1:
        lines.append(f"{totals['workers']} processes on as many cores: {duration(totals['seconds_of_workers'])}")
    if totals["cells"] > 1:
        lines.append(f"{totals['cells']} array tasks at a time: {duration(totals['seconds_of_an_array'])}")
    for at_once in dict.fromkeys(plan.at_once for plan in plans.values()):
        titles = [title for title, plan in plans.items() if plan.at_once == at_once]
        lines.append(f"{', '.join(titles)}: {at_once}")
    lines.append("Times are those of this machine as it was just now, without the start of processes.")
    for line in lines:
        print_line(escape(line))


def _compare_with_limit(plans: "Mapping[str, RunPlan]", options: "BatchOptions") -> None:
    """Cells beside the time limit of their tasks: warnings where not even one round fits."""
    from confed.system.format import duration

    usable = (options.seconds or math.inf) - options.lead
    for title, plan in plans.items():
        least = plan.preparing + plan.round_seconds()
        if least > usable:
            complain(
                f"{title}: preparing data and one round take about {duration(least)}, and cells stop after "
                f"{duration(usable)} (time limit {duration(options.seconds)} less {options.lead} s): none would "
                "be finished",
                "warning",
            )
    longest = max(plans, key=lambda title: plans[title].seconds())
    tasks = math.ceil(plans[longest].seconds() / usable)
    if tasks > 1:
        console.print(
            escape(f"{longest} takes about {tasks} times the limit: its task is queued again"), soft_wrap=True
        )

"""Execution of runs, studies, sweeps and tunings, here or as cells of a cluster, and their plans."""

import math
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import typer
from rich.markup import escape

from confed.api.progress import Display
from confed.cli.app import (
    FAILED,
    INTERRUPTED,
    allowed_modules,
    answer,
    cell_place,
    complain,
    console,
    default_workers,
    grouped,
    handling,
    is_json,
    is_quiet,
    print_line,
    print_table,
    remark,
    say,
    show,
    showing,
    table_of,
    tell_errors,
)
from confed.cli.options import Judged
from confed.federation.checkpoint import Checkpoints, CorruptCheckpoint
from confed.recipes.recipe import Recipe, load_recipe
from confed.results.folder import kind_of
from confed.results.summary import check_headline
from confed.results.sweep import MODELS, read_sweep
from confed.runs.plan import RunPlan, makespan, plan_run
from confed.studies.cells import (
    BatchOptions,
    array_index,
    compute_on_ray,
    find_cell,
    number_cells,
    parse_options,
    ranges,
    requeue,
    script_of,
    statuses,
    submit,
    write_script,
)
from confed.studies.runner import Outcome, borrow, complete, gather, leave_error, one_job, resume, run_study
from confed.studies.study import Grid, Job, StudyFolder, differing, study_in
from confed.studies.tune import is_tuning, tune, tuned_before
from confed.studies.tuned import read_tuned
from confed.system.events import Progress
from confed.system.folder_lock import exclusive
from confed.system.format import count, counted, duration, size

Execute = Callable[[StudyFolder], Outcome]


def judged_by(references: list[str] | None, margin: float, headline: str, relative: str, gates: bool = False) -> Judged:
    """How methods are judged, as options say it."""
    if not 0 < margin < 100:
        raise ValueError(f"--margin must lie between 0 and 100 points, got {margin:g}")
    check_headline(headline, "--headline")
    return Judged(tuple(references or ()), margin / 100, relative, gates)


def tuned_values(
    tuned: Path | None, recipe: str, overrides: list[str], seeds: int
) -> Mapping[str, Mapping[str, Any]] | None:
    """Values of ``--tuned`` for each row."""
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    if tuned is None:
        return None
    values, chosen = read_tuned(tuned)
    first = load_recipe(recipe, overrides).run.seed
    for seed in chosen:
        if first <= seed < first + seeds:
            raise ValueError(f"seed {seed} chose the values of {tuned}, so nothing may be reported with it")
    return values


def finish(folder: Path, workers: int | None) -> None:
    """Execution of what is missing in a run, study, sweep or tuning; its tables and report are written and shown."""
    if kind_of(folder) == "federation":  # see confed.deployment.server
        raise ValueError(f"{folder} is a federation across machines: go on with the same `confed server` as before")
    if is_tuning(folder):
        recipe, terms = tuned_before(folder)
        tune_rows(recipe, folder, workers, **terms)
        return

    def execute(study: StudyFolder) -> Outcome:
        count = workers if workers is not None else default_workers(study.recipe)
        with showing(folder, rounds=not study.side_by_side) as display:
            return run_study(study.root, display, count)

    if not _finish_grid(folder, execute):
        with showing(folder, rounds=True) as display:
            summaries = resume(folder, display)
        show(folder, summaries)


def show_gathered(folder: Path, **more: Any) -> None:
    """Tables and report of a study or sweep whose runs other processes make, written and shown; nothing is run."""
    if not _finish_grid(folder, lambda study: gather(study.root), **more):
        raise ValueError(f"{folder} must be a study or a sweep")


def _finish_grid(folder: Path, execute: Execute, **more: Any) -> bool:
    """Whether a folder is a sweep or a study, which is executed or gathered, and shown with ``more``."""
    if kind_of(folder) == "sweep":
        with exclusive(folder):
            _finish_sweep(folder, execute, more)
    elif (study := study_in(folder)) is not None:
        _finish_study(study, execute, more)
    else:
        return False
    return True


def _finish_study(study: StudyFolder, execute: Execute, more: Mapping[str, Any]) -> None:
    """Tables of a study after its missing runs were executed or gathered, judged as its index says."""
    outcome = execute(study)
    if not outcome.summaries:
        if outcome.failed:
            first = min(outcome.failed)
            place = cell_place(study.root, first)
            raise RuntimeError(f"no run could be made: {outcome.errors[first]}; see {place}/error.txt")
        raise ValueError("no run could be made: " + next(iter(outcome.errors.values())))
    if study.side_by_side:
        from confed.cli.tables import show_study  # after the runs, which need no report

        show_study(outcome, _judged(study), more)
    else:
        tell_account(outcome.summaries[0])
        show(outcome.folder, outcome.summaries, errors=outcome.errors, **more)
        tell_errors(outcome)
    if outcome.failed:
        raise typer.Exit(FAILED)


def tell_account(summary: Mapping[str, Any]) -> None:
    """What was read and left out of the data of a run, on standard error."""
    for key in ("account", "read"):
        if (told := summary.get("facts", {}).get(key)) and not is_quiet():
            remark(f"data: {escape(told)}")


def _judged(study: StudyFolder) -> Judged:
    """How the methods of a study are judged, as its index says."""
    terms = study.index.get("judged") or {}
    references, relative = tuple(terms.get("references", ())), terms.get("relative", "")
    return Judged(references, terms.get("margin", 0.01), relative, bool(terms.get("gates")))


def _finish_sweep(root: Path, execute: Execute, more: Mapping[str, Any]) -> None:
    """Tables of a sweep after its missing runs were executed or gathered, value by value or model by model."""
    from confed.cli.tables import show_gates, show_sweep
    from confed.report.report import write_report, write_tables

    sweep = read_sweep(root)
    outcomes: dict[str, Outcome] = {}
    for number, point in enumerate(sweep.points, 1):
        study = study_in(root / point.folder)
        if study is None:
            continue
        remark(rf"\[{number}/{len(sweep.points)}] {escape(point.title)}")
        before = [job for job in study.jobs if study.finished(job)]
        if not sweep.models:  # runs with other models are other runs
            borrow(study.root, [root / other.folder for other in sweep.points if other is not point])
        outcomes[point.folder] = execute(study)
        after = [job for job in study.jobs if study.finished(job)]
        if after and (after != before or _outdated(study, after)):
            write_tables(study.root, sweep.present({job.method for job in after}), sweep.margin)
            write_report(study.root)
    errors: dict[str, str] = {}
    for place, outcome in outcomes.items():
        errors |= {f"{place}/{cell}": text for cell, text in outcome.errors.items()}
    if not any(outcome.summaries for outcome in outcomes.values()):
        raise ValueError("no run could be made: " + next(iter(errors.values()), "the folder holds no study"))
    studies = [study_in(root / point.folder) for point in sweep.points]
    if all(study is not None and _judged(study).gates for study in studies):
        first, *longer = [root / point.folder for point in sweep.points]
        show_gates(first, longer[0] if longer else None, root)
    else:
        show_sweep(root, errors, **more)
    for text, cells in grouped(errors).items():
        complain(f"{', '.join(cells)}: {text}", "without")
    if any(outcome.failed for outcome in outcomes.values()):
        raise typer.Exit(FAILED)


def _outdated(study: StudyFolder, finished: Sequence[Job]) -> bool:
    """Whether a run was finished after the study's report was written, such as a cell on another machine."""
    report = study.root / "report.html"
    if not report.is_file():
        return True
    written = report.stat().st_mtime
    return any((study.root / job.folder / "summary.json").stat().st_mtime >= written for job in finished)


def tune_rows(recipe: Recipe, folder: Path, workers: int | None, **terms: Any) -> None:
    """Tuning of a recipe's rows on these terms; what was chosen is shown."""
    count = workers if workers is not None else default_workers(recipe)
    with showing(folder) as display:
        rows = tune(recipe, folder, workers=count, progress=display, **terms)
    from confed.cli.tables import show_tuning

    show_tuning(folder, rows)
    if any(tuned.failed or (tuned.trials and tuned.best is None) for tuned in rows):
        raise typer.Exit(FAILED)


def check_rows(recipe: Recipe, folder: Path, judged: Judged) -> None:
    """Check that what the methods are judged against is among them, or among those that are there."""
    before = study_in(folder)
    rows = {*recipe.methods, *(() if before is None else before.recipe.methods)}
    for name_of_option, names in (("--reference", judged.references), ("--relative", filter(None, [judged.relative]))):
        for name in names:
            if name not in rows:
                raise ValueError(f"{name_of_option} {name} is none of the methods compared: {', '.join(sorted(rows))}")


# Runs on a cluster: a job script or Ray, and what is there ------------------------------------------------------

_RAY = {"run.engine": "run.engine=local", "run.address": 'run.address=""'}
"""Key -> override with which runs are made without Ray."""
LISTED = 30  # cells that are shown one by one


@dataclass(frozen=True)
class Cluster:
    """Where the runs of a study or sweep are made, as options say it; a fault is a ValueError."""

    on: str = ""
    slurm: list[str] | None = None
    submit: bool = False
    before: list[str] | None = None
    options: BatchOptions = field(init=False)

    def __post_init__(self) -> None:
        if self.on not in ("", "slurm", "script", "ray"):
            raise ValueError(f"--on must be slurm, script or ray, got {self.on!r}")
        if self.on in ("", "ray") and (self.slurm or self.submit or self.before):
            raise ValueError("--slurm, --submit and --before need --on slurm")
        if self.on == "script" and (self.slurm or self.submit):
            raise ValueError(
                "--slurm and --submit need --on slurm; other schedulers take their options with the script"
            )
        object.__setattr__(self, "options", parse_options(self.slurm or []))


def with_address(on: str, recipe: str, overrides: list[str]) -> tuple[str, list[str]]:
    """Address of the Ray cluster in ``run.address``, and overrides by which one process computes each run."""
    if on != "ray":
        return "", overrides
    rest = [text for text in overrides if text.partition("=")[0].strip() not in _RAY]
    return load_recipe(recipe, [*overrides, "run.engine=ray"]).run.address, [*rest, *_RAY.values()]


def carry_out(root: Path, cluster: Cluster, address: str, workers: int | None) -> None:
    """Executes what is missing of a study or sweep: on this machine, on Ray, or as a job script that is written."""
    if cluster.on == "ray":
        with showing(root) as display:
            compute_on_ray(root, address, workers or 0, display, _refused)
        show_gathered(root)
    elif cluster.on:
        _distribute(root, cluster)
    else:
        finish(root, workers)


def _refused(cell: str, why: str) -> None:
    complain(f"{cell}: {why}", "without")


def _distribute(root: Path, cluster: Cluster) -> None:
    """Job script for the missing cells of a study or sweep, which are numbered; submitted if asked."""
    cells = number_cells(root)
    for cell, why in cells.refused.items():
        _refused(cell, why)
    missing = [status.cell.number for status in statuses(root) if status.state != "done"]
    script, job = None, None
    if not missing:
        say(f"all {len(cells.cells)} cells are there; `confed compare {escape(str(root))}` shows them")
    else:
        text = script_of(root, missing, cluster.options, cluster.before or [], allowed_modules())
        script = write_script(root, text)
        job = submit(script) if cluster.submit else None
        if not is_json():
            _say_how(root, script, len(cells.cells), ranges(missing), cluster.on, job or "")
    script_name = script and str(script)
    answer({"folder": str(root), "cells": len(cells.cells), "missing": missing, "script": script_name, "job": job})


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
            f"Kubernetes:   an indexed Job of {count} completions with the command: confed resume {root} --cell array",
        ]
    lines.append(f"see what is there with:   confed compare {root}")
    for line in lines:
        console.print(escape(line), soft_wrap=True, highlight=False)


def show_cells(root: Path) -> None:
    """State of a study's or sweep's cells, and the tables and the report of those that are finished."""
    cell_statuses = statuses(root)
    counts = Counter(status.state for status in cell_statuses)
    words = ", ".join(
        f"{counts[state]} {state}" for state in ("done", "running", "stopped", "failed", "waiting") if counts[state]
    )
    more = {"cells": [asdict(status) for status in cell_statuses]}
    if not counts["done"]:
        answer({"folder": str(root), **more})
    remark(f"{len(cell_statuses)} cells: {words}")
    listed = [status for status in cell_statuses if status.state in ("running", "stopped", "failed")]
    if listed:
        table = table_of("cell", "run", "state", "round", "where or why", right=("cell", "round"))
        for status in listed[:LISTED]:
            place = f"{status.round}/{status.rounds}"
            table.add_row(str(status.cell.number), escape(status.title), status.state, place, escape(status.text))
        print_table(table)
        if len(listed) > LISTED:
            remark(f"and {len(listed) - LISTED} more")
    if counts["done"]:
        show_gathered(root, **more)


# Cells: one run of a study, as an array task of a cluster computes it --------------------------------------------

AGAIN = 75
"""Exit code of a cell that stopped before its end and goes on when it is started again (EX_TEMPFAIL of sysexits.h)."""


def compute_cell(study: Path, number: str, grace: float) -> None:
    """Execution or continuation of one run of a study or sweep: the cell of a number, or of this array task."""
    if not grace >= 0:
        raise ValueError(f"--grace must be at least 0 seconds, got {grace}")
    if number != "array" and not number.isdecimal():
        raise ValueError(f'--cell must be the number of a cell, or "array" for that of this array task, got {number!r}')
    wanted = array_index(os.environ) if number == "array" else int(number)
    if wanted is None:
        raise ValueError(f"give the number of a cell: confed resume {study} --cell NUMBER (this is no array task)")
    study_folder, job, note = find_cell(study, wanted)
    if note:
        complain(note, "warning")
    folder = study_folder.root / job.folder
    if study_folder.finished(job):
        say(f"cell {wanted} is there already: {escape(str(folder))}")
        return
    before = _saved(folder)
    with _stopping(grace) as stop, Display(console, rounds=True) as display:

        def work(progress: Progress) -> dict[str, object]:
            return complete(study_folder, job, progress, outlast=True, stopping=stop.honoured)

        try:
            one_job(display, f"cell {wanted}, {study_folder.labels[job.method]}, seed {job.seed}", work)
            return
        except KeyboardInterrupt:
            pass
        except CorruptCheckpoint as error:
            raise ValueError(str(error)) from error
    _stopped(wanted, folder, before, stop.announced)


@dataclass
class _Stop:
    """Whether the scheduler has announced the end of the time limit."""

    announced: bool = False

    def honoured(self) -> bool:
        """Whether to stop now, between two rounds: what is saved then is not cut short by the end of the grace."""
        if self.announced:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return self.announced


@contextmanager
def _stopping(grace: float) -> Iterator[_Stop]:
    """SIGUSR1 as the wish to stop after the round under way, or ``grace`` seconds later; a second one: at once."""
    stop = _Stop()
    if not hasattr(signal, "SIGUSR1"):  # Windows, where no scheduler sends it
        yield stop
        return

    def announce(signum: int, frame: FrameType | None) -> None:
        if stop.announced or not grace:
            stop.announced = True
            raise KeyboardInterrupt
        stop.announced = True
        signal.setitimer(signal.ITIMER_REAL, grace)

    def over(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with handling({signal.SIGUSR1: announce, signal.SIGALRM: over}):
        try:
            yield stop
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


def _saved(folder: Path) -> int:
    """Round of the newest checkpoint; 0 without one."""
    return max(Checkpoints(folder / "checkpoint").rounds(), default=0)


def _stopped(number: int, folder: Path, before: int, limit: bool) -> None:
    """What follows a stop: the task is queued again if it was the time limit, and some round was finished."""
    now = _saved(folder)
    if not limit:
        say(f"[yellow]stopped[/] after round {now}; cell {number} goes on there when it is started again")
        raise typer.Exit(INTERRUPTED)
    if now <= before:
        why = (
            f"cell {number} could not finish one round, or the final evaluation, in its time, and would not in the "
            "same time again: give it a longer time limit (--slurm time=...)"
        )
        leave_error(folder, f"RuntimeError: {why}\n")
        raise RuntimeError(why)
    again = requeue()
    how = "is queued again" if again else "goes on there when it is started again"
    say(f"[yellow]stopped[/] after round {now} for the time limit; cell {number} {how}")
    raise typer.Exit(AGAIN)


# Plans of ``--plan``: what runs will compute, send, keep and take -------------------------------------------------


def rows_of_study(recipe: Recipe, title: str = "") -> dict[str, Recipe]:
    """Title of each row of a study, after that of a sweep's point -> its single-run recipe."""
    rows = recipe.methods or (recipe.sections["algorithm"]["name"],)
    return {", ".join(filter(None, (title, recipe.label(row)))): recipe.method(row) for row in rows}


def show_grid_plan(grid: Grid, workers: int | None, options: BatchOptions) -> None:
    """Plan of a grid, in which a run that the swept setting does not concern is made once."""
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


def show_plan(rows: Mapping[str, Recipe], seeds: int, workers: int, beside: bool, options: BatchOptions | None) -> None:
    """Measures the runs and prints their plan."""
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


def _totals(plans: Mapping[str, RunPlan], seeds: int, workers: int, beside: bool) -> dict[str, Any]:
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


def _print(plans: Mapping[str, RunPlan], seeds: int, totals: Mapping[str, Any]) -> None:
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


def _compare_with_limit(plans: Mapping[str, RunPlan], options: BatchOptions) -> None:
    """Cells beside the time limit of their tasks: warnings where not even one round fits."""
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

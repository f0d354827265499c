"""Verbs that run grids value by value, cell by cell, or to choose: sweep, cell, tune, gates."""

import json
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from confed.cli import study as shared
from confed.cli.app import (
    FAILED,
    INTERRUPTED,
    Json,
    app,
    complain,
    console,
    handling,
    is_quiet,
    plain,
    print_json,
    print_line,
    print_table,
    say,
    showing,
    table_of,
)
from confed.cli.completion import complete_key

if TYPE_CHECKING:
    from rich.table import Table

    from confed.recipes.recipe import Recipe
    from confed.results.gates import Gate
    from confed.studies.tuned import Tuned as TunedRow


@app.command(rich_help_panel="Compare")
def sweep(
    recipe: shared.RecipeName,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="section.key=value with a TOML value, for all values.", autocompletion=complete_key),
    ] = None,
    over: Annotated[
        str, typer.Option(help="The setting and its values: data.shards=1,2,3. [default: the override with several]")
    ] = "",
    along: Annotated[
        list[str] | None,
        typer.Option("--with", help="A setting that changes along, with as many values: run.rounds=6,7,8. Repeatable."),
    ] = None,
    split: Annotated[str | None, typer.Option(help="Values of data.split, a curve each: iid,dirichlet.")] = None,
    models: Annotated[
        str | None,
        typer.Option(help="A line in the figure with each of these models: all (of the recipe), or names a,b,c."),
    ] = None,
    methods: shared.Methods = None,
    seeds: shared.Seeds = 1,
    workers: shared.Workers = None,
    tuned: shared.Tuned = None,
    headline: Annotated[str, typer.Option(help="The model that is compared, as in `confed compare`.")] = "",
    reference: Annotated[
        list[str] | None, typer.Option(help="A method that the others are compared with; may be repeated.")
    ] = None,
    margin: shared.Margin = 1.0,
    out: Annotated[Path | None, typer.Option(help="Folder for everything. [default: runs/NAME-by-KEY]")] = None,
    on: shared.On = "",
    slurm: shared.Slurm = None,
    submit: shared.Submit = False,
    before: shared.Before = None,
    plan: shared.Plan = False,
    as_json: Json = False,
) -> None:
    """Compare methods for each value of a setting, such as the number of clients: one table and one figure.

    `confed sweep feddat_function --over data.shards=1,2,3,4,5 --with run.rounds=6,7,8,9,10 --methods adapter,feddat
    --seeds 3`. The same command goes on after an interruption, and adds values, methods and seeds.

    `confed sweep modalities algorithm.lam=0.1,0.3,0.5 --split iid,dirichlet --methods local,modality_transformer
    --reference local` has a line for each way of splitting the data, and the improvement relative to the reference.
    """
    from confed.recipes.recipe import load_recipe
    from confed.results.sweep import MODELS
    from confed.studies.study import Axis, Grid, models_of, parse_axis, points_of

    if "=" in recipe and not Path(recipe).is_file():
        raise ValueError(f"a sweep needs a recipe before its settings, as in `confed sweep modalities {recipe}`")
    judged, cluster = shared.judged_by(reference, margin, headline), shared.Cluster(on, slurm, submit, before)
    address, overrides = shared.with_address(on, recipe, list(overrides or []))
    if not over:
        several = [text for text in overrides if "=" in text and len(parse_axis(text).values) > 1]
        if len(several) == 1:
            over = several[0]
            overrides.remove(over)
    axis, beside = parse_axis(over), [parse_axis(text) for text in along or ()]
    if split is not None and models is not None:
        raise ValueError("--split and --models both tell the lines of the figure apart; give one of them")
    by = None if split is None else parse_axis(f"data.split={split}")
    if models is not None:
        by = Axis(MODELS, models_of(load_recipe(recipe, overrides), models))
    points, values = points_of(axis, beside, by), shared.tuned_values(tuned, recipe, overrides, seeds)
    by_key = "" if by is None else by.key
    grid = Grid(recipe, overrides, methods, headline, values, seeds, points, axis.key, by_key)
    for loaded, _ in grid.recipes.values():
        for name in judged.references:
            if name not in loaded.methods:
                raise ValueError(f"--reference {name} is none of the methods compared: {', '.join(loaded.methods)}")
    if plan:
        shared.show_grid_plan(grid, workers, cluster.options, as_json)
        return
    root = out or Path("runs") / f"{shared.base_name(recipe)}-by-{axis.key.rpartition('.')[2]}"
    grid.open(root, asdict(judged))
    shared.carry_out(root, cluster, address, workers, as_json)


# Cells: one run of a study, as an array task of a cluster computes it ---------------------------------------------

AGAIN = 75
"""Exit code of a cell that stopped before its end and goes on when it is started again (EX_TEMPFAIL of sysexits.h)."""


@app.command(rich_help_panel="Train")
def cell(
    study: Annotated[Path, typer.Argument(help="Folder of a study or sweep, written with --on.")],
    number: Annotated[
        int | None, typer.Argument(help="Of the cell, from 1. [default: of this array task]", show_default=False)
    ] = None,
    grace: Annotated[
        float, typer.Option(help="Seconds after SIGUSR1 within which the round under way may end.")
    ] = 90.0,
) -> None:
    """Compute or continue one run of a study, such as an array task of a cluster does.

    `confed compare --recipe RECIPE --on slurm` writes the study and a job script whose tasks call this. Exit codes: 0
    done, 75 stopped before the end (SIGUSR1) and to be started again, 143 asked to end (SIGTERM).
    """
    from confed.api.progress import Display
    from confed.federation.checkpoint import CorruptCheckpoint
    from confed.studies.cells import find_cell
    from confed.studies.cluster import array_index
    from confed.studies.runner import complete, one_job
    from confed.system.events import Progress

    if not grace >= 0:
        raise ValueError(f"--grace must be at least 0 seconds, got {grace}")
    wanted = array_index(os.environ) if number is None else number
    if wanted is None:
        raise ValueError(f"give the number of a cell: confed cell {study} NUMBER (this is no array task)")
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
    from confed.federation.checkpoint import Checkpoints

    return max(Checkpoints(folder / "checkpoint").rounds(), default=0)


def _stopped(number: int, folder: Path, before: int, limit: bool) -> None:
    """What follows a stop: the task is queued again if it was the time limit, and some round was finished."""
    from confed.studies.cluster import requeue
    from confed.studies.runner import leave_error

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


# Verbs that choose settings and judge benchmarks ------------------------------------------------------------------


@app.command(rich_help_panel="Compare")
def tune(
    recipe: shared.RecipeName = "fedvqa_scenes",
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="section.key=value with a TOML value, e.g. run.rounds=3", autocompletion=complete_key),
    ] = None,
    budget: Annotated[int, typer.Option(help="Configurations per method, the recipe's included.")] = 6,
    methods: shared.Methods = None,
    seed: Annotated[int, typer.Option(help="Seed of the tuning runs, never used for reported results.")] = 100,
    seeds: Annotated[int, typer.Option(help="Seeds of each configuration, counted from --seed; scores are means.")] = 1,
    workers: Annotated[
        int | None, typer.Option(help="Methods in parallel, one process each. [default: one per core; one on a GPU]")
    ] = None,
    prune: Annotated[
        bool,
        typer.Option(
            help="Stop configurations early that lie two standard errors below the median, two rounds in a row."
        ),
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the scores. [default: runs/NAME-tune]")] = None,
    as_json: Json = False,
) -> None:
    """Choose each method's settings on the clients' validation data, with the same budget for all.

    Writes scores.csv and tuned.toml (for `confed compare --tuned`). The same command goes on after an interruption.
    """
    from confed.api.progress import Display
    from confed.studies import tune as tuning
    from confed.studies.study import load_rows

    loaded, _ = load_rows(recipe, overrides or [], methods)
    folder = out or Path("runs") / f"{loaded.name}-tune"
    count = workers if workers is not None else shared.default_workers(loaded)
    try:
        with Display(console, quiet=as_json or is_quiet()) as display:
            tuning_result = tuning.tune(
                loaded, folder, budget=budget, seed=seed, seeds=seeds, workers=count, progress=display, prune=prune
            )
    except KeyboardInterrupt:
        say("[yellow]stopped;[/] every finished configuration is saved. Go on with the same command")
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        rows = [{**asdict(tuned), "lead": tuned.lead} for tuned in tuning_result]
        print_json(plain({"folder": str(folder), "methods": rows}))
    else:
        print_table(_table(tuning_result))
        for tuned in tuning_result:
            if tuned.lead:
                print_line(escape(f"{tuned.label}: {tuned.lead}"))
        for tuned in tuning_result:
            if tuned.error:
                print_line(f"[red]without[/] {escape(tuned.label)}: {escape(tuned.error)}")
        print_line(escape(f"written: {folder}/tuned.toml, scores.csv"))
    if any(tuned.failed or (tuned.trials and tuned.best is None) for tuned in tuning_result):
        raise typer.Exit(FAILED)


def _table(rows: "list[TunedRow]") -> "Table":
    from confed.studies.tuned import in_words

    numbers = ("recipe's own", "chosen's", "tried", "pruned")
    title = "Chosen on validation data"
    table = table_of("method", "chosen", *numbers, right=numbers, title=title, title_justify="left")
    for tuned in rows:
        default_score, best = tuned.trials[0].score if tuned.trials else None, tuned.best
        table.add_row(
            escape(tuned.label),
            escape(in_words(best.values)) if best else "–",
            "–" if default_score is None else f"{default_score:.1%}",
            "–" if best is None else f"{best.score:.1%}",
            str(len(tuned.trials)),
            str(sum(trial.state == "pruned" for trial in tuned.trials)),
        )
    return table


@app.command(rich_help_panel="Compare")
def gates(
    source: Annotated[
        str, typer.Argument(help="A recipe file, the name of a packaged one, or the folder of a finished study.")
    ] = "modalities",
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value with a TOML value, e.g. data.train=100")
    ] = None,
    methods: shared.Methods = None,
    seeds: shared.Seeds = 1,
    workers: shared.Workers = None,
    tuned: shared.Tuned = None,
    longer: Annotated[
        Path | None, typer.Option(help="Of a finished study: the same rows with at least 1.5 times the rounds.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the runs and gates.json. [default: runs/NAME-gates]")
    ] = None,
    as_json: Json = False,
) -> None:
    """Judge whether a benchmark can show what methods claim: head-room, convergence, order, ceiling, floors.

    Of a recipe all rows are run with its rounds and with 1.5 times as many, a local and a centralised row included;
    finished runs are reused. Of a study's folder nothing is run. The exit status is 0 whether gates are passed or not.
    """
    from confed.results.folder import kind_of
    from confed.studies.gates import judged
    from confed.studies.study import read_study

    root = Path(source)
    if kind_of(root) == "study":
        if overrides or methods or tuned or seeds != 1:
            raise ValueError(
                "of a finished study nothing is run: overrides, --methods, --seeds and --tuned need a recipe"
            )
        recipe, folder = read_study(root).recipe, root
    else:
        if longer is not None:
            raise ValueError("--longer is for a finished study; of a recipe the longer runs are made")
        out = out or Path("runs") / f"{shared.base_name(source)}-gates"
        recipe, folder, longer = _run(source, overrides or [], methods, seeds, workers, tuned, out, as_json)
    judgement = judged(recipe, folder, longer)
    content = plain({"recipe": recipe.name, "rounds": recipe.run.rounds, "gates": [vars(gate) for gate in judgement]})
    if out is not None:
        from confed.federation.checkpoint import write_atomically

        out.mkdir(parents=True, exist_ok=True)
        write_atomically(out / "gates.json", (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())
    if as_json:
        print_json(content)
        return
    print_table(_gates_table(recipe, judgement))
    if out is not None:
        say(escape(f"written: {out}/gates.json"))


def _run(
    source: str, overrides: list[str], methods: str | None, seeds: int, workers: int | None, tuned: Path | None,
    out: Path, as_json: bool,
) -> "tuple[Recipe, Path, Path]":  # fmt: skip
    """Missing runs of a recipe with its rounds and with more; the recipe, and the folders of both studies."""
    from confed.studies.gates import with_references, with_rounds
    from confed.studies.runner import run_study
    from confed.studies.study import load_rows, open_study

    loaded, used = load_rows(source, overrides, methods, "", shared.tuned_values(tuned, source, overrides, seeds))
    recipe = with_references(loaded)
    folders: list[Path] = []
    for each in (recipe, with_rounds(recipe)):
        folder = out / f"rounds-{each.run.rounds}"
        open_study(each, folder, range(each.run.seed, each.run.seed + seeds), used)
        with showing(folder, as_json, "the same command") as display:
            outcome = run_study(folder, display, workers if workers is not None else shared.default_workers(each))
        for cell, error in outcome.errors.items():
            complain(f"without {cell}: {error}", "note")
        folders.append(folder)
    return recipe, folders[0], folders[1]


def _gates_table(recipe: "Recipe", gates: "Sequence[Gate]") -> "Table":
    verdicts = {True: "[green]passed[/]", False: "[red]failed[/]", None: "not judged"}
    title = f"{recipe.name}: whether differences between methods could show, {recipe.run.rounds} rounds"
    table = table_of("gate", "asked", "found", "", title=escape(title), title_justify="left")
    for gate in gates:
        text = gate.found.removeprefix("not judged: ")
        table.add_row(gate.key, escape(gate.asked), escape(text), verdicts[gate.passed])
    return table

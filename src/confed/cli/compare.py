"""Verbs that compare methods, settings and results with published ones: compare, tune, reproduce."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from confed.cli import cells
from confed.cli import study as shared
from confed.cli.app import (
    FAILED,
    answer,
    app,
    argument,
    complain,
    console,
    for_people,
    option,
    print_table,
    print_tables,
    say,
    showing,
    tell_asks,
)
from confed.cli.completion import complete_recipe
from confed.cli.plan import show_grid_plan
from confed.system.plain_text import visible

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from confed.recipes.recipe import Recipe
    from confed.report.tables.models import ModelStudies
    from confed.report.tables.table import Table
    from confed.results.runs import StudyResults
    from confed.studies.reproduce import Verdict


@app.command()
def compare(
    sources: Annotated[
        list[str],
        argument(
            "A recipe to run, with overrides; or run and study folders.",
            metavar="RECIPE [KEY=VALUE]... | FOLDER...",
            autocompletion=complete_recipe,
        ),
    ],
    methods: shared.Methods = None,
    seeds: Annotated[int, option("Number of seeds, counted from the recipe's.")] = 1,
    over: Annotated[str, option("A setting and its values: data.shards=1,2,3.", metavar="KEY=VALUES")] = "",
    along: Annotated[
        list[str] | None, option("A setting that changes along; repeatable.", "--with", metavar="KEY=VALUES")
    ] = None,
    split: Annotated[str | None, option("With --over: values of data.split, a curve each.")] = None,
    models: Annotated[str | None, option("The same with each of these models: a,b,c, or all.")] = None,
    gates: Annotated[bool, option("Judge the benchmark in place of the methods.", "--gates")] = False,
    tuned: Annotated[Path | None, option("The tuned.toml of `confed tune` to use.")] = None,
    workers: shared.Workers = None,
    on: Annotated[str, option("Run on a Ray cluster (ray); write a job array (slurm, script).", "--on")] = "",
    slurm: Annotated[list[str] | None, option("Options of sbatch: partition=gpu,time=4:00:00.", "--slurm")] = None,
    submit: Annotated[bool, option("With --on slurm: submit the job array.", "--submit")] = False,
    before: Annotated[list[str] | None, option("Shell before each task; repeatable.", "--before")] = None,
    plan: shared.Plan = False,
    reference: Annotated[
        list[str] | None, option("Compare with this method; repeatable. [default: FedAvg and alike]")
    ] = None,
    relative: Annotated[str, option("Show this method's relative improvement by client.")] = "",
    headline: Annotated[str, option("The model in `deployed`: personal or global_seen.")] = "",
    margin: Annotated[float, option("Points within which methods count as equal.")] = 1.0,
    results: Annotated[Path | None, option("Write results files for `confed reproduce` here.")] = None,
    out: Annotated[Path | None, option("Folder of the runs; of folders: for the tables.")] = None,
) -> None:
    """Compare methods, models or values of a setting.

    Tests are paired, over seeds and over examples. Runs what is missing of the recipe's grid, or reads the folders that
    are given. The same command goes on after an interruption, and adds methods, seeds, values and models. With --gates:
    whether the benchmark can show what methods claim, by a local and a centralised row and 1.5 times the rounds.
    """
    from confed.studies.study import grid_of

    judged = shared.judged_by(reference, margin, headline, relative, gates)
    cluster = cells.Cluster(on, slurm, submit, before)
    rows_given = {"--methods": methods, "--models": models, "--workers": workers, "--tuned": tuned, "--over": over,
                  "--with": along, "--split": split, "--plan": plan, "--on": on}  # fmt: skip
    if Path(sources[0]).is_dir():
        given = [name for name, value in rows_given.items() if value]
        if given or seeds != 1:
            raise ValueError(f"{(given or ['--seeds'])[0]} goes with a recipe; {sources[0]} is a folder")
        _of_folders(list(map(Path, sources)), reference, judged, headline, results, out)
        return
    if results is not None:
        raise ValueError("--results is of runs that are there: `confed compare STUDY --results DIR`")
    recipe, *overrides = sources
    if "/" in recipe and not recipe.endswith(".toml"):
        raise ValueError(f"{recipe} is neither a folder of runs nor a recipe (`confed list recipes`, or FILE.toml)")
    if "=" in recipe and not Path(recipe).is_file():
        raise ValueError(f"a recipe comes before its settings, as in `confed compare modalities {recipe}`")
    axes = {"over": over, "along": along or (), "split": split, "models": models, "gates": gates}
    address, overrides = cells.with_address(on, recipe, overrides)
    values = shared.tuned_values(tuned, recipe, overrides, seeds)
    grid = grid_of(recipe, overrides, **axes, methods=methods, headline=headline, tuned=values, seeds=seeds)
    if plan:
        show_grid_plan(grid, workers, cluster.options)
        return
    tell_asks(grid.first, recipe)
    folder = out or Path("runs") / grid.name
    _check_rows(grid.first, folder, judged)
    if grid.over and relative:
        raise ValueError("--relative is for one study; leave out --models and --over")
    if values is not None and (without := [row for row in grid.first.methods if row not in values]):
        complain(f"{tuned} has no values for {', '.join(without)}; the recipe's own are used", "note")
    grid.open(folder, asdict(judged))
    cells.carry_out(folder, cluster, address, workers)


def _of_folders(
    places: list[Path], references: list[str] | None, judged: shared.Judged, headline: str, results: Path | None,
    out: Path | None,
) -> None:  # fmt: skip
    """What folders that are there show: gates, cells, results files, tables."""
    from confed.studies.cells import CELLS

    if judged.gates:
        if len(places) > 2:
            raise ValueError("--gates is of a study and of the same rows with at least 1.5 times the rounds")
        shared.show_gates(places[0], places[1] if len(places) > 1 else None, out)
        return
    if len(places) == 1 and (places[0] / CELLS).is_file() and out is None:
        cells.show_cells(places[0])
        return
    if results is not None:
        _write_rows(places, results)
    _compare_folders(places, references, judged, headline, out)


def _check_rows(recipe: "Recipe", folder: Path, judged: shared.Judged) -> None:
    """Check that what the methods are judged against is among them, or among those that are there."""
    from confed.studies.study import study_in

    before = study_in(folder)
    rows = {*recipe.methods, *(() if before is None else before.recipe.methods)}
    for name_of_option, names in (("--reference", judged.references), ("--relative", filter(None, [judged.relative]))):
        for name in names:
            if name not in rows:
                raise ValueError(f"{name_of_option} {name} is none of the methods compared: {', '.join(sorted(rows))}")


def _write_rows(folders: Sequence[Path], results: Path) -> None:
    from confed.results.runs import load
    from confed.studies.published import write_rows

    studies: list[tuple[str, StudyResults]] = []
    for folder in folders:
        models = {folder / row: row for row in _models(folder)}
        studies += [(models.get(place, ""), load(place)) for place in _places([folder])]
    names = ", ".join(path.name for path in write_rows(studies, results))
    say(escape(f"written into {results}: {names}, and what each predicted as .safetensors"))


def _compare_folders(
    folders: list[Path], references: list[str] | None, judged: shared.Judged, headline: str, out: Path | None
) -> None:
    """Tables of folders that are there, written into a folder if one is given, and printed."""
    from confed.api.study import write_files
    from confed.report.comparison import compare as compare_folders
    from confed.report.tables import models as model_tables
    from confed.report.tables.table import in_files
    from confed.results.runs import load

    places = _places(folders)
    comparison = compare_folders(places, references or None, judged.margin, headline)
    studies = [load(place) for place in places]
    backbones, several = _by_backbone(studies, headline), _by_model(folders, studies, headline)
    relative_rows = comparison.relative(judged.relative) if judged.relative else None
    if out is not None:
        texts = comparison.files() | ({} if backbones is None else in_files("backbones", backbones))
        texts |= {} if several is None else model_tables.files(several, references or None)
        write_files(texts, out)
        if relative_rows is not None:
            write_files(comparison.relative_files(judged.relative), out)
        more = "" if backbones is None else ", backbones.md, .csv and .tex"
        more += "" if several is None else ", models.md, .csv and .tex"
        more += "" if relative_rows is None else ", relative.md, .csv, .tex, .png and .svg"
        text = f"written: {out}/compare.md, compare.csv, compare.tex{more}"
        console.print(escape(text), soft_wrap=True, highlight=False)
    answer(comparison.content())
    print_tables([] if backbones is None else [backbones])
    print_table(comparison.rich())
    print_tables([] if relative_rows is None else [relative_rows])
    shown = {} if several is None else model_tables.model_tables(several, references or None)
    print_tables(shown[name] for name in model_tables.shown_first(shown))


def _places(folders: Sequence[Path]) -> list[Path]:
    """Folders of studies; a folder of several models gives the studies in it."""
    from confed.results.folder import kind_of

    places: list[Path] = []
    for folder in folders:
        models = [folder / row for row in _models(folder)]
        places += [place for place in models if kind_of(place) == "study"] if models else [folder]
    return places


def _models(folder: Path) -> dict[str, str]:
    """Folder of each model's study -> label of the model; empty where a folder is no sweep over models."""
    from confed.results.folder import kind_of
    from confed.results.sweep import read_sweep

    return read_sweep(folder).models if kind_of(folder) == "sweep" else {}


def _by_backbone(studies: "Sequence[StudyResults]", headline: str) -> "Table | None":
    """Tables of several studies as one: one backbone for each study, and the same clients for all."""
    from confed.report.tables.methods import backbone, by_backbone, paper_table
    from confed.results.runs import with_deployed_of

    studies = [replace(study, runs=tuple(with_deployed_of(study.runs, headline))) for study in studies]
    tables = {backbone(study.runs): paper_table(study) for study in studies}
    same = len({table.columns for table in tables.values()}) == 1 and not _other_data(studies)
    return by_backbone(tables) if len(tables) == len(studies) > 1 and same else None


def _by_model(folders: Sequence[Path], studies: "Sequence[StudyResults]", headline: str) -> "ModelStudies | None":
    """A folder of several models, or several studies with one model each."""
    from confed.report.tables.methods import backbone
    from confed.report.tables.models import load_models, model_studies

    if len(folders) == 1 and (models := _models(folders[0])):
        return load_models(folders[0], models, headline)
    by_name = {backbone(study.runs): study for study in studies}
    if len(by_name) > 1 and (reason := _other_data(studies)):
        complain(f"no table over models: {reason}", "note")
        return None
    return model_studies(by_name, headline) if len(by_name) == len(studies) > 1 else None


def _other_data(studies: "Sequence[StudyResults]") -> str:
    """Reason why the studies cannot be of the same data; "" if they may be."""
    from confed.comparison.refusals import other_data
    from confed.results.records import record_of

    firsts = [record_of(study.runs[0]) for study in studies]
    return next(filter(None, (other_data(firsts[0], other) for other in firsts[1:])), "")


# Choice of settings ----------------------------------------------------------------------------------------------


@app.command()
def tune(
    recipe: shared.RecipeName = "fedvqa_scenes",
    overrides: shared.Overrides = None,
    budget: Annotated[int, option("Configurations per method, the recipe's included.")] = 6,
    methods: shared.Methods = None,
    seed: Annotated[int, option("Of the tuning runs; never used for reported results.")] = 100,
    seeds: Annotated[int, option("Seeds of each configuration; scores are means.")] = 1,
    workers: shared.Workers = None,
    prune: Annotated[bool, option("Stop those two standard errors below the median early.", "--prune")] = False,
    out: Annotated[Path | None, option("Folder. [default: runs/NAME-tune]")] = None,
) -> None:
    """Choose each method's settings on validation data.

    All are tried equally often. Writes scores.csv and tuned.toml (for `confed compare --tuned`). The same command goes
    on after an interruption.
    """
    from confed.studies.study import Grid

    loaded, _ = Grid(recipe, overrides or [], methods).rows()
    folder = out or Path("runs") / f"{loaded.name}-tune"
    shared.tune_rows(loaded, folder, workers, budget=budget, seed=seed, seeds=seeds, prune=prune)


# Published results, run again ------------------------------------------------------------------------------------

_COLOURS = {"equal bits": "green", "equal figures": "green", "within the interval": "green", "different": "red"}


@app.command()
def reproduce(
    source: Annotated[
        str, argument("A results file, run folder or summary.json, or the address (https://...) of one.")
    ],
    overrides: shared.Overrides = None,
    method: Annotated[str, option("Row of a table, by name or label. [default: the first]")] = "",
    seed: Annotated[int | None, option("Seed to run again. [default: the first]")] = None,
    all_seeds: Annotated[bool, option("Run all seeds of the row again.", "--all-seeds")] = False,
    out: Annotated[Path | None, option("Folder of the new runs; must not exist.")] = None,
) -> None:
    """Run a published result again and say whether it repeats.

    The verdict is one of: equal bits (history, predictions and models are the same to the last bit); equal figures
    (all published figures are the same, and there are no digests to compare); within the interval (other bits, and
    every mean lies where one more run of the published row is expected, at 95%); different. With it comes the first
    round, client and metric that differ, and what else does: data, code, packages, instruction set.

    Exit code 1 if a run is different.
    """
    from confed.studies.published import read_published
    from confed.studies.reproduce import repeat
    from confed.studies.study import free_folder

    if all_seeds and seed is not None:
        raise ValueError("--seed and --all-seeds exclude each other")
    published = read_published(source, method)
    seeds = published.seeds if all_seeds else [published.seeds[0] if seed is None else seed]
    root = out or free_folder(f"reproduced-{published.name}")
    verdicts: list[Verdict] = []
    for number in seeds:
        folder = root if len(seeds) == 1 else root / f"seed-{number}"
        with showing(folder, rounds=True) as display:
            verdicts.append(repeat(published, number, folder, overrides or [], display))
        show_verdict(verdicts[-1])
    answer({"source": source, "runs": [asdict(v) | {"folder": str(v.folder)} for v in verdicts]})
    if any(verdict.word == "different" for verdict in verdicts):
        raise typer.Exit(FAILED)


def _escape(text: str) -> str:
    """A text of the published file on one line of the terminal, which it cannot control."""
    return escape(visible(" ".join(text.split())))


def show_verdict(verdict: "Verdict") -> None:
    """The verdict in a line, the means, and below what differs."""
    bits = f" ({', '.join(verdict.compared)})" if verdict.word == "equal bits" else ""
    if verdict.word == "equal figures":
        digits = "" if verdict.digits is None else f"to {verdict.digits} digits; "
        bits = f" ({digits}the published result has no digests of its history, predictions and models)"
    colour = _COLOURS[verdict.word]
    shown = for_people()
    text = f"[{colour}]{verdict.word}[/]{bits}: {_escape(verdict.label)}, seed {verdict.seed}"
    shown.print(text, soft_wrap=True)
    print_table(_figures_table(verdict))
    for heading, lines in (("differences", verdict.where), ("what else differs", verdict.causes)):
        if lines:
            shown.print(f"{heading}:")
        for line in lines:
            shown.print(f"  {_escape(line)}", soft_wrap=True)
    shown.print(f"run: {escape(visible(str(verdict.folder)))}", soft_wrap=True)


def _figures_table(verdict: "Verdict") -> "RichTable":
    from rich import box
    from rich.table import Table

    table = Table("figure", "published", "here", "expected of one run", box=box.SIMPLE)
    for name, figure in verdict.figures.items():
        here = "none" if figure.found is None else f"{figure.found:.4f}"
        ends = "–" if figure.interval is None else f"{figure.interval[0]:.4f} to {figure.interval[1]:.4f}"
        mean = "" if figure.mean_of == 1 else f" (mean of {figure.mean_of})"
        judged = {True: "", False: " (outside)", None: " (not judged)"}[figure.inside]
        table.add_row(_escape(name), f"{figure.published:.4f}{mean}", here, f"{ends}{judged}")
    return table

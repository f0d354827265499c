"""Verbs that compare methods: compare."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from confed.cli.app import (
    FAILED,
    Json,
    Judged,
    app,
    complain,
    console,
    default_workers,
    interruptible,
    plain,
    print_json,
    print_table,
)
from confed.federation.file_names import path_of

if TYPE_CHECKING:
    from confed.report.statistics.over_models import ModelStudies
    from confed.report.tables.table import Table
    from confed.results.runs import Study
    from confed.studies.grid import Grid

__all__ = ["compare", "finish_grid"]


@app.command()
def compare(
    folders: Annotated[
        list[str] | None,
        typer.Argument(help="Run or study folders; with --recipe, section.key=value overrides."),
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="Run this recipe's methods first: what is missing, reusing what is there.")
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(help="all (the recipe's table, else every method), or names a,b,c. [default: the recipe's table]"),
    ] = None,
    models: Annotated[
        str | None,
        typer.Option(help="With --recipe: the same with each of these models: all (of the recipe), or names a,b,c."),
    ] = None,
    seeds: Annotated[int, typer.Option(help="How many seeds, counted from the recipe's.")] = 1,
    workers: Annotated[
        int | None, typer.Option(help="Runs at a time, a process each. [default: one per core; one on a GPU]")
    ] = None,
    tuned: Annotated[Path | None, typer.Option(help="Use the values of this tuned.toml of `confed tune`.")] = None,
    reference: Annotated[
        list[str] | None,
        typer.Option(
            help="A method that the others are compared with; may be repeated. [default: fedavg, fedavg_ft, adapter]"
        ),
    ] = None,
    headline: Annotated[
        str,
        typer.Option(
            help="The model that is judged in the column 'deployed': personal, or global_seen (what is global, with "
            "each client's own head; local rows their own models). [default: as the recipe and the methods say]"
        ),
    ] = "",
    margin: Annotated[float, typer.Option(help="Points within which methods count as equal (equivalence test).")] = 1.0,
    relative: Annotated[
        str,
        typer.Option(help="Also show this method's improvement over each other one, client by client, relative to it."),
    ] = "",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for compare.md, .csv and .tex; with --recipe also for the runs."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare methods over seeds and over examples, with paired tests.

    Of folders that are there, or of a whole grid of methods and seeds: `confed compare --recipe fedvqa_scenes --methods
    all --seeds 5`. The same command goes on after an interruption, and adds methods and seeds. With --models it makes a
    grid for each model, and a table of models and methods with tests over models.
    """
    from dataclasses import asdict

    from confed.report.statistics.comparison import compare as compare_folders
    from confed.report.tables import models as model_tables
    from confed.report.tables.table import in_files, to_rich
    from confed.results.deployed import check_headline

    if not 0 < margin < 100:
        raise ValueError(f"--margin must lie between 0 and 100 points, got {margin:g}")
    check_headline(headline, "--headline")
    references = Judged(tuple(reference or ()), margin / 100, relative)
    if recipe is not None:
        _compare_recipe(
            recipe, folders or [], methods, models, seeds, workers, tuned, headline, references, out, as_json
        )
        return
    if methods is not None or models is not None or workers is not None or tuned is not None or seeds != 1:
        raise ValueError("--methods, --models, --seeds, --workers and --tuned need --recipe")
    places = _places(folders or ())
    comparison = compare_folders(places, reference or None, margin / 100, headline)
    backbones, several = _by_backbone(places, headline), _by_model(folders or (), headline)
    own = comparison.relative(relative) if relative else None
    if out is not None:
        texts = comparison.files() | ({} if backbones is None else in_files("backbones", backbones))
        texts |= {} if several is None else model_tables.files(several, reference or None)
        _write(texts, out)
        if relative:
            _write(comparison.relative_files(relative), out)
        more = "" if backbones is None else ", backbones.md, .csv and .tex"
        more += "" if several is None else ", models.md, .csv and .tex"
        more += "" if own is None else ", relative.md, .csv, .tex, .png and .svg"
        text = f"written: {out}/compare.md, compare.csv, compare.tex{more}"
        console.print(escape(text), soft_wrap=True, highlight=False)
    if as_json:
        print_json(plain(asdict(comparison)))
        return
    if backbones is not None:
        print_table(to_rich(backbones))
    print_table(comparison.rich())
    if own is not None:
        print_table(to_rich(own))
    shown = {} if several is None else model_tables.model_tables(several, reference or None)
    for name in model_tables.shown_first(shown):
        print_table(to_rich(shown[name]))


def _places(folders: Sequence[str]) -> list[Path]:
    """Folders of studies; a folder of several models gives the studies in it."""
    from confed.results.folder import is_study
    from confed.studies.models import is_backbones, read_backbones

    found: list[Path] = []
    for folder in map(Path, folders):
        several = [folder / row for row in read_backbones(folder).models] if is_backbones(folder) else [folder]
        found += [place for place in several if place == folder or is_study(place)]
    return found


def _by_backbone(folders: Sequence[Path], headline: str) -> "Table | None":
    """Tables of several studies as one: one backbone for each study, and the same clients for all."""
    from dataclasses import replace

    from confed.report.tables.paper import paper_table
    from confed.report.tables.traffic import backbone, by_backbone
    from confed.results.runs import load, with_deployed_of

    studies = [load(folder) for folder in folders]
    studies = [replace(study, runs=tuple(with_deployed_of(study.runs, headline))) for study in studies]
    tables = {backbone(study.runs): paper_table(study) for study in studies}
    same = len({table.columns for table in tables.values()}) == 1 and not _other_data(studies)
    return by_backbone(tables) if len(tables) == len(studies) > 1 and same else None


def _by_model(folders: Sequence[str], headline: str) -> "ModelStudies | None":
    """A folder of several models, or several studies with one model each."""
    from confed.report.html.models_page import load_models
    from confed.report.statistics.over_models import model_studies
    from confed.report.tables.traffic import backbone
    from confed.results.runs import load
    from confed.studies.models import is_backbones, read_backbones

    if len(folders) == 1 and is_backbones(Path(folders[0])):
        return load_models(Path(folders[0]), read_backbones(Path(folders[0])).models, headline)
    studies = [load(folder) for folder in _places(folders)]
    by_name = {backbone(study.runs): study for study in studies}
    if len(by_name) > 1 and (reason := _other_data(studies)):
        complain(f"no table over models: {reason}", "note")
        return None
    return model_studies(by_name, headline) if len(by_name) == len(studies) > 1 else None


def _other_data(studies: "Sequence[Study]") -> str:
    """Reason why the studies cannot be of the same data; "" if they may be."""
    from confed.report.statistics.comparable import other_data

    firsts = [study.runs[0] for study in studies]
    return next(filter(None, (other_data(firsts[0], other) for other in firsts[1:])), "")


def _compare_recipe(
    name: str,
    overrides: list[str],
    methods: str | None,
    models: str | None,
    seeds: int,
    workers: int | None,
    tuned: Path | None,
    headline: str,
    judged: "Judged",
    out: Path | None,
    as_json: bool,
) -> None:
    from dataclasses import asdict, replace

    from confed.cli.compare_models import compare_models
    from confed.recipes.recipe import load_recipe
    from confed.studies.grid import is_grid, keep, open_grid, rows_of
    from confed.studies.study import read_study
    from confed.studies.tuned import apply, read_tuned

    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    loaded = load_recipe(name, overrides)
    loaded = replace(loaded.with_rows(rows_of(loaded, methods)), headline=headline or loaded.headline)
    folder = out or Path("runs") / f"{loaded.name}-{'compare' if models is None else 'models'}"
    there = {*loaded.methods, *(read_study(folder)[0].methods if is_grid(folder) else ())}
    named = [*(("--reference", name) for name in judged.references), ("--relative", judged.relative or None)]
    for option, wanted in named:
        if wanted is not None and wanted not in there:
            raise ValueError(f"{option} {wanted} is none of the methods compared: {', '.join(sorted(there))}")
    if models is not None and judged.relative:
        raise ValueError("--relative is for one model; leave out --models")
    numbers = range(loaded.run.seed, loaded.run.seed + seeds)
    used: Mapping[str, Mapping[str, Any]] = {}
    if tuned is not None:
        values, seed = read_tuned(tuned)
        if seed in numbers:
            raise ValueError(f"seed {seed} chose the values of {tuned}, so nothing may be reported with it")
        loaded, used = apply(loaded, values, overrides)
        without = [row for row in loaded.methods if row not in values]
        if without:
            complain(f"{tuned} has no values for {', '.join(without)}; the recipe's own are used", "note")
    if models is not None:
        compare_models(loaded, models, numbers, folder, judged, used, workers, as_json)
        return
    open_grid(loaded, folder, numbers, used)
    keep(folder, judged=asdict(judged))  # for `confed resume`
    finish_grid(folder, workers, as_json)


def finish_grid(folder: Path, workers: int | None, as_json: bool) -> None:
    """Execution of the missing cells of a grid, with its tables printed and written into its folder with the report.

    How its methods are judged stands in its index.

    Raises:
        ValueError: not one cell could be run.
        RuntimeError: the same, and one of them failed on the way.
        typer.Exit: a cell failed on the way.
    """
    from confed.cli.progress import Display
    from confed.studies.grid import run_grid
    from confed.studies.study import read_study

    recipe, index = read_study(folder)
    said = index.get("judged", {})
    judged = Judged(tuple(said.get("references", ())), said.get("margin", Judged.margin), said.get("relative", ""))
    count = workers if workers is not None else default_workers(recipe)
    with interruptible(folder), Display(console, quiet=as_json) as display:
        grid = run_grid(folder, count, display)
    if not grid.summaries:
        if grid.failed:
            first = min(grid.failed)
            raise RuntimeError(f"no run could be made: {grid.errors[first]}; see {_cell(folder, first)}/error.txt")
        raise ValueError("no run could be made: " + next(iter(_grouped(grid.errors))))
    _show(grid, judged, as_json)
    if grid.failed:
        raise typer.Exit(FAILED)


def _show(grid: "Grid", judged: Judged, as_json: bool) -> None:
    from dataclasses import asdict

    from confed.report.figures.save import save_figures
    from confed.report.report import write_report
    from confed.report.statistics.comparison import compare as compare_folders
    from confed.report.tables.paper import main_tables
    from confed.report.tables.table import to_rich
    from confed.report.tables.write import write_tables
    from confed.results.runs import load
    from confed.studies.tuned import in_words

    study = load(grid.folder)
    there = {run.method for run in study.runs if run.complete}
    for absent in [name for name in judged.references if name not in there]:
        complain(f"reference {absent!r} has no finished run", "note")
    references = [name for name in judged.references if name in there] or None
    comparison = compare_folders([grid.folder], references, judged.margin)
    tables = [p.stem for p in write_tables(grid.folder, references, judged.margin) if p.suffix == ".md"]
    figures = save_figures(grid.folder)
    own = judged.relative if judged.relative in comparison.clients_of else ""
    if own:
        _write(comparison.relative_files(own), grid.folder)
        tables.append("relative")
    elif judged.relative:
        complain(f"{judged.relative!r}, asked for with --relative, has no finished run", "note")
    page = write_report(grid.folder)
    if as_json:
        found = {"folder": str(grid.folder), "report": str(page), "runs": grid.summaries, "errors": grid.errors}
        print_json(plain({**found, "tuned": grid.tuned, "comparison": asdict(comparison)}))
        return
    for table in main_tables(study):
        print_table(to_rich(table))
    print_table(comparison.rich())
    if own:
        print_table(to_rich(comparison.relative(own)))
    shown = Console()
    if grid.tuned:
        words = "; ".join(f"{row} {in_words(values)}" for row, values in grid.tuned.items())
        shown.print(escape(f"Tuned values: {words}"), highlight=False)
    for text, cells in _grouped(grid.errors).items():
        shown.print(f"[red]without[/] {escape(', '.join(cells))}: {escape(text)}", highlight=False)
    for cell in sorted(grid.failed):
        shown.print(escape(f"what went wrong in {cell}: {grid.folder / cell}/error.txt"), soft_wrap=True)
    each = ", each" if len(tables) > 1 else ""
    text = f"tables: {grid.folder}/{' and '.join(tables)}{each} as .md, .csv and .tex"
    shown.print(escape(text), soft_wrap=True, highlight=False)
    if figures:
        shown.print(escape(f"figures: {figures[0].parent}, as .png and .svg"), soft_wrap=True, highlight=False)
    shown.print(f"report: {escape(str(page))}", soft_wrap=True, highlight=False)


def _cell(folder: Path, name: str) -> Path:
    """The folder of a cell "row/seed-n"."""
    row, _, seed = name.rpartition("/")
    return path_of(folder, row) / seed


def _grouped(errors: Mapping[str, str]) -> dict[str, list[str]]:
    """Reason -> its cells; all seeds of a refused method give one line."""
    found: dict[str, list[str]] = {}
    for cell, text in errors.items():
        found.setdefault(text, []).append(cell)
    return found


def _write(files: Mapping[str, str] | Mapping[str, bytes], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

"""Grids over several models: the part of ``confed compare`` behind ``--models``."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape

from confed.cli.app import FAILED, complain, console, interruptible, plain, print_json, print_table, say
from confed.federation.file_names import name_of_file

if TYPE_CHECKING:
    from confed.cli.app import Judged
    from confed.recipes.recipe import Recipe
    from confed.studies.grid import Grid

__all__ = ["compare_models", "finish_models", "show_models"]


def compare_models(
    recipe: "Recipe",
    wanted: str,
    seeds: range,
    root: Path,
    judged: "Judged",
    used: Mapping[str, Mapping[str, Any]],
    workers: int | None,
    as_json: bool,
) -> None:
    """Opens a grid per model and runs them all.

    Args:
        recipe: with the wanted methods as its rows.
        wanted: as ``--models`` has it.
        seeds: of all cells.
        root: the folder of all grids.
        judged: how methods are judged.
        used: row -> values that tuning chose, in the recipe already.
        workers: runs at a time; None for one per core.
        as_json: print JSON and nothing else.
    """
    from dataclasses import asdict

    from confed.studies.grid import keep, open_grid
    from confed.studies.models import models_of, open_backbones

    rows = models_of(recipe, wanted)
    _, recipes = open_backbones(recipe, rows, root, references=judged.references, margin=judged.margin)
    # All grids are opened before the first run, so that what does not fit is said at once, and `confed resume` knows
    # everything that was asked for.
    for row, own in recipes.items():
        open_grid(own, root / row, seeds, used)
        keep(root / row, judged=asdict(judged))
    finish_models(root, workers, as_json)


def finish_models(root: Path, workers: int | None, as_json: bool) -> None:
    """Execution of the missing runs, model by model, with the tables written and printed.

    No run at all and another process in the folder are a ValueError; a failed run and Ctrl-C end with a typer.Exit.
    """
    from confed.system.folder_lock import exclusive

    with exclusive(root):
        _finish_all(root, workers, as_json)


def _finish_all(root: Path, workers: int | None, as_json: bool) -> None:
    from confed.studies.grid import is_grid
    from confed.studies.models import read_backbones

    index = read_backbones(root)
    grids: dict[str, Grid] = {}
    for number, (row, label) in enumerate(index.models.items(), 1):
        if is_grid(root / row):
            if not as_json:
                say(rf"\[{number}/{len(index.models)}] {escape(label)}")
            with interruptible(root):
                grids[row] = _finish(root / row, index.references, index.margin, workers, as_json)
    errors = {f"{row}/{cell}": text for row, grid in grids.items() for cell, text in grid.errors.items()}
    if not any(grid.summaries for grid in grids.values()):
        raise ValueError("no run could be made: " + next(iter(errors.values()), "the folder holds no grid"))
    show_models(root, as_json, errors)
    for text in dict.fromkeys(errors.values()):
        complain(f"{', '.join(cell for cell, why in errors.items() if why == text)}: {text}", "without")
    if any(grid.failed for grid in grids.values()):
        raise typer.Exit(FAILED)


def _finish(folder: Path, references: tuple[str, ...], margin: float, workers: int | None, as_json: bool) -> "Grid":
    """Runs one model's grid and writes its tables and report where something is new."""
    from confed.cli.app import default_workers
    from confed.cli.progress import Display
    from confed.report.report import write_report
    from confed.report.tables.write import write_tables
    from confed.studies.grid import run_grid
    from confed.studies.study import read_study

    before = set(folder.glob("*/seed-*/summary.json"))
    count = workers if workers is not None else default_workers(read_study(folder)[0])
    with Display(console, quiet=as_json) as display:
        grid = run_grid(folder, count, display)
    after = set(folder.glob("*/seed-*/summary.json"))
    if grid.summaries and (after != before or not (folder / "report.html").is_file()):
        there = {name_of_file(path.parent.parent.name) for path in after}
        write_tables(folder, [name for name in references if name in there] or None, margin)
        write_report(folder)
    return grid


def show_models(root: Path, as_json: bool, errors: Mapping[str, str] | None = None) -> None:
    """Tables of several models, of the finished runs, written and printed.

    No finished run is a ValueError.

    Args:
        root: the folder of all grids.
        as_json: print JSON and nothing else.
        errors: "model/method/seed-n" -> why that run is not there.
    """
    from dataclasses import asdict

    from confed.report.html.models_page import write_models
    from confed.report.statistics.over_models import pairs_over_models
    from confed.report.tables.models import model_tables, pairs_of, shown_first
    from confed.report.tables.table import to_rich
    from confed.studies.models import read_backbones

    index = read_backbones(root)
    finished = [path for row in index.models for path in (root / row).glob("*/seed-*/summary.json")]
    there = {name_of_file(path.parent.parent.name) for path in finished}
    for absent in [name for name in index.references if name not in there]:
        complain(f"reference {absent!r} has no finished run", "note")
    references = tuple(name for name in index.references if name in there) or None
    studies, paths = write_models(root, index.models, references)
    if as_json:
        pairs = pairs_of(studies, references)
        tests = {
            measure: [asdict(pair) for pair in pairs_over_models(cells, pairs)]
            for measure, cells in studies.measures.items()
        }
        found = {"folder": str(root), "kind": studies.kind, "values": studies.measures, "pairs": tests}
        print_json(plain({**found, "errors": dict(errors or {})}))
        return
    tables = model_tables(studies, references)
    for name in shown_first(tables):
        print_table(to_rich(tables[name]))
    files = ", ".join(str(path.relative_to(root)) for path in paths)
    Console().print(f"written to {escape(str(root))}: {escape(files)}", soft_wrap=True, highlight=False)

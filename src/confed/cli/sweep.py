"""Verbs that repeat a study for several values of a setting: sweep."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from confed.cli.app import (
    FAILED,
    INTERRUPTED,
    Json,
    app,
    complain,
    console,
    default_workers,
    plain,
    print_json,
    print_table,
    say,
)

__all__ = ["finish_sweep", "sweep"]


@app.command()
def sweep(
    recipe: Annotated[
        str, typer.Argument(help="A recipe file, or the name of a packaged one (`confed list recipes`).")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value with a TOML value, for all values.")
    ] = None,
    over: Annotated[
        str, typer.Option(help="The setting and its values: data.shards=1,2,3. [default: the override with several]")
    ] = "",
    along: Annotated[
        list[str] | None,
        typer.Option("--with", help="A setting that changes with it, as many values: run.rounds=6,7,8. Repeatable."),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(help="A line in the figure for each of these values of data.split: iid,dirichlet."),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(help="all (the recipe's table, else every method), or names a,b,c. [default: the recipe's table]"),
    ] = None,
    seeds: Annotated[int, typer.Option(help="How many seeds, counted from the recipe's.")] = 1,
    workers: Annotated[
        int | None, typer.Option(help="Runs at a time, a process each. [default: one per core; one on a GPU]")
    ] = None,
    tuned: Annotated[Path | None, typer.Option(help="Use the values of this tuned.toml of `confed tune`.")] = None,
    headline: Annotated[str, typer.Option(help="The model that is judged, as in `confed compare`.")] = "",
    reference: Annotated[
        list[str] | None, typer.Option(help="A method that the others are compared with; may be repeated.")
    ] = None,
    margin: Annotated[float, typer.Option(help="Points within which methods count as equal (equivalence test).")] = 1.0,
    out: Annotated[Path | None, typer.Option(help="Folder for everything. [default: runs/NAME-by-KEY]")] = None,
    as_json: Json = False,
) -> None:
    """Compare methods for each value of a setting, such as the number of clients: one table and one figure.

    `confed sweep feddat_function --over data.shards=1,2,3,4,5 --with run.rounds=6,7,8,9,10 --methods adapter,feddat
    --seeds 3`. The same command goes on after an interruption, and adds values, methods and seeds.

    `confed sweep modalities algorithm.lam=0.1,0.3,0.5 --split iid,dirichlet --methods local,modality_transformer
    --reference local` has a line for each way of splitting the data, and the improvement relative to the reference.
    """
    from dataclasses import asdict

    from confed.cli.app import Judged
    from confed.recipes.recipe import load_recipe
    from confed.results.deployed import check_headline
    from confed.studies.grid import keep, open_grid
    from confed.studies.sweep import open_sweep, parse_axis
    from confed.studies.tuned import read_tuned

    if "=" in recipe and not Path(recipe).is_file():
        raise ValueError(f"a sweep needs a recipe before its settings, as in `confed sweep modalities {recipe}`")
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    if not 0 < margin < 100:
        raise ValueError(f"--margin must lie between 0 and 100 points, got {margin:g}")
    check_headline(headline, "--headline")
    overrides = list(overrides or [])
    if not over:
        several = [text for text in overrides if "=" in text and len(parse_axis(text).values) > 1]
        if len(several) == 1:
            over = several[0]
            overrides.remove(over)
    axis, beside = parse_axis(over), [parse_axis(text) for text in along or ()]
    by = None if split is None else parse_axis(f"data.split={split}")
    values: Mapping[str, Mapping[str, Any]] | None = None
    if tuned is not None:
        values, chosen = read_tuned(tuned)
        first = load_recipe(recipe, overrides).run.seed
        if chosen in range(first, first + seeds):
            raise ValueError(f"seed {chosen} chose the values of {tuned}, so nothing may be reported with it")
    judged = Judged(tuple(reference or ()), margin / 100)
    name = Path(recipe).name.removesuffix(".toml")
    root = out or Path("runs") / f"{name}-by-{axis.key.rpartition('.')[2]}"
    _, recipes = open_sweep(
        recipe, overrides, axis, beside, root,
        methods=methods, headline=headline, references=judged.references, margin=judged.margin, tuned=values, by=by,
    )  # fmt: skip
    # All grids are opened before the first run, so that what does not fit is said at once, and `confed resume`
    # knows everything that was asked for.
    for folder, (loaded, used) in recipes.items():
        open_grid(loaded, root / folder, range(loaded.run.seed, loaded.run.seed + seeds), used)
        keep(root / folder, judged=asdict(judged))
    finish_sweep(root, workers, as_json)


def finish_sweep(root: Path, workers: int | None, as_json: bool) -> None:
    """Execution of the missing runs of a sweep, value by value, with its table written and printed.

    No run at all and another process in the folder are a ValueError; a failed run and Ctrl-C end with a typer.Exit.
    """
    from confed.system.folder_lock import exclusive

    with exclusive(root):
        _finish(root, workers, as_json)


def _finish(root: Path, workers: int | None, as_json: bool) -> None:
    from confed.cli.progress import Display
    from confed.report.report import write_report
    from confed.report.tables.sweep import write_sweep
    from confed.report.tables.table import to_rich
    from confed.report.tables.write import write_tables
    from confed.results.sweep import read_sweep
    from confed.studies.grid import Grid, borrow, is_grid, run_grid
    from confed.studies.study import read_study

    index = read_sweep(root)
    grids: dict[str, Grid] = {}
    for number, point in enumerate(index.points, 1):
        folder = root / point.folder
        if not is_grid(folder):
            continue
        if not as_json:
            say(f"[{number}/{len(index.points)}] {escape(', '.join(point.overrides))}".replace("[", r"\[", 1))
        count = workers if workers is not None else default_workers(read_study(folder)[0])
        before = _finished(folder)
        borrow(folder, [root / other.folder for other in index.points if other is not point])
        try:
            with Display(console, quiet=as_json) as display:
                grid = grids[point.folder] = run_grid(folder, count, display)
        except KeyboardInterrupt:
            say(f"[yellow]stopped;[/] what is finished is saved. Go on with:\n  confed resume {escape(str(root))}")
            raise typer.Exit(INTERRUPTED) from None
        if grid.summaries and (_finished(folder) != before or not (folder / "report.html").is_file()):
            there = {str(job["method"]) for job in read_study(folder)[1]["runs"]}
            write_tables(folder, [name for name in index.references if name in there] or None, index.margin)
            write_report(folder)
    errors = {f"{place}/{cell}": text for place, grid in grids.items() for cell, text in grid.errors.items()}
    if not any(grid.summaries for grid in grids.values()):
        raise ValueError("no run could be made: " + next(iter(errors.values()), "the folder holds no grid"))
    table, paths = write_sweep(root)
    if as_json:
        import json

        results = json.loads((root / "results.json").read_text(encoding="utf-8"))
        print_json(plain({"folder": str(root), **results, "errors": errors}))
    else:
        print_table(to_rich(table))
        files = ", ".join(str(path.relative_to(root)) for path in paths)
        Console().print(f"written to {escape(str(root))}: {escape(files)}", soft_wrap=True, highlight=False)
    for text in dict.fromkeys(errors.values()):
        complain(f"{', '.join(cell for cell, why in errors.items() if why == text)}: {text}", "without")
    if any(grid.failed for grid in grids.values()):
        raise typer.Exit(FAILED)


def _finished(folder: Path) -> set[Path]:
    """Finished runs of a grid."""
    return set(folder.glob("*/seed-*/summary.json"))

"""Verbs that run things: run, resume, report."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from confed.cli.app import Json, app, complain, is_quiet, say, show, showing, tell_asks
from confed.cli.completion import complete_folder, complete_key, complete_method
from confed.cli.study import Plan, RecipeName, finish, rows_of_study, show_plan, show_sweep
from confed.system.collector import collector_at_rest


@app.command(rich_help_panel="Train")
def run(
    recipe: RecipeName = "fedvqa_scenes",
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="section.key=value with a TOML value, e.g. algorithm.lam=0.5; '~section.key' removes a key",
            autocompletion=complete_key,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results; must not exist. By default under runs/.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed (the recipe's by default).")] = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds, counted from the first.")] = 1,
    workers: Annotated[int | None, typer.Option(help="Processes; 0 = one per core.")] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Methods, or rows of the recipe, instead of the recipe's: a,b,c.",
            show_default=False,
            autocompletion=complete_method,
        ),
    ] = None,
    plan: Plan = False,
    as_json: Json = False,
) -> None:
    """Run a recipe; without arguments, the built-in benchmark.

    Several methods or seeds make a study folder with one run folder each.

    Ctrl-C stops; `confed resume FOLDER` goes on exactly there.
    """
    with collector_at_rest():
        from confed.engines.workers import free_cores
        from confed.recipes.recipe import load_recipe
        from confed.studies.runner import run_single, run_study
        from confed.studies.study import create_study, free_folder

    overrides = list(overrides or [])
    # `confed run algorithm.lam=0.5` means the default recipe
    if "=" in recipe or (recipe.startswith("~") and "/" not in recipe):
        overrides.insert(0, recipe)
        recipe = "fedvqa_scenes"
    overrides += [f"run.{key}={value}" for key, value in (("seed", seed), ("workers", workers)) if value is not None]
    rows = [] if methods is None else [name.strip() for name in methods.split(",") if name.strip()]
    if methods is not None and (not rows or len(set(rows)) < len(rows)):
        raise ValueError(f"--methods takes different names with commas between them, got {methods!r}")
    if rows:  # known before the recipe is checked: overrides may have settings of these rows
        overrides.append(f"study.methods={json.dumps(rows)}")
    with collector_at_rest():  # methods, models and datasets are imported here
        loaded = load_recipe(recipe, overrides)
    if rows:
        loaded = loaded.with_rows(rows)
    tell_asks(loaded, recipe)
    if plan:
        show_plan(rows_of_study(loaded), seeds, loaded.run.workers or free_cores(), False, None, as_json)
        return
    folder = out or free_folder(loaded.name)
    with showing(folder, as_json, rounds=True) as display:
        if loaded.methods or seeds != 1:
            create_study(loaded, folder, seeds)
            summaries = run_study(folder, display).summaries
        else:
            summaries = [run_single(loaded, folder, display)]
    for key in ("account", "read"):
        if (told := summaries[0].get("facts", {}).get(key)) and not as_json and not is_quiet():
            say(f"data: {escape(told)}")
    show(folder, summaries, as_json)


@app.command(rich_help_panel="Train")
def resume(
    folder: Annotated[Path, typer.Argument(help="A run, study or sweep folder.", autocompletion=complete_folder)],
    as_json: Json = False,
) -> None:
    """Continue an interrupted run, study or sweep where it stopped, with the same result."""
    finish(folder, None, as_json)


@app.command(rich_help_panel="Compare")
def report(
    folder: Annotated[
        Path, typer.Argument(help="A run, study or sweep folder, finished or not.", autocompletion=complete_folder)
    ],
    figures: Annotated[
        bool, typer.Option("--figures", help="Also write the figures into figures/, as PNG and SVG.")
    ] = False,
    methods: Annotated[str | None, typer.Option(help="With --figures: only these rows, a,b,c. [default: all]")] = None,
    as_json: Json = False,
) -> None:
    """Write report.html again and show the table."""
    from confed.report.figures.save import save_figures
    from confed.results.folder import kind_of, run_folders
    from confed.results.runs import load
    from confed.results.sweep import read_sweep

    if kind_of(folder) == "sweep":
        if figures or methods:
            first = folder / next((point.folder for point in read_sweep(folder).points), "STUDY")
            raise ValueError(f"figures are of one study: give the folder of one in {folder}, such as {first}")
        show_sweep(folder, as_json)
        return
    folders = run_folders(folder)
    # Rows of one method are told apart by the study's labels, which a run does not know.
    labels = {run.folder: run.label for run in load(folder).runs if run.complete}
    summaries = [{**_summary(place), "label": labels[place]} for place in folders if place in labels]
    chosen = [name.strip() for name in (methods or "").split(",") if name.strip()]
    if chosen and not figures:
        raise ValueError("--methods needs --figures")
    if figures and not save_figures(folder, methods=chosen):
        complain(f"{folder} has no results to draw yet", "note")
    show(folder, summaries, as_json)


def _summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))

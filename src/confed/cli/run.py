"""Verbs that run things: run, resume, report."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from confed.cli.app import (
    Json,
    app,
    complain,
    console,
    interruptible,
    show,
)
from confed.system.events import JobsPlanned


@app.command()
def run(
    recipe: Annotated[
        str, typer.Argument(help="A recipe file, or the name of a packaged one (`confed list recipes`).")
    ] = "fedvqa_scenes",
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="section.key=value with a TOML value, e.g. algorithm.lam=0.5; '~section.key' takes a key away"
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results; must not exist. By default under runs/.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed (the recipe's by default).")] = None,
    seeds: Annotated[int, typer.Option(help="How many seeds to run, counted from the first.")] = 1,
    workers: Annotated[int | None, typer.Option(help="Processes; 0 = one per core.")] = None,
    methods: Annotated[
        str | None,
        typer.Option(help="Methods, or rows of the recipe, in place of the recipe's: a,b,c.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a recipe; without arguments, the built-in benchmark.

    Several methods or seeds make a study folder with one run folder each.

    Ctrl-C stops; `confed resume FOLDER` goes on exactly there.
    """
    from confed.cli.progress import Display
    from confed.recipes.recipe import load_recipe
    from confed.studies import study

    overrides = list(overrides or [])
    # `confed run algorithm.lam=0.5` means the default recipe
    if "=" in recipe or (recipe.startswith("~") and "/" not in recipe):
        overrides.insert(0, recipe)
        recipe = "fedvqa_scenes"
    overrides += [f"run.{key}={value}" for key, value in (("seed", seed), ("workers", workers)) if value is not None]
    loaded = load_recipe(recipe, overrides)
    if methods is not None:
        rows = [name.strip() for name in methods.split(",") if name.strip()]
        if not rows or len(set(rows)) < len(rows):
            raise ValueError(f"--methods takes different names with commas between them, got {methods!r}")
        loaded = loaded.with_rows(rows)
    folder = out or study.free_folder(loaded.name)
    with interruptible(folder), Display(console, quiet=as_json, rounds=True) as display:
        if loaded.methods or seeds != 1:
            study.create_study(loaded, folder, seeds)
            summaries = study.run_study(folder, display)
        else:
            job = study.Job(loaded.sections["algorithm"]["name"], loaded.run.seed, ".")
            display(JobsPlanned([job.title]))
            summaries = [study.run_job(loaded, folder, display)]
    show(folder, summaries, as_json)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="A run, study or sweep folder, or one of several models.")],
    as_json: Json = False,
) -> None:
    """Continue an interrupted run, study, grid or sweep exactly where it stopped."""
    from confed.cli.compare import finish_grid
    from confed.cli.compare_models import finish_models
    from confed.cli.progress import Display
    from confed.cli.sweep import finish_sweep
    from confed.studies import study
    from confed.studies.grid import is_grid
    from confed.studies.models import is_backbones
    from confed.studies.sweep import is_sweep

    if (folder / "members.json").is_file():  # see confed.deployment.server
        raise ValueError(f"{folder} is a federation across machines: go on with the same `confed server` as before")
    if is_backbones(folder):
        finish_models(folder, None, as_json)
        return
    if is_sweep(folder):
        finish_sweep(folder, None, as_json)
        return
    if is_grid(folder):
        finish_grid(folder, None, as_json)
        return
    with interruptible(folder), Display(console, quiet=as_json, rounds=True) as display:
        summaries = study.resume(folder, display)
    show(folder, summaries, as_json)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="A run or study folder, finished or not, or one of several models.")],
    figures: Annotated[
        bool, typer.Option("--figures", help="Also write the drawings into figures/, as PNG and SVG.")
    ] = False,
    methods: Annotated[
        str | None, typer.Option(help="With --figures: only these rows in the drawings, a,b,c. [default: all]")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write report.html again and show the table."""
    from confed.cli.compare_models import show_models
    from confed.report.figures.save import save_figures
    from confed.results.folder import run_folders
    from confed.results.runs import load
    from confed.studies.models import is_backbones, read_backbones

    if is_backbones(folder):
        if figures or methods:
            first = folder / next(iter(read_backbones(folder).models), "MODEL")
            raise ValueError(f"figures are of one model: give the folder of one in {folder}, such as {first}")
        show_models(folder, as_json)
        return
    there = run_folders(folder)
    # Rows of one method are told apart by the study's labels, which a run does not know.
    labels = {run.folder: run.label for run in load(folder).runs if run.complete}
    summaries = [{**_summary(place), "label": labels[place]} for place in there if place in labels]
    chosen = [name.strip() for name in (methods or "").split(",") if name.strip()]
    if chosen and not figures:
        raise ValueError("--methods needs --figures")
    if figures and not save_figures(folder, methods=chosen):
        complain(f"{folder} has no results to draw yet", "note")
    show(folder, summaries, as_json)


def _summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))

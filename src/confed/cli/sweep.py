"""Verbs that repeat a study for several values of a setting: sweep."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from confed.cli.app import Json, app, complain, default_workers
from confed.cli.cluster import Before, On, Slurm, Submit, carry_out, check_cluster, with_address
from confed.cli.completion import complete_key
from confed.cli.plan import Plan, rows_of_study, show_plan
from confed.cli.study import Margin, Methods, RecipeName, Seeds, Tuned, Workers, judged_by, tuned_values

if TYPE_CHECKING:
    from collections.abc import Mapping

    from confed.recipes.recipe import Recipe


@app.command(rich_help_panel="Compare")
def sweep(
    recipe: RecipeName,
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
    methods: Methods = None,
    seeds: Seeds = 1,
    workers: Workers = None,
    tuned: Tuned = None,
    headline: Annotated[str, typer.Option(help="The model that is compared, as in `confed compare`.")] = "",
    reference: Annotated[
        list[str] | None, typer.Option(help="A method that the others are compared with; may be repeated.")
    ] = None,
    margin: Margin = 1.0,
    out: Annotated[Path | None, typer.Option(help="Folder for everything. [default: runs/NAME-by-KEY]")] = None,
    on: On = "",
    slurm: Slurm = None,
    submit: Submit = False,
    before: Before = None,
    plan: Plan = False,
    as_json: Json = False,
) -> None:
    """Compare methods for each value of a setting, such as the number of clients: one table and one figure.

    `confed sweep feddat_function --over data.shards=1,2,3,4,5 --with run.rounds=6,7,8,9,10 --methods adapter,feddat
    --seeds 3`. The same command goes on after an interruption, and adds values, methods and seeds.

    `confed sweep modalities algorithm.lam=0.1,0.3,0.5 --split iid,dirichlet --methods local,modality_transformer
    --reference local` has a line for each way of splitting the data, and the improvement relative to the reference.
    """
    from dataclasses import asdict

    from confed.recipes.recipe import load_recipe
    from confed.results.sweep import MODELS, Sweep
    from confed.studies.cluster import parse_options
    from confed.studies.sweep import Axis, models_of, open_sweep, parse_axis, points_of, recipes_of

    if "=" in recipe and not Path(recipe).is_file():
        raise ValueError(f"a sweep needs a recipe before its settings, as in `confed sweep modalities {recipe}`")
    judged = judged_by(reference, margin, headline)
    check_cluster(on, slurm, submit, before)
    address, overrides = with_address(on, recipe, list(overrides or []))
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
    points = points_of(axis, beside, by)
    values = tuned_values(tuned, recipe, overrides, seeds)
    recipes = recipes_of(recipe, overrides, points, methods, headline, values)
    for loaded, _ in recipes.values():
        for wanted in judged.references:
            if wanted not in loaded.methods:
                raise ValueError(f"--reference {wanted} is none of the methods compared: {', '.join(loaded.methods)}")
    first, _ = recipes[points[0].folder]
    if plan:
        rows = _planned({point.title: recipes[point.folder][0] for point in points})
        show_plan(rows, seeds, workers or default_workers(first), True, parse_options(slurm or []), as_json)
        return
    name = Path(recipe).name.removesuffix(".toml")
    root = out or Path("runs") / f"{name}-by-{axis.key.rpartition('.')[2]}"
    by_key = "" if by is None else by.key
    wanted = Sweep(first.name, axis.key, points, judged.references, judged.margin, by_key)
    open_sweep(root, wanted, recipes, seeds=seeds, judged=asdict(judged))
    carry_out(root, on, address, workers, slurm, submit, before, as_json)


def _planned(recipes: "Mapping[str, Recipe]") -> "dict[str, Recipe]":
    """Title -> single-run recipe of each run of a sweep and one seed; a run that its setting does not concern once."""
    from confed.studies.study import differing

    found: dict[str, Recipe] = {}
    again = 0
    for point, recipe in recipes.items():
        for title, row in rows_of_study(recipe, point).items():
            if all(differing(before, row) for before in found.values()):
                found[title] = row
            else:
                again += 1
    if again:
        complain(f"runs of each seed that are the same at an earlier value and count once: {again}", "note")
    return found

"""Verb that judges a benchmark: gates."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from confed.cli.app import (
    Json,
    app,
    complain,
    console,
    default_workers,
    interruptible,
    plain,
    print_json,
    print_table,
)
from confed.cli.study import Methods, Seeds, Tuned, Workers, tuned_values

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from confed.recipes.recipe import Recipe
    from confed.results.gates import Gate


@app.command(rich_help_panel="Compare")
def gates(
    source: Annotated[
        str, typer.Argument(help="A recipe file, the name of a packaged one, or the folder of a finished study.")
    ] = "modalities",
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value with a TOML value, e.g. data.train=100")
    ] = None,
    methods: Methods = None,
    seeds: Seeds = 1,
    workers: Workers = None,
    tuned: Tuned = None,
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
        out = out or Path("runs") / f"{_name(source)}-gates"
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
    print_table(_table(recipe, judgement))
    if out is not None:
        console.print(escape(f"written: {out}/gates.json"), soft_wrap=True, highlight=False)


def _name(source: str) -> str:
    return Path(source).name.removesuffix(".toml")


def _run(
    source: str,
    overrides: list[str],
    methods: str | None,
    seeds: int,
    workers: int | None,
    tuned: Path | None,
    out: Path,
    as_json: bool,
) -> "tuple[Recipe, Path, Path]":
    """Missing runs of a recipe with its rounds and with more; the recipe, and the folders of both studies."""
    from confed.api.progress import Display
    from confed.studies.gates import with_references, with_rounds
    from confed.studies.runner import run_study
    from confed.studies.study import load_rows, open_study

    loaded, used = load_rows(source, overrides, methods, "", tuned_values(tuned, source, overrides, seeds))
    recipe = with_references(loaded)
    folders: list[Path] = []
    for each in (recipe, with_rounds(recipe)):
        folder = out / f"rounds-{each.run.rounds}"
        open_study(each, folder, range(each.run.seed, each.run.seed + seeds), used)
        with interruptible(folder, "the same command"), Display(console, quiet=as_json) as display:
            outcome = run_study(folder, display, workers if workers is not None else default_workers(each))
        for cell, error in outcome.errors.items():
            complain(f"without {cell}: {error}", "note")
        folders.append(folder)
    return recipe, folders[0], folders[1]


def _table(recipe: "Recipe", found: "Sequence[Gate]") -> "RichTable":
    from rich.table import Table

    verdicts = {True: "[green]passed[/]", False: "[red]failed[/]", None: "not judged"}
    title = f"{recipe.name}: whether differences between methods could show, {recipe.run.rounds} rounds"
    table = Table("gate", "asked", "found", "", title=escape(title), title_justify="left", box=None, pad_edge=False)
    for gate in found:
        text = gate.found.removeprefix("not judged: ")
        table.add_row(gate.key, escape(gate.asked), escape(text), verdicts[gate.passed])
    return table

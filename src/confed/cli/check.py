"""Verb that says whether one's own method, model, dataset, task or measure is done: check."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from confed.cli.app import FAILED, Json, app, print_json


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="Python file of your own; its code is run.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="What the recipe is to have instead.")
    ] = None,
    recipe: Annotated[
        str, typer.Option(help="Recipe to run it with; by default drawn scenes and a tiny model.", show_default=False)
    ] = "",
    as_json: Json = False,
) -> None:
    """Check a method, model, dataset, task or measure of your own.

    It keeps the contract of its kind, and runs for a round.
    """
    from confed.api.check import check_file

    console, faulty, all_checked = Console(highlight=False), False, []
    for checked in check_file(file, overrides or (), recipe):
        faulty = faulty or bool(checked.fault)
        all_checked.append(asdict(checked))
        if as_json:
            continue
        console.print(f"[bold]{escape(checked.name)}[/] ({checked.kind})")
        for name, verdict in checked.verdicts:
            console.print(f"  {'[green]✓[/]' if verdict == 'passed' else '–'} {escape(name)}: {escape(verdict)}")
        if checked.fault:
            console.print(f"  [red]✗[/] {escape(checked.fault)}")
    if as_json:
        print_json(all_checked)
    if faulty:
        raise typer.Exit(FAILED)

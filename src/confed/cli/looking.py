"""Verbs that show what there is: list, doctor."""

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from confed.cli.app import Json, app, print_json


@app.command(name="list")
def list_things(
    kind: Annotated[str, typer.Argument(help="algorithms, models, tasks, datasets, recipes or runs")] = "algorithms",
    contract: Annotated[bool, typer.Option("--contract", help="Algorithms: which checks apply, and why not.")] = False,
    as_json: Json = False,
) -> None:
    """List the methods, models, tasks, datasets and recipes there are, and the runs under ./runs."""
    from confed.catalogue import listing

    rows = listing(kind, contract=contract)
    if as_json:
        print_json(rows)
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in rows[0] if rows else ():
        table.add_column(column, no_wrap=column == "name")
    for row in rows:
        table.add_row(*(escape(str(value)) for value in row.values()))
    Console().print(table if rows else f"no {kind} found")


@app.command()
def doctor(as_json: Json = False) -> None:
    """Versions, threads, memory, GPUs, and what is missing and how to get it."""
    from confed.installation import diagnose

    findings = diagnose()
    if as_json:
        print_json(findings)
        return
    shown = Console(highlight=False)
    for section, entries in findings.items():
        shown.print(f"[bold]{section}[/]")
        for key, value in entries.items():
            shown.print(f"  {escape(key)}: {escape(value)}", soft_wrap=True)

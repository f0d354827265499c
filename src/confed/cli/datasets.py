"""Verbs about data: data describe."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from confed.cli.app import Json, data_app, print_json


@data_app.command()
def describe(
    name: Annotated[str, typer.Argument(help="A dataset's name (`confed list datasets`).")] = "scenes",
    options: Annotated[list[str] | None, typer.Argument(help="key=value, e.g. setting=A")] = None,
    out: Annotated[Path | None, typer.Option(help="Write a PNG with sample pictures here.")] = None,
    as_json: Json = False,
) -> None:
    """Counts, answers, sources and floors of a dataset."""
    from confed.catalogue import describe as describe_data

    description = describe_data(name, options or [], out)
    if as_json:
        print_json(description)
        return
    from rich.table import Table

    table = Table("place", "role", "questions", "pictures", "answers", "most frequent", box=None, pad_edge=False)
    for row in description["rows"]:
        table.add_row(*(escape(str(value)) for value in row.values()))
    shown = Console(highlight=False)
    shown.print(f"[bold]{escape(name)}[/]: {description['answers']} answers, {description['words']} words")
    shown.print(table)
    for key, value in description["facts"].items():
        shown.print(f"{escape(key)}: {escape(value)}")
    if out is not None:
        shown.print(f"written: {escape(str(out))}", soft_wrap=True)

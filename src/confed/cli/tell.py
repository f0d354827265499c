"""Verbs that examine finished runs of multi-label models: tell."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from confed.cli.app import Json, app, notes, plain, print_json, print_table, say
from confed.cli.completion import complete_folder
from confed.system.events import ignore


@app.command(rich_help_panel="Use and examine")
def tell(
    folders: Annotated[
        list[Path],
        typer.Argument(help="Folders of finished runs or studies of labels.", autocompletion=complete_folder),
    ],
    shares: Annotated[
        str, typer.Option(help="Shares of each example's labels that are given as known.")
    ] = "0,0.25,0.5,0.75",
    client: Annotated[str, typer.Option(help="Client whose personal model is used. [default: the global model]")] = "",
    seed: Annotated[int, typer.Option(help="Seed of the choice of labels.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for page, table and figure. [default: the first]")] = None,
    as_json: Json = False,
) -> None:
    """Give models some labels of each test example and measure how much the prediction of the others improves."""
    from confed.analysis.known_labels import tell as tell_runs
    from confed.analysis.victim import write
    from confed.report.tables.table import to_rich

    try:
        asked = [float(share) for share in shares.split(",")]
    except ValueError:
        raise ValueError(f"--shares must be numbers separated by commas, got {shares!r}") from None
    finding = tell_runs(folders, asked, client, seed, ignore if as_json else notes())
    page = write(finding, out or folders[0], "")
    if as_json:
        print_json(plain(finding.values))
        return
    for table in finding.tables:
        print_table(to_rich(table))
    for note in finding.values["notes"]:
        say(escape(note))
    Console().print(f"report: {escape(str(page))}", soft_wrap=True, highlight=False)

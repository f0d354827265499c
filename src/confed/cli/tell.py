"""Verbs that examine finished runs of multi-label models: tell."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from confed.cli.app import Json, app, notes, plain, print_json, print_table, say
from confed.system.events import ignore


@app.command()
def tell(
    folders: Annotated[list[Path], typer.Argument(help="Folders of finished runs or studies of labels.")],
    shares: Annotated[str, typer.Option(help="Shares of each example's labels that are told.")] = "0,0.25,0.5,0.75",
    client: Annotated[str, typer.Option(help="Whose personal model; the global one by default.")] = "",
    seed: Annotated[int, typer.Option(help="Of the choice of labels.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for page, table and drawing. [default: the first]")] = None,
    as_json: Json = False,
) -> None:
    """Tell models some labels of every test example, and see how much better they give the others."""
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

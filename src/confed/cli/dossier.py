"""Verb that says whether a model may leave: dossier."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from confed.cli.app import Json, app, notes, print_json, print_line, print_tables
from confed.cli.completion import complete_folder
from confed.system.events import ignore


@app.command(short_help="Examine what a run's model gives away, and what sites gain.")
def dossier(
    folder: Annotated[Path, typer.Argument(help="Folder of a finished run.", autocompletion=complete_folder)],
    limits: Annotated[Path | None, typer.Option(help="TOML file with [release]; without, figures only.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write into. [default: dossier/ in the run folder]")
    ] = None,
    minutes: Annotated[float, typer.Option(help="Time that may be spent; what does not fit is listed.")] = 30.0,
    key: Annotated[Path | None, typer.Option(help="Ed25519 private key to sign with, PEM or OpenSSH.")] = None,
    as_json: Json = False,
) -> None:
    """Examine what a run's model gives away and what its sites gained, and hold it against limits.

    Writes dossier.html and dossier.json with a digest. Docs: dossier.md.
    """
    from confed.release.dossier import dossier as examine
    from confed.release.page import figures_table

    progress = ignore if as_json else notes()
    examined = examine(folder, limits, out=out, minutes=minutes, key=key, progress=progress)
    if as_json:
        print_json(dict(examined.content))
        return
    print_line(escape(f"{examined.sentence} {examined.content['details']}"))
    print_tables([figures_table(examined.content)])
    for gain in examined.content["gains"]:
        print_line(escape(gain["sentence"]))
    print_line(escape(f"page: {examined.page}"))

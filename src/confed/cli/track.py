"""Verb that sends runs to a tracking tool: track."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from confed.cli.app import Json, app, is_quiet, plain, print_json, say
from confed.cli.completion import complete_folder
from confed.tracking.backends import BACKENDS

_PLACES = "; ".join(f"{name}: {backend.place}" for name, backend in BACKENDS.items())


def _complete_tool(incomplete: str) -> list[str]:
    return [name for name in BACKENDS if name.startswith(incomplete)]


@app.command(rich_help_panel="Compare")
def track(
    folder: Annotated[
        Path,
        typer.Argument(
            help="A run, study or sweep folder, or a site's private folder.", autocompletion=complete_folder
        ),
    ],
    to: Annotated[
        str, typer.Option(help=f"The tool: {', '.join(BACKENDS)}.", autocompletion=_complete_tool)
    ] = "trackio",
    at: Annotated[str, typer.Option(help=f"Where it keeps runs. {_PLACES}.")] = "",
    follow: Annotated[bool, typer.Option("--follow", help="Go on while a process is at work in the folder.")] = False,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between looks at the files.")] = 2.0,
    project: Annotated[str, typer.Option(help="Name of the project. [default: the recipe's]")] = "",
    group: Annotated[str, typer.Option(help="Name of the group. [default: the study folder's]")] = "",
    name: Annotated[str, typer.Option(help="Name of a run on its own. [default: its folder's]")] = "",
    files: Annotated[bool, typer.Option(help="Send recipe, summary and report as well.")] = True,
    as_json: Json = False,
) -> None:
    """Send a run's or study's parameters, metrics by round, and files to a tracking tool.

    Runs know nothing of it: their files are read, while they run (--follow) or later. What the tool has already is not
    sent twice. Reports hold sample pictures: --no-files keeps them here.
    """
    from confed.deployment.site import site_of
    from confed.tracking.follow import track as tracking
    from confed.tracking.records import Names

    site = site_of(folder)
    place = site[0] if site else folder
    names = Names(project, group, name or (site[1] if site else ""))
    tracked = []
    for sent in tracking(place, to, at=at, names=names, files=files, follow=follow, every=every):
        tracked.append(sent)
        if not as_json and not is_quiet():
            new = f"{sent.values:,} new values" if sent.values else "no new values"
            say(f"{escape(sent.name)}: {sent.state}, round {sent.round}, {new}")
    if as_json:
        print_json(plain({"folder": str(place), "to": to, "runs": [asdict(sent) for sent in tracked]}))
    elif tracked:
        show = BACKENDS[to].show.format(where=tracked[-1].where, project=tracked[-1].project)
        say(escape(f"{to}: project {tracked[-1].project}, {tracked[-1].where}" + (f"; see `{show}`" if show else "")))
    else:
        say("no run has begun here")

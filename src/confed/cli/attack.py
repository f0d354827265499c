"""Verbs that attack finished runs: attack."""

import importlib
from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from confed.cli.app import Json, app, notes, plain, print_json, print_table
from confed.cli.completion import complete_folder

KINDS: Mapping[str, str] = {
    "trojan": "confed.analysis.trojan_page:trojan",
    "dual-key": "confed.analysis.dual_key_page:dual_key",
    "answers": "confed.analysis.answers:answers",
    "inversion": "confed.analysis.inversion:inversion",
}
"""Name of an attack -> ``"module:function"``.

The function takes the run and study folders and, as keywords, the options below that it names in its signature; it
returns a :class:`confed.analysis.victim.Finding`.
"""


@app.command(rich_help_panel="Use and examine")
def attack(
    folders: Annotated[
        list[Path], typer.Argument(help="Folders of finished runs or studies.", autocompletion=complete_folder)
    ],
    kind: Annotated[str, typer.Option(help=f"The attack: {', '.join(KINDS)}.")],
    examples: Annotated[int | None, typer.Option(help="Number of test questions, or of audited examples.")] = None,
    client: Annotated[
        str | None,
        typer.Option(
            help="trojan: client whose personal models are attacked [default: global ones]; audits: sender [the first]."
        ),
    ] = None,
    eps: Annotated[
        float | None,
        typer.Option(help="trojan: largest change of a pixel (0 to 255), or of a feature in standard deviations."),
    ] = None,
    units: Annotated[
        str | None, typer.Option(help="trojan: units of eps for features, spread or absolute. [default: spread]")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="trojan, inversion: gradient steps.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the choice of questions and of the search.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the page, tables and figures. [default: attack/ in the first]")
    ] = None,
    as_json: Json = False,
) -> None:
    """Attack the models of finished runs, and report what each attacker knows.

    trojan: pictures and questions of the test are changed until the models err. dual-key: what a backdoor does that
    poisoned clients planted during training (dataset `poisoned`). answers and inversion: what a server of split
    learning that only looks finds out of answers, and of pictures and questions.
    """
    from confed.analysis.victim import write
    from confed.report.tables.table import to_rich

    if kind not in KINDS:
        raise ValueError(f"--kind must be one of {', '.join(KINDS)}, got {kind!r}")
    module, _, name = KINDS[kind].partition(":")
    run = getattr(importlib.import_module(module), name)
    given: dict[str, Any] = {
        "examples": examples, "client": client, "eps": eps, "units": units, "steps": steps, "seed": seed,
    }  # fmt: skip
    options = {key: value for key, value in given.items() if value is not None}
    parameters = signature(run).parameters
    for key in options:
        if key not in parameters:
            raise ValueError(f"--{key.replace('_', '-')} is no option of the attack {kind!r}")
    if "progress" in parameters and not as_json:
        options["progress"] = notes()
    finding = run(folders, **options)
    page = write(finding, out or folders[0] / "attack")
    if as_json:
        print_json(plain(finding.values))
        return
    for table in finding.tables:
        print_table(to_rich(table))
    Console().print(f"report: {escape(str(page))}", soft_wrap=True, highlight=False)

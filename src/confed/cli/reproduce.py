"""Verb that repeats published results: reproduce."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape as markup

from confed.cli.app import FAILED, Json, app, plain, print_json, print_table, showing
from confed.system.plain_text import visible

if TYPE_CHECKING:
    from rich.table import Table

    from confed.studies.reproduce import Verdict

_COLOURS = {"equal bits": "green", "equal figures": "green", "within the interval": "green", "different": "red"}


@app.command(rich_help_panel="Compare")
def reproduce(
    source: Annotated[
        str,
        typer.Argument(
            help="A results file (`confed compare STUDY --results DIR`, or of a table), a run folder, its "
            "summary.json, or the address (https://...) of such a file."
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="section.key=value for what is elsewhere here, such as data.root=DIR or run.workers=4."),
    ] = None,
    method: Annotated[
        str, typer.Option(help="Which row of a table to run again, by its name or label. [default: the first]")
    ] = "",
    seed: Annotated[int | None, typer.Option(help="Which seed to run again. [default: the first]")] = None,
    all_seeds: Annotated[bool, typer.Option("--all-seeds", help="Run all seeds of the row again.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the new runs; must not exist. By default under runs/.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a published result again and say whether it repeats.

    The verdict is one of: equal bits (history, predictions and models are the same to the last bit); equal figures
    (all published figures are the same, and there are no digests to compare); within the interval (other bits, and
    every mean lies where one more run of the published row is expected, at 95%); different. A figure without such an
    interval is compared as far as it has digits; another value is not judged.

    A results file of a whole table has several rows, and as many digits as it says.

    It comes with the first round, client and metric that differ, and what else does: data, code, packages, instruction
    set.

    Exit code 1 if a run is different.
    """
    from confed.studies.published_sources import read_published
    from confed.studies.reproduce import repeat
    from confed.studies.study import free_folder

    if all_seeds and seed is not None:
        raise ValueError("--seed and --all-seeds exclude each other")
    published = read_published(source, method)
    seeds = published.seeds if all_seeds else [published.seeds[0] if seed is None else seed]
    root = out or free_folder(f"reproduced-{published.name}")
    verdicts: list[Verdict] = []
    for number in seeds:
        folder = root if len(seeds) == 1 else root / f"seed-{number}"
        with showing(folder, as_json, rounds=True) as display:
            verdicts.append(repeat(published, number, folder, overrides or [], display))
        if not as_json:
            _show(verdicts[-1])
    if as_json:
        print_json(plain({"source": source, "runs": [asdict(v) | {"folder": str(v.folder)} for v in verdicts]}))
    if any(verdict.word == "different" for verdict in verdicts):
        raise typer.Exit(FAILED)


def _escape(text: str) -> str:
    """A text of the published file on one line of the terminal, which it cannot control."""
    return markup(visible(" ".join(text.split())))


def _show(verdict: "Verdict") -> None:
    """The verdict in a line, the means, and below what differs."""
    bits = f" ({', '.join(verdict.compared)})" if verdict.word == "equal bits" else ""
    if verdict.word == "equal figures":
        digits = "" if verdict.digits is None else f"to {verdict.digits} digits; "
        bits = f" ({digits}the published result has no digests of its history, predictions and models)"
    colour = _COLOURS[verdict.word]
    from rich.console import Console

    shown = Console(highlight=False)
    text = f"[{colour}]{verdict.word}[/]{bits}: {_escape(verdict.label)}, seed {verdict.seed}"
    shown.print(text, soft_wrap=True)
    print_table(_table(verdict))
    for heading, lines in (("differences", verdict.where), ("what else differs", verdict.causes)):
        if lines:
            shown.print(f"{heading}:")
        for line in lines:
            shown.print(f"  {_escape(line)}", soft_wrap=True)
    shown.print(f"run: {markup(visible(str(verdict.folder)))}", soft_wrap=True)


def _table(verdict: "Verdict") -> "Table":
    from rich import box
    from rich.table import Table

    table = Table("figure", "published", "here", "expected of one run", box=box.SIMPLE)
    for name, figure in verdict.figures.items():
        here = "none" if figure.found is None else f"{figure.found:.4f}"
        ends = "–" if figure.interval is None else f"{figure.interval[0]:.4f} to {figure.interval[1]:.4f}"
        mean = "" if figure.mean_of == 1 else f" (mean of {figure.mean_of})"
        judged = {True: "", False: " (outside)", None: " (not judged)"}[figure.inside]
        table.add_row(_escape(name), f"{figure.published:.4f}{mean}", here, f"{ends}{judged}")
    return table

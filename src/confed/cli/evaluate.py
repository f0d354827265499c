"""Verbs that evaluate finished runs on other data: evaluate."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape

from confed.cli.app import Json, app, plain, print_json, print_table
from confed.cli.completion import complete_folder


@app.command(rich_help_panel="Use and examine")
def evaluate(
    folder: Annotated[
        Path,
        typer.Argument(
            help="A finished run, or a study (its main method's first seed).", autocompletion=complete_folder
        ),
    ],
    data: Annotated[
        list[str] | None,
        typer.Option(help="A key of the data section, such as root=DIR, or name=... for other data; repeatable."),
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="global, personal:<client> or all; repeatable.", show_default="global")
    ] = None,
    against: Annotated[Path | None, typer.Option(help="A second run, compared on the same examples.")] = None,
    examples: Annotated[
        Literal["all", "test"],
        typer.Option(help="Of new data: all but what the run learned from, or those that the data hold out as tests."),
    ] = "all",
    out: Annotated[Path | None, typer.Option(help="Folder to write to. [default: RUN/evaluations/<number>]")] = None,
    as_json: Json = False,
) -> None:
    """Evaluate a finished run's models on other data, with the run's metric and a paired test."""
    from confed.inference.evaluate import evaluate as tried_on
    from confed.inference.evaluate import write_evaluation
    from confed.inference.finished_run import run_of
    from confed.report.tables.table import to_rich

    run = run_of(folder)
    evaluation = tried_on(run, data or (), model or ("global",), None if against is None else run_of(against), examples)
    files = write_evaluation(evaluation, out or _next(run / "evaluations"))
    if as_json:
        print_json({**plain(evaluation.content()), "files": {name: str(path) for name, path in files.items()}})
        return
    print_table(to_rich(evaluation.table()))
    where = escape(str(files["evaluation.json"].parent))
    Console().print(f"written: {where}", soft_wrap=True, highlight=False)


def _next(root: Path) -> Path:
    """The first of the folders 1, 2, ... that does not exist."""
    number = 1
    while (root / str(number)).exists():
        number += 1
    return root / str(number)

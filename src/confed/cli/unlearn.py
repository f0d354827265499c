"""Verbs that take clients out of a federation: forget."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from confed.cli.app import Json, app, console, interruptible, print_json
from confed.cli.completion import complete_folder
from confed.cli.global_options import is_quiet

ROWS = {
    "auc": "membership attack on {client}, AUC (0.5 is chance)",
    "accuracy": "global model on {client}'s test data",
    "global_seen": "global model on the others' test data",
    "personal": "personal models of the others",
    "global_unseen": "global model in unseen places",
}


@app.command(rich_help_panel="Use and examine")
def forget(
    folder: Annotated[
        Path,
        typer.Argument(
            help="A run folder; exact forgetting takes an unfinished one too.", autocompletion=complete_folder
        ),
    ],
    client: Annotated[str, typer.Option(help="The client to forget.")],
    out: Annotated[Path | None, typer.Option(help="The new run folder; by default RUN-without-CLIENT.")] = None,
    approximate: Annotated[
        bool, typer.Option("--approximate", help="Change the final model instead of training again; no guarantee.")
    ] = False,
    rounds: Annotated[int, typer.Option(help="With --approximate: rounds with the other clients afterwards.")] = 2,
    as_json: Json = False,
) -> None:
    """Remove a client from a run: exactly, as if it had never taken part, or approximately.

    Starts from the last checkpoint before the client joined where there is one (`run.keep_checkpoints = "joins"`).
    """
    from confed.api.progress import Display
    from confed.studies.pool import headline
    from confed.system.events import JobEnded, JobsPlanned, JobStarted, of_job
    from confed.unlearning.exact import Approximation, check_client, folder_without, recipe_of
    from confed.unlearning.exact import forget as forget_client

    how = Approximation(rounds=rounds) if approximate else None
    recipe = recipe_of(folder)
    check_client(recipe, client)
    target = folder_without(folder, client) if out is None else out
    title = f"without {client}, seed {recipe.run.seed}"
    with interruptible(target), Display(console, quiet=as_json or is_quiet(), rounds=True) as display:
        display(JobsPlanned([title]))
        display(JobStarted(0))
        result = forget_client(folder, client, target, approximate=how, progress=of_job(display, 0))
        display(JobEnded(0, 0, "done", headline(json.loads((target / "summary.json").read_text(encoding="utf-8")))))
    if as_json:
        print_json({"folder": str(target), **result})
    else:
        _show(target, client, result)


def _show(target: Path, client: str, result: dict[str, Any]) -> None:
    table = Table("", "before", "after", box=None, pad_edge=False)
    for key, text in ROWS.items():
        values = (result[run][key] for run in ("original", "result"))
        style = "{:.3f}" if key == "auc" else "{:.1%}"
        table.add_row(escape(text.format(client=client)), *("–" if v is None else style.format(v) for v in values))
    shown = Console(highlight=False)
    shown.print(table)
    start = f"round {result['from_round']}" if result["from_round"] else "the start"
    if result["approximate"] is None:
        kind = f"exact: run again from {start}, with the bytes of a run that never had {client}"
    else:
        kind = "approximate: nothing is guaranteed; the attack only shows what losses give away"
    shown.print(escape(f"{kind}\nwritten: {target}"), soft_wrap=True)

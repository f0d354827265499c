"""Verbs that make weights: pretrain."""

from pathlib import Path
from typing import Annotated

import typer

from confed.cli.app import Json, app, print_json


@app.command(rich_help_panel="Data and weights")
def pretrain(
    model: Annotated[str, typer.Argument(help="The mini backbone.")] = "vilt_mini",
    out: Annotated[Path | None, typer.Option(help="The safetensors file to write; default: MODEL.safetensors.")] = None,
    questions: Annotated[int | None, typer.Option(help="Number of public questions.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the questions.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed.")] = None,
    as_json: Json = False,
) -> None:
    """Pretrain a mini backbone from random weights; the same command continues after an interruption."""
    from confed.prepare.pretraining import pretrain as make

    file = Path(f"{model}.safetensors") if out is None else out
    given = {"questions": questions, "epochs": epochs, "seed": seed}
    changes = {key: value for key, value in given.items() if value is not None}
    accuracy = make(model, file, progress=not as_json, **changes)
    if as_json:
        print_json({"model": model, "file": str(file), "accuracy": accuracy})

"""Verbs that make weights: pretrain."""

from pathlib import Path
from typing import Annotated

import typer

from confed.cli.app import Json, app, print_json


@app.command()
def pretrain(
    out: Annotated[Path, typer.Argument(help="The safetensors file to write.")],
    questions: Annotated[int | None, typer.Option(help="Public questions.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over them.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed.")] = None,
    as_json: Json = False,
) -> None:
    """Make the mini backbone's weights again, from nothing; the same call continues after an interruption."""
    from confed.pretrain import pretrain as make

    given = {"questions": questions, "epochs": epochs, "seed": seed}
    accuracy = make(out, progress=not as_json, **{key: value for key, value in given.items() if value is not None})
    if as_json:
        print_json({"file": str(out), "accuracy": accuracy})

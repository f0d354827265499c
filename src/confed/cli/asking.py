"""Verbs that use trained models: predict, export."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from confed.cli.app import Json, app, print_json, say


@app.command()
def predict(
    folder: Annotated[Path, typer.Argument(help="A finished run, or a study: its main method's first seed.")],
    image: Annotated[Path, typer.Option(help="A picture, of any size and format.")],
    question: Annotated[str, typer.Option(help="A question about it, or a statement to judge.")],
    client: Annotated[str | None, typer.Option(help="Use this client's own model; else the global one.")] = None,
    shared: Annotated[
        bool, typer.Option("--shared", help="With --client: the global values of what is shared, with its own head.")
    ] = False,
    picture2: Annotated[Path | None, typer.Option(help="A second picture, where the task has two.")] = None,
    choice: Annotated[
        list[str] | None, typer.Option(help="A text to choose from, where the task is choosing; repeat it.")
    ] = None,
    top: Annotated[int, typer.Option(help="How many answers to show.")] = 3,
    as_json: Json = False,
) -> None:
    """Ask a trained model about a picture."""
    from confed.inference import predict as ask

    folder = _run_of(folder)
    answers = ask(folder, image, question, client, top, image2=picture2, choices=choice or (), shared=shared)
    if as_json:
        print_json(answers)
        return
    for answer in answers["answers"]:
        print(f"{answer['probability']:6.1%}  {answer['answer']}")
    if answers["unknown_words"]:
        words = escape(", ".join(answers["unknown_words"]))
        say(f"[yellow]words the model does not know:[/] {words}")


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="A finished run, or a study: its main method's first seed.")],
    target: Annotated[Path, typer.Argument(help="Where to write; must not exist.")],
    as_json: Json = False,
) -> None:
    """Write what the clients share and every client's model, for confed, transformers and peft."""
    from confed.export import export as write

    folder = _run_of(folder)
    written = write(folder, target)
    if as_json:
        print_json(written)
        return
    for name, path in written.items():
        print(f"{name}: {path}")


def _run_of(folder: Path) -> Path:
    from confed.inference import run_of

    run = run_of(folder)
    if run != folder:
        say(f"this is a study; asking {escape(str(run))}")
    return run

"""Verbs that turn published files into safetensors: convert places365, convert albef, convert model."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape

from confed.cli.app import Json, app, print_json

convert_app = typer.Typer(help="Turn published checkpoints into safetensors files.")
app.add_typer(convert_app, name="convert", rich_help_panel="Data and weights")


@convert_app.callback()
def options() -> None:
    """Turn published checkpoints into safetensors files."""


@convert_app.command()
def places365(
    source: Annotated[Path, typer.Argument(help="The published checkpoint, e.g. resnet18_places365.pth.tar.")],
    out: Annotated[Path, typer.Argument(help="The .safetensors file to write.")],
    arch: Annotated[
        Literal["resnet18", "resnet50"] | None, typer.Option(help="Default: found in the checkpoint.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Make the scene classifier of `confed data prepare gqa-scenes` from a Places365 ResNet.

    Code in the file is not run: a checkpoint that holds more than tensors and plain values is refused.
    """
    from confed.prepare.checkpoints import convert_places365

    facts = convert_places365(source, out, arch)
    if as_json:
        print_json({"file": str(out), **facts})
        return
    shown = Console(highlight=False)
    shown.print(f"{facts['architecture']}, {facts['parameters']:,} parameters", soft_wrap=True)
    shown.print(f"written: {escape(str(out))} (SHA-256 {facts['sha256']})", soft_wrap=True)


@convert_app.command()
def albef(
    source: Annotated[Path, typer.Argument(help="The published checkpoint, e.g. ALBEF.pth or vqa.pth.")],
    out: Annotated[Path, typer.Argument(help="The .safetensors file to write.")],
    heads: Annotated[int | None, typer.Option(help="Attention heads. Default: one per 64 features.")] = None,
    as_json: Json = False,
) -> None:
    """Make the weights of the model `albef` from a published ALBEF; a recipe names them in model.pretrained.

    Code in the file is not run: a checkpoint that holds more than tensors and plain values is refused.
    """
    from confed.prepare.checkpoints import convert_albef

    facts = convert_albef(source, out, heads)
    if as_json:
        print_json({"file": str(out), **facts})
        return
    shown = Console(highlight=False)
    shown.print(f"ALBEF for {facts['image_size']} x {facts['image_size']} pixels, {facts['parameters']:,} parameters")
    shown.print(f"decoder: {facts['decoder']}")
    shown.print(f"written: {escape(str(out))} (SHA-256 {facts['sha256']})", soft_wrap=True)


@convert_app.command()
def model(
    source: Annotated[Path, typer.Argument(help="A folder of transformers with pytorch_model.bin.")],
    out: Annotated[Path, typer.Argument(help="The folder to write; must not exist.")],
    as_json: Json = False,
) -> None:
    """Make a folder that runs read, weights as safetensors, of one whose weights are pickles.

    Code in the file is not run: weights that hold more than tensors are refused.
    """
    from confed.prepare.checkpoints import convert_model

    facts = convert_model(source, out)
    if as_json:
        print_json({"folder": str(out), **facts})
        return
    shown = Console(highlight=False)
    shown.print(f"{facts['tensors']} tensors, {facts['parameters']:,} parameters")
    shown.print(f"written: {escape(str(out))} (SHA-256 {facts['sha256']})", soft_wrap=True)

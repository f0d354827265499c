"""Verbs about data and weights: data describe, prepare and cache; weights pretrain and convert."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape

from confed.cli.app import answer, app, argument, console, for_people, is_json, option, say, tell
from confed.cli.completion import complete_dataset
from confed.system.events import Event, Progress, StepProgress

if TYPE_CHECKING:
    import numpy as np
    from rich.table import Table as RichTable
    from rich.text import Text


data_app = typer.Typer(help="Describe and prepare datasets.")
app.add_typer(data_app, name="data")
prepare_app = typer.Typer(help="Make a dataset's folder from published files.")
data_app.add_typer(prepare_app, name="prepare")


@data_app.command()
def describe(
    name: Annotated[
        str,
        argument(
            "A dataset's name (`confed list datasets`), or a recipe's file (.toml).", autocompletion=complete_dataset
        ),
    ] = "scenes",
    options: Annotated[list[str] | None, argument("key=value, e.g. setting=A")] = None,
    out: Annotated[Path | None, option("Write a PNG with sample pictures here.")] = None,
    html: Annotated[
        Path | None, option("Write a page here: clients, splits, answers, examples with pictures, faults.")
    ] = None,
    croissant: Annotated[
        Path | None,
        option("Write the examples here, as a table and pictures with Croissant metadata (croissant.json)."),
    ] = None,
    answers: Annotated[
        Path | None,
        option("Write a figure (SVG or PNG) here: the most frequent answers of each place, by how many have them."),
    ] = None,
) -> None:
    """Clients, splits, answers, sources, floors and faults of a dataset, with examples as a page (--html)."""
    from confed.cli.dataset_description import describe as describe_data

    description = describe_data(name, options or [], out, html, croissant, answers)
    pictures = description.pop("shown")
    answer(description)
    from rich.table import Table

    if any("modalities" in row for row in description["rows"]):
        table = _of_modalities(description["rows"])
        table.caption, table.caption_justify = "numbers of train/validation/test, of unseen places all", "left"
    else:
        table = Table("place", "role", "questions", "pictures", "answers", "most frequent", box=None, pad_edge=False)
        for row in description["rows"]:
            table.add_row(*(escape(str(value)) for value in row.values()))
    shown = for_people()
    shown.print(
        f"[bold]{escape(description['name'])}[/]: {description['answers']} answers, {description['words']} words"
    )
    shown.print(table)
    if pictures and shown.is_terminal and shown.color_system:
        shown.print(_thumbnails(pictures))
    for key, value in description["facts"].items():
        shown.print(f"{escape(key)}: {escape(value)}")
    for fault in description["faults"]:
        shown.print(f"[yellow]mind:[/] {escape(fault)}")
    if not description["faults"]:
        shown.print("no faults found")
    for file in (out, html, answers, *description.get("files", ())):
        if file is not None:
            shown.print(f"written: {escape(str(file))}", soft_wrap=True)


def _thumbnails(pictures: "Sequence[tuple[np.ndarray, str]]", side: int = 12, across: int = 6) -> "Text":
    """Pictures as blocks of two pixels a character, ``across`` of them side by side."""
    import numpy as np
    from rich.text import Text

    from confed.data.pictures import resize

    text = Text()
    for start in range(0, len(pictures), across):
        gap = np.zeros((side, 1, 3), np.uint8)
        small = [np.hstack([resize(pixels, side), gap]) for pixels, _ in pictures[start : start + across]]
        rows = np.hstack(small).tolist()
        for upper, lower in zip(rows[::2], rows[1::2], strict=True):
            for above, below in zip(upper, lower, strict=True):
                text.append("▀", "rgb({},{},{}) on rgb({},{},{})".format(*above, *below))
            text.append("\n")
        text.append("\n")
    return text


def _of_modalities(rows: Sequence[dict[str, Any]]) -> "RichTable":
    """A line per place: what it has, and how much of it in training / validation / test."""
    from rich.table import Table

    kinds: list[str] = []
    for kind in ("questions", "pictures", "sounds", "series"):
        if any(row[kind] for row in rows):
            kinds.append(kind)
    table = Table("place", "modalities", *kinds, box=None, pad_edge=False)
    places = dict.fromkeys(row["place"] for row in rows)
    for place in places:
        place_rows = [row for row in rows if row["place"] == place]
        has = " / ".join(dict.fromkeys(row["modalities"] for row in place_rows if row["modalities"]))
        counts: list[str] = []
        for kind in kinds:
            numbers = [row[kind] for row in place_rows]
            counts.append("/".join(map(str, numbers)) if any(numbers) else "-")
        table.add_row(escape(place), escape(has), *counts)
    return table


@prepare_app.callback()
def makers() -> None:
    """Make a dataset's folder from published files."""


@prepare_app.command("gqa-scenes")
def gqa_scenes(
    gqa: Annotated[Path, option("Folder with GQA's question files.")],
    images: Annotated[Path, option("Folder with GQA's pictures, <image id>.jpg.")],
    out: Annotated[Path, option("Folder to write to; `data.root` of the recipes fedvqa_gqa_a and _b.")] = Path(
        "gqa_scenes"
    ),
    predictions: Annotated[
        Path | None, option("Scene predictions: CSV or JSON lines with image, category, confidence.")
    ] = None,
    weights: Annotated[
        Path | None, option("Instead: a scene classifier, made by `confed weights convert places365`.")
    ] = None,
    threshold: Annotated[float, option("Least confidence of a picture's scene.")] = 0.5,
    answers: Annotated[int, option("Size of the answer vocabulary.")] = 1642,
    max_missing: Annotated[float, option("Largest share of pictures that may be missing.")] = 0.01,
    train_cap: Annotated[int | None, option("Most training questions per scene.")] = None,
    questions: Annotated[Literal["balanced", "all"], option("GQA's balanced or complete question files.")] = "balanced",
    seed: Annotated[int, option("Seed of the draw under --train-cap.")] = 0,
    device: Annotated[str, option("Where the scene classifier computes: cpu or cuda.")] = "cpu",
) -> None:
    """GQA divided into the six scenes of FedVQA; prints its counts beside the paper's."""
    from confed.prepare.gqa_scenes import Options, prepare

    options = Options(threshold, answers, max_missing, train_cap, questions, seed)
    with _bars() as progress:
        manifest = prepare(
            gqa, images, out, options, predictions=predictions, weights=weights, device=device, progress=progress
        )
    _print_counts(manifest)
    tell(manifest, f"written: {out}")


@prepare_app.command("vqa-v2")
def vqa_v2(
    root: Annotated[Path, option("Folder with the four official files of questions and annotations.")],
    features: Annotated[
        list[Path] | None,
        option("Region features: a folder with an .npz or .npy file per picture, or an HDF5 file; repeat."),
    ] = None,
    encoder: Annotated[
        str | None, option("Instead: a picture encoder of transformers (name or folder) for grid features.")
    ] = None,
    images: Annotated[list[Path] | None, option("For --encoder: folders with COCO's pictures.")] = None,
    out: Annotated[Path | None, option("File to write; regions.safetensors in ROOT by default.")] = None,
    regions: Annotated[int | None, option("Regions that every picture must have, such as 36.")] = None,
    width: Annotated[int | None, option("Features that every region must have, such as 2048.")] = None,
    precision: Annotated[Literal["float16", "float32"], option("Precision of the stored features.")] = "float16",
    grid: Annotated[int, option("For --encoder: most cells per side.")] = 10,
    device: Annotated[str, option("Where the encoder computes: cpu or cuda.")] = "cpu",
) -> None:
    """Check VQA v2's files and write the features of all its pictures as one file that is read row by row."""
    from confed.prepare.region_features import Options, prepare

    options = Options(regions, width, precision, grid, device)
    with _bars() as progress:
        prepared = prepare(root, features or (), images or (), encoder, out, options, progress)
    lines = [
        f"{split}: {count} questions about {prepared['pictures'][split]} pictures"
        for split, count in prepared["questions"].items()
    ]
    lines.append(
        f"features: {prepared['regions']} regions x {prepared['width']}, {prepared['padded']} pictures with fewer "
        f"regions, {prepared['unused']} pictures that no question is about left out\nwritten: {prepared['file']}"
    )
    tell(prepared, "\n".join(lines))


@prepare_app.command("label-embeddings")
def label_embeddings(
    labels: Annotated[
        str,
        argument("flair, flair-fine, coco, coco-groups, voc, ucm, captions, scenes, or a file with one label a line."),
    ],
    out: Annotated[Path, argument("The .safetensors file to write; `model.embeddings` of a recipe.")],
    encoder: Annotated[
        Literal["clip", "sentence", "mini"],
        option("CLIP's text encoder, a sentence encoder, or the built-in words (needs no download)."),
    ] = "clip",
    source: Annotated[str, option("The encoder's folder or name on the hub.")] = "openai/clip-vit-base-patch16",
    root: Annotated[Path | None, option("FLAIR's folder, for its fine names.")] = None,
    coarse: Annotated[
        Literal["name", "concat", "avg"],
        option("FLAIR's coarse labels: their names, their fine names in one prompt, or the mean over these."),
    ] = "name",
    template: Annotated[str, option("The prompt.")] = "The photo contains {label}.",
    most: Annotated[int, option("Most fine names in one prompt.")] = 20,
    width: Annotated[int | None, option("The model's features, if not the encoder's.")] = None,
) -> None:
    """Embed the names of labels with a text encoder, for models whose label tokens are fixed."""
    from confed.prepare.label_embeddings import write_label_embeddings

    table = write_label_embeddings(
        labels, out, encoder=encoder, source=source, root=root, coarse=coarse, template=template, most=most, width=width
    )
    count, width = table.vectors.shape
    content = {"file": str(out), "labels": count, "width": width, "source": table.source}
    tell(content, f"{count} labels x {width} features: {table.source}\nwritten: {out}")


@prepare_app.command("pieces")
def pieces(
    recipe: Annotated[str, argument("A recipe file, or the name of a packaged one, with captions.")],
    out: Annotated[Path, argument("The model file to write; `model.pieces` of the recipe.")],
    overrides: Annotated[list[str] | None, argument("section.key=value of the recipe.")] = None,
    size: Annotated[int, option("Number of pieces.")] = 8000,
) -> None:
    """Learn pieces of words (SentencePiece) from the public texts of a recipe's data."""
    from confed.prepare.sentencepiece import prepare_pieces

    prepared = prepare_pieces(recipe, out, size, overrides or ())
    text = f"{prepared['pieces']} pieces of {prepared['texts']} public texts\nwritten: {prepared['file']}"
    tell(prepared, text)


def _print_counts(manifest: dict[str, Any]) -> None:
    from rich.table import Table

    shown, pictures = for_people(), manifest["pictures"]
    table = Table("scene", "pictures", box=None, pad_edge=False)
    for column in ("train", "paper", "test", "paper"):
        table.add_column(column, justify="right")
    table.add_column("test answers outside", justify="right")
    for scene, roles in manifest["scenes"].items():
        train, test = roles["train"], roles["test"]
        counts = (train["questions"], train["published"], test["questions"], test["published"])
        table.add_row(
            scene, str(train["pictures"] + test["pictures"]), *map(str, counts), str(test["outside_vocabulary"])
        )
    shown.print(table)
    first = ", ".join(pictures["first_missing"])
    missing = f" (the first: {first}; all: missing.txt)" if pictures["missing"] else ""
    dropped = sum(roles["train"]["outside_vocabulary"] for roles in manifest["scenes"].values())
    shown.print(
        f"pictures: {pictures['asked_about']} asked about, {pictures['missing']} missing{escape(missing)}, "
        f"{pictures['without_prediction']} without a prediction, {pictures['below_threshold']} below the threshold "
        f"{manifest['options']['threshold']}, {pictures['in_no_scene']} in none of the six scenes, "
        f"{pictures['kept']} kept\n"
        f"answers: {manifest['answers']} of {manifest['distinct_answers']} in the training questions; {dropped} "
        "training questions with another answer were dropped",
        soft_wrap=True,
    )


@contextmanager
def _bars() -> Iterator[Progress]:
    """A bar per step on a terminal, otherwise nothing."""
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

    steps: dict[str, TaskID] = {}
    with Bars(console=console, transient=True, disable=not console.is_terminal) as bars:

        def show(event: Event) -> None:
            if isinstance(event, StepProgress):
                step, has_total = event.step, bool(event.total)
                if step not in steps:
                    steps[step] = bars.add_task(step, total=event.total or None)
                bars.update(
                    steps[step], completed=event.done, description=step if has_total else f"{step}: {event.done}"
                )

        yield show


weights_app = typer.Typer(help="Pretrain small models, and convert published checkpoints.")
app.add_typer(weights_app, name="weights")
convert_app = typer.Typer(help="Turn published checkpoints into safetensors files.")
weights_app.add_typer(convert_app, name="convert")


@convert_app.callback()
def options() -> None:
    """Turn published checkpoints into safetensors files."""


@convert_app.command()
def places365(
    source: Annotated[Path, argument("The published checkpoint, e.g. resnet18_places365.pth.tar.")],
    out: Annotated[Path, argument("The .safetensors file to write.")],
    arch: Annotated[Literal["resnet18", "resnet50"] | None, option("Default: found in the checkpoint.")] = None,
) -> None:
    """Make the scene classifier of `confed data prepare gqa-scenes` from a Places365 ResNet.

    Code in the file is not run: a checkpoint that holds more than tensors and plain values is refused.
    """
    from confed.prepare.checkpoints import convert_places365

    _converted(convert_places365(source, out, arch), "{architecture}, {parameters:,} parameters", out)


@convert_app.command()
def albef(
    source: Annotated[Path, argument("The published checkpoint, e.g. ALBEF.pth or vqa.pth.")],
    out: Annotated[Path, argument("The .safetensors file to write.")],
    heads: Annotated[int | None, option("Attention heads. Default: one per 64 features.")] = None,
) -> None:
    """Make the weights of the model `albef` from a published ALBEF; a recipe names them in model.pretrained.

    Code in the file is not run: a checkpoint that holds more than tensors and plain values is refused.
    """
    from confed.prepare.checkpoints import convert_albef

    text = "ALBEF for {image_size} x {image_size} pixels, {parameters:,} parameters\ndecoder: {decoder}"
    _converted(convert_albef(source, out, heads), text, out)


@convert_app.command()
def model(
    source: Annotated[Path, argument("A folder of transformers with pytorch_model.bin.")],
    out: Annotated[Path, argument("The folder to write; must not exist.")],
) -> None:
    """Make a folder that runs read, weights as safetensors, of one whose weights are pickles.

    Code in the file is not run: weights that hold more than tensors are refused.
    """
    from confed.prepare.checkpoints import convert_model

    _converted(convert_model(source, out), "{tensors} tensors, {parameters:,} parameters", out, "folder")


def _converted(facts: Mapping[str, Any], text: str, out: Path, kind: str = "file") -> None:
    """What a conversion has written, as JSON or as text with the facts filled in."""
    written = f"{text.format(**facts)}\nwritten: {out} (SHA-256 {facts['sha256']})"
    tell({kind: str(out), **facts}, written)


KINDS = {"features": "outputs of frozen layers for examples", "pictures": "which picture files were found whole"}


@data_app.command()
def cache(
    clear: Annotated[bool, option("Remove all that is kept; runs compute it again.", "--clear")] = False,
) -> None:
    """Show what confed keeps of examples between runs, where, and its size.

    CONFED_FEATURES=off keeps no features.
    """
    kept = _kept()
    if clear:
        for folder, files in kept.values():
            if folder.is_dir():
                shutil.rmtree(folder)
                say(f"removed {len(files)} files in {escape(str(folder))}")
        return
    folders: dict[str, dict[str, Any]] = {}
    for kind, (folder, files) in kept.items():
        size = sum(file.stat().st_size for file in files)
        folders[kind] = {"folder": str(folder), "files": len(files), "bytes": size}
    lines = [
        f"{kind} ({KINDS[kind]}): {held['files']} files, {held['bytes']:,} bytes in {held['folder']}"
        for kind, held in folders.items()
    ]
    tell(folders, "\n".join(lines))


def _kept() -> dict[str, tuple[Path, list[Path]]]:
    from confed.data.ml_files.integrity import cache_folder

    folders = {kind: cache_folder().parent / kind for kind in KINDS}
    result: dict[str, tuple[Path, list[Path]]] = {}
    for kind, folder in folders.items():
        result[kind] = (folder, [p for p in folder.rglob("*") if p.is_file()])
    return result


@weights_app.command()
def pretrain(
    model: Annotated[str, argument("The mini backbone.")] = "vilt_mini",
    out: Annotated[Path | None, option("The safetensors file to write; default: MODEL.safetensors.")] = None,
    questions: Annotated[int | None, option("Number of public questions.")] = None,
    epochs: Annotated[int | None, option("Passes over the questions.")] = None,
    seed: Annotated[int | None, option("Seed.")] = None,
) -> None:
    """Pretrain a mini backbone from random weights; the same command continues after an interruption."""
    from confed.prepare.pretraining import pretrain as make

    file = Path(f"{model}.safetensors") if out is None else out
    given = {"questions": questions, "epochs": epochs, "seed": seed}
    changes = {key: value for key, value in given.items() if value is not None}
    accuracy = make(model, file, progress=not is_json(), **changes)
    answer({"model": model, "file": str(file), "accuracy": accuracy})

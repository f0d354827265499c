"""Verb that writes a recipe for a folder of data: init."""

import json
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.padding import Padding

from confed.cli.app import answer, app, argument, for_people, option

if TYPE_CHECKING:
    from confed.prepare.own_data import Found
    from confed.recipes.recipe import Recipe


@app.command(short_help="Write a recipe for a folder of your own data.")
def init(
    folder: Annotated[
        Path | None, argument("Folder with your pictures, questions or texts; asked for on a terminal.")
    ] = None,
    out: Annotated[Path | None, option("Recipe to write; must not exist. [default: FOLDER's name .toml, here]")] = None,
    clients: Annotated[int, option("Clients, where the data do not say whose they are.", min=1)] = 4,
    rounds: Annotated[
        int | None, option("Communication rounds.", min=1, show_default="5; with an encoder 20, which cost little")
    ] = None,
    form: Annotated[str, option("Way of reading the folder, where there are several.", "--as")] = "",
    device: Annotated[str, option("cpu, cuda or auto.")] = "cpu",
    trial: Annotated[float, option("Seconds to try models in; 0: no trial.", min=0)] = 40.0,
    encoder: Annotated[
        str, option("Picture encoder to try: a name on the hub or a folder.", show_default="MobileNetV2")
    ] = "",
    text_encoder: Annotated[str, option("Text encoder to try, for questions.", show_default="a small MiniLM")] = "",
) -> None:
    """Write a recipe for a folder of your own data: what is there is recognised, and what is left out is said.

    Models are tried on a part of your pictures: the packaged one, a small CNN, and an encoder that is in the cache or
    can be fetched; offline nothing is waited for.

    Recognised are folders of classes, files of labels or questions (JSON, CSV, Parquet), also in a folder per client,
    COCO, VQA v2 and datasets of Hugging Face.
    """
    from confed.cli.model_trial import choose
    from confed.data.intake.walk import visible
    from confed.prepare.own_data import recognise
    from confed.prepare.recipe_draft import draft
    from confed.recipes.recipe import parse_recipe

    if folder is None:
        folder, clients = _asked(clients)
    place = out or Path(f"{folder.resolve().name or 'data'}.toml")
    if place.exists():
        raise ValueError(f"{place} exists already; name another file with --out")
    recognised, left = recognise(folder, clients)
    names = [one.form for one in recognised]
    if form and form not in names:
        raise ValueError(f"--as must be one of {', '.join(names)}, which {folder} can be read as; got {form!r}")
    chosen = recognised[names.index(form)] if form else recognised[0]
    if form:
        left = [p.name for p in visible(folder) if p.name not in chosen.uses]
    words = ", ".join(left[:6]) + (f" and {len(left) - 6} more" if len(left) > 6 else "")
    usual = parse_recipe(draft(chosen, str(place), words, rounds, device), place.stem)
    read, minds = _read(usual, folder, [name for name in names if name != chosen.form])
    minds = [text for text in minds if text not in chosen.saw]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they were told above
        training, tried = choose(chosen, encoder, text_encoder, trial)
    text = draft(chosen, str(place), words, rounds, device, training, tried)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text, encoding="utf-8")
    others = [name for name in names if name != chosen.form]
    answer({
        "recipe": str(place), "form": chosen.form, "dataset": chosen.dataset, "options": chosen.options,
        "saw": chosen.saw, "left": left, "others": others, "read": read, "minds": minds, "tried": tried,
    })  # fmt: skip
    _say(folder, place, chosen, words, others, [f"read: {read}", *(f"mind: {text}" for text in minds), *tried])


def _read(recipe: "Recipe", folder: Path, others: list[str]) -> tuple[str, list[str]]:
    """Numbers of clients and examples as the proposal's reader gives them, and its warnings."""
    from confed.runs.dataset import load_dataset

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            dataset = load_dataset(json.dumps(recipe.sections["data"], default=str), recipe.run.seed)
        except ValueError as error:
            ways = f"; other ways of reading it: {', '.join(f'--as {name}' for name in others)}" if others else ""
            raise ValueError(
                f"{folder} is recognised, and its reader {recipe.sections['data']['name']!r} refuses it, so that no "
                f"recipe is written: {error}{ways}"
            ) from error
    roles = ("train", "validation", "test")
    counts: list[int] = []
    for role in roles:
        counts.append(sum(len(dataset.clients[name].roles[role]) for name in dataset.clients))
    numbers = ", ".join(f"{count} {role}" for count, role in zip(counts, roles, strict=True))
    if elsewhere := sum(map(len, dataset.unseen.values())):
        numbers += f", {elsewhere} in places that do not train"
    account = [dataset.facts[key] for key in ("account", "read") if key in dataset.facts]
    summary = "; ".join([f"{len(dataset.clients)} clients, examples: {numbers}", *account])
    return summary, list(dict.fromkeys(str(warning.message) for warning in told))


def _say(folder: Path, place: Path, chosen: "Found", left: str, others: list[str], read: list[str]) -> None:
    """What was found, what was left, and what comes next."""
    shown = for_people()
    shown.print(f"[bold]{escape(str(folder))}[/] is read as {escape(chosen.form)} (dataset {escape(chosen.dataset)}):")
    for line in chosen.saw:
        shown.print(Padding(escape(line), (0, 0, 0, 2)))
    for line in read:
        shown.print(Padding(escape(line), (0, 0, 0, 2)))
    if left:
        shown.print(Padding(f"not read: {escape(left)}", (0, 0, 0, 2)))
    if others:
        shown.print(f"  other ways of reading it: {', '.join(f'--as {name}' for name in others)}")
    shown.print(f"\nwritten: {escape(str(place))}", soft_wrap=True)
    for command, what in (("data describe", "look at it"), ("run", "train and test")):
        shown.print(f"  [bold]{escape(f'confed {command} {place}')}[/]   # {what}", soft_wrap=True)


def _asked(clients: int) -> tuple[Path, int]:
    """Folder and number of clients, asked for on a terminal."""
    if not sys.stdin.isatty():
        raise ValueError("confed init needs the folder with your data: confed init FOLDER")
    place = typer.prompt("Folder with your data", err=True)
    clients = typer.prompt("Clients, where the data do not say whose they are", default=clients, type=int, err=True)
    return Path(str(place)).expanduser(), clients

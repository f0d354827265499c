"""Verb that prints everything about one thing: show."""

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from confed.cli.app import Json, app, print_json
from confed.cli.completion import complete_anything

if TYPE_CHECKING:
    from confed.cli.description import Description, Setting

WIDEST = 100  # columns that texts take at most: longer lines are hard to read


@app.command(rich_help_panel="Start")
def show(
    name: Annotated[
        str,
        typer.Argument(
            help="A method, model, dataset, task or recipe (`confed list`), the section local or run, a recipe file, "
            "or MODULE:NAME of your own (with --allow-code MODULE).",
            autocompletion=complete_anything,
        ),
    ],
    kind: Annotated[
        str, typer.Option(help="method, model, dataset, task, recipe or section, where several have the name.")
    ] = "",
    toml: Annotated[bool, typer.Option("--toml", help="Of a recipe: print its file, to be changed.")] = False,
    as_json: Json = False,
) -> None:
    """Everything about one method, model, dataset, task or recipe: settings, an example, papers, differences."""
    from confed.cli.catalogue import packaged
    from confed.cli.description import describe_name
    from confed.recipes.recipe import read_text

    description = describe_name(name, "recipe" if toml and not kind else kind)
    if toml:
        texts = [recipe.text for recipe in packaged() if recipe.name == name]
        print(texts[0] if texts else read_text(Path(name)), end="")
    elif as_json:
        print_json([asdict(one) for one in description])
    else:
        console = Console(highlight=False)
        width = min(console.width, WIDEST)
        for number, one in enumerate(description):
            console.print("\n".join([*([""] if number else []), *page(one, width)]), soft_wrap=True)


def page(one: "Description", width: int) -> Iterator[str]:
    """A description as lines of rich's markup."""
    label = f" · {escape(one.label)}" if one.label not in ("", one.name) else ""
    yield f"[bold]{escape(one.name)}[/]{label} ({one.kind}{f', {one.group}' if one.kind == 'method' else ''})"
    yield from _wrapped(one.summary, width, "")
    if one.source:
        yield "\n[bold]Paper[/]"
        yield from _wrapped(one.source, width)
    if one.facts:
        yield "\n[bold]Facts[/]"
        wide = max(map(len, one.facts)) + 2
        for key, value in one.facts.items():
            yield from _wrapped(f"{key:{wide}}{value}", width, after="  " + " " * wide)
    yield f"\n[bold]Example{'s' if len(one.examples) > 1 else ''}[/]"
    for line in one.examples:
        yield f"  {escape(line)}"  # a command is in one piece, to be copied
    if one.settings or one.shared:
        yield f"\n[bold]Settings in {escape(f'[{one.section}]')}[/]"
        yield from _settings(one.settings, width)
    if one.shared:
        yield from _wrapped(f"of every method (confed show algorithm): {', '.join(one.shared)}", width)
    if one.text:
        yield f"\n[bold]{'How it works' if one.kind == 'method' else 'More'}[/]"
        yield from _paragraphs(one.text, width)
    if one.differences:
        yield "\n[bold]Where it differs from the text[/]"
        for difference in one.differences:
            why = f" ({difference.why})" if difference.why else ""
            difference_text = f"{difference.text} → " if difference.text else ""
            yield from _wrapped(f"- {difference_text}{difference.here}{why}", width, after="    ")
    if one.recipes:
        yield "\n[bold]Recipes[/]"
        yield from _wrapped(", ".join(one.recipes), width)


def _settings(listed: "Sequence[Setting]", width: int) -> Iterator[str]:
    """Two lines or more per setting: name, default and type; what it means."""
    for one in listed:
        default = f"= {one.default}" if one.default else "not set"
        value = "must be given" if one.required else default
        head = f"{one.name} (table)" if one.kind == "table" else f"{one.name} {value}   {one.kind}"
        first, *rest = _wrapped(head, width, after=" " * 6)
        name = escape(one.name)
        yield f"  [bold]{name}[/]{first[len(name) + 2 :]}"
        yield from rest
        yield from _wrapped(one.meaning, width, " " * 6)


def _paragraphs(texts: Sequence[str], width: int) -> Iterator[str]:
    """Paragraphs of docstrings: prose and lists in the terminal's width, formulas and tables line by line."""
    for number, text in enumerate(texts):
        if number:
            yield ""
        lines = text.splitlines()
        if any(line.startswith(("|", "    ", "\t")) for line in lines) or text.endswith("::"):
            for line in lines:
                yield from _wrapped(line.replace("``", ""), width, after="      ")
            continue
        for paragraph in re.split(r"\n(?=[-*] )", text):
            yield from _wrapped(
                " ".join(_unmarked(paragraph).split()), width, after="    " if paragraph[:2] in ("- ", "* ") else ""
            )


def _unmarked(text: str) -> str:
    return re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"\1", text).replace("``", "")


def _wrapped(text: str, width: int, before: str = "  ", after: str = "") -> list[str]:
    """A text in lines of at most ``width`` columns; further lines begin with ``after``, or as the first."""
    lines = textwrap.wrap(
        text, width, initial_indent=before, subsequent_indent=after or before, break_on_hyphens=False,
        drop_whitespace=True,
    )  # fmt: skip
    return [escape(line) for line in lines]

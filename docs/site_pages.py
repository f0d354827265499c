"""Pages of the documentation site that are made from code, by what `confed show` and `confed list` are made of.

``python docs/site_pages.py`` writes them to ``docs/reference/``, which is not committed.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import click

from confed.cli.catalogue import listing
from confed.cli.description import Description, Setting, describe_name

ROOT = Path(__file__).parents[1]
OUTSIDE = {name: f"{name.lower()}.md" for name in ("CONTRIBUTING", "CHANGELOG", "SECURITY")}
"""Pages of the repository's root that the site has too."""

API = {
    "Running and loading": ("Recipe", "load_recipe", "load_exported", "create_model", "list_models", "allow_code"),
    "Methods": (
        "Algorithm", "action", "Traits", "Client", "ClientInfo", "Local", "Objective", "train", "teacher", "Rules",
        "Scope", "Mean", "Flow", "Call", "Message", "Reply", "ClientState", "ServerState", "check_algorithm",
    ),
    "Data and models": (
        "Examples", "Split", "FederatedDataset", "Batch", "Output", "register_dataset", "register_model",
        "register_task", "Measure", "register_measure", "check_model",
        "check_task",
    ),
    "The simulator": ("Setup", "Simulation", "Workspace", "Members", "simulate"),
}  # fmt: skip
"""Sections of the page on the Python interface; names that are public and stand nowhere come last."""


def generate(folder: Path) -> None:
    """Writes all pages.

    Args:
        folder: where to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pages = {
        "methods.md": _things("method", "methods", "Methods", "algorithm"),
        "models.md": _things("model", "models", "Models", "model"),
        "datasets.md": _things("dataset", "datasets", "Datasets", "data"),
        "tasks.md": _things("task", "tasks", "Tasks", "task"),
        "recipes.md": _things("recipe", "recipes", "Recipes", ""),
        "settings.md": _settings_page(),
        "commands.md": _commands(),
        "api.md": _api(),
        **{file: (ROOT / f"{name}.md").read_text(encoding="utf-8") for name, file in OUTSIDE.items()},
    }
    for name, text in pages.items():
        content = "\n".join(text) if not isinstance(text, str) else text
        place = folder / name
        if not place.is_file() or place.read_text(encoding="utf-8") != content:  # unchanged pages are not read again
            place.write_text(content, encoding="utf-8")


def adapted(name: str, text: str) -> str:
    """A page whose links to files of the repository's root lead to the pages of the site.

    Args:
        name: of the page, without its ending.
        text: Markdown.
    """
    up = "../" if "/" in name else ""
    if name.startswith("reference/") and name.removeprefix("reference/") in {f[:-3] for f in OUTSIDE.values()}:
        text = text.replace("](docs/", "](../")
        for outside, file in OUTSIDE.items():
            text = text.replace(f"]({outside}.md", f"]({file}")
    for outside, file in OUTSIDE.items():
        text = re.sub(rf"\]\((?:\.\./)+{outside}\.md", f"]({up}reference/{file}", text)
    text = re.sub(r"\]\((?:\.\./)*README\.md", f"]({up}index.md", text)
    return re.sub(
        r"\]\((?:\.\./)*(LICENSE|(?:src|tests|benchmarks|scripts)(?:/[^)]*)?|docs/results/)\)", r"] (`\1`)", text
    )


def _things(kind: str, plural: str, title: str, section: str) -> Iterator[str]:
    """A page with everything of one kind, in the groups of lists."""
    yield f"# {title}\n"
    yield f"What `confed list {plural}` lists and `confed show NAME` prints.\n"
    if section:
        yield f"Keys stand in a recipe's section `[{section}]`, beside `name`.\n"
    group = ""
    for row in listing(plural):
        if row["group"] != group and kind != "dataset":
            group = row["group"]
            yield f"## {_escaped(group[:1].upper() + group[1:])}\n"
        (one,) = describe_name(row["name"], kind)
        yield from _entry(one)


def _entry(one: Description) -> Iterator[str]:
    label = f" ({_escaped(one.label)})" if one.label not in ("", one.name) else ""
    yield f"### `{one.name}`{label}\n"
    yield f"{_escaped(one.summary)}\n"
    if one.source:
        yield f"*Source*: {_escaped(one.source)}\n"
    if one.facts:
        yield "\n".join(f"- {_escaped(key)}: {_escaped(value)}" for key, value in one.facts.items()) + "\n"
    yield "```sh\n" + "\n".join(one.examples) + "\n```\n"
    yield from _table(one.settings)
    if one.text and one.kind in ("method", "recipe"):
        yield "**How it works**\n"
        yield from _paragraphs(one.text)
    if one.differences:
        yield "**Where it differs from the text**\n"
        for difference in one.differences:
            why = f" ({_escaped(difference.why)})" if difference.why else ""
            said = f"{_escaped(difference.text)} → " if difference.text else ""
            yield f"- {said}{_escaped(difference.here)}{why}"
        yield ""


def _table(listed: Sequence[Setting]) -> Iterator[str]:
    if not listed:
        return
    yield "| key | type | default | meaning |\n|---|---|---|---|"
    for one in listed:
        default = "must be given" if one.required else f"`{one.default}`" if one.default else "–"
        cells = (f"`{one.name}`", _escaped(one.kind), default, _escaped(one.meaning))
        yield "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"
    yield ""


def _paragraphs(texts: Iterable[str]) -> Iterator[str]:
    """Paragraphs of docstrings; formulas and tables as they stand."""
    for text in texts:
        if any(line.startswith(("|", "    ")) for line in text.splitlines()) or "\n  " in text:
            yield f"```text\n{text.replace('``', '')}\n```\n"
        else:
            plain = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"\1", text).replace("``", "")
            lines = (
                f"- {_escaped(line[2:])}" if line.startswith("- ") else _escaped(line) for line in plain.splitlines()
            )
            yield "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    """A text in which Markdown has no markup but code in backticks."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([\\*_<>\[\]$#~{}])", r"\\\1", part) for part in parts)


def _settings_page() -> Iterator[str]:
    yield "# Keys of every recipe\n"
    yield "Sections whose keys are the same in all recipes; `confed show local` prints one.\n"
    for name in ("run", "local", "algorithm"):
        (one,) = describe_name(name, "section")
        yield f"## `[{name}]`\n\n{_escaped(one.summary)}\n"
        yield from _table(one.settings)


def _commands() -> Iterator[str]:
    """The verbs of the command line with their arguments."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # typer's, about a newer click
        from confed.cli.app import command_line

        root = command_line()
    yield "# Commands\n"
    yield "`confed VERB --help` prints the same in a terminal.\n"
    yield _escaped(" ".join((root.epilog or "").split())) + "\n"
    yield from _verbs("confed", root)


def _verbs(before: str, command: "click.Command") -> Iterator[str]:
    verbs = getattr(command, "commands", {})
    for name, verb in sorted(verbs.items()):
        yield from _verbs(f"{before} {name}", verb)
    if not verbs:
        yield f"## `{before}`\n"
        yield _escaped(" ".join((command.help or "").split())) + "\n"
        for parameter in command.params:
            if getattr(parameter, "hidden", False):  # of every command
                continue
            names = ", ".join(parameter.opts) if parameter.param_type_name == "option" else parameter.name.upper()
            yield f"- `{names}`: {_escaped(str(getattr(parameter, 'help', '') or '').replace(chr(92), ''))}"
        yield ""


def _api() -> Iterator[str]:
    """The public names of the package, from their docstrings."""
    import confed

    known = {name for names in API.values() for name in names}
    sections = {**API, "Further names": tuple(name for name in confed.__all__ if name not in known)}
    yield "# Python interface\n"
    yield "The names of `confed`. Everything else may change between minor versions.\n"
    for title, names in sections.items():
        there = [name for name in names if name in confed.__all__]
        if there:
            yield f"## {title}\n"
        for name in there:
            value = getattr(confed, name)
            what = "autoclass" if isinstance(value, type) else "autofunction" if callable(value) else "autodata"
            # Fields of named tuples are documented as attributes already.
            members = "   :members:\n" if what == "autoclass" and not issubclass(value, tuple) else ""
            yield f"### {name}\n\n```{{eval-rst}}\n.. {what}:: {_home(value, name)}\n{members}```\n"


def _home(value: object, name: str) -> str:
    """Where a public name is defined."""
    module = getattr(value, "__module__", "") or ""
    return f"{module}.{name}" if module.startswith("confed") else f"confed.{name}"


if __name__ == "__main__":
    generate(Path(__file__).parent / "reference")

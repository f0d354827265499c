"""Verbs that list, diagnose and describe: list, doctor, show."""

import json
import os
import platform
import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding

from confed.cli.app import (
    FAILED,
    answer,
    app,
    argument,
    for_people,
    option,
    table_of,
)
from confed.cli.completion import complete_anything, complete_kind, complete_task
from confed.cli.options import Private, Site, SiteData, SiteKey, Unsigned
from confed.system.packages import for_this_installation
from confed.system.release import DISTRIBUTION, VERSION

if TYPE_CHECKING:
    from confed.cli.description import Description, Setting

WIDEST = 100  # columns that texts take at most: longer lines are hard to read

# Diagnosis of the installation: versions, processors, memory --------------------------------------------------


def diagnose() -> dict[str, dict[str, str]]:
    """Versions, processors, memory, GPUs and packaged weights; what is missing says how to get it."""
    return {
        "system": _system(),
        "libraries": _libraries(),
        "extras": _extras(),
        "GPUs": _gpus(),
        "packaged weights": _weights(),
    }


def _system() -> dict[str, str]:
    import torch

    from confed.engines.workers import free_cores

    disk = shutil.disk_usage(Path.cwd())
    facts = {
        "python": platform.python_version(),
        "operating system": platform.platform(),
        "cores": f"{free_cores()} of {os.cpu_count()} may be used",
        "threads of torch": str(torch.get_num_threads()),
        "memory": _memory(),
        "disk": f"{disk.free / 2**30:.1f} GiB free of {disk.total / 2**30:.1f} GiB here",
    }
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "HF_HUB_OFFLINE"):
        facts[name] = os.environ.get(name, "not set")
    if facts["OMP_WAIT_POLICY"].upper() != "PASSIVE":
        facts["OMP_WAIT_POLICY"] += " (PASSIVE keeps waiting threads from taking cores from other processes)"
    if facts["HF_HUB_OFFLINE"] in ("not set", "0"):
        facts["HF_HUB_OFFLINE"] += " (names on the hub may be downloaded; 1 forbids it and fails at once)"
    return facts


def _memory() -> str:
    import psutil

    memory = psutil.virtual_memory()
    return f"{memory.available / 2**30:.1f} GiB available of {memory.total / 2**30:.1f} GiB"


def _requirements() -> dict[str, list[str]]:
    """Extra, or "" for those that are always there -> what it requires."""
    groups: dict[str, list[str]] = {}
    for requirement in requires(DISTRIBUTION) or ():
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", requirement)
        groups.setdefault(extra[1] if extra else "", []).append(requirement)
    return groups


def _libraries() -> dict[str, str]:
    versions = {"confed": VERSION}
    for requirement in _requirements().get("", ()):
        name = _package(requirement)
        hint = for_this_installation(f"pip install {name} -c constraints.txt")
        versions[name] = _version(name) or f"missing ({requirement}): {hint}"
    return versions


def _extras() -> dict[str, str]:
    lines: dict[str, str] = {}
    for extra, required in sorted(_requirements().items()):
        versions = {name: _version(name) for name in map(_package, required)}
        missing = [name for name, installed in versions.items() if installed is None]
        parts = [", ".join(f"{name} {installed}" for name, installed in versions.items() if installed)]
        if missing:
            command = for_this_installation(f"pip install '.[{extra}]' -c constraints.txt")
            parts.append(f"missing {', '.join(missing)}: {command}")
        if extra:
            lines[extra] = "; ".join(filter(None, parts))
    return lines


def _package(requirement: str) -> str:
    match = re.match(r"[\w.-]+", requirement)
    return match[0] if match else requirement


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _gpus() -> dict[str, str]:
    import torch

    if not torch.cuda.is_available():
        return {"none": f"torch {torch.__version__} sees no GPU; runs use the processor"}
    devices: dict[str, str] = {}
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        devices[f"cuda:{number}"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    return devices


def _weights() -> dict[str, str]:
    from confed.models.pretrained import describe as metadata
    from confed.models.pretrained import packaged, weights_file
    from confed.prepare.pretraining import MINIS

    weights: dict[str, str] = {}
    for name in MINIS:
        if not packaged(name):
            weights[name] = (
                f"missing: give model.pretrained=FILE, made with `confed weights pretrain {name} --out FILE`, or false"
            )
            continue
        facts = metadata(weights_file(name))
        accuracy = facts.get("accuracy", {}).get("overall")
        planned, done = facts.get("settings", {}).get("epochs"), facts.get("epochs_done")
        place = weights_file(name)
        size = sum(file.stat().st_size for file in (place.iterdir() if place.is_dir() else (place,)))
        parts = [f"{size / 2**20:.1f} MiB", *([f"{len(facts['words'])} words"] if facts["words"] else ())]
        if accuracy is not None:
            parts.append(
                f"C-AP {accuracy:.3f} on held-out public pictures"
                if facts.get("metric") == "C-AP"
                else f"{accuracy:.1%} of held-out public questions right"
            )
        if facts.get("start"):
            parts.append("started from vilt_mini's")
        if planned is not None and done != planned:
            parts.append(f"unfinished: {done} of {planned} epochs")
        weights[name] = ", ".join(parts)
    return weights


# Verbs that list and diagnose: list, doctor -------------------------------------------------------------------


@app.command(name="list")
def list_things(
    kind: Annotated[
        str,
        argument(
            "methods, models, tasks, datasets, recipes or runs (those under ./runs)", autocompletion=complete_kind
        ),
    ] = "methods",
    task: Annotated[
        str, option("Only what a packaged recipe runs with this task, such as vqa.", autocompletion=complete_task)
    ] = "",
    paper: Annotated[str, option("Methods and recipes: only those whose paper or author has this.")] = "",
    contract: Annotated[bool, option("Methods: which checks apply, and why others do not.", "--contract")] = False,
) -> None:
    """List methods, models, tasks, datasets, recipes or runs.

    `confed show NAME` has everything about one of them.
    """
    from confed.cli.catalogue import listing

    rows = listing(kind, contract=contract, task=task, paper=paper)
    answer(rows)
    console = for_people()
    if not rows:
        console.print(f"no {escape(kind)} found")
        return
    if contract or kind == "runs":
        _print_rows(console, rows)
        return
    groups = dict.fromkeys(row["group"] for row in rows)
    wide = max(len(row["name"]) for row in rows)
    labels = max((len(row["label"]) for row in rows if "label" in row), default=0)
    for group in groups:
        if group:
            console.print(f"[bold]{escape(group)}[/]")
        _print_group(console, [row for row in rows if row["group"] == group], wide, min(labels, _LABEL))
    console.print(f"\n{len(rows)} {escape(kind)}; everything about one: confed show NAME")
    if kind == "methods":
        console.print("also: confed list models | tasks | datasets | recipes | runs")


_LABEL = 14  # columns of labels; longer ones are broken


def _print_group(console: Console, rows: Sequence[Mapping[str, Any]], wide: int, labels: int) -> None:
    """A line per thing: name, label and what it is."""
    table = table_of(show_header=False)
    table.add_column(width=wide, no_wrap=True)
    if labels:
        table.add_column(width=labels)
    table.add_column()
    for row in rows:
        label = [escape(row["label"])] if labels else []
        table.add_row(escape(row["name"]), *label, escape(row["summary"]))
    console.print(Padding(table, (0, 0, 0, 2 if rows[0]["group"] else 0)))


def _print_rows(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    table = table_of()
    for column in rows[0]:
        table.add_column(column, overflow="fold" if column == "name" else "ellipsis")
    for row in rows:
        table.add_row(*(escape(str(value)) for value in row.values()))
    console.print(table)


@app.command()
def doctor(
    what: Annotated[str | None, argument('"model": describe a vision-language model before a run with it.')] = None,
    source: Annotated[str | None, argument("Of model: a hub name, a folder, or tiny:FAMILY.")] = None,
    settings: Annotated[list[str] | None, argument("Of model: model.key=value, such as model.base=nf4.")] = None,
    server: Annotated[
        str | None, option("At a site: the server to join, HOST:PORT. Checks all that joining needs.")
    ] = None,
    recipe: Annotated[str, option("The federation's recipe.")] = "recipe.toml",
    site: Site = "",
    ca: Annotated[Path, option("Certificate of the server's authority.")] = Path("ca.crt"),
    key: SiteKey = Path("key"),
    private: Private = Path("private"),
    data: SiteData = None,
    card: Annotated[Path | None, option("This site's data card, if any.")] = None,
    insecure: Annotated[bool, option("The server has no TLS.", "--insecure")] = False,
    unsigned: Unsigned = False,
) -> None:
    """Check this installation, a model, or whether a site can join.

    Versions, threads, memory, GPUs and missing extras; with --server, what a site needs to join.

    `confed doctor model SOURCE`: family, parts, what LoRA would train, bytes per round, memory.
    """
    if what is not None:
        if what != "model" or source is None:
            raise ValueError(f"confed doctor takes nothing, or model SOURCE; got {what!r}{'' if source else ' alone'}")
        _sections(_model(source, settings or []))
        return
    if server is not None:
        terms = [f"card={json.dumps(str(card.resolve()))}"] if card is not None else []
        authority, given = None if insecure else ca, [*(data or []), *terms]
        _visit(server, recipe, site, authority, key, private, given, card, unsigned)
        return

    _sections(diagnose())


def _model(source: str, settings: Sequence[str]) -> dict[str, dict[str, str]]:
    from inspect import signature

    from confed.models.hf.description import describe
    from confed.recipes.overrides import apply_overrides
    from confed.recipes.recipe import named_section

    content: dict[str, Any] = {"model": {"name": "hf", "source": source}}
    apply_overrides(content, settings)
    if others := sorted(set(content) - {"model"}):
        raise ValueError(f"confed doctor model takes settings of model, such as model.base=nf4; got one of {others[0]}")
    section = named_section("model", content["model"])
    return describe(**{key: value for key, value in section.items() if key in signature(describe).parameters})


def _sections(findings: Mapping[str, Mapping[str, str]]) -> None:
    answer(findings)
    shown = for_people()
    for section, entries in findings.items():
        shown.print(f"[bold]{section}[/]")
        for key_, value in entries.items():
            shown.print(f"  {escape(key_)}: {escape(value)}", soft_wrap=True)


_MARKS = {"good": "[green]ok[/]  ", "mind": "[yellow]mind[/]", "bad": "[red]bad[/] "}


def _visit(
    server: str, recipe: str, site: str, ca: Path | None, key: Path, private: Path, data: list[str], card: Path | None,
    unsigned: bool,
) -> None:  # fmt: skip
    from confed.deployment.doctor import check_data, check_server, check_signature
    from confed.deployment.transports import transport_of

    transport_of("flower")

    if not site:
        raise ValueError("--site must say which of the data's clients this site is")
    signature = [] if ca is None or unsigned else check_signature(ca, key, site, recipe, card, private)
    problems = check_server(server, key, ca) + signature + check_data(recipe, site, private, data)
    faulty = sum(finding.mark == "bad" for finding in problems)
    answer([asdict(finding) for finding in problems])
    shown = for_people()
    for finding in problems:
        shown.print(f"{_MARKS[finding.mark]} {finding.what}: {escape(finding.text)}", soft_wrap=True)
        if finding.advice and finding.mark != "good":
            shown.print(f"       {escape(finding.advice)}", soft_wrap=True)
    shown.print(f"{faulty} to put right before joining" if faulty else "this site can join")
    if faulty:
        raise typer.Exit(FAILED)


# Everything about one thing ------------------------------------------------------------------------------------


@app.command()
def show(
    name: Annotated[
        str,
        argument(
            "A method, model, dataset, task or recipe (`confed list`), the section local or run, a recipe file, "
            "or MODULE:NAME of your own (with --allow-code MODULE).",
            autocompletion=complete_anything,
        ),
    ],
    kind: Annotated[str, option("method, model, dataset, task, recipe or section, where several have the name.")] = "",
    toml: Annotated[bool, option("Of a recipe: print its file, to be changed.", "--toml")] = False,
) -> None:
    """Explain one method, model, dataset, task or recipe.

    Settings, an example, papers, and where it differs from them.
    """
    from confed.cli.catalogue import packaged
    from confed.cli.description import describe_name
    from confed.recipes.recipe import read_text

    description = describe_name(name, "recipe" if toml and not kind else kind)
    if toml:
        texts = [recipe.text for recipe in packaged() if recipe.name == name]
        print(texts[0] if texts else read_text(Path(name)), end="")
        return
    answer([asdict(one) for one in description])
    console = for_people()
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
            unmarked = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"\1", paragraph).replace("``", "")
            after = "    " if paragraph[:2] in ("- ", "* ") else ""
            yield from _wrapped(" ".join(unmarked.split()), width, after=after)


def _wrapped(text: str, width: int, before: str = "  ", after: str = "") -> list[str]:
    """A text in lines of at most ``width`` columns; further lines begin with ``after``, or as the first."""
    lines = textwrap.wrap(
        text, width, initial_indent=before, subsequent_indent=after or before, break_on_hyphens=False,
        drop_whitespace=True,
    )  # fmt: skip
    return [escape(line) for line in lines]

"""Listings of methods, models, tasks, datasets, recipes and runs."""

import inspect
import json
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any

from confed import registry
from confed.federation.algorithm import Algorithm
from confed.federation.traits import GROUPS
from confed.recipes.recipe import packaged_recipes
from confed.recipes.schema import DERIVED, keywords


@dataclass(frozen=True)
class Difference:
    """A departure from the printed text."""

    text: str  # what paper or released code say
    here: str  # what this implementation does
    why: str = ""  # the reason; may be empty


@dataclass
class Paper:
    """A row of the page's index."""

    title: str  # of the method, as the page has it
    source: str
    # rows of the page's other tables about this method
    differences: list[Difference] = field(default_factory=list[Difference])


@cache
def papers() -> dict[str, Paper]:
    """Name of a method -> its row and differences, from ``docs/papers.md``, which wheels hold as ``confed/papers.md``.

    In tables whose first column is "method" that column says whom a row is about. Other tables are about the method
    in their section's heading, but for rows that begin with the name of another one and a colon.
    """
    packaged = files("confed") / "papers.md"
    place = packaged if packaged.is_file() else Path(__file__).parents[3] / "docs" / "papers.md"
    index: dict[str, Paper] = {}
    for heading, header, cells in _rows(place.read_text(encoding="utf-8")):
        if header[:2] == ["method", "name"] and heading == "Index":
            if name := re.fullmatch(r"`(\w+)`", cells[1]):  # other rows are settings of a method that has its own
                index[name[1]] = Paper(cells[0], _plain(cells[2]))
            continue
        row = dict(zip(header, cells, strict=False))
        sentence = next((row[key] for key in row if key.startswith("the text")), cells[0])
        for name in _about(heading, header, cells, index):
            difference = Difference(_plain(sentence), _plain(row["here"]), _plain(row.get("why", "")))
            index[name].differences.append(difference)
    return index


def _rows(page: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Heading, header and cells of every row of every table."""
    heading, header = "", list[str]()
    for line in page.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if not line.startswith("|"):
            header = []
            continue
        cells = [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
        if not header:
            header = cells
        elif not set(line) <= set("|-: "):
            yield heading, header, cells


def _about(heading: str, header: list[str], cells: list[str], index: dict[str, Paper]) -> list[str]:
    if "here" not in header:
        return []
    labels = {name: re.split(r" \(", paper.title)[0] for name, paper in index.items()}
    if header[0] == "method":
        written = set(re.findall(r"`(\w+)`", cells[1])) if "name" in header else set[str]()
        titles = {title.strip() for title in cells[0].split(",")}
        return [name for name, label in labels.items() if label in titles or name in written]
    before, colon, _ = cells[0].partition(":")
    if colon and (cited := [name for name, paper in index.items() if _names(before, paper.title)]):
        return cited
    return [name for name, label in labels.items() if label in heading]


def _names(before: str, title: str) -> bool:
    """Whether what stands before a colon names the method of a title."""
    word = before.strip()
    return bool(re.fullmatch(r"[\w³ -]{2,24}", word)) and re.search(rf"\b{re.escape(word)}\b", title, re.I) is not None


def _plain(cell: str) -> str:
    """A cell without Markdown's links; "–" is nothing."""
    text = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", cell)
    return "" if text == "–" else text


@dataclass(frozen=True)
class Packaged:
    name: str
    text: str
    content: Mapping[str, Any]  # section -> key -> value

    @property
    def comment(self) -> str:
        """The head comment, without the line about the time."""
        match = re.match(r"(?:#[^\n]*\n)*", self.text)
        lines = [line[1:].removeprefix(" ") for line in match[0].splitlines()] if match else []
        return "\n".join(line for line in lines if not line.startswith("Time: ")).strip()

    @property
    def summary(self) -> str:
        """The first sentence of the head comment."""
        words = " ".join(self.comment.split())
        return re.split(r"(?<=[a-z0-9)])(?<! al)\.\s", words + " ", maxsplit=1)[0].strip().rstrip(".:")

    @property
    def time(self) -> str:
        """Duration per method and seed: the line "# Time: ..." of the head; empty where there is none."""
        line = re.search(r"^# Time: (.+)$", self.text, re.MULTILINE)
        return line[1] if line else ""

    @property
    def rows(self) -> dict[str, str]:
        """Row -> name of its method, of the study's rows and those of its full table."""
        rows = dict.fromkeys([*self._study("methods"), *self._study("table")]) or self.methods
        return self._named(rows, "methods")

    @property
    def methods(self) -> list[str]:
        """Rows that ``confed run`` has."""
        return self._study("methods") or [self.names("algorithm")]

    @property
    def models(self) -> dict[str, str]:
        """Row of a model -> name of the model; the recipe's own under the empty text."""
        return {"": self.names("model"), **self._named(self._study("models"), "models")}

    def _study(self, key: str) -> list[str]:
        return list(self.content.get("study", {}).get(key, ()))

    def _named(self, rows: Iterable[str], section: str) -> dict[str, str]:
        """Row -> name of what it is, which its section may give."""
        given = self.content.get(section, {})
        return {row: given.get(row, {}).get("name", row) for row in rows}

    def names(self, section: str) -> str:
        """The name that a section gives."""
        return str(self.content.get(section, {}).get("name", ""))

    @property
    def missing(self) -> list[str]:
        """Keys of ``[data]`` that must be given on the command line, such as ``root``."""
        return [name for name in required(registry.datasets[self.names("data")]) if name not in self.content["data"]]


@cache
def packaged() -> tuple[Packaged, ...]:
    """All packaged recipes."""
    texts = {
        name: (files("confed.recipes") / f"{name}.toml").read_text(encoding="utf-8") for name in packaged_recipes()
    }
    return tuple(Packaged(name, text, tomllib.loads(text)) for name, text in texts.items())


def required(constructor: Callable[..., Any]) -> list[str]:
    """Keywords that must be given."""
    return [keyword.name for keyword in keywords(constructor).values() if keyword.required]


KINDS = ("methods", "models", "tasks", "datasets", "recipes", "runs")

EVERY_METHOD = frozenset(f.name for f in fields(Algorithm))  # fields that all methods have
BUILT_IN, FROM_A_FOLDER, FROM_ELSEWHERE = "built in", "read from a folder (data.root)", "need something else"


def listing(
    kind: str, contract: bool = False, runs: Path = Path("runs"), *, task: str = "", paper: str = ""
) -> list[dict[str, Any]]:
    """Entries of one kind, a row each with the same keys, those of one group together."""
    kind = "methods" if kind == "algorithms" else kind
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if contract and kind != "methods":
        raise ValueError(f"only methods have a contract, got {kind!r}")
    if task:
        _ = registry.tasks[task]
        if kind == "runs":
            raise ValueError("--task filters methods, models, tasks, datasets and recipes, got 'runs'")
    if paper and kind not in ("methods", "recipes"):
        raise ValueError(f"--paper filters methods and recipes, got {kind!r}")
    if contract:
        from confed.testing import contract as checks

        result: list[dict[str, str]] = []
        for name in registry.algorithms.names():
            for check, verdict in checks(name):
                result.append({"name": name, "check": check, "verdict": verdict})
        return result
    if kind == "runs":
        return list(chain.from_iterable(map(_folder, sorted(runs.iterdir()) if runs.is_dir() else ())))
    makers = {"methods": _methods, "models": _models, "tasks": _tasks, "datasets": _datasets, "recipes": _recipes}
    order = {"methods": GROUPS, "datasets": (BUILT_IN, FROM_A_FOLDER, FROM_ELSEWHERE)}.get(kind, ())

    def rank(row: Mapping[str, Any]) -> tuple[int, str]:
        return (order.index(row["group"]) if row["group"] in order else len(order), row["group"])

    return sorted((row for row in makers[kind]() if _fits(kind, row, task, paper)), key=rank)


def _fits(kind: str, row: Mapping[str, Any], task: str, paper: str) -> bool:
    if task and task not in tasks_of(kind, row["name"]):
        return False
    if not paper:
        return True
    if kind == "methods":
        paper_entry = papers().get(row["name"])
        description = f"{row['name']} {row['label']} {row['source']} {paper_entry.title if paper_entry else ''}"
    else:
        (description,) = (recipe.comment for recipe in packaged() if recipe.name == row["name"])
        description += f" {row['name']}"
    return paper.casefold() in description.casefold()


def tasks_of(kind: str, name: str) -> set[str]:
    """Tasks for which a packaged recipe has a method, model or dataset; of a recipe its own."""
    task_names: set[str] = set()
    for recipe in packaged():
        has = {
            "methods": recipe.rows.values(),
            "models": recipe.models.values(),
            "datasets": [recipe.names("data")],
            "tasks": [recipe.names("task")],
            "recipes": [recipe.name],
        }[kind]
        if name in has:
            task_names.add(recipe.names("task"))
    return task_names


def _methods() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name in registry.algorithms.names():
        entry: Any = registry.algorithms[name]
        options = {f.name: _default(f.default, MISSING) for f in fields(entry) if f.name not in EVERY_METHOD}
        rows.append(
            {
                "name": name,
                "label": entry.traits.label or entry.__name__,
                "group": entry.traits.group,
                "summary": first_line(entry.__doc__),
                "options": _options(options),
                "source": papers()[name].source if name in papers() else "",
            }
        )
    return rows


def _models() -> list[dict[str, Any]]:
    """Models by family: the module's first line heads the sizes that it registers."""
    entries = {name: registry.models[name] for name in registry.models.names()}
    return [_row(name, entry, _title(entry), first_line(entry.__doc__), "model") for name, entry in entries.items()]


def _tasks() -> list[dict[str, Any]]:
    entries = {name: registry.tasks[name] for name in registry.tasks.names()}
    return [_row(name, entry, "", _title(entry), "task") for name, entry in entries.items()]


def _datasets() -> list[dict[str, Any]]:
    """Datasets: those that are made on the spot, those of a folder, and those that need something else."""
    entries = {name: registry.datasets[name] for name in registry.datasets.names()}
    together = Counter(entry.__module__ for entry in entries.values())
    rows: list[dict[str, Any]] = []
    for name, entry in entries.items():
        summary = _title(entry) if together[entry.__module__] == 1 else first_line(entry.__doc__)
        group = {(): BUILT_IN, ("root",): FROM_A_FOLDER}.get(tuple(required(entry)), FROM_ELSEWHERE)
        rows.append(_row(name, entry, group, summary, ""))
    return rows


def _row(name: str, entry: Callable[..., Any], group: str, summary: str, section: str) -> dict[str, Any]:
    """A row of the list with the options that a recipe may give."""
    listed = keywords(entry, DERIVED.get(section, ()))
    options = {key: _default(keyword.default, inspect.Parameter.empty) for key, keyword in listed.items()}
    return {"name": name, "group": group, "summary": summary, "options": _options(options)}


def _default(value: object, missing: object) -> object:
    return "must be given" if value is missing else value


def _title(entry: Callable[..., Any]) -> str:
    """The first line of the module that defines something."""
    return first_line(sys.modules[entry.__module__].__doc__)


def _recipes() -> list[dict[str, Any]]:
    return [
        {
            "name": recipe.name,
            "group": recipe.names("task"),
            "summary": recipe.summary,
            "methods": ", ".join(recipe.methods),
            "time": recipe.time,
        }
        for recipe in packaged()
    ]


def _folder(folder: Path) -> list[dict[str, Any]]:
    """A run or a study as a row; a sweep as those of its studies."""
    from confed.results.folder import kind_of, run_folders
    from confed.results.sweep import read_sweep

    try:
        kind = kind_of(folder)
        if kind == "sweep":
            return list(chain.from_iterable(_folder(folder / point.folder) for point in read_sweep(folder).points))
        if kind == "study":
            index = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
            states = [_state(run) for run in run_folders(folder)]
            done = states.count("finished")
            pending = next((s for s in states if s != "finished"), None)
            state = "finished" if pending is None else f"{done} of {len(states)} runs finished, then {pending}"
            row = {"recipe": index["recipe"], "methods": ", ".join(index["methods"]), "seeds": index["seeds"]}
        elif kind:
            recipe = tomllib.loads((folder / "recipe.toml").read_text(encoding="utf-8"))
            row = {
                "recipe": _summary(folder).get("recipe", ""),
                "methods": recipe["algorithm"]["name"],
                "seeds": [recipe["run"]["seed"]],
            }
            state = _state(folder)
        else:
            return []
    except (ValueError, KeyError, TypeError, OSError) as error:
        row, state = {"recipe": "", "methods": "", "seeds": []}, f"unreadable: {error}"
    return [{"name": str(folder), **row, "state": state}]


def _summary(folder: Path) -> Mapping[str, Any]:
    file = folder / "summary.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _state(folder: Path) -> str:
    from confed.results.stored import read_records

    if (folder / "summary.json").is_file():
        return "finished"
    if not (folder / "recipe.toml").is_file():
        return "not started"
    planned = tomllib.loads((folder / "recipe.toml").read_text(encoding="utf-8"))["run"]["rounds"]
    return f"at round {read_records(folder).reached} of {planned}"


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())


def first_line(text: str | None) -> str:
    """The first line of a docstring as plain text."""
    return plain_text(inspect.cleandoc(text or "").partition("\n")[0])


def plain_text(text: str) -> str:
    """A text without the markup of references and code."""
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"\1", text)
    return text.replace("``", "")

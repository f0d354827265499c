"""Listings of methods, models, tasks, datasets, recipes and runs."""

import ast
import inspect
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any

from confed import registry
from confed.federation.traits import GROUPS
from confed.recipes.schema import keywords


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
    """Name of a method -> its row and differences, from ``docs/papers.md``, which wheels hold too."""
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
    recipes: list[Packaged] = []
    for file in sorted(files("confed.recipes").iterdir(), key=lambda file: file.name.removesuffix(".toml")):
        if file.name.endswith(".toml"):
            text = file.read_text(encoding="utf-8")
            recipes.append(Packaged(file.name.removesuffix(".toml"), text, tomllib.loads(text)))
    return tuple(recipes)


def required(constructor: Callable[..., Any]) -> list[str]:
    """Keywords that must be given."""
    return [keyword.name for keyword in keywords(constructor).values() if keyword.required]


KINDS = ("methods", "models", "tasks", "datasets", "recipes", "runs")
PACKAGES = {"methods": "algorithms", "models": "models", "tasks": "tasks", "datasets": "datasets"}
BUILT_IN, FROM_A_FOLDER, FROM_ELSEWHERE = "built in", "read from a folder (data.root)", "need something else"


@dataclass(frozen=True)
class Declared:
    """What the source of a registered thing says of it: importing all of them takes seconds."""

    name: str
    summary: str
    module: str  # the first line of its module
    label: str = ""
    group: str = ""
    required: tuple[str, ...] = ()  # keywords that must be given


@cache
def declared(kind: str) -> tuple[Declared, ...]:
    """Methods, models, tasks or datasets, by name."""
    found: list[Declared] = []
    for file in sorted((files("confed") / PACKAGES[kind]).iterdir(), key=lambda file: file.name):
        source = file / "__init__.py" if file.is_dir() else file
        if source.name.endswith(".py") and file.name != "__init__.py" and source.is_file():
            tree = ast.parse(source.read_text(encoding="utf-8"))
            module = first_line(ast.get_docstring(tree))
            for node in tree.body:
                one = _declared(node, kind, file.name.removesuffix(".py"), module)
                found += [] if one is None else [one]
    return tuple(sorted(found, key=lambda one: one.name))


def _declared(node: ast.stmt, kind: str, file: str, module: str) -> Declared | None:
    """What a statement of a module registers, if it does."""
    if isinstance(node, ast.ClassDef) and kind == "methods":
        traits = _assigned(node, "traits")
        if not isinstance(traits, ast.Call):
            return None
        given = {key.arg: key.value.value for key in traits.keywords if isinstance(key.value, ast.Constant)}
        label, group = given.get("label") or node.name, given.get("group", "averaging")
        return Declared(file, first_line(ast.get_docstring(node)), module, str(label), str(group))
    if isinstance(node, ast.ClassDef | ast.FunctionDef) and (register := _decorator(node)) is not None:
        name = _assigned(node, "name") if isinstance(node, ast.ClassDef) else None
        text = str(name.value) if isinstance(name, ast.Constant) else node.name
        required = _required(node, register) if isinstance(node, ast.FunctionDef) else ()
        return Declared(text, first_line(ast.get_docstring(node)), module, required=required)
    call = node.value if isinstance(node, ast.Assign | ast.Expr) else None
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id.endswith("variant"):
        name, summary = (ast.literal_eval(argument) for argument in call.args[1:3])
        return Declared(name, first_line(summary), module)
    return None


def _assigned(node: ast.ClassDef, name: str) -> ast.expr | None:
    """The value of a class variable."""
    for statement in node.body:
        if isinstance(statement, ast.Assign) and getattr(statement.targets[0], "id", "") == name:
            return statement.value
        if isinstance(statement, ast.AnnAssign) and getattr(statement.target, "id", "") == name:
            return statement.value
    return None


def _decorator(node: ast.ClassDef | ast.FunctionDef) -> ast.expr | None:
    """The decorator that registers something."""
    for decorator in node.decorator_list:
        function = decorator.func if isinstance(decorator, ast.Call) else decorator
        if isinstance(function, ast.Name) and (function.id.startswith("register_") or function.id == "reader"):
            return decorator
    return None


def _required(node: ast.FunctionDef, register: ast.expr) -> tuple[str, ...]:
    """Keywords of a dataset that must be given; of one with common options, those that its reader names."""
    listed = node.args
    plain = [argument.arg for argument in [*listed.posonlyargs, *listed.args]]
    required = plain[: len(plain) - len(listed.defaults)]
    required += [one.arg for one, value in zip(listed.kwonlyargs, listed.kw_defaults, strict=True) if value is None]
    if isinstance(register, ast.Call) and getattr(register.func, "id", "") == "reader":
        names = register.args[0]  # of the options; a variable's are not looked up
        has_root = not isinstance(names, ast.Constant) or "root" in str(names.value).split()
        own = [*plain, *(one.arg for one in listed.kwonlyargs)]
        return (*(["root"] if has_root and "root" not in own else []), *required[1:])
    return tuple(required)


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
        if task not in (names := [one.name for one in declared("tasks")]):
            hint = "".join(f"; did you mean {name!r}?" for name in get_close_matches(task, names, 1))
            raise ValueError(f"--task must be one of {', '.join(names)}, got {task!r}{hint}")
        if kind == "runs":
            raise ValueError("--task filters methods, models, tasks, datasets and recipes, got 'runs'")
    if paper and kind not in ("methods", "recipes"):
        raise ValueError(f"--paper filters methods and recipes, got {kind!r}")
    if contract:
        from confed.testing import contract as checks

        result: list[dict[str, str]] = []
        for one in declared("methods"):
            for check, verdict in checks(one.name):
                result.append({"name": one.name, "check": check, "verdict": verdict})
        return result
    if kind == "runs":
        return list(chain.from_iterable(map(_folder, sorted(runs.iterdir()) if runs.is_dir() else ())))
    order = {"methods": GROUPS, "datasets": (BUILT_IN, FROM_A_FOLDER, FROM_ELSEWHERE)}.get(kind, ())

    def rank(row: Mapping[str, Any]) -> tuple[int, str]:
        return (order.index(row["group"]) if row["group"] in order else len(order), row["group"])

    rows = _recipes() if kind == "recipes" else [_row(kind, one) for one in declared(kind)]
    return sorted((row for row in rows if _fits(kind, row, task, paper)), key=rank)


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


def _row(kind: str, one: Declared) -> dict[str, Any]:
    """A row of the list: methods by kind, models by family, datasets by where they come from."""
    if kind == "methods":
        source = papers()[one.name].source if one.name in papers() else ""
        return {"name": one.name, "label": one.label, "group": one.group, "summary": one.summary, "source": source}
    if kind == "models":
        return {"name": one.name, "group": one.module, "summary": one.summary}
    if kind == "tasks":
        return {"name": one.name, "group": "", "summary": one.module}
    alone = sum(other.module == one.module for other in declared(kind)) == 1
    group = {(): BUILT_IN, ("root",): FROM_A_FOLDER}.get(one.required, FROM_ELSEWHERE)
    return {"name": one.name, "group": group, "summary": one.module if alone else one.summary}


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
            runs = run_folders(folder)
            states = [_state(run) for run in runs]
            done = states.count("finished")
            pending = next((s for s in states if s != "finished"), None)
            state = "finished" if pending is None else f"{done} of {len(states)} runs finished, then {pending}"
            row = {"recipe": index["recipe"], "methods": ", ".join(index["methods"]), "seeds": index["seeds"]}
            row |= _sent(runs)
        elif kind:
            recipe = tomllib.loads((folder / "recipe.toml").read_text(encoding="utf-8"))
            row = {
                "recipe": _summary(folder).get("recipe", ""),
                "methods": recipe["algorithm"]["name"],
                "seeds": [recipe["run"]["seed"]],
                **_sent([folder]),
            }
            state = _state(folder)
        else:
            return []
    except (ValueError, KeyError, TypeError, OSError) as error:
        row, state = {"recipe": "", "methods": "", "seeds": [], **_sent([])}, f"unreadable: {error}"
    return [{"name": str(folder), **row, "state": state}]


def _sent(runs: Sequence[Path]) -> dict[str, str]:
    """What all clients together send and receive in a round, mean over the rounds of finished runs."""
    from confed.results.summary import Summary
    from confed.system.format import size

    sent: dict[str, str] = {}
    for heading, direction in (("up a round", "bytes_up"), ("down a round", "bytes_down")):
        rounds: list[float] = []
        for run in runs:
            rounds += [sum(clients.values()) for clients in Summary(_summary(run)).sent(direction) or ()]
        sent[heading] = size(sum(rounds) / len(rounds)) if rounds else ""
    return sent


def _summary(folder: Path) -> Mapping[str, Any]:
    file = folder / "summary.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _state(folder: Path) -> str:
    from confed.results.folder import is_finished
    from confed.results.stored import read_records

    if is_finished(folder):
        return "finished"
    if not (folder / "recipe.toml").is_file():
        return "not started"
    planned = tomllib.loads((folder / "recipe.toml").read_text(encoding="utf-8"))["run"]["rounds"]
    return f"at round {read_records(folder).reached} of {planned}"


def first_line(text: str | None) -> str:
    """The first line of a docstring as plain text."""
    return plain_text(inspect.cleandoc(text or "").partition("\n")[0])


def plain_text(text: str) -> str:
    """A text without the markup of references and code."""
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"\1", text)
    return text.replace("``", "")

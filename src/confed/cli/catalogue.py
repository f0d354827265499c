"""Listings of methods, models, tasks, datasets, recipes and runs."""

import inspect
import json
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from itertools import chain
from pathlib import Path
from typing import Any

from confed import registry
from confed.cli.docstrings import first_line
from confed.cli.packaged import packaged
from confed.cli.papers import papers
from confed.federation.algorithm import Algorithm
from confed.federation.traits import GROUPS
from confed.recipes.schema import DERIVED

KINDS = ("methods", "models", "tasks", "datasets", "recipes", "runs")

EVERY_METHOD = frozenset(f.name for f in fields(Algorithm))
"""Fields that all methods have."""

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
    rows: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "methods": lambda: [_algorithm(name) for name in registry.algorithms.names()],
        "models": _models,
        "tasks": _tasks,
        "datasets": _datasets,
        "recipes": _recipes,
        "runs": lambda: _runs(runs),
    }
    listed_rows = [row for row in rows[kind]() if _fits(kind, row, task, paper)]
    order = {"methods": GROUPS, "datasets": (BUILT_IN, FROM_A_FOLDER, FROM_ELSEWHERE)}.get(kind, ())
    return sorted(listed_rows, key=lambda row: _rank(order, row.get("group", "")))


def _rank(order: Sequence[str], group: str) -> tuple[int, str]:
    return (order.index(group) if group in order else len(order), group)


def _fits(kind: str, row: Mapping[str, Any], task: str, paper: str) -> bool:
    """Whether a row passes the filters."""
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


def _algorithm(name: str) -> dict[str, Any]:
    entry: Any = registry.algorithms[name]
    method_fields = [f for f in fields(entry) if f.name not in EVERY_METHOD]
    options = {f.name: "must be given" if f.default is MISSING else f.default for f in method_fields}
    return {
        "name": name,
        "label": entry.traits.label or entry.__name__,
        "group": entry.traits.group,
        "summary": first_line(entry.__doc__),
        "options": _options(options),
        "source": papers()[name].source if name in papers() else "",
    }


def _models() -> list[dict[str, Any]]:
    """Models by family: the module's first line heads the sizes that it registers."""
    return [
        {"name": name, "group": _title(registry.models[name]), **_summary_of(registry.models[name], DERIVED["model"])}
        for name in registry.models.names()
    ]


def _tasks() -> list[dict[str, Any]]:
    rows = [
        {"name": name, "group": "", **_summary_of(registry.tasks[name], DERIVED["task"])}
        for name in registry.tasks.names()
    ]
    return [{**row, "summary": _title(registry.tasks[row["name"]])} for row in rows]


def _datasets() -> list[dict[str, Any]]:
    """Datasets: those that are made on the spot, those of a folder, and those that need something else."""
    together = Counter(registry.datasets[name].__module__ for name in registry.datasets.names())
    rows: list[dict[str, Any]] = []
    for name in registry.datasets.names():
        entry = registry.datasets[name]
        row = {"name": name, "group": _origin(entry), **_summary_of(entry, set())}
        if together[entry.__module__] == 1:
            row["summary"] = _title(entry)
        rows.append(row)
    return rows


def _origin(dataset: Callable[..., Any]) -> str:
    """Where a dataset's examples come from, by what must be given."""
    needed = [p.name for p in inspect.signature(dataset).parameters.values() if p.default is inspect.Parameter.empty]
    if not needed:
        return BUILT_IN
    return FROM_A_FOLDER if needed == ["root"] else FROM_ELSEWHERE


def _summary_of(entry: Callable[..., Any], skip: set[str]) -> dict[str, Any]:
    options = {
        p.name: "must be given" if p.default is inspect.Parameter.empty else p.default
        for p in inspect.signature(entry).parameters.values()
        if p.name not in skip
    }
    return {"summary": first_line(entry.__doc__), "options": _options(options)}


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


def _runs(root: Path) -> list[dict[str, Any]]:
    return list(chain.from_iterable(_folder(folder) for folder in (sorted(root.iterdir()) if root.is_dir() else ())))


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
    from confed.results.folder import read_jsonl

    if (folder / "summary.json").is_file():
        return "finished"
    if not (folder / "recipe.toml").is_file():
        return "not started"
    planned = tomllib.loads((folder / "recipe.toml").read_text(encoding="utf-8"))["run"]["rounds"]
    reached = max((line.get("round", 0) for line in read_jsonl(folder / "metrics.jsonl")), default=0)
    return f"at round {min(reached, planned)} of {planned}"


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())

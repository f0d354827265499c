"""Everything about one method, model, dataset, task, recipe or section of a recipe."""

import inspect
import re
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Any

from confed import registry
from confed.cli.catalogue import EVERY_METHOD, tasks_of
from confed.cli.docstrings import Setting, first_line, prose, settings
from confed.cli.packaged import Packaged, packaged
from confed.cli.papers import Difference, papers
from confed.federation.algorithm import Algorithm
from confed.federation.local import Local
from confed.recipes.recipe import Run, load_recipe, read_text
from confed.recipes.schema import DERIVED

KINDS = ("method", "model", "dataset", "task", "recipe", "section")

SECTIONS: Mapping[str, tuple[type, str]] = {
    "algorithm": (Algorithm, "confed run algorithm.server.optimizer=adam --methods fedavg"),
    "local": (Local, "confed run local.lr=1e-3 local.epochs=1"),
    "run": (Run, "confed run run.rounds=10 run.cohort=2"),
}
"""Sections of a recipe whose keys are the same in all, and a command with some of them."""

REGISTRIES: Mapping[str, registry.Registry] = {
    "method": registry.algorithms,
    "model": registry.models,
    "dataset": registry.datasets,
    "task": registry.tasks,
}
DEFAULT = "fedvqa_scenes"
"""The recipe of `confed run` without arguments."""
_SECTION_OF = {"method": "algorithm", "model": "model", "dataset": "data", "task": "task"}


@dataclass(frozen=True)
class Description:
    """What there is to say of one thing.

    Attributes:
        name: as recipes have it.
        label: as tables have it; empty where that is the name.
        source: the paper; empty where there is none.
        text: paragraphs about notation, equations and use.
        section: of a recipe in which the settings stand.
        shared: names of those that all methods have, described as the section "algorithm".
        recipes: packaged recipes with it.
        facts: what else there is, by name.
    """

    kind: str
    name: str
    summary: str
    label: str = ""
    group: str = ""
    source: str = ""
    text: Sequence[str] = ()
    section: str = ""
    settings: Sequence[Setting] = ()
    shared: Sequence[str] = ()
    differences: Sequence[Difference] = ()
    recipes: Sequence[str] = ()
    tasks: Sequence[str] = ()
    examples: Sequence[str] = ()
    facts: Mapping[str, str] | None = None


def names() -> dict[str, list[str]]:
    """Kind -> all names of that kind."""
    names_of_kind = {kind: kept.names() for kind, kept in REGISTRIES.items()}
    return {**names_of_kind, "recipe": [recipe.name for recipe in packaged()], "section": list(SECTIONS)}


def describe_name(name: str, kind: str = "") -> list[Description]:
    """Descriptions of everything that has a name: usually one."""
    if kind and kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    names_of_kind = {one: listed for one, listed in names().items() if kind in ("", one)}
    makers: Mapping[str, Callable[[str], Description]] = {
        "method": _method, "model": _model, "dataset": _dataset, "task": _task, "recipe": _recipe, "section": _section
    }  # fmt: skip
    descriptions = [makers[one](name) for one, listed in names_of_kind.items() if name in listed]
    if not descriptions and kind in ("", "recipe") and name.endswith(".toml") and Path(name).is_file():
        return [_recipe_file(name)]
    if not descriptions and ":" in name:
        return [makers[_own_kind(name, kind)](name)]
    if not descriptions:
        every = list(chain.from_iterable(names_of_kind.values()))
        near = get_close_matches(name.casefold(), every, 4, 0.5) or [n for n in every if name.casefold() in n][:4]
        hint = f"; did you mean {', '.join(near)}?" if near else "; `confed list` shows what there is"
        raise ValueError(f"no {kind or 'method, model, dataset, task or recipe'} is called {name!r}{hint}")
    return descriptions


def _own_kind(name: str, kind: str) -> str:
    """Kind of "module:name": what was said, or a method where its class is one."""
    if kind in REGISTRIES:
        return kind
    entry = registry.trusted("object", name)
    if isinstance(entry, type) and issubclass(entry, Algorithm):
        return "method"
    raise ValueError(f"{name} may be a model, a dataset or a task: say which with --kind")


def _method(name: str) -> Description:
    entry: Any = registry.algorithms[name]
    paper = papers().get(name)
    recipes = [recipe for recipe in packaged() if name in recipe.rows.values()]
    return Description(
        "method", name, first_line(entry.__doc__),
        label=entry.traits.label or entry.__name__,
        group=entry.traits.group,
        source=paper.source if paper else "",
        text=_texts(entry),
        section="algorithm",
        settings=settings(entry, tuple(EVERY_METHOD)),
        shared=[setting.name for setting in settings(Algorithm) if "." not in setting.name],
        differences=paper.differences if paper else (),
        recipes=[recipe.name for recipe in recipes],
        tasks=sorted(tasks_of("methods", name)),
        examples=[_run_of_method(name, entry.traits.made_for)],
        facts=_traits(entry.traits),
    )  # fmt: skip


def _traits(traits: Any) -> dict[str, str]:
    """Facts of a method that decide whether it can be used."""
    lines = {"global model": "yes" if traits.has_global else "none"}
    lines["personal models"] = "yes" if traits.has_personal else "all clients use the global one"
    if traits.made_for:
        lines["needs a model with"] = traits.made_for
    if traits.synchronous:
        lines["asynchronous rounds"] = f"no: {traits.synchronous}"
    if not traits.clients_may_leave:
        lines["clients may leave"] = "no"
    return lines


def _run_of_method(name: str, made_for: str) -> str:
    """A command with a method: a recipe that has it, else one whose methods need the same kind of model."""
    candidates = [recipe for recipe in packaged() if name in recipe.rows.values()]
    if candidates:
        # Rows of `confed run` before those of the full table; data that are there before data that are not.
        recipe = min(
            candidates,
            key=lambda one: (
                len(one.missing),
                name not in one.rows,
                _row(one, name) not in one.methods,
                one.name != DEFAULT,
            ),
        )
        return _command(recipe, f"--methods {_row(recipe, name)}")
    kinds = {other: registry.algorithms[other].traits.made_for for other in registry.algorithms.names()}  # type: ignore[attr-defined]
    whole = [one for one in packaged() if not one.missing]
    alike = [one for one in whole if made_for in map(kinds.get, one.rows.values())]
    recipe = next((one for one in alike if one.name == DEFAULT), alike[0]) if alike else packaged()[0]
    return _command(recipe, f"--methods {name}")


def _row(recipe: Packaged, method: str) -> str:
    """A row of a recipe with this method, the one of its own name first."""
    rows = [row for row, method_name in recipe.rows.items() if method_name == method]
    return method if method in rows else rows[0]


def _command(recipe: Packaged, *words: str) -> str:
    given = [f"data.{key}={'DIR' if key == 'root' else key.upper()}" for key in recipe.missing]
    modules = dict.fromkeys(chain.from_iterable(re.findall(r"([\w.]+):\w", word) for word in words))
    return " ".join(["confed run", recipe.name, *given, *words, *(f"--allow-code {name}" for name in modules)])


def _model(name: str) -> Description:
    entry = registry.models[name]
    recipes = [recipe for recipe in packaged() if name in recipe.models.values()]
    example = ""
    for recipe in sorted(recipes, key=lambda one: (len(one.missing), name != one.models[""])):
        row = next(row for row, model in recipe.models.items() if model == name)
        example = f"confed compare --recipe {recipe.name} --models {row}" if row else _command(recipe)
        break
    if not example:
        family = [n for n in registry.models.names() if registry.models[n].__module__ == entry.__module__]
        alike = [one for one in packaged() if one.models[""] in family]
        recipe = min(alike, key=lambda one: len(one.missing)) if alike else _default()
        kept = recipe.content.get("model", {}).get("trainable")  # stays where the model changes
        learns = next((setting.kind for setting in settings(entry) if setting.name == "trainable"), "")
        other = ["model.trainable=all"] if kept and learns and f'"{kept}"' not in learns else []
        example = _command(recipe, f"model.name={name}", *other)
    return _constructed("model", name, entry, recipes, [example])


def _default() -> Packaged:
    return next(recipe for recipe in packaged() if recipe.name == DEFAULT)


def _dataset(name: str) -> Description:
    entry = registry.datasets[name]
    recipes = [recipe for recipe in packaged() if recipe.names("data") == name]
    needed = [s.name for s in settings(entry) if s.required]
    given = "".join(f" {key}={'DIR' if key == 'root' else key.upper()}" for key in needed)
    examples = [f"confed data describe {name}{given}", *[_command(recipe) for recipe in recipes[:1]]]
    return _constructed("dataset", name, entry, recipes, examples)


def _task(name: str) -> Description:
    recipes = [recipe for recipe in packaged() if recipe.names("task") == name]
    recipe = min(recipes, key=lambda one: len(one.missing)) if recipes else None
    examples = [_command(recipe) if recipe else f"confed run task.name={name}"]
    return _constructed("task", name, registry.tasks[name], recipes, examples)


def _constructed(
    kind: str, name: str, entry: Callable[..., Any], recipes: Sequence[Packaged], examples: Sequence[str]
) -> Description:
    section = _SECTION_OF[kind]
    module = first_line(sys.modules[entry.__module__].__doc__)
    return Description(
        kind, name, first_line(entry.__doc__),
        group=module,
        text=_texts(entry),
        section=section,
        settings=settings(entry, tuple(DERIVED.get(section, ()))),
        recipes=[recipe.name for recipe in recipes],
        tasks=sorted({recipe.names("task") for recipe in recipes}) if kind != "task" else (),
        examples=examples,
    )  # fmt: skip


def _texts(entry: Callable[..., Any]) -> list[str]:
    """Paragraphs of the module's docstring, then of the thing's own."""
    return [*prose(sys.modules[entry.__module__].__doc__ or ""), *prose(inspect.getdoc(entry) or "")]


def _recipe_file(path: str) -> Description:
    """Of a recipe of one's own, with what it leaves to defaults."""
    packaged_recipe = Packaged(path, read_text(Path(path)), tomllib.loads(load_recipe(path).to_toml()))
    return replace(_described(packaged_recipe), summary=packaged_recipe.comment.partition("\n")[0])


def _recipe(name: str) -> Description:
    return _described(next(one for one in packaged() if one.name == name))


def _described(recipe: Packaged) -> Description:
    name = recipe.name
    models = [model for model in recipe.models.values() if model]
    facts = {
        "task": recipe.names("task"),
        "data": recipe.names("data"),
        "model": ", ".join(dict.fromkeys(models)),
        "rows of run": ", ".join(recipe.methods),
        "further rows": ", ".join(row for row in recipe.rows if row not in recipe.methods),
        "rounds": str(recipe.content.get("run", {}).get("rounds", Run().rounds)),
        "time": recipe.time,
    }
    commands = (
        [f"confed data describe {name}"] if name.endswith(".toml") else [f"confed show {name} --toml > mine.toml"]
    )
    examples = [_command(recipe), *commands]
    if len(recipe.rows) > len(recipe.methods):
        given = _command(recipe).removeprefix(f"confed run {name}").replace(" data.", " data.")
        examples.insert(1, f"confed compare --recipe {name}{given} --methods all --seeds 3")
    return Description(
        "recipe", name, recipe.summary,
        text=recipe.comment.split("\n\n"),
        examples=examples,
        tasks=[recipe.names("task")],
        facts={key: value for key, value in facts.items() if value},
    )  # fmt: skip


def _section(name: str) -> Description:
    kind, example = SECTIONS[name]
    return Description(
        "section", name, first_line(kind.__doc__), section=name, settings=settings(kind), examples=[example]
    )

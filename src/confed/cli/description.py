"""Everything about one method, model, dataset, task, recipe or section of a recipe."""

import inspect
import json
import re
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from confed import registry
from confed.cli.app import KIND_OF
from confed.cli.catalogue import Difference, Packaged, first_line, packaged, papers, plain_text, tasks_of
from confed.federation.algorithm import Algorithm
from confed.federation.local import Local
from confed.federation.ranges import Range
from confed.recipes.overrides import NAMED
from confed.recipes.recipe import RunSection, load_recipe, read_text
from confed.recipes.schema import DERIVED, keywords

EVERY_METHOD = frozenset(one.name for one in fields(Algorithm))  # fields that all methods have
_SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Yields):$")
_WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false", Path: "path"}


@dataclass(frozen=True)
class Setting:
    """A keyword that a recipe may give."""

    name: str  # of the keyword; of a part of a table with a dot, such as server.optimizer
    kind: str  # the type in words, with its range or options
    default: str  # as in TOML; empty where there is no value unless one is given
    required: bool  # whether it must be given
    meaning: str  # what the docstring says


def settings(constructor: Callable[..., Any], skip: Sequence[str] = (), prefix: str = "") -> list[Setting]:
    """Settings of a constructor in their order, those of nested dataclasses after their own."""
    hints = get_type_hints(constructor.__init__ if inspect.isclass(constructor) else constructor, include_extras=True)
    meanings = described(inspect.getdoc(constructor) or "")
    for parent in reversed(constructor.__mro__) if inspect.isclass(constructor) else ():
        meanings = described(parent.__doc__ or "") | meanings if parent is not object else meanings
    listed: list[Setting] = []
    for name, keyword in keywords(constructor, skip).items():
        inner, meaning = _table(hints.get(keyword.parameter, Any)), meanings.get(keyword.parameter, "")
        default = "" if inner or keyword.required else _toml(keyword.make())
        kind = "table" if inner else _kind(hints.get(keyword.parameter))
        listed.append(Setting(f"{prefix}{name}", kind, default, keyword.required, meaning))
        if inner:
            listed += settings(inner, (), f"{prefix}{name}.")
    return listed


def _table(hint: Any) -> type | None:
    """The dataclass that a hint names, whose fields are the keys of a TOML table."""
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    tables = [option for option in options if isinstance(option, type) and is_dataclass(option)]
    return tables[0] if len(tables) == 1 else None


def _kind(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        bounds = next((str(extra) for extra in arguments[1:] if isinstance(extra, Range)), "")
        bounds = bounds.removeprefix("be ").replace("lie in ", "in ").replace("not be negative", "at least 0")
        return f"{_kind(arguments[0])}, {bounds}" if bounds else _kind(arguments[0])
    if origin is Literal:
        return " | ".join(json.dumps(option) for option in arguments)
    if origin in (Union, UnionType):
        options = {option: _kind(option) for option in arguments if option is not type(None)}
        if Path in options and str in options:
            options.pop(str)
        return " or ".join(dict.fromkeys(options.values()))
    if origin is not None and issubclass(origin, Mapping):
        return f"table of {_plural(_kind(arguments[1]))}"
    if origin is not None and issubclass(origin, Sequence | tuple):
        inner = [argument for argument in arguments if argument is not Ellipsis]
        several = dict.fromkeys(map(_kind, inner))
        count = f"{len(inner)} " if Ellipsis not in arguments and len(inner) > 1 else "list of "
        return count + " and ".join(_plural(one) for one in several)
    return _WORDS.get(hint, "value")


def _plural(kind: str) -> str:
    return kind if kind == "true or false" or "|" in kind or kind.endswith('"') else f"{kind}s"


def _toml(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool) else str(value)


def described(text: str) -> dict[str, str]:
    """Name -> what the sections ``Args`` and ``Attributes`` of a docstring say, as plain text on one line."""
    descriptions: dict[str, list[str]] = {}
    section, name = "", ""
    for line in inspect.cleandoc(text).splitlines():
        if heading := _SECTION.match(line):
            section = heading[1]
        elif line and not line[0].isspace():
            section = ""
        elif section in ("Args", "Attributes"):
            if entry := re.match(r" {4}(\w+): (.*)", line):
                name = entry[1]
                descriptions[name] = [entry[2]]
            elif name and line.strip():
                descriptions[name].append(line.strip())
    return {key: plain_text(" ".join(lines)) for key, lines in descriptions.items()}


def prose(text: str) -> list[str]:
    """Paragraphs of a docstring after its first line, without its sections."""
    lines: list[str] = []
    inside = False
    for line in inspect.cleandoc(text).splitlines()[1:]:
        if _SECTION.match(line):
            inside = True
        elif line and not line[0].isspace():
            inside = False
        if not inside:
            lines.append(line)
    return [paragraph.strip("\n") for paragraph in re.split(r"\n\s*\n", "\n".join(lines)) if paragraph.strip()]


KINDS = ("method", "model", "dataset", "task", "recipe", "section")

SECTIONS: Mapping[str, tuple[type, str]] = {
    "algorithm": (Algorithm, "confed run algorithm.server.optimizer=adam --methods fedavg"),
    "local": (Local, "confed run local.lr=1e-3 local.epochs=1"),
    "run": (RunSection, "confed run run.rounds=10 run.cohort=2"),
}
"""Sections of a recipe whose keys are the same in all, and a command with some of them."""

REGISTRIES = {kind: NAMED[section] for section, kind in KIND_OF.items()}
DEFAULT = "fedvqa_scenes"  # the recipe of `confed run` without arguments
_SECTION_OF = {kind: section for section, kind in KIND_OF.items()}


@dataclass(frozen=True)
class Description:
    kind: str
    name: str  # as recipes have it
    summary: str
    label: str = ""  # as tables have it; empty where that is the name
    group: str = ""
    source: str = ""  # the paper; empty where there is none
    text: Sequence[str] = ()  # paragraphs about notation, equations and use
    section: str = ""  # of a recipe in which the settings stand
    settings: Sequence[Setting] = ()
    shared: Sequence[str] = ()  # names of those that all methods have, described as the section "algorithm"
    differences: Sequence[Difference] = ()
    recipes: Sequence[str] = ()  # packaged recipes with it
    tasks: Sequence[str] = ()
    examples: Sequence[str] = ()
    facts: Mapping[str, str] | None = None  # what else there is, by name


def names() -> dict[str, list[str]]:
    """Kind -> all names of that kind."""
    names_of_kind = {kind: entries.names() for kind, entries in REGISTRIES.items()}
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
        def rank(one: Packaged) -> tuple[object, ...]:
            return len(one.missing), name not in one.rows, _row(one, name) not in one.methods, one.name != DEFAULT

        recipe = min(candidates, key=rank)
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
        example = f"confed compare {recipe.name} --models {row}" if row else _command(recipe)
        break
    if not example:
        family = [n for n in registry.models.names() if registry.models[n].__module__ == entry.__module__]
        alike = [one for one in packaged() if one.models[""] in family]
        default = next(one for one in packaged() if one.name == DEFAULT)
        recipe = min(alike, key=lambda one: len(one.missing), default=default)
        trainable = recipe.content.get("model", {}).get("trainable")  # stays where the model changes
        learns = next((setting.kind for setting in settings(entry) if setting.name == "trainable"), "")
        other = ["model.trainable=all"] if trainable and learns and f'"{trainable}"' not in learns else []
        example = _command(recipe, f"model.name={name}", *other)
    return _constructed("model", name, entry, recipes, [example])


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
    recipe = Packaged(path, read_text(Path(path)), tomllib.loads(load_recipe(path).to_toml()))
    return replace(_described(recipe), summary=recipe.comment.partition("\n")[0])


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
        "rounds": str(recipe.content.get("run", {}).get("rounds", RunSection().rounds)),
        "time": recipe.time,
    }
    commands = (
        [f"confed data describe {name}"] if name.endswith(".toml") else [f"confed show {name} --toml > mine.toml"]
    )
    examples = [_command(recipe), *commands]
    if len(recipe.rows) > len(recipe.methods):
        given = _command(recipe).removeprefix(f"confed run {name}").replace(" data.", " data.")
        examples.insert(1, f"confed compare {name}{given} --methods all --seeds 3")
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

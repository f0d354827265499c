"""Settings of a constructor from its signature and docstring: names, types, ranges, defaults and meanings."""

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from confed.federation.ranges import Range

_SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Yields):$")
_WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false", Path: "path"}


@dataclass(frozen=True)
class Setting:
    """A keyword that a recipe may give.

    Attributes:
        name: of the keyword; of a part of a table with a dot, such as ``server.optimizer``.
        kind: the type in words, with its range or options.
        default: as in TOML; empty where there is no value unless one is given.
        required: whether it must be given.
        meaning: what the docstring says.
    """

    name: str
    kind: str
    default: str
    required: bool
    meaning: str


def settings(constructor: Callable[..., Any], skip: Sequence[str] = (), prefix: str = "") -> list[Setting]:
    """Settings of a constructor in their order, those of nested dataclasses after their own."""
    hints = get_type_hints(constructor.__init__ if inspect.isclass(constructor) else constructor, include_extras=True)
    meanings = described(inspect.getdoc(constructor) or "")
    for parent in reversed(constructor.__mro__) if inspect.isclass(constructor) else ():
        meanings = described(parent.__doc__ or "") | meanings if parent is not object else meanings
    made: dict[str, Any] = {}
    if inspect.isclass(constructor) and is_dataclass(constructor):
        made = {f.name: f.default_factory() for f in fields(constructor) if f.default_factory is not MISSING}
    listed: list[Setting] = []
    for name, parameter in inspect.signature(constructor).parameters.items():
        if name in skip or name == "self":
            continue
        required = parameter.default is inspect.Parameter.empty
        value = made.get(name, None if required else parameter.default)
        inner = _table(hints.get(name, Any))
        meaning = meanings.get(name, "")
        default = "" if inner else _toml(value)
        listed.append(
            Setting(f"{prefix}{name}", "table" if inner else _kind(hints.get(name)), default, required, meaning)
        )
        if inner:
            listed += settings(inner, (), f"{prefix}{name}.")
    return listed


def _table(hint: Any) -> type | None:
    """The dataclass that a hint names, whose fields are the keys of a TOML table."""
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    tables = [option for option in options if isinstance(option, type) and is_dataclass(option)]
    return tables[0] if len(tables) == 1 else None


def _kind(hint: Any) -> str:
    """A type in words."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        bounds = next((str(extra) for extra in arguments[1:] if isinstance(extra, Range)), "")
        return f"{_kind(arguments[0])}, {_bounds(bounds)}" if bounds else _kind(arguments[0])
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


def _bounds(range_: str) -> str:
    return range_.removeprefix("be ").replace("lie in ", "in ").replace("not be negative", "at least 0")


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
    kept: list[str] = []
    inside = False
    for line in inspect.cleandoc(text).splitlines()[1:]:
        if _SECTION.match(line):
            inside = True
        elif line and not line[0].isspace():
            inside = False
        if not inside:
            kept.append(line)
    return [paragraph.strip("\n") for paragraph in re.split(r"\n\s*\n", "\n".join(kept)) if paragraph.strip()]


def first_line(text: str | None) -> str:
    """The first line of a docstring as plain text."""
    return plain_text(inspect.cleandoc(text or "").partition("\n")[0])


def plain_text(text: str) -> str:
    """A text without the markup of references and code."""
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"\1", text)
    return text.replace("``", "")

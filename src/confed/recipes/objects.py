"""Sections of a recipe from Python objects: what has a name and keywords is written with them."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from inspect import isfunction, signature
from typing import Any

from torch import nn

from confed.data.examples import FederatedDataset
from confed.data.labelled import LabelDataset
from confed.data.tables import is_table
from confed.federation.algorithm import Algorithm
from confed.federation.local import Local
from confed.recipes.overrides import NAMED
from confed.recipes.run_section import Run
from confed.recipes.schema import DERIVED, plain
from confed.recipes.session_objects import session_name
from confed.registry import allow_code

__all__ = ["content_of", "overrides_of", "section_of"]

PLAIN = str | int | float | bool | list | dict
"""What TOML can hold."""


def content_of(given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The content of a recipe file that describes the same.

    Args:
        given: section -> the object, name or mapping for it; None for the default.

    An object of another kind, or with values that no file can hold, is a ValueError.
    """
    task = given.get("task")
    content = {section: section_of(section, value) for section, value in given.items() if value is not None}
    if task is None and "data" in content:
        content["task"] = {"name": _task_of(given["data"], str(content["data"].get("name", "")))}
    return content


def overrides_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """``section.key`` -> value of overrides that may name sections as a whole, and keys of ``[run]`` alone.

    Args:
        given: ``section.key`` -> value; section -> name, object or mapping of keys; or a key of ``[run]`` -> value.

    Raises:
        ValueError: something else is named, or an object cannot be written; see :func:`section_of`.
    """
    sections, keys = (*NAMED, "local", "run"), [field.name for field in fields(Run)]
    found: dict[str, Any] = {}
    for name, value in given.items():
        if "." in name:
            found[name] = value
        elif name in sections:
            found |= {f"{name}.{key}": item for key, item in section_of(name, value).items()}
        elif name in keys:
            found[f"run.{name}"] = value
        else:
            near = get_close_matches(name, [*sections, *keys], 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(
                f"unknown setting {name!r}; {hint}valid are 'section.key', the sections {', '.join(sections)}, and "
                f"the keys of [run]: {', '.join(keys)}"
            )
    return found


def section_of(section: str, value: Any) -> dict[str, Any]:
    """A section of a recipe as its file has it.

    Args:
        section: its name.
        value: the object that it describes, the name of a constructor, or keys with values.

    Raises:
        ValueError: an object of another kind, or with values that no file can hold.
    """
    if _is_object(section, value):
        return {"name": session_name(section, value)}
    if isinstance(value, Mapping):
        found = dict(value)
        if section in NAMED and "name" in found and not isinstance(found["name"], str):
            found["name"] = _name(section, found["name"])
        return _written(section, found)
    if section in ("local", "run"):
        wanted = Local if section == "local" else Run
        if not isinstance(value, wanted):
            keys = ", ".join(field.name for field in fields(wanted))
            raise ValueError(f"{section} must be a mapping of its keys ({keys}), got {value!r}")
        return _written(section, _values(section, value))
    if isinstance(value, str):
        return {"name": value}
    if _is_constructor(section, value):
        return {"name": _name(section, value)}
    if is_dataclass(value) and (isinstance(value, Algorithm) if section == "algorithm" else section == "task"):
        return {"name": _name(section, type(value)), **_written(section, _values(section, value))}
    kinds = {
        "algorithm": "an Algorithm",
        "model": "a torch.nn.Module",
        "data": "a FederatedDataset, LabelDataset, DataFrame or Dataset",
    }
    raise ValueError(
        f"{section} must be a name, a mapping with 'name', a function or class, or "
        f"{kinds.get(section, 'a task')}; got {type(value).__name__}"
    )


def _task_of(data: Any, name: str) -> str:
    """The task that fits data: theirs, as far as the object, or what its function says to return, tells."""
    if isinstance(data, FederatedDataset):
        return "captioning" if data.captioned else "chat" if data.conversed else "vqa"
    labelled = isinstance(data, LabelDataset)
    if not labelled and name:
        labelled = signature(NAMED["data"][name]).return_annotation is LabelDataset
    return "multilabel" if labelled else "vqa"


def _is_object(section: str, value: Any) -> bool:
    """Whether a value is the model or the data themselves, which only this session has."""
    if section == "model":
        return isinstance(value, nn.Module)
    return section == "data" and (isinstance(value, FederatedDataset | LabelDataset) or is_table(value))


def _is_constructor(section: str, value: Any) -> bool:
    """Whether a value makes what a section names."""
    if isinstance(value, type):
        return section != "algorithm" or issubclass(value, Algorithm)
    return isfunction(value)


def _name(section: str, constructor: Callable[..., Any]) -> str:
    """The name by which a recipe can have a function or class; its module is allowed, as the user has given it."""
    if _is_object(section, constructor):
        return session_name(section, constructor)
    known = NAMED[section].name_of(constructor)
    if known is not None:
        return known
    module, name = constructor.__module__, constructor.__qualname__
    if vars(sys.modules.get(module, sys)).get(name) is not constructor:  # made in a function, or replaced since
        return session_name(section, constructor)
    allow_code(module)
    return f"{module}:{name}"


def _values(section: str, value: Any) -> dict[str, Any]:
    """The fields of an object that its constructor takes and that a recipe gives."""
    skipped = DERIVED.get(section, set())
    return {f.name: vars(value)[f.name] for f in fields(value) if f.init and f.name not in skipped}


def _written(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as TOML can hold them; None, which TOML lacks, is left out."""
    found = plain(values)
    for key, value in found.items():
        if not isinstance(value, PLAIN):
            raise ValueError(
                f"{section}.{key} must be a number, a text, or a list or mapping of such, which a recipe can hold; got "
                f"{type(value).__name__}"
            )
    return found

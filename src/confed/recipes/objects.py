"""Sections of a recipe from Python objects: what has a name and keywords is written with them.

A recipe names such an object ``"session:KIND@DIGEST"``; the registry of this process gives it back, and in any other
process the name is an error that says so. The digest is of the object's values, so that a run goes on with the same
object, made again or not, and with no other one.
"""

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import wraps
from inspect import isfunction, signature
from typing import Any

import numpy as np
from torch import Tensor, nn

from confed.data.examples import FederatedDataset, kind_made
from confed.data.tables import Tables, is_table, tables_of
from confed.data.targets import FITTING_TASK
from confed.federation.algorithm import Algorithm
from confed.federation.local import Local
from confed.federation.model_contract import check_model_kept
from confed.federation.old_keys import RENAMED
from confed.federation.params import named_tensors
from confed.federation.specs import model_spec
from confed.recipes.overrides import NAMED
from confed.recipes.run_section import RunSection
from confed.recipes.schema import DERIVED, keywords, plain
from confed.registry import SESSION, allow_code

# Names for objects that only this Python session has: modules -------------------------------------------------


def session_name(section: str, value: Any) -> str:
    """The name of an object of this session, which is registered under it."""
    if isinstance(value, nn.Module):
        check_model_kept(type(value).__name__, value)
        name = f"{SESSION}{type(value).__name__}@{digest_of((str(value), named_tensors(value)))}"
        NAMED[section].add(name, _model(value))
    elif isinstance(value, FederatedDataset):
        name = f"{SESSION}{value.name}@{digest_of(value)}"
        NAMED[section].add(name, lambda: value)
    elif is_table(value):
        tables = tables_of(value)
        rows: dict[str, tuple[Any, list[Any]]] = {}
        for split, table in tables.splits.items():
            rows[split] = (table.column_names, [table[row] for row in range(len(table))])
        name = f"{SESSION}{tables.name}@{digest_of(rows)}"
        NAMED[section].add(name, _tabled(tables))
    else:
        name = f"{SESSION}{value.__name__}"
        NAMED[section].add(name, value)
    return name


def _tabled(tables: Tables) -> Any:
    """Constructor of a federation of tables, with the keywords of the dataset "hub" that are left."""
    hub = NAMED["data"]["hub"]

    @wraps(hub)
    def build(**keywords: Any) -> FederatedDataset:
        return hub(tables, **keywords)

    left = [item for key, item in signature(hub).parameters.items() if key not in ("source", "revision", "config")]
    named = [item.replace(kind=item.KEYWORD_ONLY) for item in left]
    build.__signature__ = signature(hub).replace(parameters=named)  # pyright: ignore[reportAttributeAccessIssue]
    return build


def _model(module: nn.Module) -> Any:
    """Constructor of copies of a module, with what the module declares of itself."""

    def build(answers: Any, vocab_size: int, seed: int = 0) -> nn.Module:
        del answers, vocab_size, seed  # the module has been made
        return deepcopy(module)

    build.spec = model_spec(module)  # pyright: ignore[reportFunctionMemberAccess]
    return build


def digest_of(value: object) -> str:
    """Digest of an object's values, 8 hexadecimal digits; of lazy pictures their number and size count."""
    hasher = hashlib.blake2b(digest_size=4)
    _add(hasher, value, {})
    return hasher.hexdigest()


def _add(hasher: "hashlib.blake2b", value: object, seen: dict[int, object]) -> None:
    """Values in an order that depends on nothing but them; large things that come again count once."""
    if isinstance(value, Tensor):
        value = (value.float() if value.is_floating_point() else value).detach().cpu().numpy()
    if isinstance(value, str | int | float | bool | bytes | type(None)):
        hasher.update(repr(value).encode())
        return
    if id(value) in seen:
        hasher.update(b"again")
        return
    seen[id(value)] = value  # kept, so that no other object gets its id
    hasher.update(type(value).__name__.encode())
    if isinstance(value, np.ndarray):
        hasher.update(f"{value.dtype}{value.shape}".encode())
        hasher.update(np.ascontiguousarray(value).data if value.dtype != object else repr(value.tolist()).encode())
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            hasher.update(field.name.encode())
            _add(hasher, vars(value).get(field.name), seen)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            hasher.update(repr(key).encode())
            _add(hasher, item, seen)
    elif isinstance(value, Sequence):
        hasher.update(f"{len(value)}".encode())
        for item in value:
            _add(hasher, item, seen)


# Sections of a recipe from Python objects ---------------------------------------------------------------------

PLAIN = str | int | float | bool | list | dict  # what TOML can hold


def content_of(given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The content of a recipe file that describes the same."""
    task = given.get("task")
    content = {section: section_of(section, value) for section, value in given.items() if value is not None}
    if task is None and "data" in content:
        content["task"] = {"name": _task_of(given["data"], str(content["data"].get("name", "")))}
    return content


def overrides_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """``section.key`` -> value of overrides that may name sections as a whole, and keys of ``[run]`` alone."""
    sections, keys = (*NAMED, "local", "run"), list(keywords(RunSection))
    overrides: dict[str, Any] = {}
    for name, value in given.items():
        if "." in name:
            overrides[name] = value
        elif name in sections:
            overrides |= {f"{name}.{key}": item for key, item in section_of(name, value).items()}
        elif name in keys or f"run.{name}" in RENAMED:
            overrides[f"run.{name}"] = value
        else:
            near = get_close_matches(name, [*sections, *keys], 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(
                f"unknown setting {name!r}; {hint}valid are 'section.key', the sections {', '.join(sections)}, and "
                f"the keys of [run]: {', '.join(keys)}"
            )
    return overrides


def section_of(section: str, value: Any) -> dict[str, Any]:
    """A section of a recipe as its file has it."""
    if _is_object(section, value):
        return {"name": session_name(section, value)}
    if isinstance(value, Mapping):
        section_content = dict(value)
        if section in NAMED and "name" in section_content and not isinstance(section_content["name"], str):
            section_content["name"] = _name(section, section_content["name"])
        return _written(section, section_content)
    if section in ("local", "run"):
        wanted = Local if section == "local" else RunSection
        if not isinstance(value, wanted):
            keys = ", ".join(field.name for field in fields(wanted))
            raise ValueError(f"{section} must be a mapping of its keys ({keys}), got {value!r}")
        return _written(section, _values(section, value))
    if isinstance(value, str):
        return {"name": value}
    if isfunction(value) or (isinstance(value, type) and (section != "algorithm" or issubclass(value, Algorithm))):
        return {"name": _name(section, value)}
    if is_dataclass(value) and (isinstance(value, Algorithm) if section == "algorithm" else section == "task"):
        return {"name": _name(section, type(value)), **_written(section, _values(section, value))}
    kinds = {
        "algorithm": "an Algorithm",
        "model": "a torch.nn.Module",
        "data": "a FederatedDataset, DataFrame or Dataset",
    }
    raise ValueError(
        f"{section} must be a name, a mapping with 'name', a function or class, or "
        f"{kinds.get(section, 'a task')}; got {type(value).__name__}"
    )


def _task_of(data: Any, name: str) -> str:
    """The task that fits data: theirs, as far as the object, or what its function says to return, tells."""
    if isinstance(data, FederatedDataset):
        return FITTING_TASK[data.kind]
    return FITTING_TASK[kind_made(NAMED["data"][name])] if name else "vqa"


def _is_object(section: str, value: Any) -> bool:
    """Whether a value is the model or the data themselves, which only this session has."""
    if section == "model":
        return isinstance(value, nn.Module)
    return section == "data" and (isinstance(value, FederatedDataset) or is_table(value))


def _name(section: str, constructor: Callable[..., Any]) -> str:
    """The name by which a recipe can have a function or class; its module is allowed, as the user has given it."""
    if _is_object(section, constructor):
        return session_name(section, constructor)
    registered_name = NAMED[section].name_of(constructor)
    if registered_name is not None:
        return registered_name
    module, name = constructor.__module__, constructor.__qualname__
    if vars(sys.modules.get(module, sys)).get(name) is not constructor:  # made in a function, or replaced since
        return session_name(section, constructor)
    allow_code(module)
    return f"{module}:{name}"


def _values(section: str, value: Any) -> dict[str, Any]:
    """The fields of an object that its constructor takes and that a recipe gives."""
    skipped = DERIVED.get(section, set())
    return {f.name.removesuffix("_"): vars(value)[f.name] for f in fields(value) if f.init and f.name not in skipped}


def _written(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as TOML can hold them; None, which TOML lacks, is left out."""
    written = plain(values)
    for key, value in written.items():
        if not isinstance(value, PLAIN):
            raise ValueError(
                f"{section}.{key} must be a number, a text, or a list or mapping of such, which a recipe can hold; got "
                f"{type(value).__name__}"
            )
    return written

"""Overrides of a recipe.

On the command line ``section.key=value``, and ``~section.key`` to take a key away; in Python also a mapping of
``section.key`` to values, of which None takes a key away.
"""

import tomllib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

from confed import registry
from confed.federation.old_keys import new_key, warn_of
from confed.federation.specs import model_spec
from confed.recipes.schema import plain

Overrides = Sequence[str] | Mapping[str, Any]  # ["section.key=TOML"], or {"section.key": value}
SHARED = ("trainable", "peft", "embeddings")
"""Keywords of models that mean the same for all of them: how they are finetuned, and which vectors they are given."""
NAMED = {"algorithm": registry.algorithms, "model": registry.models, "task": registry.tasks, "data": registry.datasets}
"""Sections that name a constructor, and where it is looked up."""


@dataclass(frozen=True)
class _Change:
    text: str
    parts: tuple[str, ...]
    value: Any

    @property
    def renames(self) -> bool:
        """Whether it names another constructor, such as ``model.name=mcan_small``."""
        return len(self.parts) == 2 and self.parts[0] in NAMED and self.parts[1] == "name"


def apply_overrides(content: dict[str, Any], overrides: Overrides) -> None:
    """Apply overrides to a recipe's content in place, as its file has it.

    Another constructor's name drops the keywords of the one before (but for :func:`kept_keys`), whatever the order of
    the overrides. Where a model that writes its answers takes the place of one that scores them, it chooses among the
    same answers by likelihood, unless the overrides name a task.

    Where the rows or models of a study are given, sections of rows that are left out go too.
    """
    rows, variants = list(content.get("methods", {})), list(content.get("models", {}))
    if isinstance(overrides, Mapping):
        changes = [_of_mapping(key, value) for key, value in overrides.items()]
    else:
        changes = [_of_text(text) for text in overrides]
    warn_of([".".join(change.parts) for change in changes if new_key(change.parts, change.value) != change.parts])
    changes = [replace(change, parts=new_key(change.parts, change.value)) for change in changes]
    for change in sorted(changes, key=lambda change: not change.renames):
        if change.value is None:
            _take_away(content, change)
        else:
            _set(content, change)
    given = {change.parts for change in changes}
    if ("model", "name") in given and ("task", "name") not in given:
        _choose_by_likelihood(content)
    if ("model", "source") in given and ("model", "revision") not in given:
        content.get("model", {}).pop("revision", None)  # another model has other commits
    if any(change.parts[0] == "study" for change in changes):
        study = content.get("study", {})
        # Rows of the file that the command left out are no mistake; rows the command names itself are.
        named = {change.parts[1] for change in changes if change.parts[0] == "methods"}
        listed = {*study.get("methods", ()), *study.get("table", ()), *named}
        for row in rows:
            if row not in listed:
                content["methods"].pop(row, None)
        named = {change.parts[1] for change in changes if change.parts[0] == "models"}
        for model in variants:
            if model not in {*study.get("models", ()), *named}:
                content["models"].pop(model, None)


def kept_keys(section: str, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of a section that stay when its constructor changes: of models, those that mean the same for all."""
    if section != "model":
        return {}
    try:
        accepted = signature(registry.models[name]).parameters
    except ValueError:  # no such model, which is said where it is looked up to be used
        return {}
    return {key: values[key] for key in SHARED if key in values and key in accepted}


def _choose_by_likelihood(content: Mapping[str, Any]) -> None:
    """The task "generation" in place of "vqa" for a model that writes its answers, with a warning that says so."""
    name, task = content["model"].get("name", ""), content.get("task", {})
    try:
        writes = model_spec(registry.models[name]).writes
    except ValueError:  # no such model, which is said where it is looked up to be used
        return
    if task.get("name") != "vqa" or writes != "answers":
        return
    task.clear()
    task["name"] = "generation"
    warnings.warn(
        f"the model {name!r} writes its answers, so that task.name is 'generation': it chooses among the answers of "
        "the data by likelihood",
        stacklevel=2,
    )


def _of_mapping(key: str, value: Any) -> _Change:
    parts = tuple(key.split("."))
    if not 2 <= len(parts) <= 5 or not all(parts):
        raise ValueError(f"the key of an override must be 'section.key', got {key!r}")
    value = plain(value)
    return _Change(f"~{key}" if value is None else f"{key}={value}", parts, value)


def _of_text(override: str) -> _Change:
    if override.startswith("~"):
        parts = override.removeprefix("~").strip().split(".")
        if "=" in override or not 2 <= len(parts) <= 5 or not all(parts):
            raise ValueError(f"what takes a key away must be ~section.key, got {override!r}")
        return _Change(override, tuple(parts), None)
    key, separator, text = override.partition("=")
    parts = key.strip().split(".")
    if not separator or not 2 <= len(parts) <= 5 or not all(parts):
        raise ValueError(f"an override must be section.key=value, got {override!r}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        # a word is a text; what begins as a list, a table or a quoted text is a slip in one.
        if text.strip()[:1] in ("[", "{", '"', "'"):
            reason = str(error).partition(" (at ")[0]  # without a position in a line that the user did not write
            raise ValueError(f"{override!r}: not TOML: {reason}") from error
        value = text
    return _Change(override, tuple(parts), value)


def _set(content: dict[str, Any], change: _Change) -> None:
    target, parts = content, change.parts
    for key in parts[:-1]:
        target = target.setdefault(key, {})
        if not isinstance(target, dict):
            raise ValueError(f"{change.text!r}: {key!r} is a value, not a section")
    if change.renames and target.get("name") != change.value:
        shared = kept_keys(parts[0], str(change.value), target)
        target.clear()  # another constructor has other keywords
        target.update(shared)
    target[parts[-1]] = change.value


def _take_away(content: dict[str, Any], change: _Change) -> None:
    target: Any = content
    for key in change.parts[:-1]:
        target = target.get(key) if isinstance(target, dict) else None
    if not isinstance(target, dict):
        raise ValueError(f"{change.text!r}: the recipe has no section [{'.'.join(change.parts[:-1])}]")
    if change.parts[-1] not in target:
        raise ValueError(f"{change.text!r}: the recipe does not give that key, only {', '.join(target) or 'none'}")
    del target[change.parts[-1]]

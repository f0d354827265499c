"""Command-line overrides of a recipe: ``section.key=value``, and ``~section.key`` to take a key away."""

import tomllib
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

from confed import registry

__all__ = ["NAMED", "apply_overrides", "kept_keys"]

SHARED = ("trainable", "peft", "embeddings")
"""Keywords of models that mean the same for all of them: how they are finetuned, and which vectors they are given."""
NAMED = {
    "algorithm": registry.algorithms,
    "model": registry.models,
    "task": registry.tasks,
    "data": registry.datasets,
}
"""Sections that name a constructor, and where it is looked up."""


def apply_overrides(content: dict[str, Any], overrides: Sequence[str]) -> None:
    """Apply overrides to a recipe's content in place, as its file has it.

    Another constructor's name drops the keywords of the one before (but for :func:`kept_keys`), whatever the order of
    the overrides. Where the rows or models of a study are given, sections of rows that are left out go too.

    Args:
        content: section -> key -> value.
        overrides: ``section.key=value`` with a TOML value, or any text as a string; or ``~section.key``.

    An override of another form, one that treats a value as a section, and the removal of a key that the recipe does not
    have are refused with a ValueError.
    """
    rows, variants = list(content.get("methods", {})), list(content.get("models", {}))
    for override in sorted(overrides, key=lambda override: not _renames(override)):
        if override.startswith("~"):
            _take_away(content, override)
        else:
            _override(content, override)
    if any(override.removeprefix("~").startswith("study.") for override in overrides):
        study = content.get("study", {})
        # Rows of the file that the command left out are no mistake; rows the command names itself are.
        named = {override.split(".")[1] for override in overrides if override.startswith("methods.")}
        kept = {*study.get("methods", ()), *study.get("table", ()), *named}
        for row in rows:
            if row not in kept:
                content["methods"].pop(row, None)
        named = {override.split(".")[1] for override in overrides if override.startswith("models.")}
        for model in variants:
            if model not in {*study.get("models", ()), *named}:
                content["models"].pop(model, None)


def kept_keys(section: str, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of a section that stay when its constructor changes: of models, those that mean the same for all.

    Args:
        section: one of :data:`NAMED`.
        name: the new constructor.
        values: the section as it was.
    """
    if section != "model":
        return {}
    try:
        accepted = signature(registry.models[name]).parameters
    except ValueError:  # no such model, which is said where it is looked up to be used
        return {}
    return {key: values[key] for key in SHARED if key in values and key in accepted}


def _renames(override: str) -> bool:
    """Whether an override names another constructor, such as ``model.name=mcan_small``."""
    section, _, key = override.partition("=")[0].strip().partition(".")
    return section in NAMED and key == "name"


def _override(content: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    parts = key.strip().split(".")
    if not separator or not 2 <= len(parts) <= 4 or not all(parts):
        raise ValueError(f"an override must be section.key=value, got {override!r}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        # A word is a text; what begins as a list, a table or a quoted text is a slip in one.
        if text.strip()[:1] in ("[", "{", '"', "'"):
            raise ValueError(f"{override!r}: not TOML: {_reason(error)}") from error
        value = text
    target = content
    for part in parts[:-1]:
        target = target.setdefault(part, {})
        if not isinstance(target, dict):
            raise ValueError(f"{override!r}: {part!r} is a value, not a section")
    if parts[0] in NAMED and parts[1:] == ["name"] and target.get("name") != value:
        kept = kept_keys(parts[0], str(value), target)
        target.clear()  # another constructor has other keywords
        target.update(kept)
    target[parts[-1]] = value


def _reason(error: tomllib.TOMLDecodeError) -> str:
    """Reason of a TOML error, without a position in a line that the user did not write."""
    return str(error).partition(" (at ")[0]


def _take_away(content: dict[str, Any], override: str) -> None:
    parts = override.removeprefix("~").strip().split(".")
    if "=" in override or not 2 <= len(parts) <= 4 or not all(parts):
        raise ValueError(f"what takes a key away must be ~section.key, got {override!r}")
    target: Any = content
    for part in parts[:-1]:
        target = target.get(part) if isinstance(target, dict) else None
    if not isinstance(target, dict):
        raise ValueError(f"{override!r}: the recipe has no section [{'.'.join(parts[:-1])}]")
    if parts[-1] not in target:
        raise ValueError(f"{override!r}: the recipe does not give that key, only {', '.join(target) or 'none'}")
    del target[parts[-1]]

"""Keys that recipes had in earlier versions, and what they are called now."""

import warnings
from collections.abc import Mapping
from typing import Any, cast

RENAMED: Mapping[str, str] = {
    "local.schedule": "local.schedule.kind",
    **{f"local.{key}": f"local.schedule.{key}" for key in ("warmup", "stairs", "milestones", "decay", "horizon")},
    "run.features": "run.features.keep",
    **{f"run.features_{key}": f"run.features.{key}" for key in ("memory", "disk", "tolerance")},
    **{f"run.{key}": f"run.async.{key}" for key in ("buffer", "staleness", "delays")},
}
"""Key before -> key now. Two of them were values where there is a table now, and are still given as tables then."""

REMOVED: Mapping[str, Any] = {
    "data.voc.difficult": False,
    "data.caption_corpus.near_duplicates": 0.8,
    "data.poisoned.patch": None,
}
"""Section, what is named there and its former key -> the only value that it has now."""


def new_key(parts: tuple[str, ...], value: Any) -> tuple[str, ...]:
    """The steps of a key as they are now; keys of rows have ``methods.ROW`` or ``models.ROW`` in front."""
    row = parts[:2] if parts[0] in ("methods", "models") else ()
    renamed = RENAMED.get(".".join(parts[len(row) :]))
    return parts if renamed is None or isinstance(value, Mapping) else (*row, *renamed.split("."))


def with_new_keys(content: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's content with the keys of now; one warning names those that it had before."""
    before: list[str] = []
    modern = _moved(content, (), before)
    warn_of(before)
    for key, only in REMOVED.items():
        section, name, option = key.split(".")
        values = cast("dict[str, Any] | None", modern.get(section))
        if isinstance(values, dict) and values.get("name") == name and values.pop(option, only) != only:
            raise ValueError(f"{section}.{option} is no option of {name!r} any more, it is always {only!r}: remove it")
    return modern


def warn_of(before: list[str]) -> None:
    """One warning with the new names of keys."""
    if before:
        pairs = ", ".join(f"{key} is now {'.'.join(new_key(tuple(key.split('.')), None))}" for key in before)
        warnings.warn(f"keys of a recipe were renamed: {pairs}", stacklevel=3)


def _moved(section: Mapping[Any, Any], parts: tuple[str, ...], before: list[str]) -> dict[str, Any]:
    moved: dict[str, Any] = {}
    for key, value in section.items():
        now = new_key((*parts, key), value)
        target = moved
        for step in now[len(parts) : -1]:
            target = target.setdefault(step, {})
        if isinstance(value, Mapping):
            table = cast("Mapping[Any, Any]", value)
            target.setdefault(key, {}).update(_moved(table, (*parts, key), before))
        else:
            target[now[-1]] = value
        if now != (*parts, key):
            before.append(".".join((*parts, key)))
    return moved

"""Recipe that a call of the Python interface asks for."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from confed.recipes.objects import overrides_of
from confed.recipes.recipe import Recipe, load_recipe
from confed.recipes.schema import plain
from confed.results.settings import flat


def recipe_of(
    recipe: str | Path | Recipe,
    overrides: Mapping[str, Any] | None,
    settings: Mapping[str, Any],
    elsewhere: Mapping[str, str] | None = None,
) -> Recipe:
    """The recipe that a call asks for; ``elsewhere`` is what is no setting of it -> what to give instead."""
    if overrides is not None and not (
        isinstance(overrides, Mapping) and all(isinstance(key, str) for key in overrides)
    ):
        raise ValueError(
            f"overrides must be a mapping of section.key to values, such as {{'run.rounds': 2}}, got {overrides!r:.60}"
        )
    if name := next((name for name in elsewhere or {} if name in {**settings, **(overrides or {})}), None):
        raise ValueError(f"{name} is no setting here: {(elsewhere or {})[name]}")
    twice = sorted(set(overrides or {}) & set(settings))
    if twice:
        raise ValueError(f"{twice[0]} is given twice, as an override and as a keyword")
    changes = overrides_of({**(overrides or {}), **settings})
    if isinstance(recipe, Recipe):
        return recipe.changed(changes) if changes else recipe
    if not isinstance(recipe, str | Path):
        raise ValueError(f"recipe must be a name, a path or a confed.Recipe, got {type(recipe).__name__}")
    return load_recipe(recipe, changes)


def check_reached(
    overrides: Mapping[str, Any] | None, settings: Mapping[str, Any], rows: Mapping[str, Recipe], instead: str
) -> None:
    """Check that what a call sets of ``[algorithm]`` is what a row is trained with, and was not dropped on the way."""
    given = {key: value for key, value in overrides_of({**(overrides or {}), **settings}).items() if value is not None}
    wanted = {key: value for key, value in flat(_nested(given)).items() if key.startswith("algorithm.")}
    row_settings = [flat({"algorithm": plain(row.sections["algorithm"])}) for row in rows.values()]
    for key, value in wanted.items():
        if not any(key in row and _same(value, row[key]) for row in row_settings):
            raise ValueError(f"{key}={value!r} has no effect on {', '.join(rows)}: {instead}")


def _same(given: Any, of_row: Any) -> bool:
    """Whether a row has a value that was given, which may be a text of TOML."""
    if given == of_row or not isinstance(given, str):
        return bool(given == of_row)
    try:
        return bool(tomllib.loads(f"value = {given}")["value"] == of_row)
    except tomllib.TOMLDecodeError:
        return False


def _nested(given: Mapping[str, Any]) -> dict[str, Any]:
    """Sections within sections, of keys with dots."""
    nested: dict[str, Any] = {}
    for key, value in given.items():
        *sections, last = key.split(".")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = plain(value)
    return nested

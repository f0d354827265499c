"""Recipe that a call of the Python interface asks for."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from confed.recipes.objects import overrides_of
from confed.recipes.recipe import Recipe, load_recipe

__all__ = ["recipe_of"]


def recipe_of(recipe: str | Path | Recipe, overrides: Mapping[str, Any] | None, settings: Mapping[str, Any]) -> Recipe:
    """The recipe that a call asks for.

    Args:
        recipe: a recipe that comes with confed, a file, or an object.
        overrides: ``section.key`` -> value; a section or a key of ``[run]`` may be named as in ``settings``.
        settings: the call's further keywords; see :func:`confed.api.run.run`.

    Raises:
        ValueError: no such recipe, an unknown key, or a value given twice.
    """
    twice = sorted(set(overrides or {}) & set(settings))
    if twice:
        raise ValueError(f"{twice[0]} is given twice, as an override and as a keyword")
    changes = overrides_of({**(overrides or {}), **settings})
    if isinstance(recipe, Recipe):
        return recipe.changed(changes) if changes else recipe
    if not isinstance(recipe, str | Path):
        raise ValueError(f"recipe must be a name, a path or a confed.Recipe, got {type(recipe).__name__}")
    return load_recipe(recipe, changes)

"""Recipe with the commit of its model by name, so that whoever runs it again reads the same weights."""

from dataclasses import replace

from confed.models.hub_revision import commit_of
from confed.recipes.recipe import Recipe

__all__ = ["pinned"]


def pinned(recipe: Recipe) -> Recipe:
    """The same recipe with ``model.revision``, where a model by name on a hub leaves it out.

    Args:
        recipe: with resolved sections.
    """
    model = recipe.sections["model"]
    if model.get("revision") != "" or not (commit := commit_of(str(model.get("source", "")))):
        return recipe
    return replace(recipe, sections={**recipe.sections, "model": {**model, "revision": commit}})

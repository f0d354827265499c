"""Recipe with the commit of its model by name, so that whoever runs it again reads the same weights."""

from dataclasses import replace

from confed.models.hub_revision import commit_of
from confed.recipes.recipe import Recipe, load_recipe
from confed.results.folder import RunFolder

__all__ = ["pinned", "pinned_as"]


def pinned(recipe: Recipe) -> Recipe:
    """The same recipe with ``model.revision``, where a model by name on a hub leaves it out.

    Args:
        recipe: with resolved sections.
    """
    model = recipe.sections["model"]
    if model.get("revision") != "" or not (commit := commit_of(str(model.get("source", "")))):
        return recipe
    return replace(recipe, sections={**recipe.sections, "model": {**model, "revision": commit}})


def pinned_as(folder: RunFolder, recipe: Recipe) -> Recipe:
    """The same recipe with the commit that its run began with, where it leaves it out.

    Args:
        folder: of the run.
        recipe: with which the run goes on.
    """
    model = recipe.sections["model"]
    file = folder.begun if folder.begun.is_file() else folder.recipe
    if model.get("revision") != "" or not file.is_file():
        return recipe
    revision = load_recipe(file).sections["model"].get("revision", "")
    return replace(recipe, sections={**recipe.sections, "model": {**model, "revision": revision}})

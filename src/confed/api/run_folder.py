"""Folder of a run that a call of the Python interface names."""

from pathlib import Path

from confed.recipes.recipe import Recipe, load_recipe
from confed.results.folder import RunFolder, kind_of
from confed.runs.same_recipe import differing_settings
from confed.system.folder_lock import without_lock

__all__ = ["folder_for"]


def folder_for(folder: Path, recipe: Recipe) -> Path:
    """A folder that is free, or that holds this run.

    Args:
        folder: as it was given.
        recipe: the run's.

    Raises:
        ValueError: it holds a run with other settings, a study, or something else.
    """
    if kind_of(folder) == "run":
        before = RunFolder(folder).begun if RunFolder(folder).begun.is_file() else RunFolder(folder).recipe
        if changed := differing_settings(load_recipe(before), recipe):
            keys = ", ".join(f"{key}={then}, not {now}" for key, (then, now) in changed.items())
            raise ValueError(f"{folder} holds a run with {keys}; give another folder, or none for a new one")
    elif kind_of(folder) == "study":
        raise ValueError(f"{folder} holds a study, which confed.load_study reads; give another folder")
    elif folder.exists() and (not folder.is_dir() or without_lock(folder)):
        raise ValueError(f"{folder} exists already and is no run folder; give another folder, or none for a new one")
    return folder

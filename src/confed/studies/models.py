"""Grids over several models: the same methods and seeds with each of them.

BiCSL's table 2 is one: seven models, each with all methods. The folder holds a grid per model (see
:mod:`confed.studies.grid`), so what is there is reused and what is missing is run, and an index, ``models.json``.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from confed.federation.checkpoint import write_atomically
from confed.recipes.recipe import Recipe
from confed.system.folder_lock import without_lock

__all__ = ["INDEX", "Backbones", "is_backbones", "models_of", "open_backbones", "read_backbones"]

INDEX = "models.json"


@dataclass(frozen=True)
class Backbones:
    """Content of a folder of several models, as in its index.

    Attributes:
        recipe: name of the recipe.
        models: row of a model, which is also the folder of its grid -> how tables write it, in order.
        references: the methods that the others are compared with; empty for the usual ones.
        margin: differences smaller than this are taken not to matter, a fraction.
    """

    recipe: str
    models: Mapping[str, str]
    references: tuple[str, ...] = ()
    margin: float = 0.01


def models_of(recipe: Recipe, wanted: str) -> tuple[str, ...]:
    """Models that a command's ``--models`` names.

    Args:
        recipe: the recipe.
        wanted: rows of its ``[study] models`` or registered models with commas between them, "all" among them for the
            former.

    Raises:
        ValueError: no name at all, an unknown one, or "all" where the recipe names no models.
    """
    from confed.registry import models

    names: dict[str, None] = {}
    for name in filter(None, map(str.strip, wanted.split(","))):
        if name == "all" and not recipe.models:
            raise ValueError(
                f"the recipe {recipe.name!r} names no models, so models must not be 'all': give it [study] models, or "
                f"names of {', '.join(models.names())}"
            )
        if name != "all" and name not in recipe.models and name not in models.names():
            rows = ", ".join(recipe.models) or "none"
            raise ValueError(
                f"models must be among those of the recipe ({rows}) or registered ones ({', '.join(models.names())}), "
                f"got {name!r}"
            )
        names |= dict.fromkeys(recipe.models if name == "all" else [name])
    if not names:
        raise ValueError(f"models must name at least one model, got {wanted!r}")
    return tuple(names)


def open_backbones(
    recipe: Recipe, rows: Sequence[str], root: Path, *, references: Sequence[str] = (), margin: float = 0.01
) -> tuple[Backbones, dict[str, Recipe]]:
    """A new folder of several models after a check of their recipes, or an existing one with further models.

    Args:
        recipe: with the wanted methods as its rows.
        rows: the models, of :func:`models_of`.
        root: the folder.
        references: the methods that the others are compared with.
        margin: differences smaller than this are taken not to matter, a fraction.

    Returns:
        What the folder consists of, models of earlier commands included; and row -> the study of each given one.

    Raises:
        ValueError: a faulty recipe, a folder that holds something else, or models there with other settings.
    """
    recipes = {row: _study_of(recipe, row) for row in rows}
    labels = {row: str(recipe.variants.get(row, {}).get("label", row)) for row in rows}
    if is_backbones(root):
        before = read_backbones(root)
        if before.recipe != recipe.name:
            raise ValueError(
                f"{root} holds models of {before.recipe}, not of {recipe.name}; give another folder with --out"
            )
        _check_settings(recipe, [row for row in before.models if row not in rows], root)
        labels = {**before.models, **labels}
        if set(labels) <= set(recipe.models):
            labels = {row: labels[row] for row in recipe.models if row in labels}
    elif root.exists() and (not root.is_dir() or without_lock(root)):
        raise ValueError(f"{root} exists already and holds no models to compare; give another folder with --out")
    index = Backbones(recipe.name, labels, tuple(references), margin)
    root.mkdir(parents=True, exist_ok=True)
    content = {"recipe": index.recipe, "models": labels, "references": list(references), "margin": margin}
    write_atomically(root / INDEX, json.dumps(content, indent=1, ensure_ascii=False).encode())
    return index, recipes


def _study_of(recipe: Recipe, row: str) -> Recipe:
    """The study of one model, with the recipe's rows."""
    return recipe.with_model(row).with_rows(recipe.methods)


def _check_settings(recipe: Recipe, rows: Sequence[str], root: Path) -> None:
    """Check that models of earlier commands were run with the present settings, so that no table mixes data.

    Raises:
        ValueError: one of them was not.
    """
    from confed.registry import models
    from confed.studies.grid import differing, is_grid
    from confed.studies.study import read_study

    for row in rows:
        if not is_grid(root / row) or (row not in recipe.models and row not in models.names()):
            continue
        before, now = read_study(root / row)[0], _study_of(recipe, row)
        for method in before.methods:
            if method in now.methods:  # seeds may differ: cells are compared seed by seed
                there, wanted = (one.method(method).with_run(seed=0, workers=1) for one in (before, now))
                found = differing(there, wanted)
                if found:
                    raise ValueError(
                        f"{root}: {row} there has {found}; run all its models with the same settings, or give another "
                        "folder with --out"
                    )


def is_backbones(folder: Path) -> bool:
    """Whether a folder is one of several models."""
    return (folder / INDEX).is_file()


def read_backbones(root: Path) -> Backbones:
    """The index of several models.

    Raises:
        ValueError: it is faulty, or names folders that lie elsewhere.
    """
    try:
        content = json.loads((root / INDEX).read_text(encoding="utf-8"))
        models = {str(row): str(label) for row, label in content["models"].items()}
        references = tuple(map(str, content["references"]))
        found = Backbones(str(content["recipe"]), models, references, float(content["margin"]))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{root / INDEX} is no index of models: {type(error).__name__}: {error}") from error
    for row in models:
        if not re.fullmatch(r"[\w+-][\w.+-]*", row):
            raise ValueError(f"{root / INDEX}: a grid must lie in the folder, got {row!r}")
    return found

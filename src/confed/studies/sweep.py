"""Sweeps: the same grid of methods and seeds for each of several values of one setting.

FedDAT's figure 6 is one: accuracy against the number of clients, each number with its own round budget. A sweep's
folder holds a grid per value (see :mod:`confed.studies.grid`), so what is there is reused and what is missing is run. A
run that the swept setting does not concern, such as local training in a sweep over another method's lambda, is the same
at every value: it is made once and copied.

Figure 6 of the multimodal personalised Transformer (Cao et al., 2025) has two lines, for data that are split in two
ways: a sweep may go over all values for each of several values of another setting.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from confed.federation.checkpoint import write_atomically
from confed.recipes.recipe import Recipe, load_recipe
from confed.results.sweep import INDEX, Point, Sweep, number_of, read_sweep
from confed.system.folder_lock import without_lock

__all__ = ["Axis", "is_sweep", "open_sweep", "parse_axis", "points_of"]


@dataclass(frozen=True)
class Axis:
    """A setting and its values, in order.

    Attributes:
        key: ``section.key``.
        values: each as TOML.
    """

    key: str
    values: tuple[str, ...]


def parse_axis(text: str) -> Axis:
    """``section.key=1,2,3`` as an axis; a value may be any TOML, such as a list.

    Raises:
        ValueError: the text has another form.
    """
    key, separator, rest = text.partition("=")
    values = tuple(filter(None, map(str.strip, re.split(r",(?![^\[{]*[\]}])", rest))))
    if not separator or "." not in key or not values:
        raise ValueError(f"a sweep goes over section.key=VALUE,VALUE,..., got {text!r}")
    return Axis(key.strip(), values)


def points_of(over: Axis, along: Sequence[Axis] = (), by: Axis | None = None) -> tuple[Point, ...]:
    """A point per value of the swept setting, for each line.

    Args:
        over: the swept setting.
        along: settings that change with it, with as many values each, such as the rounds.
        by: a setting with a value per line.

    Raises:
        ValueError: another number of values, or a setting or a swept value that comes twice.
    """
    for axis in (over, *([] if by is None else [by])):
        if len(set(axis.values)) < len(axis.values):
            raise ValueError(f"the values of {axis.key} must differ, got {', '.join(axis.values)}")
    keys = [over.key, *(axis.key for axis in along), *([] if by is None else [by.key])]
    if len(set(keys)) < len(keys):
        raise ValueError(f"every setting must be given once, got {', '.join(keys)}")
    points: list[Point] = []
    for axis in along:
        if len(axis.values) != len(over.values):
            raise ValueError(
                f"{axis.key} must have a value for each of the {len(over.values)} of {over.key}, got {len(axis.values)}"
            )
    for line in [None] if by is None else by.values:
        for i, value in enumerate(over.values):
            name = _named(over.key, value, i)
            settings = {over.key: value} | {axis.key: axis.values[i] for axis in along}
            if by is not None and line is not None:
                name = f"{name}-{_named(by.key, line, by.values.index(line))}"
                settings[by.key] = line
            if any(point.folder == name for point in points):
                name = f"{name}-{i}"
            points.append(Point(settings, name))
    return tuple(points)


def _named(key: str, value: str, number: int) -> str:
    """A setting's value as a part of a folder's name."""
    return f"{key.rpartition('.')[2]}-{re.sub(r'[^A-Za-z0-9_.+-]+', '_', value).strip('_.') or number}"


def open_sweep(
    source: str | Path,
    overrides: Sequence[str],
    over: Axis,
    along: Sequence[Axis],
    root: Path,
    *,
    methods: str | None = None,
    headline: str = "",
    references: Sequence[str] = (),
    margin: float = 0.01,
    tuned: Mapping[str, Mapping[str, Any]] | None = None,
    by: Axis | None = None,
) -> tuple[Sweep, dict[str, tuple[Recipe, Mapping[str, Any]]]]:
    """A new sweep's index after a check of the recipes of all values, or an existing one with further values.

    Args:
        source: a recipe; see :func:`confed.recipes.recipe.load_recipe`.
        overrides: of all values.
        over: the swept setting.
        along: settings that change with it.
        root: the sweep's folder.
        methods: rows as ``confed compare --methods`` takes them.
        headline: which model is judged; see :mod:`confed.results.deployed`.
        references: the methods that the others are compared with.
        margin: differences smaller than this are taken not to matter, a fraction.
        tuned: row -> values that tuning chose.
        by: a setting with a value per line.

    Returns:
        The sweep with all its values, those of earlier commands included; and for each folder of the given ones its
        recipe and the tuned values in use.

    Raises:
        ValueError: a faulty recipe, a reference that is no row, or a folder that holds something else.
    """
    from confed.studies.grid import rows_of
    from confed.studies.tuned import apply

    points = points_of(over, along, by)
    recipes: dict[str, tuple[Recipe, Mapping[str, Any]]] = {}
    for point in points:
        loaded = load_recipe(source, [*overrides, *point.overrides])
        loaded = replace(loaded.with_rows(rows_of(loaded, methods)), headline=headline or loaded.headline)
        recipes[point.folder] = loaded, _ = apply(loaded, tuned or {}, [*overrides, *point.overrides])
        for wanted in references:
            if wanted not in loaded.methods:
                raise ValueError(f"--reference {wanted} is none of the methods compared: {', '.join(loaded.methods)}")
    first, _ = next(iter(recipes.values()))
    sweep = Sweep(first.name, over.key, points, tuple(references), margin, "" if by is None else by.key)
    if is_sweep(root):
        before = read_sweep(root)
        if (before.recipe, before.key, before.by) != (sweep.recipe, sweep.key, sweep.by):
            there, wanted = (f"{s.recipe} over {s.key}{s.by and f' for each {s.by}'}" for s in (before, sweep))
            raise ValueError(f"{root} holds a sweep of {there}, not of {wanted}; give another folder with --out")
        sweep = replace(sweep, points=_merged(root, before.points, points, sweep.by))
    elif root.exists() and without_lock(root):
        raise ValueError(f"{root} exists already and is no sweep; give another folder with --out")
    root.mkdir(parents=True, exist_ok=True)
    content = {
        "recipe": sweep.recipe,
        "over": sweep.key,
        "points": [{"settings": dict(point.settings), "folder": point.folder} for point in sweep.points],
        "references": list(sweep.references),
        "margin": sweep.margin,
        "by": sweep.by,
    }
    write_atomically(root / INDEX, json.dumps(content, indent=1, ensure_ascii=False).encode())
    return sweep, recipes


def is_sweep(folder: Path) -> bool:
    """Whether a folder is a sweep's."""
    return (folder / INDEX).is_file()


def _merged(root: Path, before: Sequence[Point], now: Sequence[Point], by: str) -> tuple[Point, ...]:
    """All points, line by line, in the order of their values where these are numbers.

    Raises:
        ValueError: a point was begun with other settings.
    """
    known = {point.folder: point for point in before}
    for point in now:
        old = known.get(point.folder)
        if old is not None and dict(old.settings) != dict(point.settings):
            raise ValueError(
                f"{root / point.folder} was begun with {', '.join(old.overrides)}, not {', '.join(point.overrides)}; "
                "give another folder with --out"
            )
    together = list(({point.folder: point for point in now} | known).values())
    numbers = [number_of(next(iter(point.settings.values()))) for point in together]
    if all(number is not None for number in numbers):
        together = [point for _, point in sorted(zip(numbers, together, strict=True), key=lambda pair: pair[0] or 0.0)]
    lines = list(dict.fromkeys(point.settings.get(by) for point in together))
    return tuple(sorted(together, key=lambda point: lines.index(point.settings.get(by))))

"""Sweeps: the same study of methods and seeds for each value of a setting, or with each of several models.

FedDAT's figure 6 is one: accuracy against the number of clients, each number with its own round budget; BiCSL's table 2
is another: seven models, each with all methods. A sweep's folder holds a study for each (see
:mod:`confed.studies.study`), so what is there is reused and what is missing is run. A run that the swept setting does
not concern, such as local training in a sweep over another method's lambda, is the same at every value: it is made once
and copied.

Figure 6 of the multimodal personalised Transformer (Cao et al., 2025) has two lines, for data that are split in two
ways: a sweep may go over all values for each of several values of another setting, or with each of several models.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from confed.recipes.recipe import Recipe
from confed.registry import models
from confed.results.folder import kind_of
from confed.results.sweep import MODELS, Point, Sweep, number_of, read_sweep, write_sweep_index
from confed.studies.study import differing, growing, load_rows, open_study
from confed.system.folder_lock import without_lock


@dataclass(frozen=True)
class Axis:
    """A setting and its values, in order."""

    key: str
    values: tuple[str, ...]


def parse_axis(text: str) -> Axis:
    """``section.key=1,2,3`` as an axis; a value may be any TOML, such as a list; a fault is a ValueError."""
    key, separator, rest = text.partition("=")
    values = tuple(filter(None, map(str.strip, re.split(r",(?![^\[{]*[\]}])", rest))))
    if not separator or "." not in key or not values:
        raise ValueError(f"a sweep goes over section.key=VALUE,VALUE,..., got {text!r}")
    return Axis(key.strip(), values)


def points_of(over: Axis, along: Sequence[Axis] = (), by: Axis | None = None) -> tuple[Point, ...]:
    """A point per value of the swept setting, for each line; a fault is a ValueError."""
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
    return f"{key.rpartition('.')[2]}-{re.sub(r'[^A-Za-z0-9_.+-]+', '_', value)[:60].strip('_.') or number}"


def models_of(recipe: Recipe, wanted: str) -> tuple[str, ...]:
    """Models that a command's ``--models`` names; a fault is a ValueError."""
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


def points_of_models(recipe: Recipe, rows: Sequence[str]) -> tuple[Point, ...]:
    """A point per model."""
    labels = {row: str(recipe.variants.get(row, {}).get("label", row)) for row in rows}
    return tuple(Point({MODELS: row}, row, label) for row, label in labels.items())


def recipes_of(
    source: str | Path,
    overrides: Sequence[str],
    points: Sequence[Point],
    methods: str | None = None,
    headline: str = "",
    tuned: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, tuple[Recipe, Mapping[str, Any]]]:
    """Folder of each point -> its recipe and the tuned values in it; see :func:`confed.studies.study.load_rows`."""
    recipes: dict[str, tuple[Recipe, Mapping[str, Any]]] = {}
    for point in points:
        recipe, used = load_rows(source, [*overrides, *point.overrides], methods, headline, tuned)
        if MODELS in point.settings:
            recipe = _with_model(recipe, point.settings[MODELS])
        recipes[point.folder] = recipe, used
    every = [_settings(recipe) for recipe, _ in recipes.values()]
    if len(every) > 1 and all(each == every[0] for each in every):
        settings, rows = ", ".join(points[0].settings), [row for row, *_ in every[0]]
        raise ValueError(
            f"{settings} changes nothing: each of the rows {', '.join(rows)} has its own value there; sweep the row's, "
            f"such as methods.{rows[0]}.{settings.removeprefix('algorithm.')}"
        )
    return recipes


def _settings(recipe: Recipe) -> list[tuple[Any, ...]]:
    """What each row would be run with."""
    return [(row, recipe.method(row).sections, recipe.run) for row in recipe.methods]


def open_sweep(
    root: Path,
    sweep: Sweep,
    recipes: Mapping[str, tuple[Recipe, Mapping[str, Any]]],
    *,
    seeds: int = 1,
    judged: Mapping[str, Any] | None = None,
    models_from: Recipe | None = None,
) -> Sweep:
    """A new sweep with its studies, or an existing one with further values, models, methods and seeds.

    All studies are opened before a run is started, so that what does not fit is said at once.
    """
    if kind_of(root) == "sweep":
        before = read_sweep(root)
        if (before.recipe, before.over, before.by) != (sweep.recipe, sweep.over, sweep.by):
            sweep_before, wanted = (f"{s.recipe} over {s.over}{s.by and f' for each {s.by}'}" for s in (before, sweep))
            raise ValueError(f"{root} holds a sweep of {sweep_before}, not of {wanted}; give another folder with --out")
        if models_from is not None:
            _check_models(models_from, [row for row in before.models if row not in recipes], root)
        order = () if models_from is None else models_from.models
        sweep = replace(sweep, points=_merged(root, before.points, sweep.points, sweep.by, order))
    elif root.exists() and (not root.is_dir() or without_lock(root)):
        raise ValueError(f"{root} exists already and is no sweep; give another folder with --out")
    write_sweep_index(root, sweep)
    for folder, (recipe, used) in recipes.items():
        open_study(recipe, root / folder, range(recipe.run.seed, recipe.run.seed + seeds), used, judged)
    return sweep


@dataclass(frozen=True)
class Grid:
    """Rows of a recipe and seeds at each point of an axis, as a command asks for them; a study has one point."""

    source: str | Path
    overrides: Sequence[str]
    methods: str | None
    headline: str
    tuned: Mapping[str, Mapping[str, Any]] | None
    seeds: int
    points: tuple[Point, ...] = (Point({}, ""),)
    over: str = ""  # the swept setting, or MODELS; "" for a study
    by: str = ""  # the setting that tells lines apart, if any
    study: Recipe | None = None  # with all its models, over which this goes

    @cached_property
    def recipes(self) -> dict[str, tuple[Recipe, Mapping[str, Any]]]:
        """Folder of each point -> its recipe and the tuned values in it."""
        return recipes_of(self.source, self.overrides, self.points, self.methods, self.headline, self.tuned)

    @property
    def first(self) -> Recipe:
        """The recipe at the first point."""
        return self.recipes[self.points[0].folder][0]

    def over_models(self, wanted: str) -> "Grid":
        """The same study with each of the models that ``--models`` names."""
        points = points_of_models(self.first, models_of(self.first, wanted))
        return replace(self, points=points, over=MODELS, study=self.first)

    def open(self, root: Path, judged: Mapping[str, Any]) -> None:
        """Folder and index of its study or of its sweep, new or with more in it; no run is started."""
        if not self.over:
            recipe, used = self.recipes[""]
            open_study(recipe, root, range(recipe.run.seed, recipe.run.seed + self.seeds), used, judged)
            return
        sweep = Sweep(self.first.name, self.over, self.points, judged["references"], judged["margin"], self.by)
        open_sweep(root, sweep, self.recipes, seeds=self.seeds, judged=judged, models_from=self.study)


def _with_model(recipe: Recipe, row: str) -> Recipe:
    """The study of one model, with the recipe's rows."""
    return recipe.with_model(row).with_rows(recipe.methods)


def _check_models(recipe: Recipe, rows: Sequence[str], root: Path) -> None:
    """Check that models of earlier commands were run with the present settings, so that no table mixes data."""
    for row in rows:
        before = growing(root / row)
        if before is None or (row not in recipe.models and row not in models.names()):
            continue
        now = _with_model(recipe, row)
        for method in before.recipe.methods:
            if method in now.methods:  # seeds may differ: runs are compared seed by seed
                recipe_before, wanted = (one.method(method).with_run(seed=0, workers=1) for one in (before.recipe, now))
                if differences := differing(recipe_before, wanted):
                    raise ValueError(
                        f"{root}: {row} there has {differences}; run all its models with the same settings, or give "
                        "another "
                        "folder with --out"
                    )


def _merged(
    root: Path, before: Sequence[Point], now: Sequence[Point], by: str, order: Sequence[str]
) -> tuple[Point, ...]:
    """All points, line by line, in the order of their values where these are numbers, or of a recipe's models."""
    points_before = {point.folder: point for point in before}
    for point in now:
        old = points_before.get(point.folder)
        if old is not None and dict(old.settings) != dict(point.settings):
            raise ValueError(
                f"{root / point.folder} was begun with {old.title}, not {point.title}; give another folder with --out"
            )
    together = list((points_before | {point.folder: point for point in now}).values())
    numbers = {point.folder: number_of(next(iter(point.settings.values()))) for point in together}
    if None not in numbers.values():
        together.sort(key=lambda point: numbers[point.folder] or 0.0)
    elif set(numbers) <= set(order):
        together.sort(key=lambda point: order.index(point.folder))
    lines = list(dict.fromkeys(point.settings.get(by) for point in together))
    return tuple(sorted(together, key=lambda point: lines.index(point.settings.get(by))))

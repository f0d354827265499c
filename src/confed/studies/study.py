"""Study folders: the runs of several methods and seeds on the same data, and their index.

A study grows: asked for again with more methods or seeds, it gets the missing runs. A run that was made with other
settings is never passed off as what was asked for, and one that goes wrong is marked in the index.

A sweep is a study for each value of a setting, or with each of several models. FedDAT's figure 6 is one: accuracy
against the number of clients, each number with its own round budget; BiCSL's table 2 is another: seven models, each
with all methods. What is there is reused and what is missing is run. A run that the swept setting does not concern,
such as local training in a sweep over another method's lambda, is the same at every value: it is made once and copied.

Figure 6 of the multimodal personalised Transformer (Cao et al., 2025) has two lines, for data that are split in two
ways: a sweep may go over all values for each of several values of another setting, or with each of several models.
"""

import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, count, product
from pathlib import Path
from typing import Any

from confed.comparison.records import distinct_labels
from confed.federation.checkpoint import write_atomically
from confed.federation.file_names import file_name
from confed.federation.reading import faults_of, read_bounded
from confed.recipes.recipe import Recipe, load_recipe
from confed.registry import algorithms, models
from confed.results.folder import kind_of
from confed.results.sweep import MODELS, Point, Sweep, number_of, read_sweep, write_sweep_index
from confed.runs.build import check_device
from confed.runs.run import load_data
from confed.runs.same_recipe import at_commit_of, differing_settings, pinned
from confed.studies.gates import GATES, LONGER, with_references
from confed.studies.tuned import apply
from confed.system.folder_lock import exclusive, without_lock

INDIFFERENT = (
    "name", "run.engine", "run.address", "run.workers", "run.start_method", "run.checkpoint_every",
    "run.checkpoint_seconds", "run.keep_checkpoints",
    "run.gallery", "run.modality_matrix",
    "run.features.keep", "run.features.memory", "run.features.disk",
)  # fmt: skip
"""Settings that change no figure."""


def cell_folder(row: str, seed: int) -> str:
    """Folder of the run of a row and a seed in a study."""
    return f"{file_name(row)}/seed-{seed}"


@dataclass(frozen=True)
class Job:
    """One run of a study."""

    method: str
    seed: int
    folder: str

    @property
    def cell(self) -> str:
        """Its name, which is also its folder where the row's name is a file name."""
        return f"{self.method}/seed-{self.seed}"


@dataclass(frozen=True)
class StudyFolder:
    """A study folder's recipe and index."""

    root: Path
    recipe: Recipe  # whose rows are the methods
    jobs: tuple[Job, ...]  # the runs, finished or not
    index: Mapping[str, Any]

    @property
    def side_by_side(self) -> bool:
        """Whether runs compute in one process each, several at a time; else one by one, each as its recipe says."""
        return bool(self.index.get("side_by_side", "errors" in self.index))  # of earlier versions by who made it

    @property
    def errors(self) -> dict[str, str]:
        """Run as "row/seed-n" -> why it is not there."""
        return dict(self.index.get("errors", {}))

    @property
    def labels(self) -> dict[str, str]:
        """Row -> its name in tables, which tells rows of one method apart, as a run cannot."""
        labels = self.index.get("labels", {})
        return distinct_labels({job.method: str(labels.get(job.method, job.method)) for job in self.jobs})

    def recipe_of(self, job: Job) -> Recipe:
        """Recipe of one run."""
        single = self.recipe.method(job.method).with_run(seed=job.seed)
        return single.with_run(workers=1) if self.side_by_side else single

    def job(self, method: str, seed: int) -> Job | None:
        """The run of a row and a seed."""
        return next((job for job in self.jobs if (job.method, job.seed) == (method, seed)), None)

    def finished(self, job: Job) -> bool:
        """Whether a run has its results."""
        return (self.root / job.folder / "summary.json").is_file()


def free_folder(name: str, parent: Path = Path("runs")) -> Path:
    """``runs/NAME``, or ``runs/NAME-2`` and so on if that is taken."""
    first = parent / file_name(name)
    numbered = (first.with_name(f"{first.name}-{number}") for number in count(2))
    return next(path for path in chain([first], numbered) if not path.exists())


def is_free(root: Path) -> bool:
    """Whether a study can be made in a folder: nothing is there, or only what :func:`write_study` began with."""
    if not root.is_dir():
        return not root.exists()
    names = {path.name for path in without_lock(root)}
    return not names or (names == {"summary.json"} and kind_of(root) == "study")


def write_study(recipe: Recipe, root: Path, jobs: Sequence[Job], **more: Any) -> None:
    """Write a study's recipe and index."""
    root.mkdir(parents=True, exist_ok=True)
    methods = _rows(recipe)
    index = {
        "recipe": recipe.name,
        "methods": list(methods),
        "labels": distinct_labels({method: recipe.label(method) for method in methods}),
        "seeds": sorted({job.seed for job in jobs}),
        "deploys": {method: key for method in methods if (key := recipe.deploys(method))},
        "runs": [vars(job) for job in jobs],
        **more,
    }
    files = {"recipe.toml": recipe.to_toml(), "summary.json": json.dumps(index, indent=1, ensure_ascii=False)}
    # Stopped in between, a new folder must not look like a run's (a recipe and no index), and a folder that grows
    # must have a recipe with all rows of its index.
    for name in files if (root / "recipe.toml").exists() else reversed(files):
        write_atomically(root / name, files[name].encode())


def read_study(root: Path) -> StudyFolder:
    """Recipe and index of a study folder."""
    with faults_of(root / "summary.json", "a study's index"):
        index = json.loads(read_bounded(root / "summary.json").decode())
        jobs = tuple(Job(**entry) for entry in index["runs"])
        _ = index["recipe"], dict(index.get("labels", {}))
        for job in jobs:
            if not isinstance(job.method, str) or not isinstance(job.folder, str):
                raise TypeError("a run's method and folder must be texts")
    if not (root / "recipe.toml").is_file():
        raise ValueError(f"{root} has no recipe.toml: making it was interrupted; give that command again")
    recipe = replace(load_recipe(root / "recipe.toml"), name=index["recipe"])
    rows = _rows(recipe)
    for job in jobs:
        # Runs are written, and failed attempts deleted, where the index says: it must not point anywhere else.
        if job.method not in rows or type(job.seed) is not int or job.folder not in (
            cell_folder(job.method, job.seed), job.cell,
        ):  # fmt: skip
            raise ValueError(
                f"{root}/summary.json: a run must lie in ROW/seed-N with a row of {', '.join(rows)}, got "
                f"{job.folder!r} for method {job.method!r} and seed {job.seed!r}"
            )
    return StudyFolder(root, recipe, jobs, index)


def _rows(recipe: Recipe) -> tuple[str, ...]:
    """The rows of a study, or the method of a single-run recipe."""
    return recipe.methods or (recipe.sections["algorithm"]["name"],)


def rows_of(recipe: Recipe, wanted: str | None) -> tuple[str, ...]:
    """Rows that a command's ``--methods`` names."""
    if wanted is None:
        return recipe.table or _rows(recipe)
    names: dict[str, None] = {}
    for name in filter(None, map(str.strip, wanted.split(","))):
        everything = recipe.table or recipe.methods or algorithms.names()
        names |= dict.fromkeys(everything if name == "all" else [name])
    if not names:
        raise ValueError(f"methods must name at least one method, got {wanted!r}")
    return tuple(names)


def load_rows(source: str | Path, overrides: Sequence[str], wanted: str | None) -> Recipe:
    """A recipe with the rows that a command's ``--methods`` names; overrides may have settings of these."""
    names = list(dict.fromkeys(filter(None, map(str.strip, (wanted or "").split(",")))))
    if names and "all" not in names:
        overrides = [*overrides, f"study.methods={json.dumps(names)}"]
    recipe = load_recipe(source, overrides)
    return recipe.with_rows(rows_of(recipe, wanted))


def study_in(root: Path) -> StudyFolder | None:
    """The study in a folder, if there is one."""
    return None if is_free(root) or kind_of(root) != "study" else read_study(root)


def open_study(
    recipe: Recipe,
    root: Path,
    seeds: Sequence[int],
    tuned: Mapping[str, Mapping[str, Any]] | None = None,
    judged: Mapping[str, Any] | None = None,
    *,
    side_by_side: bool = True,
) -> None:
    """A new study, or an existing one with further rows and seeds; no run is started."""
    recipe = recipe.with_rows(_rows(recipe))
    if study_in(root) is None:
        _check_free(root)
        # Faulty data must not leave a folder behind.
        check_device(recipe)
        load_data(recipe.with_run(seed=seeds[0]))
    with exclusive(root):
        before = study_in(root)  # another process may have made it meanwhile
        if before is None:
            _check_free(root)
            before = StudyFolder(root, recipe, (), {})
        merged = joined(before.recipe, at_commit_of(root / "recipe.toml", recipe) if before.jobs else pinned(recipe))
        used = {row: values for row, values in before.index.get("tuned", {}).items() if row not in recipe.methods}
        used |= tuned or {}
        earlier_jobs = {(job.method, job.seed): job for job in before.jobs}
        wanted = earlier_jobs.keys() | set(product(recipe.methods, seeds))
        # All methods of one seed share its data, so a process that goes through them in this order reads them once.
        order = sorted(wanted, key=lambda cell: (cell[1], merged.methods.index(cell[0])))
        jobs = tuple(earlier_jobs.get(cell) or Job(*cell, cell_folder(*cell)) for cell in order)
        used = {row: used[row] for row in merged.methods if row in used}
        more = {"side_by_side": side_by_side, "errors": {}, "tuned": used}
        _check_settings(StudyFolder(root, merged, jobs, more))
        judged = before.index.get("judged") if judged is None else judged
        write_study(merged, root, jobs, **more, **({} if judged is None else {"judged": judged}))


def _check_free(root: Path) -> None:
    if not is_free(root):
        raise ValueError(f"{root} exists already and is no study; give another folder with --out")


def joined(before: Recipe, recipe: Recipe) -> Recipe:
    """A recipe with its rows and those that a folder holds already, in the order of its table where they are in it."""
    rows = list(dict.fromkeys([*before.methods, *recipe.methods]))
    if set(rows) <= set(recipe.table):
        rows.sort(key=recipe.table.index)
    earlier = {row: values for row, values in before.overrides.items() if row not in recipe.methods}
    return recipe.with_rows(rows, {**earlier, **recipe.overrides})


def _check_settings(study: StudyFolder) -> None:
    """Check that runs were made with the settings that they would be made with now."""
    differences: list[str] = []
    for job in study.jobs:
        folder = study.root / job.folder
        if begun(folder) and (different := differing(load_recipe(folder / "recipe.toml"), study.recipe_of(job))):
            differences.append(f"{job.folder} was run with {different}")
    if differences:
        more = f" (and {len(differences) - 1} more cells differ)" if len(differences) > 1 else ""
        raise ValueError(
            f"{study.root}: {differences[0]}{more}; give the new settings a row of another name ([methods.NAME] with "
            "name = "
            "METHOD), or another folder with --out"
        )


def differing(before: Recipe, now: Recipe) -> str:
    """Settings in which two runs' recipes differ, as "key=before, not now"; those that change no figure apart."""
    differences = differing_settings(before, now, INDIFFERENT)
    return ", ".join(f"{key}={then}, not {wanted}" for key, (then, wanted) in differences.items())


def begun(folder: Path) -> bool:
    """Whether a run folder holds work: results, or a checkpoint to go on from."""
    return (folder / "summary.json").is_file() or any((folder / "checkpoint").glob("round-*"))


# Sweeps: the same study for each value of a setting, or with each of several models ------------------------------


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


def open_sweep(
    root: Path,
    sweep: Sweep,
    recipes: Mapping[str, tuple[Recipe, Mapping[str, Any]]],
    *,
    seeds: int = 1,
    judged: Mapping[str, Any] | None = None,
    models_from: Recipe | None = None,
) -> Sweep:
    """A new sweep with all its studies, or an existing one with further values, models, methods and seeds."""
    if kind_of(root) == "sweep":
        before = read_sweep(root)
        if (before.recipe, before.over, before.by) != (sweep.recipe, sweep.over, sweep.by):
            sweep_before, wanted = (f"{s.recipe} over {s.over}{s.by and f' for each {s.by}'}" for s in (before, sweep))
            raise ValueError(f"{root} holds a sweep of {sweep_before}, not of {wanted}; give another folder with --out")
        if models_from is not None:
            _check_models(models_from, [row for row in before.models if row not in recipes], root)
        order = () if models_from is None else models_from.models
        sweep = replace(sweep, points=_merged(root, before.points, sweep.points, sweep.by, order))
    elif root.exists() and not (root.is_dir() and {path.name for path in without_lock(root)} <= {*recipes, GATES}):
        raise ValueError(f"{root} exists already and is no sweep; give another folder with --out")
    write_sweep_index(root, sweep)
    for folder, (recipe, used) in recipes.items():
        open_study(recipe, root / folder, range(recipe.run.seed, recipe.run.seed + seeds), used, judged)
    return sweep


@dataclass(frozen=True)
class Grid:
    """Rows of a recipe and seeds at each point of an axis; a study has one point."""

    source: str | Path
    overrides: Sequence[str]  # those of all points
    methods: str | None = None
    headline: str = ""
    tuned: Mapping[str, Mapping[str, Any]] | None = None
    seeds: int = 1
    points: tuple[Point, ...] = (Point({}, ""),)
    over: str = ""  # the swept setting, or MODELS; "" for a study
    by: str = ""  # the setting that tells lines apart, if any
    gates: bool = False  # whether the references of a benchmark's gates are among the rows

    @cached_property
    def recipes(self) -> dict[str, tuple[Recipe, Mapping[str, Any]]]:
        """Folder of each point -> its recipe and the tuned values in it."""
        recipes: dict[str, tuple[Recipe, Mapping[str, Any]]] = {}
        for point in self.points:
            recipe, used = self.rows(point.overrides)
            if MODELS in point.settings:
                recipe = recipe.with_model(point.settings[MODELS]).with_rows(recipe.methods)
            recipes[point.folder] = with_references(recipe) if self.gates else recipe, used
        every: list[list[tuple[Any, ...]]] = []
        for recipe, _ in recipes.values():
            every.append([(row, recipe.method(row).sections, recipe.run) for row in recipe.methods])
        if len(every) > 1 and all(each == every[0] for each in every):
            settings, rows = ", ".join(self.points[0].settings), [row for row, *_ in every[0]]
            raise ValueError(
                f"{settings} changes nothing: each of the rows {', '.join(rows)} has its own value there; sweep the "
                f"row's, such as methods.{rows[0]}.{settings.removeprefix('algorithm.')}"
            )
        return recipes

    def rows(self, overrides: Sequence[str] = ()) -> tuple[Recipe, dict[str, dict[str, Any]]]:
        """The recipe with the rows that the command names, and the tuned values in it."""
        given = [*self.overrides, *overrides]
        recipe = load_rows(self.source, given, self.methods)
        recipe = replace(recipe, headline=self.headline or recipe.headline)
        return apply(recipe, self.tuned or {}, given)

    @property
    def first(self) -> Recipe:
        """The recipe at the first point."""
        return self.recipes[self.points[0].folder][0]

    @property
    def name(self) -> str:
        """Usual name of its folder."""
        if self.gates:
            return f"{self.first.name}-gates"
        kinds = {"": "compare", MODELS: "models"}
        return f"{self.first.name}-{kinds.get(self.over) or 'by-' + self.over.rpartition('.')[2]}"

    def open(self, root: Path, judged: Mapping[str, Any]) -> None:
        """Folder and index of its study or of its sweep, new or with more in it; no run is started."""
        if not self.over:
            recipe, used = self.recipes[""]
            open_study(recipe, root, range(recipe.run.seed, recipe.run.seed + self.seeds), used, judged)
            return
        models_from = None
        if self.over == MODELS:
            models_from, _ = self.rows()
        sweep = Sweep(self.first.name, self.over, self.points, judged["references"], judged["margin"], self.by)
        open_sweep(root, sweep, self.recipes, seeds=self.seeds, judged=judged, models_from=models_from)


def grid_of(
    source: str | Path,
    overrides: Sequence[str],
    *,
    over: str = "",
    along: Sequence[str] = (),
    split: str | None = None,
    models: str | None = None,
    gates: bool = False,
    **rows: Any,
) -> Grid:
    """The grid that a command asks for, whose axis may be an override with several values, or models, or gates."""
    overrides = list(overrides)
    several = [text for text in overrides if _has_several_values(text)]
    if not over and len(several) == 1 and not gates:
        over = several[0]
        overrides.remove(over)
    if split is not None and models is not None:
        raise ValueError("--split and --models both tell the lines of the figure apart; give one of them")
    if not over and (along or split is not None):
        raise ValueError("--with and --split go with --over KEY=VALUES")
    if gates and (over or models is not None):
        raise ValueError("--gates goes over the rounds itself: leave out --over and --models")
    grid = Grid(source, overrides, gates=gates, **rows)
    if gates:
        rounds = load_recipe(source, overrides).run.rounds
        axis = Axis("run.rounds", (str(rounds), str(math.ceil(LONGER * rounds))))
        return replace(grid, points=points_of(axis), over=axis.key)
    if not over and models is None:
        return grid
    recipe = load_recipe(source, overrides)
    if not over:
        return replace(grid, points=points_of_models(recipe, models_of(recipe, models or "")), over=MODELS)
    axis, by = parse_axis(over), None if split is None else parse_axis(f"data.split={split}")
    if models is not None:
        by = Axis(MODELS, models_of(recipe, models))
    points = points_of(axis, list(map(parse_axis, along)), by)
    return replace(grid, points=points, over=axis.key, by="" if by is None else by.key)


def _has_several_values(text: str) -> bool:
    """Whether an override has values with commas between them, and is no TOML value itself."""
    key, _, value = text.partition("=")
    if "," not in value or "." not in key or len(parse_axis(text).values) < 2:
        return False
    try:
        tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        return True
    return False


def _check_models(recipe: Recipe, rows: Sequence[str], root: Path) -> None:
    """Check that models of earlier commands were run with the present settings, so that no table mixes data."""
    for row in rows:
        before = study_in(root / row)
        if before is None or (row not in recipe.models and row not in models.names()):
            continue
        now = recipe.with_model(row).with_rows(recipe.methods)
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

"""Runs that a benchmark's gates need: its references, with the recipe's rounds and with more (results/gates.py)."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from confed.recipes.recipe import Recipe
from confed.recipes.schema import plain
from confed.results.gates import LONGER, Gate, Rows, judge
from confed.results.runs import StudyResults, load
from confed.runs.dataset import load_dataset
from confed.runs.same_recipe import INDIFFERENT
from confed.studies.published import seed_differences

GATES = "gates.json"
"""The judgement, in the folder of the runs that it needs."""
CENTRAL, LOCAL = "central", "local"
"""Rows that are added where a recipe has none such."""


def with_references(recipe: Recipe) -> Recipe:
    """The same rows, and a centralised and a local one with the recipe's own settings where they are missing."""
    rows = rows_for_gates(recipe)
    more = [name for name, is_present in ((LOCAL, rows.local), (CENTRAL, rows.central)) if not is_present]
    # A row of that name may be a method of another kind, or train another part of the model.
    more = [name for name in more if name not in recipe.methods]
    return recipe.with_rows([*recipe.methods, *more]) if more else recipe


def rows_for_gates(recipe: Recipe) -> Rows:
    """Which rows are the references, from their methods' traits and from what of the model each trains."""
    single = {row: recipe.method(row) for row in recipe.methods}
    traits = {row: row_recipe.algorithm.traits for row, row_recipe in single.items()}
    central = next((row for row in single if traits[row].centralised), "")
    alone = [row for row in single if not traits[row].communicates and not traits[row].centralised]
    like = single[central].sections["model"] if central else recipe.sections["model"]
    local = next((row for row in alone if single[row].sections["model"] == like), "")
    apart = [row for row in single if row not in alone and row != central]
    return Rows(central, local, _pair(single, "head", [*alone, *apart]), _pair(single, "all", [*apart, *alone]))


def _pair(single: Mapping[str, Recipe], trained: str, order: Sequence[str]) -> tuple[str, str]:
    """A row that trains this part of the model, and the same method with adapters; empty names if there is none."""

    def trains(row: str) -> Any:
        return single[row].sections["model"].get("trainable")

    for one in (row for row in order if trains(row) == trained):
        same = single[one].sections["algorithm"]
        for other in order:
            if trains(other) == "adapters" and single[other].sections["algorithm"] == same:
                return one, other
    return "", ""


def judged(recipe: Recipe, folder: Path, longer: Path | None) -> list[Gate]:
    """The gates of a benchmark, from the finished runs of its study."""
    dataset = load_dataset(json.dumps(plain(recipe.sections["data"])), recipe.run.seed)
    study = _finished(folder)
    more = None if longer is None else _finished(longer)
    if more is not None and (why := _unlike(study, more)):
        raise ValueError(f"{longer}: {why}")
    return judge(study, more, rows_for_gates(recipe), dataset.ceilings, bool(dataset.modalities))


def _finished(folder: Path) -> StudyResults:
    """A study without runs that did not come to their end."""
    study = load(folder)
    complete = tuple(run for run in study.runs if run.complete)
    if not complete:
        raise ValueError(f"{folder} has no finished run")
    return replace(study, runs=complete)


def _unlike(study: StudyResults, longer: StudyResults) -> str:
    """Reason why a second study is not the first one with more rounds; "" if it is, row by row and seed by seed."""
    longer_runs = {(run.method, run.seed): run for run in longer.runs}
    for run in study.runs:
        other = longer_runs.get((run.method, run.seed))
        if other is None:
            continue
        for key, (before, after) in seed_differences(run.recipe, other.recipe).items():
            # A key that an older run did not have yet, and that is empty in a newer one, is the same setting.
            if key not in ("run.rounds", *INDIFFERENT) and (before or after):
                return (
                    f"gate b compares runs that differ in the rounds alone, and {key} of {run.place} is {after} here, "
                    f"{before} in the first study"
                )
        before, after = (int(each.recipe["run"]["rounds"]) for each in (run, other))
        if after < LONGER * before:
            return (
                f"gate b needs at least {LONGER:g} times the rounds of the first study, {before}, got {after} in "
                f"{run.place}"
            )
    return ""

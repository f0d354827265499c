"""Gates of a benchmark: whether a claim about federated methods could show on it at all, judged from its runs.

| gate | demand | otherwise |
|---|---|---|
| a | centralised training at least 5 points over local training | pooling gains nothing, so no federated method can |
| b | every row within 0.5 points of its value at 1.5 times the rounds | the table ranks learning speeds |
| c | a head alone at least 5 points under adapters, everything at least level with them | the backbone knows the task |
| d | the Bayes ceiling at least 10 points over local training | gains of the published size are impossible |
| e | floors at least 10 points under centralised training | a modality is not used |

Values are accuracies in points (%), of the model that a row deploys, means over clients and then over seeds. Of
multi-label data they are C-AP, the mean average precision over labels, of the view that heads a run's summary.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from confed.comparison.verdict import POOLING
from confed.recipes.recipe import Recipe
from confed.recipes.schema import plain
from confed.results.runs import RunResults, StudyResults, load
from confed.results.summary import average, numbers
from confed.results.views import View
from confed.runs.dataset import load_dataset
from confed.runs.same_recipe import INDIFFERENT
from confed.studies.published import seed_differences

GATES = "gates.json"  # the judgement, in the folder of the runs that it needs
CENTRAL, LOCAL = "central", "local"  # rows that are added where a recipe has none such
LONGER = 1.5  # how many times the rounds gate b asks for
ADAPTED, HEADROOM, OVER_FLOORS = 5.0, 10.0, 10.0
"""Least differences of the gates c, d and e, in points; that of gate a is :data:`confed.comparison.verdict.POOLING`."""
LEVEL = 0.5  # differences of so many points count as none
_JUDGED = (View.PERSONAL, View.SEEN)


@dataclass(frozen=True)
class Rows:
    """Rows of a study that gates compare; an empty name where the study has none."""

    central: str = ""
    local: str = ""  # local training of the same model
    heads: tuple[str, str] = ("", "")  # a row that trains the head alone, and the same method with adapters
    everything: tuple[str, str] = ("", "")  # a row that trains all parameters, and the same method with adapters

    @property
    def named(self) -> tuple[str, ...]:
        """All rows that there are, each once."""
        return tuple(filter(None, dict.fromkeys([self.local, self.central, *self.heads, *self.everything])))


@dataclass(frozen=True)
class Gate:
    """One gate, judged."""

    key: str
    asked: str
    found: str  # what was found, or why it could not be judged
    passed: bool | None = None  # None where it could not be judged
    values: Mapping[str, float] = field(default_factory=dict[str, float])  # the numbers behind it, in points


# The rows that gates compare --------------------------------------------------------------------------------


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


# The judgement ------------------------------------------------------------------------------------------------


def judge(
    study: StudyResults, longer: StudyResults | None, rows: Rows, ceilings: Mapping[str, float], modal: bool
) -> list[Gate]:
    """All five gates of a benchmark, in order."""
    return [
        _pooling(study, rows),
        _converged(study, longer),
        _ordered(study, rows),
        _headroom(study, rows, ceilings),
        _floors(study, rows, modal),
    ]


def _pooling(study: StudyResults, rows: Rows) -> Gate:
    demand = f"centralised at least {POOLING:g} points over local training"
    lacking = _lacking(study, rows, "centralised local") or _apart(study, rows.central, rows.local)
    return _at_least("a", demand, _over(study, rows.central, rows.local), POOLING, lacking)


def _headroom(study: StudyResults, rows: Rows, ceilings: Mapping[str, float]) -> Gate:
    demand = f"Bayes ceiling at least {HEADROOM:g} points over local training"
    if not ceilings:
        return Gate("d", demand, "not judged: the data set does not state a ceiling")
    local = _places(study, rows.local) if rows.local else {}
    common = [place for place in local if place in ceilings]
    if not common:
        return Gate("d", demand, f"not judged: {_lacking(study, rows, 'local') or 'no ceiling for a client'}")
    ceiling = 100 * _mean([ceilings[place] for place in common])
    reached = 100 * _mean([local[place] for place in common])
    measured = {"ceiling": ceiling, "local": reached, "difference": ceiling - reached}
    return _at_least("d", demand, measured, HEADROOM, "")


def _converged(study: StudyResults, longer: StudyResults | None) -> Gate:
    demand = f"every row within {LEVEL:g} points of its value at {LONGER:g} times the rounds"
    if longer is None:
        return Gate("b", demand, "not judged: no runs with more rounds")
    values: dict[str, float] = {}
    for row in study.methods:
        seeds = _seeds(study, row) & _seeds(longer, row)
        before, after = (_value(each, row, seeds) for each in (study, longer))
        if before is not None and after is not None:
            values[study.labels[row]] = after - before
    # A row of which no run came to its end is one of the benchmark too.
    missing = [label for label in {**study.rows, **study.labels}.values() if label not in values]
    if not values:
        return Gate("b", demand, "not judged: no row has runs of one seed with either number of rounds")
    worst = sorted(values, key=lambda row: -abs(values[row]))
    failed = [row for row in worst if _exact(abs(values[row])) > LEVEL]
    sentence = f"{len(values) - len(failed)} of {len(values)} rows; changes: "
    sentence += ", ".join(f"{row} {values[row]:+.1f}" for row in worst)
    sentence += f"; not run: {', '.join(missing)}" if missing else ""
    # One row that moves fails the gate, and a row that was not looked at leaves it open.
    passed = None if missing else True
    return Gate("b", demand, sentence, False if failed else passed, values)


def _ordered(study: StudyResults, rows: Rows) -> Gate:
    demand = f"a head alone at least {ADAPTED:g} points under adapters, everything at least level with adapters"
    parts: list[str] = []
    verdicts: list[bool | None] = []
    values: dict[str, float] = {}
    for (one, adapters), what, least in ((rows.heads, "head", None), (rows.everything, "everything", -LEVEL)):
        if not one or not adapters:
            parts.append(f"{what}: no such pair of rows")
            verdicts.append(None)
            continue
        compared = _over(study, one, adapters)
        if compared is None:
            has_both = all(map(study.of, (one, adapters)))
            why = f": {_apart(study, one, adapters)}" if has_both else " not run"
            parts.append(f"{what}: {one} {'and' if has_both else 'or'} {adapters}{why}")
            verdicts.append(None)
            continue
        difference = _exact(compared["difference"])
        values[f"{one} - {adapters}"] = difference
        parts.append(f"{study.labels[one]} {difference:+.1f} to {study.labels[adapters]}")
        verdicts.append(difference <= -ADAPTED if least is None else difference >= least)
    verdict = None if None in verdicts else True
    verdict = False if False in verdicts else verdict
    text = "; ".join(parts)
    return Gate("c", demand, text if values else f"not judged: {text}", verdict, values)


def _floors(study: StudyResults, rows: Rows, modal: bool) -> Gate:
    demand = (
        f"floors (majority, words alone, permuted inputs) at least {OVER_FLOORS:g} points under centralised training"
    )
    runs = study.of(rows.central) if rows.central else ()
    if not runs:
        return Gate("e", demand, f"not judged: {_lacking(study, rows, 'centralised')}")
    values: dict[str, float] = {}
    for name in dict.fromkeys(chain.from_iterable(_controls(run) for run in runs)):
        if name == "words" and modal:
            continue
        margins = [margin for run in runs if (margin := _margin(run, name)) is not None]
        if margins:
            values[name] = _mean(margins)
    if not values:
        return Gate("e", demand, 'not judged: the runs have no control conditions (run.controls = "all")')
    sentence = "over " + ", ".join(f"{name.replace('_', ' ')} {value:+.1f}" for name, value in values.items())
    return Gate("e", demand, sentence, all(_exact(value) >= OVER_FLOORS for value in values.values()), values)


def _controls(run: RunResults) -> Mapping[str, Mapping[str, float]]:
    """Floor -> place -> value, of the model that a run is judged by; empty without controls."""
    view_controls = next(filter(None, map(run.summary.controls, _JUDGED)), {})
    names = [name for name in view_controls if name in ("constant", "words") or name.startswith("permuted_")]
    return {name: numbers(view_controls.get(name)) for name in ("right", *names)} if names else {}


def _margin(run: RunResults, name: str) -> float | None:
    """How far a floor lies under the model, in points, over the places that have this floor."""
    controls = _controls(run)
    places, right = controls.get(name, {}), controls.get("right", {})
    if name == "right" or not places:
        return None
    return 100 * _mean([right[place] - value for place, value in places.items() if place in right])


def _over(study: StudyResults, one: str, other: str) -> dict[str, float] | None:
    """Two rows and their difference, over the seeds that both have; None where there are none."""
    seeds = _seeds(study, one) & _seeds(study, other)
    first, second = (_value(study, row, seeds) for row in (one, other))
    if first is None or second is None:
        return None
    return {one: first, other: second, "difference": first - second}


def _at_least(key: str, demand: str, values: Mapping[str, float] | None, least: float, lacking: str) -> Gate:
    if values is None:
        return Gate(key, demand, f"not judged: {lacking}")
    named = ", ".join(f"{name} {value:.1f}" for name, value in values.items() if name != "difference")
    passed = _exact(values["difference"]) >= least
    return Gate(key, demand, f"{named}: {values['difference']:+.1f}", passed, values)


def _exact(points: float) -> float:
    """To nine decimals: 0.61 and 0.56 are 5 points apart on paper, and 4.999999999999993 in floating point."""
    return round(points, 9)


def _lacking(study: StudyResults, rows: Rows, wanted: str) -> str:
    """Which of the wanted roles have no run."""
    named = {"centralised": rows.central, "local": rows.local}
    missing = [role for role in wanted.split() if not named[role] or not study.of(named[role])]
    return f"no finished run of a {' and a '.join(missing)} row" if missing else ""


def _apart(study: StudyResults, one: str, other: str) -> str:
    """Why two rows with runs cannot be compared."""
    shared = _seeds(study, one) & _seeds(study, other)
    return "no value in the seeds that both rows have" if shared else "no seed that both rows have"


def _seeds(study: StudyResults, row: str) -> set[int]:
    return {run.seed for run in study.of(row)}


def _value(study: StudyResults, row: str, seeds: Collection[int]) -> float | None:
    """Mean over seeds and clients, in points."""
    values: list[float | None] = []
    for run in study.of(row):
        if run.seed in seeds:
            labelled = run.summary.is_labelled
            values.append(run.summary.label_value("C-AP") if labelled else average([*_judged(run).values()]))
    value = average(values)
    return None if value is None else 100 * value


def _judged(run: RunResults) -> dict[str, float]:
    """Client -> the value of what the run's method deploys."""
    view = next((view for view in (View.DEPLOYED, *_JUDGED) if run.summary.values(view)), View.PERSONAL)
    return run.summary.counted(view)


def _places(study: StudyResults, row: str) -> dict[str, float]:
    """Client -> mean over seeds."""
    runs = list(map(_judged, study.of(row)))
    values: dict[str, list[float]] = {}
    for place, value in chain.from_iterable(run.items() for run in runs):
        values.setdefault(place, []).append(value)
    return {place: _mean(of_runs) for place, of_runs in values.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)

"""Comparison of methods over several models, with paired tests.

A model counts once, with its mean over seeds, so that n models give n pairs. Differences are first minus second.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from confed.comparison.paired import baseline_methods
from confed.comparison.records import Record
from confed.comparison.refusals import fails, refusals
from confed.metrics.statistics import PairedT, UnpairedT, Wilcoxon, holm, paired_t, unpaired_t, wilcoxon
from confed.results.metric import types_in_order
from confed.results.records import MEANS_OF_VIEWS, Further, further_of, record_of
from confed.results.runs import RunResults, StudyResults, with_deployed_of
from confed.results.summary import average
from confed.results.views import View

OVERALL = "overall"
"""The measure over all types of question; the others are the types' names."""

ALL_PAIRS_UP_TO = 6
"""With more methods than this, pairs are those with a reference only."""

Cells = Mapping[str, Mapping[str, Mapping[int, float]]]
"""Method -> model -> seed -> value."""


@dataclass(frozen=True)
class ModelPair:
    """Two methods compared over models. P-values "after the correction" are Holm's, over the pairs.

    Attributes:
        second: the method it is compared with.
        differences: model -> mean over common seeds of first minus second, a fraction.
        paired: paired t-test over models.
        unpaired: the two-sample test of the same values, which takes them as independent.
        signed_ranks: Wilcoxon's signed-rank test over models.
        paired_p: p-value of the paired t-test after the correction; None where all models show the same difference.
        signed_ranks_p: that of Wilcoxon's test after the correction.
    """

    first: str
    second: str
    differences: Mapping[str, float]
    paired: PairedT
    unpaired: UnpairedT
    signed_ranks: Wilcoxon
    paired_p: float | None = None
    signed_ranks_p: float = 1.0


@dataclass(frozen=True)
class ModelStudies:
    """The studies of several models.

    Attributes:
        studies: label of a model -> its study.
        labels: method -> its name as people write it, in order.
        view: what is judged at the clients: deployed or personal models.
        measures: measure -> values; first :data:`OVERALL`, then one per type of question and one per further measure.
        absent: label of a model without any run -> why.
        refused: method -> other method -> why the two are not tested against each other.
        blind: label of a model -> methods whose models at the clients do not beat their controls there
            (:mod:`confed.report.tables.control_marks`); between two of them the model does not count.
        further: measure -> what it is of, where it is a further one (``run.measures``).
    """

    studies: Mapping[str, StudyResults]
    labels: Mapping[str, str]
    view: View
    measures: Mapping[str, Cells]
    absent: Mapping[str, str] = field(default_factory=dict[str, str])
    refused: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    blind: Mapping[str, Collection[str]] = field(default_factory=dict[str, Collection[str]])
    further: Mapping[str, Further] = field(default_factory=dict[str, Further])

    def subject(self, measure: str) -> str:
        """What a table of a measure is of, as the end of its title; "" of all questions' headline metric."""
        if measure == OVERALL:
            return ""
        return f", {measure}" if measure in self.further else f", questions of type {measure}"

    @property
    def bounds(self) -> tuple[str, ...]:
        """The methods that are no federation."""
        runs: dict[str, list[RunResults]] = {}
        for m in self.labels:
            runs[m] = [run for study in self.studies.values() for run in study.of(m)]
        return tuple(method for method, method_runs in runs.items() if method_runs and method_runs[0].summary.is_bound)

    def references(self, asked: Sequence[str] | None = None) -> tuple[str, ...]:
        """The methods that others are compared with; see :func:`confed.comparison.paired.baseline_methods`.

        Raises ``ValueError``: an unknown method.
        """
        every = list(chain.from_iterable(study.runs for study in self.studies.values()))
        methods: dict[str, dict[int, Record]] = {}
        for m in self.labels:
            methods[m] = dict(enumerate(record_of(run) for run in every if run.method == m))
        return baseline_methods({method: records for method, records in methods.items() if records}, asked)


def model_studies(studies: Mapping[str, StudyResults], headline_key: str = "") -> ModelStudies:
    """Common methods and results of the studies of several models."""
    if not studies:
        raise ValueError("studies must hold at least one, got none")
    # What is deployed is decided for all runs together: one table has one kind of value.
    every = with_deployed_of(list(chain.from_iterable(study.runs for study in studies.values())), headline_key)
    found: dict[str, StudyResults] = {}
    for label, study in studies.items():
        runs, every = tuple(every[: len(study.runs)]), every[len(study.runs) :]
        found[label] = replace(study, runs=runs)
    labels: dict[str, str] = {}
    for study in found.values():
        labels |= {m: name for m, name in {**study.labels, **study.rows}.items() if m not in labels}
    # The order of the study that has most rows: a study may lack those that failed.
    order = list(max(found.values(), key=lambda study: len(study.rows or study.labels)).rows or labels)
    labels = {m: labels[m] for m in dict.fromkeys([*order, *labels])}
    runs = list(chain.from_iterable(study.runs for study in found.values()))
    view = View.DEPLOYED if any(run.summary.deploys is not None for run in runs) else View.PERSONAL
    types = types_in_order(chain.from_iterable(_types(run, view) for run in runs))
    further = further_of(runs)
    measures = {name: _cells(found, list(labels), view, name, further) for name in (OVERALL, *types, *further)}
    refused: dict[str, dict[str, str]] = {}
    for study in found.values():
        records = {method: {run.seed: record_of(run) for run in study.of(method)} for method in study.methods}
        for method, others in refusals(records, [*MEANS_OF_VIEWS]).items():
            refused.setdefault(method, {}).update(others)
    blind: dict[str, list[str]] = {}
    for model, study in found.items():
        for method in labels:
            if fails([record_of(run) for run in study.of(method) if run.complete], view.mean):
                blind.setdefault(model, []).append(method)
    return ModelStudies(found, labels, view, measures, refused=refused, blind=blind, further=further)


def pairs_over_models(
    cells: Cells, pairs: Sequence[tuple[str, str]], blind: Mapping[str, Collection[str]] | None = None
) -> list[ModelPair]:
    """Tests over models for pairs of methods."""
    blind = blind or {}
    found: list[ModelPair] = []
    for first, second in pairs:
        a, b = _common(
            *(
                {
                    model: seeds
                    for model, seeds in cells.get(m, {}).items()
                    if not {first, second} <= {*blind.get(model, ())}
                }
                for m in (first, second)
            )
        )
        if len(a) < 2:
            continue
        x, y = list(a.values()), list(b.values())
        differences = {model: a[model] - b[model] for model in a}
        found.append(ModelPair(first, second, differences, paired_t(x, y), unpaired_t(x, y), wilcoxon(x, y)))
    keys = [f"{pair.first} {pair.second}" for pair in found]
    tested = {key: pair.paired.p for key, pair in zip(keys, found, strict=True)}
    paired = holm({key: p for key, p in tested.items() if p is not None}).adjusted
    ranks = holm({key: pair.signed_ranks.p for key, pair in zip(keys, found, strict=True)}).adjusted
    return [
        replace(pair, paired_p=paired.get(key), signed_ranks_p=ranks[key])
        for key, pair in zip(keys, found, strict=True)
    ]


def _common(
    first: Mapping[str, Mapping[int, float]], second: Mapping[str, Mapping[int, float]]
) -> tuple[dict[str, float], dict[str, float]]:
    """Model -> mean over the seeds that both methods have, of both."""
    seeds = {model: sorted(first[model].keys() & second[model].keys()) for model in first if model in second}
    seeds = {model: both for model, both in seeds.items() if both}
    a, b = (
        {model: sum(of[model][seed] for seed in both) / len(both) for model, both in seeds.items()}
        for of in (first, second)
    )
    return a, b


def _cells(
    studies: Mapping[str, StudyResults],
    methods: Sequence[str],
    view: View,
    measure: str,
    further: Mapping[str, Further],
) -> Cells:
    cells: dict[str, dict[str, dict[int, float]]] = {method: {} for method in methods}
    for model, study in studies.items():
        for run in study.runs:
            value = _value(run, view, measure, further) if run.complete else None
            if value is not None:
                cells[run.method].setdefault(model, {})[run.seed] = value
    return cells


def _value(run: RunResults, view: View, measure: str, further: Mapping[str, Further]) -> float | None:
    if measure == OVERALL:
        return run.summary.headline(view.mean)
    return further[measure].mean(run.summary) if measure in further else _types(run, view).get(measure)


def _types(run: RunResults, view: View) -> dict[str, float]:
    """Type of question -> mean over the places where it occurs, of a run's judged models."""
    return means_by_type([values for place, values in run.summary.types(view).items() if place not in run.left])


def means_by_type(places: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Type of question -> mean over those that have it."""
    means: dict[str, float] = {}
    for kind in dict.fromkeys(chain.from_iterable(places)):
        mean = average([values.get(kind) for values in places])
        if mean is not None:
            means[kind] = mean
    return means

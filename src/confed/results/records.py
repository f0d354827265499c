"""Records of runs: their results in the form that comparisons take."""

import hashlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Any

import numpy as np
import torch

from confed.comparison.records import Examples, Outcome, Record, Resampled, Role
from confed.comparison.refusals import SEVERAL
from confed.data.imputation import missing_of
from confed.federation.measure import KEPT, PER_CENT
from confed.metrics.label_resampling import resampled_class_precision, resampled_overall_f1
from confed.registry import measures
from confed.results.runs import RunResults
from confed.results.summary import LABELS, VALIDATION, Summary, average, mapping
from confed.results.views import OF_EVALUATED, TESTED, View

OUTCOMES: Mapping[str, Outcome] = {
    # Of multi-label runs: no means over examples, so that their tests over examples resample the metric itself.
    **{name: Outcome(name, is_mean=False) for name in LABELS},
    **{view.mean: Outcome(view.words) for view in View},
}
"""Outcomes of runs, in the order of tables."""

MEANS_OF_VIEWS = {view.mean: view for view in View}  # outcome that is a mean over places -> its view


@dataclass(frozen=True)
class Further:
    """A further measure (``run.measures``) on one view."""

    name: str  # of the measure
    view: View
    stated: Mapping[str, Any]  # its declaration, as the run's summary has it

    @property
    def title(self) -> str:
        """The measure's name as people read it, with its unit where that is not per cent."""
        title = str(self.stated.get("title", self.name))
        return title if self.unit == PER_CENT else f"{title} ({self.unit})"

    @property
    def unit(self) -> str:
        """Unit of the values in tables and figures."""
        return str(self.stated.get("unit", PER_CENT))

    @property
    def scale(self) -> float:
        """Factor that makes hundredths of the unit of a value, as tables, figures and tests take values."""
        return 1.0 if self.unit == PER_CENT else 0.01

    @property
    def words(self) -> str:
        """The measure and its view as people read them."""
        return f"{self.title}, {self.view.words}"

    @property
    def outcome(self) -> Outcome:
        """What methods are compared by."""
        is_share = self.unit == PER_CENT
        if self.stated.get("mean", True):
            return Outcome(self.words, is_share=is_share)
        try:
            combine = measures[str(self.stated.get("of", self.name))]().combine
        except ValueError:  # a measure of somebody's own, which this process may not import
            return Outcome(self.words, is_mean=False, is_share=is_share)
        return Outcome(self.words, False, lambda rows: self.scale * combine(torch.from_numpy(rows)), is_share)

    @property
    def lower_is_better(self) -> bool:
        """Whether small values are good."""
        return self.stated.get("better") == "lower"

    def values(self, summary: Summary) -> dict[str, float]:
        """Place -> value in hundredths of the unit, of places that means are over."""
        return {place: self.scale * value for place, value in summary.measured(self.name, self.view).items()}

    def mean(self, summary: Summary) -> float | None:
        """Mean of :meth:`values` over places."""
        return average([*self.values(summary).values()])


def further_of(runs: Sequence[RunResults]) -> dict[str, Further]:
    """Outcome -> the further measure and view that it is of, of all runs."""
    declared: dict[str, Mapping[str, Any]] = {}
    for run in runs:
        declared |= run.summary.measures
    deployed = any(run.summary.deploys is not None for run in runs)
    views = [view for view in View if deployed or view is not View.DEPLOYED]
    further = [Further(name, view, stated) for (name, stated), view in product(declared.items(), views)]
    return {one.words: one for one in further}


def outcomes_of(runs: Sequence[RunResults]) -> dict[str, Outcome]:
    """Everything that runs are compared by, in the order of tables."""
    return {**OUTCOMES, **{words: one.outcome for words, one in further_of(runs).items()}}


def words_of(measure: str) -> str:
    """An outcome's name as people read it."""
    return OUTCOMES[measure].words if measure in OUTCOMES else measure


def label_view(runs: Sequence[Summary], name: str) -> View:
    """The view of a name in multi-label results, the empty one that which heads the runs' results."""
    name = name or next((run.label_view for run in runs if run.is_labelled), "")
    return OF_EVALUATED.get(name.partition("/")[0], View.SEEN)


def is_blind(summary: Summary, view: View) -> bool | None:
    """Whether a view's model, or the global one in its place, did not beat its controls; None if none were tried."""
    controls = summary.controls(view)
    if not controls and summary.view(view) is View.PERSONAL:
        controls = summary.controls(View.SEEN)
    return not controls.get("passed", True) if controls else None


def record_of(run: RunResults) -> Record:
    """A run's results as a record."""
    summary, further = run.summary, further_of([run])
    traits, order = summary.traits, (*summary.clients, *summary.scenes)
    values = {measure: summary.headline(measure) for measure in OUTCOMES}
    values |= {measure: one.mean(summary) for measure, one in further.items()}
    views = {**MEANS_OF_VIEWS, **{name: label_view([summary], view) for name, (view, _) in LABELS.items()}}
    blind = {measure: is_blind(summary, view) for measure, view in views.items()}
    places = {measure: summary.counted(view) for measure, view in views.items()}
    examples = _Predictions(run, further)
    return Record(
        run.method,
        run.seed,
        examples,
        {measure: value for measure, value in values.items() if value is not None},
        places | {measure: one.values(summary) for measure, one in further.items()},
        examples.resampled,
        run.label,
        Role(traits.reference, traits.centralised, not traits.communicates, summary.trainable, summary.algorithm),
        {place: summary.metrics_of_places.get(place, summary.metric) for place in order},
        summary.metric == SEVERAL,
        run.recipe.get("data"),
        _loses_in_tests(run),
        order,
        summary.clients,
        {measure: is_so for measure, is_so in blind.items() if is_so is not None},
        examples.strict,
    )


class _Predictions(Mapping[str, Mapping[str, Examples]]):
    """Test examples of a run's outcomes, read when they are first asked for; clients that left are in none."""

    def __init__(self, run: RunResults, further: Mapping[str, Further]) -> None:
        self._run = run
        self._resampled: dict[str, Resampled | None] = {}
        self._read: dict[str, dict[str, Examples]] = {}
        self._views: dict[View, dict[str, dict[str, np.ndarray]]] = {}
        # Outcome -> view of the predictions, what ends the name of its scores there, and their factor.
        self._stored = {measure: (view, "correct", 1.0) for measure, view in MEANS_OF_VIEWS.items()}
        for measure, one in further.items():
            is_mean = one.stated.get("mean", True)
            self._stored[measure] = one.view, f"{KEPT}{one.name}", one.scale if is_mean else 1.0

    def __getitem__(self, measure: str) -> Mapping[str, Examples]:
        if measure not in self._read:
            self._read[measure] = self._examples(*self._stored[measure])
        if not self._read[measure]:
            raise KeyError(measure)
        return self._read[measure]

    def _examples(self, view: View, name: str, scale: float) -> dict[str, Examples]:
        examples: dict[str, Examples] = {}
        for place, columns in self._columns(self._run.summary.view(view)).items():
            if place not in self._run.summary.left and name in columns:
                names, truth, answers = (columns.get(what) for what in ("name", "truth", "answer"))
                examples[place] = Examples(scale * columns[name].astype(np.float64), names, truth, answers)
        return examples

    def __iter__(self) -> Iterator[str]:
        return (measure for measure in self._stored if measure in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _columns(self, view: View) -> dict[str, dict[str, np.ndarray]]:
        if view not in self._views:
            self._views[view] = self._run.examples(view)
        return self._views[view]

    def strict(self) -> bool:
        """Whether all headline scores of test examples are known and 0 or 1."""
        places = chain.from_iterable(self._columns(view).values() for view in TESTED)
        scores = [columns["correct"] for columns in places if "correct" in columns]
        return bool(scores) and all(bool(np.isin(values, (0, 1)).all()) for values in scores)

    def resampled(self, measure: str) -> Resampled | None:
        """A mean of multi-label runs, resampled once; None without it or without probabilities."""
        if measure not in self._resampled:
            self._resampled[measure] = _resampled(self._run, *LABELS[measure]) if measure in LABELS else None
        return self._resampled[measure]


def _resampled(run: RunResults, view: str, metric: str) -> Resampled | None:
    settings, value = run.summary.labelled, run.summary.label_value(metric, view)
    together = _together(run, view or run.summary.label_view)
    if value is None or together is None:
        return None
    scores, truth, names = together
    # Runs with the same labels get the same draws, so that their differences are paired.
    test_set = zlib.crc32(np.packbits(truth != 0).tobytes(), len(truth))
    if metric == "C-AP":
        values = resampled_class_precision(scores, truth, settings.get("undefined", "zero"), seed=test_set)
    else:
        values = resampled_overall_f1(scores, truth, float(settings.get("threshold", 0.5)), seed=test_set)
    members = _digest([np.sort(place_names) for place_names in names])
    return Resampled(value, values, len(truth), test_set, _digest(names), members)


def _together(run: RunResults, view: str) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]] | None:
    """Probabilities and labels (N, C) of one view's test examples, and hashes of each place's; None if not kept."""
    if view not in OF_EVALUATED:  # a single unseen place
        return None
    left = {*run.summary.left, *([VALIDATION] if view == "unseen" else [])}
    kept: list[dict[str, np.ndarray]] = []
    for place, columns in sorted(run.examples(OF_EVALUATED[view]).items()):
        if place not in left and {"probabilities", "labels"} <= columns.keys():
            kept.append(columns)
    if not kept:
        return None
    names = [columns["name"] for columns in kept if "name" in columns]
    return (
        np.concatenate([columns["probabilities"] for columns in kept]),
        np.concatenate([columns["labels"] for columns in kept]),
        names if len(names) == len(kept) else [],
    )


def _loses_in_tests(run: RunResults) -> bool:
    """Whether evaluations lose modalities, which depends on the seed and reorders rows."""
    missing = missing_of(mapping(run.recipe.get("data")).get("missing", {}))
    every = (missing.everyone, *missing.clients.values())
    return any(rates.when != "train" and any(rates.share.values()) for rates in every)


def _digest(names: Sequence[np.ndarray]) -> bytes:
    return hashlib.sha256(np.concatenate(names).tobytes()).digest() if names else b""

"""Records of runs: their results in the form that comparisons take."""

import hashlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
import torch

from confed.comparison.records import Examples, Outcome, Record, Resampled, Role
from confed.comparison.refusals import SEVERAL
from confed.data.imputation import missing_of
from confed.federation.measure import KEPT
from confed.metrics.label_resampling import resampled_class_precision, resampled_overall_f1
from confed.registry import measures
from confed.results.runs import RunResults
from confed.results.summary import LABELS, VALIDATION, Summary, average, mapping
from confed.results.views import OF_EVALUATED, View

OUTCOMES: Mapping[str, Outcome] = {
    # Of multi-label runs: no means over examples, so that their tests over examples resample the metric itself.
    **{name: Outcome(name, is_mean=False) for name in LABELS},
    **{view.mean: Outcome(view.words) for view in View},
}
"""Outcomes of runs, in the order of tables."""

MEANS_OF_VIEWS = {view.mean: view for view in View}
"""Outcome that is a mean over places -> its view."""


@dataclass(frozen=True)
class Further:
    """A further measure (``run.measures``) on one view.

    Attributes:
        name: of the measure.
        stated: its declaration, as the run's summary has it.
    """

    name: str
    view: View
    stated: Mapping[str, Any]

    @property
    def title(self) -> str:
        """The measure's name as people read it."""
        return str(self.stated.get("title", self.name))

    @property
    def outcome(self) -> Outcome:
        """What methods are compared by."""
        words = f"{self.title}, {self.view.words}"
        if self.stated.get("mean", True):
            return Outcome(words)
        try:
            combine = measures[str(self.stated.get("of", self.name))]().combine
            return Outcome(words, False, lambda kept: combine(torch.from_numpy(kept)))
        except ValueError:  # a measure of somebody's own, which this process may not import
            return Outcome(words, False, None)

    @property
    def lower_is_better(self) -> bool:
        """Whether small values are good."""
        return self.stated.get("better") == "lower"


def further_of(runs: Sequence[RunResults]) -> dict[str, Further]:
    """Outcome -> the further measure and view that it is of, of all runs."""
    declared: dict[str, Mapping[str, Any]] = {}
    for run in runs:
        declared |= run.summary.measures
    deployed = any(run.summary.deploys is not None for run in runs)
    further = [
        Further(name, view, stated)
        for (name, stated), view in product(declared.items(), View)
        if deployed or view is not View.DEPLOYED
    ]
    return {f"{one.title}, {one.view.words}": one for one in further}


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
    """Whether the model of a view did not beat its controls; None where none were tried.

    For personal models that there are not stands the global one.
    """
    controls = summary.controls(view)
    if not controls and summary.view(view) is View.PERSONAL:
        controls = summary.controls(View.SEEN)
    return not controls.get("passed", True) if controls else None


def record_of(run: RunResults) -> Record:
    """A run's results as a record."""
    summary = run.summary
    traits = summary.traits
    values = {measure: value for measure in OUTCOMES if (value := summary.headline(measure)) is not None}
    views = {**MEANS_OF_VIEWS, **{name: label_view([summary], view) for name, (view, _) in LABELS.items()}}
    blind = {measure: found for measure, view in views.items() if (found := is_blind(summary, view)) is not None}
    declared, order = summary.metrics_of_places, (*run.clients, *run.scenes)
    places = {measure: summary.counted(view) for measure, view in views.items()}
    further = further_of([run])
    for measure, one in further.items():
        places[measure] = summary.measured(one.name, one.view)
        value = average([*places[measure].values()])
        values |= {} if value is None else {measure: value}
    examples = _Predictions(run, further)
    return Record(
        run.method,
        run.seed,
        examples,
        values,
        places,
        examples.resampled,
        run.label,
        Role(traits.reference, traits.centralised, not traits.communicates, summary.trainable, summary.algorithm),
        {place: declared.get(place, run.metric) for place in order},
        run.metric == SEVERAL,
        run.recipe.get("data"),
        _loses_in_tests(run),
        order,
        run.clients,
        blind,
        examples.strict,
    )


class _Predictions(Mapping[str, Mapping[str, Examples]]):
    """Test examples of a run's outcomes, read when they are first asked for; clients that left are in none."""

    def __init__(self, run: RunResults, further: Mapping[str, Further]) -> None:
        self._run, self._further = run, further
        self._resampled: dict[str, Resampled | None] = {}
        self._read: dict[str, dict[str, Examples]] = {}
        summary = run.summary
        # Outcome -> view of the predictions, and what ends the name of its scores there.
        self._kept = {measure: (summary.view(view).evaluated, "/correct") for measure, view in MEANS_OF_VIEWS.items()}
        for measure, one in further.items():
            self._kept[measure] = summary.view(one.view).evaluated, f"/{KEPT}{one.name}"

    def __getitem__(self, measure: str) -> Mapping[str, Examples]:
        if measure not in self._read:
            self._read[measure] = self._examples(*self._kept[measure])
        if not self._read[measure]:
            raise KeyError(measure)
        return self._read[measure]

    def _examples(self, view: str, ending: str) -> dict[str, Examples]:
        places: dict[str, Examples] = {}
        for key, scores in self._arrays.items():
            start, _, rest = key.partition("/")
            place = rest.removesuffix(ending)
            if start == view and rest.endswith(ending) and place not in self._run.left:
                names, truth, answers = (self._arrays.get(f"{what}/{place}") for what in ("names", "truth", "answers"))
                places[place] = Examples(scores.astype(np.float64), names, truth, answers)
        return places

    def __iter__(self) -> Iterator[str]:
        return (measure for measure in self._kept if measure in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @cached_property
    def _arrays(self) -> dict[str, np.ndarray]:
        return self._run.predictions()

    def strict(self) -> bool:
        """Whether all headline scores of test examples are known and 0 or 1."""
        scores = [values for key, values in self._arrays.items() if key.endswith("/correct")]
        return bool(scores) and all(bool(np.isin(values, (0, 1)).all()) for values in scores)

    def resampled(self, measure: str) -> Resampled | None:
        """A mean of multi-label runs, resampled once; None without it or without probabilities."""
        if measure not in self._resampled:
            self._resampled[measure] = _resampled(self._run, *LABELS[measure]) if measure in LABELS else None
        return self._resampled[measure]


def _resampled(run: RunResults, view: str, metric: str) -> Resampled | None:
    settings = run.summary.labelled
    value = run.summary.label_value(metric, view)
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
    """Probabilities and labels (N, C) of one view's test examples, and hashes of each place's examples.

    Places are in the order of their names; the result is None for a run that did not keep these everywhere.
    """
    kept = run.predictions()
    ending, places = "/probabilities", list[str]()
    for key in sorted(kept):
        start, _, rest = key.partition("/")
        place = rest.removesuffix(ending)
        shown = place not in run.left and not (view == "unseen" and place == VALIDATION)
        if start == view and rest.endswith(ending) and shown and f"labels/{place}" in kept:
            places.append(place)
    if not places:
        return None
    names = [kept[f"names/{place}"] for place in places if f"names/{place}" in kept]
    return (
        np.concatenate([kept[f"{view}/{place}{ending}"] for place in places]),
        np.concatenate([kept[f"labels/{place}"] for place in places]),
        names if len(names) == len(places) else [],
    )


def _loses_in_tests(run: RunResults) -> bool:
    """Whether evaluations lose modalities, which depends on the seed and reorders rows."""
    missing = missing_of(mapping(run.recipe.get("data")).get("missing", {}))
    every = (missing.everyone, *missing.clients.values())
    return any(rates.when != "train" and any(rates.share.values()) for rates in every)


def _digest(names: Sequence[np.ndarray]) -> bytes:
    return hashlib.sha256(np.concatenate(names).tobytes()).digest() if names else b""

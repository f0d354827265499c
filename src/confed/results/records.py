"""Records of runs: their results in the form that comparisons take."""

import hashlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np

from confed.comparison.records import Examples, Measure, Record, Resampled, Role
from confed.comparison.refusals import SEVERAL
from confed.data.imputation import missing_of
from confed.metrics.label_resampling import resampled_class_precision, resampled_overall_f1
from confed.results.runs import Run
from confed.results.summary import LABELS, VALIDATION, Summary, mapping
from confed.results.views import OF_EVALUATED, View

MEASURES: Mapping[str, Measure] = {
    # Of multi-label runs: no means over examples, so that their tests over examples resample the metric itself.
    **{name: Measure(name, of_places=False) for name in LABELS},
    **{view.mean: Measure(view.words) for view in View},
}
"""Measures of runs, in the order of tables."""

HEADLINES = {view.mean: view for view in View}
"""Measure that is a mean over places -> its view."""


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


def record_of(run: Run) -> Record:
    """A run's results as a record."""
    summary = run.summary
    traits = summary.traits
    values = {measure: value for measure in MEASURES if (value := summary.headline(measure)) is not None}
    views = {**HEADLINES, **{name: label_view([summary], view) for name, (view, _) in LABELS.items()}}
    blind = {measure: found for measure, view in views.items() if (found := is_blind(summary, view)) is not None}
    declared, places = summary.metrics_of_places, (*run.clients, *run.scenes)
    examples = _Predictions(run)
    return Record(
        run.method,
        run.seed,
        examples,
        values,
        {measure: summary.counted(view) for measure, view in views.items()},
        examples.resampled,
        run.label,
        Role(traits.reference, traits.centralised, not traits.communicates, summary.trainable, summary.algorithm),
        {place: declared.get(place, run.metric) for place in places},
        run.metric == SEVERAL,
        run.recipe.get("data"),
        _loses_in_tests(run),
        places,
        run.clients,
        blind,
    )


class _Predictions(Mapping[str, Mapping[str, Examples]]):
    """Test examples of a run's measures, read when they are first asked for; clients that left are in none."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._resampled: dict[str, Resampled | None] = {}

    def __getitem__(self, measure: str) -> Mapping[str, Examples]:
        view = self._run.summary.view(HEADLINES[measure]).evaluated
        places = self._by_view[view]
        return {place: rows for place, rows in places.items() if place not in self._run.left}

    def __iter__(self) -> Iterator[str]:
        return (measure for measure in HEADLINES if measure in self)

    def __contains__(self, measure: object) -> bool:
        return measure in HEADLINES and self._run.summary.view(HEADLINES[str(measure)]).evaluated in self._by_view

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @cached_property
    def _by_view(self) -> dict[str, dict[str, Examples]]:
        kept = self._run.predictions()
        views: dict[str, dict[str, Examples]] = {}
        for key, value in kept.items():
            view, _, rest = key.partition("/")
            place = rest.removesuffix("/correct")
            if rest.endswith("/correct") and value.ndim == 1:
                names, truth, answers = (kept.get(f"{what}/{place}") for what in ("names", "truth", "answers"))
                views.setdefault(view, {})[place] = Examples(value.astype(np.float64), names, truth, answers)
        return views

    def resampled(self, measure: str) -> Resampled | None:
        """A mean of multi-label runs, resampled once; None without it or without probabilities."""
        if measure not in self._resampled:
            self._resampled[measure] = _resampled(self._run, *LABELS[measure])
        return self._resampled[measure]


def _resampled(run: Run, view: str, metric: str) -> Resampled | None:
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


def _together(run: Run, view: str) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]] | None:
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


def _loses_in_tests(run: Run) -> bool:
    """Whether evaluations lose modalities, which depends on the seed and reorders rows."""
    missing = missing_of(mapping(run.recipe.get("data")).get("missing", {}))
    every = (missing.everyone, *missing.clients.values())
    return any(rates.when != "train" and any(rates.share.values()) for rates in every)


def _digest(names: Sequence[np.ndarray]) -> bytes:
    return hashlib.sha256(np.concatenate(names).tobytes()).digest() if names else b""

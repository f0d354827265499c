"""Scores of the same test examples in several runs, paired by the examples' names.

Predictions hold a hash of each example's name (:mod:`confed.results.run_files`): rows of runs with the same
examples in another order are put into one order, and other examples are refused. Older folders have no hashes. There
rows are paired by their position, only where nothing can have reordered them: equal sections ``[data]``, and over seeds
no modality that evaluations lose, since what is lost and hence the order depends on the seed.
"""

import hashlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from confed.data.imputation import missing_of
from confed.metrics.label_resampling import resampled_class_precision, resampled_overall_f1
from confed.metrics.resampling import Bootstrap, bootstrap_of
from confed.report.statistics.comparable import OtherExamples
from confed.results.runs import Run
from confed.results.summary import LABELS, VALIDATION
from confed.results.views import View

# Paired tests over test examples of multi-label runs ----------------------------------------------------------


@dataclass(frozen=True)
class _Resampled:
    """One run's metric: the value on its test examples, and on every resample of them (R,)."""

    value: float
    values: np.ndarray
    examples: int
    test_set: int
    names: bytes
    members: bytes


class LabelResamples:
    """Resampled metrics of runs, each worked out once.

    Runs with the same test labels get the same draws: their differences are paired. Other labels, as other seeds may
    have, get draws of their own. Draws are of all examples together, as C-AP and O-F1 are. Runs that kept other names
    of examples are no pair even if all labels agree.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[Path, str], _Resampled | None] = {}

    def over_examples(self, pairs: Sequence[tuple[Run, Run]], measure: str) -> Bootstrap | None:
        """The mean difference over seeds, each a pair of runs, with its bootstrap over test examples."""
        found = self._pairs(pairs, measure)
        if not found:
            return None
        resampled = np.mean([a.values - b.values for a, b in found], axis=0)
        # A test set that all seeds share is drawn once for all of them.
        sets = {a.test_set: a.examples for a, _ in found}
        return bootstrap_of(_observed(found), resampled, sum(sets.values()))

    def unpaired(self, pairs: Sequence[tuple[Run, Run]], measure: str) -> str:
        """Why a measure has no tests over examples; "" if it has. Arguments as for :meth:`over_examples`."""
        for run, reference in pairs:
            a, b = self._of(run, measure), self._of(reference, measure)
            if a is None or b is None:
                return "probabilities of both on test examples are missing"
            if a.names and b.names and a.members != b.members:
                return OtherExamples(f"other test examples (seed {run.seed})")
            if a.names and b.names and a.names != b.names:
                return f"test examples in another order (seed {run.seed})"
            if a.test_set != b.test_set:
                return f"test examples with other labels (seed {run.seed})"
        return ""

    def _pairs(self, pairs: Sequence[tuple[Run, Run]], measure: str) -> list[tuple[_Resampled, _Resampled]]:
        """All pairs resampled, or none of them."""
        if self.unpaired(pairs, measure):
            return []
        resampled: list[tuple[_Resampled, _Resampled]] = []
        for run, reference in pairs:
            a, b = self._of(run, measure), self._of(reference, measure)
            if a is None or b is None:
                return []
            resampled.append((a, b))
        return resampled

    def _of(self, run: Run, measure: str) -> _Resampled | None:
        key = (run.folder, measure)
        if key not in self._found:
            self._found[key] = _resampled(run, *LABELS[measure])
        return self._found[key]


def _observed(found: Sequence[tuple[_Resampled, _Resampled]]) -> float:
    return float(np.mean([a.value - b.value for a, b in found]))


def _resampled(run: Run, view: str, metric: str) -> _Resampled | None:
    """One metric of one run, resampled; None without it or without probabilities."""
    about = run.summary.labelled
    value = run.summary.label_value(metric, view)
    together = _together(run, view or run.summary.label_view)
    if value is None or together is None:
        return None
    scores, truth, names = together
    packed = np.packbits(truth != 0).tobytes()
    test_set = zlib.crc32(packed, len(truth))
    if metric == "C-AP":
        values = resampled_class_precision(scores, truth, about.get("undefined", "zero"), seed=test_set)
    else:
        values = resampled_overall_f1(scores, truth, float(about.get("threshold", 0.5)), seed=test_set)
    return _Resampled(
        value, values, len(truth), test_set, _digest(names), _digest([np.sort(place_names) for place_names in names])
    )


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


def _digest(names: Sequence[np.ndarray]) -> bytes:
    return hashlib.sha256(np.concatenate(names).tobytes()).digest() if names else b""


# Scores of the same test examples in several runs -------------------------------------------------------------

BY_POSITION = (
    "Some predictions carry no names of examples (they were made by an earlier version): those are paired by position, "
    "and only where their sections [data] are equal and nothing reorders examples."
)


@dataclass(frozen=True)
class Rows:
    """One run's test examples at one place.

    Attributes:
        names: hashes of their names, int64, shape (N,); None in an older folder.
        truth: positions of the right answers, int64, shape (N,); None where it was not kept.
        answers: hashes of the right answers' texts, int64, shape (N,); None in an older folder.
    """

    scores: np.ndarray
    names: np.ndarray | None = None
    truth: np.ndarray | None = None
    answers: np.ndarray | None = None


class Scores:
    """Scores per example of the runs, each file read once.

    Attributes:
        labels: those of multi-label runs.
        by_position: whether rows were paired by their position somewhere.
    """

    def __init__(self) -> None:
        self._read: dict[Path, dict[str, dict[str, Rows]]] = {}
        self.labels = LabelResamples()
        self.by_position = False

    def of(self, run: Run, view: View) -> dict[str, Rows]:
        """Place -> its examples in one view; without clients that left before the end, as in means."""
        places = self._views(run).get(run.summary.view(view).evaluated, {})
        return {place: rows for place, rows in places.items() if place not in run.left}

    def strict(self, run: Run) -> bool:
        """Whether all scores of a run's test examples are known and 0 or 1."""
        rows = list(chain.from_iterable(places.values() for places in self._views(run).values()))
        return bool(rows) and all(bool(np.isin(r.scores, (0, 1)).all()) for r in rows)

    def differences(self, pairs: Sequence[tuple[Run, Run]], view: View) -> dict[str, np.ndarray] | str:
        """Paired differences of every example of each place."""
        score_pairs = [(self.of(a, view), self.of(b, view)) for a, b in pairs]
        if any(not rows for pair in score_pairs for rows in pair):
            return "predictions of both on test examples are missing"
        sides = list(chain.from_iterable(score_pairs))
        if any(side.keys() != sides[0].keys() for side in sides):
            return "they were tested at other places"
        strata: dict[str, np.ndarray] = {}
        for place in sorted(sides[0]):
            seeds: list[Rows] = []
            for (run, reference), (a, b) in zip(pairs, score_pairs, strict=True):
                order = aligned(
                    a[place],
                    b[place],
                    lambda one=run, other=reference: _reorders(one, other),
                    same_pool=_data(run) == _data(reference),
                )
                if isinstance(order, str):
                    return type(order)(f"{place}: {order} (seed {run.seed})")
                seeds.append(Rows(a[place].scores - b[place].scores[order], a[place].names))
            joined = over_seeds(seeds, [run for run, _ in pairs])
            if isinstance(joined, str):
                return f"{place}: {joined}"
            strata[place] = joined
        self.by_position |= any(rows.names is None for side in sides for rows in side.values())
        return strata

    def _views(self, run: Run) -> dict[str, dict[str, Rows]]:
        if run.folder not in self._read:
            kept = run.predictions()
            views: dict[str, dict[str, Rows]] = {}
            for key, value in kept.items():
                start, _, rest = key.partition("/")
                place = rest.removesuffix("/correct")
                if rest.endswith("/correct") and value.ndim == 1:
                    names, truth, answers = (kept.get(f"{what}/{place}") for what in ("names", "truth", "answers"))
                    views.setdefault(start, {})[place] = Rows(value.astype(np.float64), names, truth, answers)
            self._read[run.folder] = views
        return self._read[run.folder]


def aligned(
    base: Rows, other: Rows, reorders: Callable[[], str] = lambda: "", *, same_pool: bool = True
) -> np.ndarray | str:
    """The order in which one run's rows are those of another.

    Returns:
        int64, shape (N,): ``other.scores[order]`` are of ``base``'s examples; or why there is no such order.
    """
    if len(base.scores) != len(other.scores):
        return OtherExamples(f"other test examples, {len(base.scores)} and {len(other.scores)} of them")
    order = np.arange(len(base.scores))
    if base.names is None or other.names is None:
        if reason := reorders():
            return reason
    elif not np.array_equal(base.names, other.names):
        if len(np.unique(base.names)) < len(order):
            return "examples in another order, whose names are not unique"
        here, other_order = np.argsort(base.names), np.argsort(other.names)
        if not np.array_equal(base.names[here], other.names[other_order]):
            return OtherExamples("other test examples")
        order[here] = other_order
    hashed = base.answers is not None and other.answers is not None
    a, b = (base.answers, other.answers) if hashed else (base.truth, other.truth)
    if (hashed or same_pool) and a is not None and b is not None and not np.array_equal(a, b[order]):
        return "examples of the same names with other right answers"
    return order


def over_seeds(seeds: Sequence[Rows], runs: Sequence[Run]) -> np.ndarray | str:
    """Rows of all seeds with every example in one column.

    Returns:
        float64, shape (S, N), NaN where a seed has no such example; or why they cannot be put together.
    """
    names = [rows.names for rows in seeds if rows.names is not None]
    if len(names) < len(seeds):
        return _unstackable(seeds, runs) or np.stack([rows.scores for rows in seeds])
    if all(np.array_equal(names[0], seed_names) for seed_names in names):
        return np.stack([rows.scores for rows in seeds])
    if any(len(np.unique(seed_names)) < len(seed_names) for seed_names in names):
        return "seeds have other examples, or another order of them, and their names are not unique"
    every = np.unique(np.concatenate(names))
    scores = np.full((len(seeds), len(every)), np.nan)
    for row, seed_names, rows in zip(scores, names, seeds, strict=True):
        row[np.searchsorted(every, seed_names)] = rows.scores
    return scores


def _unstackable(seeds: Sequence[Rows], runs: Sequence[Run]) -> str:
    """Why rows of several seeds, some without names, may not be put together by position; "" if they may."""
    if reason := next(filter(None, (_reorders(runs[0], run) for run in runs)), ""):
        return reason
    if any(len(rows.scores) != len(seeds[0].scores) for rows in seeds):
        return "predictions carry no names of examples, and the seeds have other test examples"
    names = [rows.names for rows in seeds if rows.names is not None]
    if any(not np.array_equal(names[0], seed_names) for seed_names in names[1:]):
        return "some predictions carry no names of examples, and the others have other examples or another order"
    return ""


def _reorders(first: Run, second: Run) -> str:
    """Why the rows of two runs without names may stand in another order; "" if they cannot."""
    a, b = (_data(run) for run in (first, second))
    if a is None or b is None or a != b:
        return "predictions carry no names of examples, and the sections [data] differ"
    if first.seed != second.seed and _loses_in_tests(a):
        return "predictions carry no names of examples, and what evaluations lose (data.missing) reorders them by seed"
    return ""


def _loses_in_tests(data: Mapping[str, Any]) -> bool:
    missing = missing_of(data.get("missing", {}))
    every = (missing.everyone, *missing.clients.values())
    return any(rates.when != "train" and any(rates.share.values()) for rates in every)


def _data(run: Run) -> Mapping[str, Any] | None:
    section = run.recipe.get("data")
    return section if isinstance(section, Mapping) else None

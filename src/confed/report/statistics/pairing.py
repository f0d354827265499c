"""Scores of the same test examples in several runs, paired by the examples' names.

Predictions hold a hash of each example's name (:mod:`confed.results.example_names`): rows of runs with the same
examples in another order are put into one order, and other examples are refused. Older folders have no hashes. There
rows are paired by their position, only where nothing can have reordered them: equal sections ``[data]``, and over seeds
no modality that evaluations lose, since what is lost and hence the order depends on the seed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from confed.data.missing import missing_of
from confed.report.statistics.comparable import OtherExamples
from confed.report.statistics.label_bootstrap import LabelResamples
from confed.results.deployed import VIEWS
from confed.results.runs import Run

__all__ = ["BY_POSITION", "Rows", "Scores", "aligned", "over_seeds"]

BY_POSITION = (
    "Some predictions carry no names of examples (they were made by an earlier version): those are paired by position, "
    "and only where their sections [data] are equal and nothing reorders examples."
)


@dataclass(frozen=True)
class Rows:
    """One run's test examples at one place.

    Attributes:
        scores: float64, shape (N,).
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

    def of(self, run: Run, view: str) -> dict[str, Rows]:
        """Place -> its examples in one view; without clients that left before the end, as in means.

        The view "deployed" is that of the model which the run's method deploys.
        """
        if view == "deployed":
            view = VIEWS[run.summary["deploys"]]
        return {place: rows for place, rows in self._views(run).get(view, {}).items() if place not in run.left}

    def strict(self, run: Run) -> bool:
        """Whether all scores of a run's test examples are known and 0 or 1."""
        rows = [rows for places in self._views(run).values() for rows in places.values()]
        return bool(rows) and all(bool(np.isin(r.scores, (0, 1)).all()) for r in rows)

    def differences(self, pairs: Sequence[tuple[Run, Run]], view: str) -> dict[str, np.ndarray] | str:
        """Paired differences of every example of each place.

        Args:
            pairs: method and reference of each of S seeds.
            view: "deployed", "personal", "global" or "unseen".

        Returns:
            Place -> method minus reference, shape (S, N_place), every column one example, NaN where a seed did not test
            it; or why the examples cannot be paired.
        """
        found = [(self.of(a, view), self.of(b, view)) for a, b in pairs]
        if any(not rows for pair in found for rows in pair):
            return "predictions of both on test examples are missing"
        sides = [side for pair in found for side in pair]
        if any(side.keys() != sides[0].keys() for side in sides):
            return "they were tested at other places"
        strata: dict[str, np.ndarray] = {}
        for place in sorted(sides[0]):
            seeds: list[Rows] = []
            for (run, reference), (a, b) in zip(pairs, found, strict=True):
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

    Args:
        base: some rows.
        other: rows of the same place.
        reorders: asked where names are not known: why positions cannot be relied upon; "" if they can.
        same_pool: whether both have the same answers in the same order, so that positions of right answers can be
            compared where their texts' hashes are not known; pools are made from training data.

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
        here, there = np.argsort(base.names), np.argsort(other.names)
        if not np.array_equal(base.names[here], other.names[there]):
            return OtherExamples("other test examples")
        order[here] = there
    hashed = base.answers is not None and other.answers is not None
    a, b = (base.answers, other.answers) if hashed else (base.truth, other.truth)
    if (hashed or same_pool) and a is not None and b is not None and not np.array_equal(a, b[order]):
        return "examples of the same names with other right answers"
    return order


def over_seeds(seeds: Sequence[Rows], runs: Sequence[Run]) -> np.ndarray | str:
    """Rows of all seeds with every example in one column.

    Args:
        seeds: the rows of each of S seeds.
        runs: whose rows they are.

    Returns:
        float64, shape (S, N), NaN where a seed has no such example; or why they cannot be put together.
    """
    names = [rows.names for rows in seeds if rows.names is not None]
    if len(names) < len(seeds):
        return _unstackable(seeds, runs) or np.stack([rows.scores for rows in seeds])
    if all(np.array_equal(names[0], own) for own in names):
        return np.stack([rows.scores for rows in seeds])
    if any(len(np.unique(own)) < len(own) for own in names):
        return "seeds have other examples, or another order of them, and their names are not unique"
    every = np.unique(np.concatenate(names))
    found = np.full((len(seeds), len(every)), np.nan)
    for row, own, rows in zip(found, names, seeds, strict=True):
        row[np.searchsorted(every, own)] = rows.scores
    return found


def _unstackable(seeds: Sequence[Rows], runs: Sequence[Run]) -> str:
    """Why rows of several seeds, some without names, may not be put together by position; "" if they may."""
    if reason := next(filter(None, (_reorders(runs[0], run) for run in runs)), ""):
        return reason
    if any(len(rows.scores) != len(seeds[0].scores) for rows in seeds):
        return "predictions carry no names of examples, and the seeds have other test examples"
    names = [rows.names for rows in seeds if rows.names is not None]
    if any(not np.array_equal(names[0], own) for own in names[1:]):
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

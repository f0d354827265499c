"""Paired tests over test examples of multi-label runs, from the probabilities that runs keep."""

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from confed.metrics.label_resampling import resampled_class_precision, resampled_overall_f1
from confed.metrics.resampling import Bootstrap, bootstrap_of
from confed.report.statistics.comparable import OtherExamples
from confed.results.headline import LABELS, VALIDATION, label_value
from confed.results.runs import Run

__all__ = ["LabelResamples"]


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
        """The mean difference over seeds, each a pair of runs, with its bootstrap over test examples.

        Args:
            pairs: method and reference of each seed.
            measure: key of :data:`confed.results.headline.LABELS`.

        Returns:
            None if a run kept no probabilities, or two of a pair had other test examples.
        """
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
        found: list[tuple[_Resampled, _Resampled]] = []
        for run, reference in pairs:
            a, b = self._of(run, measure), self._of(reference, measure)
            if a is None or b is None:
                return []
            found.append((a, b))
        return found

    def _of(self, run: Run, measure: str) -> _Resampled | None:
        key = (run.folder, measure)
        if key not in self._found:
            self._found[key] = _resampled(run, *LABELS[measure])
        return self._found[key]


def _observed(found: Sequence[tuple[_Resampled, _Resampled]]) -> float:
    return float(np.mean([a.value - b.value for a, b in found]))


def _resampled(run: Run, view: str, metric: str) -> _Resampled | None:
    """One metric of one run, resampled; None without it or without probabilities."""
    about: Mapping[str, Any] = run.summary.get("multilabel") or {}
    value = label_value(run.summary, metric, view)
    together = _together(run, view or str(about.get("headline", "")))
    if value is None or together is None:
        return None
    scores, truth, names = together
    packed = np.packbits(truth != 0).tobytes()
    test_set = zlib.crc32(packed, len(truth))
    if metric == "C-AP":
        values = resampled_class_precision(scores, truth, about.get("undefined", "zero"), seed=test_set)
    else:
        values = resampled_overall_f1(scores, truth, float(about.get("threshold", 0.5)), seed=test_set)
    return _Resampled(value, values, len(truth), test_set, _digest(names), _digest([np.sort(own) for own in names]))


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

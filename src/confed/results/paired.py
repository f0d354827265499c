"""Paired differences between methods, over seeds and over test examples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from confed.metrics.statistics import Bootstrap, McNemar, PairedT, bootstrap, holm, mcnemar, paired_t
from confed.results.runs import Run
from confed.results.tables import headline

__all__ = ["LEVEL", "MEASURES", "MIN_SEEDS", "Difference", "Methods", "differences", "values_of"]

MIN_SEEDS = 5
"""With fewer seeds nothing is called significant at the level of seeds."""

LEVEL = 0.05
"""A corrected p-value up to this is called significant."""

MEASURES: Mapping[str, tuple[str, str]] = {
    "personal_mean": ("personal on own data", "personal"),
    "global_seen_mean": ("global on seen", "global"),
    "global_unseen_mean": ("global on unseen", "unseen"),
}
"""Measure -> its name in words, and the view of the predictions that it is a mean of."""

Methods = Mapping[str, Mapping[int, Run]]
"""Method -> seed -> run."""

Pair = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Difference:
    """One method against the reference on one measure.

    Attributes:
        measure: key of :data:`MEASURES`.
        method: which method.
        seeds: the seeds that both have.
        points: mean difference over these seeds, a fraction.
        over_seeds: paired t-test over seeds; None with fewer than two.
        seeds_p: its p-value after Holm's correction over methods.
        over_examples: paired bootstrap over test examples; None without predictions of both.
        bootstrap_p: its p-value after the correction.
        discordant: McNemar's test over test examples; None without predictions or with soft scores.
        mcnemar_p: its p-value after the correction.
    """

    measure: str
    method: str
    seeds: tuple[int, ...]
    points: float
    over_seeds: PairedT | None = None
    seeds_p: float | None = None
    over_examples: Bootstrap | None = None
    bootstrap_p: float | None = None
    discordant: McNemar | None = None
    mcnemar_p: float | None = None

    @property
    def significant(self) -> bool:
        """Whether it is claimed to hold for other seeds: enough of them, and a small corrected p-value."""
        return len(self.seeds) >= MIN_SEEDS and self.seeds_p is not None and self.seeds_p <= LEVEL


def values_of(methods: Methods, measure: str) -> dict[str, dict[int, float]]:
    """Method -> seed -> value of a measure; methods without any are left out."""
    found: dict[str, dict[int, float]] = {}
    for method, runs in methods.items():
        seeds = {seed: headline(run.summary, measure) for seed, run in sorted(runs.items())}
        present = {seed: value for seed, value in seeds.items() if value is not None}
        if present:
            found[method] = present
    return found


def differences(methods: Methods, reference: str) -> list[Difference]:
    """Every method against the reference on every measure that both have.

    In the order of measures, then methods. Each kind of test is corrected by Holm's procedure over the
    methods of one measure.
    """
    scores = _Scores()
    found: list[Difference] = []
    for measure in MEASURES:
        values = values_of(methods, measure)
        family: list[Difference] = []
        for method in values:
            seeds = [seed for seed in values[method] if seed in values.get(reference, {})]
            if method != reference and seeds:
                a, b = ([values[name][seed] for seed in seeds] for name in (method, reference))
                pairs = [
                    scores.pair(methods[method][seed], methods[reference][seed], MEASURES[measure][1]) for seed in seeds
                ]
                family.append(_over_examples(_over_seeds(measure, method, seeds, a, b), pairs))
        found += _corrected(family)
    return found


class _Scores:
    """Scores per example of the runs, each file read once."""

    def __init__(self) -> None:
        self._read: dict[Path, dict[str, np.ndarray]] = {}

    def of(self, run: Run, view: str) -> dict[str, np.ndarray]:
        """Place -> score per example (N,), of one view."""
        if run.folder not in self._read:
            content = run.predictions()
            self._read[run.folder] = {
                key: value.astype(np.float64)
                for key, value in content.items()
                if key.endswith("/correct") and value.ndim == 1
            }
        start, end = f"{view}/", "/correct"
        found = self._read[run.folder]
        return {key[len(start) : -len(end)]: value for key, value in found.items() if key.startswith(start)}

    def pair(self, run: Run, reference: Run, view: str) -> Pair | None:
        """Scores of the same examples, all places in one row; None if the two had other examples."""
        a, b = self.of(run, view), self.of(reference, view)
        if not a or a.keys() != b.keys() or any(len(a[place]) != len(b[place]) for place in a):
            return None
        x, y = (np.concatenate([found[place] for place in sorted(a)]) for found in (a, b))
        return x, y


def _over_seeds(measure: str, method: str, seeds: Sequence[int], a: Sequence[float], b: Sequence[float]) -> Difference:
    points = sum(x - y for x, y in zip(a, b, strict=True)) / len(seeds)
    return Difference(measure, method, tuple(seeds), points, paired_t(a, b) if len(seeds) > 1 else None)


def _over_examples(difference: Difference, pairs: Sequence[Pair | None]) -> Difference:
    """The same difference with its tests over examples, where every seed has its pair."""
    present = [pair for pair in pairs if pair is not None]
    if len(present) < len(pairs):
        return difference
    x, y = (np.concatenate([pair[i] for pair in present]) for i in (0, 1))
    hard = bool(np.isin(x, (0, 1)).all() and np.isin(y, (0, 1)).all())
    discordant = mcnemar(x, y) if hard else None
    if len({len(a) for a, _ in present}) == 1:
        # A test set that all seeds share is drawn once, with each example's mean over seeds.
        x, y = (np.mean([pair[i] for pair in present], axis=0) for i in (0, 1))
    return replace(difference, over_examples=bootstrap(x, y), discordant=discordant)


def _corrected(family: Sequence[Difference]) -> list[Difference]:
    """The same differences with Holm's correction within each kind of test."""
    seeds = holm({d.method: d.over_seeds.p for d in family if d.over_seeds}).adjusted
    resampled = holm({d.method: d.over_examples.p for d in family if d.over_examples}).adjusted
    discordant = holm({d.method: d.discordant.p for d in family if d.discordant}).adjusted
    return [
        replace(
            d,
            seeds_p=seeds.get(d.method),
            bootstrap_p=resampled.get(d.method),
            mcnemar_p=discordant.get(d.method),
        )
        for d in family
    ]

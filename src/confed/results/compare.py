"""Comparing methods: spread over seeds and paired differences to a reference, with tests.

Two questions are kept apart. *Would another seed show the same?* is answered by the paired t-test over seeds.
*Are these trained models different on this test data?* is answered over examples, by the paired bootstrap and by
McNemar's test. Each family of tests (one measure, all methods) is corrected by Holm's procedure. Differences are
method minus reference.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from confed.metrics.statistics import (
    Bootstrap,
    McNemar,
    PairedT,
    bootstrap,
    holm,
    mcnemar,
    paired_t,
    smallest_p,
)
from confed.results import formats
from confed.results.recipes import differing_keys, named_apart
from confed.results.runs import Run, load
from confed.results.tables import headline, is_bound, spread_cell
from confed.results.writers import Cell, Column, Table, to_csv, to_latex, to_markdown, to_rich

if TYPE_CHECKING:
    from rich.table import Table as RichTable

__all__ = ["MEASURES", "MIN_SEEDS", "Comparison", "Difference", "compare", "compare_runs"]

MIN_SEEDS = 5
"""With fewer seeds nothing is called significant at the level of seeds."""

LEVEL = 0.05

MEASURES: Mapping[str, tuple[str, str]] = {
    "personal_mean": ("personal on own data", "personal"),
    "global_seen_mean": ("global on seen", "global"),
    "global_unseen_mean": ("global on unseen", "unseen"),
}
"""Measure -> its name in words, and the view of the predictions that it is a mean of."""


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
        """Whether the difference is claimed to hold for other seeds: enough of them, and a small corrected p."""
        return len(self.seeds) >= MIN_SEEDS and self.seeds_p is not None and self.seeds_p <= LEVEL


@dataclass(frozen=True)
class Comparison:
    """What :func:`compare` found.

    Attributes:
        reference: the method that the others are compared with.
        labels: method -> its name as people write it, in order.
        metric: name of the headline metric.
        values: measure -> method -> seed -> value.
        differences: one per measure and method that share a seed with the reference.
        warnings: settings in which the runs differ although only the algorithm should.
        remarks: how to read the figures.
    """

    reference: str
    labels: Mapping[str, str]
    metric: str
    values: Mapping[str, Mapping[str, Mapping[int, float]]]
    differences: tuple[Difference, ...]
    warnings: tuple[str, ...]
    remarks: tuple[str, ...]

    def table(self) -> Table:
        """All figures as one table, a section per measure."""
        found = {(difference.measure, difference.method): difference for difference in self.differences}
        sections = tuple(
            tuple(
                self._row(measure, method, values[method], found.get((measure, method)))
                for method in self.labels
                if method in values
            )
            for measure, values in self.values.items()
        )
        title = f"Test {self.metric} in %, and differences to {self.labels[self.reference]} in points"
        warnings = tuple(f"Warning: {warning}" for warning in self.warnings)
        return Table(title, _COLUMNS, sections, (*warnings, *self.remarks))

    def rich(self) -> "RichTable":
        """The table for a terminal."""
        return to_rich(self.table())

    def markdown(self) -> str:
        """The table in Markdown."""
        return to_markdown(self.table())

    def csv(self) -> str:
        """The table as CSV, with both uncorrected and corrected p-values."""
        return to_csv(self.table())

    def latex(self) -> str:
        """The table in LaTeX."""
        return to_latex(self.table())

    def _row(
        self, measure: str, method: str, values: Mapping[int, float], found: Difference | None
    ) -> tuple[Cell, ...]:
        name, label = MEASURES[measure][0], self.labels[method]
        start = (
            Cell(name),
            Cell(label),
            Cell(str(len(values)), len(values)),
            spread_cell(list(values.values())),
        )
        if found is None:
            gap = "reference" if method == self.reference else formats.MISSING
            return (*start, Cell(gap), *(Cell("") for _ in _COLUMNS[5:]))
        t, b, m = found.over_seeds, found.over_examples, found.discordant
        star = "*" if found.significant else ""
        return (
            *start,
            Cell(formats.points(found.points) + star, 100 * found.points),
            *_interval(t),
            _p(t.p if t else None),
            _p(found.seeds_p),
            *_interval(b),
            _p(b.p if b else None),
            _p(found.bootstrap_p),
            Cell(f"{m.only_a}:{m.only_b}" if m else formats.MISSING),
            _p(m.p if m else None),
            _p(found.mcnemar_p),
        )


_COLUMNS = (
    Column("measure", words=True),
    Column("method", words=True),
    Column("seeds"),
    Column("value", unit="%"),
    Column("difference", unit="points"),
    Column("95 % CI", "over seeds", words=True),
    Column("low", "over seeds", "points", detail=True),
    Column("high", "over seeds", "points", detail=True),
    Column("p uncorrected", "over seeds", detail=True),
    Column("p", "over seeds"),
    Column("95 % CI", "over examples", words=True),
    Column("low", "over examples", "points", detail=True),
    Column("high", "over examples", "points", detail=True),
    Column("p uncorrected", "over examples", detail=True),
    Column("p", "over examples"),
    Column("won:lost", "McNemar", words=True),
    Column("p uncorrected", "McNemar", detail=True),
    Column("p", "McNemar"),
)


def compare(folders: Sequence[Path], reference: str = "fedavg") -> Comparison:
    """Compares methods over the runs in some folders.

    Args:
        folders: run folders and study folders, also mixed. Runs of one algorithm with other hyper-parameters are
            methods of their own, named by the values that differ.
        reference: the method that the others are compared with.

    Raises:
        ValueError: a folder is neither a run nor a study, there are no folders, or the reference is not among the
            methods.
    """
    if not folders:
        raise ValueError("folders must name at least one run or study, got none")
    return compare_runs([run for folder in folders for run in load(Path(folder)).runs], reference)


def compare_runs(runs: Sequence[Run], reference: str = "fedavg") -> Comparison:
    """Compares methods over runs that were read already; see :func:`compare`.

    Raises:
        ValueError: the reference is not among the methods.
    """
    runs = named_apart(runs)
    methods: dict[str, dict[int, Run]] = {}
    for run in runs:
        methods.setdefault(run.method, {})[run.seed] = run
    if reference not in methods:
        raise ValueError(f"reference must be one of {', '.join(methods)}, got {reference!r}")
    values = {measure: _values(methods, measure) for measure in MEASURES}
    values = {measure: found for measure, found in values.items() if found}
    differences: list[Difference] = []
    scores = _Scores()
    for measure, found in values.items():
        others = [method for method in found if method != reference] if reference in found else []
        family = [_difference(measure, method, reference, methods, found, scores) for method in others]
        differences += _corrected([difference for difference in family if difference])
    return Comparison(
        reference=reference,
        labels={method: next(iter(seeds.values())).label for method, seeds in methods.items()},
        metric=runs[0].metric,
        values=values,
        differences=tuple(differences),
        warnings=tuple(_warnings(methods, reference)),
        remarks=tuple(_remarks(differences, methods, reference)),
    )


class _Scores:
    """Predictions of the runs, each file read once."""

    def __init__(self) -> None:
        self._read: dict[Path, dict[str, np.ndarray]] = {}

    def of(self, run: Run, view: str) -> dict[str, np.ndarray]:
        """Place -> score per example, of one view."""
        if run.folder not in self._read:
            content = run.predictions()
            self._read[run.folder] = {
                k: v for k, v in content.items() if k.endswith("/correct") and v.ndim == 1
            }
        start, end = f"{view}/", "/correct"
        found = self._read[run.folder]
        return {key[len(start) : -len(end)]: value for key, value in found.items() if key.startswith(start)}


def _values(methods: Mapping[str, Mapping[int, Run]], measure: str) -> dict[str, dict[int, float]]:
    """Method -> seed -> value; methods without any are left out."""
    found = {
        method: {
            seed: x for seed, run in sorted(runs.items()) if (x := headline(run.summary, measure)) is not None
        }
        for method, runs in methods.items()
    }
    return {method: seeds for method, seeds in found.items() if seeds}


def _difference(
    measure: str,
    method: str,
    reference: str,
    methods: Mapping[str, Mapping[int, Run]],
    found: Mapping[str, Mapping[int, float]],
    scores: _Scores,
) -> Difference | None:
    """The uncorrected comparison of two methods, None if they share no seed."""
    seeds = tuple(seed for seed in found[method] if seed in found[reference])
    if not seeds:
        return None
    a, b = ([found[name][seed] for seed in seeds] for name in (method, reference))
    over_seeds = paired_t(a, b) if len(seeds) > 1 else None
    points = sum(x - y for x, y in zip(a, b, strict=True)) / len(seeds)
    view = MEASURES[measure][1]
    pairs = [
        pair
        for seed in seeds
        if (
            pair := _paired(scores.of(methods[method][seed], view), scores.of(methods[reference][seed], view))
        )
    ]
    if len(pairs) < len(seeds):
        return Difference(measure, method, seeds, points, over_seeds)
    over_examples = bootstrap(*_averaged(pairs))
    x, y = (np.concatenate([pair[i] for pair in pairs]) for i in (0, 1))
    hard = np.isin(x, (0, 1)).all() and np.isin(y, (0, 1)).all()
    return Difference(
        measure,
        method,
        seeds,
        points,
        over_seeds,
        over_examples=over_examples,
        discordant=mcnemar(x, y) if hard else None,
    )


def _paired(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray] | None:
    """Scores of the same examples, places in one order; None if the two were not tested on the same ones."""
    if not a or a.keys() != b.keys() or any(len(a[place]) != len(b[place]) for place in a):
        return None
    x, y = (np.concatenate([found[place].astype(np.float64) for place in sorted(a)]) for found in (a, b))
    return x, y


def _averaged(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Each example's mean score over seeds: a test set that several seeds share is drawn as one, not as many."""
    if len({len(x) for x, _ in pairs}) > 1:
        x, y = (np.concatenate([pair[i] for pair in pairs]) for i in (0, 1))
    else:
        x, y = (np.mean([pair[i] for pair in pairs], axis=0) for i in (0, 1))
    return x, y


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


def _interval(test: PairedT | Bootstrap | None) -> tuple[Cell, Cell, Cell]:
    if test is None:
        return Cell(formats.MISSING), Cell(formats.MISSING), Cell(formats.MISSING)
    text = f"[{formats.points(test.low)}, {formats.points(test.high)}]"
    return Cell(text), Cell(text, 100 * test.low), Cell(text, 100 * test.high)


def _p(p: float | None) -> Cell:
    return Cell(formats.p_value(p), p)


def _warnings(methods: Mapping[str, Mapping[int, Run]], reference: str) -> list[str]:
    """One line per method whose settings outside its algorithm differ from the reference's."""
    lines: list[str] = []
    base = methods[reference]
    for method, runs in methods.items():
        found: dict[str, str] = {}
        for seed, run in runs.items():
            other = base.get(seed, next(iter(base.values())))
            found |= differing_keys(run, other)
        if found:
            keys = ", ".join(f"{key} ({mine})" for key, mine in found.items())
            lines.append(f"{method} and {reference} differ in more than the algorithm: {keys}")
    return lines


def _remarks(
    differences: Sequence[Difference], methods: Mapping[str, Mapping[int, Run]], reference: str
) -> list[str]:
    """How far the figures carry."""
    others = len(methods) - 1
    pairs = max((len(d.seeds) for d in differences), default=0)
    remarks: list[str] = []
    if pairs < 2:
        remarks.append("One seed in common: nothing can be said about other seeds.")
    else:
        remarks.append(
            f"Over seeds: paired t-test over {pairs} seeds. A test of signs or ranks over {pairs} seeds cannot give "
            f"a p-value below {smallest_p(pairs):.4g}."
        )
        if pairs < MIN_SEEDS:
            remarks.append(
                f"With {pairs} seeds no significance is claimed at the level of seeds (that takes {MIN_SEEDS}); "
                "intervals and p-values over seeds are for orientation."
            )
        else:
            remarks.append(f"* p over seeds at most {LEVEL} after Holm's correction.")
    if any(d.over_examples for d in differences):
        discordant = [d.discordant.n for d in differences if d.discordant]
        least = min((d.discordant.smallest_p for d in differences if d.discordant), default=None)
        resamples = next(d.over_examples.resamples for d in differences if d.over_examples)
        remarks.append(
            "Over examples: these trained models on this test data, clients pooled; says nothing about other seeds. "
            f"The bootstrap ({resamples} resamples of examples, each with its mean over seeds) cannot give a p-value "
            f"below {2 / (resamples + 1):.1g}"
            + (f", McNemar's test none below {least:.1g}." if discordant and least is not None else ".")
        )
        if pairs > 1 and discordant:
            remarks.append(
                "McNemar counts an example once per seed, so its p-values over several seeds are optimistic."
            )
    elif differences:
        remarks.append(
            "No tests over examples: predictions of both methods on the same examples are missing."
        )
    if others > 1:
        remarks.append(f"p-values are corrected by Holm's procedure over up to {others} methods per measure.")
    bounds = [
        m for m, runs in methods.items() if m != reference and is_bound(next(iter(runs.values())).summary)
    ]
    if bounds:
        remarks.append(f"{', '.join(bounds)}: all data in one place, a bound and not a federated method.")
    return remarks

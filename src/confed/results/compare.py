"""Comparing methods: spread over seeds and paired differences to a reference, with tests.

Two questions are kept apart. *Would another seed show the same?* is answered by the paired t-test over seeds.
*Are these trained models different on this test data?* is answered over examples, by the paired bootstrap and
by McNemar's test. Each family of tests (one measure, all methods) is corrected by Holm's procedure.
Differences are method minus reference.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from confed.metrics.statistics import Bootstrap, PairedT, smallest_p
from confed.results import formats
from confed.results.paired import LEVEL, MEASURES, MIN_SEEDS, Difference, Methods, differences, values_of
from confed.results.runs import Run, load
from confed.results.settings import differing_keys, named_apart
from confed.results.tables import is_bound, spread_cell
from confed.results.writers import Cell, Column, Table, to_csv, to_latex, to_markdown, to_rich

if TYPE_CHECKING:
    from rich.table import Table as RichTable

__all__ = ["Comparison", "compare", "compare_runs"]


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
        equal = len({len(seeds) for values in self.values.values() for seeds in values.values()}) < 2
        title = f"Test {self.metric} in %, and differences to {self.labels[self.reference]} in points"
        warnings = tuple(f"Warning: {warning}" for warning in self.warnings)
        return Table(title, _columns(equal), sections, (*warnings, *self.remarks))

    def rich(self) -> "RichTable":
        """The table for a terminal."""
        return to_rich(self.table())

    def markdown(self) -> str:
        """The table in Markdown."""
        return to_markdown(self.table())

    def csv(self) -> str:
        """The table as CSV, with both uncorrected and corrected p-values and the ends of the intervals."""
        return to_csv(self.table())

    def latex(self) -> str:
        """The table in LaTeX."""
        return to_latex(self.table())

    def _row(
        self, measure: str, method: str, values: Mapping[int, float], found: Difference | None
    ) -> tuple[Cell, ...]:
        start = (
            Cell(MEASURES[measure][0]),
            Cell(self.labels[method]),
            Cell(str(len(values)), len(values)),
            spread_cell(list(values.values())),
        )
        if found is None:
            gap = Cell("reference" if method == self.reference else formats.MISSING)
            return (*start, gap, *(Cell("") for _ in range(13)))
        t, b, m = found.over_seeds, found.over_examples, found.discordant
        return (
            *start,
            Cell(formats.points(found.points) + ("*" if found.significant else ""), 100 * found.points),
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


def compare(folders: Sequence[Path], reference: str = "fedavg") -> Comparison:
    """Compares methods over the runs in some folders.

    Args:
        folders: run folders and study folders, also mixed. Runs of one algorithm with other hyper-parameters
            are methods of their own, named by the values that differ.
        reference: the method that the others are compared with.

    Raises:
        ValueError: a folder is neither a run nor a study, there are no folders, or the reference is not among
            the methods.
    """
    if not folders:
        raise ValueError("folders must name at least one run or study, got none")
    return compare_runs([run for folder in folders for run in load(Path(folder)).runs], reference)


def compare_runs(runs: Sequence[Run], reference: str = "fedavg") -> Comparison:
    """Compares methods over runs that were read already; see :func:`compare`.

    Raises:
        ValueError: the reference is not among the methods.
    """
    methods: dict[str, dict[int, Run]] = {}
    for run in named_apart(runs):
        methods.setdefault(run.method, {})[run.seed] = run
    if reference not in methods:
        raise ValueError(f"reference must be one of {', '.join(methods)}, got {reference!r}")
    found = differences(methods, reference)
    values = {measure: values_of(methods, measure) for measure in MEASURES}
    return Comparison(
        reference=reference,
        labels={method: next(iter(seeds.values())).label for method, seeds in methods.items()},
        metric=runs[0].metric,
        values={measure: there for measure, there in values.items() if there},
        differences=tuple(found),
        warnings=tuple(_warnings(methods, reference)),
        remarks=(*_on_seeds(found), *_on_examples(found), *_on_methods(found, methods, reference)),
    )


def _columns(equal_seeds: bool) -> tuple[Column, ...]:
    return (
        Column("measure", words=True),
        Column("method", words=True),
        Column("seeds", detail=equal_seeds),
        Column("value", unit="%"),
        Column("difference", unit="points"),
        *_test_columns("over seeds"),
        *_test_columns("over examples"),
        Column("won:lost", "McNemar", words=True),
        Column("p uncorrected", "McNemar", detail=True),
        Column("p", "McNemar"),
    )


def _test_columns(group: str) -> tuple[Column, ...]:
    return (
        Column("95 % CI", group, words=True),
        Column("low", group, "points", detail=True),
        Column("high", group, "points", detail=True),
        Column("p uncorrected", group, detail=True),
        Column("p", group),
    )


def _interval(test: PairedT | Bootstrap | None) -> tuple[Cell, Cell, Cell]:
    if test is None:
        return Cell(formats.MISSING), Cell(formats.MISSING), Cell(formats.MISSING)
    text = f"[{formats.points(test.low)}, {formats.points(test.high)}]"
    return Cell(text), Cell(text, 100 * test.low), Cell(text, 100 * test.high)


def _p(p: float | None) -> Cell:
    return Cell(formats.p_value(p), p)


def _warnings(methods: Methods, reference: str) -> list[str]:
    """One line per method whose settings outside its algorithm differ from the reference's."""
    lines: list[str] = []
    base = methods[reference]
    for method, runs in methods.items():
        found: dict[str, str] = {}
        for seed, run in runs.items():
            found |= differing_keys(run, base.get(seed, next(iter(base.values()))))
        if found:
            keys = ", ".join(f"{key} ({values})" for key, values in found.items())
            lines.append(f"{method} and {reference} differ in more than the algorithm: {keys}")
    return lines


def _on_seeds(found: Sequence[Difference]) -> list[str]:
    """How far the tests over seeds carry."""
    if not found:
        return ["No method shares a seed and a measure with the reference: nothing can be compared."]
    least, most = (choose(len(d.seeds) for d in found) for choose in (min, max))
    if most < 2:
        return ["One seed in common: nothing can be said about other seeds."]
    seeds = f"{most}" if least == most else f"{least} to {most}"
    lines = [
        f"Over seeds: paired t-test over {seeds} seeds. A test of signs or ranks over {most} seeds cannot "
        "give "
        f"a p-value below {smallest_p(most):.4g}."
    ]
    if least < MIN_SEEDS:
        few = least if most >= MIN_SEEDS else seeds
        lines.append(
            f"With {few} seeds no significance is claimed at the level of seeds (that takes {MIN_SEEDS}); "
            "intervals and p-values over seeds are for orientation."
        )
    if most >= MIN_SEEDS:
        lines.append(f"* p-value over seeds at most {LEVEL} after Holm's correction.")
    return lines


def _on_examples(found: Sequence[Difference]) -> list[str]:
    """How far the tests over examples carry."""
    resampled = [d.over_examples for d in found if d.over_examples]
    discordant = [d.discordant for d in found if d.discordant]
    if not resampled:
        return ["No tests over examples: predictions of both methods on the same examples are missing."] * bool(found)
    line = (
        "Over examples: these trained models on this test data, clients pooled; it says nothing about "
        "other seeds. "
        f"The bootstrap ({resampled[0].resamples} resamples) cannot give a p-value below "
        f"{2 / (resampled[0].resamples + 1):.1g}"
    )
    bound = max((test.smallest_p for test in discordant if test.only_a + test.only_b), default=0.0)
    lines = [line + (f", McNemar's test in some rows none below {bound:.2g}." if bound > 1e-4 else ".")]
    if discordant and any(len(d.seeds) > 1 for d in found):
        lines.append("McNemar counts an example once per seed, which makes its p-values over several seeds too small.")
    return lines


def _on_methods(found: Sequence[Difference], methods: Methods, reference: str) -> list[str]:
    """Holm's families, and which rows are bounds."""
    lines: list[str] = []
    families = [sum(d.measure == measure for d in found) for measure in MEASURES]
    if max(families) > 1:
        lines.append(f"p-values are corrected by Holm's procedure over up to {max(families)} methods per measure.")
    firsts = {method: next(iter(runs.values())) for method, runs in methods.items() if method != reference}
    bounds = [run.label for run in firsts.values() if is_bound(run.summary)]
    if bounds:
        lines.append(f"{', '.join(bounds)}: all data in one place, a bound and not a federated method.")
    return lines

"""Results of a sweep: a table, a figure and JSON, with differences corrected over all values of the swept setting."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from confed.comparison.paired import Difference, against, corrected
from confed.metrics.statistics import mean
from confed.report.comparison import Comparison, compare_runs
from confed.report.figures.style import (
    HUES,
    Drawing,
    End,
    Palette,
    SeriesStyle,
    at_ends,
    line_style,
    series_styles,
    style_axes,
)
from confed.report.tables.cells import signed
from confed.report.tables.columns import Context, MethodRow, columns_of
from confed.report.tables.control_marks import SIGN
from confed.report.tables.differences import GAP, Line, both_tests
from confed.report.tables.relative import BySeed, improvement_cell, mean_improvement, no_mean
from confed.report.tables.table import Cell, Column, Table, in_files, pivot, write_files
from confed.results.history import judged
from confed.results.records import words_of
from confed.results.runs import StudyResults, load
from confed.results.sweep import Point, Sweep, number_of, read_sweep
from confed.system import format as formats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Values of a swept setting with what their studies found ------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """One value of the swept setting, with what its grid found; differences are corrected over the whole sweep."""

    point: Point
    study: StudyResults
    comparison: Comparison
    differences: Mapping[str, Difference] = field(default_factory=dict[str, Difference])

    @property
    def value(self) -> str:
        """The swept setting's value."""
        return next(iter(self.point.settings.values()))

    @property
    def name(self) -> str:
        """The value and what goes with it, in words."""
        settings = ", ".join(f"{key}={value}" for key, value in self.point.settings.items())
        return f"{settings} ({self.clients} clients)"

    def line(self, by: str) -> str:
        """Name of the value's line in the figure; "" where there is one line per method."""
        return self.point.settings.get(by, "")

    @property
    def clients(self) -> int:
        """Number of clients that took part."""
        return len(self.study.clients)

    @property
    def rounds(self) -> str:
        """The budget of communication rounds; a span where methods differ."""
        budgets = sorted({run.summary.rounds for run in self.study.runs if run.complete})
        return "–".join(map(str, dict.fromkeys((budgets[0], budgets[-1])))) if budgets else formats.MISSING

    @property
    def measure(self) -> str:
        """Measure that is compared: a key of :data:`confed.results.records.OUTCOMES`."""
        return judged(self.study).mean

    @property
    def reference(self) -> str:
        """The method that the others are compared with."""
        return self.comparison.references[0]

    @property
    def methods(self) -> list[str]:
        """The methods with values."""
        return [method for method in self.study.methods if self.values(method)]

    def values(self, method: str) -> Mapping[int, float]:
        """A method's value for each seed, a fraction."""
        return self.comparison.values.get(self.measure, {}).get(method, {})

    def _with_reference(self, method: str) -> tuple[BySeed, BySeed] | None:
        """Values of a method and of the first reference, client by client; None where they are not compared."""
        of_methods = self.comparison.clients_of
        refused = self.reference in self.comparison.refused.get(method, {})
        if method == self.reference or refused or not {method, self.reference} <= of_methods.keys():
            return None
        return of_methods[method], of_methods[self.reference]

    def improvement(self, method: str) -> Mapping[int, float]:
        """Relative improvement over the first reference: seed -> mean over clients; empty where one is left out."""
        improvements = self._with_reference(method)
        return {} if improvements is None else mean_improvement(*improvements)

    def no_improvement(self, method: str) -> str:
        """Why there is no improvement relative to the first reference, as a sentence; "" where there is one."""
        improvements = self._with_reference(method)
        return "" if improvements is None else no_mean(*improvements, self.comparison.labels[self.reference])


def finished_stages(root: Path, sweep: Sweep) -> list[Stage]:
    """The values that have a finished run, in order."""
    stages: list[Stage] = []
    for point in sweep.points:
        try:
            study = load(root / point.folder)
        except ValueError:  # nothing was run yet, or everything was refused
            continue
        complete_methods = {run.method for run in study.runs if run.complete}
        if complete_methods:
            references = [name for name in sweep.references if name in complete_methods] or None
            stages.append(Stage(point, study, compare_runs(study.runs, references, sweep.margin)))
    return _corrected(stages)


def _corrected(stages: Sequence[Stage]) -> list[Stage]:
    """The same values with their differences, corrected together."""
    stage_pairs: list[list[Difference]] = []
    tests = 0
    for stage in stages:
        stage_pairs.append([pair for pair in stage.comparison.pairs if pair.measure == stage.measure])
        tests += math.comb(len(stage.comparison.values.get(stage.measure, {})), 2)
    together = iter(corrected(list(chain.from_iterable(stage_pairs)), tests))
    result: list[Stage] = []
    for stage, pairs in zip(stages, stage_pairs, strict=True):
        tested = against([*islice(together, len(pairs))], stage.reference)
        result.append(replace(stage, differences={pair.method: pair for pair in tested}))
    return result


# Figure of a sweep, as figure 6 of FedDAT and of Cao et al. (2025) --------------------------------------------


def sweep_drawing(sweep: Sweep, stages: Sequence[Stage]) -> Drawing:
    """Figure of a sweep, by the number of clients where this grows with the values, else by the values."""
    x, names = _places(sweep, stages)
    by_clients = names != [stage.value for stage in stages]
    ticks: dict[float, str] = {}
    for place, name, stage in zip(x, names, stages, strict=True):
        ticks[place] = f"{name}\n{stage.rounds} round{'' if stage.rounds == '1' else 's'}"
    lines = _lines(sweep, stages)
    first = stages[0]
    title = f"{words_of(first.measure)}, test {first.comparison.metric}, %"
    panels: list[tuple[str, Callable[[Stage, str], Mapping[int, float]]]] = [(title, Stage.values)]
    drawn = list(product(stages, dict.fromkeys(method for method, _ in lines)))
    if sweep.by and first.reference in sweep.references and any(stage.improvement(m) for stage, m in drawn):
        words = f"improvement relative to {first.comparison.labels[first.reference]}, %"
        if any(stage.no_improvement(method) for stage, method in drawn):
            words += "\n(no point where it is 0 at a client)"
        panels.append((words, Stage.improvement))

    def draw(figure: "Figure", palette: Palette) -> None:
        every: list[tuple[Axes, list[End]]] = []
        for number, (words, read) in enumerate(panels):
            axes = figure.add_subplot(1, len(panels), number + 1)
            ends: list[End] = []
            for (method, line), series in lines.items():
                at: list[tuple[float, list[float]]] = []
                for place, stage in zip(x, stages, strict=True):
                    values = [*read(stage, method).values()]
                    if stage.line(sweep.by) == line and (values or number):
                        at.append((place, values))
                if any(values for _, values in at):
                    ends.append(_curve(axes, at, series, palette))
            style_axes(axes, palette, "", "clients" if by_clients else sweep.over, words)
            axes.set_xticks(list(ticks), list(ticks.values()))
            axes.margins(x=0.06)
            if number:
                axes.axhline(0, color=palette("muted"), linewidth=0.8)
            every.append((axes, ends))
        at_ends(figure, every, palette)

    width = max(6.4, 1.5 + 1.1 * len(ticks)) * (1 if len(panels) == 1 else 1.7)
    return Drawing(f"sweep {sweep.recipe} {sweep.over}", width, 4.2, draw)


def _places(sweep: Sweep, stages: Sequence[Stage]) -> tuple[list[float], list[str]]:
    """Positions and labels of the values on the axis."""
    clients = [float(stage.clients) for stage in stages]
    if not sweep.by and len(stages) > 1 and clients == sorted(set(clients)):
        return clients, [str(stage.clients) for stage in stages]
    values = list(dict.fromkeys(stage.value for stage in stages))
    numbers = [number_of(value) for value in values]
    places = dict(zip(values, range(len(values)) if None in numbers else numbers, strict=True))
    return [float(places[stage.value] or 0) for stage in stages], [stage.value for stage in stages]


def _lines(sweep: Sweep, stages: Sequence[Stage]) -> dict[tuple[str, str], SeriesStyle]:
    """Method and value of the other setting -> how their line looks; methods by colour, unless there is only one."""
    methods, others = _styles(stages), list(dict.fromkeys(stage.line(sweep.by) for stage in stages))
    if not sweep.by:
        return {(method, ""): series for method, series in methods.items()}
    drawn: dict[tuple[str, str], SeriesStyle] = {}
    for method, series in methods.items():
        for rank, other in enumerate(others):
            label = f"{series.label}, {other}" if len(methods) > 1 else other
            marker = "os^Dv"[rank % 5]
            colour = series.colour if len(methods) > 1 else f"m{rank % HUES + 1}"
            drawn[method, other] = replace(series, label=label, colour=colour, dashed=rank % 2 > 0, marker=marker)
    return drawn


def _curve(axes: "Axes", at: Sequence[tuple[float, Sequence[float]]], series: SeriesStyle, palette: Palette) -> End:
    """A line of means with standard deviations, broken where there are no values; where it ends."""
    moments = [mean(values) if values else None for _, values in at]
    places, heights = [place for place, _ in at], [math.nan if m is None else 100 * m.mean for m in moments]
    spread = [100 * m.sd if m is not None and m.n > 1 else 0.0 for m in moments]
    axes.plot(places, heights, **line_style(series, palette, 4))
    axes.errorbar(places, heights, spread, fmt="none", color=palette(series.colour), linewidth=0.9, capsize=2)
    last = max(number for number, m in enumerate(moments) if m is not None)
    return series, places[last], heights[last]


def _styles(stages: Sequence[Stage]) -> dict[str, SeriesStyle]:
    """Style of each method with values, the same for all values of the setting."""
    firsts = {}
    for stage in reversed(stages):
        for method in stage.methods:
            firsts[method] = stage.study.of(method)[0]
    order = dict.fromkeys(chain.from_iterable(stage.study.methods for stage in stages))
    runs = tuple(firsts[method] for method in order if method in firsts)
    return series_styles(replace(stages[0].study, runs=runs))


# The table, and everything for machines -----------------------------------------------------------------------


@dataclass(frozen=True)
class _Row(Line):
    """A method at one value of the setting."""

    stage: Stage
    method: str

    @property
    def sweep_value_cell(self) -> Cell:
        blind = (self.measure, self.method) in self.stage.comparison.blind
        return signed(self.value_cell, SIGN) if blind else self.value_cell

    @property
    def relative_cell(self) -> Cell:
        return GAP if self.difference is None else improvement_cell([*self.stage.improvement(self.method).values()])


def _rows(stage: Stage) -> Iterator[_Row]:
    for method in stage.methods:
        label, difference = stage.comparison.labels[method], stage.differences.get(method)
        is_reference = method == stage.reference
        yield _Row(stage.measure, label, stage.values(method), difference, is_reference, stage, method)


def sweep_table(sweep: Sweep, stages: Sequence[Stage]) -> Table:
    """A section per value, a row per method: mean and standard deviation over seeds, and the paired tests."""
    if not stages:
        raise ValueError(f"the sweep over {sweep.over} has no finished run")
    by = [Column(sweep.by, words=True, read=lambda row: row.stage.line(sweep.by))] if sweep.by else []
    columns = (
        Column(sweep.over, words=True, read=lambda row: Cell(row.stage.value, number_of(row.stage.value))),
        *by,
        Column("clients", read=lambda row: row.stage.clients),
        Column("rounds", words=True, read=lambda row: row.stage.rounds),
        Column("method", words=True, read=lambda row: row.label),
        Column("seeds", read=lambda row: len(row.values)),
        Column("value", unit="%", read=lambda row: row.sweep_value_cell),
        Column("difference", unit="points", read=lambda row: row.difference_cell),
        Column("relative", unit="%", read=lambda row: row.relative_cell),
        *(column for column in both_tests() if column.title not in ("low", "high")),
        *_declared(stages),
    )
    kinds = dict.fromkeys(words_of(stage.measure) for stage in stages)
    metric = stages[0].comparison.metric
    title = f"{sweep.recipe} by {sweep.over}: test {metric} in % after the last round ({', '.join(kinds)})"
    return pivot(title, columns, *map(_rows, stages), notes=_notes(stages))


def _declared(stages: Sequence[Stage]) -> Iterator[Column]:
    """Columns that :mod:`confed.report.tables.columns` declares for sweeps."""
    rows: list[MethodRow] = []
    for stage in stages:
        rows += [MethodRow(label, stage.study.of(method)) for method, label in stage.study.labels.items()]
    for column in columns_of("sweep", Context(rows)):

        def cell(row: _Row, declared: Any = column) -> Cell:
            runs = [run for run in row.stage.study.of(row.method) if run.complete]
            return declared.cells([MethodRow(row.method, runs)])[0]

        yield replace(column.heading, read=cell)


def _notes(stages: Sequence[Stage]) -> list[str]:
    references = dict.fromkeys(stage.comparison.labels[stage.reference] for stage in stages)
    budgets = "; ".join(_by_text([(stage, stage.rounds) for stage in stages], len(stages)))
    notes = [
        f"Value: mean over clients, then mean ± sd over seeds. Differences are to {' or '.join(references)} of the "
        "same value, with Holm's correction over all pairs of methods at all values (a row that the setting does not "
        "concern counts at every value, which can only make p-values larger). Relative: the improvement as a share of "
        "the reference's value, client by client, then the mean over clients.",
        f"Round budgets: {budgets}.",
    ]
    warnings: list[tuple[Stage, str]] = []
    gaps: list[str] = []
    for stage in stages:
        # Mostly it is the reference that is at 0, so that all methods have the same sentence.
        sentences = sorted({stage.no_improvement(method) for method in stage.methods} - {""})
        notes += [f"{stage.name}: {text}" for text in sentences]
        warnings += [(stage, text) for text in stage.comparison.warnings]
        gaps += [f"{stage.name}: {text}" for text in stage.study.failed]
    return [*notes, *_remarks(stages), *(f"Warning, {text}" for text in _by_text(warnings, len(stages))), *gaps]


def _remarks(stages: Sequence[Stage]) -> Iterator[str]:
    """Caveats of the tests, with the values for which they hold unless these are all."""
    stages_with: dict[str, list[Stage]] = {}
    for stage in stages:
        for text in dict.fromkeys(stage.comparison.remarks):
            stages_with.setdefault(text, []).append(stage)
    for text, concerned in stages_with.items():
        where = "; ".join(stage.name for stage in concerned)
        yield text if len(concerned) == len(stages) else f"{where}: {text}"


def _by_text(texts: Sequence[tuple[Stage, str]], stages: int) -> list[str]:
    """Notes on the values; common ones appear once."""
    count = Counter(text for _, text in texts)
    everywhere = [f"at every value: {text}" for text, times in count.items() if times == stages > 1]
    return everywhere + [f"{stage.name}: {text}" for stage, text in texts if count[text] < stages or stages == 1]


def sweep_results(sweep: Sweep, stages: Sequence[Stage]) -> dict[str, Any]:
    """Everything for machines: for each value and method the value of every seed, and the tests."""
    points: list[dict[str, Any]] = []
    for stage in stages:
        point = {
            "settings": dict(stage.point.settings),
            "folder": stage.point.folder,
            "clients": stage.clients,
            "rounds": stage.rounds,
            "measure": stage.measure,
            "reference": stage.reference,
            "methods": {method: _method_results(stage, method) for method in stage.methods},
        }
        points.append(point)
    return {"recipe": sweep.recipe, "over": sweep.over, "by": sweep.by, "points": points}


def _method_results(stage: Stage, method: str) -> dict[str, Any]:
    values, difference = stage.values(method), stage.differences.get(method)
    summary = mean(list(values.values()))
    result: dict[str, Any] = {
        "label": stage.comparison.labels[method],
        "seeds": {str(seed): value for seed, value in values.items()},
        "mean": summary.mean,
        "sd": summary.sd if summary.n > 1 else None,
        "relative": {str(seed): value for seed, value in stage.improvement(method).items()},
    }
    if difference is not None:
        result["difference"] = {
            "mean": difference.points,
            "seeds_p_uncorrected": difference.over_seeds.p if difference.over_seeds else None,
            "seeds_p": difference.seeds_p,
            "examples_p_uncorrected": difference.examples_p_uncorrected,
            "examples_p": difference.examples_p,
            "not_tested": difference.refused or difference.unpaired,
        }
    return result


def write_sweep(root: Path) -> tuple[Table, list[Path]]:
    """Export of a sweep's table (``table.md``, ``.csv``, ``.tex``), figure, and ``results.json``."""
    sweep = read_sweep(root)
    stages = finished_stages(root, sweep)
    table = sweep_table(sweep, stages)
    results = json.dumps(sweep_results(sweep, stages), indent=1, ensure_ascii=False)
    drawing = sweep_drawing(sweep, stages)
    return table, [
        *write_files(root, in_files("table", table) | {"results.json": results}),
        *drawing.save(root / "figures", "sweep"),
    ]

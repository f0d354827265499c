"""Results of a sweep: a table and JSON, written with the figure."""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from confed.federation.checkpoint import write_atomically
from confed.metrics.resampling import Bootstrap
from confed.metrics.statistics import PairedT, mean
from confed.metrics.stratified import Interval
from confed.metrics.swaps import Swap
from confed.report.figures.annotate import End, at_ends
from confed.report.figures.style import HUES, Drawing, Palette, SeriesStyle, line_style, series_styles, style_axes
from confed.report.stages import Stage, stages
from confed.report.tables.cells import mean_sd_cell
from confed.report.tables.columns import Context, MethodRow, RunColumn, columns_of
from confed.report.tables.control_marks import SIGN
from confed.report.tables.differences import p_cell
from confed.report.tables.relative import improvement_cell
from confed.report.tables.table import Cell, Column, Table, in_files
from confed.results.records import words_of
from confed.results.sweep import Sweep, number_of, read_sweep
from confed.system import format as formats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Figure of a sweep, as figure 6 of FedDAT and of Cao et al. (2025) --------------------------------------------


def sweep_drawing(sweep: Sweep, found: Sequence[Stage]) -> Drawing:
    """Figure of a sweep, by the number of clients where this grows with the values, else by the values.

    Points are means over seeds, thin lines one standard deviation to either side; below each value is its budget of
    rounds. Where the sweep has a line for each value of another setting, the improvement relative to the reference that
    it names stands beside.
    """
    x, names = _places(sweep, found)
    by_clients = names != [stage.value for stage in found]
    ticks = {
        place: f"{name}\n{stage.rounds} round{'' if stage.rounds == '1' else 's'}"
        for place, name, stage in zip(x, names, found, strict=True)
    }
    lines = _lines(sweep, found)
    metric, kind = found[0].comparison.metric, words_of(found[0].measure)
    panels: list[tuple[str, Callable[[Stage, str], Mapping[int, float]]]] = [
        (f"{kind}, test {metric}, %", Stage.values)
    ]
    first = found[0].comparison.references[0]
    if sweep.by and first in sweep.references and any(stage.improvement(m) for stage in found for m, _ in lines):
        words = f"improvement relative to {found[0].comparison.labels[first]}, %"
        if any(stage.no_improvement(method) for stage in found for method, _ in lines):
            words += "\n(no point where it is 0 at a client)"
        panels.append((words, Stage.improvement))

    def draw(figure: "Figure", palette: Palette) -> None:
        every: list[tuple[Axes, list[End]]] = []
        for number, (words, read) in enumerate(panels):
            axes = figure.add_subplot(1, len(panels), number + 1)
            ends: list[End] = []
            for (method, line), series in lines.items():
                line_stages = [(a, stage) for a, stage in zip(x, found, strict=True) if stage.line(sweep.by) == line]
                at = [
                    (a, list(values.values())) for a, stage in line_stages if (values := read(stage, method)) or number
                ]
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


def _places(sweep: Sweep, found: Sequence[Stage]) -> tuple[list[float], list[str]]:
    """Positions and labels of the values on the axis."""
    clients = [float(stage.clients) for stage in found]
    if not sweep.by and len(found) > 1 and clients == sorted(set(clients)):
        return clients, [str(stage.clients) for stage in found]
    values = list(dict.fromkeys(stage.value for stage in found))
    numbers = [number_of(value) for value in values]
    positions = [float(i) if n is None else n for i, n in enumerate(numbers)]
    places = dict(zip(values, range(len(values)) if None in numbers else positions, strict=True))
    return [float(places[stage.value]) for stage in found], [stage.value for stage in found]


def _lines(sweep: Sweep, found: Sequence[Stage]) -> dict[tuple[str, str], SeriesStyle]:
    """Method and value of the other setting -> how their line looks; methods by colour, unless there is only one."""
    methods, others = _styles(found), list(dict.fromkeys(stage.line(sweep.by) for stage in found))
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


def _styles(found: Sequence[Stage]) -> dict[str, SeriesStyle]:
    """Style of each method with values, the same for all values of the setting."""
    firsts = {}
    for stage in reversed(found):
        for m in stage.study.methods:
            if stage.values(m):
                firsts[m] = stage.study.of(m)[0]
    order = dict.fromkeys(method for stage in found for method in stage.study.methods if method in firsts)
    return series_styles(replace(found[0].study, runs=tuple(firsts[method] for method in order)))


def save_sweep_figure(root: Path, sweep: Sweep, found: Sequence[Stage]) -> list[Path]:
    """Export of the figure as PNG and SVG to ``figures/`` of the sweep's folder."""
    drawing = sweep_drawing(sweep, found)
    folder = root / "figures"
    folder.mkdir(exist_ok=True)
    paths = [folder / "sweep.png", folder / "sweep.svg"]
    for path, content in zip(paths, (drawing.png(), drawing.svg()), strict=True):
        path.write_bytes(content)
    return paths


# Results of a sweep: a table and JSON, written with the figure ------------------------------------------------


def sweep_table(sweep: Sweep, found: Sequence[Stage]) -> Table:
    """A section per value, a row per method: mean and standard deviation over seeds, and the paired tests."""
    if not found:
        raise ValueError(f"the sweep over {sweep.over} has no finished run")
    columns = (
        Column(sweep.over, words=True),
        *([Column(sweep.by, words=True)] if sweep.by else []),
        Column("clients"),
        Column("rounds", words=True),
        Column("method", words=True),
        Column("seeds"),
        Column("value", unit="%"),
        Column("difference", unit="points"),
        Column("relative", unit="%"),
        Column("95 % CI", "over seeds", words=True),
        Column("p uncorrected", "over seeds", detail=True),
        Column("p", "over seeds"),
        Column("95 % CI", "over examples", words=True),
        Column("p uncorrected", "over examples", detail=True),
        Column("p", "over examples"),
        *(column.heading for column in _declared(found)),
    )
    items: list[tuple[tuple[Cell, ...], ...]] = []
    for stage in found:
        items.append(
            tuple(
                (*_row(stage, method, sweep.by), *_more(stage, method, found))
                for method in stage.study.methods
                if stage.values(method)
            )
        )
    sections = tuple(items)
    kinds = dict.fromkeys(words_of(stage.measure) for stage in found)
    metric = found[0].comparison.metric
    title = f"{sweep.recipe} by {sweep.over}: test {metric} in % after the last round ({', '.join(kinds)})"
    return Table(title, columns, sections, tuple(_notes(found)))


def _row(stage: Stage, method: str, by: str) -> tuple[Cell, ...]:
    values, d = stage.values(method), stage.differences.get(method)
    shown = mean_sd_cell(list(values.values()))
    if (stage.measure, method) in stage.comparison.blind:
        shown = replace(shown, text=f"{shown.text} {SIGN}")
    start = (
        Cell(stage.value, number_of(stage.value)),
        *([Cell(stage.line(by))] if by else []),
        Cell(str(stage.clients), stage.clients),
        Cell(stage.rounds),
        Cell(stage.comparison.labels[method]),
        Cell(str(len(values)), len(values)),
        shown,
    )
    if d is None:
        reference = method == stage.comparison.references[0]
        return (*start, Cell("reference" if reference else formats.MISSING), *(Cell("") for _ in range(7)))
    t, b = d.over_seeds, d.over_examples
    mark = "*" if d.significant else ""
    mark = ", not tested" if d.refused else mark
    return (
        *start,
        Cell(formats.points(d.points) + mark, 100 * d.points),
        improvement_cell(list(stage.improvement(method).values())),
        _interval(t),
        p_cell(t.p if t else None),
        p_cell(d.seeds_p),
        _interval(b),
        p_cell(d.examples_p_uncorrected),
        p_cell(d.examples_p),
    )


def _declared(found: Sequence[Stage]) -> list[RunColumn]:
    """Columns that :mod:`confed.report.tables.columns` declares for sweeps."""
    rows: list[MethodRow] = []
    for stage in found:
        for m, label in stage.study.labels.items():
            rows.append(MethodRow(label, stage.study.of(m)))
    return columns_of("sweep", Context(rows))


def _more(stage: Stage, method: str, found: Sequence[Stage]) -> list[Cell]:
    runs = [run for run in stage.study.of(method) if run.complete]
    return [column.cells([MethodRow(method, runs)])[0] for column in _declared(found)]


def _interval(test: PairedT | Interval | Bootstrap | Swap | None) -> Cell:
    if test is None or test.low is None or test.high is None:
        return Cell(formats.MISSING)
    return Cell(f"[{formats.points(test.low)}, {formats.points(test.high)}]")


def _notes(found: Sequence[Stage]) -> list[str]:
    references = dict.fromkeys(stage.comparison.labels[stage.comparison.references[0]] for stage in found)
    notes = [
        "Value: mean over clients, then mean ± sd over seeds. Differences are to "
        f"{' or '.join(references)} of the same value, with Holm's correction over all pairs of methods at "
        "all values (a row that the setting does not concern counts at every value, which can only make p-values "
        "larger). Relative: "
        "the improvement as a share of the reference's value, client by client, then the mean over clients.",
        "Round budgets: " + "; ".join(_by_text([(s, s.rounds) for s in found], len(found))) + ".",
    ]
    # Mostly it is the reference that is at 0, so that all methods have the same sentence.
    stage_notes = (
        (stage, {stage.no_improvement(m) for m in stage.study.methods if stage.values(m)}) for stage in found
    )
    notes += [f"{_named(stage)}: {text}" for stage, texts in stage_notes for text in sorted(texts) if text]
    remarks = _remarks(found)
    warnings: list[tuple[Stage, str]] = []
    for stage in found:
        for text in stage.comparison.warnings:
            warnings.append((stage, text))
    gaps = (f"{_named(stage)}: {text}" for stage in found for text in stage.study.failed)
    return [*notes, *remarks, *(f"Warning, {text}" for text in _by_text(warnings, len(found))), *gaps]


def _remarks(found: Sequence[Stage]) -> list[str]:
    """Caveats of the tests, with the values for which they hold unless these are all."""
    of: dict[str, list[Stage]] = {}
    for stage in found:
        for text in dict.fromkeys(stage.comparison.remarks):
            of.setdefault(text, []).append(stage)
    return [
        text if len(stages) == len(found) else f"{'; '.join(map(_named, stages))}: {text}"
        for text, stages in of.items()
    ]


def _by_text(said: Sequence[tuple[Stage, str]], stages: int) -> list[str]:
    """Notes on the values; common ones appear once."""
    count = Counter(text for _, text in said)
    everywhere = [f"at every value: {text}" for text, times in count.items() if times == stages > 1]
    return everywhere + [f"{_named(stage)}: {text}" for stage, text in said if count[text] < stages or stages == 1]


def _named(stage: Stage) -> str:
    """The value and what goes with it, in words."""
    return f"{', '.join(f'{k}={v}' for k, v in stage.point.settings.items())} ({stage.clients} clients)"


def sweep_results(sweep: Sweep, found: Sequence[Stage]) -> dict[str, Any]:
    """Everything for machines: for each value and method the value of every seed, and the tests."""
    return {
        "recipe": sweep.recipe,
        "over": sweep.over,
        "by": sweep.by,
        "points": [
            {
                "settings": dict(stage.point.settings),
                "folder": stage.point.folder,
                "clients": stage.clients,
                "rounds": stage.rounds,
                "measure": stage.measure,
                "reference": stage.comparison.references[0],
                "methods": {
                    method: _method_results(stage, method) for method in stage.study.methods if stage.values(method)
                },
            }
            for stage in found
        ],
    }


def _method_results(stage: Stage, method: str) -> dict[str, Any]:
    values, d = stage.values(method), stage.differences.get(method)
    summary = mean(list(values.values()))
    result: dict[str, Any] = {
        "label": stage.comparison.labels[method],
        "seeds": {str(seed): value for seed, value in values.items()},
        "mean": summary.mean,
        "sd": summary.sd if summary.n > 1 else None,
        "relative": {str(seed): value for seed, value in stage.improvement(method).items()},
    }
    if d is not None:
        result["difference"] = {
            "mean": d.points,
            "seeds_p_uncorrected": d.over_seeds.p if d.over_seeds else None,
            "seeds_p": d.seeds_p,
            "examples_p_uncorrected": d.examples_p_uncorrected,
            "examples_p": d.examples_p,
            "not_tested": d.refused or d.unpaired,
        }
    return result


def write_sweep(root: Path) -> tuple[Table, list[Path]]:
    """Export of a sweep's table (``table.md``, ``.csv``, ``.tex``), figure, and ``results.json``.

    Raises ``ValueError``: no value has a finished run.
    """
    sweep = read_sweep(root)
    stage_list = stages(root, sweep)
    table = sweep_table(sweep, stage_list)
    results = json.dumps(sweep_results(sweep, stage_list), indent=1, ensure_ascii=False)
    paths: list[Path] = []
    for name, text in (in_files("table", table) | {"results.json": results}).items():
        write_atomically(root / name, text.encode())
        paths.append(root / name)
    return table, paths + save_sweep_figure(root, sweep, stage_list)

"""Bar charts of final results per client, and personal against general quality."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from confed.federation.measure import PER_CENT
from confed.metrics.statistics import mean_sd
from confed.report.figures.annotate import at_points
from confed.report.figures.style import (
    GLOBAL,
    LETTERS,
    PERSONAL,
    Drawing,
    Palette,
    SeriesStyle,
    add_legend,
    grid_of,
    line_style,
    series_styles,
    style_axes,
)
from confed.report.figures.values import name_positions
from confed.results.history import judged, nobody_has_own
from confed.results.metric import metric_of
from confed.results.records import Further, further_of
from confed.results.runs import StudyResults
from confed.results.summary import average
from confed.results.views import View

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


MANY_CLIENTS = 12
MANY_METHODS = 6  # with more methods than this clients are shown as rows of points, not as groups of bars

Values = Sequence[tuple[SeriesStyle, Sequence[Mapping[str, float]]]]
"""How something looks, and for each seed client -> value."""


def further_bars(study: StudyResults) -> list[tuple[Further, Drawing]]:
    """Further measures (``run.measures``), each with its results at every client as :func:`bars`."""
    drawings: list[tuple[Further, Drawing]] = []
    for further in further_of(study.runs).values():
        drawing = bars(study, further) if further.view is judged(study) else None
        drawings += [] if drawing is None else [(further, drawing)]
    return drawings


def bars(study: StudyResults, further: Further | None = None) -> Drawing | None:
    """Test results of every client, methods side by side; of many clients a line per method, from worst to best."""

    def read(method: str, view: View) -> Sequence[Mapping[str, float]]:
        summaries = [run.summary for run in study.of(method)]
        if further is not None:
            return [replace(further, view=view).values(summary) for summary in summaries]
        return [summary.values(view) for summary in summaries]

    values = [(series, read(method, judged(study))) for method, series in series_styles(study).items()]
    if study.single:
        method = study.methods[0]
        values = [] if nobody_has_own(study) else [(PERSONAL, read(method, View.PERSONAL))]
        values.append((GLOBAL, read(method, View.SEEN)))
    values = [(series, runs) for series, runs in values if any(runs)]
    if not values or not study.clients:
        return None
    metric = f"test {metric_of(study.runs)}, %"
    if further is not None:
        metric = f"test {further.title}, %" if further.unit == PER_CENT else f"test {further.title}"
    name = f"bars {study.recipe}{'' if further is None else further.name}"
    if len(study.clients) > MANY_CLIENTS:
        return Drawing(
            name, 10.4, 3.6, lambda figure, palette: _ranked(figure.add_subplot(), study, values, metric, palette)
        )
    if len(values) > MANY_METHODS:
        height = grid_of(len(study.clients), 4)[0] * (0.7 + 0.21 * len(values))
        return Drawing(
            name, 10.4, height, lambda figure, palette: _dots(figure, study.clients, values, metric, palette)
        )

    def draw(figure: "Figure", palette: Palette) -> None:
        axes = figure.add_subplot()
        _grouped(axes, study.clients, values, palette)
        style_axes(axes, palette, "", "", metric)
        if further is None or further.unit == PER_CENT:
            axes.set_ylim(0, min(108.0, axes.get_ylim()[1] * 1.04))
        axes.tick_params(axis="x", length=0)
        if not study.single:
            add_legend(axes, palette, ncols=len(values), loc="lower left", bbox_to_anchor=(0, 1))

    return Drawing(name, 10.4, 3.3, draw)


def trade_off(study: StudyResults) -> Drawing | None:
    """Each method as a point: global model on unseen places against the mean of the personal models."""
    points: dict[str, tuple[float | None, float | None]] = {}
    for m in study.methods:
        unseen, personal = (
            study.mean(m, lambda run, of=view: run.summary.headline(of.mean)) for view in (View.UNSEEN, View.PERSONAL)
        )
        points[m] = unseen, personal
    both = {m: (100 * x, 100 * y) for m, (x, y) in points.items() if x is not None and y is not None}
    if len(both) < 2:
        return None
    styles = series_styles(study)
    level: dict[float, list[str]] = {}  # height -> methods without a global model
    for m, (x, y) in points.items():
        if x is None and y is not None:
            level.setdefault(round(100 * y, 1), []).append(m)

    def draw(figure: "Figure", palette: Palette) -> None:
        axes = figure.add_subplot()
        for y, methods in level.items():
            colour = palette(styles[methods[0]].colour)
            axes.axhline(y, color=colour, linewidth=1, linestyle=":")
            axes.annotate(
                f"{', '.join(study.labels[method] for method in methods)} (no global model)",
                (0.99, y), xycoords=("axes fraction", "data"),
                xytext=(0, 5), textcoords="offset points",
                ha="right", color=colour if len(methods) == 1 else palette("ink"), fontsize=LETTERS,
            )  # fmt: skip
        for method, (x, y) in both.items():
            series = styles[method]
            axes.plot([x], [y], series.marker, color=palette(series.colour), markersize=7, label=series.label)
        style_axes(axes, palette, "", "global on unseen, %", "personal mean, %")
        axes.margins(0.14)
        at_points(figure, axes, {method: (styles[method], x, y) for method, (x, y) in both.items()}, palette)

    many = len(both) > MANY_METHODS
    return Drawing(f"trade-off {study.recipe}", 10.4 if many else 5.2, 4.6 if many else 3.4, draw)


def _ranked(axes: "Axes", study: StudyResults, values: Values, metric: str, palette: Palette) -> None:
    """A line per method, its clients from the worst to the best."""
    for series, runs in values:
        averages: list[float | None] = []
        for client in study.clients:
            averages.append(average([run.get(client) for run in runs]))
        ranked = sorted(100 * value for value in averages if value is not None)
        axes.plot(range(1, len(ranked) + 1), ranked, **line_style(series, palette))
    style_axes(axes, palette, "", "clients, from the worst to the best", metric)
    add_legend(axes, palette, ncols=2)


def _dots(figure: "Figure", clients: Sequence[str], values: Values, metric: str, palette: Palette) -> None:
    """A panel per client: methods as rows, the mean as a point, the standard deviation as a line."""
    lines, columns = grid_of(len(clients), 4)
    rows = range(len(values), 0, -1)
    for i, client in enumerate(clients):
        axes = figure.add_subplot(lines, columns, i + 1)
        for row, (series, runs) in zip(rows, values, strict=True):
            seeds = [100 * run[client] for run in runs if client in run]
            if seeds:
                middle, sd = mean_sd(seeds)
                colour = palette(series.colour)
                axes.plot([middle - sd, middle + sd], [row, row], color=colour, linewidth=1.4, alpha=0.6)
                axes.plot([middle], [row], series.marker, color=colour, markersize=5, label=series.label)
        style_axes(axes, palette, client, metric, "", across=True)
        name_positions(axes.yaxis, rows, [series.label if i % columns == 0 else "" for series, _ in values])
        axes.set_ylim(0.4, len(values) + 0.6)
        axes.margins(x=0.08)


def _grouped(axes: "Axes", clients: Sequence[str], values: Values, palette: Palette) -> None:
    """Bars in groups, one group per client."""
    width = min(0.26, 0.84 / len(values))
    for i, (series, runs) in enumerate(values):
        bars: dict[float, float] = {}
        for j, client in enumerate(clients):
            seeds = [100 * run[client] for run in runs if client in run]
            if not seeds:
                continue
            x = j + (i - (len(values) - 1) / 2) * width
            height, spread = mean_sd(seeds)
            bars[x] = height
            if spread:
                axes.errorbar(x, height, spread, color=palette("ink"), linewidth=0.9, capsize=1.8, capthick=0.9)
            if len(values) * len(clients) <= 32:
                axes.annotate(
                    f"{height:.0f}", (x, height + spread), xytext=(0, 2), textcoords="offset points", ha="center",
                    fontsize=LETTERS, color=palette("muted"),
                )  # fmt: skip
        colour = palette(series.colour)
        axes.bar(list(bars), list(bars.values()), 0.9 * width, color=colour, alpha=0.9, label=series.label)
    name_positions(axes.xaxis, range(len(clients)), clients)

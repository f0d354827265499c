"""Figures of a study's results: learning curves, bars per client, and personal against general quality."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from confed.federation.measure import PER_CENT
from confed.metrics.statistics import mean_sd
from confed.report.figures.style import (
    GLOBAL,
    LETTERS,
    PERSONAL,
    Drawing,
    End,
    Palette,
    SeriesStyle,
    add_legend,
    at_ends,
    at_points,
    grid_of,
    line_style,
    name_positions,
    series_styles,
    style_axes,
    whole_rounds,
)
from confed.results.history import (
    Curve,
    curve,
    curve_metric,
    evaluations,
    judged,
    judged_curve,
    judged_words,
    loss,
    nobody_has_own,
    of_place,
    over_seeds,
    seconds_until,
    sent_until,
    validation_loss,
)
from confed.results.metric import metric_of
from confed.results.records import Further, further_of
from confed.results.runs import RunResults, StudyResults
from confed.results.summary import average
from confed.results.views import View

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Learning curves by round, by bytes sent and by time ----------------------------------------------------------


MANY_CLIENTS = 12
# With more methods than this there are no bands around lines, and clients are rows of points and not groups of bars.
MANY_METHODS = 6


@dataclass(frozen=True)
class Line:
    """A line of a panel, with the edges of a band around it or without."""

    series: SeriesStyle
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True)
class Panel:
    """One system of axes, which has names for what is across and what is upwards."""

    title: str
    x: str
    y: str
    lines: list[Line] = field(default_factory=list[Line])


def _deviation(values: Sequence[float]) -> tuple[float, float]:
    middle, sd = mean_sd(values)
    return middle - sd, middle + sd


def mean_line(
    series: SeriesStyle,
    curves: Sequence[Curve],
    scale: float = 100,
    band: Callable[[Sequence[float]], tuple[float, float]] | None = None,
) -> list[Line]:
    """Mean over seeds by round, with a band of what is asked for; nothing without any round."""
    rounds = sorted(set(chain.from_iterable(curves)))
    if not rounds:
        return []
    at: list[list[float]] = []
    for r in rounds:
        at.append([scale * curve[r] for curve in curves if r in curve])
    heights = [sum(values) / len(values) for values in at]
    if band is None or len(curves) < 2:
        return [Line(series, rounds, heights)]
    low, high = zip(*map(band, at), strict=True)
    return [Line(series, rounds, heights, low, high)]


def _drawing(
    study: StudyResults,
    name: str,
    panels: Sequence[Panel],
    columns: int,
    size: tuple[float, float],
    share: bool = False,
) -> Drawing:
    """Panels of lines, whose names stand at their ends unless a legend has them; ``size`` is that of a line."""
    lines = -(-len(panels) // columns)

    def draw(figure: "Figure", palette: Palette) -> None:
        every: list[tuple[Axes, list[End]]] = []
        for i, panel in enumerate(panels):
            axes = figure.add_subplot(lines, columns, i + 1, sharey=every[0][0] if every and share else None)
            for line in panel.lines:
                axes.plot(line.x, line.y, **line_style(line.series, palette, 3))
                if line.high:
                    colour = palette(line.series.colour)
                    axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.14, linewidth=0)
            style_axes(axes, palette, panel.title, panel.x, panel.y if i % columns == 0 else "")
            if panel.x == "round":
                whole_rounds(axes)
            every.append((axes, [(line.series, line.x[-1], line.y[-1]) for line in panel.lines]))
        if not study.single:
            at_ends(figure, every, palette)

    return Drawing(f"{name} {study.recipe}", size[0], size[1] * lines, draw)


def _band(study: StudyResults) -> Callable[[Sequence[float]], tuple[float, float]] | None:
    return (lambda values: (min(values), max(values))) if len(study.methods) <= MANY_METHODS else None


_PANELS: Sequence[tuple[str, Callable[[RunResults], Curve], bool, SeriesStyle]] = (
    ("deployed at each client", partial(curve, view="deployed"), True, GLOBAL),
    ("personal models", partial(curve, view="personal"), True, PERSONAL),
    ("global model, seen", partial(curve, view="global"), True, GLOBAL),
    ("global model, unseen", partial(curve, view="unseen"), True, GLOBAL),
    ("training loss", loss, False, PERSONAL),
    ("validation loss", validation_loss, False, PERSONAL),
)
"""Title, values of a run, whether they are fractions, and how a run on its own looks."""


def curves(study: StudyResults) -> Drawing | None:
    """Means by round: personal models, global model on seen and on unseen places, losses."""
    styles, panels = series_styles(study), list[Panel]()
    # A run's deployed model is among the others, and without models of the clients' own theirs is the global one.
    without = {"deployed at each client": study.single, "personal models": nobody_has_own(study)}
    for title, read, fractions, alone in _PANELS:
        curves_of = {method: list(map(read, study.of(method))) for method in study.methods}
        if without.get(title) or not any(len(curve) > 1 for curve in chain.from_iterable(curves_of.values())):
            continue
        panel = Panel(title, "round", f"{curve_metric(study)}, %" if fractions else "")
        for method, runs in curves_of.items():
            series = alone if study.single else styles[method]
            panel.lines.extend(mean_line(series, runs, 100 if fractions else 1, _band(study)))
        panels.append(panel)
    if not panels:
        return None
    columns, height = (len(panels), 2.9) if study.single else (2, 3.3)
    return _drawing(study, "curves", panels, columns, (10.4, height))


def client_curves(study: StudyResults) -> Drawing | None:
    """One panel per client: its personal (or deployed) models by round; in a single run also the global model."""
    if not 1 < len(study.clients) <= MANY_CLIENTS:
        return None
    if not any(len(evaluations(run, "personal")) > 1 for run in study.runs):
        return None
    styles, panels = series_styles(study), list[Panel]()
    views = {judged(study).value: None}
    if study.single:
        views = {"personal": GLOBAL} if nobody_has_own(study) else {"personal": PERSONAL, "global": GLOBAL}
    for client in study.clients:
        panel = Panel(client, "round", f"{metric_of(study.runs)}, %")
        for method in study.methods:
            for view, alone in views.items():
                of_client = [of_place(evaluations(run, view), client) for run in study.of(method)]
                panel.lines.extend(mean_line(alone or styles[method], of_client, 100, _band(study)))
        panels.append(panel)
    columns, height = (4, 2.5) if study.single else (2, 3.1)
    return _drawing(study, "clients", panels, min(columns, len(panels)), (10.4, height), share=True)


def judged_curves(study: StudyResults) -> dict[str, list[Curve]]:
    """Federated method -> one curve per seed: round -> mean over clients on validation data, a fraction."""
    curves_of: dict[str, list[Curve]] = {}
    for method in study.methods:
        runs = [judged_curve(study, run) for run in study.of(method)]
        if not study.of(method)[0].summary.is_bound and any(len(curve) > 1 for curve in runs):
            curves_of[method] = runs
    return curves_of


def convergence(study: StudyResults) -> Drawing | None:
    """Convergence curves (FedDAT's figure 5): mean validation result of the deployed models, by round."""
    curves_of = judged_curves(study)
    if study.single or judged(study) != "deployed" or not curves_of:
        return None
    panel = Panel("", "round", f"deployed, mean over clients, validation {metric_of(study.runs)}, %")
    styles = series_styles(study)
    for method, runs in curves_of.items():
        panel.lines.extend(mean_line(styles[method], runs, 100, _deviation))
    return _drawing(study, "convergence", [panel], 1, (6.4, 4.2))


def spending(study: StudyResults) -> Drawing | None:
    """Mean personal (or deployed) validation results against megabytes sent and against seconds of training so far."""
    y = f"{judged_words(study)} mean, {curve_metric(study)}, %"
    panels = [
        Panel("against traffic", "sent so far, MB", y, _against(study, sent_until, 1e-6)),
        Panel("against time", "training time so far, s", y, _against(study, seconds_until, 1.0)),
    ]
    panels = [panel for panel in panels if panel.lines]
    return _drawing(study, "spending", panels, len(panels), (5.2 * len(panels), 3.6)) if panels else None


def _against(study: StudyResults, spent: Callable[[RunResults], Curve], unit: float) -> list[Line]:
    """What each method had reached against what it had spent, after each evaluated round; mean over seeds."""
    styles, lines = series_styles(study), list[Line]()
    for method in study.methods:
        if study.of(method)[0].summary.is_bound:
            continue
        results = over_seeds([judged_curve(study, run) for run in study.of(method)])
        amounts = over_seeds([spent(run) for run in study.of(method)])
        both = [r for r in results if r in amounts]
        if len(both) > 1 and amounts[both[-1]]:
            lines.append(Line(styles[method], [unit * amounts[r] for r in both], [100 * results[r] for r in both]))
    # Methods that send next to nothing (training alone) say nothing about traffic.
    most = max((line.x[-1] for line in lines), default=0.0)
    return [line for line in lines if line.x[-1] > 1e-3 * most]


# Bar charts of final results per client, and personal against general quality ---------------------------------


Results = Sequence[tuple[SeriesStyle, Sequence[Mapping[str, float]]]]
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


def _ranked(axes: "Axes", study: StudyResults, values: Results, metric: str, palette: Palette) -> None:
    """A line per method, its clients from the worst to the best."""
    for series, runs in values:
        averages: list[float | None] = []
        for client in study.clients:
            averages.append(average([run.get(client) for run in runs]))
        ranked = sorted(100 * value for value in averages if value is not None)
        axes.plot(range(1, len(ranked) + 1), ranked, **line_style(series, palette))
    style_axes(axes, palette, "", "clients, from the worst to the best", metric)
    add_legend(axes, palette, ncols=2)


def _dots(figure: "Figure", clients: Sequence[str], values: Results, metric: str, palette: Palette) -> None:
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


def _grouped(axes: "Axes", clients: Sequence[str], values: Results, palette: Palette) -> None:
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

"""Learning curves by round, by bytes sent and by time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from confed.metrics.statistics import mean_sd
from confed.report.figures.annotate import End, at_ends
from confed.report.figures.style import (
    GLOBAL,
    PERSONAL,
    Drawing,
    Palette,
    SeriesStyle,
    line_style,
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
from confed.results.runs import RunResults, StudyResults

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


MANY_CLIENTS = 12
MANY_METHODS = 6  # with more methods than this there are no bands around lines, which would hide one another


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

"""Learning curves by round, by bytes sent and by time."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

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
MANY_METHODS = 6
"""With more methods than this there are no bands around lines, which would hide one another."""

Panel = tuple[str, Callable[[RunResults], Curve], bool, SeriesStyle]
"""Title, values of a run, whether they are fractions, and how a run on its own looks."""

_PANELS: Sequence[Panel] = (
    ("deployed at each client", lambda run: curve(run, "deployed"), True, GLOBAL),
    ("personal models", lambda run: curve(run, "personal"), True, PERSONAL),
    ("global model, seen", lambda run: curve(run, "global"), True, GLOBAL),
    ("global model, unseen", lambda run: curve(run, "unseen"), True, GLOBAL),
    ("training loss", loss, False, PERSONAL),
    ("validation loss", validation_loss, False, PERSONAL),
)


def curves(study: StudyResults) -> Drawing | None:
    """Means by round: personal models, global model on seen and on unseen places, losses."""
    # A run's deployed model is among the others, and without models of the clients' own theirs is the global one.
    without = [panel for panel, left in zip(_PANELS, (study.single, nobody_has_own(study)), strict=False) if left]
    panels = [panel for panel in _PANELS if panel not in without]
    data = []
    for panel in panels:
        data.append((panel, {m: [panel[1](run) for run in study.of(m)] for m in study.methods}))
    data = [entry for entry in data if any(len(curve) > 1 for runs in entry[1].values() for curve in runs)]
    if not data:
        return None
    styles, bands = series_styles(study), len(study.methods) <= MANY_METHODS
    columns = len(data) if study.single else 2
    lines = -(-len(data) // columns)

    def draw(figure: "Figure", palette: Palette) -> None:
        every = [figure.add_subplot(lines, columns, i + 1) for i in range(len(data))]
        ends = [
            [
                (styles[method], *end)
                for method, runs in methods.items()
                if (
                    end := _line(
                        axes, runs, series if study.single else styles[method], 100 if panel_part else 1, bands, palette
                    )
                )
            ]
            for axes, ((_, _, panel_part, series), methods) in zip(every, data, strict=True)
        ]
        for i, (axes, ((title, _, panel_part, _), _)) in enumerate(zip(every, data, strict=True)):
            style_axes(
                axes, palette, title, "round", f"{curve_metric(study)}, %" if panel_part and i % columns == 0 else ""
            )
            whole_rounds(axes)
        if not study.single:
            at_ends(figure, list(zip(every, ends, strict=True)), palette)

    return Drawing(f"curves {study.recipe}", 10.4, 2.9 if study.single else 3.3 * lines, draw)


def client_curves(study: StudyResults) -> Drawing | None:
    """One panel per client: its personal (or deployed) models by round; in a single run also the global model."""
    if not 1 < len(study.clients) <= MANY_CLIENTS:
        return None
    if not any(len(evaluations(run, "personal")) > 1 for run in study.runs):
        return None
    view = "personal" if study.single else judged(study)
    columns = min(4 if study.single else 2, len(study.clients))
    lines = -(-len(study.clients) // columns)
    styles, bands = series_styles(study), len(study.methods) <= MANY_METHODS

    def draw(figure: "Figure", palette: Palette) -> None:
        every: list[Axes] = []
        ends: list[list[End]] = []
        for i, client in enumerate(study.clients):
            axes = figure.add_subplot(lines, columns, i + 1, sharey=every[0] if every else None)
            every.append(axes)
            ends.append([])
            for method in study.methods:
                client_curves_of = [of_place(evaluations(run, view), client) for run in study.of(method)]
                alone = GLOBAL if nobody_has_own(study) else PERSONAL
                end = _line(axes, client_curves_of, alone if study.single else styles[method], 100, bands, palette)
                ends[-1] += [(styles[method], *end)] if end else []
                if study.single and not nobody_has_own(study):
                    shared = [of_place(evaluations(run, "global"), client) for run in study.of(method)]
                    _line(axes, shared, GLOBAL, 100, bands, palette)
            style_axes(axes, palette, client, "round", f"{metric_of(study.runs)}, %" if i % columns == 0 else "")
            whole_rounds(axes)
        if not study.single:
            at_ends(figure, list(zip(every, ends, strict=True)), palette)

    return Drawing(f"clients {study.recipe}", 10.4, (2.5 if study.single else 3.1) * lines, draw)


def spending(study: StudyResults) -> Drawing | None:
    """Mean personal (or deployed) validation results against megabytes sent and against seconds of training so far."""
    panels = [
        ("against traffic", "sent so far, MB", 1e-6, _against(study, sent_until)),
        ("against time", "training time so far, s", 1.0, _against(study, seconds_until)),
    ]
    panels = [panel for panel in panels if panel[3]]
    if not panels:
        return None
    styles = series_styles(study)

    def draw(figure: "Figure", palette: Palette) -> None:
        every: list[Axes] = []
        ends: list[list[End]] = []
        for i, (title, words, unit, data) in enumerate(panels):
            axes = figure.add_subplot(1, len(panels), i + 1)
            for method, (x, y) in data.items():
                axes.plot(
                    [unit * value for value in x],
                    [100 * value for value in y],
                    **line_style(styles[method], palette, 3),
                )
            style_axes(
                axes, palette, title, words, "" if i else f"{judged_words(study)} mean, {curve_metric(study)}, %"
            )
            every.append(axes)
            ends.append([(styles[method], unit * x[-1], 100 * y[-1]) for method, (x, y) in data.items()])
        if not study.single:
            at_ends(figure, list(zip(every, ends, strict=True)), palette)

    return Drawing(f"spending {study.recipe}", 10.4 if len(panels) > 1 else 5.2, 3.6, draw)


def _against(
    study: StudyResults, spent: Callable[[RunResults], Curve]
) -> Mapping[str, tuple[Sequence[float], Sequence[float]]]:
    """Method -> what it had spent, and what it had reached, after each evaluated round; mean over seeds."""
    lines: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
    for method in study.methods:
        if study.of(method)[0].summary.is_bound:
            continue
        results = over_seeds([judged_curve(study, run) for run in study.of(method)])
        amounts = over_seeds([spent(run) for run in study.of(method)])
        both = [r for r in results if r in amounts]
        if len(both) > 1 and amounts[both[-1]]:
            lines[method] = [amounts[r] for r in both], [results[r] for r in both]
    # Methods that send next to nothing (training alone) say nothing about traffic.
    most = max((x[-1] for x, _ in lines.values()), default=0.0)
    return {method: curve for method, curve in lines.items() if curve[0][-1] > 1e-3 * most}


def _line(
    axes: "Axes", runs: Sequence[Curve], series: SeriesStyle, scale: float, bands: bool, palette: Palette
) -> tuple[float, float] | None:
    """Mean over seeds, with a band from the lowest to the highest if asked for; returns the last point."""
    rounds = sorted(set(chain.from_iterable(runs)))
    if not rounds:
        return None
    at: list[list[float]] = []
    for r in rounds:
        at.append([scale * curve[r] for curve in runs if r in curve])
    heights = [sum(x) / len(x) for x in at]
    axes.plot(rounds, heights, **line_style(series, palette, 3))
    if len(runs) > 1 and bands:
        low, high = [min(x) for x in at], [max(x) for x in at]
        axes.fill_between(rounds, low, high, color=palette(series.colour), alpha=0.14, linewidth=0)
    return rounds[-1], heights[-1]

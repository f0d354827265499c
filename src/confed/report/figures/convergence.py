"""Convergence curves (FedDAT's figure 5): mean validation result of the deployed models, by round."""

from typing import TYPE_CHECKING

from confed.metrics.statistics import mean_sd
from confed.report.figures.annotate import End, at_ends
from confed.report.figures.style import Drawing, Palette, line_style, series_styles, style_axes, whole_rounds
from confed.results.history import Curve, judged, judged_curve
from confed.results.metric import metric_of
from confed.results.runs import StudyResults

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def series(study: StudyResults) -> dict[str, list[Curve]]:
    """Method -> one curve per seed: round -> mean over clients on validation data, a fraction."""
    chosen = [m for m in study.methods if not study.of(m)[0].summary.is_bound]
    found = {}
    for m in chosen:
        found[m] = [judged_curve(study, run) for run in study.of(m)]
    result = {}
    for m, curves in found.items():
        if any(len(curve) > 1 for curve in curves):
            result[m] = curves
    return result


def drawing(study: StudyResults) -> Drawing | None:
    """The curves, lines being means over seeds and bands one standard deviation to either side.

    None where methods deploy nothing but personal models (which the other curves show) or there is nothing to draw.
    """
    if study.single or judged(study) != "deployed":
        return None
    data = series(study)
    if not data:
        return None
    styles = series_styles(study)

    def draw(figure: "Figure", palette: Palette) -> None:
        axes = figure.add_subplot()
        ends: list[End] = []
        for method, curves in data.items():
            rounds = sorted(set[int]().union(*curves))
            at: list[list[float]] = []
            for r in rounds:
                at.append([100 * curve[r] for curve in curves if r in curve])
            middle, spread = zip(*map(mean_sd, at), strict=True)
            axes.plot(rounds, middle, **line_style(styles[method], palette, 3))
            if any(spread):
                low, high = ([m + sign * s for m, s in zip(middle, spread, strict=True)] for sign in (-1, 1))
                axes.fill_between(rounds, low, high, color=palette(styles[method].colour), alpha=0.14, linewidth=0)
            ends.append((styles[method], rounds[-1], middle[-1]))
        style_axes(axes, palette, "", "round", f"deployed, mean over clients, validation {metric_of(study.runs)}, %")
        whole_rounds(axes)
        at_ends(figure, [(axes, ends)], palette)

    return Drawing(f"convergence {study.recipe}", 6.4, 4.2, draw)

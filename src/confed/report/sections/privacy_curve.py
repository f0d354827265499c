"""Report section on accuracy against epsilon, for noise on the activations of split learning."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from confed.comparison.records import distinct_labels
from confed.metrics.statistics import mean_sd
from confed.privacy.accountant import available, epsilon, releases_of
from confed.report.figures.style import (
    HUES,
    Drawing,
    Palette,
    SeriesStyle,
    add_legend,
    line_style,
    plain_log_scale,
    style_axes,
)
from confed.report.html import page
from confed.report.section import Section
from confed.report.tables.cells import mean_sd_cell
from confed.report.tables.table import Cell, Column, pivot, to_html
from confed.results.runs import RunResults, StudyResults
from confed.results.summary import number
from confed.results.views import View

if TYPE_CHECKING:
    from matplotlib.figure import Figure


DELTA = 1e-5


@dataclass(frozen=True)
class Point:
    """Runs with the same noise; epsilon is infinite without a guarantee, accuracies are fractions, one per seed."""

    row: str
    epsilon: float
    accuracies: tuple[float, ...]


def curves(study: StudyResults, delta: float = DELTA) -> dict[str, list[Point]]:
    """The rows of split learning that differ in clipping and noise, by curve and rising epsilon of a client's rows."""
    points_of: dict[str, list[Point]] = {}
    labels: dict[str, str] = {}
    curve_of: dict[str, str] = {}
    for row in study.methods:
        runs = study.of(row)
        headlines = (run.summary.headline(View.SEEN.mean) for run in runs)
        accuracies = [accuracy for accuracy in headlines if accuracy is not None]
        if not _rows_up(runs[0]) or not accuracies:
            continue
        curve = curve_of.setdefault(_fixed(runs[0]), row)
        labels.setdefault(curve, runs[0].summary.label or str(runs[0].recipe.get("algorithm", {}).get("name", "")))
        points_of.setdefault(curve, []).append(Point(row, _epsilon(runs[0], delta), tuple(accuracies)))
    names = distinct_labels(labels)
    return {names[curve]: sorted(points, key=lambda point: point.epsilon) for curve, points in points_of.items()}


def accuracy_against_epsilon(study: StudyResults, delta: float = DELTA) -> Drawing | None:
    """Accuracy of the global model against a finite epsilon, a line per method; dotted without noise."""
    if not _noised(study) or not available():
        return None
    points_of = curves(study, delta)
    lines: dict[str, list[Point]] = {}
    for name, points in points_of.items():
        if finite := [point for point in points if math.isfinite(point.epsilon)]:
            lines[name] = finite
    if not lines:
        return None
    metric = f"test {study.runs[0].summary.metric} of the global model, %"

    def draw(figure: "Figure", palette: Palette) -> None:
        axes = figure.add_subplot()
        for hue, (name, points) in enumerate(lines.items()):
            series = SeriesStyle(name, f"m{hue % HUES + 1}")
            x, moments = [p.epsilon for p in points], 100 * np.array([mean_sd(p.accuracies) for p in points])
            axes.errorbar(x, moments[:, 0], moments[:, 1], capsize=2, **line_style(series, palette, 5))
            for free in points_of[name]:
                if math.isinf(free.epsilon):
                    height = 100 * mean_sd(free.accuracies)[0]
                    axes.axhline(height, color=palette(series.colour), linewidth=1, linestyle=":")
        plain_log_scale(axes, "x", lambda x: f"{x:.3g}" if x < 100 else f"{x:,.0f}")
        axes.set_xticks(sorted({point.epsilon for point in chain.from_iterable(lines.values())}))
        words = f"ε of all rows that a client sends (δ = {delta:g}), dotted: no guarantee"
        style_axes(axes, palette, "", words, metric)
        add_legend(axes, palette)

    return Drawing(f"accuracy-epsilon {study.recipe}", 5.2, 3.4, draw)


def section(study: StudyResults, delta: float = DELTA) -> str:
    """Accuracy against epsilon as a drawing and a table; nothing where no row is noised."""
    if not _noised(study):
        return ""
    if not available():
        return page.paragraph(
            "Rows are noised; what that guarantees is computed by dp-accounting, which is not installed "
            "(pip install '.[privacy]' -c constraints.txt)."
        )
    text = (
        f"ε at δ = {delta:g} of all rows that one client sends in the run: where one of its examples may be replaced "
        "by any other, and given the weights of its part, which are trained on raw data and have no guarantee "
        "themselves."
    )
    columns = (
        Column("method", words=True, read=lambda point: study.labels[point.row]),
        Column("ε", read=lambda point: Cell("∞") if math.isinf(point.epsilon) else point.epsilon, form="{:.3g}".format),
        Column("global", "test, %", "%", read=lambda point: mean_sd_cell(point.accuracies)),
    )
    drawing = accuracy_against_epsilon(study, delta)
    title = "Accuracy against the privacy budget epsilon"
    html = page.paragraph(text, "muted") + (page.figure(drawing.inline(), title=title) if drawing else "")
    points = chain.from_iterable(curves(study, delta).values())
    return html + to_html(pivot("Accuracy against epsilon", columns, points))


def _privacy(run: RunResults) -> Mapping[str, Any]:
    return run.recipe.get("algorithm", {}).get("privacy") or {}


def _fixed(run: RunResults) -> str:
    """Common settings of all rows of a curve."""
    method = {**run.recipe.get("algorithm", {}), "privacy": bool(_privacy(run).get("distinct"))}
    return json.dumps(
        [method, *(run.recipe.get(section_name) for section_name in ("model", "task", "data"))], default=str
    )


def _noised(study: StudyResults) -> bool:
    return any(_rows_up(run) and (number(_privacy(run).get("noise")) or 0) > 0 for run in study.runs)


def _epsilon(run: RunResults, delta: float) -> float:
    """Epsilon of a run's rows."""
    noise = number(_privacy(run).get("noise")) or 0.0
    if run.summary.traits.gradients_up:  # they tell of the labels
        noise = min(noise, number(_privacy(run).get("gradient_noise")) or 0.0)
    epochs = int(run.recipe["run"]["rounds"]) * int(run.recipe["local"]["epochs"])
    return epsilon(noise, releases_of(epochs, _rows_up(run)), delta)


def _rows_up(run: RunResults) -> int:
    """Kinds of rows that go up per example and step: v_MHA and v_APN of BiCSL; h and the gradient of z."""
    return run.summary.traits.rows_up


SECTIONS = (
    Section("privacy", "Accuracy against privacy", 140, lambda page: section(page.study),
            figures={"accuracy-by-epsilon": accuracy_against_epsilon}),
)  # fmt: skip

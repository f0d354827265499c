"""Report section on accuracy and cost by the number of answers FedP³ compares (figure 8.4 of FedVQA).

Drawn for a study whose FedP³ rows differ in ``top_n`` only. The paper counts the cost of N compared answers as N²
and that of plain knowledge preserving as C, the number of answers; beside it stands what was measured: the time of
a training step above that of the FedAvg row.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from confed.metrics.statistics import mean_sd
from confed.report.figures.style import Drawing, Palette, style_axes
from confed.report.html import page
from confed.results.runs import RunResults, StudyResults
from confed.results.settings import differing_keys
from confed.results.summary import average, number
from confed.results.views import View

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Point:
    """One row of the figure.

    Attributes:
        count: the paper's count, N² or C; None for FedAvg.
        personal: mean over clients of the personal models, in % per seed.
        unseen: mean over unseen places of the global model, in % per seed.
        extra: milliseconds per step above FedAvg's, per seed; empty where they were not measured.
    """

    method: str
    count: int | None
    personal: tuple[float, ...]
    unseen: tuple[float, ...]
    extra: tuple[float, ...]


def points(study: StudyResults) -> list[Point]:
    """FedP³'s rows by N, then plain knowledge preserving (``st``), then FedAvg; none if the study has no such rows."""
    traits = {method: study.of(method)[0].summary.traits for method in study.methods}
    averaging = [m for m, its in traits.items() if its.reference == 1]
    filtered = [m for m, its in traits.items() if its.answers_compared == "filtered"]
    filtered = [m for m in filtered if _algorithm(study, m).get("pairs", "filtered") == "filtered"]
    others = []
    for m in filtered:
        others.append({k: v for k, v in _algorithm(study, m).items() if k != "top_n"})
    sizes = [_algorithm(study, m).get("top_n") for m in filtered]
    if len(set(sizes)) < 2 or any(other != others[0] for other in others):
        return []
    first, *further = (study.of(m)[0] for m in filtered)
    if any(differing_keys(run, first) for run in further):
        return []
    plain = averaging[0] if averaging else None
    rows = [
        _point(study, method, int(size or 0) ** 2, plain)
        for size, method in sorted(zip(sizes, filtered, strict=True), key=lambda pair: pair[0] or 0)
    ]
    answers = _answers(study)
    if answers:
        rows += [
            _point(study, method, answers, plain) for method, its in traits.items() if its.answers_compared == "all"
        ]
    return rows + ([_point(study, plain, None, None)] if plain else [])


def drawing(study: StudyResults) -> Drawing | None:
    """The figure; None if the study has no rows that differ in ``top_n``."""
    filter_points = points(study)
    if not filter_points:
        return None
    return Drawing(
        f"filter size {study.recipe}", 10.4, 3.1, lambda figure, palette: _draw(figure, study, filter_points, palette)
    )


def section(study: StudyResults) -> str:
    """The figure for a report; nothing if the study has no rows that differ in ``top_n``."""
    figure = drawing(study)
    if figure is None:
        return ""
    text = (
        "The filter keeps N answers per example. The paper counts N² comparisons for FedP³ and the number of answers "
        "for knowledge preserving by a Kullback-Leibler divergence (KL). Measured: time of a training step above "
        "that of FedAvg, the teacher's pass included, with whatever else the machine was doing."
    )
    return page.paragraph(text, "muted") + page.figure(
        figure.inline(), title="Accuracy and cost against the number of compared answers"
    )


def _draw(figure: "Figure", study: StudyResults, found: Sequence[Point], palette: Palette) -> None:
    """Personal, unseen and measured cost against the paper's count."""
    panels = [
        ("personal models", "personal", "test accuracy, %"),
        ("global model, unseen places", "unseen", ""),
        ("measured", "extra", "ms per step above FedAvg"),
    ]
    panels = [panel for panel in panels if any(getattr(point, panel[1]) for point in found)]
    for i, (title, key, label) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), i + 1)
        _panel(axes, study, found, key, palette)
        if i == 0:
            figure.legend(
                loc="outside lower center", ncols=len(found), frameon=False, fontsize=8.5, labelcolor=palette("ink")
            )
        style_axes(axes, palette, title, "counted comparisons: N², or all answers", label)


def _panel(axes: "Axes", study: StudyResults, found: Sequence[Point], key: str, palette: Palette) -> None:
    """One quantity: FedP³'s rows as a line, knowledge preserving as diamonds, FedAvg as a dashed line."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    colours = [palette(name) for name in ("m1", "m2", "m0")]
    values = {p.method: mean_sd(getattr(p, key)) for p in found if getattr(p, key)}
    line = [p for p in found if p.count is not None and p.method in values and _is_filtered(study, p.method)]
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    style: dict[str, Any] = {"capsize": 2, "elinewidth": 0.9}
    if line:
        means, deviations = zip(*(values[p.method] for p in line), strict=True)
        counts = [p.count or 1 for p in line]
        label = f"FedP³, N = {', '.join(str(math.isqrt(count)) for count in counts)}"
        axes.errorbar(
            counts, means, deviations, color=colours[0], marker="o", markersize=4, linewidth=1.8, label=label, **style
        )
    for p in found:
        if p.method not in values or p in line:
            continue
        mean, deviation = values[p.method]
        label = study.labels[p.method]
        if p.count is None:
            axes.axhline(mean, color=colours[2], linewidth=1.2, linestyle="--", label=label)
        else:
            marker: dict[str, Any] = {"color": colours[1], "marker": "D", "markersize": 6, "linestyle": ""}
            axes.errorbar([p.count], [mean], [deviation], label=label, **marker, **style)
    axes.margins(0.08, 0.2)


def _is_filtered(study: StudyResults, method: str) -> bool:
    return study.of(method)[0].summary.traits.answers_compared == "filtered"


def _point(study: StudyResults, method: str, count: int | None, plain: str | None) -> Point:
    runs = [run for run in study.of(method) if run.complete]
    return Point(
        method,
        count,
        tuple(100 * v for run in runs if (v := run.summary.headline(View.PERSONAL.mean)) is not None),
        tuple(100 * v for run in runs if (v := run.summary.headline(View.UNSEEN.mean)) is not None),
        tuple(v for run in runs if plain and (v := _extra(run, study.of(plain))) is not None),
    )


def _extra(run: RunResults, plain: Sequence[RunResults]) -> float | None:
    """Milliseconds per step with the term, above the FedAvg run with the same seed."""
    other = next((r for r in plain if r.seed == run.seed), None)
    # A run's first round is slower (memory, caches), and the term begins later in any case.
    first = 1 + max(1, int(run.recipe.get("algorithm", {}).get("start_round", 1)))
    mine, theirs = (_step_seconds(r, first) for r in (run, other))
    return None if mine is None or theirs is None else 1000 * (mine - theirs)


def _step_seconds(run: RunResults | None, first: int) -> float | None:
    """Median over rounds, counted from 1, of a round's time divided by the optimiser steps of all clients."""
    if run is None:
        return None
    local, examples = run.recipe.get("local", {}), run.summary.examples
    size, epochs = int(local.get("batch_size", 32)), int(local.get("epochs", 1))
    steps = epochs * sum(math.ceil(sizes.get("train", 0) / size) for sizes in examples.values())
    last = run.summary.rounds
    times = [number(line.get("seconds")) for line in run.timings if first <= int(line.get("round", 0)) <= last]
    measured = [seconds for seconds in times if seconds is not None]
    return statistics.median(measured) / steps if measured and steps else None


def _answers(study: StudyResults) -> int | None:
    """The number of answers, which runs with a filter leave in their gallery."""
    answer_counts: list[float | None] = []
    for run in study.runs:
        for s in run.gallery():
            if "forgotten" in s:
                answer_counts.append(number(s.get("forgotten", {}).get("of")))
    mean = average(answer_counts)
    return None if mean is None else round(mean)


def _algorithm(study: StudyResults, method: str) -> Mapping[str, Any]:
    return study.of(method)[0].recipe.get("algorithm", {})

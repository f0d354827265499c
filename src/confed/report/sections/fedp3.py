"""Report sections on FedP³'s filter: accuracy and cost by the answers it compares, and the answers that it picks.

The first is figure 8.4 of FedVQA, drawn for a study whose rows differ in ``top_n`` only. The paper counts the cost of N
compared answers as N² and that of plain knowledge preserving as C, the number of answers; beside it stands what was
measured: the time of a training step above that of the FedAvg row.

The second is figure 8.5. For training questions of every client, the client's last local model is the student and the
final global model the teacher. Shown are the answers with the largest r, the softmax of the filter's scores (Eqs. 8.11
and 8.12).
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from confed.metrics.statistics import mean_sd
from confed.report.figures.style import LETTERS, Drawing, Palette, plain_log_scale, style_axes
from confed.report.html import page
from confed.report.html.media import ImageStore
from confed.report.html.page import Tabs
from confed.report.section import Section
from confed.results.runs import RunResults, StudyResults
from confed.results.settings import differing_keys
from confed.results.summary import average, number
from confed.results.views import View

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Accuracy and cost by the number of answers compared ----------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """One row of the figure: the paper's count, N² or C, and values in % or ms per seed."""

    method: str
    count: int | None
    personal: tuple[float, ...]
    unseen: tuple[float, ...]
    extra: tuple[float, ...]
    filtered: bool


def points(study: StudyResults) -> list[Point]:
    """FedP³'s rows by N, then plain knowledge preserving (``st``), then FedAvg; none if the study has no such rows."""
    traits = {method: study.of(method)[0].summary.traits for method in study.methods}
    plain = next((method for method, its in traits.items() if its.reference == 1), None)
    sizes: dict[str, Any] = {}
    others: list[dict[str, Any]] = []
    for method, its in traits.items():
        settings = study.of(method)[0].recipe.get("algorithm", {})
        if its.answers_compared == "filtered" and settings.get("pairs", "filtered") == "filtered":
            sizes[method] = settings.get("top_n")
            others.append({key: value for key, value in settings.items() if key != "top_n"})
    if len(set(sizes.values())) < 2 or any(other != others[0] for other in others):
        return []
    first, *further = (study.of(method)[0] for method in sizes)
    if any(differing_keys(run, first) for run in further):
        return []
    counts: dict[str, int | None] = {m: int(sizes[m] or 0) ** 2 for m in sorted(sizes, key=lambda m: sizes[m] or 0)}
    if answers := _answers(study):
        counts |= {method: answers for method, its in traits.items() if its.answers_compared == "all"}
    counts |= {} if plain is None else {plain: None}
    return [_point(study, method, count, plain) for method, count in counts.items()]


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


def _draw(figure: "Figure", study: StudyResults, shown: Sequence[Point], palette: Palette) -> None:
    """Personal, unseen and measured cost against the paper's count."""
    panels = [
        ("personal models", "personal", "test accuracy, %"),
        ("global model, unseen places", "unseen", ""),
        ("measured", "extra", "ms per step above FedAvg"),
    ]
    panels = [panel for panel in panels if any(map(attrgetter(panel[1]), shown))]
    for i, (title, key, label) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), i + 1)
        _panel(axes, study, shown, key, palette)
        if i == 0:
            figure.legend(
                loc="outside lower center", ncols=len(shown), frameon=False, fontsize=LETTERS, labelcolor=palette("ink")
            )
        style_axes(axes, palette, title, "counted comparisons: N², or all answers", label)


def _panel(axes: "Axes", study: StudyResults, shown: Sequence[Point], key: str, palette: Palette) -> None:
    """One quantity: FedP³'s rows as a line, knowledge preserving as diamonds, FedAvg as a dashed line."""
    values = {p.method: mean_sd(getattr(p, key)) for p in shown if getattr(p, key)}
    line = [p for p in shown if p.count is not None and p.method in values and p.filtered]
    plain_log_scale(axes, "x", lambda x: f"{x:,.0f}")
    style: dict[str, Any] = {"capsize": 2, "elinewidth": 0.9}
    if line:
        means, deviations = zip(*(values[p.method] for p in line), strict=True)
        counts = [p.count or 1 for p in line]
        label = f"FedP³, N = {', '.join(str(math.isqrt(count)) for count in counts)}"
        look: dict[str, Any] = {"color": palette("m1"), "marker": "o", "markersize": 4, "linewidth": 1.8}
        axes.errorbar(counts, means, deviations, label=label, **look, **style)
    for p in shown:
        if p.method not in values or p in line:
            continue
        mean, deviation = values[p.method]
        label = study.labels[p.method]
        if p.count is None:
            axes.axhline(mean, color=palette("m0"), linewidth=1.2, linestyle="--", label=label)
        else:
            look = {"color": palette("m2"), "marker": "D", "markersize": 6, "linestyle": ""}
            axes.errorbar([p.count], [mean], [deviation], label=label, **look, **style)
    axes.margins(0.08, 0.2)


def _point(study: StudyResults, method: str, count: int | None, plain: str | None) -> Point:
    runs = [run for run in study.of(method) if run.complete]
    averaging = {} if plain is None else {run.seed: run for run in study.of(plain)}

    def percent(view: View) -> tuple[float, ...]:
        means = (run.summary.headline(view.mean) for run in runs)
        return tuple(100 * mean for mean in means if mean is not None)

    extra = (_extra(run, averaging.get(run.seed)) for run in runs)
    return Point(
        method,
        count,
        percent(View.PERSONAL),
        percent(View.UNSEEN),
        tuple(value for value in extra if value is not None),
        study.of(method)[0].summary.traits.answers_compared == "filtered",
    )


def _extra(run: RunResults, averaging: RunResults | None) -> float | None:
    """Milliseconds per step with the term, above the FedAvg run with the same seed."""
    # A run's first round is slower (memory, caches), and the term begins later in any case.
    first = 1 + max(1, int(run.recipe.get("algorithm", {}).get("start_round", 1)))
    with_term, without = _step_seconds(run, first), _step_seconds(averaging, first)
    return None if with_term is None or without is None else 1000 * (with_term - without)


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
    counts: list[float | None] = []
    for run in study.runs:
        counts += [number(sample["forgotten"].get("of")) for sample in _samples(run.gallery())]
    mean = average(counts)
    return None if mean is None else round(mean)


# Answers that the filter picks --------------------------------------------------------------------------------

_FORMULAS: Mapping[str, str] = {
    "gain": "log p_T − log(H_T/H_S) · log p_S, Eq. 8.12",
    "diff": "log p_T − log p_S, Eq. 8.11",
    "p_t": "log p_T",
    "p_s": "log p_S",
}


def picked_answers(study: StudyResults, tabs: Tabs, store: ImageStore) -> str:
    """Cards of training questions, one tab per method that has a filter, the last in front; nothing without any."""
    panels: list[tuple[str, str]] = []
    for method in study.methods:
        samples = next(filter(None, (_samples(run.gallery()) for run in study.of(method))), [])
        if samples:
            formula = _FORMULAS.get(str(samples[0]["forgotten"].get("filter")), "")
            cards = "".join(_card(sample, store) for sample in samples)
            text = page.paragraph(f"r = softmax({formula}) over all answers.", "muted") if formula else ""
            panels.append((study.labels[method], f"{text}<div class=cards>{cards}</div>"))
    text = (
        "Training questions of every client, with the answers that the filter ranks first as the most easily "
        "forgotten: r is the filter's distribution, T the final global model (teacher), S the client's last local "
        "model (student). Percentages are probabilities over all answers."
    )
    return tabs(panels, len(panels) - 1, text, "")


def _samples(gallery: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [sample for sample in gallery if isinstance(sample.get("forgotten"), Mapping)]


def _card(sample: Mapping[str, Any], store: ImageStore) -> str:
    """A question, with each answer's r as a bar and what the models think of it."""
    answers: list[dict[str, str]] = []
    for entry in sample["forgotten"].get("answers") or ():
        if isinstance(entry, Mapping):
            shares = {name: number(entry.get(name)) or 0.0 for name in ("r", "teacher", "student")}
            shown = {name: _percent(share) for name, share in shares.items()}
            answers.append({"answer": str(entry.get("answer", "")), "width": f"{100 * shares['r']:.1f}", **shown})
    texts = {name: str(sample.get(name, "")) for name in ("place", "type", "question")}
    card = {**texts, "picture": store.add(sample.get("image")), "truth": str(sample.get("answer", ""))}
    return page.component("filtered", {**card, "answers": answers}, template="gallery")


def _percent(share: float) -> str:
    """A probability; small ones keep their first digit, for the filter often picks improbable answers."""
    value = 100 * share
    text = f"{value:.1f} %" if value >= 0.1 else f"{value:.1g} %"
    text = text if value >= 1e-3 else "≈ 0"
    return text.replace(" ", "\N{NO-BREAK SPACE}")


SECTIONS = (
    Section("filter", "Answers compared, and their cost", 170, lambda page: section(page.study),
            figures={"filter-size": drawing}),
    Section("forgotten", "Answers that the filter picks", 200,
            lambda page: picked_answers(page.study, page.tabs, page.store)),
)  # fmt: skip

"""Figures of multi-label runs: average precision by label frequency, and co-occurrence of labels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from confed.report.figures.style import (
    LETTERS,
    Drawing,
    Palette,
    SeriesStyle,
    add_colour_bar,
    add_legend,
    plain_log_scale,
    series_styles,
    style_axes,
)
from confed.report.figures.values import name_positions
from confed.results.runs import RunResults, StudyResults
from confed.results.summary import average, mapping, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


NAMED = 100
"""Up to this many labels each has a point and a name; of more, groups of neighbours have."""

GROUPS = 40


@dataclass(frozen=True)
class LabelScores:
    """Average precision of each label, (C,), those most frequent in training first; NaN without test examples."""

    labels: tuple[str, ...]
    train: np.ndarray
    chance: np.ndarray
    values: Mapping[str, np.ndarray]


def label_scores(study: StudyResults) -> LabelScores | None:
    """The labels' average precision in the view that each run is judged by; None without any."""
    runs = [run for run in study.runs if run.complete and _rows(run)]
    if not runs:
        return None
    first = _rows(runs[0])
    order = sorted(range(len(first)), key=lambda i: -_count(first[i]))
    names = tuple(str(first[i]["label"]) for i in order)
    examples = runs[0].summary.label_value("examples") or 1.0
    values: dict[str, np.ndarray] = {}
    for method in study.methods:
        tables = [_precisions(run) for run in runs if run.method == method]
        if tables:
            values[method] = np.array([_mean(tables, name) for name in names])
    return LabelScores(
        names,
        np.array([_count(first[i]) for i in order]),
        np.array([(number(first[i].get("positives")) or 0.0) / examples for i in order]),
        values,
    )


def precision_by_label(study: StudyResults) -> Drawing | None:
    """Average precision of each label, frequent labels on the left, above the number of their training examples."""
    scores = label_scores(study)
    if scores is None or len(scores.labels) < 2:
        return None
    groups = _groups(len(scores.labels))
    many = len(groups) < len(scores.labels)
    styles: Mapping[str, SeriesStyle] = series_styles(study)

    def draw(figure: "Figure", palette: Palette) -> None:
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        x = range(len(groups))
        chance = [100 * float(np.mean(scores.chance[g])) for g in groups]
        upper.step(
            x, chance, where="mid", color=palette("m0"), linewidth=1, linestyle=":", label="the same score for all"
        )
        for method, values in scores.values.items():
            series = styles[method]
            heights = [100 * float(np.nanmean(values[g])) if np.isfinite(values[g]).any() else np.nan for g in groups]
            upper.plot(
                x, heights, series.marker, color=palette(series.colour), markersize=4.2, label=series.label, zorder=3
            )
            upper.plot(x, heights, color=palette(series.colour), linewidth=0.7, alpha=0.35)
        lower.bar(x, [float(np.mean(scores.train[g])) for g in groups], color=palette("m0"), width=0.75)
        style_axes(upper, palette, "", "", "average precision, %")
        style_axes(lower, palette, "", _below(len(scores.labels), many), "in training")
        if _wide(scores.train):
            plain_log_scale(lower, "y", lambda value: f"{value:,.0f}".replace(",", " "))
        upper.set_ylim(bottom=0)
        upper.tick_params(axis="x", length=0, labelbottom=False)
        lower.set_xlim(-0.8, len(groups) - 0.2)
        names = [] if many else [_short(name) for name in scores.labels]
        name_positions(lower.xaxis, range(len(names)), names, rotation=90, fontsize=LETTERS if len(names) <= 36 else 6)
        columns = min(6, len(scores.values) + 1)
        add_legend(upper, palette, ncols=columns, loc="lower left", bbox_to_anchor=(0, 1))

    return Drawing(f"labels {study.recipe}", 10.4, 4.2 if many else 4.9, draw)


def shares(counts: Sequence[Sequence[float]]) -> np.ndarray:
    """Conditional frequency of labels: share of examples with the row's label that have the column's, (K, K)."""
    table = np.asarray(counts, dtype=np.float64)
    label_counts = table.diagonal().copy()
    shares_of = np.divide(
        table, label_counts[:, None], out=np.full_like(table, np.nan), where=label_counts[:, None] > 0
    )
    np.fill_diagonal(shares_of, np.nan)
    return shares_of


def co_occurrence(run: RunResults) -> Mapping[str, Any] | None:
    """Co-occurrence counts in a run's summary; None if there is nothing, or no pair."""
    matrix = mapping(run.summary.labelled.get("co_occurrence"))
    return matrix if len(matrix.get("labels", ())) > 1 else None


def co_occurrence_figure(label: str, matrix: Mapping[str, Any], name: str) -> Drawing:
    """Two heat maps side by side: which labels go together by the truth, and by what a model predicts."""
    labels = [_short(str(text)) for text in matrix["labels"]]
    maps = [("by the true labels", shares(matrix["truth"])), (f"as {label} predicts", shares(matrix["predicted"]))]
    every = np.concatenate([values[np.isfinite(values)] for _, values in maps])
    most = max(float(every.max(initial=0.0)), 0.05)

    def draw(figure: "Figure", palette: Palette) -> None:
        import matplotlib as mpl

        # Maps are stored as pixels, which no page can colour: a grey that suits light and dark ones.
        colours = mpl.colormaps["Blues"].with_extremes(bad=(0.5, 0.5, 0.5, 0.3))
        both: list[Axes] = list(figure.subplots(1, 2))
        image: Any = None
        for axes, (title, values) in zip(both, maps, strict=True):
            image = axes.imshow(100 * values, cmap=colours, vmin=0, vmax=100 * most, interpolation="nearest")
            style_axes(axes, palette, title, "… has this one too", "an example with this label …")
            axes.grid(visible=False)
            axes.set_xticks(range(len(labels)), labels, rotation=90)
            axes.set_yticks(range(len(labels)), labels)
            axes.tick_params(labelsize=LETTERS if len(labels) <= 20 else 6, length=0)
            axes.spines["bottom"].set_visible(False)
        add_colour_bar(figure, image, both, palette, "share of examples, %")

    return Drawing(name, 10.4, 5.2, draw, shaded=True)


def co_occurrence_of(study: StudyResults) -> Drawing | None:
    """For a file: of the study's first run that has counts; with ``--methods``, of that row."""
    panels = [(run.label, matrix) for run in study.runs if run.complete and (matrix := co_occurrence(run))]
    return co_occurrence_figure(*panels[0], name=f"together {study.recipe}") if panels else None


def _rows(run: RunResults) -> Sequence[Mapping[str, Any]]:
    return run.summary.labelled.get("per_class", ())


def _mean(tables: Sequence[Mapping[str, float | None]], label: str) -> float:
    mean = average([table.get(label) for table in tables])
    return np.nan if mean is None else mean


def _precisions(run: RunResults) -> dict[str, float | None]:
    """Label -> its average precision."""
    return {str(row["label"]): number(row.get("AP")) for row in _rows(run)}


def _count(row: Mapping[str, Any]) -> float:
    train = number(row.get("train"))
    return (number(row.get("positives")) or 0.0) if train is None else train


def _groups(labels: int) -> list[np.ndarray]:
    """Labels that share a point: each its own, or neighbours by frequency."""
    return np.array_split(np.arange(labels), labels if labels <= NAMED else GROUPS)


def _below(labels: int, many: bool) -> str:
    words = f"{labels} labels, the most frequent in training on the left"
    return f"{words}; a point is the mean over about {labels // GROUPS} neighbours" if many else words


def _wide(counts: np.ndarray) -> bool:
    positive = counts[counts > 0]
    return bool(len(positive)) and float(positive.max()) > 30 * float(positive.min())


def _short(name: str) -> str:
    return name if len(name) <= 22 else f"{name[:21]}…"

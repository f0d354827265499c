"""Sections of multi-label runs and studies: average precision by label frequency, co-occurrence of labels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from confed.report.figures.style import (
    LETTERS,
    Drawing,
    Palette,
    SeriesStyle,
    add_colour_bar,
    add_legend,
    name_positions,
    plain_log_scale,
    series_styles,
    style_axes,
)
from confed.report.html import page
from confed.report.html.gallery import gallery
from confed.report.html.page import Tabs
from confed.report.section import Kind, Section
from confed.report.sections.general import NOT_ENDED, labelled, tiles_of
from confed.report.tables.cells import finished, percent_cell
from confed.report.tables.methods import label_tables
from confed.report.tables.table import Cell, Column, pivot, to_html, wide_html
from confed.results.runs import RunResults, StudyResults
from confed.results.summary import Summary, average, mapping, number
from confed.system import format as formats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Figures ------------------------------------------------------------------------------------------------------

NAMED = 100  # up to this many labels each has a point and a name; of more, groups of neighbours have

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
        tables: list[dict[str, float | None]] = []
        for run in runs:
            if run.method == method:
                tables.append({str(row["label"]): number(row.get("AP")) for row in _rows(run)})
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
    labels = len(scores.labels)
    groups = np.array_split(np.arange(labels), labels if labels <= NAMED else GROUPS)
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
        positive = scores.train[scores.train > 0]
        if len(positive) and float(positive.max()) > 30 * float(positive.min()):
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


def _count(row: Mapping[str, Any]) -> float:
    train = number(row.get("train"))
    return (number(row.get("positives")) or 0.0) if train is None else train


def _below(labels: int, many: bool) -> str:
    words = f"{labels} labels, the most frequent in training on the left"
    return f"{words}; a point is the mean over about {labels // GROUPS} neighbours" if many else words


def _short(name: str) -> str:
    return name if len(name) <= 22 else f"{name[:21]}…"


# Sections -----------------------------------------------------------------------------------------------------

LISTED = 200  # up to this many labels are listed one by one

GLOSSARY: Mapping[str, str] = {
    "label": "Something that an example may have or lack, such as a thing in a picture; it may have any number.",
    "AP": "Average precision: sort the test examples by the score of a label; at every example that has the label, the "
    "share of those so far that have it; the mean of these. 100 % means that all that have it come first; a score that "
    "is the same for all gets the share of examples that have it.",
    "P, R, F1": "Precision: the share of predicted labels that are there. Recall: the share of labels that are there "
    "which are predicted. F1 is their harmonic mean. A label is predicted where its probability reaches the threshold.",
    "C-, O-": "C: the mean over labels, so that rare labels count as much as frequent ones. O: over all pairs of "
    "example and label together, so that frequent labels count most.",
    "example_f1": "Each test example's F1 over its labels, mean over a client's examples: defined for every client, "
    "however few examples it has.",
    "C-AP-binned": "C-AP from counts at 200 thresholds, which add up over clients while a run trains; results after "
    "the last round are exact.",
}


def unit(study: StudyResults) -> str:
    """Plural name of the examples: "pictures" or "texts"; "examples" where unknown."""
    samples = next((gallery for run in study.runs if (gallery := run.gallery())), [])
    kinds = {"texts" if "text" in sample else "pictures" for sample in samples if {"text", "image"} & set(sample)}
    return next(iter(kinds)) if len(kinds) == 1 else "examples"


def tiles(study: StudyResults) -> str:
    """The key figures of a run on its own."""
    words = {
        "C-AP": "average precision, mean over labels (%)", "C-F1": "F1 of precision and recall over labels (%)",
        "O-AP": "average precision, all pairs together (%)", "O-F1": "F1, all pairs together (%)",
    }  # fmt: skip
    read = study.runs[0].summary.label_value
    return tiles_of(study, [(formats.percent(read(metric)), f"{metric}: {text}") for metric, text in words.items()])


def results(study: StudyResults, tabs: Tabs) -> str:
    """The eight columns; the same for coarse labels, clients' own models and unseen places where there are such."""
    if not any(run.complete for run in study.runs):
        return NOT_ENDED
    methods: list[tuple[str, list[Summary]]] = []
    for method, runs in finished(study).items():
        methods.append((study.labels[method], [run.summary for run in runs]))
    titles = {"table": "labels", "table-coarse": "coarse labels", "table-personal": "clients' own models",
              "table-unseen": "unseen places", "table-top3": "top 3", "table-flair": "as FLAIR counts"}  # fmt: skip
    panels: list[tuple[str, str]] = []
    for key, table in label_tables(methods, cost=True, every=True).items():
        panels.append((titles[key], page.paragraph(f"{table.title}.", "muted") + wide_html(table)))
    return tabs(panels) + _places(study)


def labels(study: StudyResults) -> str:
    """Average precision label by label, and of frequent, middling and rare labels."""
    drawing, scores = precision_by_label(study), label_scores(study)
    if drawing is None or scores is None:
        return ""
    text = (
        "Frequent labels are learned first; what a method does for rare ones is seen on the right. Dotted: what a "
        "score that is the same for all examples gets, that is, the share of test examples with the label. A label "
        "without any test example has no point."
    )
    text += " Mean over seeds." if len(study.seeds) > 1 else ""
    title = "Average precision of each label, from frequent to rare"
    html = page.paragraph(text, "muted") + page.figure(drawing.inline(), title=title) + _thirds(study, scores)
    return html + (page.details("Every label", _every(study, scores)) if len(scores.labels) <= LISTED else "")


def pairs(study: StudyResults, tabs: Tabs) -> str:
    """Heat maps of which labels go together, one tab per method."""
    panels: list[tuple[str, str]] = []
    for method, label in study.labels.items():
        first = next((run for run in study.of(method) if run.complete), None)
        matrix = None if first is None else co_occurrence(first)
        if matrix is not None:
            drawing = co_occurrence_figure(label, matrix, f"together {study.recipe} {method}")
            panels.append((label, page.figure(drawing.inline(), _difference(matrix))))
    text = (
        "Of the test examples that have the row's label, the share that has the column's too; on the right the same of "
        "predicted labels. Where the two look alike, the model has learned which labels go together. Grey: the "
        "diagonal, and rows of labels that are never predicted."
    )
    return tabs(panels, about=text + (" Of the first seed." if len(study.seeds) > 1 else ""))


def _places(study: StudyResults) -> str:
    """C-AP of every unseen place, where there are several."""
    names = dict.fromkeys(chain.from_iterable(run.summary.labelled for run in study.runs))
    views = [name for name in names if name.startswith("unseen/")]
    if len(views) < 2:
        return ""
    rows: list[tuple[str, list[float | None]]] = []
    for method, label in study.labels.items():
        rows.append(
            (label, [study.mean(method, lambda run, of=view: run.summary.label_value("C-AP", of)) for view in views])
        )
    title = "<h3>The global model where nobody trained</h3>"
    return title + page.paragraph("C-AP in %, place by place.", "muted") + page.heatmap(
        "method", [view.partition("/")[2] for view in views], rows, by_column=True
    )  # fmt: skip


def _thirds(study: StudyResults, scores: LabelScores) -> str:
    """Means over the third of labels that is most frequent, the middle one, and the rarest."""
    scored_labels = np.flatnonzero(np.any([np.isfinite(values) for values in scores.values.values()], axis=0))
    if len(scored_labels) < 6:
        return ""
    columns = [Column("method", words=True, read=study.labels.__getitem__)]
    thirds = np.array_split(scored_labels, 3)
    for name, label_rows in zip(("frequent", "middling", "rare"), thirds, strict=True):
        train = scores.train[label_rows]

        def mean(method: str, of: np.ndarray = label_rows) -> Cell:
            return percent_cell(float(np.nanmean(scores.values[method][of])))

        title = f"{len(label_rows)} labels, {train.max():.0f} to {train.min():.0f}"
        columns.append(Column(title, name, "%", read=mean))
    bounds = [method for method in scores.values if study.of(method)[0].summary.is_bound]
    ranked = [method for method in scores.values if method not in bounds]
    note = "Average precision in %, mean over labels; the numbers are training examples with the label, of all clients."
    title = "Labels by how often they occur in training"
    table = pivot(title, columns, ranked, *([bounds] if bounds else []), notes=(note,))
    return f"<h3>Frequent and rare labels</h3>{to_html(table)}"


def _every(study: StudyResults, scores: LabelScores) -> str:
    columns = [study.labels[m] for m in scores.values]
    rows: list[tuple[str, list[float | None]]] = []
    for i, (name, count) in enumerate(zip(scores.labels, scores.train, strict=True)):
        values = [float(values[i]) for values in scores.values.values()]
        rows.append((f"{name} ({int(count)})", [None if np.isnan(value) else value for value in values]))
    return page.heatmap("label (in training)", columns, rows)


def _difference(matrix: Mapping[str, Sequence[Sequence[float]]]) -> str:
    """Difference between the two maps, in a sentence."""
    truth, predicted = shares(matrix["truth"]), shares(matrix["predicted"])
    both = np.isfinite(truth) & np.isfinite(predicted)
    never = int((np.asarray(matrix["predicted"]).diagonal() == 0).sum())
    lines = [f"The {len(truth)} labels that are most frequent in training."]
    if both.any():
        apart = 100 * float(np.abs(truth - predicted)[both].mean())
        lines.append(f"Where both are known, they differ by {apart:.1f} points, mean over entries.")
    if never:
        lines.append(f"Never predicted: {never} of them.")
    return " ".join(lines)


def _measured(study: StudyResults) -> str:
    del study
    return (
        "What is measured after the last round is how well the labels of test examples are told: by how a model "
        "sorts the examples (AP), and by which labels it predicts (P, R, F1)."
    )


SECTIONS = (
    Section("results", "Results", 10, lambda page: tiles(page.study) + results(page.study, page.tabs), labelled),
    Section("labels", "Labels, from frequent to rare", 80, lambda page: labels(page.study),
            figures={"average-precision-by-label": precision_by_label}),
    Section("together", "Labels that go together", 90, lambda page: pairs(page.study, page.tabs),
            figures={"labels-together": co_occurrence_of}),
    Section("gallery", "Sample examples", 190,
            lambda page: gallery(page.study, page.tabs, page.store, labels=True), labelled),
)  # fmt: skip

KINDS = (
    Kind(
        labelled,
        unit,
        _measured,
        model="model that gives every example any number of labels",
        stays="",
        metric="C-AP",
        titles={"types": "Kinds of example", "gallery": "Sample {things}"},
        glossary=GLOSSARY,
        not_in_glossary=("ECE",),
    ),
)

"""Report sections of multi-label runs and studies."""

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np

from confed.report.figures.labels import (
    LabelScores,
    co_occurrence,
    co_occurrence_figure,
    label_scores,
    precision_by_label,
    shares,
)
from confed.report.html import page
from confed.report.html.page import Tabs
from confed.report.tables.labels import label_tables
from confed.report.tables.table import Cell, Column, Table, to_html
from confed.results.runs import StudyResults
from confed.system import format as formats

LISTED = 200
"""Up to this many labels are listed one by one."""

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


def labelled(study: StudyResults) -> bool:
    """Whether a study is about examples with several labels."""
    return any(run.summary.is_labelled for run in study.runs)


def unit(study: StudyResults) -> str:
    """Plural name of the examples: "pictures" or "texts"; "examples" where unknown."""
    samples = next((gallery for run in study.runs if (gallery := run.gallery())), [])
    kinds = {"texts" if "text" in sample else "pictures" for sample in samples if {"text", "image"} & set(sample)}
    return next(iter(kinds)) if len(kinds) == 1 else "examples"


def models_differ(study: StudyResults) -> bool:
    """Whether rows have other models, such as learned label embeddings in the place of fixed ones."""
    sections = [study.of(method)[0].recipe.get("model", {}) for method in study.methods]
    return any(section != sections[0] for section in sections)


def tiles(study: StudyResults) -> str:
    """The key figures of a run on its own."""
    if not study.single or not study.runs[0].complete:
        return ""
    summary = study.runs[0].summary
    words = {
        "C-AP": "average precision, mean over labels (%)", "C-F1": "F1 of precision and recall over labels (%)",
        "O-AP": "average precision, all pairs together (%)", "O-F1": "F1, all pairs together (%)",
    }  # fmt: skip
    tile_rows = [(formats.percent(summary.label_value(metric)), f"{metric}: {text}") for metric, text in words.items()]
    tile_rows.append((formats.size(summary.cost("bytes_total")), "sent in all"))
    tile_rows.append((formats.duration(summary.cost("seconds")), "wall time"))
    return page.tiles(tile_rows)


def results(study: StudyResults, tabs: Tabs) -> str:
    """The eight columns; the same for coarse labels, clients' own models and unseen places where there are such."""
    if not any(run.complete for run in study.runs):
        return page.paragraph("No run has come to its end, so there are no test results yet.")
    names = study.labels
    methods = []
    for m in study.methods:
        methods.append((names[m], [run.summary for run in study.of(m) if run.complete]))
    titles = {"table": "labels", "table-coarse": "coarse labels", "table-personal": "clients' own models",
              "table-unseen": "unseen places", "table-top3": "top 3", "table-flair": "as FLAIR counts"}  # fmt: skip
    panels = [
        (titles[key], page.paragraph(f"{table.title}.", "muted") + f'<div class="wide dense">{to_html(table)}</div>')
        for key, table in label_tables(methods, cost=True, every=True).items()
    ]
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
    if len(study.seeds) > 1:
        text += " Mean over seeds."
    html = (
        page.paragraph(text, "muted")
        + page.figure(drawing.inline(), title="Average precision of each label, from frequent to rare")
        + _thirds(study, scores)
    )
    return html + (page.details("Every label", _every(study, scores)) if len(scores.labels) <= LISTED else "")


def pairs(study: StudyResults, tabs: Tabs) -> str:
    """Heat maps of which labels go together, one tab per method."""
    panels: list[tuple[str, str]] = []
    for method in study.methods:
        runs = [run for run in study.of(method) if run.complete]
        matrix = co_occurrence(runs[0]) if runs else None
        if matrix is None:
            continue
        label = study.labels[method]
        drawing = co_occurrence_figure(label, matrix, f"together {study.recipe} {method}")
        panels.append((label, page.figure(drawing.inline(), _difference(matrix))))
    if not panels:
        return ""
    text = (
        "Of the test examples that have the row's label, the share that has the column's too; on the right the same of "
        "predicted labels. Where the two look alike, the model has learned which labels go together. Grey: the "
        "diagonal, and rows of labels that are never predicted."
    )
    if len(study.seeds) > 1:
        text += " Of the first seed."
    return page.paragraph(text, "muted") + tabs(panels)


def _places(study: StudyResults) -> str:
    """C-AP of every unseen place, where there are several."""
    names = study.labels
    sections = chain.from_iterable(run.summary.labelled for run in study.runs)
    views = [name for name in dict.fromkeys(sections) if name.startswith("unseen/")]
    if len(views) < 2:
        return ""
    rows: list[tuple[str, list[float | None]]] = []
    for method in study.methods:
        values = [study.mean(method, lambda run, v=view: run.summary.label_value("C-AP", v)) for view in views]
        rows.append((names[method], values))
    title = "<h3>The global model where nobody trained</h3>"
    return title + page.paragraph("C-AP in %, place by place.", "muted") + page.heatmap(
        "method", [view.partition("/")[2] for view in views], rows, by_column=True
    )  # fmt: skip


def _thirds(study: StudyResults, found: LabelScores) -> str:
    """Means over the third of labels that is most frequent, the middle one, and the rarest."""
    scored_labels = np.flatnonzero(np.any([np.isfinite(values) for values in found.values.values()], axis=0))
    if len(scored_labels) < 6:
        return ""
    parts = np.array_split(scored_labels, 3)
    columns = (
        Column("method", words=True),
        *(
            Column(
                f"{len(label_rows)} labels, {found.train[label_rows].max():.0f} to {found.train[label_rows].min():.0f}",
                name,
                "%",
            )
            for name, label_rows in zip(("frequent", "middling", "rare"), parts, strict=True)
        ),
    )
    names = {m: study.labels[m] for m in found.values}
    values = {m: [float(np.nanmean(row[label_rows])) for label_rows in parts] for m, row in found.values.items()}
    ranked = [m for m in values if not study.of(m)[0].summary.is_bound]

    def row(method: str) -> tuple[Cell, ...]:
        return (Cell(names[method]), *(Cell(formats.percent(value), 100 * value) for value in values[method]))

    bounds = tuple(row(m) for m in values if m not in ranked)
    note = "Average precision in %, mean over labels; the numbers are training examples with the label, of all clients."
    table = Table(
        "Labels by how often they occur in training",
        columns,
        (tuple(map(row, ranked)), *((bounds,) if bounds else ())),
        (note,),
    )
    return f"<h3>Frequent and rare labels</h3>{to_html(table)}"


def _every(study: StudyResults, found: LabelScores) -> str:
    columns = [study.labels[m] for m in found.values]
    tables = list(found.values.values())
    rows: list[tuple[str, list[float | None]]] = []
    for i, (name, count) in enumerate(zip(found.labels, found.train, strict=True)):
        rows.append((f"{name} ({int(count)})", [None if np.isnan(t[i]) else float(t[i]) for t in tables]))
    return page.heatmap("label (in training)", columns, rows)


def _difference(found: Mapping[str, Sequence[Sequence[float]]]) -> str:
    """Difference between the two maps, in a sentence."""
    truth, predicted = shares(found["truth"]), shares(found["predicted"])
    both = np.isfinite(truth) & np.isfinite(predicted)
    never = int((np.asarray(found["predicted"]).diagonal() == 0).sum())
    words = f"The {len(truth)} labels that are most frequent in training"
    lines = [f"{words}."]
    if both.any():
        apart = 100 * float(np.abs(truth - predicted)[both].mean())
        lines.append(f"Where both are known, they differ by {apart:.1f} points, mean over entries.")
    if never:
        lines.append(f"Never predicted: {never} of them.")
    return " ".join(lines)

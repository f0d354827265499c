"""Tables of multi-label runs: means over labels and overall, of global and personal models.

Values are those of all test examples of a view together (:mod:`confed.runs.evaluate`), mean and standard
deviation over seeds. The main table has each method's own view: the global model on all clients' examples, or on unseen
places where clients have no test examples, or the clients' own models where a method gives nothing else.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from confed.report.tables.cells import missing_sites_note, of_recipe, over_seeds, summaries_of, uneven_note
from confed.report.tables.columns import Context, RunColumn, columns_of, in_order, method_row, method_table
from confed.report.tables.table import Table
from confed.results.summary import LABEL_METRICS, Summary
from confed.system import format as formats

SENTENCES_OF_VIEWS: Mapping[str, str] = {
    "": "the model that each method is judged by",
    "global": "the global model on all clients' test examples",
    "unseen": "the global model on unseen places",
    "personal": "clients' own models, each on its own test examples",
}
"""View -> what it is; the empty one is each run's headline."""

LEVELS: Mapping[str, str] = {
    "coarse": "coarse labels",
    "top3": "at most three labels per example",
    "flair": "as FLAIR's benchmark counts",
}
"""Level -> what it is: other labels, or another way to count."""


def label_table(
    methods: Sequence[tuple[str, Sequence[Summary]]], view: str = "", level: str = "", *, cost: bool = False
) -> Table:
    """One view of a study's methods."""
    rows = in_order([method_row(label, runs) for label, runs in methods])
    columns = [
        RunColumn(
            metric,
            lambda run, m=metric: run.summary.label_value(m, view, level),
            group=LEVELS.get(level, ""),
            measure=f"{view} C-AP".strip() if metric == "C-AP" and view != "global" else "",
        )
        for metric in LABEL_METRICS
    ]
    columns += columns_of("labels", Context(rows))
    columns += columns_of("labels and cost", Context(rows)) if cost else []
    bounds = [row.label for row in rows if row.bound]
    return method_table(_title(methods, view, level), rows, columns, _notes(methods, view, bounds, level))


def without_positives(shown: Sequence[tuple[Summary, Mapping[str, Any]]]) -> list[str]:
    """Note on the number of classes without positive test examples; nothing if there are none."""
    notes: dict[str, None] = {}
    for summary, scores in shown:
        empty = int(scores.get("without_positives", 0))
        if not empty:
            continue
        classes = int(scores.get("classes", 0))
        of = f" of {classes}" if classes else ""
        text = f"{empty}{of} classes have no positive test example"
        if summary.labelled.get("undefined") == "omit":
            notes[f"{text}; they are left out of means over classes (C-AP, C-P, C-R)."] = None
            continue
        best = f": a model without a mistake would have C-AP {100 * (classes - empty) / classes:.1f}" if classes else ""
        notes[f"{text} and count as 0 in means over classes (C-AP, C-P, C-R){best}."] = None
    return [*notes]


def label_tables(
    methods: Sequence[tuple[str, Sequence[Summary]]], *, cost: bool = False, every: bool = False
) -> dict[str, Table]:
    """Tables of multi-label runs by file name, of the levels and views that some run has."""
    tables = {"table": label_table(methods, cost=cost)}
    summaries = [summary for summary in summaries_of(methods) if summary.is_labelled]
    if any(summary.label_section(level="coarse") for summary in summaries):
        tables["table-coarse"] = label_table(methods, level="coarse")
    for view in ("personal", "unseen"):
        if any(view in summary.labelled and summary.label_view != view for summary in summaries):
            tables[f"table-{view}"] = label_table(methods, view)
    levels = ("top3", "flair") if every else ()
    for level in levels:
        if any(summary.label_section(level=level) for summary in summaries):
            tables[f"table-{level}"] = label_table(methods, level=level)
    return tables


def _title(methods: Sequence[tuple[str, Sequence[Summary]]], view: str, level: str) -> str:
    every = summaries_of(methods)
    recipe = next((summary.recipe for summary in every if summary.recipe), "")
    spread = over_seeds(max((len(runs) for _, runs in methods), default=0))
    views = {view} if view else {summary.label_view.partition("/")[0] for summary in every if summary.is_labelled}
    what = SENTENCES_OF_VIEWS[next(iter(views))] if len(views) == 1 else SENTENCES_OF_VIEWS[""]
    what += f", {LEVELS[level]}" if level else ""
    return of_recipe(recipe, f"{what}, test results in % after the last round{spread}")


def _notes(methods: Sequence[tuple[str, Sequence[Summary]]], view: str, bounds: Sequence[str], level: str) -> list[str]:
    firsts = {label: runs[0] for label, runs in methods if runs and runs[0].is_labelled}
    notes = missing_sites_note(summaries_of(methods))
    thresholds = sorted({f"{summary.labelled.get('threshold', 0.5):g}" for summary in firsts.values()})
    notes.append(
        "C: means over classes; C-F1 is the harmonic mean of C-P and C-R. O: over all pairs of example and label. AP: "
        f"average precision; P, R and F1 at the probability {formats.names(thresholds)}."
    )
    by_view: dict[str, list[str]] = {}
    for label, summary in firsts.items():
        by_view.setdefault(summary.label_view.partition("/")[0], []).append(label)
    if not view and len(by_view) > 1:
        notes.append(
            "; ".join(f"{formats.names(who)}: {SENTENCES_OF_VIEWS[name]}" for name, who in by_view.items()) + "."
        )
    notes += without_positives([(summary, summary.label_section(view, level)) for summary in firsts.values()])
    notes += {
        "coarse": ["A coarse label's score is the largest of its labels' scores."],
        "top3": ["An example's three most probable labels count as predicted, as far as they reach the threshold."],
        "flair": ["AP from counts at 200 thresholds; predicted above one half; classes without examples count as 0."],
    }.get(level, [])
    notes += uneven_note({label: len(runs) for label, runs in methods}, "Finished seeds")
    if bounds:
        notes.append(f"Below the rule, {formats.names(bounds)}: all data in one place; a bound, not ranked.")
    return notes

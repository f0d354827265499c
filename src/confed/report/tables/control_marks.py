"""Marks of models that do not beat their control conditions, and a table of these.

What is marked follows from ``passed`` in a run's ``controls`` (:mod:`confed.runs.controls`), which
:func:`confed.metrics.controls.verdict` decided; of several seeds at least half must have failed.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, product
from typing import Any

from confed.report.html import page
from confed.report.tables.cells import mean_sd_cell
from confed.report.tables.table import Cell, Column, Table, to_html
from confed.results.format import p_value
from confed.results.runs import Study
from confed.results.summary import Summary, number
from confed.results.views import TESTED, View

SIGN = "†"
"""Behind the means of models that do not beat their controls."""

MEANING = (
    f"{SIGN} Not shown to use its input: not better by more than chance than with permuted pictures (one-sided "
    "sign-flip test within places, 5 %, which no model passes where fewer than five test examples differ; of "
    "multi-label data a paired bootstrap of C-AP over examples), or no better than the most frequent training answer "
    "or than an answer from the question's words alone; between two such models no difference is tested."
)
_CONDITIONS: Mapping[str, str] = {
    "right": "own input",
    "permuted_image": "permuted pictures",
    "permuted_text": "permuted texts",
    "permuted_audio": "permuted sounds",
    "permuted_series": "permuted sensor values",
    "blank_image": "blank pictures",
    "constant": "most frequent answer",
    "words": "question's words",
}


def controls_in(summary: Summary, view: View) -> Mapping[str, Any]:
    """The controls of one view of a run, for personal models that there are not the global one's."""
    controls = summary.controls(view)
    return summary.controls(View.SEEN) if not controls and summary.view(view) is View.PERSONAL else controls


def fails(summaries: Iterable[Summary], view: View) -> bool:
    """Whether a method's models are marked: at least half of the runs that tried controls did not beat them."""
    passed = [bool(control.get("passed", True)) for summary in summaries if (control := controls_in(summary, view))]
    return bool(passed) and 2 * sum(passed) <= len(passed)


def marked(cell: Cell, summaries: Iterable[Summary], view: View) -> Cell:
    """A cell with the mark behind its text where the method's models of this view do not beat their controls."""
    return replace(cell, text=f"{cell.text} {SIGN}") if cell.value is not None and fails(summaries, view) else cell


def with_marks(table: Table, blind: Collection[tuple[str, str]]) -> Table:
    """A table of differences with the mark behind the values of models that do not beat their controls."""
    place = [column.title for column in table.columns].index("value")

    def row(cells: tuple[Cell, ...]) -> tuple[Cell, ...]:
        if (cells[0].text, cells[1].text) not in blind:
            return cells
        return (*cells[:place], replace(cells[place], text=f"{cells[place].text} {SIGN}"), *cells[place + 1 :])

    return replace(table, sections=tuple(tuple(map(row, section)) for section in table.sections))


def blind_pair(runs: Iterable[Summary], others: Iterable[Summary], view: View) -> str:
    """Why no difference between two methods' models of one view may be tested; "" if it may."""
    return "neither model is shown to use its input" if fails(runs, view) and fails(others, view) else ""


def controls_note(methods: Iterable[Sequence[Summary]], views: Sequence[View] = TESTED) -> list[str]:
    """Footnote on the mark, where a table has one."""
    return [MEANING] if any(fails(runs, view) for runs, view in product(methods, views)) else []


def controls_table(study: Study) -> Table | None:
    """Every method's means over places under all conditions, a section per view; None where none were tried."""
    runs: dict[str, list[Summary]] = {}
    for m in study.methods:
        runs[m] = [run.summary for run in study.of(m) if run.complete]
    control_names: set[str] = set()
    for summary, view in product(chain.from_iterable(runs.values()), TESTED):
        control_names.update(summary.controls(view).get("means", ()))
    if not control_names:
        return None
    names = [name for name in _CONDITIONS if name in control_names]
    columns = (Column("models", words=True), Column("method", words=True))
    columns += tuple(Column(_CONDITIONS[name], unit="%") for name in names)
    columns += (Column("p, pictures" if "permuted_image" in control_names else "p"),)
    sections: list[tuple[tuple[Cell, ...], ...]] = []
    for view in TESTED:
        rows: list[tuple[Cell, ...]] = []
        for method, method_summaries in runs.items():
            stated = [statement for summary in method_summaries if (statement := summary.controls(view))]
            if not stated:
                continue
            cells: list[Cell] = []
            for name in names:
                cells.append(mean_sd_cell([number(statement["means"].get(name)) for statement in stated]))
            cells[0] = marked(cells[0], method_summaries, view)
            largest = max((min(statement["p"].values(), default=1.0) for statement in stated), default=1.0)
            if "permuted_image" in control_names:
                largest = max((statement["p"].get("permuted_image", 1.0) for statement in stated), default=1.0)
            rows.append((Cell(view.heading), Cell(study.labels[method]), *cells, Cell(p_value(largest), largest)))
        sections.append(tuple(rows))
    notes = (
        "Means over places of the test score. Permuted: each example is shown another one's input of the same place. "
        "Blank: every picture is grey. The last columns are answers without any picture, learned from the training "
        "data. p: one-sided sign-flip test of own input against permuted, of multi-label data a paired bootstrap of "
        "C-AP; of several seeds the largest.",
        *controls_note(list(runs.values())),
    )
    return Table("Whether models use their input: test score in % under control conditions", columns,
                 tuple(sections), notes)  # fmt: skip


def section(study: Study) -> str:
    """The table as HTML, and why conditions are missing; empty where none were tried."""
    table = controls_table(study)
    left: set[str] = set()
    for run in study.runs:
        for view, why in run.summary.controls_left_out.items():
            title = View(view).heading if view in TESTED else view
            left.add(f"{study.labels[run.method]}, {title}: {why}")
    if table is None and not left:
        return ""
    shown = "" if table is None else f'<div class="wide dense">{to_html(table)}</div>'
    return shown + (page.paragraph(f"Left out. {'; '.join(sorted(left))}.") if left else "")

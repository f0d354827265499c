"""Marks of models that do not beat their control conditions, and a table of these.

What is marked follows from ``passed`` in a run's ``controls`` (:mod:`confed.runs.evaluate`), which
:func:`confed.metrics.controls.verdict` decided; of several seeds at least half must have failed.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from confed.comparison.records import Record
from confed.comparison.refusals import fails
from confed.report.html import page
from confed.report.tables.cells import finished, mean_sd_cell, p_cell, signed
from confed.report.tables.table import Cell, Column, Row, Table, pivot, wide_html
from confed.results.records import record_of
from confed.results.runs import StudyResults
from confed.results.summary import number
from confed.results.views import TESTED, View

SIGN = "†"  # behind the means of models that do not beat their controls

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


def marked(cell: Cell, records: Iterable[Record], measure: str) -> Cell:
    """A cell with the mark behind its text where the method's models do not beat their controls."""
    return signed(cell, SIGN) if cell.value is not None and fails(records, measure) else cell


def with_marks(table: Table, blind: Collection[tuple[str, str]]) -> Table:
    """A table of differences with the mark behind the values of models that do not beat their controls."""
    place = [column.title for column in table.columns].index("value")

    def line(row: Row) -> Row:
        if (row[0].text, row[1].text) not in blind:
            return row
        return (*row[:place], signed(row[place], SIGN), *row[place + 1 :])

    return replace(table, sections=tuple(tuple(map(line, section)) for section in table.sections))


def controls_note(methods: Iterable[Sequence[Record]], measures: Sequence[str]) -> list[str]:
    """Footnote on the mark, where a table has one."""
    return [MEANING] if any(fails(records, measure) for records, measure in product(methods, measures)) else []


class _Tried(NamedTuple):
    """What a method's runs state about the controls of a view."""

    method: str
    view: View
    records: Sequence[Record]
    stated: Sequence[Mapping[str, Any]]

    def cell(self, condition: str) -> Cell:
        """The mean under a condition."""
        cell = mean_sd_cell([number(statement["means"].get(condition)) for statement in self.stated])
        return marked(cell, self.records, self.view.mean) if condition == "right" else cell

    def p(self, permuted: bool) -> Cell:
        """Of several seeds the largest p-value."""
        values: list[float] = []
        for statement in self.stated:
            p = statement["p"]
            values.append(p.get("permuted_image", 1.0) if permuted else min(p.values(), default=1.0))
        return p_cell(max(values, default=1.0))


def controls_table(study: StudyResults) -> Table | None:
    """Every method's means over places under all conditions, a section per view; None where none were tried."""
    runs = finished(study)
    records = {method: list(map(record_of, of_method)) for method, of_method in runs.items()}
    sections: list[list[_Tried]] = []
    conditions: set[str] = set()
    for view in TESTED:
        sections.append([])
        for method, of_method in runs.items():
            stated = [run.summary.controls(view) for run in of_method]
            stated = [statement for statement in stated if statement]
            for statement in stated:
                conditions.update(statement.get("means", ()))
            sections[-1] += [_Tried(method, view, records[method], stated)] if stated else []
    if not conditions:
        return None
    pictures = "permuted_image" in conditions
    columns = [
        Column("models", words=True, read=lambda row: row.view.heading),
        Column("method", words=True, read=lambda row: study.labels[row.method]),
    ]
    for name, title in _CONDITIONS.items():
        if name in conditions:
            columns.append(Column(title, unit="%", read=lambda row, condition=name: row.cell(condition)))
    columns.append(Column("p, pictures" if pictures else "p", read=lambda row: row.p(pictures)))
    notes = (
        "Means over places of the test score. Permuted: each example is shown another one's input of the same place. "
        "Blank: every picture is grey. The last columns are answers without any picture, learned from the training "
        "data. p: one-sided sign-flip test of own input against permuted, of multi-label data a paired bootstrap of "
        "C-AP; of several seeds the largest.",
        *controls_note([*records.values()], [view.mean for view in TESTED]),
    )
    title = "Whether models use their input: test score in % under control conditions"
    return pivot(title, columns, *sections, notes=notes)


def section(study: StudyResults) -> str:
    """The table as HTML, and why conditions are missing; empty where none were tried."""
    table = controls_table(study)
    left: set[str] = set()
    for run in study.runs:
        for view, why in run.summary.controls_left_out.items():
            title = View(view).heading if view in TESTED else view
            left.add(f"{study.labels[run.method]}, {title}: {why}")
    if table is None and not left:
        return ""
    return wide_html(table) + (page.paragraph(f"Left out. {'; '.join(sorted(left))}.") if left else "")

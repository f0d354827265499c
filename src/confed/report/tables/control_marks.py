"""Marks of models that do not beat their control conditions, and a table of these.

What is marked follows from ``passed`` in a run's ``controls`` (:mod:`confed.runs.controls`), which
:func:`confed.metrics.controls.verdict` decided; of several seeds at least half must have failed.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, product

from confed.comparison.records import Record
from confed.comparison.refusals import fails
from confed.report.html import page
from confed.report.tables.cells import mean_sd_cell
from confed.report.tables.table import Cell, Column, Table, to_html
from confed.results.records import record_of
from confed.results.runs import StudyResults
from confed.results.summary import Summary, number
from confed.results.views import TESTED, View
from confed.system.format import p_value

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


def marked(cell: Cell, records: Iterable[Record], measure: str) -> Cell:
    """A cell with the mark behind its text where the method's models do not beat their controls."""
    return replace(cell, text=f"{cell.text} {SIGN}") if cell.value is not None and fails(records, measure) else cell


def with_marks(table: Table, blind: Collection[tuple[str, str]]) -> Table:
    """A table of differences with the mark behind the values of models that do not beat their controls."""
    place = [column.title for column in table.columns].index("value")

    def row(cells: tuple[Cell, ...]) -> tuple[Cell, ...]:
        if (cells[0].text, cells[1].text) not in blind:
            return cells
        return (*cells[:place], replace(cells[place], text=f"{cells[place].text} {SIGN}"), *cells[place + 1 :])

    return replace(table, sections=tuple(tuple(map(row, section)) for section in table.sections))


def controls_note(methods: Iterable[Sequence[Record]], measures: Sequence[str]) -> list[str]:
    """Footnote on the mark, where a table has one."""
    return [MEANING] if any(fails(records, measure) for records, measure in product(methods, measures)) else []


def controls_table(study: StudyResults) -> Table | None:
    """Every method's means over places under all conditions, a section per view; None where none were tried."""
    runs: dict[str, list[Summary]] = {}
    records: dict[str, list[Record]] = {}
    for m in study.methods:
        runs[m] = [run.summary for run in study.of(m) if run.complete]
        records[m] = [record_of(run) for run in study.of(m) if run.complete]
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
            cells[0] = marked(cells[0], records[method], view.mean)
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
        *controls_note([*records.values()], [view.mean for view in TESTED]),
    )
    return Table("Whether models use their input: test score in % under control conditions", columns,
                 tuple(sections), notes)  # fmt: skip


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
    shown = "" if table is None else f'<div class="wide dense">{to_html(table)}</div>'
    return shown + (page.paragraph(f"Left out. {'; '.join(sorted(left))}.") if left else "")

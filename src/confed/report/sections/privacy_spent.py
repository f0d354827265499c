"""Report section on the privacy cost of noise on updates, and on gradients of examples."""

from collections.abc import Mapping
from typing import Any

from confed.report.html import page
from confed.report.tables.table import Cell, Column, Table, to_html
from confed.results.runs import RunResults, StudyResults
from confed.results.summary import EXAMPLE_PRIVACY, PRIVACY, PRIVACY_SHOWN, number, numbers
from confed.system import format as formats


def section(study: StudyResults) -> str:
    """Epsilon of every client, as it grew, or of its examples; nothing where no run noised anything of these."""
    html = ""
    for run in study.runs:
        for key, table in ((PRIVACY, _table), (EXAMPLE_PRIVACY, _examples)):
            spent = run.summary.privacy(key)
            if spent:
                title = f"<h3>{page.escape(run.label)}, seed {run.seed}</h3>" if not study.single else ""
                html += title + page.paragraph(str(spent.get("guarantee", "")), "muted") + to_html(table(run, spent))
    return html


def _examples(_run: RunResults, found: Mapping[str, Any]) -> Table:
    """Epsilon of a client's examples, beside what others would name."""
    epsilon, steps = numbers(found.get("epsilon")), numbers(found.get("steps"))
    claimed = numbers(found.get("claimed"))
    shown = sorted(epsilon, key=lambda name: -epsilon[name])[: 4 * PRIVACY_SHOWN]
    rows = [
        (Cell(name), Cell(f"{steps.get(name, 0):.0f}"), _cell(epsilon[name]), *(_cell(v) for v in claimed.values()))
        for name in shown
    ]
    columns = (
        Column("client", words=True), Column("steps with an example"), Column("ε that holds"),
        *(Column(f"ε named by the {whose}") for whose in claimed),
    )  # fmt: skip
    more = len(epsilon) - len(shown)
    notes = (f"… and {formats.counted(more, 'client')} with no larger ε.",) if more > 0 else ()
    return Table("Privacy of examples", columns, (tuple(rows),), notes)


def _table(run: RunResults, found: Mapping[str, Any]) -> Table:
    after = [str(round) for round in found.get("after", ())]
    epsilon = numbers(found.get("epsilon"))
    shown = sorted(epsilon, key=lambda name: -epsilon[name])[: 4 * PRIVACY_SHOWN]
    rows = [
        (
            Cell(name),
            Cell(str(found.get("rounds", {}).get(name, ""))),
            *(_cell(number(value)) for value in found.get("so_far", {}).get(name, [None] * len(after))),
        )
        for name in shown
    ]
    more = len(epsilon) - len(shown)
    columns = (Column("client", words=True), Column("rounds"), *(Column(round, "ε after round") for round in after))
    notes = (f"… and {formats.counted(more, 'client')} with no larger ε.",) if more > 0 else ()
    return Table("Privacy spent", columns, (tuple(rows),), notes)


def _cell(value: float | None) -> Cell:
    return Cell("–" if value is None else f"{value:.3g}", value)

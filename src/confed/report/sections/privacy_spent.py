"""Report section on the privacy cost of noise on updates, and on gradients of examples."""

from collections.abc import Mapping, Sequence
from typing import Any

from confed.report.html import page
from confed.report.section import Section
from confed.report.tables.table import Column, Table, pivot, to_html
from confed.results.runs import StudyResults
from confed.results.summary import EXAMPLE_PRIVACY, PRIVACY, PRIVACY_SHOWN, number, numbers
from confed.system import format as formats


def section(study: StudyResults) -> str:
    """Epsilon of every client, as it grew, or of its examples; nothing where no run noised anything of these."""
    html = ""
    for run in study.runs:
        for key, table in ((PRIVACY, _of_clients), (EXAMPLE_PRIVACY, _of_examples)):
            spent = run.summary.privacy(key)
            if spent:
                title = f"<h3>{page.escape(run.label)}, seed {run.seed}</h3>" if not study.single else ""
                html += title + page.paragraph(str(spent.get("guarantee", "")), "muted") + to_html(table(spent))
    return html


def _of_examples(spent: Mapping[str, Any]) -> Table:
    """Epsilon of a client's examples, beside what others would name."""
    epsilon, steps = numbers(spent.get("epsilon")), numbers(spent.get("steps"))
    columns = [
        Column("steps with an example", read=lambda name: f"{steps.get(name, 0):.0f}"),
        Column("ε that holds", read=epsilon.__getitem__, form=_epsilon),
    ]
    for whose, value in numbers(spent.get("claimed")).items():
        columns.append(Column(f"ε named by the {whose}", read=lambda name, claimed=value: claimed, form=_epsilon))
    return _table("Privacy of examples", epsilon, columns)


def _of_clients(spent: Mapping[str, Any]) -> Table:
    """Epsilon of each client after some of the rounds."""
    so_far = spent.get("so_far", {})
    columns = [Column("rounds", read=lambda name: str(spent.get("rounds", {}).get(name, "")))]
    for i, after in enumerate(spent.get("after", ())):

        def epsilon(name: str, at: int = i) -> float | None:
            return number(so_far[name][at]) if name in so_far else None

        columns.append(Column(str(after), "ε after round", read=epsilon, form=_epsilon))
    return _table("Privacy spent", numbers(spent.get("epsilon")), columns)


def _table(title: str, epsilon: Mapping[str, float], columns: Sequence[Column]) -> Table:
    """A row per client, those that spent most first."""
    shown = sorted(epsilon, key=lambda name: -epsilon[name])[: 4 * PRIVACY_SHOWN]
    more = len(epsilon) - len(shown)
    notes = (f"… and {formats.counted(more, 'client')} with no larger ε.",) if more > 0 else ()
    return pivot(title, (Column("client", words=True), *columns), shown, notes=notes)


def _epsilon(value: float | None) -> str:
    return formats.MISSING if value is None else f"{value:.3g}"


SECTIONS = (Section("spent", "Privacy of clients", 150, lambda page: section(page.study)),)

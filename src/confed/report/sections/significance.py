"""Report section that compares methods: differences to references, clients, and further tests."""

from confed.report.html import page
from confed.report.html.page import Tabs
from confed.report.statistics.comparison import Comparison
from confed.report.tables.table import Table, to_html

__all__ = ["significance"]


def significance(comparison: Comparison | None, tabs: Tabs) -> str:
    """Paired tests against FedAvg and FedAvg + FT, or else against the first method with a global model."""
    if comparison is None or not any(
        d.over_seeds or d.over_examples or d.refused or d.unpaired for d in comparison.differences
    ):
        return ""
    text = (
        "Every method against a reference, in percentage points. Three questions: would other seeds show the same "
        "(over seeds), do these trained models differ on this test data (over examples), and is a method no worse "
        "than the reference, or no different from it, within a margin?"
    )
    panels = [
        (f"against {comparison.labels[name]}", _against(comparison, name, tabs)) for name in comparison.references
    ]
    remarks = "".join(page.paragraph(remark, "note") for remark in (*comparison.remarks, *comparison.table_remarks))
    return page.paragraph(text) + page.callout(comparison.warnings) + tabs(panels) + remarks


def _against(comparison: Comparison, reference: str, tabs: Tabs) -> str:
    """The tables against one reference: one tab per measure, then what is folded away."""
    table = comparison.table(reference)
    parts = [(section[0][0].text, _part(table, i)) for i, section in enumerate(table.sections) if section]
    html = tabs(parts)
    places = comparison.clients(reference)
    return html + ("" if places is None else page.details("Client by client: sign-flip test", _html(places)))


def _part(table: Table, section: int) -> str:
    """One measure of a table, without the column that names it."""
    rows = tuple(row[1:] for row in table.sections[section])
    return _html(Table(table.title, table.columns[1:], (rows,)))


def _html(table: Table) -> str:
    return f'<div class="wide dense">{to_html(table.without_empty())}</div>'

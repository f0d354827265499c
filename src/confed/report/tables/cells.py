"""Table cells: values with their spread over seeds, and ranks."""

from collections.abc import Sequence

from confed.metrics.statistics import mean
from confed.report.tables.table import Cell, Mark
from confed.results import format as formats

__all__ = ["marks", "mean_sd_cell"]


def mean_sd_cell(values: Sequence[float | None], mark: Mark = "") -> Cell:
    """Mean and standard deviation over seeds of fractions, in percent; seeds without a value are left out."""
    there = [value for value in values if value is not None]
    if not there:
        return Cell(formats.MISSING)
    summary = mean(there)
    if summary.n == 1:
        return Cell(formats.percent(summary.mean), 100 * summary.mean, mark=mark)
    return Cell(formats.percent(summary.mean, summary.sd), 100 * summary.mean, 100 * summary.sd, mark)


def marks(values: Sequence[float | None]) -> list[Mark]:
    """Best and second best values, judged by the decimals shown.

    Of two rows the second is the last, and is not marked.
    """
    shown = [None if value is None else round(value, 1) for value in values]
    order = sorted({value for value in shown if value is not None}, reverse=True)
    if len(order) < 2:
        return [""] * len(shown)
    second: Mark = "second" if sum(value is not None for value in shown) > 2 else ""
    names: dict[float | None, Mark] = {order[0]: "best", order[1]: second}
    return [names.get(value, "") for value in shown]

"""Modality matrix: results of each model with subsets of the modalities.

Rows are the clients' own models on their own test examples, the global model on the same, and on unseen places. Columns
are sets of modalities. A cell is of the examples that have all of its column's modalities; it is empty where there are
none, or where the client has not learned to read one of them.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from confed.federation.checkpoint import write_atomically
from confed.federation.ownership import MODALITIES
from confed.report.figures.style import LETTERS, Drawing, Palette, grid_of, without_box
from confed.report.html import page
from confed.report.html.page import Tabs
from confed.report.tables.cells import mean_sd_cell, over_seeds
from confed.report.tables.table import Column, Table, pivot, to_csv
from confed.results.history import no_global
from confed.results.metric import metric_of
from confed.results.runs import StudyResults, load
from confed.results.summary import average
from confed.results.views import TESTED, View
from confed.system import format as formats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


FILE = "modalities"  # name of the table's files, without an ending
DARK = 0.55  # shades from here on have white figures


class Row(NamedTuple):
    """A model on the data of a place: set of modalities -> a fraction for each seed that has one."""

    method: str
    view: View
    place: str
    values: Mapping[str, Sequence[float]]

    @property
    def label(self) -> str:
        """The row's name."""
        return self.place if self.view is View.PERSONAL else f"global model, {self.place}"

    def mean(self, shown: str) -> float | None:
        """The mean over seeds."""
        return average(self.values.get(shown, ()))


def rows_of(study: StudyResults, method: str) -> list[Row]:
    """A method's rows; none where no matrix was made."""
    rows: list[Row] = []
    for view in TESTED:
        values: dict[str, dict[str, list[float]]] = {}
        for run in study.of(method):
            for place, sets in run.summary.modality_matrix(view).items():
                for shown, value in sets.items():
                    values.setdefault(place, {}).setdefault(shown, []).append(value)
        rows += [Row(study.labels[method], view, place, place_values) for place, place_values in values.items()]
    return rows


def sets_of(study: StudyResults) -> list[str]:
    """All sets of modalities that were tried, the smallest first."""
    rows = chain.from_iterable(rows_of(study, method) for method in study.methods)
    modality_sets = set(chain.from_iterable(row.values for row in rows))

    def order(shown: str) -> tuple[int, list[int]]:
        places = list(map(MODALITIES.index, shown.split("+")))
        return len(places), places

    return sorted(modality_sets, key=order)


def section(study: StudyResults, tabs: Tabs) -> str:
    """A table of shaded cells per method."""
    sets = sets_of(study)
    panels: list[tuple[str, str]] = []
    for method in study.methods:
        rows = rows_of(study, method)
        if rows:
            cells: list[tuple[str, list[float | None]]] = []
            for row in rows:
                cells.append((row.label, [row.mean(shown) for shown in sets]))
            full_set = {row.label: max(row.values, key=lambda shown: shown.count("+")) for row in rows}
            shared = sum(row.view is not View.PERSONAL for row in rows)
            heatmap = page.heatmap("model of", sets, cells, framed=full_set, sections=shared)
            panels.append((study.labels[method], heatmap))
    over = ", mean over seeds" if len(study.seeds) > 1 else ""
    shared = "" if no_global(study) else "; below the rule the global model on them, and on unseen places"
    text = (
        f"Test {metric_of(study.runs)} in %{over}. Row: a client's own model on its own test examples{shared}. Column: "
        "all that the model is shown. Framed: everything that these examples have. A cell is empty where the examples, "
        "or the client, lack one of the modalities."
    )
    return tabs(panels, about=text)


def table(study: StudyResults) -> Table | None:
    """The same for documents, with standard deviations over seeds; None where no matrix was made."""
    sets = sets_of(study)
    if not sets:
        return None
    columns = [
        Column("method", words=True, read=lambda row: row.method),
        Column("model", words=True, read=lambda row: "own" if row.view is View.PERSONAL else "global"),
        Column("examples of", words=True, read=lambda row: row.place),
    ]
    for shown in sets:
        columns.append(Column(shown, unit="%", read=lambda row, of=shown: mean_sd_cell([*row.values.get(of, ())])))
    title = f"test {metric_of(study.runs)} in % by the modalities that are shown{over_seeds(len(study.seeds))}"
    note = "Dashes: examples, or the client, lack one of these modalities."
    sections = filter(None, (rows_of(study, method) for method in study.methods))
    return pivot(f"{study.recipe}: {title}", columns, *sections, notes=(note,))


def write(folder: Path) -> None:
    """Export of the table as CSV to a folder; nothing without a matrix."""
    modality_table = table(load(folder))
    if modality_table is not None:
        write_atomically(folder / f"{FILE}.csv", to_csv(modality_table).encode())


def drawing(study: StudyResults) -> Drawing | None:
    """Heat maps, one per method, with one scale of shades."""
    sets = sets_of(study)
    rows_of_method = {method: rows for method in study.methods if (rows := rows_of(study, method))}
    if not rows_of_method:
        return None
    every: list[float] = []
    for row in chain.from_iterable(rows_of_method.values()):
        every += [value for shown in sets if (value := row.mean(shown)) is not None]
    scale = min(every), max(every)
    lines, columns = grid_of(len(rows_of_method), 2)
    height = 0.95 + 0.3 * max(map(len, rows_of_method.values()))

    def draw(figure: "Figure", palette: Palette) -> None:
        for number, (method, rows) in enumerate(rows_of_method.items()):
            axes = figure.add_subplot(lines, columns, number + 1)
            _panel(axes, palette, study.labels[method], rows, sets, scale)

    return Drawing(f"modalities {study.recipe}", 5.4 * columns, height * lines, draw, shaded=True)


def _panel(
    axes: "Axes", palette: Palette, title: str, rows: Sequence[Row], sets: Sequence[str], scale: tuple[float, float]
) -> None:
    low, high = scale
    values: list[list[float | None]] = []
    for row in rows:
        values.append([row.mean(shown) for shown in sets])
    shades = np.array(values, dtype=float)  # None becomes NaN
    axes.imshow(shades, cmap="Blues", vmin=low - 0.2 * (high - low), vmax=high, aspect="auto", interpolation="nearest")
    for y, line in enumerate(values):
        for x, value in enumerate(line):
            if value is not None:
                dark = value - low > DARK * max(high - low, 1e-9)
                colour = "#ffffff" if dark else "#1b1f24"
                axes.text(x, y, formats.percent(value), ha="center", va="center", fontsize=LETTERS, color=colour)
    without_box(axes, palette, title)
    axes.set_xticks(range(len(sets)), [shown.replace("+", "\n+") for shown in sets])
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    first = next((number for number, row in enumerate(rows) if row.view is not View.PERSONAL), 0)
    if first:
        axes.axhline(first - 0.5, color=palette("muted"), linewidth=1.0)

"""Relative improvement of each client between two methods.

Figures 5 and 7 of Cao, Sun and Yu ("Multimodal personalized federated learning based on Transformer", 2025) show
(a - b) / b for each client and nothing else, a being their method's accuracy and b the other's. Where b is small this
is large whatever a is, so that here the accuracies themselves stand beside it.
"""

import statistics
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from confed.metrics.statistics import mean_sd
from confed.report.figures.style import Drawing, Palette, style_axes
from confed.report.harmed import BySeed
from confed.report.tables.cells import mean_sd_cell
from confed.report.tables.table import Cell, Column, Table
from confed.results.summary import average
from confed.system import format as formats

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Values = Mapping[str, BySeed]
"""Method -> client -> seed -> value."""

MANY = 8
"""With more clients than this their columns are in the CSV file only."""

MEAN = "mean"
"""Heading of what is the mean over clients."""


def improvement(own: BySeed, other: BySeed) -> dict[str, dict[int, float]]:
    """(a - b) / b of each client and seed that both have, without the clients of :func:`left_out`."""
    out = left_out(own, other)
    result: dict[str, dict[int, float]] = {}
    for client, seeds in own.items():
        if client not in out:
            result[client] = {
                seed: (a - other[client][seed]) / other[client][seed]
                for seed, a in seeds.items()
                if seed in other[client]
            }
    return result


def left_out(own: BySeed, other: BySeed) -> dict[str, str]:
    """Clients with no improvement relative to another method -> why: b is 0 for a seed, or there is no a or no b.

    A client whose b is 0 for one of several seeds is left out as a whole: without this seed, at which it gains most, it
    would seem to gain less.
    """
    reasons: dict[str, str] = {}
    for client in dict.fromkeys((*own, *other)):
        common = own.get(client, {}).keys() & other.get(client, {}).keys()
        if not common:
            reasons[client] = "has no results of both"
        elif not all(other[client][seed] for seed in common):
            reasons[client] = "is at 0 with it"
    return reasons


def mean_improvement(own: BySeed, other: BySeed) -> dict[int, float]:
    """The mean over clients, for every seed that all of them have; none at all where a client is left out.

    Without the clients whose b is 0 the mean of shares could have another sign than the mean of differences.
    """
    improvements = improvement(own, other)
    if not improvements or left_out(own, other):
        return {}
    seeds = sorted(set[int].intersection(*map(set, improvements.values())))
    result: dict[int, float] = {}
    for seed in seeds:
        result[seed] = sum(values[seed] for values in improvements.values()) / len(improvements)
    return result


def no_mean(own: BySeed, other: BySeed, label: str) -> str:
    """A sentence on why there is no mean relative to a method of this name; "" where there is one."""
    out = left_out(own, other)
    if not out:
        return ""
    told = ", ".join(f"{client} {why}" for client, why in out.items())
    return f"Relative to {label}, no mean over clients: {told}, and a mean over the others would mislead."


def improvement_cell(values: Sequence[float]) -> Cell:
    """Mean and standard deviation over seeds of shares, in percent with their sign."""
    if not values:
        return Cell(formats.MISSING)
    middle, sd = mean_sd(values)
    text = formats.points(middle) + (f" ± {100 * sd:.1f}" if len(values) > 1 else "")
    return Cell(text, 100 * middle, 100 * sd if len(values) > 1 else None)


def relative_table(values: Values, labels: Mapping[str, str], own: str, metric: str) -> Table:
    """Results of every method at each client, and the relative improvement of one of them."""
    clients = list(dict.fromkeys(chain.from_iterable(values.values())))
    many = len(clients) > MANY
    columns = (
        Column("method", words=True),
        *(
            Column(title, client, "%", detail=many and client != MEAN)
            for client in (*clients, MEAN)
            for title in (metric, "relative")
        ),
    )
    rows = [own, *(method for method in labels if method != own and method in values)]
    items: list[tuple[tuple[Cell, ...], ...]] = []
    for row_group in (rows[:1], rows[1:]):
        items.append(tuple(_row(values, labels, own, method, clients) for method in row_group))
    sections = tuple(items)
    gaps = [no_mean(values[own], values[method], labels[method]) for method in rows[1:]]
    note = (
        f"Relative: (a − b) / b in %, a with {labels[own]} and b with the row's method, client by client and seed by "
        "seed; then the mean over seeds. The mean over clients is of their shares."
    )
    return Table(
        f"{labels[own]} against each method: {metric} in %, and improvement relative to it",
        columns,
        sections,
        (note, *filter(None, gaps)),
    )


def relative_drawing(values: Values, labels: Mapping[str, str], own: str) -> Drawing | None:
    """Bars of a method's improvement at each client, a panel per other method; None without another one.

    A dash stands in the place of a client that is left out. Panels share their scale; one that would flatten the others
    has its own, and says so.
    """
    improvements = {m: improvement(values[own], values[m]) for m in labels if m != own and m in values}
    improvements = {method: shares for method, shares in improvements.items() if shares}
    if not improvements:
        return None
    clients = list(values[own])
    columns = min(3, len(improvements))
    lines = -(-len(improvements) // columns)

    heights = {method: _height(shares) for method, shares in improvements.items()}
    usual = 4 * statistics.median(heights.values())

    def draw(figure: "Figure", palette: Palette) -> None:
        first = None
        for number, (method, shares) in enumerate(improvements.items()):
            alone = heights[method] > usual
            axes = figure.add_subplot(lines, columns, number + 1, sharey=None if alone else first)
            first = first if alone else axes
            for place, client in enumerate(clients):
                if client not in shares:
                    axes.text(place, 0, formats.MISSING, ha="center", va="bottom", color=palette("muted"))
                    continue
                middle, sd = mean_sd(list(shares[client].values()))
                axes.bar(place, 100 * middle, 0.7, color=palette("m1"), alpha=0.9)
                if sd:
                    axes.errorbar(place, 100 * middle, 100 * sd, color=palette("ink"), linewidth=0.9, capsize=1.8)
            axes.axhline(0, color=palette("muted"), linewidth=0.8)
            title = f"over {labels[method]}{' (own scale)' if alone else ''}"
            style_axes(axes, palette, title, "", "relative improvement, %" if number % columns == 0 else "")
            last = number + columns >= len(improvements)
            axes.set_xticks(range(len(clients)), clients if last else [""] * len(clients), rotation=35, ha="right")

    return Drawing(f"relative {labels[own]}", 3.5 * columns, 2.3 * lines + 0.7, draw)


def _height(shares: Mapping[str, Mapping[int, float]]) -> float:
    """Range of the bars of a panel."""
    moments = [mean_sd(list(values.values())) for values in shares.values()]
    return max(abs(middle) + sd for middle, sd in moments)


def _row(values: Values, labels: Mapping[str, str], own: str, method: str, clients: Sequence[str]) -> tuple[Cell, ...]:
    shares = improvement(values[own], values[method]) if method != own else {}
    cells = [Cell(labels[method])]
    for client in clients:
        cells.append(mean_sd_cell(list(values[method].get(client, {}).values())))
        cells.append(improvement_cell(list(shares.get(client, {}).values())) if method != own else Cell(""))
    seeds = sorted(set(chain.from_iterable(values[method].values())))
    means: list[float | None] = []
    for seed in seeds:
        means.append(average([of.get(seed) for of in values[method].values()]))
    shared = list(mean_improvement(values[own], values[method]).values())
    cells += [mean_sd_cell(means), improvement_cell(shared) if method != own else Cell("")]
    return tuple(cells)

"""Two methods client by client: relative improvement, and clients that are worse off.

Figures 5 and 7 of Cao, Sun and Yu ("Multimodal personalized federated learning based on Transformer", 2025) show
(a - b) / b for each client and nothing else, a being their method's accuracy and b the other's. Where b is small this
is large whatever a is, so that here the accuracies themselves stand beside it.
"""

import statistics
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from confed.metrics.fairness import Hurt, hurt
from confed.metrics.statistics import mean_sd
from confed.report.figures.style import Drawing, Palette, grid_of, style_axes
from confed.report.tables.cells import mean_sd_cell
from confed.report.tables.table import Cell, Column, Table, pivot
from confed.results.runs import StudyResults
from confed.results.summary import average
from confed.results.views import View
from confed.system import format as formats

if TYPE_CHECKING:
    from matplotlib.figure import Figure


BySeed = Mapping[str, Mapping[int, float]]  # client -> seed -> value
Values = Mapping[str, BySeed]  # method -> client -> seed -> value
MANY = 8  # with more clients than this their columns are in the CSV file only
MEAN = "mean"  # heading of what is the mean over clients


def by_seed(study: StudyResults, method: str, view: View = View.PERSONAL) -> dict[str, dict[int, float]]:
    """Client -> seed -> value, of the clients that stayed to the end."""
    values: dict[str, dict[int, float]] = {}
    for run in study.of(method):
        for client, value in run.summary.counted(view).items():
            values.setdefault(client, {})[run.seed] = value
    return values


# Clients that are worse off than with a baseline --------------------------------------------------------------


class Hurting(NamedTuple):
    """Clients that are worse off than with a reference, in the mean over the seeds that both have."""

    harmed: Hurt
    seeds: tuple[int, ...]
    every: bool


def hurting(values: BySeed, reference: BySeed) -> Hurting | None:
    """Clients worse off than with the reference; None if the two share no seed, or not the same clients."""
    seeds_of_clients = [set(seeds) for seeds in (*values.values(), *reference.values())]
    same = values.keys() == reference.keys() and seeds_of_clients
    seeds = sorted(set[int].intersection(*seeds_of_clients)) if same else []
    if not seeds:
        return None
    means: list[dict[str, float]] = []
    for side in (values, reference):
        means.append({})
        for client, of_seeds in side.items():
            means[-1][client] = sum(of_seeds[seed] for seed in seeds) / len(seeds)
    harmed = hurt(*means, margin=1e-9)  # equal on paper is not worse
    return Hurting(harmed, tuple(seeds), len(seeds) == len(seeds_of_clients[0]))


def reference_row(study: StudyResults) -> str | None:
    """Reference for clients: the row of local training, else of FedAvg, that has results; or None."""
    ended = {run.method: run.summary for run in study.runs if run.complete}
    alone = [method for method, summary in ended.items() if not summary.traits.communicates]
    rows = alone or [method for method, summary in ended.items() if summary.traits.reference == 1]
    return next((m for m in rows if ended[m].algorithm == m), rows[0]) if rows else None


# Relative improvement -----------------------------------------------------------------------------------------


def improvement(values: BySeed, other: BySeed) -> dict[str, dict[int, float]]:
    """(a - b) / b of each client and seed that both have, without the clients of :func:`left_out`."""
    out = left_out(values, other)
    shares: dict[str, dict[int, float]] = {}
    for client, seeds in values.items():
        if client not in out:
            base = other[client]
            shares[client] = {seed: (a - base[seed]) / base[seed] for seed, a in seeds.items() if seed in base}
    return shares


def left_out(values: BySeed, other: BySeed) -> dict[str, str]:
    """Clients with no improvement relative to another method -> why: b is 0 for some seed, or there is no a or no b."""
    reasons: dict[str, str] = {}
    for client in dict.fromkeys((*values, *other)):
        common = values.get(client, {}).keys() & other.get(client, {}).keys()
        if not common:
            reasons[client] = "has no results of both"
        elif not all(other[client][seed] for seed in common):
            reasons[client] = "is at 0 with it"
    return reasons


def mean_improvement(values: BySeed, other: BySeed) -> dict[int, float]:
    """The mean over clients, for every seed that all of them have; none at all where a client is left out."""
    improvements = improvement(values, other)
    if not improvements or left_out(values, other):
        return {}
    result: dict[int, float] = {}
    for seed in sorted(set[int].intersection(*map(set, improvements.values()))):
        result[seed] = sum(shares[seed] for shares in improvements.values()) / len(improvements)
    return result


def no_mean(values: BySeed, other: BySeed, label: str) -> str:
    """A sentence on why there is no mean relative to a method of this name; "" where there is one."""
    out = left_out(values, other)
    reasons = ", ".join(f"{client} {why}" for client, why in out.items())
    text = f"Relative to {label}, no mean over clients: {reasons}, and a mean over the others would mislead."
    return text if out else ""


def improvement_cell(values: Sequence[float]) -> Cell:
    """Mean and standard deviation over seeds of shares, in percent with their sign."""
    if not values:
        return Cell(formats.MISSING)
    middle, sd = mean_sd(values)
    text = formats.points(middle) + (f" ± {100 * sd:.1f}" if len(values) > 1 else "")
    return Cell(text, 100 * middle, 100 * sd if len(values) > 1 else None)


def relative_table(values: Values, labels: Mapping[str, str], method: str, metric: str) -> Table:
    """Results of every method at each client, and the relative improvement of one of them."""
    clients = list(dict.fromkeys(chain.from_iterable(values.values())))
    others = [other for other in labels if other != method and other in values]
    shares = {other: improvement(values[method], values[other]) for other in others}

    def relative_cell(row: str, improvements: Mapping[int, float]) -> Cell:
        return Cell("") if row == method else improvement_cell([*improvements.values()])

    def seed_means(row: str) -> list[float | None]:
        means: list[float | None] = []
        for seed in sorted(set(chain.from_iterable(values[row].values()))):
            means.append(average([of_seeds.get(seed) for of_seeds in values[row].values()]))
        return means

    columns = [Column("method", words=True, read=lambda row: labels[row])]
    for client in clients:
        many = len(clients) > MANY and client != MEAN
        columns += [
            Column(
                metric, client, "%", detail=many,
                read=lambda row, at=client: mean_sd_cell([*values[row].get(at, {}).values()]),
            ),
            Column(
                "relative", client, "%", detail=many,
                read=lambda row, at=client: relative_cell(row, shares.get(row, {}).get(at, {})),
            ),
        ]  # fmt: skip
    columns += [
        Column(metric, MEAN, "%", read=lambda row: mean_sd_cell(seed_means(row))),
        Column(
            "relative", MEAN, "%", read=lambda row: relative_cell(row, mean_improvement(values[method], values[row]))
        ),
    ]
    gaps = [no_mean(values[method], values[other], labels[other]) for other in others]
    note = (
        f"Relative: (a − b) / b in %, a with {labels[method]} and b with the row's method, client by client and seed "
        "by seed; then the mean over seeds. The mean over clients is of their shares."
    )
    title = f"{labels[method]} against each method: {metric} in %, and improvement relative to it"
    return pivot(title, columns, [method], others, notes=(note, *filter(None, gaps)))


def relative_drawing(values: Values, labels: Mapping[str, str], method: str) -> Drawing | None:
    """Bars of a method's improvement at each client, a panel per other method; None without another one."""
    improvements = {m: improvement(values[method], values[m]) for m in labels if m != method and m in values}
    improvements = {other: shares for other, shares in improvements.items() if shares}
    if not improvements:
        return None
    clients = list(values[method])
    lines, columns = grid_of(len(improvements), 3)
    heights: dict[str, float] = {}  # ranges of the bars of panels
    for other, shares in improvements.items():
        moments = [mean_sd(list(values.values())) for values in shares.values()]
        heights[other] = max(abs(middle) + sd for middle, sd in moments)
    usual = 4 * statistics.median(heights.values())

    def draw(figure: "Figure", palette: Palette) -> None:
        first = None
        for number, (other, shares) in enumerate(improvements.items()):
            alone = heights[other] > usual
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
            title = f"over {labels[other]}{' (own scale)' if alone else ''}"
            style_axes(axes, palette, title, "", "relative improvement, %" if number % columns == 0 else "")
            last = number + columns >= len(improvements)
            axes.set_xticks(range(len(clients)), clients if last else [""] * len(clients), rotation=35, ha="right")

    return Drawing(f"relative {labels[method]}", 3.5 * columns, 2.3 * lines + 0.7, draw)

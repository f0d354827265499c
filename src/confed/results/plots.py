"""Drawings of a study as inline SVG.

Colours are written as CSS variables, so that one drawing suits a light and a dark page; letters are real text in
the page's font. The same numbers give the same bytes.
"""

import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from confed.results.history import Curve, evaluations, loss, means, of_place, over_seeds, sent_until
from confed.results.runs import Run, Study, average, numbers
from confed.results.tables import headline, is_bound

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["bars", "client_curves", "colours", "curves", "dashes", "trade_off", "traffic"]

HUES = 10
MANY_CLIENTS = 12

# Stand-ins that matplotlib accepts as colours; they become var(--name) in the SVG.
_INK, _MUTED, _GRID = "#0a0a01", "#0a0a02", "#0a0a03"
_NAMES = {_INK: "ink", _MUTED: "muted", _GRID: "grid", "#0a0a04": "card"}


def colours(study: Study) -> dict[str, str]:
    """Method -> name of its CSS colour; bounds are grey."""
    federated = [method for method in study.methods if not is_bound(study.of(method)[0].summary)]
    return {m: f"m{federated.index(m) % HUES + 1}" if m in federated else "m0" for m in study.methods}


def dashes(study: Study) -> dict[str, bool]:
    """Method -> whether its lines are dashed: bounds, and methods beyond the number of hues."""
    federated = [method for method in study.methods if not is_bound(study.of(method)[0].summary)]
    return {m: m not in federated or federated.index(m) >= HUES for m in study.methods}


def curves(study: Study) -> str:
    """Mean over clients by round: personal models, global model on seen and on unseen places, training loss."""
    panels: list[tuple[str, Callable[[Run], Curve], bool]] = [
        ("personal models", lambda run: means(evaluations(run, "personal")), True),
        ("global model, seen", lambda run: means(evaluations(run, "global")), True),
        ("global model, unseen", lambda run: means(evaluations(run, "unseen")), True),
        ("training loss", loss, False),
    ]
    data = [
        (title, {m: [read(r) for r in study.of(m)] for m in study.methods}, part)
        for title, read, part in panels
    ]
    data = [entry for entry in data if any(len(curve) > 1 for runs in entry[1].values() for curve in runs)]
    if not data:
        return ""
    with _figure(f"curves {study.recipe}", 10.4, 2.9) as (figure, out):
        for i, (title, methods, part) in enumerate(data):
            axes = figure.add_subplot(1, len(data), i + 1)
            for method, runs in methods.items():
                _line(axes, runs, study, method, scale=100 if part else 1)
            _dress(axes, title, "round", f"{study.runs[0].metric}, %" if part and i == 0 else "")
            axes.xaxis.get_major_locator().set_params(integer=True)
    return out[0]


def client_curves(study: Study) -> str:
    """One panel per client: its personal models by round; for a run on its own also the global model (dotted)."""
    if not 1 < len(study.clients) <= MANY_CLIENTS:
        return ""
    if not any(len(evaluations(run, "personal")) > 1 for run in study.runs):
        return ""
    width = min(4, len(study.clients))
    height = -(-len(study.clients) // width)
    with _figure(f"clients {study.recipe}", 10.4, 2.5 * height) as (figure, out):
        first = None
        for i, client in enumerate(study.clients):
            axes = figure.add_subplot(height, width, i + 1, sharey=first)
            first = first or axes
            for method in study.methods:
                own = [of_place(evaluations(run, "personal"), client) for run in study.of(method)]
                _line(axes, own, study, method, scale=100)
                if study.single:
                    shared = [of_place(evaluations(run, "global"), client) for run in study.of(method)]
                    _line(axes, shared, study, method, scale=100, dotted=True)
            _dress(axes, client, "round", f"{study.runs[0].metric}, %" if i % width == 0 else "")
            axes.xaxis.get_major_locator().set_params(integer=True)
    return out[0]


def bars(study: Study) -> str:
    """Personal test results of every client, methods side by side, with the standard deviation over seeds.

    Many clients are drawn as one line per method, each method's clients from its worst to its best.
    """
    values = {m: [numbers(run.summary.get("personal")) for run in study.of(m)] for m in study.methods}
    values = {m: runs for m, runs in values.items() if any(runs)}
    if not values or not study.clients:
        return ""
    with _figure(f"bars {study.recipe}", 10.4, 3.1) as (figure, out):
        axes = figure.add_subplot()
        metric = f"test {study.runs[0].metric}, %"
        if len(study.clients) > MANY_CLIENTS:
            for method, runs in values.items():
                means = [average([run.get(client) for run in runs]) for client in study.clients]
                ranked = sorted(100 * value for value in means if value is not None)
                axes.plot(range(1, len(ranked) + 1), ranked, **_style(study, method))
            _dress(axes, "", "clients, from the worst to the best", metric)
        else:
            _grouped(axes, study, values)
            _dress(axes, "", "", metric)
            axes.set_ylim(0, min(108.0, axes.get_ylim()[1] * 1.04))
            axes.tick_params(axis="x", length=0)
    return out[0]


def trade_off(study: Study) -> str:
    """Each method as a point: global model on unseen places against the mean of the personal models."""
    points = {
        m: (
            study.mean(m, lambda run: headline(run.summary, "global_unseen_mean")),
            study.mean(m, lambda run: headline(run.summary, "personal_mean")),
        )
        for m in study.methods
    }
    both = {m: (100 * x, 100 * y) for m, (x, y) in points.items() if x is not None and y is not None}
    if len(both) < 2:
        return ""
    with _figure(f"trade-off {study.recipe}", 5.2, 3.4) as (figure, out):
        axes = figure.add_subplot()
        for method, (_, y) in points.items():
            if y is not None and method not in both:
                axes.axhline(100 * y, color=_colour(study, method), linewidth=1, linestyle=":")
                axes.annotate(
                    f"{study.labels[method]} (no global model)",
                    (0.99, 100 * y), xycoords=("axes fraction", "data"), xytext=(0, 5), textcoords="offset points",
                    ha="right", color=_colour(study, method), fontsize=8.5,
                )  # fmt: skip
        _points(axes, study, both)
        _dress(axes, "", "global on unseen, %", "personal mean, %")
        axes.margins(0.14)
    return out[0]


def traffic(study: Study) -> str:
    """Validation results against the bytes sent so far: what a method reaches for its traffic."""
    data: dict[str, tuple[list[float], list[float]]] = {}
    for method in study.methods:
        results = over_seeds([means(evaluations(run, "personal")) for run in study.of(method)])
        sent = over_seeds([sent_until(run) for run in study.of(method)])
        both = [r for r in results if r in sent]
        bound = is_bound(study.of(method)[0].summary)
        if len(both) > 1 and sent[both[-1]] and not bound:
            data[method] = [sent[r] / 1e6 for r in both], [100 * results[r] for r in both]
    if not data:
        return ""
    with _figure(f"traffic {study.recipe}", 5.2, 3.4) as (figure, out):
        axes = figure.add_subplot()
        for method, (x, y) in data.items():
            axes.plot(x, y, marker="o", markersize=3, **_style(study, method))
        _dress(axes, "", "sent so far, MB", f"personal mean, {study.runs[0].metric}, %")
    return out[0]


def _line(
    axes: "Axes", runs: Sequence[Curve], study: Study, method: str, *, scale: float, dotted: bool = False
) -> None:
    """Mean over seeds, with a band from the lowest to the highest."""
    rounds = sorted({r for curve in runs for r in curve})
    if not rounds:
        return
    at = [[scale * curve[r] for curve in runs if r in curve] for r in rounds]
    style = _style(study, method) | ({"linestyle": (0, (1, 1.6))} if dotted else {})
    axes.plot(rounds, [sum(x) / len(x) for x in at], marker="o", markersize=2.6, **style)
    if len(runs) > 1:
        colour = _colour(study, method)
        axes.fill_between(
            rounds, [min(x) for x in at], [max(x) for x in at], color=colour, alpha=0.14, linewidth=0
        )


def _grouped(axes: "Axes", study: Study, values: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
    """Bars in groups, one group per client."""
    import numpy as np

    width = 0.84 / len(values)
    for i, (method, runs) in enumerate(values.items()):
        for j, client in enumerate(study.clients):
            seeds = [100 * run[client] for run in runs if client in run]
            if not seeds:
                continue
            x, height = j + (i - (len(values) - 1) / 2) * width, float(np.mean(seeds))
            spread = float(np.std(seeds, ddof=1)) if len(seeds) > 1 else 0.0
            axes.bar(x, height, 0.9 * width, color=_colour(study, method), alpha=0.9)
            if spread:
                axes.errorbar(x, height, spread, color=_INK, linewidth=0.9, capsize=1.8, capthick=0.9)
            if len(values) * len(study.clients) <= 32:
                axes.annotate(
                    f"{height:.0f}", (x, height + spread), xytext=(0, 2), textcoords="offset points", ha="center",
                    fontsize=7.5, color=_MUTED,
                )  # fmt: skip
    axes.set_xticks(range(len(study.clients)), study.clients)


def _points(axes: "Axes", study: Study, points: Mapping[str, tuple[float, float]]) -> None:
    """Labelled points; a label goes below its point where another point is close above."""
    spread = max(y for _, y in points.values()) - min(y for _, y in points.values()) or 1.0
    reach = max(x for x, _ in points.values()) - min(x for x, _ in points.values()) or 1.0
    for method, (x, y) in points.items():
        bound = colours(study)[method] == "m0"
        axes.plot([x], [y], "D" if bound else "o", color=_colour(study, method), markersize=7)
        crowded = any(0 < (v - y) / spread < 0.12 and abs(u - x) / reach < 0.3 for u, v in points.values())
        axes.annotate(
            study.labels[method], (x, y), xytext=(0, -14 if crowded else 8), textcoords="offset points", ha="center",
            color=_INK, fontsize=9,
        )  # fmt: skip


def _colour(study: Study, method: str) -> str:
    return f"#0b00{int(colours(study)[method][1:]):02x}"


def _style(study: Study, method: str) -> dict[str, Any]:
    dashed = dashes(study)[method]
    return {"color": _colour(study, method), "linewidth": 1.8, "linestyle": (0, (4, 2)) if dashed else "-"}


def _dress(axes: "Axes", title: str, x: str, y: str) -> None:
    """Axes as they look throughout: light horizontal lines, no box."""
    axes.set_title(title, fontsize=10, color=_INK, loc="left", fontweight="bold")
    axes.set_xlabel(x, color=_MUTED, fontsize=9)
    axes.set_ylabel(y, color=_MUTED, fontsize=9)
    axes.tick_params(colors=_MUTED, labelsize=8.5, length=3, width=0.8)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(_MUTED)
    axes.grid(axis="y", color=_GRID, linewidth=0.9)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)


@contextmanager
def _figure(name: str, width: float, height: float) -> "Iterator[tuple[Figure, list[str]]]":
    """A figure to draw in; afterwards its SVG is the only entry of the list.

    Args:
        name: keeps the ids of several drawings on a page apart.
        width: in inches; a page shows 10.4 as its full width.
        height: in inches.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    settings: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "text.parse_math": False,
        "font.family": "sans-serif",
    }
    out: list[str] = []
    with mpl.rc_context(settings), warnings.catch_warnings():
        # Letters are drawn by the browser, so it does not matter that matplotlib's font lacks some.
        warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, out
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    out.append(_inline(buffer.getvalue()))


def _inline(svg: str) -> str:
    """An SVG file as an element of a page, with the page's colours and font."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r"font: ([^;\"]*?px) [^;\"]*", r"font: \1 sans-serif", svg)
    svg = re.sub("|".join(_NAMES), lambda found: f"var(--{_NAMES[found.group()]})", svg)
    svg = re.sub(r"#0b00([0-9a-f]{2})", lambda found: f"var(--m{int(found.group(1), 16)})", svg)
    return svg.strip()

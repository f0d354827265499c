"""Drawings of a study as inline SVG.

Colours are written as CSS variables, so that one drawing suits a light and a dark page; letters are real text
in the page's font. The same numbers give the same bytes.
"""

import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from confed.results.history import Curve, evaluations, loss, means, of_place, over_seeds, sent_until
from confed.results.runs import Run, Study, average, numbers
from confed.results.tables import headline, is_bound

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "GLOBAL",
    "PERSONAL",
    "Look",
    "bars",
    "client_curves",
    "curves",
    "looks",
    "trade_off",
    "traffic",
]

HUES = 10
MANY_CLIENTS = 12

# Stand-ins that matplotlib accepts as colours; they become var(--name) in the SVG.
_INK, _MUTED, _GRID = "#0a0a01", "#0a0a02", "#0a0a03"
_NAMES = {_INK: "ink", _MUTED: "muted", _GRID: "grid", "#0a0a04": "card"}


@dataclass(frozen=True)
class Look:
    """How one thing looks in all drawings of a page.

    Attributes:
        label: its name.
        colour: its CSS colour, without the dashes.
        dashed: whether its lines are dashed.
    """

    label: str
    colour: str
    dashed: bool = False


PERSONAL = Look("personal models", "m1")
GLOBAL = Look("global model", "m2")
"""The two models of a run on its own."""


def looks(study: Study) -> dict[str, Look]:
    """Method -> how it looks. Bounds are grey; they and methods beyond the number of hues are dashed."""
    found: dict[str, Look] = {}
    rank = 0
    for method, label in study.labels.items():
        if is_bound(study.of(method)[0].summary):
            found[method] = Look(label, "m0", dashed=True)
        else:
            found[method] = Look(label, f"m{rank % HUES + 1}", dashed=rank >= HUES)
            rank += 1
    return found


def curves(study: Study) -> str:
    """Means by round: personal models, global model on seen and on unseen places, training loss."""
    panels: list[tuple[str, Callable[[Run], Curve], bool, Look]] = [
        ("personal models", lambda run: means(evaluations(run, "personal")), True, PERSONAL),
        ("global model, seen", lambda run: means(evaluations(run, "global")), True, GLOBAL),
        ("global model, unseen", lambda run: means(evaluations(run, "unseen")), True, GLOBAL),
        ("training loss", loss, False, PERSONAL),
    ]
    data = [
        (title, {m: [read(run) for run in study.of(m)] for m in study.methods}, part, look)
        for title, read, part, look in panels
    ]
    data = [entry for entry in data if any(len(curve) > 1 for runs in entry[1].values() for curve in runs)]
    if not data:
        return ""
    styles = looks(study)
    with _figure(f"curves {study.recipe}", 10.4, 2.9) as (figure, out):
        for i, (title, methods, part, look) in enumerate(data):
            axes = figure.add_subplot(1, len(data), i + 1)
            for method, runs in methods.items():
                _line(axes, runs, look if study.single else styles[method], 100 if part else 1)
            _dress(axes, title, "round", f"{study.runs[0].metric}, %" if part and i == 0 else "")
            _whole_rounds(axes)
    return out[0]


def client_curves(study: Study) -> str:
    """One panel per client: its personal models by round; in a single run also the global model."""
    if not 1 < len(study.clients) <= MANY_CLIENTS:
        return ""
    if not any(len(evaluations(run, "personal")) > 1 for run in study.runs):
        return ""
    width = min(4, len(study.clients))
    height = -(-len(study.clients) // width)
    styles = looks(study)
    with _figure(f"clients {study.recipe}", 10.4, 2.5 * height) as (figure, out):
        first = None
        for i, client in enumerate(study.clients):
            axes = figure.add_subplot(height, width, i + 1, sharey=first)
            first = first or axes
            for method in study.methods:
                own = [of_place(evaluations(run, "personal"), client) for run in study.of(method)]
                _line(axes, own, PERSONAL if study.single else styles[method], 100)
                if study.single:
                    shared = [of_place(evaluations(run, "global"), client) for run in study.of(method)]
                    _line(axes, shared, GLOBAL, 100)
            _dress(axes, client, "round", f"{study.runs[0].metric}, %" if i % width == 0 else "")
            _whole_rounds(axes)
    return out[0]


def bars(study: Study) -> str:
    """Test results of every client, methods side by side, with the standard deviation over seeds.

    Personal models; in a run on its own also the global model. Many clients are one line per method,
    its clients from the worst to the best.
    """

    def read(method: str, key: str) -> Sequence[Mapping[str, float]]:
        return [numbers(run.summary.get(key)) for run in study.of(method)]

    values = [(look, read(method, "personal")) for method, look in looks(study).items()]
    if study.single:
        method = study.methods[0]
        values = [(PERSONAL, read(method, "personal")), (GLOBAL, read(method, "global_seen"))]
    values = [(look, runs) for look, runs in values if any(runs)]
    if not values or not study.clients:
        return ""
    with _figure(f"bars {study.recipe}", 10.4, 3.1) as (figure, out):
        axes = figure.add_subplot()
        metric = f"test {study.runs[0].metric}, %"
        if len(study.clients) > MANY_CLIENTS:
            for look, runs in values:
                averages = [average([run.get(client) for run in runs]) for client in study.clients]
                ranked = sorted(100 * value for value in averages if value is not None)
                axes.plot(range(1, len(ranked) + 1), ranked, **_style(look))
            _dress(axes, "", "clients, from the worst to the best", metric)
        else:
            _grouped(axes, study.clients, values)
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
                axes.axhline(100 * y, color=_stand_in(looks(study)[method]), linewidth=1, linestyle=":")
                axes.annotate(
                    f"{study.labels[method]} (no global model)",
                    (0.99, 100 * y), xycoords=("axes fraction", "data"),
                    xytext=(0, 5), textcoords="offset points",
                    ha="right", color=_stand_in(looks(study)[method]), fontsize=8.5,
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
            axes.plot(x, y, marker="o", markersize=3, **_style(looks(study)[method]))
        _dress(axes, "", "sent so far, MB", f"personal mean, {study.runs[0].metric}, %")
    return out[0]


def _whole_rounds(axes: "Axes") -> None:
    """Ticks at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))


def _line(axes: "Axes", runs: Sequence[Curve], look: Look, scale: float) -> None:
    """Mean over seeds, with a band from the lowest to the highest."""
    rounds = sorted({r for curve in runs for r in curve})
    if not rounds:
        return
    at = [[scale * curve[r] for curve in runs if r in curve] for r in rounds]
    axes.plot(rounds, [sum(x) / len(x) for x in at], marker="o", markersize=2.6, **_style(look))
    if len(runs) > 1:
        low, high = [min(x) for x in at], [max(x) for x in at]
        axes.fill_between(rounds, low, high, color=_stand_in(look), alpha=0.14, linewidth=0)


def _grouped(
    axes: "Axes", clients: Sequence[str], values: Sequence[tuple[Look, Sequence[Mapping[str, float]]]]
) -> None:
    """Bars in groups, one group per client."""
    import numpy as np

    width = min(0.26, 0.84 / len(values))
    for i, (look, runs) in enumerate(values):
        for j, client in enumerate(clients):
            seeds = [100 * run[client] for run in runs if client in run]
            if not seeds:
                continue
            x, height = j + (i - (len(values) - 1) / 2) * width, float(np.mean(seeds))
            spread = float(np.std(seeds, ddof=1)) if len(seeds) > 1 else 0.0
            axes.bar(x, height, 0.9 * width, color=_stand_in(look), alpha=0.9)
            if spread:
                axes.errorbar(x, height, spread, color=_INK, linewidth=0.9, capsize=1.8, capthick=0.9)
            if len(values) * len(clients) <= 32:
                axes.annotate(
                    f"{height:.0f}",
                    (x, height + spread),
                    xytext=(0, 2),
                    textcoords="offset points",
                    ha="center",
                    fontsize=7.5,
                    color=_MUTED,
                )
    axes.set_xticks(range(len(clients)), clients)


def _points(axes: "Axes", study: Study, points: Mapping[str, tuple[float, float]]) -> None:
    """Labelled points; points that touch share a label, which is below them if others are close above."""
    height = max(y for _, y in points.values()) - min(y for _, y in points.values()) or 1.0
    width = max(x for x, _ in points.values()) - min(x for x, _ in points.values()) or 1.0
    groups: list[list[str]] = []
    for method, (x, y) in points.items():
        bound = looks(study)[method].colour == "m0"
        axes.plot([x], [y], "D" if bound else "o", color=_stand_in(looks(study)[method]), markersize=7)
        near = (
            group
            for group in groups
            if abs(points[group[0]][0] - x) < 0.03 * width and abs(points[group[0]][1] - y) < 0.03 * height
        )
        group = next(near, None)
        if group is None:
            groups.append([method])
        else:
            group.append(method)
    for group in groups:
        x, y = points[group[0]]
        crowded = any(
            0 < v - y < 0.12 * height and abs(u - x) < 0.3 * width
            for method, (u, v) in points.items()
            if method not in group
        )
        axes.annotate(
            ", ".join(study.labels[method] for method in group),
            (x, y),
            xytext=(0, -14 if crowded else 8),
            textcoords="offset points",
            ha="center",
            color=_INK,
            fontsize=9,
        )


def _stand_in(look: Look) -> str:
    """What matplotlib gets for a look's colour."""
    return f"#0b00{int(look.colour[1:]):02x}"


def _style(look: Look) -> dict[str, Any]:
    return {"color": _stand_in(look), "linewidth": 1.8, "linestyle": (0, (4, 2)) if look.dashed else "-"}


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

"""Common style of a study's figures: colours, markers, axes and file formats.

A drawing is kept as a function that draws it, and is written for a page (inline SVG whose colours are CSS
variables, so that it suits a light and a dark page), as an SVG file, or as a PNG file. In SVG letters are real
text. The same numbers give the same bytes.
"""

import io
import json
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from confed.data.intake.opening import read_picture
from confed.results.runs import StudyResults
from confed.system.plain_text import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.text import Text


Palette = Callable[[str], str]  # name of a colour -> what matplotlib gets for it

HUES = 10

LETTERS, TITLE = 9.5, 10.5  # sizes of letters and of titles, in points; on paper a page shows them at 0.96 of that
SHRUNK = 0.68  # inches on paper and in files per inch of a drawing

_MARKERS: Mapping[str, str] = {
    "o": "●", "s": "■", "^": "▲", "D": "◆", "v": "▼", "P": "✚", "X": "✖", "p": "⬟", "<": "◀", ">": "▶", "*": "★",
}  # fmt: skip

# The light colours of the page; for files, which have no page around them.
COLOURS: Mapping[str, str] = {
    "ink": "#1b1f24", "muted": "#616a75", "grid": "#e3e6ea", "card": "#ffffff", "m0": "#7b838d", "m1": "#2a66c8",
    "m2": "#d4621a", "m3": "#16845b", "m4": "#a03fb0", "m5": "#b98a00", "m6": "#c9356b", "m7": "#0a8ba0",
    "m8": "#7a5230", "m9": "#5b57c9", "m10": "#5f8a1d",
}  # fmt: skip

# Stand-ins that matplotlib accepts as colours; they become var(--name) on a page.
_STAND_INS: Mapping[str, str] = {name: f"#0a0b{i:02x}" for i, name in enumerate(COLOURS)}


@dataclass(frozen=True)
class SeriesStyle:
    """Style of one series in all figures of a page."""

    label: str
    colour: str
    dashed: bool = False
    marker: str = "o"

    @property
    def glyph(self) -> str:
        """The marker as a character."""
        return _MARKERS[self.marker]


PERSONAL = SeriesStyle("personal models", "m1")
GLOBAL = SeriesStyle("global model", "m2", marker="s")
"""The two models of a run on its own."""


@dataclass(frozen=True)
class Drawing:
    """A drawing that can be written in several formats."""

    name: str  # keeps the ids of several drawings on a page apart
    width: float  # in inches before `SHRUNK`; a page shows 10.4 as its full width
    height: float
    draw: "Callable[[Figure, Palette], None]"  # puts it onto a figure with colours from a palette
    shaded: bool = False  # whether it has a scale of colours, of which a small palette would spoil some

    def inline(self) -> str:
        """The drawing as an element of a page, with the page's colours and font, and with its values for the page."""
        content, figure = self._save(_STAND_INS.__getitem__, "svg")
        values = json.dumps(panels_of(figure), ensure_ascii=False, separators=(",", ":"))
        svg = content.decode()
        attributes = (
            f'style="--wide:{self.width / 10.4:.2g}" data-name="{escape(self.name)}" data-panels="{escape(values)}"'
        )
        svg = svg[svg.index("<svg") :].replace("<svg", f"<svg {attributes}", 1)
        svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
        svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
        svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
        svg = re.sub(r"font: ([^;\"]*?px) [^;\"]*", r"font: \1 sans-serif", svg)
        names = {stand_in: name for name, stand_in in _STAND_INS.items()}
        return re.sub("|".join(names), lambda match: f"var(--{names[match.group()]})", svg).strip()

    def svg(self) -> bytes:
        """The drawing as an SVG file."""
        svg = self._save(COLOURS.__getitem__, "svg")[0].decode()
        return re.sub(r"font: ([^;\"]*?px) [^;\"]*", r"font: \1 sans-serif", svg).encode()

    def png(self, dpi: int = 160) -> bytes:
        """The drawing as a PNG file on white."""
        from PIL import Image

        out = io.BytesIO()
        picture = Image.fromarray(read_picture(self._save(COLOURS.__getitem__, "png", dpi)[0]))
        if not self.shaded:
            # Few colours are in most drawings: a palette takes a third of the bytes.
            picture = picture.quantize(128, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
        picture.save(out, "PNG", optimize=True)
        return out.getvalue()

    def save(self, folder: Path, name: str) -> list[Path]:
        """Export as ``NAME.png`` and ``NAME.svg`` to a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"{name}.png", folder / f"{name}.svg"]
        for path, content in zip(paths, (self.png(), self.svg()), strict=True):
            path.write_bytes(content)
        return paths

    def figure(self, palette: Palette = COLOURS.__getitem__, dpi: int = 160) -> "Figure":
        """The drawing as a figure of matplotlib, on no screen until a notebook shows it."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(SHRUNK * self.width, SHRUNK * self.height), layout="constrained", dpi=dpi)
        self.draw(figure, palette)
        return figure

    def _save(self, palette: Palette, kind: str, dpi: int = 72) -> "tuple[bytes, Figure]":
        import matplotlib as mpl

        settings: dict[Any, Any] = {
            "svg.fonttype": "none",
            "svg.hashsalt": self.name,
            "text.parse_math": False,
            "font.family": "sans-serif",
        }
        with mpl.rc_context(settings), warnings.catch_warnings():
            # Letters are drawn by the browser, so it does not matter that matplotlib's font lacks some.
            warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)
            figure = self.figure(palette, dpi)
            buffer = io.BytesIO()
            if kind == "svg":
                _write_svg(figure, buffer)
            else:
                figure.savefig(buffer, format="png", facecolor="white", dpi=dpi, metadata={"Software": None})
        # An SVG with control characters, which names may have, is no XML.
        content = buffer.getvalue()
        return visible(content.decode()).encode() if kind == "svg" else content, figure


def _write_svg(figure: "Figure", out: io.BytesIO) -> None:
    """A figure on nothing, as SVG. ``savefig`` would draw it twice, once to find its size, which is fixed here."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    for patch in (figure.patch, *(axes.patch for axes in figure.axes)):
        patch.set_facecolor("none")
        patch.set_edgecolor("none")
    FigureCanvasSVG(figure).print_svg(out, metadata={"Date": None, "Creator": None})


def series_styles(study: StudyResults) -> dict[str, SeriesStyle]:
    """Style of each method. Bounds are grey; they and methods beyond the number of hues are dashed."""
    styles: dict[str, SeriesStyle] = {}
    rank = 0
    markers = list(_MARKERS)
    for method, label in study.labels.items():
        if study.of(method)[0].summary.is_bound:
            styles[method] = SeriesStyle(label, "m0", dashed=True, marker="D")
        else:
            marker = markers[rank % len(markers)]
            styles[method] = SeriesStyle(label, f"m{rank % HUES + 1}", dashed=rank >= HUES, marker=marker)
            rank += 1
    return styles


def line_style(series: SeriesStyle, palette: Palette, markersize: float = 0.0) -> dict[str, Any]:
    """Keywords of a line; by its label a page knows whose values it has."""
    line = {
        "color": palette(series.colour),
        "linewidth": 1.6,
        "linestyle": (0, (4, 2)) if series.dashed else "-",
        "label": series.label,
    }
    return line | ({"marker": series.marker, "markersize": markersize} if markersize else {})


def grid_of(panels: int, most: int) -> tuple[int, int]:
    """Lines and columns of so many panels, at most so many side by side."""
    columns = min(most, panels)
    return -(-panels // columns), columns


def add_title(axes: "Axes", palette: Palette, title: str) -> None:
    """The title of a panel."""
    axes.set_title(title, fontsize=TITLE, color=palette("ink"), loc="left", fontweight="bold")


def add_legend(axes: "Axes | Figure", palette: Palette, **where: Any) -> None:
    """A legend without a frame."""
    axes.legend(fontsize=LETTERS, frameon=False, labelcolor=palette("ink"), **where)


def add_colour_bar(figure: "Figure", image: Any, axes: "Sequence[Axes]", palette: Palette, words: str) -> None:
    """The scale of shades of heat maps."""
    bar = figure.colorbar(image, ax=axes, shrink=0.8, aspect=30, pad=0.01)
    bar.ax.tick_params(colors=palette("muted"), labelsize=LETTERS)
    bar.set_label(words, color=palette("muted"), fontsize=LETTERS)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]


def without_box(axes: "Axes", palette: Palette, title: str) -> None:
    """Axes of names: a title, no lines around, no ticks."""
    add_title(axes, palette, title)
    axes.tick_params(colors=palette("muted"), labelsize=LETTERS, length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def style_axes(axes: "Axes", palette: Palette, title: str, x: str, y: str, across: bool = False) -> None:
    """Axes as they look throughout: light lines at the values, upright ones where bars lie, and no box."""
    add_title(axes, palette, title)
    axes.set_xlabel(x, color=palette("muted"), fontsize=LETTERS)
    axes.set_ylabel(y, color=palette("muted"), fontsize=LETTERS)
    axes.tick_params(colors=palette("muted"), labelsize=LETTERS, length=3, width=0.8)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(palette("muted"))
    axes.grid(axis="x" if across else "y", color=palette("grid"), linewidth=0.9)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)


def whole_rounds(axes: "Axes") -> None:
    """Ticks at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))


def plain_log_scale(axes: "Axes", which: Literal["x", "y"], form: Callable[[float], str]) -> None:
    """A scale of powers whose numbers are plain: powers of ten would be written in a language of formulas."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_formatter(FuncFormatter(lambda value, _: form(value)))
    axis.set_minor_locator(NullLocator())


# Values of a drawn figure and where they stand, for a page that shows and saves them --------------------------


def panels_of(figure: "Figure") -> list[dict[str, Any]]:
    """Every panel with labelled lines, points or bars; what has no label is decoration."""
    height = figure.bbox.height
    panels = [_panel(axes, height) for axes in figure.axes]
    return [panel for panel in panels if panel["series"]]


def name_positions(axis: "Axis", positions: Sequence[float], names: Sequence[str], **style: Any) -> None:
    """Names in place of numbers on an axis."""
    from matplotlib.ticker import FixedFormatter

    axis.set_ticks(list(positions), labels=list(names), **style)
    axis.set_major_formatter(FixedFormatter(names))


def _panel(axes: "Axes", height: float) -> dict[str, Any]:
    box = axes.get_window_extent()
    across, up = _names(axes.xaxis), _names(axes.yaxis)
    series: list[tuple[str, Any, list[tuple[Any, ...]]]] = []
    for label, colour, points in _series(axes):
        values: list[tuple[Any, ...]] = []
        for x, y in points:
            values.append((across.get(round(x), _short(x)), up.get(round(y), _short(y)), *_at(axes, x, y, height)))
        series += [(label, colour, values)] if values else []
    return {
        "title": axes.get_title(loc="left"),
        "x": axes.get_xlabel(),
        "y": axes.get_ylabel(),
        "box": [round(value, 1) for value in (box.x0, height - box.y1, box.width, box.height)],
        "series": series,
    }


def _series(axes: "Axes") -> Iterable[tuple[str, Any, list[tuple[float, float]]]]:
    """Label, colour and finite points of what a legend would list."""
    from matplotlib.colors import to_hex
    from matplotlib.container import BarContainer, ErrorbarContainer
    from matplotlib.lines import Line2D

    for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
        line = handle.lines[0] if isinstance(handle, ErrorbarContainer) else handle
        if isinstance(line, Line2D) and line.get_transform() == axes.transData:  # a level has no points
            pairs = np.asarray(line.get_xydata(), dtype=float).tolist()
            yield label, line.get_color(), [(x, y) for x, y in pairs if math.isfinite(x) and math.isfinite(y)]
        elif isinstance(line, BarContainer):
            bars = [(float(bar.get_x() + bar.get_width() / 2), float(bar.get_height())) for bar in line]
            yield label, to_hex(line[0].get_facecolor()) if bars else "", bars


def _names(axis: "Axis") -> Mapping[int, str]:
    """Position -> name, of an axis that :func:`name_positions` was called for."""
    from matplotlib.ticker import FixedFormatter, FixedLocator

    formatter, locator = axis.get_major_formatter(), axis.get_major_locator()
    if not (isinstance(formatter, FixedFormatter) and isinstance(locator, FixedLocator)):
        return {}
    return dict(zip(map(round, locator()), map(str, formatter.seq), strict=True))


def _at(axes: "Axes", x: float, y: float, height: float) -> tuple[float, float]:
    left, up = axes.transData.transform((x, y))
    return round(float(left), 1), round(height - float(up), 1)


def _short(value: float) -> float:
    return float(f"{value:.6g}")


# Labels of lines and points in figures, placed without overlap ------------------------------------------------


NAMES_AT = 1.04  # where names at the right edge begin, as a share of the width of the axes
Box = tuple[float, float, float, float]  # left, bottom, right, top


End = tuple[SeriesStyle, float, float]  # how a line or point looks, and where it ends


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions near the wanted ones in the same order, at least ``gap`` apart; evenly spaced without room."""
    if not wanted:
        return []
    order = np.argsort(wanted, kind="stable")
    distances = min(gap, (high - low) / max(len(wanted) - 1, 1)) * np.arange(len(wanted))
    # Less their distances to the first, positions must not fall: isotonic regression, by its max-min formula.
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(wanted)[order] - distances)])
    first, last = np.indices((len(wanted), len(wanted)))
    means = np.where(first <= last, (sums[last + 1] - sums[first]) / np.maximum(last + 1 - first, 1), np.inf)
    rising = np.array([means[: i + 1, i:].min(axis=1).max() for i in range(len(wanted))])
    placed = np.empty(len(wanted))
    placed[order] = rising.clip(low, high - distances[-1]) + distances
    return placed.tolist()


def at_ends(figure: "Figure", panels: "Sequence[tuple[Axes, Sequence[End]]]", palette: Palette) -> None:
    """Names of lines at the right edge of each panel, joined to their ends; called when all else is drawn."""
    from matplotlib.lines import Line2D

    names: list[list[Text]] = []
    for axes, ends in panels:
        style: dict[str, Any] = {"transform": axes.transAxes, "va": "center", "fontsize": LETTERS}
        names.append([axes.text(NAMES_AT, 0.5, s.label, color=palette(s.colour), **style) for s, _, _ in ends])
    _settle(figure)
    for (axes, ends), texts in zip(panels, names, strict=True):
        spots = [axes.transAxes.inverted().transform(axes.transData.transform((x, y))) for _, x, y in ends]
        gap = 1.22 * LETTERS * figure.dpi / 72 / axes.get_window_extent().height
        placed = spread([float(spot[1]) for spot in spots], gap, 0.0, 1.0)
        for (series, _, _), text, spot, height in zip(ends, texts, spots, placed, strict=True):
            text.set_y(height)
            leader = Line2D(
                [float(spot[0]) + 0.01, NAMES_AT - 0.008], [float(spot[1]), height], transform=axes.transAxes,
                clip_on=False, color=palette(series.colour), linewidth=0.6, alpha=0.55,
            )  # fmt: skip
            axes.add_artist(leader)


def at_points(figure: "Figure", axes: "Axes", points: Mapping[str, End], palette: Palette) -> None:
    """Names of points beside them, further away with a line where there is no room; called when all else is drawn."""
    _settle(figure)
    scale = figure.dpi / 72
    inside = axes.get_window_extent()
    limits = (inside.x0, inside.y0, inside.x1, inside.y1)
    spots = {key: tuple(map(float, axes.transData.transform((x, y)))) for key, (_, x, y) in points.items()}
    groups: list[list[str]] = []
    for key, spot in spots.items():
        near = (g for g in groups if np.hypot(spots[g[0]][0] - spot[0], spots[g[0]][1] - spot[1]) < 3 * scale)
        group = next(near, None)
        if group is None:
            groups.append([key])
        else:
            group.append(key)
    radius = 4 * scale
    taken: list[Box] = [(x - radius, y - radius, x + radius, y + radius) for x, y in spots.values()]
    for group in groups:
        text = ", ".join(points[key][0].label for key in group)
        width, height = 0.56 * LETTERS * len(text) * scale, 1.15 * LETTERS * scale
        offset, box = _free(spots[group[0]], width, height, taken, limits, scale)
        taken.append(box)
        series, x, y = points[group[0]]
        far = np.hypot(*offset) > 14 * scale + width / 2
        arrow = {"arrowstyle": "-", "color": palette(series.colour), "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3}
        axes.annotate(
            text, (x, y), xytext=(offset[0] / scale, offset[1] / scale), textcoords="offset points", ha="center",
            va="center", fontsize=LETTERS, color=palette("ink"), arrowprops=arrow if far else None,
        )  # fmt: skip


def _settle(figure: "Figure") -> None:
    """One-time computation of the layout; later additions move nothing."""
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.execute(figure)  # all that drawing would do before it places anything
    figure.set_layout_engine("none")


def _free(
    spot: tuple[float, ...], width: float, height: float, taken: Sequence[Box], limits: Box, scale: float
) -> tuple[tuple[float, float], Box]:
    """Position of a name: its centre relative to the point, and its box; the least crowded one if none is free."""
    best: tuple[float, tuple[float, float], Box] | None = None
    for ring in range(1, 9):
        distance = (1 + 6 * ring) * scale
        for right, up in ((0, 1), (1, 0), (-1, 0), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1)):
            offset = (right * (width / 2 + distance), up * (height / 2 + distance))
            x, y = spot[0] + offset[0], spot[1] + offset[1]
            box = (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
            outside = (box[2] - box[0]) * (box[3] - box[1]) - _overlap(box, limits)
            cost = sum(_overlap(box, other) for other in taken) + 4 * outside
            if cost == 0:
                return offset, box
            if best is None or cost < best[0]:
                best = (cost, offset, box)
    assert best is not None
    return best[1], best[2]


def _overlap(a: Box, b: Box) -> float:
    """Shared area."""
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))

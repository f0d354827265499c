"""Common style of a study's figures: colours, markers, axes and file formats.

A drawing is kept as a function that draws it, and is written for a page (inline SVG whose colours are CSS
variables, so that it suits a light and a dark page), as an SVG file, or as a PNG file. In SVG letters are real
text. The same numbers give the same bytes.
"""

import io
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from confed.data.intake.opening import read_picture
from confed.report.figures.values import panels_of
from confed.results.runs import StudyResults
from confed.system.plain_text import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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

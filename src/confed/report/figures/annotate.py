"""Labels of lines and points in figures, placed without overlap."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from confed.report.figures.style import LETTERS, Palette, SeriesStyle

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text


NAMES_AT = 1.04  # where names at the right edge begin, as a share of the width of the axes
Box = tuple[float, float, float, float]  # left, bottom, right, top


End = tuple[SeriesStyle, float, float]  # how a line or point looks, and where it ends


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions near the wanted ones in the same order, at least ``gap`` apart; evenly spaced without room."""
    if not wanted:
        return []
    if (len(wanted) - 1) * gap > high - low:
        gap = (high - low) / (len(wanted) - 1)
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    # Blocks of positions that touch, each centred on the mean of what its members want.
    blocks: list[list[int]] = []
    for i in order:
        blocks.append([i])
        while len(blocks) > 1 and _start(blocks[-1], wanted, gap, low, high) < (
            _start(blocks[-2], wanted, gap, low, high) + gap * len(blocks[-2])
        ):
            last = blocks.pop()
            blocks[-1] += last
    placed = [0.0] * len(wanted)
    for block in blocks:
        start = _start(block, wanted, gap, low, high)
        for position, i in enumerate(block):
            placed[i] = start + gap * position
    return placed


def _start(block: Sequence[int], wanted: Sequence[float], gap: float, low: float, high: float) -> float:
    """The lowest position of a block."""
    length = gap * (len(block) - 1)
    centre = sum(wanted[i] for i in block) / len(block)
    return min(max(centre - length / 2, low), high - length)


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

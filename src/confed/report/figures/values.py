"""Values of a drawn figure and where they stand, for a page that shows and saves them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure


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

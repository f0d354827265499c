"""HTML pages and components, rendered from the templates beside this module.

Text is escaped by the templates (autoescape is on), except for parameters whose name ends in ``html``: these are markup
that another function of this package made.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from functools import cache, partial
from html import escape
from importlib.resources import files
from itertools import chain, count
from typing import TYPE_CHECKING, Any

from confed.system import format as formats
from confed.system.plain_text import visible

if TYPE_CHECKING:
    from jinja2 import Environment

__all__ = [
    "Tabs", "callout", "chips", "component", "definitions", "details", "document", "escape", "figure", "heatmap",
    "legend", "listed", "listing", "paragraph", "tiles",
]  # fmt: skip

MOST_TABS = 32  # more panels than this are folded one below the other

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; media-src data:"
"""What a browser may do with a page (Content Security Policy), but for its script."""

LEAST_RANGE = 0.05  # shades reach over at least this range, so that tiny differences look tiny


@cache
def _environment() -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("confed.report.html")
    return Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)


def component(name: str, *values: Any, template: str = "components") -> str:
    """A macro of a template as HTML."""
    return str(vars(_environment().get_template(f"{template}.html").module)[name](*values)).strip()


# Macros of ``components.html`` that take text, lists of it, or pairs, as it says there.
chips, tiles, legend, listing, definitions, details, paragraph, callout = (
    partial(component, name)
    for name in ("chips", "tiles", "legend", "listing", "definitions", "details", "paragraph", "callout")
)


class Tabs:
    """Groups of tabs that work without a script; every group has its own name on the page."""

    def __init__(self) -> None:
        self._groups = count(1)

    def __call__(self, panels: Sequence[tuple[str, str]], shown: int = 0, about: str = "", style: str = "muted") -> str:
        """Panels of which one is shown at a time, under a text about them; nothing without any."""
        if not panels:
            return ""
        head = paragraph(about, style) if about else ""
        if len(panels) == 1:
            return head + panels[0][1]
        if len(panels) > MOST_TABS:
            return head + "".join(details(title, html) for title, html in panels)
        return head + component("tabs", f"tabs{next(self._groups)}", panels, shown)


def document(title: str, head_html: str, sections: Sequence[tuple[str, str, str]], extra_css: str = "") -> str:
    """A complete page that loads nothing."""
    css, script = (
        files("confed.report.html").joinpath(f"report.{kind}").read_text(encoding="utf-8") for kind in ("css", "js")
    )
    # This script and no other runs, and nothing is loaded, whatever the texts of the page hold.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"{POLICY}; script-src 'sha256-{digest}'"
    page = _environment().get_template("page.html")
    shown = [entry for entry in sections if entry[2]]
    text = page.render(
        title=title,
        css=css,
        script=script,
        policy=policy,
        head_html=head_html,
        sections=shown,
        extra_css=extra_css,
        most_tabs=MOST_TABS,
    )
    return visible(text) + "\n"


def figure(svg_html: str, caption: str = "", title: str = "") -> str:
    """A drawing with a caption; nothing if there is no drawing."""
    if (title or caption) and svg_html.startswith("<svg"):
        svg_html = f'<svg role="img" aria-label="{escape(title or caption)}"{svg_html.removeprefix("<svg")}'
    return component("figure", svg_html, caption) if svg_html else ""


def listed(names: Sequence[str]) -> str:
    """Names joined as in a sentence."""
    if any("," in name for name in names):
        return formats.names(names)
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def heatmap(
    corner: str,
    columns: Sequence[str],
    rows: Sequence[tuple[str, Sequence[float | None]]],
    *,
    framed: Mapping[str, str] | None = None,
    by_column: bool = False,
    sections: int = 0,
) -> str:
    """A table of fractions in percent, shaded from the smallest to the largest; ``framed`` cells get a frame."""
    in_columns: list[list[float]] = []
    for i in range(len(columns)):
        in_columns.append([value for _, values in rows if (value := values[i]) is not None])
    if not by_column:
        in_columns = [list(chain.from_iterable(in_columns))] * len(columns)
    lines: list[tuple[str, list[tuple[str, float | None, bool, float | None]]]] = []
    for name, values in rows:
        cells: list[tuple[str, float | None, bool, float | None]] = []
        for column, value, present in zip(columns, values, in_columns, strict=True):
            frame = framed is not None and framed.get(name) == column
            cells.append((formats.percent(value), _shade(value, present), frame, value))
        lines.append((name, cells))
    cut = len(lines) - sections
    return component("heatmap", corner, columns, [lines[:cut], lines[cut:]])


def _shade(value: float | None, present: Sequence[float]) -> float | None:
    """How dark a value is among others."""
    if value is None:
        return None
    return 0.05 + 0.5 * (1 - (max(present) - value) / max(max(present) - min(present), LEAST_RANGE))

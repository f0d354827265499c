"""Pieces of an HTML page: sections, tables of shaded cells, tabs, tiles, legends.

Every function takes plain text and escapes it, except where a parameter is called ``html``: that is markup
made by another function of this package.
"""

from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from itertools import count

from confed.results import format as formats
from confed.system.plain_text import visible

__all__ = [
    "Tabs",
    "callout",
    "chips",
    "definitions",
    "details",
    "document",
    "escape",
    "figure",
    "heatmap",
    "legend",
    "paragraph",
    "section",
    "tiles",
]

MOST_TABS = 32
"""More panels than this are folded one below the other."""

LEAST_RANGE = 0.05
"""Shades reach over at least this range, so that tiny differences look tiny."""


class Tabs:
    """Makes groups of tabs that work without a script, each group with a name of its own on the page."""

    def __init__(self) -> None:
        self._groups = count(1)

    def __call__(self, panels: Sequence[tuple[str, str]], shown: int = 0) -> str:
        """Panels of which one is shown at a time.

        Args:
            panels: title (text) and content (HTML) of each.
            shown: which one is shown at first.
        """
        if len(panels) == 1:
            return panels[0][1]
        if len(panels) > MOST_TABS:
            return "".join(f"<details><summary>{escape(t)}</summary>{html}</details>" for t, html in panels)
        name = f"tabs{next(self._groups)}"
        ids = [f"{name}-{i}" for i in range(len(panels))]
        inputs = "".join(
            f"<input type=radio name={name} id={key}{' checked' if i == shown else ''}>" for i, key in enumerate(ids)
        )
        labels = "".join(
            f"<label for={key}>{escape(title)}</label>" for key, (title, _) in zip(ids, panels, strict=True)
        )
        # On paper every panel is shown, below its title.
        bodies = "".join(f'<div class=panel data-title="{escape(title)}">{html}</div>' for title, html in panels)
        return f"<div class=tabs>{inputs}<div class=tablist>{labels}</div><div class=panels>{bodies}</div></div>"


def document(title: str, head_html: str, sections: Sequence[tuple[str, str, str]], extra_css: str = "") -> str:
    """A complete page that needs nothing but itself.

    Args:
        title: of the page.
        head_html: what stands above the sections.
        sections: anchor, title and content (HTML) of each section; sections without content are left out.
        extra_css: rules of this page.
    """
    sections = [entry for entry in sections if entry[2]]
    links = "".join(f'<a href="#{escape(key)}">{escape(name)}</a>' for key, name, _ in sections)
    body = "".join(section(*entry) for entry in sections)
    css = files("confed.report.html").joinpath("report.css").read_text(encoding="utf-8")
    return visible(
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{css}{_tab_css()}{extra_css}</style>\n</head>\n<body>\n"
        f"<header>{head_html}<nav>{links}</nav></header>\n<main>\n{body}</main>\n"
        "<footer>Written by confed. This file is complete in itself: it loads "
        "nothing.</footer>\n</body>\n</html>\n"
    )


def section(anchor: str, title: str, html: str) -> str:
    """A titled box that links can point to."""
    return f'<section id="{escape(anchor)}"><h2>{escape(title)}</h2>{html}</section>\n'


def paragraph(text: str, style: str = "") -> str:
    """A paragraph of plain text."""
    return f"<p{f' class={style}' if style else ''}>{escape(text)}</p>"


def callout(lines: Sequence[str]) -> str:
    """Something the reader must not miss; nothing if there are no lines."""
    return f"<div class=callout>{''.join(map(paragraph, lines))}</div>" if lines else ""


def chips(texts: Sequence[str]) -> str:
    """Short facts in a row."""
    return f"<ul class=chips>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>"


def tiles(entries: Sequence[tuple[str, str]]) -> str:
    """Large figures with what they are: (figure, explanation)."""
    inner = "".join(f"<div class=tile><b>{escape(a)}</b><span>{escape(b)}</span></div>" for a, b in entries)
    return f"<div class=tiles>{inner}</div>"


def legend(entries: Sequence[tuple[str, str, bool, str]]) -> str:
    """Line samples: (label, CSS colour name without the dashes, dashed, marker as a character)."""
    inner = ""
    for label, colour, dashed, marker in entries:
        style = f'{"class=dashed " if dashed else ""}style="border-color:var(--{colour})"'
        inner += f'<li><i {style}></i><b style="color:var(--{colour})">{escape(marker)}</b>{escape(label)}</li>'
    return f"<ul class=legend>{inner}</ul>"


def figure(svg_html: str, caption: str = "", title: str = "") -> str:
    """A drawing with a caption; nothing if there is no drawing.

    Args:
        svg_html: the drawing.
        caption: what stands below it.
        title: what screen readers say in its place; the caption if there is none.
    """
    if (title or caption) and svg_html.startswith("<svg"):
        svg_html = f'<svg role="img" aria-label="{escape(title or caption)}"{svg_html.removeprefix("<svg")}'
    under = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"<figure>{svg_html}{under}</figure>" if svg_html else ""


def definitions(entries: Mapping[str, str]) -> str:
    """Terms and what they mean."""
    return f"<dl>{''.join(f'<dt>{escape(k)}</dt><dd>{escape(v)}</dd>' for k, v in entries.items())}</dl>"


def details(title: str, html: str) -> str:
    """Something folded away below its title."""
    return f"<details><summary>{escape(title)}</summary>{html}</details>"


def heatmap(
    corner: str,
    columns: Sequence[str],
    rows: Sequence[tuple[str, Sequence[float | None]]],
    *,
    own: Mapping[str, str] | None = None,
    by_column: bool = False,
    sections: int = 0,
) -> str:
    """A table of fractions, shown in percent, whose cells are shaded from the smallest to the largest.

    Args:
        corner: heading of the row names.
        columns: headings.
        rows: name and values of each row.
        own: row name -> the column whose cell is framed.
        by_column: shade every column for itself.
        sections: number of last rows that are set apart by a rule.
    """
    ranges = [[values[i] for _, values in rows if values[i] is not None] for i in range(len(columns))]
    if not by_column:
        ranges = [[value for part in ranges for value in part]] * len(columns)
    head = "".join(f"<th scope=col>{escape(text)}</th>" for text in (corner, *columns))
    lines: list[str] = []
    for name, values in rows:
        cells = ""
        for column, value, present in zip(columns, values, ranges, strict=True):
            if value is None:
                cells += f"<td class=muted>{formats.MISSING}</td>"
                continue
            high = max(x for x in present if x is not None)
            low = min(x for x in present if x is not None)
            share = 1 - (high - value) / max(high - low, LEAST_RANGE)
            framed = " own" if own and own.get(name) == column else ""
            text = formats.percent(value)
            cells += f'<td class="heat{framed}" style="--a:{0.05 + 0.5 * share:.2f}">{escape(text)}</td>'
        lines.append(f"<tr><td>{escape(name)}</td>{cells}</tr>")
    cut = len(lines) - sections
    bodies = "".join(f"<tbody>{''.join(part)}</tbody>" for part in (lines[:cut], lines[cut:]) if part)
    return f"<div class=scroll><table class=heatmap><thead><tr>{head}</tr></thead>{bodies}</table></div>"


def _tab_css() -> str:
    """For each position: the checked input shows its panel and lights its label."""
    rules = ""
    for k in range(1, MOST_TABS + 1):
        on = f".tabs>input:nth-of-type({k}):checked~"
        focus = f".tabs>input:nth-of-type({k}):focus-visible~"
        rules += (
            f"{on}.panels>.panel:nth-of-type({k}){{display:block}}"
            f"{on}.tablist>label:nth-of-type({k}){{background:var(--accent);border-color:var(--accent);"
            f"color:var(--card)}}{focus}.tablist>label:nth-of-type({k}){{outline:2px solid var(--ink)}}\n"
        )
    return rules

"""Tables in five formats: terminal, Markdown, CSV, LaTeX and HTML."""

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from confed.federation.checkpoint import write_atomically
from confed.system import format as formats
from confed.system.packages import pandas
from confed.system.plain_text import cell_text, visible

if TYPE_CHECKING:
    from pandas import DataFrame
    from rich.table import Table as RichTable


Mark = Literal["", "best"]

Row = tuple["Cell", ...]

SILENT = {"", "–", "reference"}  # texts of cells that hold no value
WIDE = 8  # tables with more columns than this are set in small letters in LaTeX


def plain_number(value: float | None) -> str:
    """A whole number as it is, another with four digits."""
    if value is None:
        return formats.MISSING
    return str(int(value)) if float(value).is_integer() else f"{value:.4g}"


@dataclass(frozen=True)
class Cell:
    """One entry of a table."""

    text: str  # as people read it
    # The number behind it in the unit of its column, written to CSV at full precision; None for words and for missing
    # values.
    value: float | None = None
    sd: float | None = None  # standard deviation over seeds, in the same unit
    mark: Mark = ""  # "best" where tests do not tell it from the best of its column


@dataclass(frozen=True)
class Column:
    """A column."""

    title: str
    group: str = ""  # the heading above the headings, shared with its neighbours
    unit: str = ""  # of the values in CSV ("%", "bytes", "s")
    words: bool = False  # whether it holds text, which is aligned to the left
    detail: bool = False  # left out wherever space is short (that is everywhere but in CSV)
    # What stands in the row of an item: a cell, words, or a number.
    read: Callable[[Any], "Cell | str | float | None"] = field(default=str, compare=False, repr=False)
    # A number as people read it.
    form: Callable[[float | None], str] = field(default=plain_number, compare=False, repr=False)

    @property
    def full_title(self) -> str:
        """Group and title in one line."""
        return f"{self.group} {self.title}".strip()

    def cell(self, item: Any) -> Cell:
        """The cell in the row of an item."""
        value = self.read(item)
        if isinstance(value, Cell):
            return value
        return Cell(value) if isinstance(value, str) else Cell(self.form(value), value)


@dataclass(frozen=True)
class Table:
    """A table whose rows come in sections separated by rules, with sentences below it."""

    title: str
    columns: tuple[Column, ...]
    sections: tuple[tuple[Row, ...], ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"every row must have {len(self.columns)} cells, got {len(row)}")

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows of all sections."""
        return tuple(chain.from_iterable(self.sections))

    def without_empty(self) -> "Table":
        """The table without columns that say nothing: of tests over seeds, say, where there is one seed."""
        shown: set[int] = set()
        for row in self.rows:
            shown |= {i for i, cell in enumerate(row) if cell.text not in SILENT}
        return self._only(sorted(shown))

    def brief(self) -> "Table":
        """The table without its columns of detail."""
        return self._only([i for i, column in enumerate(self.columns) if not column.detail])

    def frame(self) -> "DataFrame":
        """The table as a pandas data frame: values in the units of their columns, leading columns of words as index."""
        titles = [column.full_title for column in self.columns]
        rows: list[list[str | float]] = []
        for row in self.rows:
            pairs = zip(self.columns, row, strict=True)
            rows.append([cell.text if column.words else _float(cell.value) for column, cell in pairs])
        words = [column.full_title for column in takewhile(lambda column: column.words, self.columns)]
        frame = pandas().DataFrame(rows, columns=titles)
        return frame.set_index(words) if words else frame

    def _repr_html_(self) -> str:
        return to_html(self)

    def _only(self, keep: Sequence[int]) -> "Table":
        """The table with these of its columns."""

        def line(row: Row) -> Row:
            return tuple(row[i] for i in keep)

        sections = tuple(tuple(map(line, section)) for section in self.sections)
        return replace(self, columns=tuple(self.columns[i] for i in keep), sections=sections)


def pivot(title: str, columns: Sequence[Column], *sections: Iterable[Any], notes: Sequence[str] = ()) -> Table:
    """A table with a row for each item, of which every column reads its cell."""

    def line(item: Any) -> Row:
        return tuple(column.cell(item) for column in columns)

    return Table(title, tuple(columns), tuple(tuple(map(line, items)) for items in sections), tuple(notes))


def _float(value: float | None) -> float:
    return float("nan") if value is None else value


def joined(title: str, tables: Mapping[str, Table]) -> Table:
    """Tables with the same columns as one, for CSV: a column in front says which table a row is from."""
    first = next(iter(tables.values()))
    sections: list[tuple[Row, ...]] = []
    for name, table in tables.items():
        for section in table.sections:
            sections.append(tuple((Cell(name), *row) for row in section))
    return Table(first.title, (Column(title, words=True), *first.columns), tuple(sections))


def in_files(name: str, table: Table) -> dict[str, str]:
    """Name of a file -> its content: the table in Markdown, CSV and LaTeX."""
    return {f"{name}.md": to_markdown(table), f"{name}.csv": to_csv(table), f"{name}.tex": to_latex(table)}


def write_files(folder: Path, files: Mapping[str, str] | Mapping[str, bytes]) -> list[Path]:
    """Atomic export of files, by name, to a folder that is made if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_atomically(folder / name, content.encode() if isinstance(content, str) else content)
    return [folder / name for name in files]


def to_rich(table: Table) -> "RichTable":
    """The table for a terminal: marked values bold."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    table = table.brief()
    caption = Text(visible("\n".join(table.notes)), justify="left")
    out = RichTable(
        title=Text(visible(table.title)),
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        caption=caption,
        title_justify="left",
        caption_justify="left",
    )
    before = ""
    for column in table.columns:
        # The group stands once, over its first column; long names are broken: the table fits 80 columns.
        title = _broken(column.title) if column.group else column.title
        heading = f"{column.group}\n{title}" if column.group and column.group != before else title
        before = column.group
        justify: Literal["left", "right"] = "left" if column.words else "right"
        out.add_column(Text(visible(heading)), justify=justify, no_wrap=True, vertical="bottom")
    styles = {"best": "bold", "": ""}
    for section in table.sections:
        for row in section:
            out.add_row(*(Text(visible(cell.text), style=styles[cell.mark]) for cell in row))
        out.add_section()
    return out


def _broken(title: str, widest: int = 8) -> str:
    half = (len(title) + 1) // 2
    return f"{title[:half]}-\n{title[half:]}" if len(title) > widest else title


def to_markdown(table: Table) -> str:
    """The table as a pipe table: marked values bold, a blank row between sections."""
    table = table.brief()

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    marks = {"best": "**{}**", "": "{}"}
    lines = [
        f"**{_markdown(table.title)}**",
        "",
        line([_markdown(column.full_title) for column in table.columns]),
    ]
    lines.append(line([":---" if column.words else "---:" for column in table.columns]))
    for position, section in enumerate(section for section in table.sections if section):
        if position:
            lines.append(line([""] * len(table.columns)))
        for row in section:
            lines.append(line([marks[cell.mark].format(_markdown(cell.text)) for cell in row]))
    lines += [f"\n{_markdown(note)}" for note in table.notes]
    return visible("\n".join(lines)) + "\n"


def to_csv(table: Table) -> str:
    """The table as CSV: all columns, numbers at full precision, standard deviations in their own columns."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    rows = table.rows
    spread = [False] * len(table.columns)
    for row in rows:
        spread = [has_sd or cell.sd is not None for has_sd, cell in zip(spread, row, strict=True)]
    header: list[str] = []
    for column, has_sd in zip(table.columns, spread, strict=True):
        unit = f" ({column.unit})" if column.unit else ""
        header += [column.full_title + unit] + ([f"{column.full_title} sd{unit}"] if has_sd else [])
    writer.writerow(map(cell_text, header))
    for row in rows:
        values: list[str] = []
        for column, cell, has_sd in zip(table.columns, row, spread, strict=True):
            values.append(cell.text if column.words else _exact(cell.value))
            values += [_exact(cell.sd)] if has_sd else []
        writer.writerow(map(cell_text, values))
    return stream.getvalue()


def to_latex(table: Table) -> str:
    """The table as a ``booktabs`` tabular with caption, ready to be included."""
    table = table.brief()
    marks = {"best": r"\textbf{%s}", "": "%s"}
    lines = [r"\begin{table}", r"\centering", rf"\caption{{{_latex(table.title)}}}"]
    if len(table.columns) > WIDE:
        lines.append(r"\scriptsize\setlength{\tabcolsep}{3pt}")
    lines.append(rf"\begin{{tabular}}{{{''.join('l' if column.words else 'r' for column in table.columns)}}}")
    lines.append(r"\toprule")
    groups = _groups(table.columns)
    if any(group for group, _ in groups):
        over = [rf"\multicolumn{{{n}}}{{c}}{{{_latex(group)}}}" for group, n in groups]
        lines.append(" & ".join(over) + r" \\")
        start, rules = 1, []
        for group, n in groups:
            rules += [rf"\cmidrule(lr){{{start}-{start + n - 1}}}"] if group else []
            start += n
        lines.append(" ".join(rules))
    lines.append(" & ".join(_latex(column.title) for column in table.columns) + r" \\")
    for section in (section for section in table.sections if section):
        lines.append(r"\midrule")
        for row in section:
            lines.append(" & ".join(marks[cell.mark] % _latex(cell.text) for cell in row) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}"]
    lines += [rf"\par\smallskip\footnotesize {_latex(note)}" for note in table.notes]
    return visible("\n".join([*lines, r"\end{table}"])) + "\n"


def to_html(table: Table) -> str:
    """The table as an HTML fragment; equal neighbours in a first column of words are one cell."""
    from confed.report.html.page import component

    table = table.brief()
    columns = table.columns
    merged = len(columns) > 1 and columns[0].words and columns[1].words
    sections: list[list[list[tuple[Column, Cell, int]]]] = []
    for section in table.sections:
        spans = _spans(section) if merged else [1] * len(section)
        rows: list[list[tuple[Column, Cell, int]]] = []
        for row, span in zip(section, spans, strict=True):
            rows.append(list(zip(columns, row, (span, *[1] * (len(row) - 1)), strict=True)))
        sections.append(rows)
    groups = _groups(columns) if any(column.group for column in columns) else []
    return component("table", table.title, groups, columns, sections, table.notes)


def wide_html(table: Table | None) -> str:
    """A table over the whole width of a page, with little room between its columns; nothing for None."""
    return "" if table is None else f'<div class="wide dense">{to_html(table)}</div>'


def _groups(columns: Sequence[Column]) -> list[tuple[str, int]]:
    """Runs of neighbouring columns with the same group, and their lengths."""
    groups: list[tuple[str, int]] = []
    for group, members in groupby(columns, key=lambda column: column.group):
        length = sum(1 for _ in members)
        groups += [(group, length)] if group else [("", 1)] * length
    return groups


def _spans(section: Sequence[Row]) -> list[int]:
    """Rows that the first cell of each row stands for; 0 if a row above stands for it."""
    spans: list[int] = []
    for _, rows in groupby(section, key=lambda row: row[0].text):
        length = sum(1 for _ in rows)
        spans += [length] + [0] * (length - 1)
    return spans


def _exact(value: float | None) -> str:
    return "" if value is None else f"{value:.10g}"


def _markdown(text: str) -> str:
    for character in "\\|*_<`":
        text = text.replace(character, "\\" + character)
    return text.replace("\n", " ")


_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"$<$", ">": r"$>$", "±": r"$\pm$", "–": "--",
    "−": "$-$", "³": r"\textsuperscript{3}", "²": r"\textsuperscript{2}", "Δ": r"$\Delta$", "≥": r"$\ge$",
    "×": r"$\times$", "\n": " ",
}  # fmt: skip


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)

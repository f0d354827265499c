"""Tables of the results pages, made from the CSV files of finished studies.

``python docs/make_tables.py`` rewrites every table below a marker on ``docs/results*.md`` and ``docs/results/*.md``;
``--check`` writes nothing, names page and line where a table and its CSV part, and exits with 1. A marker is an HTML
comment before the table, with TOML inside::

    <!-- table
    csv = "scenes_compare.csv"
    where = {measure = "personal on own data", reference = "FedAvg"}
    columns = ["method", "personal = value", "to FedAvg = difference", "p, seeds = over seeds p"]
    -->

=========== ====================================================================================================
key         meaning
=========== ====================================================================================================
``csv``     a file of ``docs/results``
``files``   "label = part": several files, ``csv`` with each part in place of {}; the label is the column "file"
``where``   column -> the value, or list of values, of the rows that are kept
``columns`` "heading = column", "heading = join.column" or "heading = {column} of {other:.2f}"; units are left out.
            "* = deployed *" stands for every column of that beginning, "@tests" for intervals and p-values
``rows``    the rows to show, by their cell in the first column: "printed = cell"; "" is an empty row. All by default
``join``    name -> a table of its own (csv, where, mean), whose rows belong to those of the same first column(s)
``on``      the columns by which rows are joined, the first column by default
``mean``    columns: rows with equal cells there are averaged, over seeds say; ``spread = true`` adds the deviation
``rename``  cell -> what is printed in its place
=========== ====================================================================================================

Cells are formatted by the unit of their column: %, points, bytes, parameters, p. A table without a CSV says why:
``<!-- table by hand: measured once, ... -->``; one of sentences is below ``<!-- table in words -->``.
"""

import csv
import re
import statistics
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from confed.system.format import MISSING, count, p_value, percent, points, size

DOCS = Path(__file__).parent
MARKER = re.compile(r"<!-- table\n(.*?)\n-->\n((?:\|[^\n]*\n)*)", re.DOTALL)
OTHER = re.compile(r"<!-- table (by hand: .+|in words) -->")
UNITS = ("", " (%)", " (points)", " (bytes)", " (clients)")
FIELD = re.compile(r"\{([^{}]+?)(?::([-+.\d]*[a-z%]))?\}")

TESTS = ("95 % CI, seeds = over seeds 95 % CI", "p, seeds = over seeds p")
TESTS += ("95 % CI, examples = over examples 95 % CI", "p, examples = over examples p")

Row = Mapping[str, str]
"""A row of a CSV file: heading -> cell."""


class Difference(NamedTuple):
    """A line of a page that is not what its CSV files give.

    Attributes:
        page: path of the page, from ``docs``.
        line: number of the line, from 1.
        text: what is wrong.
    """

    page: str
    line: int
    text: str


def read(folder: Path, spec: Mapping[str, Any]) -> list[Row]:
    """The rows that a marker, or one of its joins, takes from CSV files."""
    rows: list[Row] = []
    for label, part in map(halves, spec.get("files", [""])):
        with (folder / spec["csv"].replace("{}", part)).open(encoding="utf-8", newline="") as file:
            rows += [{"file": label, **row} for row in csv.DictReader(file)]
    for column, wanted in spec.get("where", {}).items():
        values = wanted if isinstance(wanted, list) else [wanted]
        rows = [row for row in rows if row[column_of(column, row)] in values]
    return averaged(rows, spec["mean"], spread=spec.get("spread", False)) if "mean" in spec else rows


def find(rows: Sequence[Row], key: Mapping[str, str]) -> Row | None:
    """The row with these cells, if there is one.

    Raises:
        ValueError: there are several.
    """
    found = [row for row in rows if all(row.get(column) == cell for column, cell in key.items())]
    if len(found) > 1:
        raise ValueError(f"{len(found)} rows with {dict(key)}: expected one; 'where' or 'on' selects too few")
    return found[0] if found else None


def column_of(name: str, row: Row) -> str:
    """The heading of a CSV file that a marker names without its unit.

    Raises:
        ValueError: there is none.
    """
    for unit in UNITS:
        if name + unit in row:
            return name + unit
    raise ValueError(f"no column {name!r}; there are {', '.join(row)}")


def number(text: str) -> float | None:
    """The number in a cell, if it is one."""
    try:
        return float(text)
    except ValueError:
        return None


def averaged(rows: Sequence[Row], by: Sequence[str], *, spread: bool) -> list[Row]:
    """Means of the rows with equal cells in some columns."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[column] for column in by), []).append(row)
    means: list[Row] = []
    for group in groups.values():
        row = dict(group[0])
        for column in [name for name in row if name.endswith(" (%)")]:
            values = [value for value in (number(other[column]) for other in group) if value is not None]
            if values:
                row[column] = str(statistics.fmean(values))
                if spread and len(values) > 1:
                    row[column.replace(" (%)", " sd (%)")] = str(statistics.stdev(values))
        means.append(row)
    return means


def printed(row: Row | None, name: str, style: str | None) -> str:
    """A cell as it is printed, by the unit of its column or in a style of its own."""
    column = column_of(name, row) if row is not None else ""
    text = row[column] if row is not None else ""
    value = number(text)
    if row is None or not text:
        reference = row is not None and "reference" in row and row["reference"] == row.get("method")
        return MISSING if not reference else "reference" if name == "difference" else ""
    if value is None:
        return text.replace("*", r"\*")
    spread = number(row.get(column.replace(" (%)", " sd (%)"), "")) if column.endswith(" (%)") else None
    if style:
        shown = f"{value:{style}}" + (f" ± {spread:.1f}" if spread is not None else "")
    elif column.endswith(" (%)"):
        shown = percent(value / 100, None if spread is None else spread / 100)
    else:
        shown = form(column, value)
    return shown.replace("-", "−").replace("<", r"\<")


def form(column: str, value: float) -> str:
    """A number by the unit of its column."""
    if column.endswith(" (points)"):
        return points(value / 100)
    if column.endswith(" (bytes)"):
        return size(value)
    if column.startswith("parameters"):
        return count(value)
    return p_value(value) if re.search(r"\bp\b", column) else f"{value:g}"


def filled(template: str, row: Row, joined: Mapping[str, Row | None]) -> str:
    """A column's template with the cells of a row, and of the rows joined to it; nothing where one is missing."""
    missing = False

    def cell(match: re.Match[str]) -> str:
        nonlocal missing
        source, _, name = match[1].partition(".")
        text = printed(joined[source], name, match[2]) if source in joined else printed(row, match[1], match[2])
        missing = missing or text == MISSING
        return text

    text = FIELD.sub(cell, template if "{" in template else f"{{{template}}}")
    return MISSING if missing else text


def halves(text: str) -> tuple[str, str]:
    """Heading and source of "heading = source", or the same word twice."""
    heading, found, source = text.partition(" = ")
    return (heading, source) if found else (text, text)


def expanded(columns: Sequence[str], row: Row) -> Iterator[tuple[str, str]]:
    """Headings and sources of a marker's columns: those that it names, or gives a pattern for."""
    for text in columns:
        heading, source = halves(text)
        if text == "@tests":
            yield from map(halves, TESTS)
        elif source.endswith("*"):
            found = [re.fullmatch(rf"{re.escape(source[:-1])}(.+) \(%\)", name) for name in row]
            names = [match[1] for match in found if match and not match[1].endswith(" sd")]
            yield from ((heading.replace("*", name), source[:-1] + name) for name in names)
        else:
            yield heading, source


def table(folder: Path, spec: Mapping[str, Any]) -> list[str]:
    """The lines of a table in Markdown, as a marker describes it.

    Raises:
        ValueError: the CSV file has no such column or row.
    """
    source = read(folder, spec)
    columns = list(expanded(spec["columns"], source[0]))
    joins = {name: read(folder, {**spec, "where": {}, **more}) for name, more in spec.get("join", {}).items()}
    on = spec.get("on", [columns[0][1]])
    first = column_of(columns[0][1], source[0])
    wanted = [halves(text) for text in spec.get("rows", [])] or [(row[first], row[first]) for row in source]
    rows: list[list[str]] = []
    for label, key in dict.fromkeys(wanted):
        found = [row for row in source if row[first] == key]
        if key and not found:
            raise ValueError(f"no row {key!r} in {spec['csv']}")
        for row in found if key else ():
            keys = {column: row[column] for column in on}
            joined = {name: find(join, keys) for name, join in joins.items()}
            cells = [filled(template, row, joined) for _, template in columns[1:]]
            rows.append([label.replace("*", r"\*"), *cells])
        rows += [] if key else [[""] * len(columns)]
    rows = [[spec.get("rename", {}).get(cell, cell) for cell in row] for row in rows]
    headings = [heading for heading, _ in columns]
    numeric = [any(map(str.isdigit, "".join(row[i] for row in rows))) for i in range(len(columns))]
    rules = [":---" if i == 0 or "CI" in name or not numeric[i] else "---:" for i, name in enumerate(headings)]
    return [f"| {' | '.join(cells)} |" for cells in (headings, rules, *rows)]


def rewritten(text: str, folder: Path) -> str:
    """A page with its tables made anew."""

    def again(match: re.Match[str]) -> str:
        try:
            lines = table(folder, tomllib.loads(match[1]))
        except (ValueError, KeyError) as error:
            line = text.count("\n", 0, match.start()) + 1
            raise ValueError(f"table of line {line}: {error}") from error
        return f"<!-- table\n{match[1]}\n-->\n" + "\n".join(lines) + "\n"

    return MARKER.sub(again, text)


def unmarked(lines: Sequence[str]) -> Iterator[int]:
    """The numbers of the lines at which tables without a marker begin."""
    for at, line in enumerate(lines):
        before = lines[at - 1] if at else ""
        if line.startswith("|") and not before.startswith("|") and before != "-->" and not OTHER.fullmatch(before):
            yield at + 1


def differences(page: Path, folder: Path) -> Iterator[Difference]:
    """The lines of a page that differ from what its CSV files give, and tables without a marker."""
    name = page.relative_to(DOCS).as_posix() if page.is_relative_to(DOCS) else page.name
    text = page.read_text(encoding="utf-8")
    for match in MARKER.finditer(text):
        line = text.count("\n", 0, match.start(2)) + 1
        shown, made = match[2].splitlines(), table(folder, tomllib.loads(match[1]))
        for i in range(max(len(shown), len(made))):
            pair = [rows[i] if i < len(rows) else "(no line)" for rows in (shown, made)]
            if pair[0] != pair[1]:
                yield Difference(name, line + i, f"{pair[0]}\n    the CSV gives: {pair[1]}")
    for line in unmarked(text.splitlines()):
        yield Difference(name, line, "a table without a marker: see docs/make_tables.py")


def pages() -> list[Path]:
    """All pages of results."""
    return [*sorted(DOCS.glob("results*.md")), *sorted((DOCS / "results").glob("*.md"))]


def main(arguments: Sequence[str]) -> int:
    """The command: the exit status."""
    found: list[Difference] = []
    for page in pages():
        if "--check" in arguments:
            found += differences(page, DOCS / "results")
        else:
            page.write_text(rewritten(page.read_text(encoding="utf-8"), DOCS / "results"), encoding="utf-8")
    for item in found:
        print(f"{item.page}:{item.line}: {item.text}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Check of the numbers on the results pages against the CSV files that they link.

``python docs/check_numbers.py [PAGE ...]`` reads the pages ``docs/results*.md`` section by section.

- A cell of a table with a spread ("82.0 ± 0.7") must stand, rounded as printed, in a row of the same name of one CSV,
  the one that fits the row best. Rows of which no CSV holds half the numbers were made by hand, and are passed over.
- A number in a sentence is traced if a table of its section (or of a section that the CSV is linked in) holds it, or
  holds two cells of one column with that difference ("A is 1.9 ahead of B"). This finds slips and not every wrong
  sentence: what a number is said of is not read.

What cannot be traced is listed: among it is whatever was measured by hand.
"""

import csv
import functools
import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parent
PRINTED = re.compile(r"(?<![\w.,/])[+−-]?\d+\.\d+(?![\w.])")
STORED = re.compile(r"[+−-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
LINK = re.compile(r"results/([\w.-]+\.csv)")


class Untraced(NamedTuple):
    """A printed number without a source.

    Attributes:
        page: the file's name.
        line: its line, from 1.
        table: whether the number stands in a table.
        text: the number as printed.
    """

    page: str
    line: int
    table: bool
    text: str


@dataclass
class Section:
    """A part of a page under one heading: its lines with their numbers, and the CSV files that it links."""

    lines: list[tuple[int, str]] = field(default_factory=list)
    links: set[str] = field(default_factory=set)


def sections(text: str) -> Iterator[Section]:
    """The sections of a page, without code blocks."""
    current, code = Section(), False
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("```"):
            code = not code
        elif line.startswith("#") and not code:
            yield current
            current = Section()
        elif not code:
            current.lines.append((number, line))
        current.links.update(LINK.findall(line))
    yield current


def rounded(values: Iterable[float]) -> set[str]:
    """Absolute values as they may be printed: to one to four decimals, fractions also in percent."""
    found: set[str] = set()
    for value in values:
        for scaled in (abs(value), 100 * abs(value)) if abs(value) <= 1 else (abs(value),):
            found.update(f"{scaled + nudge:.{places}f}" for places in (1, 2, 3, 4) for nudge in (0, 1e-9, -1e-9))
    return found


def stored(cell: str) -> list[float]:
    """The numbers of a CSV's cell."""
    return [float(text.replace("−", "-")) for text in STORED.findall(cell)]


def plain(cell: str) -> str:
    """A Markdown cell without its marks."""
    return re.sub(r"</?u>|\*\*|[\\`*]", "", cell).strip()


def table_rows(names: Iterable[str]) -> dict[str, list[list[str]]]:
    """CSV file -> its rows, but the heading."""
    found: dict[str, list[list[str]]] = {}
    for name in names:
        with (DOCS / "results" / name).open(encoding="utf-8", newline="") as file:
            found[name] = [[plain(cell) for cell in row] for row in csv.reader(file)][1:]
    return found


@functools.cache
def row_numbers(row: tuple[str, ...]) -> frozenset[str]:
    """The numbers of a CSV row as they may be printed."""
    return frozenset(rounded(number for cell in row for number in stored(cell)))


def of_row(cells: Sequence[str], files: Mapping[str, Sequence[Sequence[str]]]) -> set[str] | None:
    """What a printed table's row may say: the numbers of the rows of that name in the CSV that fits it best.

    None if no CSV holds half of its numbers in rows of that name: the table was made by hand.
    """
    names = [cell for cell in cells if cell and not PRINTED.search(cell)][:2]
    printed = [text for cell in cells for text in spread(cell)]
    best, most = None, len(printed) / 2
    for rows, wanted in itertools.product(files.values() if printed else (), (names, names[-1:], names[:1])):
        same = [row for row in rows if wanted and all(name in row for name in wanted)]
        known = set().union(*(row_numbers(tuple(row)) for row in same))
        fitting = sum(text in known for text in printed)
        if fitting > most or (best is None and fitting == most and fitting):
            best, most = known, fitting
    return best


def spread(cell: str) -> list[str]:
    """Mean and standard deviation of a cell that has both."""
    return PRINTED.findall(cell) if "±" in cell else []


def of_columns(rows: Sequence[Sequence[str]]) -> set[str]:
    """What a sentence may say of rows: their numbers, and differences within a column."""
    values: list[float] = []
    for column in itertools.zip_longest(*rows, fillvalue=""):
        cells = [stored(cell) for cell in column]
        values += itertools.chain.from_iterable(cells)
        single = [cell[0] for cell in cells if len(cell) == 1]
        values += [a - b for a, b in itertools.combinations(single, 2)] if len(single) <= 60 else []
    return rounded(values)


def check(page: Path) -> tuple[int, list[Untraced]]:
    """How many numbers of a page were traced, and those that were not."""
    parts = list(sections(page.read_text(encoding="utf-8")))
    files = table_rows(sorted(path.name for path in (DOCS / "results").glob("*.csv")))
    linked = {name for part in parts for name in part.links}
    count, missing = 0, list[Untraced]()
    for part in parts:
        printed = [[plain(c) for c in line.strip("|").split("|")] for _, line in part.lines if line.startswith("|")]
        said = of_columns([row for name in sorted(part.links or linked) for row in files.get(name, ())] + printed)
        for number, line in part.lines:
            table = line.startswith("|")
            known = of_row([plain(cell) for cell in line.strip("|").split("|")], files) if table else said
            if known is None:
                continue
            text = re.sub(r"\]\([^)]*\)|`[^`]*`", "", line)
            for found in [n for cell in text.split("|") for n in spread(cell)] if table else PRINTED.findall(text):
                if found.lstrip("+−-") in known:
                    count += 1
                else:
                    missing.append(Untraced(page.name, number, table, found))
    return count, missing


if __name__ == "__main__":
    for path in [Path(name) for name in sys.argv[1:]] or sorted(DOCS.glob("results*.md")):
        total, untraced = check(path)
        tables = sum(item.table for item in untraced)
        print(f"{path.name}: {total} numbers traced, {tables} of tables and {len(untraced) - tables} of sentences not")
        for item in untraced:
            print(f"  {item.page}:{item.line}: {item.text}{' (table)' if item.table else ''}")

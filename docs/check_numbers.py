"""Check of the numbers in the sentences of the results pages against their CSV files.

``python docs/check_numbers.py [PAGE ...]`` reads ``docs/results*.md`` and ``docs/results/*.md`` section by section. A
number in a sentence, or in a table of sentences (below ``<!-- table in words -->``), is traced if a table of its
section, a CSV file that the section names, or a page that its line links holds it, or holds two cells of one column
with that difference ("A is 1.9 ahead of B"). This finds slips and not every wrong sentence: what a number is said of is
not read. Tables themselves are those of ``make_tables.py``. What cannot be traced is listed: among it is whatever was
measured by hand, and what papers print.
"""

import csv
import functools
import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parent
PRINTED = re.compile(r"(?<![\w.,/])[+−-]?\d+\.\d+(?!\w|\.\d)")
STORED = re.compile(r"[+−-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
LINK = re.compile(r"([\w.-]+\.csv)\b")
PAGE = re.compile(r"\(((?:\.\./)?(?:results/)?[\w-]+\.md)[)#]")
WORDS = "<!-- table in words -->"
SKIPPED = re.compile(rf"^```.*?^```$|(?!{WORDS})<!--.*?-->", re.DOTALL | re.MULTILINE)


class Untraced(NamedTuple):
    """A number in a sentence without a source.

    Attributes:
        page: the file's name.
        line: its line, from 1.
        text: the number as printed.
    """

    page: str
    line: int
    text: str


@dataclass
class Section:
    """A part of a page under one heading: its sentences, its tables' rows, and the CSV files that it names."""

    lines: list[tuple[int, str]] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    links: set[str] = field(default_factory=set)


def sections(text: str) -> Iterator[Section]:
    """The sections of a page, without code blocks and comments."""
    bare = SKIPPED.sub(lambda match: "\n" * match[0].count("\n"), text)
    current, words = Section(), False
    for number, (line, whole) in enumerate(zip(bare.splitlines(), text.splitlines(), strict=True), 1):
        words = line == WORDS or (words and line.startswith("|"))
        if line.startswith("#"):
            yield current
            current = Section()
        elif line.startswith("|") and not words:
            current.rows.append([plain(cell) for cell in line.strip("|").split("|")])
        elif line != WORDS:
            current.lines.append((number, line))
        current.links.update(LINK.findall(whole))
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


@functools.cache
def csv_rows(path: Path) -> list[list[str]]:
    """The rows of a CSV file, but the heading; none if there is no such file."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))[1:]


def of_columns(rows: Sequence[Sequence[str]]) -> set[str]:
    """What a sentence may say of rows: their numbers, and differences within a column."""
    values: list[float] = []
    for column in itertools.zip_longest(*rows, fillvalue=""):
        cells = [stored(cell) for cell in column]
        values += itertools.chain.from_iterable(cells)
        single = [cell[0] for cell in cells if len(cell) == 1]
        values += [a - b for a, b in itertools.combinations(single, 2)] if len(single) <= 60 else []
    return rounded(values)


@functools.cache
def of_page(page: Path) -> set[str]:
    """What a line that links a page may say: the numbers of its tables and CSV files."""
    parts = list(sections(page.read_text(encoding="utf-8")))
    known: set[str] = set()
    for part in parts:
        known |= of_columns(part.rows)
        for name in part.links:
            known |= of_columns(csv_rows(DOCS / "results" / name))
    return known


def check(page: Path) -> tuple[int, list[Untraced]]:
    """How many numbers of a page's sentences were traced, and those that were not."""
    parts = list(sections(page.read_text(encoding="utf-8")))
    linked = {name for part in parts for name in part.links}
    count, missing = 0, list[Untraced]()
    for part in parts:
        named = [row for name in sorted(part.links or linked) for row in csv_rows(DOCS / "results" / name)]
        said = of_columns([*named, *part.rows])
        for number, line in part.lines:
            known = said.union(*(of_page((page.parent / other).resolve()) for other in PAGE.findall(line)))
            for found in PRINTED.findall(re.sub(r"\]\([^)]*\)|`[^`]*`", "", line)):
                if found.lstrip("+−-") in known:
                    count += 1
                else:
                    missing.append(Untraced(page.name, number, found))
    return count, missing


def main(names: Sequence[str]) -> None:
    """The command: the check of some pages, or of all."""
    pages = [*sorted(DOCS.glob("results*.md")), *sorted((DOCS / "results").glob("*.md"))]
    for path in [Path(name) for name in names] or pages:
        total, untraced = check(path)
        print(f"{path.name}: {total} numbers in sentences traced, {len(untraced)} not")
        for item in untraced:
            print(f"  {item.page}:{item.line}: {item.text}")


if __name__ == "__main__":
    main(sys.argv[1:])

"""The page on papers as data: source of every method, and where its implementation differs from the text."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path


@dataclass(frozen=True)
class Difference:
    """A departure from the printed text.

    Attributes:
        text: what paper or released code say.
        here: what this implementation does.
        why: the reason; may be empty.
    """

    text: str
    here: str
    why: str = ""


@dataclass
class Paper:
    """A row of the page's index.

    Attributes:
        title: of the method, as the page has it.
        differences: rows of the page's other tables about this method.
    """

    title: str
    source: str
    differences: list[Difference] = field(default_factory=list[Difference])


@cache
def papers() -> dict[str, Paper]:
    """Name of a method -> its row and differences, from ``docs/papers.md``, which wheels hold as ``confed/papers.md``.

    In tables whose first column is "method" that column says whom a row is about. Other tables are about the method
    in their section's heading, but for rows that begin with the name of another one and a colon.
    """
    packaged = files("confed") / "papers.md"
    place = packaged if packaged.is_file() else Path(__file__).parents[3] / "docs" / "papers.md"
    index: dict[str, Paper] = {}
    for heading, header, cells in _rows(place.read_text(encoding="utf-8")):
        if header[:2] == ["method", "name"] and heading == "Index":
            if name := re.fullmatch(r"`(\w+)`", cells[1]):  # other rows are settings of a method that has its own
                index[name[1]] = Paper(cells[0], _plain(cells[2]))
            continue
        for name in _about(heading, header, cells, index):
            index[name].differences.append(_difference(header, cells))
    return index


def _rows(page: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Heading, header and cells of every row of every table."""
    heading, header = "", list[str]()
    for line in page.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if not line.startswith("|"):
            header = []
            continue
        cells = [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
        if not header:
            header = cells
        elif not set(line) <= set("|-: "):
            yield heading, header, cells


def _about(heading: str, header: list[str], cells: list[str], index: dict[str, Paper]) -> list[str]:
    """Names of the methods that a row is about."""
    if "here" not in header:
        return []
    labels = {name: re.split(r" \(", paper.title)[0] for name, paper in index.items()}
    if header[0] == "method":
        written = set(re.findall(r"`(\w+)`", cells[1])) if "name" in header else set[str]()
        titles = {title.strip() for title in cells[0].split(",")}
        return [name for name, label in labels.items() if label in titles or name in written]
    before, colon, _ = cells[0].partition(":")
    if colon and (cited := [name for name, paper in index.items() if _names(before, paper.title)]):
        return cited
    return [name for name, label in labels.items() if label in heading]


def _names(before: str, title: str) -> bool:
    """Whether what stands before a colon names the method of a title."""
    word = before.strip()
    return bool(re.fullmatch(r"[\w³ -]{2,24}", word)) and re.search(rf"\b{re.escape(word)}\b", title, re.I) is not None


def _difference(header: list[str], cells: list[str]) -> Difference:
    row = dict(zip(header, cells, strict=False))
    sentence = next((row[key] for key in row if key.startswith("the text")), cells[0])
    return Difference(_plain(sentence), _plain(row["here"]), _plain(row.get("why", "")))


def _plain(cell: str) -> str:
    """A cell without Markdown's links; "–" is nothing."""
    text = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", cell)
    return "" if text == "–" else text

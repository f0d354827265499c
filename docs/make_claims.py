"""Verdicts on the papers' claims, computed from the registry ``claims/*.toml`` and the CSV files of finished studies.

``python docs/make_results.py`` writes them between the markers of ``docs/results.md``, and fills sentences that quote a
cell; ``--check`` compares. A registry has ``paper``, ``page`` and ``[[claims]]``:

============= ==================================================================================================
key           meaning
============= ==================================================================================================
``claim``     what the paper says
``effect``    the paper's difference in points, in the claim's direction; without one any difference counts as its size
``lacks``     why there is no evidence; else ``evidence``, one or several:
``on``        the benchmark, and ``link``, the section that describes it
``table``     beginning of the names of its CSV files in ``docs/results``
``measure``   the view: the claim, its reference, its head-room and its power are of this one measure
``row``       label of the claimed row, and ``reference``, of the row that it is compared with
``room``      labels of two rows: the first must be 5 points ahead of the second in this measure (gate of the view)
``converged`` points by which the rows still move at 1.5 times the rounds; at most 0.5 passes; none: not measured
``changed``   per cent of answers, labels or steps that the method changes against the reference
``faults``    further reasons why the benchmark cannot judge, such as unequal work
``equal``     the claim is that there is no difference
============= ==================================================================================================

Words (four, of which the first two need five seeds): *shown*, *against*, *not seen*, *cannot be judged: GATE*.

The README's table of photographs (:data:`PHOTOGRAPHS`) is made of the values by seed of their studies.

A sentence quotes a cell by the title of a link, ``[+0.3](results/NAME.csv "difference: method=FedP³; measure=...")``;
the text of the link is what the CSV file gives.
"""

import csv
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from scipy.stats import t as student

from confed.system.format import p_value, percent, points

DOCS = Path(__file__).parent
CLAIMS = DOCS.parent / "claims"
ROOM, SETTLED, LEVEL, FEWEST = 5.0, 0.5, 0.05, 5
"""Points of head-room, points that rows may still move, level of tests, seeds that a verdict needs."""
BEGIN, END = "<!-- claims: written by docs/make_results.py -->", "<!-- end of claims -->"
PHOTOGRAPHS_BEGIN, PHOTOGRAPHS_END = "<!-- photographs: written by docs/make_results.py -->", "<!-- end -->"
PHOTOGRAPHS: Mapping[str, tuple[str, str, str]] = {
    "photos_ucm": ("UC Merced, 21 classes, dealt out", "personal on own data", "global on seen"),
    "photos_ucm_scene": ("the same, a client per scene", "personal on own data", "global on seen"),
    "photos_labels": ("its 17 labels, a client per scene (C-AP)", "personal C-AP", "C-AP"),
    "photos_questions": ("questions about it, a client per scene", "personal on own data", "global on seen"),
    "photos_questions_dealt": ("the same, dealt out", "personal on own data", "global on seen"),
    "photos_eurosat": ("EuroSAT, 10 classes, dealt out", "personal on own data", "global on seen"),
    "photos_easyvqa": ("easy-VQA, a client per colour", "personal on own data", "global on seen"),
    "photos_easyvqa_dealt": ("easy-VQA, dealt out", "personal on own data", "global on seen"),
}
"""Table -> what it is about, and the measures of personal and of global models."""
QUOTE = re.compile(r'\[([^\]\n]*)\]\(([\w./-]+\.csv) "([\w ,%-]+): ([^"\n]+)"\)')
UNITS = ("", " (%)", " (points)")


@dataclass(frozen=True)
class Measured:
    """What CSV files say of one pair of rows in one view, in points."""

    difference: float
    p: float | None
    seeds: int
    visible: float | None  # difference that so many seeds show in 80 % of cases, two-sided at 5 %
    room: float | None


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def number(text: str | None) -> float | None:
    """The number of a cell; None of an empty one."""
    return float(text) if text else None


def measured(folder: Path, evidence: Mapping[str, Any]) -> Measured:
    """The pair's difference, its p-value over seeds, and the head-room of its view."""
    rows = [
        row for row in rows_of(folder / f"{evidence['table']}_compare.csv") if row["measure"] == evidence["measure"]
    ]
    value = {row["method"]: float(row["value (%)"]) for row in rows if row["value (%)"]}
    names = [evidence["row"], evidence["reference"], *evidence.get("room", ())]
    if unknown := [name for name in names if name not in value]:
        known = ", ".join(value) or "none"
        raise ValueError(f"{evidence['table']}, {evidence['measure']}: no row {unknown[0]!r}; there are {known}")
    pair, sign = _pair(rows, evidence["row"], evidence["reference"])
    seeds = int(pair["seeds"])
    error = _error_by_seed(folder, evidence) or _error_of_interval(pair, seeds)
    upper, lower = evidence.get("room", (None, None))
    visible = None
    if error is not None and seeds > 1:
        visible = error * float(student.ppf(0.975, seeds - 1) + student.ppf(0.8, seeds - 1))
    return Measured(
        sign * float(pair["difference (points)"]), number(pair.get("over seeds p")), seeds,
        visible,
        None if upper is None else value[upper] - value[lower],
    )  # fmt: skip


def _pair(rows: Sequence[Mapping[str, str]], row: str, reference: str) -> tuple[Mapping[str, str], int]:
    """The line that compares two rows, whichever of them is its reference, and the sign of its difference."""
    for first, second, sign in ((row, reference, 1), (reference, row, -1)):
        for line in rows:
            if (line["method"], line["reference"]) == (first, second) and line["difference (points)"]:
                return line, sign
    raise ValueError(f"no comparison of {row!r} with {reference!r}")


def _error_by_seed(folder: Path, evidence: Mapping[str, Any]) -> float | None:
    """Standard error of the paired difference over seeds, from values by seed where there are some."""
    path = folder / f"{evidence['table']}_seeds.csv"
    if not path.is_file():
        return None
    values: dict[str, dict[str, float]] = {evidence["row"]: {}, evidence["reference"]: {}}
    for line in rows_of(path):
        if (
            line["measure"] == evidence["measure"]
            and not line["place"]
            and line["method"] in values
            and line["value (%)"]
        ):
            values[line["method"]][line["seed"]] = float(line["value (%)"])
    first, second = values.values()
    differences = [first[seed] - second[seed] for seed in first if seed in second]
    return stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else None


def _error_of_interval(pair: Mapping[str, str], seeds: int) -> float | None:
    low, high = number(pair.get("over seeds low (points)")), number(pair.get("over seeds high (points)"))
    if low is None or high is None or seeds < 2:
        return None
    return (high - low) / 2 / float(student.ppf(0.975, seeds - 1))


def verdict(claim: Mapping[str, Any], evidence: Mapping[str, Any], found: Measured) -> str:
    """One of the four words, with the gates that a benchmark fails."""
    effect = claim.get("effect")
    failed: list[str] = []
    if found.room is not None and found.room < ROOM:
        failed.append(f"head-room of the view ({points(found.room / 100)})")
    converged = evidence.get("converged")
    if converged is None:
        failed.append("convergence not measured")
    elif converged > SETTLED:
        failed.append(f"convergence (rows move by {converged:g})")
    if effect is not None and evidence.get("changed", 100.0) < effect:
        failed.append(f"mechanism (it changes {evidence['changed']:g} %, the paper's effect is {effect:g})")
    failed += evidence.get("faults", ())
    if failed:
        return f"cannot be judged: {', '.join(failed)}"
    significant = found.p is not None and found.p < LEVEL
    if found.seeds < FEWEST:
        return f"cannot be judged: power ({found.seeds} seeds)"
    if significant and not claim.get("equal"):
        return "shown" if found.difference > 0 else "against"
    if significant:
        return "against"
    if found.visible is not None and effect is not None and found.visible <= effect:
        return "shown" if claim.get("equal") else "not seen"
    size = "no effect is known" if effect is None else f"the paper's effect is {effect:g}"
    visible = "nothing" if found.visible is None else f"{found.visible:.1f} points"
    return f"cannot be judged: power (the seeds show {visible}, {size})"


def registries() -> list[dict[str, Any]]:
    """The claims of each paper."""
    return [tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted(CLAIMS.glob("*.toml"))]


def section(folder: Path, papers: Sequence[Mapping[str, Any]]) -> str:
    """The claims of all papers, a table each."""
    lines: list[str] = []
    for paper in papers:
        lines += ["", f"### {paper['paper']}", "", f"[Tables and what they mean]({paper['page']}).", ""]
        lines += [
            "<!-- table in words -->",
            "| claim | benchmark | difference | p, seeds | seeds show | paper | verdict |",
        ]
        lines += ["| :--- | :--- | ---: | ---: | ---: | ---: | :--- |"]
        for claim in paper["claims"]:
            lines += list(_lines(folder, claim))
    return "\n".join([*lines, ""])


def _lines(folder: Path, claim: Mapping[str, Any]) -> Iterator[str]:
    effect = "–" if "effect" not in claim else f"{claim['effect']:+g}".replace("-", "−")
    if "lacks" in claim:
        yield f"| {claim['claim']} | – | – | – | – | {effect} | cannot be judged: {claim['lacks']} |"
        return
    for number_of_line, evidence in enumerate(claim["evidence"]):
        found = measured(folder, evidence)
        title = "" if number_of_line else claim["claim"]
        cells = [
            title, f"[{evidence['on']}]({evidence['link']})",
            f"[{points(found.difference / 100)}](results/{evidence['table']}_compare.csv)".replace("[-", "[−"),
            "–" if found.p is None else p_value(found.p).replace("<", r"\<"),
            "–" if found.visible is None else f"{found.visible:.1f} ({found.seeds})",
            effect, verdict(claim, evidence, found),
        ]  # fmt: skip
        yield f"| {' | '.join(cells)} |"


def photographs(folder: Path) -> str:
    """Mean and deviation over seeds of each study of photographs that has values by seed."""
    columns = ("photographs", "alone, personal", "FedAvg, personal", "FedAvg, global", "centralised", "seeds")
    lines = [f"| {' | '.join(columns)} |", f"| :--- |{' ---: |' * (len(columns) - 1)}"]
    for table, (title, personal, of_all) in PHOTOGRAPHS.items():
        path = folder / f"{table}_seeds.csv"
        if not path.is_file():
            continue
        values: dict[tuple[str, str], list[float]] = {}
        for line in rows_of(path):
            if not line["place"] and line["value (%)"]:
                values.setdefault((line["row"], line["measure"]), []).append(float(line["value (%)"]))
        cells = [f"[{title}](docs/results/{path.name})"]
        for cell in (("local", personal), ("fedavg", personal), ("fedavg", of_all), ("central", of_all)):
            cells.append(_spread(values.get(cell, [])))
        cells.append(str(len(values["fedavg", of_all])))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> str:
    if len(values) < 2:
        return "–" if not values else f"{values[0]:.1f}"
    return f"{fmean(values):.1f} ± {stdev(values):.1f}"


def with_section(text: str, section_text: str, begin: str = BEGIN, end: str = END) -> str:
    """A page with what stands between two markers made anew."""
    before, _, rest = text.partition(begin)
    _, marker, after = rest.partition(end)
    if not marker:
        raise ValueError(f"the page must have the markers {begin!r} and {end!r}")
    return f"{before}{begin}\n{section_text}\n{end}{after}"


def quoted(text: str, page: Path) -> str:
    """A page whose quoted cells are those of the CSV files."""

    def again(match: re.Match[str]) -> str:
        value = _cell(page.parent / match[2], match[3], match[4])
        return f'[{value}]({match[2]} "{match[3]}: {match[4]}")'

    return QUOTE.sub(again, text)


def _cell(path: Path, column: str, where: str) -> str:
    keys = dict(part.strip().split("=", 1) for part in where.split(";"))
    if not path.is_file():
        raise ValueError(f"a sentence quotes {path.name}, and there is no such file")
    rows = [row for row in rows_of(path) if all(row.get(key) == value for key, value in keys.items())]
    names = [column + unit for unit in UNITS if rows and column + unit in rows[0]]
    if not rows or not names or ("seed" not in rows[0] and len(rows) != 1):
        raise ValueError(f"{path.name}: {len(rows)} rows with {where!r} and column {column!r}; expected one")
    name, value = names[0], fmean(float(row[names[0]]) for row in rows)  # over seeds, where there is a row of each
    if name.endswith("(points)"):
        return points(value / 100).replace("-", "−")
    if name.endswith("(%)"):
        return percent(value / 100, None)
    return p_value(value) if re.search(r"\bp\b", name) else f"{value:g}"


def pages() -> list[Path]:
    """Pages whose sentences may quote cells."""
    return [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md")), *sorted((DOCS / "results").glob("*.md"))]


def remade() -> Iterator[tuple[Path, str, str]]:
    """Pages that are not what registry and CSV files give: path, text now, text as it should be."""
    results = DOCS / "results"
    for path in pages():
        text = new = path.read_text(encoding="utf-8")
        if path.name == "results.md":
            new = with_section(text, section(results, registries()))
        elif path.name == "README.md":
            new = with_section(text, photographs(results), PHOTOGRAPHS_BEGIN, PHOTOGRAPHS_END)
        new = quoted(new, path)
        if new != text:
            yield path, text, new

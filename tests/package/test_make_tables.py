"""Tables of the results pages: the script that makes them from CSV files, and the pages themselves."""

import csv
from pathlib import Path
from types import ModuleType

import pytest

from refusals import refuses
from repository import ROOT, script_module

DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.glob("results*.md")), *sorted((DOCS / "results").glob("*.md"))]
TABLE = """method,parameters sent,up (bytes),a (%),a sd (%),b (%)
Local,0,72,78.5,0.9,
FedAvg,12345,50800,81.96,0.71,3.25
full*,214000,,84,1,-1
"""
TESTS = """reference,measure,method,difference (points),over seeds p
Local,own,Local,,
Local,own,FedAvg,3.46,0.0001
Local,own,full*,-0.04,0.25
Local,other,FedAvg,1,1
"""
SEEDS = "method,seed,a (%)\nFedAvg,0,1\nFedAvg,1,3\nLocal,0,2\n"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return script_module("docs/make_tables.py")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in {"table": TABLE, "tests": TESTS, "seeds": SEEDS, "seeds_more": SEEDS}.items():
        (tmp_path / f"{name}.csv").write_text(text)
    return tmp_path


def made(script: ModuleType, folder: Path, marker: str) -> list[str]:
    """The lines of the table below a marker."""
    text = script.rewritten(f"# Page\n\n<!-- table\n{marker}\n-->\n| stale |\n\nText.\n", folder)
    assert text.endswith("\n\nText.\n")
    return text.partition("-->\n")[2].partition("\n\n")[0].splitlines()


def test_cells_have_the_form_of_their_unit(script: ModuleType, folder: Path) -> None:
    columns = '["method", "sent = parameters sent", "up", "a", "{b:+.2f} of 5"]'
    assert made(script, folder, f'csv = "table.csv"\ncolumns = {columns}') == [
        "| method | sent | up | a | {b:+.2f} of 5 |",
        "| :--- | ---: | ---: | ---: | ---: |",
        "| Local | 0 | 72 B | 78.5 ± 0.9 | – |",
        "| FedAvg | 12.3 k | 50.8 kB | 82.0 ± 0.7 | +3.25 of 5 |",
        "| full\\* | 214 k | – | 84.0 ± 1.0 | −1.00 of 5 |",
    ]


def test_rows_are_chosen_renamed_and_joined(script: ModuleType, folder: Path) -> None:
    marker = """csv = "table.csv"
columns = ["method", "a", "to Local = t.difference", "p = t.over seeds p"]
rows = ["full* = full*", "mean = FedAvg", "", "Local"]
join.t = {csv = "tests.csv", where.measure = "own"}"""
    assert made(script, folder, marker)[2:] == [
        "| full\\* | 84.0 ± 1.0 | 0.0 | 0.250 |",
        "| mean | 82.0 ± 0.7 | +3.5 | \\<0.001 |",
        "|  |  |  |  |",
        "| Local | 78.5 ± 0.9 | reference |  |",
    ]


def test_means_over_seeds_of_several_files(script: ModuleType, folder: Path) -> None:
    marker = """csv = "seeds{}.csv"
files = ["one = ", "two = _more"]
where = {method = "FedAvg"}
columns = ["file", "* = *"]
mean = ["file", "method"]
spread = true"""
    assert made(script, folder, marker)[2:] == [
        "| one | 2.0 ± 1.4 |",
        "| two | 2.0 ± 1.4 |",
    ]


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ('csv = "table.csv"\ncolumns = ["method", "c"]', "no column 'c'"),
        ('csv = "table.csv"\ncolumns = ["method"]\nrows = ["FedProx"]', "no row 'FedProx'"),
        ('csv = "table.csv"\ncolumns = ["method", "t.difference"]\njoin.t = {csv = "tests.csv"}', "2 rows with"),
    ],
)
def test_a_marker_that_fits_no_csv_is_refused(script: ModuleType, folder: Path, marker: str, message: str) -> None:
    refuses(f"table of line 3: {message}", made, script, folder, marker)


def test_check_names_the_line_that_differs(script: ModuleType, folder: Path) -> None:
    page = folder / "page.md"
    marker = '<!-- table\ncsv = "table.csv"\ncolumns = ["method", "a"]\nrows = ["Local", "FedAvg"]\n-->\n'
    page.write_text(script.rewritten(f"# Page\n\n{marker}\nText.\n", folder))
    assert list(script.differences(page, folder)) == []
    page.write_text(page.read_text().replace("82.0", "83.0") + "\n| by | hand |\n| :--- | ---: |\n")
    first, second = script.differences(page, folder)
    assert (first.page, first.line) == ("page.md", 11)
    assert "83.0" in first.text
    assert "82.0" in first.text
    assert (second.line, "without a marker" in second.text) == (15, True)
    page.write_text(
        page.read_text().replace("83.0", "82.0").replace("\n| by", "\n<!-- table by hand: measured once -->\n| by")
    )
    assert list(script.differences(page, folder)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_are_those_of_their_csv(script: ModuleType, page: Path) -> None:
    assert list(script.differences(page, DOCS / "results")) == [], "run python docs/make_tables.py"


@pytest.mark.parametrize("page", sorted(DOCS.glob("results*.md")), ids=lambda page: page.stem)
def test_a_page_per_paper_is_short(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= 150, "details belong into docs/results"


def test_every_interval_holds_its_difference() -> None:
    """An interval of another quantity (questions pooled where means over clients are printed) need not hold it."""
    checked = 0
    for path in sorted((DOCS / "results").glob("*compare*.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                difference = next((float(row[c]) for c in row if c.startswith("difference") and row[c]), float("nan"))
                for kind in ("over seeds", "over examples"):
                    ends = (f"{kind} low", f"{kind} high")
                    low, high = (next((row[c] for c in row if c.startswith(end)), "") for end in ends)
                    if low:
                        checked += 1
                        assert float(low) - 1e-6 <= difference <= float(high) + 1e-6, (path.name, row)
                    if p := row.get(f"{kind} p"):
                        assert float(p) >= float(row[f"{kind} p uncorrected"]), (path.name, row)
    assert checked > 2000

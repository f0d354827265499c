"""Numbers on the results pages: the script that traces them to CSV files, and the pages themselves."""

import csv
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from repository import ROOT

DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.glob("results*.md")), *sorted((DOCS / "results").glob("*.md"))]
UNTRACED = {
    "results": 4,
    "results_bicsl": 0,
    "results_chat": 3,
    "results_feddat": 3,
    "results_fedlgt": 2,
    "results_fedvqa": 4,
    "results_modalities": 2,
    "results/bicsl_attacks": 1,
    "results/bicsl_models": 1,
    "results/fedvqa_adapters": 3,
    "results/fedvqa_real_pictures": 9,
    "results/fedvqa_tests": 3,
    "results/feddat_styles_and_rivals": 1,
    "results/feddat_vault": 1,
    "results/feddat_vilt": 2,
    "results/fedlgt_labels": 2,
    "results/modalities_builtin": 6,
    "results/unlearning": 1,
}
"""Numbers in sentences that were measured apart from the tables (probes, trials), or are a paper's: may shrink."""


def name(path: Path) -> str:
    return path.relative_to(DOCS).with_suffix("").as_posix()


@pytest.fixture
def script(tmp_path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_numbers", DOCS / "check_numbers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def page(tmp_path: Path, sentence: str) -> Path:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "t.csv").write_text("method,a (%),a sd (%),b (%)\nFedAvg,81.96,0.71,3\nLocal,78.5,0.9,4\n")
    (tmp_path / "results" / "more.md").write_text("# More\n\n| row | c |\n| :-- | --: |\n| FedAvg | 12.3 |\n")
    path = tmp_path / "page.md"
    path.write_text(f'# Page\n\n## Table\n\n<!-- table\ncsv = "t.csv"\n-->\n\n{sentence}\n\n```sh\nrun 99.9\n```\n')
    return path


@pytest.mark.parametrize(
    ("sentence", "untraced"),
    [
        ("FedAvg has 82.0, 3.5 more.", []),
        ("FedAvg has 83.0, 3.5 more.", ["83.0"]),
        ("FedAvg has 82.0, 3.9 more.", ["3.9"]),
        ("FedAvg has 12.3.", ["12.3"]),
        ("FedAvg has 12.3 ([there](results/more.md)).", []),
        ("<!-- table in words -->\n| it | has |\n| :-- | :-- |\n| FedAvg | 82.0 and 84.1 |", ["84.1"]),
        ("| it | has |\n| :-- | :-- |\n| FedAvg | 84.1 |", []),
    ],
)
def test_finds_changed_numbers(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sentence: str, untraced: list[str]
) -> None:
    monkeypatch.setattr(script, "DOCS", tmp_path)
    _, found = script.check(page(tmp_path, sentence))
    assert [item.text for item in found] == untraced


def test_every_interval_holds_its_difference_and_corrected_p_values_are_no_smaller() -> None:
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


@pytest.mark.slow
@pytest.mark.parametrize("path", PAGES, ids=name)
def test_sentences_of_the_pages_are_traced(script: ModuleType, path: Path) -> None:
    _, found = script.check(path)
    assert len(found) <= UNTRACED.get(name(path), 0), found

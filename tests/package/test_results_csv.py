"""The CSV files of the results pages."""

import csv

from repository import ROOT

DOCS = ROOT / "docs"


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

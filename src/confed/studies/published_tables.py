"""Results files of whole tables: rows that share a recipe, with means and, where they are known, values of each seed.

Such a file is made of the CSV files of a finished study whose runs are gone: it has no digests of data, history,
predictions and models, and its figures have the digits of the CSV files. ``docs/reproducing.md`` describes the keys;
:data:`TABLE` changes with them.
"""

from collections.abc import Mapping
from typing import Any

from confed.federation.reading import check_entries
from confed.studies.published import FORMAT

__all__ = ["DIGITS", "TABLE", "check_digits", "row_in", "same"]

TABLE = "confed-table/1"
"""What the key "format" of a table's results file says."""
DIGITS = 17
"""Most significant digits that a figure may be said to have: those of a float."""
_KEYS: Mapping[str, type] = {"recipe": str, "command": str, "digits": int, "resolved": dict, "rows": list}
_ROW_KEYS: Mapping[str, type] = {
    "method": str, "label": str, "resolved": dict, "seeds": list, "metrics": dict, "figures": dict,
}  # fmt: skip


def row_in(table: Mapping[str, Any], method: str, source: str) -> dict[str, Any]:
    """One row of a table's file in the form of a results file of its own.

    Args:
        table: content of the file.
        method: name of the row, or its label; empty for the first.
        source: where it was read, for errors.

    Raises:
        ValueError: the table has no such row, or an entry is missing or of another type.
    """
    check_entries(table, _KEYS, source)
    if not table["rows"]:
        raise ValueError(f"{source} has no rows")
    for number, row in enumerate(table["rows"]):
        check_entries(row, _ROW_KEYS, f"{source}: rows[{number}]")
    found = next((row for row in table["rows"] if method in ("", row["method"], row["label"])), None)
    if found is None:
        raise ValueError(f"{source} has no row {method!r}; it has {', '.join(row['method'] for row in table['rows'])}")
    of_seeds = found["figures"]
    return {
        "format": FORMAT,
        **{key: found[key] for key in ("method", "label", "seeds", "metrics")},
        **({"deploys": found["deploys"]} if "deploys" in found else {}),
        "metric": "",
        "recipe": table["recipe"],
        "resolved": {**table["resolved"], **found["resolved"]},
        "packages": {},
        "digits": table["digits"],
        "runs": [
            {
                "seed": seed,
                "figures": of_seeds.get(str(seed), {}),
                "digests": {},
                "versions": {},
                "machine": {},
                "history": [],
            }
            for seed in found["seeds"]
        ],
    }


def check_digits(digits: Any, source: str) -> None:
    """Check of the number of significant digits that a file says its figures have.

    Args:
        digits: what it says.
        source: the file.

    Raises:
        ValueError: it is no number of digits of a float.
    """
    if isinstance(digits, bool) or not isinstance(digits, int) or not 1 <= digits <= DIGITS:
        raise ValueError(f"{source}: digits must be a whole number from 1 to {DIGITS}, got {str(digits)[:40]!r}")


def same(one: float | None, other: float | None, digits: int | None) -> bool:
    """Whether two figures are equal, as far as the published one has digits.

    Args:
        one: the published figure.
        other: that of a repetition.
        digits: significant digits of the first; None for all.
    """
    if one is None or other is None or digits is None:
        return one == other
    return abs(one - other) <= 0.5000001 * 10.0 ** (1 - digits) * max(abs(one), abs(other))

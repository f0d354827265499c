"""Results files of whole tables: rows that share a recipe, with means and, where they are known, values of each seed.

Such a file is made of the CSV files of a finished study whose runs are gone: it has no digests of data, history,
predictions and models, and its figures have the digits of the CSV files. ``docs/reproducing.md`` describes the keys;
:data:`TABLE` changes with them.
"""

import math
from collections.abc import Mapping
from typing import Any

from confed.federation.reading import check_entries
from confed.studies.published import FORMAT, MEANS

__all__ = ["DIGITS", "TABLE", "check_digits", "heads", "row_in", "same"]

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
        ValueError: the table has no such row, an entry is missing or of another type, or there are figures of other
            seeds than those that the row lists.
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
    if of_seeds and set(of_seeds) != {str(seed) for seed in found["seeds"]}:
        listed, there = (", ".join(map(str, names))[:80] for names in (found["seeds"], of_seeds))
        whose = f"{source}: figures of {found['method'][:40]}"
        raise ValueError(f"{whose} must be those of its seeds {listed}, or none, got {there}")
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


def heads(figures: Mapping[str, Any]) -> list[str]:
    """The figures that are judged: means; of labelled examples those over all of them in the first view.

    Args:
        figures: name -> value, or what is stated of it.
    """
    labelled = [key for key in figures if key.startswith("multilabel/")]
    first = "/".join(labelled[0].split("/")[:2]) + "/" if labelled else ""
    return [key for key in figures if key in MEANS] + [key for key in labelled if key.startswith(first)]


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
    """Whether two figures are equal, as far as the published one has digits: to half a unit of its last one.

    Zero and what is not finite have no last digit, and are equal to themselves alone.

    Args:
        one: the published figure.
        other: that of a repetition.
        digits: significant digits of the first; None for all.
    """
    if one is None or other is None or digits is None or one == 0 or not math.isfinite(one):
        return one == other
    unit = 10.0 ** (math.floor(math.log10(abs(one))) + 1 - digits)
    return abs(one - other) <= 0.5000001 * unit

"""Table of clients and places with examples left out because of unreadable pictures."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from confed.data.picture_tables import by_place
from confed.report.tables.table import Cell
from confed.results.headline import membership
from confed.results.runs import Summary

__all__ = ["SIGN", "left_clients_note", "left_out_note", "missing_sites_note", "with_left_out"]

SIGN = "‡"
"""Behind the values of clients and places without all their examples."""


def _examples(summary: Summary) -> Mapping[str, Mapping[str, int]]:
    found = summary.get("left_out")
    return found if isinstance(found, Mapping) else {}


def with_left_out(cells: Sequence[Cell], places: Sequence[str], summaries: Iterable[Summary]) -> list[Cell]:
    """Cells with the mark behind the text of those whose client or place lacks examples in some run.

    Args:
        cells: values of one method.
        places: the client or place of each.
        summaries: of the method's runs.
    """
    lacking = {place for summary in summaries for place in _examples(summary)}
    return [
        replace(cell, text=f"{cell.text} {SIGN}") if cell.value is not None and place in lacking else cell
        for cell, place in zip(cells, places, strict=True)
    ]


def left_out_note(summaries: Iterable[Summary]) -> list[str]:
    """Footnote on the mark, with the largest number of missing examples; nothing where none is missing."""
    most: dict[str, dict[str, int]] = {}
    for summary in summaries:
        for place, roles in _examples(summary).items():
            own = most.setdefault(place, {})
            for role, count in roles.items():
                own[role] = max(count, own.get(role, 0))
    return [f"{SIGN} Without examples whose pictures cannot be read: {by_place(most)}."] if most else []


def left_clients_note(summaries: Iterable[Summary]) -> list[str]:
    """Why a mean over clients is not that of the cells beside it, if it is not."""
    summaries = list(summaries)
    names = dict.fromkeys(str(name) for summary in summaries for name in summary.get("left", ()))
    left = [f"Left before the last round and in no mean: {', '.join(names)}."] if names else []
    return left + missing_sites_note(summaries)


def missing_sites_note(summaries: Iterable[Summary]) -> list[str]:
    """Over which part of a federation's sites the means are, and why others are in none; nothing where all are."""
    notes: dict[str, None] = {}
    for summary in summaries:
        if sites := membership(summary):
            reasons = "; ".join(f"{name}: {reason}" for name, reason in summary["membership"]["missing"].items())
            notes[f"{summary['label']}: every mean over clients is over {sites} (not evaluated: {reasons})."] = None
    return [*notes]

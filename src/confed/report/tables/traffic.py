"""Joined tables of several studies, with the backbone in front of every row."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from confed.report.tables.table import Table, joined
from confed.results import format as formats
from confed.results.runs import Run

__all__ = ["backbone", "by_backbone"]


def backbone(runs: Sequence[Run]) -> str:
    """The names of the models of some runs, most often one."""
    names = dict.fromkeys(str(run.recipe.get("model", {}).get("name", "")) for run in runs)
    return ", ".join(filter(None, names)) or formats.MISSING


def by_backbone(tables: Mapping[str, Table]) -> Table:
    """The tables of several studies as one, with the backbone in front of every row.

    Args:
        tables: backbone -> table of its study; all with the same clients.

    Raises:
        ValueError: no tables, or their columns differ.
    """
    if not tables:
        raise ValueError("tables must hold at least one, got none")
    (name, first), *others = tables.items()
    for other, table in others:
        if table.columns != first.columns:
            columns, wanted = (", ".join(c.full_title for c in t.columns) for t in (table, first))
            raise ValueError(f"the table of {other} must have the columns of {name}'s ({wanted}), got {columns}")
    together = joined("backbone", tables)
    notes = dict.fromkeys(note for table in tables.values() for note in table.notes)
    sections = tuple(filter(None, together.sections))
    return replace(together, title=first.title.removesuffix(f" ({name})"), sections=sections, notes=tuple(notes))

"""What travels per method, as columns for tables (FedDAT's table 2 has such a column, "Comm. overhead").

Parameters are those of one client: what it trains (heads are among them) and what it sends each way in a round (heads
of its own are not). Bytes are lengths of the messages as they were serialised.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from confed.report.tables.table import Cell, Column, Table, joined
from confed.results import format as formats
from confed.results.runs import Run, average, number, numbers

__all__ = ["OVERHEAD", "backbone", "by_backbone", "bytes_up", "overhead"]

OVERHEAD = (
    Column("trained", "parameters"),
    Column("sent", "parameters"),
    Column("share", "parameters", "%"),
    Column("sent up", "round and client", "bytes"),
)
"""The columns of :func:`overhead`."""


def overhead(runs: Sequence[Run]) -> tuple[Cell, ...]:
    """What a method trains and sends: a cell for each column of :data:`OVERHEAD`, means over seeds.

    Args:
        runs: the method's finished runs, one per seed; without any its cells are dashes.
    """
    trained, sent, total = (average([_parameters(run, key) for run in runs]) for key in ("trained", "sent", "total"))
    up = average([bytes_up(run) for run in runs])
    share = 100 * sent / total if sent is not None and total else None
    return (
        Cell(formats.count(trained), trained),
        Cell(formats.count(sent), sent),
        Cell(formats.MISSING if share is None else f"{share:.2f}", share),
        Cell(formats.size(up), up),
    )


def bytes_up(run: Run) -> float | None:
    """Bytes that one client sends in one round, mean over rounds and the clients that took part; None if unknown.

    What travels after the last round (fine-tuning, say) is not counted.
    """
    rounds: list[Mapping[str, float]] = [
        numbers(line.get("bytes_up")) for line in run.rounds if line.get("event") == "round"
    ]
    return average([value for clients in rounds for value in clients.values()])


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


def _parameters(run: Run, key: str) -> float | None:
    return number(run.summary.get("parameters", {}).get(key))

"""What travels per method, beside what it reaches at each client: the layout of FedDAT's table 2, and for several
backbones its table 3.

Parameters are those of one client: what it trains (heads are among them) and what it sends each way in a round (heads
are not). Bytes are lengths of the messages as they were serialised.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from confed.results import formats
from confed.results.runs import Run, Study, average, number, numbers
from confed.results.tables import is_bound, paper_table
from confed.results.writers import Cell, Column, Table

__all__ = ["OVERHEAD", "bytes_up", "overhead", "overhead_table"]

OVERHEAD = (
    Column("trained", "parameters"),
    Column("sent", "parameters"),
    Column("of the model", "parameters", "%"),
    Column("up", "round and client", "bytes"),
)
"""The columns of :func:`overhead`."""


def overhead(study: Study, method: str) -> tuple[Cell, ...]:
    """What a method trains and sends: a cell for each column of :data:`OVERHEAD`, means over seeds.

    Args:
        study: a study that was read back.
        method: one of its rows; without finished runs its cells are dashes.
    """
    runs = [run for run in study.of(method) if run.complete]
    trained, sent, total = (average([_parameters(run, key) for run in runs]) for key in ("trained", "sent", "total"))
    up = average([bytes_up(run) for run in runs])
    if not runs or is_bound(runs[0].summary):
        sent = up = None
    # Private tensors are all that local training has: nothing is sent, whatever the model's rules would share.
    share = 100 * sent / total if sent is not None and total else None
    return (
        Cell(formats.count(trained), trained),
        Cell(formats.count(sent), sent),
        Cell(formats.MISSING if share is None else f"{share:.2f}", share),
        Cell(formats.size(up), up),
    )


def bytes_up(run: Run) -> float | None:
    """Bytes that one client sends in one round, mean over rounds and the clients that took part; None if unknown."""
    rounds: list[Mapping[str, float]] = [
        numbers(line.get("bytes_up")) for line in run.rounds if line.get("event") == "round"
    ]
    return average([value for clients in rounds for value in clients.values()])


def overhead_table(studies: Sequence[Study]) -> Table:
    """The paper tables of several studies as one, a section per backbone.

    Args:
        studies: with the same clients, one for each backbone.

    Raises:
        ValueError: no studies, or their tables have other columns.
    """
    if not studies:
        raise ValueError("studies must hold at least one, got none")
    tables = [paper_table(study) for study in studies]
    for study, table in zip(studies, tables, strict=True):
        if table.columns != tables[0].columns:
            names, first = ([c.full_title for c in t.columns] for t in (table, tables[0]))
            raise ValueError(
                f"{study.folder} must have the columns of {studies[0].folder}, {', '.join(first)}; got "
                f"{', '.join(names)}"
            )
    sections = tuple(
        tuple((Cell(backbone(study)), *row) for row in section)
        for study, table in zip(studies, tables, strict=True)
        for section in table.sections
        if section
    )
    notes = tuple(dict.fromkeys(note for table in tables for note in table.notes))
    return replace(
        tables[0], columns=(Column("backbone", words=True), *tables[0].columns), sections=sections, notes=notes
    )


def backbone(study: Study) -> str:
    """The names of a study's models, most often one."""
    names = dict.fromkeys(str(run.recipe.get("model", {}).get("name", "")) for run in study.runs)
    return ", ".join(filter(None, names)) or formats.MISSING


def _parameters(run: Run, key: str) -> float | None:
    return number(run.summary.get("parameters", {}).get(key))

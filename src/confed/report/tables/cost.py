"""Cost of methods: bytes, time, memory, parameters, and cost to reach a given quality."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

from confed.report.tables.table import Cell, Column, Table, joined
from confed.results.history import judged_curve, judged_words, over_seeds, sent_until
from confed.results.runs import RunResults, StudyResults
from confed.system import format as formats

# Joined tables of several studies, with the backbone in front of every row ------------------------------------


def backbone(runs: Sequence[RunResults]) -> str:
    """The names of the models of some runs, most often one."""
    names = dict.fromkeys(str(run.recipe.get("model", {}).get("name", "")) for run in runs)
    return ", ".join(filter(None, names)) or formats.MISSING


def by_backbone(tables: Mapping[str, Table]) -> Table:
    """The tables of several studies as one, with the backbone in front of every row."""
    if not tables:
        raise ValueError("tables must hold at least one, got none")
    (name, first), *others = tables.items()
    for other, table in others:
        if table.columns != first.columns:
            columns, wanted = (", ".join(c.full_title for c in t.columns) for t in (table, first))
            raise ValueError(f"the table of {other} must have the columns of {name}'s ({wanted}), got {columns}")
    together = joined("backbone", tables)
    notes = dict.fromkeys(chain.from_iterable(table.notes for table in tables.values()))
    sections = tuple(filter(None, together.sections))
    return replace(together, title=first.title.removesuffix(f" ({name})"), sections=sections, notes=tuple(notes))


# Cost of methods: bytes, time, memory, parameters -------------------------------------------------------------


def cost_table(study: StudyResults) -> Table | None:
    """Cost per method, mean over seeds; None if nothing was measured."""
    columns = (
        Column("method", words=True),
        Column("up", "sent in all", "bytes"),
        Column("down", "sent in all", "bytes"),
        Column("per round", "per client", "bytes"),
        Column("in all", "time", "s"),
        Column("round", "time", "s"),
        Column("CPU", "time", "s"),
        Column("memory", unit="bytes"),
        Column("trained", "parameters"),
        Column("sent", "parameters"),
        Column("stored", "parameters"),
        Column("total", "parameters"),
    )
    rows = tuple(_row(study, method) for method in study.methods)
    if all(cell.text == formats.MISSING for row in rows for cell in row[1:]):
        return None
    notes = (
        "Sent: messages as they are serialised, all rounds; per client: one client in one round, both ways. "
        "Time: training and evaluation, with whatever else the machine was doing; CPU: time of all "
        "processors. "
        "Memory: largest resident memory of a process. Parameters of one client: trained by it, sent "
        "each way in "
        "a round, stored by it between rounds, and the whole model; of the smallest and the largest client where "
        "clients differ.",
    )
    return Table("Cost", columns, (rows,), notes)


def cost_to_target_table(study: StudyResults) -> Table | None:
    """Rounds and bytes until the mean personal (or deployed) validation result reaches what the reference ends with.

    The reference is FedAvg, or else the first federated method. None for fewer than two methods with curves.
    """
    curves = {
        method: over_seeds([judged_curve(study, run) for run in study.of(method)])
        for method in study.methods
        if not study.of(method)[0].summary.is_bound
    }
    curves = {method: curve for method, curve in curves.items() if len(curve) > 1}
    if len(curves) < 2:
        return None
    averaging = (m for m in curves if study.of(m)[0].summary.traits.reference == 1)
    reference = next(averaging, next((m for m in curves if m == "adapter"), next(iter(curves))))
    goal = curves[reference][max(curves[reference])]
    rows: list[tuple[Cell, ...]] = []
    for method, curve in curves.items():
        round_reached = next((r for r in sorted(curve) if curve[r] >= goal), None)
        if round_reached is None:
            rows.append((Cell(study.labels[method]), Cell(f"not in {max(curve)}"), Cell(formats.MISSING)))
            continue
        sent = study.mean(method, partial(_sent, round_reached))
        rows.append(
            (Cell(study.labels[method]), Cell(str(round_reached), round_reached), Cell(formats.size(sent), sent))
        )
    title = (
        f"Until the {judged_words(study)} mean reaches {formats.percent(goal)} % (where {study.labels[reference]} ends)"
    )
    return Table(title, (Column("method", words=True), Column("rounds"), Column("sent")), (tuple(rows),))


def _sent(until: int, run: RunResults) -> float | None:
    return sent_until(run).get(until)


def _row(study: StudyResults, method: str) -> tuple[Cell, ...]:
    def mean(read: Callable[[RunResults], float | None]) -> float | None:
        return study.mean(method, read)

    sent: list[float | None] = [None, None, None]
    if not study.of(method)[0].summary.is_bound:
        sent = [mean(partial(_total, "bytes_up")), mean(partial(_total, "bytes_down")), mean(_per_call)]
    seconds = [mean(partial(_cost, key)) for key in ("seconds", "seconds_per_round", "cpu_seconds")]
    memory = mean(partial(_cost, "peak_memory_bytes"))
    counts = [_count(study, method, key) for key in ("trained", "sent", "stored", "total")]
    return (
        Cell(study.labels[method]),
        *(Cell(formats.size(value), value) for value in sent),
        *(Cell(formats.duration(value), value) for value in seconds),
        Cell(formats.size(memory), memory),
        *counts,
    )


def _total(direction: str, run: RunResults) -> float | None:
    rounds = run.summary.sent(direction)
    return None if rounds is None else sum(sum(clients.values()) for clients in rounds)


def _per_call(run: RunResults) -> float | None:
    """Mean over rounds and the clients that took part, both directions."""
    ways: list[list[float]] = []
    for direction in ("bytes_up", "bytes_down"):
        rounds = run.summary.sent(direction) or []
        ways.append(list(chain.from_iterable(clients.values() for clients in rounds)))
    calls = max(map(len, ways))
    return sum(map(sum, ways)) / calls if calls else None


def _cost(key: str, run: RunResults) -> float | None:
    return run.summary.cost(key)


def _count(study: StudyResults, method: str, key: str) -> Cell:
    """A number of parameters: one client's, or from the smallest client's to the largest one's with their mean."""

    def of_client(choose: Callable[[list[float]], float], run: RunResults) -> float | None:
        counts = [counts[key] for counts in run.summary.parameters_of.values() if key in counts]
        return choose(counts) if counts else None

    value = study.mean(method, lambda run: run.summary.parameters.get(key))
    low, high = (study.mean(method, partial(of_client, choose)) for choose in (min, max))
    if low is None or high is None or low == high:
        return Cell(formats.count(value), value)
    return Cell(f"{formats.count(low)} to {formats.count(high)}", value)

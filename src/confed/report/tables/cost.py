"""Cost of methods: bytes, time, memory, parameters, and cost to reach a given quality."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from confed.report.tables.table import Cell, Column, Table, joined, pivot
from confed.results.history import judged_curve, judged_words, over_seeds, sent_until
from confed.results.runs import RunResults, StudyResults
from confed.results.summary import average
from confed.system import format as formats


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
            titles = ", ".join(column.full_title for column in table.columns)
            wanted = ", ".join(column.full_title for column in first.columns)
            raise ValueError(f"the table of {other} must have the columns of {name}'s ({wanted}), got {titles}")
    together = joined("backbone", tables)
    notes = dict.fromkeys(chain.from_iterable(table.notes for table in tables.values()))
    sections = tuple(filter(None, together.sections))
    return replace(together, title=first.title.removesuffix(f" ({name})"), sections=sections, notes=tuple(notes))


def cost_table(study: StudyResults) -> Table | None:
    """Cost per method, mean over seeds; None if nothing was measured."""

    def mean(read: Callable[[RunResults], float | None]) -> Callable[[str], float | None]:
        return lambda method: study.mean(method, read)

    def sent(read: Callable[[RunResults], float | None]) -> Callable[[str], float | None]:
        return lambda method: None if study.of(method)[0].summary.is_bound else study.mean(method, read)

    def cost(key: str) -> Callable[[str], float | None]:
        return mean(lambda run: run.summary.cost(key))

    columns = [
        Column("method", words=True, read=study.labels.__getitem__),
        Column("up", "sent in all", "bytes", read=sent(lambda run: _total("bytes_up", run)), form=formats.size),
        Column("down", "sent in all", "bytes", read=sent(lambda run: _total("bytes_down", run)), form=formats.size),
        Column("per round", "per client", "bytes", read=sent(_per_call), form=formats.size),
        Column("in all", "time", "s", read=cost("seconds"), form=formats.duration),
        Column("round", "time", "s", read=cost("seconds_per_round"), form=formats.duration),
        Column("CPU", "time", "s", read=cost("cpu_seconds"), form=formats.duration),
        Column("memory", unit="bytes", read=cost("peak_memory_bytes"), form=formats.size),
    ]
    for key in ("trained", "sent", "stored", "total"):
        columns.append(Column(key, "parameters", read=lambda method, of=key: _count(study, method, of)))
    note = (
        "Sent: messages as they are serialised, all rounds; per client: one client in one round, both ways. Time: "
        "training and evaluation, with whatever else the machine was doing; CPU: time of all processors. Memory: "
        "largest resident memory of a process. Parameters of one client: trained by it, sent each way in a round, "
        "stored by it between rounds, and the whole model; of the smallest and the largest client where clients differ."
    )
    table = pivot("Cost", columns, study.methods, notes=(note,))
    cells = chain.from_iterable(row[1:] for row in table.rows)
    return None if all(cell.text == formats.MISSING for cell in cells) else table


def cost_to_target_table(study: StudyResults) -> Table | None:
    """Rounds and bytes until the judged validation mean reaches what FedAvg, or the first method, ends with."""
    curves: dict[str, dict[int, float]] = {}
    for method in study.methods:
        curve = over_seeds([judged_curve(study, run) for run in study.of(method)])
        if len(curve) > 1 and not study.of(method)[0].summary.is_bound:
            curves[method] = curve
    if len(curves) < 2:
        return None
    averaging = (m for m in curves if study.of(m)[0].summary.traits.reference == 1)
    reference = next(averaging, next((m for m in curves if m == "adapter"), next(iter(curves))))
    goal = curves[reference][max(curves[reference])]

    def round_reached(method: str) -> int | None:
        return next((r for r, value in sorted(curves[method].items()) if value >= goal), None)

    def rounds(method: str) -> Cell:
        reached = round_reached(method)
        return Cell(f"not in {max(curves[method])}") if reached is None else Cell(str(reached), reached)

    def sent(method: str) -> float | None:
        reached = round_reached(method)
        return None if reached is None else study.mean(method, lambda run: sent_until(run).get(reached))

    title = (
        f"Until the {judged_words(study)} mean reaches {formats.percent(goal)} % (where {study.labels[reference]} ends)"
    )
    columns = (
        Column("method", words=True, read=study.labels.__getitem__),
        Column("rounds", read=rounds),
        Column("sent", read=sent, form=formats.size),
    )
    return pivot(title, columns, curves)


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


def _count(study: StudyResults, method: str, key: str) -> Cell:
    """A number of parameters: one client's, or from the smallest client's to the largest one's with their mean."""

    def of_client(choose: Callable[[list[float]], float]) -> float | None:
        ends: list[float | None] = []
        for run in study.of(method):
            counts = [counts[key] for counts in run.summary.parameters_of.values() if key in counts]
            ends.append(choose(counts) if counts else None)
        return average(ends)

    value = study.mean(method, lambda run: run.summary.parameters.get(key))
    low, high = of_client(min), of_client(max)
    if low is None or high is None or low == high:
        return Cell(formats.count(value), value)
    return Cell(f"{formats.count(low)} to {formats.count(high)}", value)

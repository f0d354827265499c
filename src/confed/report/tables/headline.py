"""Headline table of a study: quality and cost, one row per method."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from confed.report.tables.cells import (
    left_clients_note,
    left_out_note,
    of_recipe,
    over_seeds,
    summaries_of,
    uneven_note,
)
from confed.report.tables.columns import (
    MANY_PLACES,
    Context,
    columns_of,
    in_order,
    method_row,
    method_table,
    place_columns,
)
from confed.report.tables.labels import label_tables
from confed.report.tables.table import Table, to_rich
from confed.results.runs import StudyResults
from confed.results.summary import Summary, deployed_note, global_note, personal_note, with_deployed
from confed.results.views import View

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table as RichTable


def study_table(contents: Iterable[Mapping[str, Any]]) -> "RichTable | Group":
    """The headline table for a terminal, of contents of ``summary.json``; of multi-label runs a table per view."""
    groups: dict[tuple[str, str], list[Summary]] = {}
    for summary in with_deployed([*map(Summary, contents)]):
        groups.setdefault((summary.algorithm, summary.label), []).append(summary)
    methods = [(label, runs) for (_, label), runs in groups.items()]
    if any(summary.is_labelled for summary in summaries_of(methods)):
        from rich.console import Group

        return Group(*map(to_rich, label_tables(methods, cost=True).values()))
    return to_rich(results_table(methods))


def table_of(study: StudyResults) -> Table:
    """The headline table of a study that was read back."""
    methods: list[tuple[str, list[Summary]]] = []
    for method, label in study.labels.items():
        methods.append((label, [run.summary for run in study.of(method)]))
    return results_table(methods)


def results_table(methods: Sequence[tuple[str, Sequence[Summary]]]) -> Table:
    """The headline table: test results after the last round; what tests do not tell from a column's best is bold."""
    if not methods or not all(runs for _, runs in methods):
        lengths = [(label, len(runs)) for label, runs in methods]
        raise ValueError(f"every method must have at least one run, got {lengths}")
    rows = in_order([method_row(label, runs) for label, runs in methods])
    every = summaries_of(methods)
    clients = list(dict.fromkeys(chain.from_iterable(summary.clients for summary in every)))
    clients = clients or list(dict.fromkeys(chain.from_iterable(one.values(View.PERSONAL) for one in every)))
    many = len(clients) > MANY_PLACES
    columns = columns_of("results", Context(rows, clients))
    firsts = {label: runs[0] for label, runs in methods}
    notes = _notes(methods, many, any(row.bound for row in rows))
    deployed = deployed_note(firsts) if any(summary.deploys is not None for summary in every) else ""
    notes[1:1] = filter(None, [deployed, personal_note(firsts), global_note(firsts)])
    if any(column.group == "parameters" for column in columns):
        notes.insert(1, "Parameters: what a client trains, and what of it travels, once in each direction of a round.")
    places = place_columns(View.PERSONAL, "personal", clients, many)
    return method_table(_title(every, methods), rows, [*places, *columns], notes)


def _title(every: Sequence[Summary], methods: Sequence[tuple[str, Sequence[Summary]]]) -> str:
    metrics = dict.fromkeys(summary.metric for summary in every)
    metric = next(iter(metrics), "accuracy") if len(metrics) < 2 else "score"
    recipe = next((summary.recipe for summary in every if summary.recipe), "")
    spread = over_seeds(max(len(runs) for _, runs in methods))
    return of_recipe(recipe, f"test {metric} in % after the last round{spread}")


def _notes(methods: Sequence[tuple[str, Sequence[Summary]]], many: bool, bounds: bool) -> list[str]:
    every = summaries_of(methods)
    notes = [
        "Personal: each client's own model on its own test data. Global: the one shared model on the clients' test "
        "data (seen) and on places that took no part (unseen). Sent: all clients, all rounds, up and down.",
        *uneven_note({label: len(runs) for label, runs in methods}, "Seeds"),
        *left_clients_note(every),
        *left_out_note(every),
    ]
    if bounds:
        notes.append("Below the rule: all data in one place, which privacy forbids; a bound, not ranked.")
    if many:
        notes.append("The values of the single clients are in the CSV file.")
    return notes

"""Tables in the layout of the papers: a row per method, a column per client and unseen place."""

from collections.abc import Mapping, Sequence
from itertools import chain

from confed.report.tables.cells import (
    finished,
    left_clients_note,
    left_out_note,
    of_recipe,
    over_seeds,
    summaries_of,
    uneven_note,
)
from confed.report.tables.columns import MANY_PLACES, Context, MethodRow, columns_of, method_table, place_columns
from confed.report.tables.cost import backbone
from confed.report.tables.labels import label_table, label_tables
from confed.report.tables.relative import by_seed, hurting, reference_row
from confed.report.tables.table import Cell, Column, Table
from confed.results.history import judged
from confed.results.metric import metric_note, metric_of
from confed.results.runs import RunResults, StudyResults
from confed.results.settings import tuning_note
from confed.results.summary import Summary, deployed_note, personal_note
from confed.results.views import View
from confed.system import format as formats


def paper_table(study: StudyResults) -> Table:
    """The table of the FedVQA chapter (8.2, 8.3), of FedDAT (2, 3) for heads of clients' own, or of FedLGT (1 to 3)."""
    if labelled := labelled_rows(study):
        return label_table(labelled)
    names = study.rows or study.labels
    ended = finished(study)
    done = {method: ended.get(method, []) for method in names}
    rows = {m: MethodRow(names[m], runs, bool(runs) and runs[0].summary.is_bound) for m, runs in done.items()}
    bounds = [method for method, row in rows.items() if row.bound]
    order = [*(method for method in rows if method not in bounds), *bounds]
    many = max(len(study.clients), len(study.scenes)) > MANY_PLACES
    kind = judged(study)
    declared = columns_of("paper", Context(list(rows.values()), study.clients, study.scenes, kind))
    hurt = _hurt_cells(study, order[: len(order) - len(bounds)], kind)
    worse = [hurt.get(method, Cell(formats.MISSING)) for method in order]
    first = [column.group for column in declared].index(kind)
    last = first + sum(column.group == kind for column in declared)
    columns = [
        *declared[:first],
        *place_columns(kind, kind, study.clients, many),
        *declared[first:last],
        *([(Column("hurt", kind, "clients"), worse)] if hurt else []),
        *place_columns(View.UNSEEN, "unseen", study.scenes, many),
        *declared[last:],
    ]
    spread = over_seeds(max((len(runs) for runs in done.values()), default=0))
    title = of_recipe(study.recipe, f"test {metric_of(study.runs)} in % after the last round{spread}")
    title += f" ({backbone(study.runs)})" if kind == "deployed" else ""
    return method_table(title, [rows[m] for m in order], columns, _notes(study, names, done, bounds, many, bool(hurt)))


def main_tables(study: StudyResults) -> list[Table]:
    """First tables of a study: :func:`paper_table`, of multi-label studies a table per level and view."""
    labelled = labelled_rows(study)
    return list(label_tables(labelled).values()) if labelled else [paper_table(study)]


def labelled_rows(study: StudyResults) -> list[tuple[str, list[Summary]]]:
    """Label and summaries of a multi-label study's rows, those without a finished run too; empty for other studies."""
    rows: list[tuple[str, list[Summary]]] = []
    runs = finished(study)
    for method, label in (study.rows or study.labels).items():
        rows.append((label, [run.summary for run in runs.get(method, ())]))
    return rows if any(summary.is_labelled for summary in summaries_of(rows)) else []


def _hurt_cells(study: StudyResults, methods: Sequence[str], kind: View) -> dict[str, Cell]:
    """Method -> how many clients it leaves worse off than the reference does; empty without one to measure by."""
    reference = reference_row(study)
    if reference is None:
        return {}
    cells: dict[str, Cell] = {}
    for method in methods:
        worse = hurting(by_seed(study, method, kind), by_seed(study, reference, kind))
        if method != reference and worse is not None:
            clients = len(worse.harmed.clients)
            cells[method] = Cell(f"{clients} of {worse.harmed.n}", float(clients))
    return cells


def _notes(
    study: StudyResults,
    rows: Mapping[str, str],
    done: Mapping[str, Sequence[RunResults]],
    bounds: Sequence[str],
    many: bool,
    hurt: bool,
) -> list[str]:
    firsts = {rows[m]: runs[0].summary for m, runs in done.items() if runs}
    deployed = {label: summary for label, summary in firsts.items() if summary.deploys is not None}
    notes = [deployed_note(deployed)] if deployed else ["Personal: each client's own model on its own test data."]
    if study.scenes:
        notes[0] += " Unseen: the global model on places that took no part; a dash where there is no global model."
    if deployed:
        notes.append(
            "Parameters of one client: trained (heads included), sent each way in a round, and the latter's share of "
            "the whole model; sent up: the messages of one client in one round as they were serialised."
        )
    reference = reference_row(study)
    if hurt and reference:
        notes.append(
            f"Hurt: clients whose {'deployed' if deployed else 'own'} model is worse than with {rows[reference]}, in "
            "the mean over the seeds that both have."
        )
    notes += [] if deployed else [*filter(None, [personal_note(firsts)]), *_paper_names(study.recipe, rows, done)]
    notes += filter(None, [metric_note(study.runs)])
    note = tuning_note([runs[0] for runs in done.values() if runs])
    notes += [note] if note else []
    notes += uneven_note({rows[method]: len(runs) for method, runs in done.items()}, "Finished seeds")
    every_run = list(chain.from_iterable(done.values()))
    notes += [*study.failed, *left_clients_note([run.summary for run in every_run])]
    notes += left_out_note(run.summary for run in every_run)
    if bounds:
        notes.append(
            f"Below the rule, {formats.names([rows[method] for method in bounds])}: all data in one place, which "
            "privacy forbids; a bound, not ranked."
        )
    if many:
        notes.append("The values of the single places are in the CSV file.")
    return notes


def _paper_names(recipe: str, rows: Mapping[str, str], done: Mapping[str, Sequence[RunResults]]) -> list[str]:
    """Row names of the FedVQA chapter, for its own recipes."""
    if not recipe.startswith("fedvqa"):
        return []
    traits = {method: runs[0].summary.traits for method, runs in done.items() if runs}
    names = {m: "CT" if t.centralised else "DT" for m, t in traits.items() if t.centralised or not t.communicates}
    sentences = [f"{rows[method]} is {name}" for method, name in names.items()]
    return [f"In the FedVQA chapter, {' and '.join(sentences)}."] if sentences else []

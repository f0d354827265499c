"""Tables of a study, one row per method: the headline table (quality and cost), and the paper's."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from confed.report.statistics.harmed import by_seed, hurting, reference_row
from confed.report.tables.cells import marks, mean_sd_cell
from confed.report.tables.control_marks import controls_note, marked
from confed.report.tables.labels import controls_key, label_table, label_tables
from confed.report.tables.left_out import left_out_note, with_left_out
from confed.report.tables.table import Cell, Column, Mark, Table, to_rich
from confed.report.tables.traffic import OVERHEAD, backbone, overhead
from confed.results import format as formats
from confed.results.deployed import deployed_note, global_note, is_shown, personal_note, with_deployed
from confed.results.headline import HEADLINES, LABELS, PARTS, headline, is_bound, is_labelled
from confed.results.metric import metric_note, metric_of
from confed.results.runs import Run, Study, Summary, average, number, numbers
from confed.results.settings import tuning_note

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table as RichTable
from confed.results.traits import traits_of

__all__ = [
    "is_bound",
    "main_tables",
    "marks",
    "mean_sd_cell",
    "paper_table",
    "results_table",
    "study_table",
    "table_of",
    "view_key",
]

MANY_CLIENTS = 8
"""With more clients than this their columns are left to the CSV file."""


def view_key(name: str, summary: Summary) -> str:
    """The key of a summary's values per place that belongs to one of the means; see :func:`headline`."""
    if name not in LABELS:
        return PARTS[name]
    return controls_key([summary], LABELS[name][0])


def study_table(summaries: Iterable[Summary]) -> "RichTable | Group":
    """The headline table for a terminal; of multi-label runs a table per view.

    Args:
        summaries: contents of ``summary.json`` of the runs, methods in order; runs of one algorithm and label
            are seeds of one method.
    """
    groups: dict[tuple[str, str], list[Summary]] = {}
    for summary in with_deployed(list(summaries)):
        algorithm = str(summary.get("algorithm", ""))
        groups.setdefault((algorithm, str(summary.get("label", algorithm))), []).append(summary)
    methods = [(label, runs) for (_, label), runs in groups.items()]
    if any(is_labelled(summary) for _, runs in methods for summary in runs):
        from rich.console import Group

        return Group(*map(to_rich, label_tables(methods, cost=True).values()))
    return to_rich(results_table(methods))


def table_of(study: Study) -> Table:
    """The headline table of a study that was read back."""
    labels = study.labels
    return results_table([(labels[method], [run.summary for run in study.of(method)]) for method in study.methods])


def results_table(methods: Sequence[tuple[str, Sequence[Summary]]]) -> Table:
    """The headline table.

    Test results after the last round in percent, mean and standard deviation over seeds; the best value of
    each column is bold and the second best underlined. Centralised training stands apart and is not ranked.

    Args:
        methods: label and summaries (one per seed) of each method, in order.

    Raises:
        ValueError: there are no methods, or one of them has no runs.
    """
    if not methods or not all(runs for _, runs in methods):
        raise ValueError(f"every method must have at least one run, got {[(m, len(runs)) for m, runs in methods]}")
    federated = [(label, runs) for label, runs in methods if not is_bound(runs[0])]
    bounds = [(label, runs) for label, runs in methods if is_bound(runs[0])]
    every = [summary for _, runs in methods for summary in runs]
    clients = list(dict.fromkeys(client for summary in every for client in summary.get("clients", ())))
    clients = clients or list(dict.fromkeys(c for summary in every for c in numbers(summary.get("personal"))))
    many = len(clients) > MANY_CLIENTS
    finetuned = len({str(summary.get("trainable")) for summary in every}) > 1
    deployed = any(map(is_shown, every))
    names = (*(["deployed_mean"] if deployed else []), *HEADLINES)
    columns = (
        Column("method", words=True),
        *(Column(str(client), "personal", "%", detail=many) for client in clients),
        *((Column("mean", "deployed", "%"),) if deployed else ()),
        Column("mean", "personal", "%"),
        Column("worst", "personal", "%"),
        Column("seen", "global", "%"),
        Column("unseen", "global", "%"),
        *((Column("trained", "parameters"), Column("shared", "parameters")) if finetuned else ()),
        Column("sent", unit="bytes"),
        Column("time", unit="s"),
    )
    quality = [[_quality(summary, clients, names) for summary in runs] for _, runs in federated]
    bounded = [[_quality(summary, clients, names) for summary in runs] for _, runs in bounds]
    ranks = _ranks(quality)
    sections = (
        tuple(
            _row(label, runs, rows, clients, names, [column[i] for column in ranks], parameters=finetuned)
            for i, ((label, runs), rows) in enumerate(zip(federated, quality, strict=True))
        ),
        tuple(
            _row(label, runs, rows, clients, names, parameters=finetuned)
            for (label, runs), rows in zip(bounds, bounded, strict=True)
        ),
    )
    notes = _notes(methods, many, bool(bounds))
    firsts = {label: runs[0] for label, runs in methods}
    notes[1:1] = filter(None, [deployed_note(firsts) if deployed else "", personal_note(firsts), global_note(firsts)])
    notes += controls_note([runs for _, runs in methods], [PARTS[name] for name in names if name.endswith("_mean")])
    if finetuned:
        notes.insert(1, "Parameters: what a client trains, and what of it travels, once in each direction of a round.")
    return Table(_title(every, methods), columns, sections, tuple(notes))


def _quality(summary: Summary, clients: Sequence[str], names: Sequence[str]) -> list[float | None]:
    """The ranked columns of one run."""
    personal = numbers(summary.get("personal"))
    return [*(personal.get(client) for client in clients), *(headline(summary, name) for name in names)]


def _ranks(quality: Sequence[Sequence[Sequence[float | None]]]) -> list[list[Mark]]:
    """Marks by column and method; ``quality`` is indexed by method, seed and column."""
    width = len(quality[0][0]) if quality else 0
    means = [[average([run[j] for run in runs]) for runs in quality] for j in range(width)]
    return [marks([None if value is None else 100 * value for value in column]) for column in means]


def _row(
    label: str,
    runs: Sequence[Summary],
    rows: Sequence[Sequence[float | None]],
    clients: Sequence[str],
    names: Sequence[str],
    ranks: Sequence[Mark] = (),
    *,
    parameters: bool = False,
) -> tuple[Cell, ...]:
    columns = list(zip(*rows, strict=True))
    unranked: list[Mark] = [""] * len(columns)
    cells = [mean_sd_cell(column, mark) for column, mark in zip(columns, ranks or unranked, strict=True)]
    for place, name in enumerate(names, len(cells) - len(names)):
        if name.endswith("_mean"):
            cells[place] = marked(cells[place], runs, PARTS[name])
    cells[: len(clients)] = with_left_out(cells[: len(clients)], clients, runs)
    sent = average([number(summary.get("bytes_total")) for summary in runs])
    seconds = average([number(summary.get("seconds")) for summary in runs])
    cost = (Cell(formats.size(sent), sent), Cell(formats.duration(seconds), seconds))
    sizes = [average([numbers(s.get("parameters")).get(k) for s in runs]) for k in ("trained", "sent") if parameters]
    return (Cell(label), *cells, *(Cell(formats.count(size), size) for size in sizes), *cost)


def _title(every: Sequence[Summary], methods: Sequence[tuple[str, Sequence[Summary]]]) -> str:
    metrics = {str(summary["metric"]): None for summary in every if "metric" in summary}
    metric = next(iter(metrics), "accuracy") if len(metrics) < 2 else "score"
    recipe = next((str(summary["recipe"]) for summary in every if summary.get("recipe")), "")
    seeds = max(len(runs) for _, runs in methods)
    over = f", mean ± sd over {seeds} seeds" if seeds > 1 else ""
    return f"{recipe + ': ' if recipe else ''}test {metric} in % after the last round{over}"


def _notes(methods: Sequence[tuple[str, Sequence[Summary]]], many: bool, bounds: bool) -> list[str]:
    notes = [
        "Personal: each client's own model on its own test data. Global: the one shared model on the "
        "clients' test "
        "data (seen) and on places that took no part (unseen). Sent: all clients, all rounds, up and down."
    ]
    sizes = {label: len(runs) for label, runs in methods}
    if len(set(sizes.values())) > 1:
        notes.append("Seeds differ: " + ", ".join(f"{label} {n}" for label, n in sizes.items()) + ".")
    notes += _left([summary for _, runs in methods for summary in runs])
    notes += left_out_note(summary for _, runs in methods for summary in runs)
    if bounds:
        notes.append("Below the rule: all data in one place, which privacy forbids; a bound, not ranked.")
    if many:
        notes.append("The values of the single clients are in the CSV file.")
    return notes


def _left(summaries: Iterable[Summary]) -> list[str]:
    """Why a mean over clients is not that of the cells beside it, if it is not."""
    names = dict.fromkeys(str(name) for summary in summaries for name in summary.get("left", ()))
    return [f"Left before the last round and in no mean: {', '.join(names)}."] if names else []


def paper_table(study: Study) -> Table:
    """The table of the FedVQA chapter (tables 8.2 and 8.3): personal accuracy per client, unseen scenes, averages.

    Where methods have heads of each client's own it is that of FedDAT (its tables 2 and 3): the model that a method
    deploys at each client instead of the personal one, and what is trained and sent for it.

    Test results after the last round in percent, mean and standard deviation over seeds; the best value of
    each column is bold and the second best underlined. Methods without a result, because they have no global
    model or because no run came to its end, show a dash; why a run is not there is a note. Centralised training
    stands apart and is not ranked. Where there is a row to measure by, "hurt" counts the clients whose own model is
    worse than that of local training (or else of FedAvg).

    Of multi-label runs it is that of FedLGT (its tables 1 to 3): :func:`confed.report.tables.labels.label_table`.

    Args:
        study: a study that was read back.
    """
    if labelled := _labelled(study):
        return label_table(labelled)
    rows = study.rows or study.labels
    done = {method: [run for run in study.of(method) if run.complete] for method in rows}
    many = max(len(study.clients), len(study.scenes)) > MANY_CLIENTS
    kind = "deployed" if any(is_shown(run.summary) for run in study.runs) else "personal"
    columns = (
        Column("method", words=True),
        *(Column(client, kind, "%", detail=many) for client in study.clients),
        Column("average", kind, "%"),
        *(Column(scene, "unseen", "%", detail=many) for scene in study.scenes),
        *((Column("average", "unseen", "%"),) if study.scenes or kind == "personal" else ()),
    )
    bounds = [method for method, runs in done.items() if runs and is_bound(runs[0].summary)]
    ranked = [method for method in rows if method not in bounds]
    values = {method: [_paper_values(study, run, kind) for run in runs] for method, runs in done.items()}
    width, middle = len(columns) - 1, len(study.clients) + 2
    worse = _hurt_cells(study, ranked, kind)
    extra = (Column("hurt", kind, "clients"),) if worse else ()
    costs: dict[str, tuple[Cell, ...]] = dict.fromkeys(rows, ())
    if kind == "deployed":
        costs = {method: overhead([] if method in bounds else runs) for method, runs in done.items()}
    means = [[average([run[i] for run in values[method]]) for method in ranked] for i in range(width)]
    ranks = [marks([None if value is None else 100 * value for value in column]) for column in means]

    def row(method: str, place: int | None) -> tuple[Cell, ...]:
        cells = [
            mean_sd_cell([run[i] for run in values[method]], "" if place is None else ranks[i][place])
            for i in range(width)
        ]
        summaries = [run.summary for run in done[method]]
        cells[middle - 2] = marked(cells[middle - 2], summaries, kind)
        if len(columns) - 1 > middle - 1:
            cells[-1] = marked(cells[-1], summaries, "global_unseen")
        first, last = len(study.clients), len(study.clients) + 1
        cells[:first] = with_left_out(cells[:first], study.clients, summaries)
        cells[last : last + len(study.scenes)] = with_left_out(
            cells[last : last + len(study.scenes)], study.scenes, summaries
        )
        hurt = (worse.get(method, Cell(formats.MISSING)),) if worse else ()
        return (Cell(rows[method]), *costs[method], *cells[: middle - 1], *hurt, *cells[middle - 1 :])

    sections = (
        tuple(row(method, place) for place, method in enumerate(ranked)),
        tuple(row(method, None) for method in bounds),
    )
    seeds = max((len(runs) for runs in done.values()), default=0)
    over = f", mean ± sd over {seeds} seeds" if seeds > 1 else ""
    metric = metric_of(study.runs)
    title = f"{study.recipe + ': ' if study.recipe else ''}test {metric} in % after the last round{over}"
    title += f" ({backbone(study.runs)})" if kind == "deployed" else ""
    shown = [kind, *(["global_unseen"] if len(columns) > middle else [])]
    marks_note = controls_note([[run.summary for run in runs] for runs in done.values()], shown)
    notes = (*_paper_notes(study, rows, done, bounds, many, bool(worse)), *marks_note)
    more = OVERHEAD if kind == "deployed" else ()
    return Table(title, (columns[0], *more, *columns[1:middle], *extra, *columns[middle:]), sections, notes)


def main_tables(study: Study) -> list[Table]:
    """What is shown of a study first: :func:`paper_table`, of multi-label studies a table per level and view."""
    labelled = _labelled(study)
    return list(label_tables(labelled).values()) if labelled else [paper_table(study)]


def _labelled(study: Study) -> list[tuple[str, list[Summary]]]:
    """Label and summaries of a multi-label study's rows, those without a finished run too; empty for other studies."""
    rows = study.rows or study.labels
    found = [(rows[m], [run.summary for run in study.of(m) if run.complete]) for m in rows]
    return found if any(is_labelled(summary) for _, runs in found for summary in runs) else []


def _hurt_cells(study: Study, methods: Sequence[str], kind: str) -> dict[str, Cell]:
    """Method -> how many clients it leaves worse off than the reference does; empty without one to measure by."""
    reference = reference_row(study)
    if reference is None:
        return {}
    found = {m: hurting(by_seed(study, m, kind), by_seed(study, reference, kind)) for m in methods if m != reference}
    return {
        m: Cell(f"{len(worse.found.clients)} of {worse.found.n}", float(len(worse.found.clients)))
        for m, worse in found.items()
        if worse is not None
    }


def _paper_values(study: Study, run: Run, kind: str) -> list[float | None]:
    own, unseen = numbers(run.summary.get(kind)), numbers(run.summary.get("global_unseen"))
    return [
        *(own.get(client) for client in study.clients),
        headline(run.summary, f"{kind}_mean"),
        *(unseen.get(scene) for scene in study.scenes),
        headline(run.summary, "global_unseen_mean"),
    ]


def _paper_notes(
    study: Study,
    rows: Mapping[str, str],
    done: Mapping[str, Sequence[Run]],
    bounds: Sequence[str],
    many: bool,
    hurt: bool,
) -> list[str]:
    deployed = {rows[m]: runs[0].summary for m, runs in done.items() if runs and is_shown(runs[0].summary)}
    notes = [deployed_note(deployed)] if deployed else ["Personal: each client's own model on its own test data."]
    if study.scenes:
        notes[0] += " Unseen: the global model on places that took no part; a dash where there is no global model."
    notes[0] += " Best bold, second best underlined."
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
    firsts = {rows[m]: runs[0].summary for m, runs in done.items() if runs}
    notes += [] if deployed else [*filter(None, [personal_note(firsts)]), *_paper_names(study.recipe, rows, done)]
    notes += filter(None, [metric_note(study.runs)])
    note = tuning_note([runs[0] for runs in done.values() if runs])
    notes += [note] if note else []
    sizes = {rows[method]: len(runs) for method, runs in done.items()}
    if len(set(sizes.values())) > 1:
        notes.append("Finished seeds differ: " + ", ".join(f"{label} {n}" for label, n in sizes.items()) + ".")
    notes += [*study.failed, *_left([run.summary for runs in done.values() for run in runs])]
    notes += left_out_note(run.summary for runs in done.values() for run in runs)
    if bounds:
        notes.append(
            f"Below the rule, {formats.names([rows[method] for method in bounds])}: all data in one place, which "
            "privacy forbids; a bound, not ranked."
        )
    if many:
        notes.append("The values of the single places are in the CSV file.")
    return notes


def _paper_names(recipe: str, rows: Mapping[str, str], done: Mapping[str, Sequence[Run]]) -> list[str]:
    """What the FedVQA chapter calls the rows that it names otherwise; only for its own recipes."""
    if not recipe.startswith("fedvqa"):
        return []
    traits = {method: traits_of(runs[0].summary) for method, runs in done.items() if runs}
    names = {m: "CT" if t.centralised else "DT" for m, t in traits.items() if t.centralised or not t.communicates}
    found = [f"{rows[method]} is {name}" for method, name in names.items()]
    return [f"In the FedVQA chapter, {' and '.join(found)}."] if found else []

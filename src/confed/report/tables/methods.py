"""Tables with a row per method: the papers' layout, the headline table, tables of multi-label runs, and costs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from confed.report.tables.cells import (
    finished,
    left_clients_note,
    left_out_note,
    missing_sites_note,
    of_recipe,
    over_seeds,
    summaries_of,
    uneven_note,
)
from confed.report.tables.columns import (
    MANY_PLACES,
    Context,
    MethodRow,
    RunColumn,
    columns_of,
    in_order,
    method_row,
    method_table,
    place_columns,
)
from confed.report.tables.relative import by_seed, hurting, reference_row
from confed.report.tables.table import Cell, Column, Table, joined, pivot, to_rich
from confed.results import history
from confed.results.history import judged, judged_curve, judged_words, sent_until
from confed.results.metric import metric_note, metric_of
from confed.results.runs import RunResults, StudyResults
from confed.results.settings import tuning_note
from confed.results.summary import (
    LABEL_METRICS,
    Summary,
    average,
    deployed_note,
    global_note,
    personal_note,
    with_deployed,
)
from confed.results.views import View
from confed.system import format as formats

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table as RichTable


# Tables in the layout of the papers: a row per method, a column per client and unseen place -------------------


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
    return method_table(
        title, [rows[m] for m in order], columns, _paper_notes(study, names, done, bounds, many, bool(hurt))
    )


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


def _paper_notes(
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


# Headline table of a study: quality and cost, one row per method ----------------------------------------------


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
    notes = _headline_notes(methods, many, any(row.bound for row in rows))
    deployed = deployed_note(firsts) if any(summary.deploys is not None for summary in every) else ""
    notes[1:1] = filter(None, [deployed, personal_note(firsts), global_note(firsts)])
    if any(column.group == "parameters" for column in columns):
        notes.insert(1, "Parameters: what a client trains, and what of it travels, once in each direction of a round.")
    places = place_columns(View.PERSONAL, "personal", clients, many)
    return method_table(_headline_title(every, methods), rows, [*places, *columns], notes)


def _headline_title(every: Sequence[Summary], methods: Sequence[tuple[str, Sequence[Summary]]]) -> str:
    metrics = dict.fromkeys(summary.metric for summary in every)
    metric = next(iter(metrics), "accuracy") if len(metrics) < 2 else "score"
    recipe = next((summary.recipe for summary in every if summary.recipe), "")
    spread = over_seeds(max(len(runs) for _, runs in methods))
    return of_recipe(recipe, f"test {metric} in % after the last round{spread}")


def _headline_notes(methods: Sequence[tuple[str, Sequence[Summary]]], many: bool, bounds: bool) -> list[str]:
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


# Tables of multi-label runs: means over labels and overall, of global and personal models ---------------------
#
# Values are those of all test examples of a view together (`confed.runs.evaluate`), mean and standard deviation over
# seeds. The main table has each method's own view: the global model on all clients' examples, or on unseen places
# where clients have no test examples, or the clients' own models where a method gives nothing else.


SENTENCES_OF_VIEWS: Mapping[str, str] = {
    "": "the model that each method is judged by",
    "global": "the global model on all clients' test examples",
    "unseen": "the global model on unseen places",
    "personal": "clients' own models, each on its own test examples",
}
"""View -> what it is; the empty one is each run's headline."""

LEVELS: Mapping[str, str] = {
    "coarse": "coarse labels",
    "top3": "at most three labels per example",
    "flair": "as FLAIR's benchmark counts",
}
"""Level -> what it is: other labels, or another way to count."""


def label_table(
    methods: Sequence[tuple[str, Sequence[Summary]]], view: str = "", level: str = "", *, cost: bool = False
) -> Table:
    """One view of a study's methods."""
    rows = in_order([method_row(label, runs) for label, runs in methods])
    columns = [
        RunColumn(
            metric,
            lambda run, m=metric: run.summary.label_value(m, view, level),
            group=LEVELS.get(level, ""),
            measure=f"{view} C-AP".strip() if metric == "C-AP" and view != "global" else "",
        )
        for metric in LABEL_METRICS
    ]
    columns += columns_of("labels", Context(rows))
    columns += columns_of("labels and cost", Context(rows)) if cost else []
    bounds = [row.label for row in rows if row.bound]
    return method_table(_label_title(methods, view, level), rows, columns, _label_notes(methods, view, bounds, level))


def without_positives(shown: Sequence[tuple[Summary, Mapping[str, Any]]]) -> list[str]:
    """Note on the number of classes without positive test examples; nothing if there are none."""
    notes: dict[str, None] = {}
    for summary, scores in shown:
        empty = int(scores.get("without_positives", 0))
        if not empty:
            continue
        classes = int(scores.get("classes", 0))
        of = f" of {classes}" if classes else ""
        text = f"{empty}{of} classes have no positive test example"
        if summary.labelled.get("undefined") == "omit":
            notes[f"{text}; they are left out of means over classes (C-AP, C-P, C-R)."] = None
            continue
        best = f": a model without a mistake would have C-AP {100 * (classes - empty) / classes:.1f}" if classes else ""
        notes[f"{text} and count as 0 in means over classes (C-AP, C-P, C-R){best}."] = None
    return [*notes]


def label_tables(
    methods: Sequence[tuple[str, Sequence[Summary]]], *, cost: bool = False, every: bool = False
) -> dict[str, Table]:
    """Tables of multi-label runs by file name, of the levels and views that some run has."""
    tables = {"table": label_table(methods, cost=cost)}
    summaries = [summary for summary in summaries_of(methods) if summary.is_labelled]
    if any(summary.label_section(level="coarse") for summary in summaries):
        tables["table-coarse"] = label_table(methods, level="coarse")
    for view in ("personal", "unseen"):
        if any(view in summary.labelled and summary.label_view != view for summary in summaries):
            tables[f"table-{view}"] = label_table(methods, view)
    levels = ("top3", "flair") if every else ()
    for level in levels:
        if any(summary.label_section(level=level) for summary in summaries):
            tables[f"table-{level}"] = label_table(methods, level=level)
    return tables


def _label_title(methods: Sequence[tuple[str, Sequence[Summary]]], view: str, level: str) -> str:
    every = summaries_of(methods)
    recipe = next((summary.recipe for summary in every if summary.recipe), "")
    spread = over_seeds(max((len(runs) for _, runs in methods), default=0))
    views = {view} if view else {summary.label_view.partition("/")[0] for summary in every if summary.is_labelled}
    what = SENTENCES_OF_VIEWS[next(iter(views))] if len(views) == 1 else SENTENCES_OF_VIEWS[""]
    what += f", {LEVELS[level]}" if level else ""
    return of_recipe(recipe, f"{what}, test results in % after the last round{spread}")


def _label_notes(
    methods: Sequence[tuple[str, Sequence[Summary]]], view: str, bounds: Sequence[str], level: str
) -> list[str]:
    firsts = {label: runs[0] for label, runs in methods if runs and runs[0].is_labelled}
    notes = missing_sites_note(summaries_of(methods))
    thresholds = sorted({f"{summary.labelled.get('threshold', 0.5):g}" for summary in firsts.values()})
    notes.append(
        "C: means over classes; C-F1 is the harmonic mean of C-P and C-R. O: over all pairs of example and label. AP: "
        f"average precision; P, R and F1 at the probability {formats.names(thresholds)}."
    )
    by_view: dict[str, list[str]] = {}
    for label, summary in firsts.items():
        by_view.setdefault(summary.label_view.partition("/")[0], []).append(label)
    if not view and len(by_view) > 1:
        notes.append(
            "; ".join(f"{formats.names(who)}: {SENTENCES_OF_VIEWS[name]}" for name, who in by_view.items()) + "."
        )
    notes += without_positives([(summary, summary.label_section(view, level)) for summary in firsts.values()])
    notes += {
        "coarse": ["A coarse label's score is the largest of its labels' scores."],
        "top3": ["An example's three most probable labels count as predicted, as far as they reach the threshold."],
        "flair": ["AP from counts at 200 thresholds; predicted above one half; classes without examples count as 0."],
    }.get(level, [])
    notes += uneven_note({label: len(runs) for label, runs in methods}, "Finished seeds")
    if bounds:
        notes.append(f"Below the rule, {formats.names(bounds)}: all data in one place; a bound, not ranked.")
    return notes


# Cost of methods: bytes, time, memory, parameters, and cost to reach a given quality --------------------------


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
        curve = history.over_seeds([judged_curve(study, run) for run in study.of(method)])
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

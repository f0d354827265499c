"""Report sections of every study, each a function from a study to HTML that is empty without data."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, product

from confed.metrics.fairness import across_clients
from confed.report.comparison import Comparison
from confed.report.figures import bars as plots
from confed.report.figures import curves as lines
from confed.report.figures.style import GLOBAL, PERSONAL, Drawing, series_styles
from confed.report.harmed import BySeed, by_seed, hurting
from confed.report.html import page
from confed.report.html.page import Tabs
from confed.report.over_models import means_by_type
from confed.report.tables.cells import mean_sd_cell
from confed.report.tables.cost import cost_table, cost_to_target_table
from confed.report.tables.headline import table_of
from confed.report.tables.paper import paper_table
from confed.report.tables.table import Cell, Column, Table, to_html
from confed.results.history import judged, judged_words, no_global, nobody_has_own
from confed.results.metric import metric_of, types_in_order
from confed.results.runs import RunResults, StudyResults
from confed.results.summary import WORST, average, number, numbers
from confed.results.views import TESTED, View
from confed.system import format as formats

# Report section that compares methods: differences to references, clients -------------------------------------


def significance(comparison: Comparison | None, tabs: Tabs) -> str:
    """Paired tests against FedAvg and FedAvg + FT, or else against the first method with a global model."""
    if comparison is None or not any(
        d.over_seeds or d.over_examples or d.refused or d.unpaired for d in comparison.differences
    ):
        return ""
    text = (
        "Every method against a reference, in percentage points. Three questions: would other seeds show the same "
        "(over seeds), do these trained models differ on this test data (over examples), and is a method no worse "
        "than the reference, or no different from it, within a margin?"
    )
    panels = [
        (f"against {comparison.labels[name]}", _against(comparison, name, tabs)) for name in comparison.references
    ]
    remarks = "".join(page.paragraph(remark, "note") for remark in (*comparison.remarks, *comparison.table_remarks))
    return page.paragraph(text) + page.callout(comparison.warnings) + tabs(panels) + remarks


def _against(comparison: Comparison, reference: str, tabs: Tabs) -> str:
    """The tables against one reference: one tab per measure, then what is folded away."""
    table = comparison.table(reference)
    parts = [(section[0][0].text, _part(table, i)) for i, section in enumerate(table.sections) if section]
    html = tabs(parts)
    places = comparison.clients(reference)
    return html + ("" if places is None else page.details("Client by client: sign-flip test", _html(places)))


def _part(table: Table, section: int) -> str:
    """One measure of a table, without the column that names it."""
    rows = tuple(row[1:] for row in table.sections[section])
    return _html(Table(table.title, table.columns[1:], (rows,)))


def _html(table: Table) -> str:
    return f'<div class="wide dense">{to_html(table.without_empty())}</div>'


# What keeping features of frozen layers saved -----------------------------------------------------------------


def features_saved(study: StudyResults) -> str:
    """Examples served and computed, and bytes kept, over all runs that used features; empty where none did."""
    used = [run for run in study.runs if _used(run)]
    if not used:
        return ""
    served, computed = (sum(numbers(run.summary.features).get(key, 0.0) for run in used) for key in _COUNTS)
    held = max(number(run.summary.features.get("held")) or 0.0 for run in used)
    stages = sorted({str(run.summary.features.get("stage", "")) for run in used} - {""})
    where = f" (up to {', '.join(stages)})" if stages else ""
    several = len(study.runs) > 1
    runs = f", in {len(used)} of {len(study.runs)} runs" if several else ""
    exact = all(run.summary.features.get("exact") is True for run in used)
    worst = max(number(run.summary.features.get("difference")) or 0.0 for run in used)
    bits = "the same bits as without" if exact else f"relative difference at most {worst:.1e}"
    return (
        f"Features of frozen layers{where}{runs}: {formats.count(served)} examples served from what was kept, "
        f"{formats.count(computed)} computed for it or for checks, "
        f"{formats.size(held)} {'at most ' if several else ''}kept in memory; {bits}."
    )


_COUNTS = ("reused", "computed")


def _used(run: RunResults) -> bool:
    features = run.summary.features
    return features.get("used") is True and numbers(features).get("reused", 0.0) > 0


# Report sections of every study -------------------------------------------------------------------------------

MANY_PLACES = 24
MANY_METHODS = 8
"""With more methods than this tables have a row per method, not a column."""

HALF = 5.2
"""Width in inches of a drawing that leaves room for text beside it."""


def tasks(study: StudyResults) -> list[str]:
    """The names of the tasks of a study's rows, most often one."""
    task_names = {str(study.of(m)[0].recipe.get("task", {}).get("name", "vqa")) for m in study.methods}
    return sorted(task_names)


def legend(study: StudyResults) -> str:
    """Colour legend of methods, or of models for a single run."""
    personal_entry = () if nobody_has_own(study) else (PERSONAL,)
    shared = () if no_global(study) else (GLOBAL,)
    shown = (*personal_entry, *shared) if study.single else series_styles(study).values()
    return page.legend([(series.label, series.colour, series.dashed, series.glyph) for series in shown])


def inline(drawing: Drawing | None, caption: str = "") -> str:
    """A drawing as a figure of the page; nothing if there is none."""
    return page.figure(drawing.inline(), caption) if drawing else ""


def results(study: StudyResults, tabs: Tabs) -> str:
    """The paper's table, the headline table, and the picture of what personalisation costs the shared model."""
    if not any(run.complete for run in study.runs):
        return page.paragraph("No run has come to its end, so there are no test results yet.")
    tables = {"means and cost": table_of(study)}
    if not study.single:
        tables = {"every place": paper_table(study)} | tables
    table = tabs(
        [(title, f'<div class="wide dense">{to_html(results_table)}</div>') for title, results_table in tables.items()]
    )
    drawing = plots.trade_off(study)
    if not drawing:
        return table
    text = (
        "<h3>Personal against general</h3>"
        + page.paragraph(
            "Upwards: the clients' own models are better on their own data. To the right: the shared "
            "model is better "
            "where nobody trained. A method in the upper right corner gives both; a personal model that "
            "was bought "
            "with a worse shared one stands to the upper left."
        )
        + page.paragraph(_finding(study))
    )
    picture = page.figure(drawing.inline(), title="Personal models against the global model in unseen places")
    if drawing.width > HALF:
        return f"{table}{text}{picture}"
    return f"{table}<div class=columns><div>{picture}</div><div>{text}</div></div>"


def learning(study: StudyResults) -> str:
    """Learning curves: means over clients, and every client."""
    drawing = lines.curves(study)
    if not drawing:
        return ""
    several = len(study.seeds) > 1
    over = "mean over places"
    if any(run.summary.is_labelled for run in study.runs):
        over = "of all clients' examples together, and the mean over unseen places"
    bands = ", bands reach from the lowest seed to the highest" if len(study.methods) <= lines.MANY_METHODS else ""
    caption = (
        f"Results on validation data after each round (unseen places have none: on their test data), {over}; round 0 "
        "is before training." + (f" Lines are means over seeds{bands}." if several else "")
    )
    caption += " Rows have several tasks, whose training losses have no common scale." if len(tasks(study)) > 1 else ""
    each = inline(lines.client_curves(study), f"{_whose(study, ' on the same data').capitalize()}, client by client.")
    if not study.single and each:
        each = page.details("Client by client", each)
    return legend(study) + inline(drawing, caption) + each


def clients(study: StudyResults) -> str:
    """Bars per client and how fairly methods treat them."""
    drawing = plots.bars(study)
    if not drawing:
        return ""
    several = " Thin lines: standard deviation over seeds." if len(study.seeds) > 1 else ""
    caption = f"{_whose(study).capitalize()}, on each client's test data after the last round, in %.{several}"
    key = legend(study) if study.single else ""
    further = [f"<h3>{page.escape(one.title)}</h3>{inline(each)}" for one, each in plots.further_bars(study)]
    return key + inline(drawing, caption) + "".join(further) + _fairness(study)


def _whose(study: StudyResults, on: str = "") -> str:
    """The models that bars and curves of single clients are about."""
    if nobody_has_own(study):
        return "the global model" if study.single else "the global models"
    if study.single:
        return "the client's personal model" + ("" if no_global(study) else f", and the global one{on}")
    return f"{judged(study)} models"


def matrices(study: StudyResults, tabs: Tabs) -> str:
    """Every personal model on every test set, one tab per method."""
    panels: list[tuple[str, str]] = []
    for method in study.methods:
        matrix = _matrix(study, method)
        if matrix:
            panels.append((study.labels[method], matrix))
    if not panels:
        return ""
    text = (
        "Row: whose model. Column: whose test data (%); shades compare the models on one column's data. "
        "Framed: a client's model at home. A row that is dark only in its frame belongs to a specialist."
    )
    # One tab on its own shows no title.
    whose = f" All models are those of {panels[0][0]}." if len(panels) == 1 and not study.single else ""
    return page.paragraph(text + whose, "muted") + tabs(panels)


def question_types(study: StudyResults, tabs: Tabs) -> str:
    """Results per type of question, mean over places."""
    panels: list[tuple[str, str]] = []
    names: dict[str, str] = {}
    for run in study.runs:
        names |= run.summary.type_names
    views = tuple(View) if judged(study) is View.DEPLOYED and not study.single else TESTED
    for view in views:
        title = view.words if view is View.DEPLOYED else view.heading
        by_method = {m: _by_type(study.of(m), view) for m in study.methods}
        by_method = {m: values for m, values in by_method.items() if values}
        kinds = types_in_order(chain.from_iterable(by_method.values()))
        if not kinds:
            continue
        if study.single:
            places = study.runs[0].summary.types(view)
            columns = [*places, "mean"] if len(places) <= MANY_PLACES else ["mean"]
            mean = by_method[study.methods[0]]
            rows: list[tuple[str, list[float | None]]] = []
            for k in kinds:
                rows.append((k, [places[c].get(k) if c in places else mean.get(k) for c in columns]))
        else:
            columns = [study.labels[m] for m in by_method]
            rows: list[tuple[str, list[float | None]]] = []
            for kind in kinds:
                rows.append((kind, [values.get(kind) for values in by_method.values()]))
        if len(columns) > MANY_METHODS and not study.single:
            turned: list[tuple[str, list[float | None]]] = []
            for i, name in enumerate(columns):
                turned.append((name, [values[i] for _, values in rows]))
            panels.append((title, page.heatmap("method", [names.get(k, k) for k in kinds], turned, by_column=True)))
        else:
            panels.append((title, page.heatmap("type", columns, [(names.get(k, k), row) for k, row in rows])))
    if not panels:
        return ""
    over = "seeds and places" if len(study.seeds) > 1 else "places"
    labelled = any(run.summary.is_labelled for run in study.runs)
    of = "kind of example" if labelled else "type of question"
    text = f"Test {metric_of(study.runs)} in % per {of}, mean over {over} where the {of.split(maxsplit=1)[0]} occurs."
    return page.paragraph(text, "muted") + tabs(panels)


def calibration(study: StudyResults) -> str:
    """Expected calibration error per method and view."""

    def error(view: View, run: RunResults) -> float | None:
        return average([*run.summary.calibration(view).values()])

    rows: list[tuple[str, list[float | None]]] = []
    for m in study.methods:
        rows.append((study.labels[m], [study.mean(m, partial(error, view)) for view in TESTED]))
    if all(value is None for value in chain.from_iterable(values for _, values in rows)):
        return ""
    text = (
        "Expected calibration error in percentage points, mean over places: how far the probability that "
        "a model "
        "gives its answer is from how often it is right. Small is good; 0 means that answers given with "
        "80 % are "
        "right 80 % of the time."
    )
    return page.paragraph(text, "muted") + page.heatmap("method", [view.heading for view in TESTED], rows)


def cost(study: StudyResults) -> str:
    """Bytes, time, memory and parameters, what kept features saved; quality against bytes."""
    table = cost_table(study)
    if table is None:
        return ""
    saved = page.paragraph(sentence) if (sentence := features_saved(study)) else ""
    html = f'<div class="wide dense">{to_html(table)}</div>{saved}'
    drawing = inline(
        lines.spending(study),
        f"Mean result of the {judged_words(study)} models on validation data, against everything sent until then and "
        "against the time of training until then (without evaluation, with whatever else the machine was doing); one "
        "point per evaluated round."
        + ("" if study.single else " Methods that send nothing are not in the drawing of traffic."),
    )
    if not drawing:
        return html
    race = cost_to_target_table(study)
    table = page.paragraph(race.title + ":") + to_html(race) if race else ""
    return f"{html}<h3>Quality for traffic and time</h3>{drawing}{table}"


def _finding(study: StudyResults) -> str:
    """The best federated methods, in a sentence that claims no more than the table."""
    federated = [m for m in study.methods if not study.of(m)[0].summary.is_bound]
    parts: list[str] = []
    names = {
        View.PERSONAL.mean: "personal mean",
        WORST: "worst client",
        View.UNSEEN.mean: "unseen places",
    }
    for name, words in names.items():
        means = {m: study.mean(m, _reader(name)) for m in federated}
        values = {m: value for m, value in means.items() if value is not None}
        if values:
            best = formats.percent(max(values.values()))
            winners = [study.labels[m] for m, value in values.items() if formats.percent(value) == best]
            if len(winners) < max(2, len(values)):
                parts.append(f"{words} {' and '.join(winners)} ({best} %)")
    return f"Highest in this study: {', '.join(parts)}." if len(federated) > 1 and parts else ""


def _reader(name: str) -> Callable[[RunResults], float | None]:
    return lambda run: run.summary.headline(name)


def _fairness(study: StudyResults) -> str:
    """Worst client, spread, and clients that would be better off with local training or the global model."""
    local = next((m for m in study.methods if not study.of(m)[0].summary.traits.communicates), None)
    rows: list[tuple[Cell, ...]] = []
    view = judged(study)
    kind = judged_words(study)
    against = view is View.PERSONAL and not nobody_has_own(study) and not no_global(study)
    if any(run.summary.is_labelled for run in study.runs):
        kind = "global" if nobody_has_own(study) else "personal"
    for method in study.methods:
        mine = by_seed(study, method, view)
        personal = {client: sum(values.values()) / len(values) for client, values in mine.items()}
        if len(personal) < 2 or study.of(method)[0].summary.is_bound:
            continue
        spread = across_clients(personal)
        rows.append(
            (
                Cell(study.labels[method]),
                Cell(spread.worst_client),
                mean_sd_cell([spread.worst]),
                mean_sd_cell([spread.sd]),
                mean_sd_cell([spread.spread]),
                *([_hurt(mine, by_seed(study, local, view) if local != method else {})] if local else []),
                *([_hurt(mine, by_seed(study, method, View.SEEN))] if against else []),
            )
        )
    columns = (
        Column("method", words=True),
        Column("who", "worst client", words=True), Column("value", "worst client"),
        Column("sd", "across clients"), Column("best − worst", "across clients"),
        *([Column("than local training", f"{kind} model is worse", words=True)] if local else []),
        *([Column("than the global model", f"{kind} model is worse", words=True)] if against else []),
    )  # fmt: skip
    if not rows:
        return ""
    table = Table("Worst client, and clients that lose by the method", columns, (tuple(rows),))
    return f"<h3>Who gains, who loses</h3><div class=wrap>{to_html(table)}</div>"


def _hurt(own: BySeed, reference: BySeed) -> Cell:
    """Clients worse off than with a reference, in the mean over common seeds; a dash if there is none."""
    worse = hurting(own, reference)
    if worse is None:
        return Cell(formats.MISSING)
    harmed, seeds = worse.found, worse.seeds
    only = "" if worse.every else f" (seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))})"
    if not harmed.clients:
        return Cell(f"none of {harmed.n}{only}")
    names = ", ".join(harmed.clients[:3]) + (" …" if len(harmed.clients) > 3 else "")
    return Cell(f"{len(harmed.clients)} of {harmed.n}: {names}, up to {formats.percent(harmed.worst)} points{only}")


def _matrix(study: StudyResults, method: str) -> str:
    """One method's matrix, mean over seeds, with the global model as its last row."""
    runs = study.of(method)
    matrices = [run.summary.matrix for run in runs]
    owners = [client for client in study.clients if any(matrix.get(client) for matrix in matrices)]
    tried: set[str] = set()
    abroad = False
    for matrix, owner in product(matrices, owners):
        tried.update(matrix.get(owner, ()))
        abroad |= bool(matrix.get(owner, {}).keys() - {owner})
    if not owners or len(owners) > MANY_PLACES or not abroad:
        return ""
    places = [place for place in (*study.clients, *study.scenes) if place in tried]
    rows: list[tuple[str, Sequence[float | None]]] = []
    for owner in owners:
        values_of = [matrix.get(owner, {}) for matrix in matrices]
        rows.append((owner, [average([values.get(place) for values in values_of]) for place in places]))
    shared = [run.summary.values(view) for run, view in product(runs, (View.SEEN, View.UNSEEN))]
    last = [average([values.get(place) for values in shared]) for place in places]
    present = any(value is not None for value in last)
    if present:
        rows.append(("global model", last))
    return page.heatmap(
        "model of",
        places,
        rows,
        own={owner: owner for owner in owners},
        by_column=True,
        sections=int(present),
    )


def _by_type(runs: Sequence[RunResults], view: View) -> dict[str, float]:
    """Type -> mean over seeds and the places where it occurs, without clients that left."""
    tables: list[Mapping[str, float]] = []
    for run in runs:
        tables += [values for place, values in run.summary.types(view).items() if place not in run.left]
    return means_by_type(tables)

"""Report sections of every study, each a function from a study to HTML that is empty without data."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, product
from typing import NamedTuple

from confed.metrics.fairness import Clients, across_clients
from confed.report.comparison import Comparison
from confed.report.figures import results as plots
from confed.report.figures.style import GLOBAL, PERSONAL, Drawing, series_styles
from confed.report.html import page
from confed.report.html.gallery import gallery
from confed.report.html.page import Tabs
from confed.report.section import Kind, Section
from confed.report.tables import control_marks, modalities
from confed.report.tables.cells import percent_cell
from confed.report.tables.methods import cost_table, cost_to_target_table, paper_table, table_of
from confed.report.tables.models import means_by_type
from confed.report.tables.relative import BySeed, by_seed, hurting
from confed.report.tables.table import Cell, Column, Table, pivot, to_html, wide_html
from confed.results.history import judged, judged_words, no_global, nobody_has_own
from confed.results.metric import metric_of, types_in_order
from confed.results.runs import RunResults, StudyResults
from confed.results.settings import flat, tuning_note
from confed.results.summary import WORST, average, global_note, number, numbers, personal_note
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
    html, places = tabs(parts), comparison.clients(reference)
    if places is not None:
        html += page.details("Client by client: sign-flip test", wide_html(places.without_empty()))
    return html


def _part(table: Table, section: int) -> str:
    """One measure of a table, without the column that names it."""
    rows = tuple(row[1:] for row in table.sections[section])
    return wide_html(Table(table.title, table.columns[1:], (rows,)).without_empty())


# What keeping features of frozen layers saved -----------------------------------------------------------------


def features_saved(study: StudyResults) -> str:
    """Examples served and computed, and bytes kept, over all runs that used features; empty where none did."""
    used = [run for run in study.runs if _used(run)]
    if not used:
        return ""
    counts = [numbers(run.summary.features) for run in used]
    served, computed = sum(of.get("reused", 0.0) for of in counts), sum(of.get("computed", 0.0) for of in counts)
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


def _used(run: RunResults) -> bool:
    features = run.summary.features
    return features.get("used") is True and numbers(features).get("reused", 0.0) > 0


# Report sections of every study -------------------------------------------------------------------------------

NOT_ENDED = "<p>No run has come to its end, so there are no test results yet.</p>"

MANY_PLACES = 24
MANY_METHODS = 8  # with more methods than this tables have a row per method, not a column
HALF = 5.2  # width in inches of a drawing that leaves room for text beside it


def labelled(study: StudyResults) -> bool:
    """Whether a study is about examples with several labels."""
    return any(run.summary.is_labelled for run in study.runs)


def unlabelled(study: StudyResults) -> bool:
    """Whether no run is about examples with several labels."""
    return not labelled(study)


def tasks(study: StudyResults) -> list[str]:
    """The names of the tasks of a study's rows, most often one."""
    task_names = {str(study.of(m)[0].recipe.get("task", {}).get("name", "vqa")) for m in study.methods}
    return sorted(task_names)


def tiles_of(study: StudyResults, figures: Sequence[tuple[str, str]]) -> str:
    """The key figures of a run on its own, with what it cost; nothing for other studies and unfinished runs."""
    if not study.single or not study.runs[0].complete:
        return ""
    summary = study.runs[0].summary
    cost = [
        (formats.size(summary.cost("bytes_total")), "sent in all"),
        (formats.duration(summary.cost("seconds")), "wall time"),
    ]
    return page.tiles([*figures, *cost])


def tiles(study: StudyResults) -> str:
    """The key figures of a run on questions."""
    summary = study.runs[0].summary
    names = {
        View.PERSONAL.mean: "personal models, mean over clients (%)",
        WORST: "the worst client's personal model (%)",
        View.SEEN.mean: "global model on the clients' data (%)",
        View.UNSEEN.mean: "global model on unseen places (%)",
    }
    if summary.without_personal or summary.is_bound:
        del names[View.PERSONAL.mean]  # it would be the global model's again
        names[WORST] = "the worst client (%)"
    if summary.without_global:
        names = {name: words for name, words in names.items() if name.startswith("personal")}
    names |= {name: summary.over_clients(names[name]) for name in names if name != View.UNSEEN.mean}
    return tiles_of(study, [(formats.percent(summary.headline(name)), words) for name, words in names.items()])


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
        return NOT_ENDED
    tables = {"means and cost": table_of(study)}
    if not study.single:
        tables = {"every place": paper_table(study)} | tables
    table = tabs([(title, wide_html(results_table)) for title, results_table in tables.items()])
    drawing = plots.trade_off(study)
    if not drawing:
        return table
    words = (
        "Upwards: the clients' own models are better on their own data. To the right: the shared model is better where "
        "nobody trained. A method in the upper right corner gives both; a personal model that was bought with a worse "
        "shared one stands to the upper left."
    )
    text = f"<h3>Personal against general</h3>{page.paragraph(words)}{page.paragraph(_finding(study))}"
    picture = page.figure(drawing.inline(), title="Personal models against the global model in unseen places")
    if drawing.width > HALF:
        return f"{table}{text}{picture}"
    return f"{table}<div class=columns><div>{picture}</div><div>{text}</div></div>"


def learning(study: StudyResults) -> str:
    """Learning curves: means over clients, and every client."""
    drawing = plots.curves(study)
    if not drawing:
        return ""
    several = len(study.seeds) > 1
    over = "mean over places"
    if labelled(study):
        over = "of all clients' examples together, and the mean over unseen places"
    bands = ", bands reach from the lowest seed to the highest" if len(study.methods) <= plots.MANY_METHODS else ""
    caption = (
        f"Results on validation data after each round (unseen places have none: on their test data), {over}; round 0 "
        "is before training." + (f" Lines are means over seeds{bands}." if several else "")
    )
    caption += " Rows have several tasks, whose training losses have no common scale." if len(tasks(study)) > 1 else ""
    each = inline(plots.client_curves(study), f"{_whose(study, ' on the same data').capitalize()}, client by client.")
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
    html = key + inline(drawing, caption)
    for measure, each in plots.further_bars(study):
        html += f"<h3>{page.escape(measure.title)}</h3>{inline(each)}"
    return html + _fairness(study)


def _whose(study: StudyResults, on: str = "") -> str:
    """The models that bars and curves of single clients are about."""
    if nobody_has_own(study):
        return "the global model" if study.single else "the global models"
    if study.single:
        return "the client's personal model" + ("" if no_global(study) else f", and the global one{on}")
    return f"{judged(study)} models"


def matrices(study: StudyResults, tabs: Tabs) -> str:
    """Every personal model on every test set, one tab per method."""
    panels = [(study.labels[method], matrix) for method in study.methods if (matrix := _matrix(study, method))]
    text = (
        "Row: whose model. Column: whose test data (%); shades compare the models on one column's data. "
        "Framed: a client's model at home. A row that is dark only in its frame belongs to a specialist."
    )
    # One tab on its own shows no title.
    whose = f" All models are those of {panels[0][0]}." if len(panels) == 1 and not study.single else ""
    return tabs(panels, about=text + whose)


Rows = list[tuple[str, list[float | None]]]


def question_types(study: StudyResults, tabs: Tabs) -> str:
    """Results per type of question, mean over places."""
    names: dict[str, str] = {}
    for run in study.runs:
        names |= run.summary.type_names
    views = tuple(View) if judged(study) is View.DEPLOYED and not study.single else TESTED
    panels: list[tuple[str, str]] = []
    for view in views:
        by_method = {m: values for m in study.methods if (values := means_by_type(study.of(m), view))}
        kinds = types_in_order(chain.from_iterable(by_method.values()))
        if kinds:
            title = view.words if view is View.DEPLOYED else view.heading
            panels.append((title, _types(study, view, by_method, {kind: names.get(kind, kind) for kind in kinds})))
    over = "seeds and places" if len(study.seeds) > 1 else "places"
    of = "kind of example" if labelled(study) else "type of question"
    text = f"Test {metric_of(study.runs)} in % per {of}, mean over {over} where the {of.split(maxsplit=1)[0]} occurs."
    return tabs(panels, about=text)


def _types(
    study: StudyResults, view: View, by_method: Mapping[str, Mapping[str, float]], kinds: Mapping[str, str]
) -> str:
    """A row per type and a column per method, for many methods the other way round; of one run a column per place."""
    columns: dict[str, Mapping[str, float]] = {study.labels[method]: values for method, values in by_method.items()}
    if study.single:
        places = study.runs[0].summary.types(view)
        columns = {**(places if len(places) <= MANY_PLACES else {}), "mean": by_method[study.methods[0]]}
    elif len(columns) > MANY_METHODS:
        turned: Rows = []
        for label, values in columns.items():
            turned.append((label, [values.get(kind) for kind in kinds]))
        return page.heatmap("method", list(kinds.values()), turned, by_column=True)
    rows: Rows = []
    for kind, name in kinds.items():
        rows.append((name, [values.get(kind) for values in columns.values()]))
    return page.heatmap("type", list(columns), rows)


def calibration(study: StudyResults) -> str:
    """Expected calibration error per method and view."""

    def error(view: View, run: RunResults) -> float | None:
        return average([*run.summary.calibration(view).values()])

    rows: Rows = []
    measured: set[float | None] = set()
    for m in study.methods:
        errors_of = [study.mean(m, partial(error, view)) for view in TESTED]
        rows.append((study.labels[m], errors_of))
        measured.update(errors_of)
    if measured <= {None}:
        return ""
    text = (
        "Expected calibration error in percentage points, mean over places: how far the probability that a model "
        "gives its answer is from how often it is right. Small is good; 0 means that answers given with 80 % are "
        "right 80 % of the time."
    )
    return page.paragraph(text, "muted") + page.heatmap("method", [view.heading for view in TESTED], rows)


def cost(study: StudyResults) -> str:
    """Bytes, time, memory and parameters, what kept features saved; quality against bytes."""
    table = cost_table(study)
    if table is None:
        return ""
    saved = page.paragraph(sentence) if (sentence := features_saved(study)) else ""
    html = wide_html(table) + saved
    drawing = inline(
        plots.spending(study),
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
    sentences: list[str] = []
    names = {View.PERSONAL.mean: "personal mean", WORST: "worst client", View.UNSEEN.mean: "unseen places"}
    for name, words in names.items():
        values = {m: study.mean(m, lambda run, of=name: run.summary.headline(of)) for m in federated}
        shown = {m: formats.percent(value) for m, value in values.items() if value is not None}
        best = max(shown, key=lambda m: values[m] or 0.0, default=None)
        winners = [study.labels[m] for m, text in shown.items() if best is not None and text == shown[best]]
        if best is not None and len(winners) < max(2, len(shown)):
            sentences.append(f"{words} {' and '.join(winners)} ({shown[best]} %)")
    return f"Highest in this study: {', '.join(sentences)}." if len(federated) > 1 and sentences else ""


class _Client(NamedTuple):
    """How a method treats its clients."""

    method: str
    personal: BySeed
    spread: Clients


def _fairness(study: StudyResults) -> str:
    """Worst client, spread, and clients that would be better off with local training or the global model."""
    local = next((m for m in study.methods if not study.of(m)[0].summary.traits.communicates), None)
    view, kind = judged(study), judged_words(study)
    if labelled(study):
        kind = "global" if nobody_has_own(study) else "personal"
    rows: list[_Client] = []
    for method in study.methods:
        personal = by_seed(study, method, view)
        means = {client: sum(values.values()) / len(values) for client, values in personal.items()}
        if len(means) > 1 and not study.of(method)[0].summary.is_bound:
            rows.append(_Client(method, personal, across_clients(means)))
    if not rows:
        return ""
    columns = [
        Column("method", words=True, read=lambda row: study.labels[row.method]),
        Column("who", "worst client", words=True, read=lambda row: row.spread.worst_client),
        Column("value", "worst client", read=lambda row: percent_cell(row.spread.worst)),
        Column("sd", "across clients", read=lambda row: percent_cell(row.spread.sd)),
        Column("best − worst", "across clients", read=lambda row: percent_cell(row.spread.spread)),
    ]
    baselines: dict[str, Callable[[_Client], BySeed]] = {}
    if local:
        baselines["than local training"] = lambda row: {} if row.method == local else by_seed(study, local, view)
    if view is View.PERSONAL and not nobody_has_own(study) and not no_global(study):
        baselines["than the global model"] = lambda row: by_seed(study, row.method, View.SEEN)
    for title, baseline in baselines.items():

        def worse(row: _Client, of: Callable[[_Client], BySeed] = baseline) -> Cell:
            return _hurt(row.personal, of(row))

        columns.append(Column(title, f"{kind} model is worse", words=True, read=worse))
    table = pivot("Worst client, and clients that lose by the method", columns, rows)
    return f"<h3>Who gains, who loses</h3><div class=wrap>{to_html(table)}</div>"


def _hurt(personal: BySeed, reference: BySeed) -> Cell:
    """Clients worse off than with a reference, in the mean over common seeds; a dash if there is none."""
    worse = hurting(personal, reference)
    if worse is None:
        return Cell(formats.MISSING)
    harmed, seeds = worse.harmed, worse.seeds
    only = "" if worse.every else f" (seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))})"
    if not harmed.clients:
        return Cell(f"none of {harmed.n}{only}")
    names = ", ".join(harmed.clients[:3]) + (" …" if len(harmed.clients) > 3 else "")
    return Cell(f"{len(harmed.clients)} of {harmed.n}: {names}, up to {formats.percent(harmed.worst)} points{only}")


def _means(seeds: Sequence[Mapping[str, float]], places: Sequence[str]) -> list[float | None]:
    """The mean over seeds at every place."""
    means: list[float | None] = []
    for place in places:
        means.append(average([values.get(place) for values in seeds]))
    return means


def _matrix(study: StudyResults, method: str) -> str:
    """One method's matrix, mean over seeds, with the global model as its last row."""
    runs = study.of(method)
    matrices = [run.summary.matrix for run in runs]
    owners: list[str] = []
    for client in study.clients:
        owners += [client] if any(matrix.get(client) for matrix in matrices) else []
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
        rows.append((owner, _means([matrix.get(owner, {}) for matrix in matrices], places)))
    last = _means([run.summary.values(view) for run, view in product(runs, (View.SEEN, View.UNSEEN))], places)
    present = any(value is not None for value in last)
    if present:
        rows.append(("global model", last))
    at_home = {owner: owner for owner in owners}
    return page.heatmap("model of", places, rows, framed=at_home, by_column=True, sections=int(present))


# Errors, data, settings ---------------------------------------------------------------------------------------


def errors(study: StudyResults) -> str:
    """Calls that failed, notes of the runs."""
    lines: list[str] = []
    notes: dict[str, None] = {}
    for run in study.runs:
        who = "" if study.single else f"{run.label}, seed {run.seed}, "
        for error in run.summary.errors:
            lines.append(f"{who}round {error.get('round')}, {error.get('client')}: {error.get('error')}")
        notes |= dict.fromkeys(f"{'' if study.single else run.label + ': '}{note}" for note in run.summary.notes)
    shown = 40
    html = page.paragraph("No call to a client failed.")
    if lines:
        more = page.paragraph(f"… and {len(lines) - shown} more.") if len(lines) > shown else ""
        html = f"<h3>Calls that failed ({len(lines)})</h3>{page.listing(lines[:shown])}{more}"
    return html + (f"<h3>Notes</h3>{page.listing([*notes])}" if notes else "")


def settings(study: StudyResults, tabs: Tabs) -> str:
    """Sizes and floors of the data, the recipes, the versions."""
    first = study.runs[0]
    definitions = {str(key): str(value) for key, value in first.summary.facts.items()}
    if not definitions:
        for client, sizes in first.summary.examples.items():
            definitions[client] = ", ".join(f"{size:.0f} {role}" for role, size in sizes.items())
    html = page.definitions(definitions) if definitions else ""
    note = tuning_note([study.of(method)[0] for method in study.methods])
    html += page.paragraph(note) if note else ""
    recipes = [(study.labels[m], _recipe(study.of(m)[0])) for m in study.methods if study.of(m)[0].recipe]
    if recipes:
        html += page.details("Resolved recipe", tabs(recipes))
    versions = [f"{name} {version}" for name, version in first.summary.versions.items()]
    if versions:
        html += f"<h3>Versions</h3>{page.paragraph(', '.join(versions), 'muted')}"
    differing = [run for run in study.runs if run.complete and run.summary.versions != first.summary.versions]
    return html + page.callout([f"{run.label}, seed {run.seed}, ran with other versions." for run in differing])


def _recipe(run: RunResults) -> str:
    lines = [f"{key} = {value!r}" for key, value in flat(run.recipe).items()]
    return f"<pre>{page.escape(chr(10).join(lines))}</pre>"


def samples(study: StudyResults, cards: str) -> str:
    """The sample answers, after a word about the language of the questions where the data have one."""
    wording = study.runs[0].summary.facts.get("wording")
    return page.paragraph(f"The questions: {wording}.", "muted") + cards if cards and wording is not None else cards


SECTIONS = (
    Section("results", "Results", 10, lambda page: tiles(page.study) + results(page.study, page.tabs), unlabelled,
            {"personal-against-unseen": plots.trade_off}),
    Section("significance", "Differences between methods", 20, lambda page: significance(page.comparison, page.tabs)),
    Section("learning", "Learning curves", 30, lambda page: learning(page.study),
            figures={"accuracy-by-round": plots.curves, "convergence": plots.convergence}),
    Section("clients", "Clients", 40, lambda page: clients(page.study), figures={"clients": plots.bars}),
    Section("matrix", "Each model on each client's data", 50, lambda page: matrices(page.study, page.tabs)),
    Section("controls", "Whether models use their input", 60, lambda page: control_marks.section(page.study)),
    Section("modalities", "With only some of the modalities", 70,
            lambda page: modalities.section(page.study, page.tabs), figures={"modalities": modalities.drawing}),
    Section("types", "Types of question", 100, lambda page: question_types(page.study, page.tabs)),
    Section("calibration", "Calibration", 110, lambda page: calibration(page.study)),
    Section("cost", "Cost", 120, lambda page: cost(page.study),
            figures={"accuracy-by-traffic-and-time": plots.spending}),
    Section("gallery", "Sample answers", 190,
            lambda page: samples(page.study, gallery(page.study, page.tabs, page.store)), unlabelled),
    Section("notes", "Errors and notes", 210, lambda page: errors(page.study)),
    Section("data", "Data and settings", 220, lambda page: settings(page.study, page.tabs)),
)  # fmt: skip


# Words for questions ------------------------------------------------------------------------------------------


def has_modalities(study: StudyResults) -> bool:
    """Whether examples have several modalities, or some of them only."""
    return any(run.summary.has_modality_matrix for run in study.runs)


def _measured(study: StudyResults) -> str:
    """Description of the measurements and the measured models."""
    firsts = {study.labels[m]: study.of(m)[0].summary for m in study.methods}
    does, things = ("does on", "examples") if has_modalities(study) else ("answers", "questions")
    abroad = f", also in {page.listed(study.scenes)}, where nobody trained." if 0 < len(study.scenes) <= 8 else "."
    personal_sentence = f"how well each client's own model {does} the {things} of that client"
    if all(summary.without_global for summary in firsts.values()):
        text = f"One thing is measured after the last round: {personal_sentence}. There is no model for everybody."
    elif all(summary.without_personal or summary.is_bound for summary in firsts.values()):
        text = f"One thing is measured after the last round: how well the one model {does} everybody's {things}{abroad}"
    else:
        everybody = f"how well the one shared model {does} those of everybody"
        text = f"Two things are measured after the last round: {personal_sentence}, and {everybody}{abroad}"
        if note := global_note(firsts):
            text += f" {note}"
    note = personal_note(firsts)
    return f"{text} {note}" if note else text


KINDS = (
    Kind(
        lambda study: True,
        lambda study: "examples" if has_modalities(study) else "questions",
        _measured,
        default=True,
    ),
)

"""Several models: a study of the same methods with each, tables with models in rows, paired tests over models, a page.

A model counts once, with its mean over seeds, so that n models give n pairs. Differences are first minus second.
BiCSL's table 2 is one: seven models, centralised and split contrastive learning, all questions and three types.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, combinations
from pathlib import Path

from confed.comparison.paired import baseline_methods
from confed.comparison.records import Record, distinct_labels
from confed.comparison.refusals import fails, refusals
from confed.metrics.statistics import (
    PairedT,
    UnpairedT,
    Wilcoxon,
    holm,
    paired_t,
    smallest_p,
    unpaired_t,
    wilcoxon,
)
from confed.report.html import page
from confed.report.html.page import Tabs
from confed.report.tables.cells import (
    best_marks,
    bold_note,
    mean_sd_cell,
    of_recipe,
    over_seeds,
    p_cell,
    points_cell,
    signed,
)
from confed.report.tables.control_marks import MEANING, SIGN
from confed.report.tables.table import (
    Cell,
    Column,
    Row,
    Table,
    joined,
    pivot,
    to_csv,
    to_latex,
    to_markdown,
    wide_html,
    write_files,
)
from confed.results.metric import metric_note, metric_of, types_in_order
from confed.results.records import MEANS_OF_VIEWS, Further, further_of, record_of
from confed.results.runs import RunResults, StudyResults, load, with_deployed_of
from confed.results.summary import average, deployed_note, personal_note
from confed.results.views import View
from confed.system import format as formats

OVERALL = "overall"  # the measure over all types of question; the others are the types' names
ALL_PAIRS_UP_TO = 6  # with more methods than this, pairs are those with a reference only
FEW_TYPES = 4  # with more types of question than this their tables are left to the files and the page
Cells = Mapping[str, Mapping[str, Mapping[int, float]]]  # method -> model -> seed -> value
Tables = Mapping[str, Mapping[str, Table]]  # "models" (values), "pairs" (tests) or "differences" -> measure -> table

# Studies of several models ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelPair:
    """Two methods compared over models; p-values "after the correction", ``*_p``, are Holm's, over the pairs."""

    first: str
    second: str
    differences: Mapping[str, float]
    paired: PairedT
    unpaired: UnpairedT
    signed_ranks: Wilcoxon
    paired_p: float | None = None
    signed_ranks_p: float = 1.0


@dataclass(frozen=True)
class ModelStudies:
    """The studies of several models, label of a model -> study, with what is common: methods, measures, refusals."""

    studies: Mapping[str, StudyResults]
    labels: Mapping[str, str]
    view: View
    measures: Mapping[str, Cells]
    absent: Mapping[str, str] = field(default_factory=dict[str, str])
    refused: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    blind: Mapping[str, Collection[str]] = field(default_factory=dict[str, Collection[str]])
    further: Mapping[str, Further] = field(default_factory=dict[str, Further])  # measures of ``run.measures``

    def subject(self, measure: str) -> str:
        """What a table of a measure is of, as the end of its title; "" of all questions' headline metric."""
        if measure == OVERALL:
            return ""
        return f", {measure}" if measure in self.further else f", questions of type {measure}"

    @property
    def runs(self) -> list[RunResults]:
        """The runs with all models."""
        return _runs(self.studies)

    @property
    def recipe(self) -> str:
        """Name of the first study's recipe that has one."""
        return next((study.recipe for study in self.studies.values() if study.recipe), "")

    @property
    def bounds(self) -> tuple[str, ...]:
        """The methods that are no federation."""
        firsts = {run.method: run.summary for run in reversed(self.runs)}
        return tuple(method for method in self.labels if method in firsts and firsts[method].is_bound)

    def references(self, names: Sequence[str] | None = None) -> tuple[str, ...]:
        """The methods that others are compared with; see :func:`confed.comparison.paired.baseline_methods`."""
        firsts = {run.method: {run.seed: record_of(run)} for run in reversed(self.runs)}
        return baseline_methods({method: firsts[method] for method in self.labels if method in firsts}, names)


def _runs(studies: Mapping[str, StudyResults]) -> list[RunResults]:
    return list(chain.from_iterable(study.runs for study in studies.values()))


def load_models(root: Path, models: Mapping[str, str], headline: str = "") -> ModelStudies:
    """The studies of several models that have runs."""
    studies: dict[str, StudyResults] = {}
    absent: dict[str, str] = {}
    for row, label in distinct_labels(models).items():
        try:
            studies[label] = load(root / row)
        except ValueError as error:  # not one run is there; an index may tell why
            absent[label] = str(error) if (root / row / "summary.json").is_file() else "nothing has been run yet"
    if not any(run.complete for run in _runs(studies)):
        raise ValueError(f"{root} must hold a finished run of at least one of {', '.join(models)}, found none")
    return replace(model_studies(studies, headline), absent=absent)


def model_studies(studies: Mapping[str, StudyResults], headline_key: str = "") -> ModelStudies:
    """Common methods and results of the studies of several models."""
    if not studies:
        raise ValueError("studies must hold at least one, got none")
    # What is deployed is decided for all runs together: one table has one kind of value.
    runs = with_deployed_of(_runs(studies), headline_key)
    shared: dict[str, StudyResults] = {}
    labels: dict[str, str] = {}
    remaining = iter(runs)
    for model, study in studies.items():
        shared[model] = replace(study, runs=tuple(next(remaining) for _ in study.runs))
        for method, label in {**study.labels, **study.rows}.items():
            labels.setdefault(method, label)
    # The order of the study that has most rows: a study may lack those that failed.
    order = max(shared.values(), key=lambda study: len(study.rows or study.labels)).rows
    labels = {method: labels[method] for method in dict.fromkeys((*order, *labels))}
    view = View.DEPLOYED if any(run.summary.deploys is not None for run in runs) else View.PERSONAL
    values: dict[str, Callable[[RunResults], float | None]] = {OVERALL: lambda run: run.summary.headline(view.mean)}
    for kind in types_in_order(chain.from_iterable(means_by_type([run], view) for run in runs)):
        values[kind] = lambda run, of=kind: means_by_type([run], view).get(of)
    further = further_of(runs)
    for name, one in further.items():
        values[name] = lambda run, of=one: of.mean(run.summary)
    measures = {name: _cells(shared, list(labels), read) for name, read in values.items()}
    refused: dict[str, dict[str, str]] = {}
    blind: dict[str, list[str]] = {}
    for model, study in shared.items():
        records: dict[str, dict[int, Record]] = {}
        for run in study.runs:
            records.setdefault(run.method, {})[run.seed] = record_of(run)
        for method, others in refusals(records, [*MEANS_OF_VIEWS]).items():
            refused.setdefault(method, {}).update(others)
        blind[model] = [method for method, of_method in records.items() if fails(of_method.values(), view.mean)]
    return ModelStudies(shared, labels, view, measures, refused=refused, blind=blind, further=further)


def pairs_over_models(
    cells: Cells, pairs: Sequence[tuple[str, str]], blind: Mapping[str, Collection[str]] | None = None
) -> list[ModelPair]:
    """Tests over models for pairs of methods."""
    tested: list[ModelPair] = []
    for first, second in pairs:
        shown = {model for model, methods in (blind or {}).items() if {first, second} <= {*methods}}
        a, b = _common(cells.get(first, {}), cells.get(second, {}), shown)
        if len(a) > 1:
            x, y = list(a.values()), list(b.values())
            differences = {model: a[model] - b[model] for model in a}
            tested.append(ModelPair(first, second, differences, paired_t(x, y), unpaired_t(x, y), wilcoxon(x, y)))
    uncorrected = {str(i): pair.paired.p for i, pair in enumerate(tested)}
    paired = holm({key: p for key, p in uncorrected.items() if p is not None}).adjusted
    ranks = holm({str(i): pair.signed_ranks.p for i, pair in enumerate(tested)}).adjusted
    return [replace(pair, paired_p=paired.get(str(i)), signed_ranks_p=ranks[str(i)]) for i, pair in enumerate(tested)]


def _common(
    first: Mapping[str, Mapping[int, float]], second: Mapping[str, Mapping[int, float]], without: Collection[str]
) -> tuple[dict[str, float], dict[str, float]]:
    """Model -> mean over the seeds that both methods have, of both."""
    a: dict[str, float] = {}
    b: dict[str, float] = {}
    for model in first:
        seeds = sorted(first[model].keys() & second.get(model, {}).keys())
        if seeds and model not in without:
            a[model] = sum(first[model][seed] for seed in seeds) / len(seeds)
            b[model] = sum(second[model][seed] for seed in seeds) / len(seeds)
    return a, b


def _cells(
    studies: Mapping[str, StudyResults], methods: Sequence[str], read: Callable[[RunResults], float | None]
) -> Cells:
    """What a function reads of the finished runs."""
    cells: dict[str, dict[str, dict[int, float]]] = {method: {} for method in methods}
    for model, study in studies.items():
        for run in study.runs:
            value = read(run) if run.complete else None
            if value is not None:
                cells[run.method].setdefault(model, {})[run.seed] = value
    return cells


def means_by_type(runs: Sequence[RunResults], view: View) -> dict[str, float]:
    """Type of question -> mean over runs and the places where it occurs, without clients that left."""
    places: list[Mapping[str, float]] = []
    for run in runs:
        places += [values for place, values in run.summary.types(view).items() if place not in run.summary.left]
    means: dict[str, float] = {}
    for kind in dict.fromkeys(chain.from_iterable(places)):
        mean = average([values.get(kind) for values in places])
        if mean is not None:
            means[kind] = mean
    return means


# Tables -------------------------------------------------------------------------------------------------------


def model_table(models: ModelStudies, measure: str = OVERALL) -> Table:
    """Models in rows, methods in columns: mean and standard deviation over seeds, and the mean over models."""
    cells, further = models.measures[measure], models.further.get(measure)
    methods = list(models.labels)
    sections = [tuple(_model_row(models, measure, model) for model in models.studies)]
    shown = [method for method in methods if cells[method]]
    common = [*models.studies]
    for method in shown:
        common = [model for model in common if model in cells[method]]
    if len(common) > 1:
        # A mean over models has no spread over seeds of its own: seeds are averaged first.
        means: dict[str, float | None] = {}
        for method in shown:
            means[method] = average([average(list(cells[method][model].values())) for model in common])
        some = "" if len(common) == len(models.studies) else f" of {len(common)}"
        sections.append(((Cell(f"mean{some}"), *(mean_sd_cell([means.get(method)]) for method in methods)),))
    unit, metric = ("%", metric_of(models.runs)) if further is None else (further.unit, "values")
    columns = (Column("model", words=True), *(Column(label, unit=unit) for label in models.labels.values()))
    seeds = max(_numbers_of_seeds(cells), default=0)
    title = f"test {metric} in {unit} after the last round{models.subject(measure)}{over_seeds(seeds)}"
    notes = _value_notes(models) if measure == OVERALL else []
    notes += [*bold_note(sections[0], "row"), *[MEANING] * any(models.blind.values())]
    return Table(of_recipe(models.recipe, title), columns, tuple(sections), tuple(notes))


def _model_row(models: ModelStudies, measure: str, model: str) -> Row:
    """A model's values with every method."""
    methods, blind = list(models.labels), {*models.blind.get(model, ())}
    values = [models.measures[measure][method].get(model, {}) for method in methods]
    further = models.further.get(measure)
    sign = -1 if further is not None and further.lower_is_better else 1
    by_rank: list[dict[int, float]] = []
    for seeds in values:
        by_rank.append({seed: sign * value for seed, value in seeds.items()})

    def refused(i: int, j: int) -> bool:
        return methods[j] in models.refused.get(methods[i], {}) or {methods[i], methods[j]} <= blind

    ranked = [i for i, method in enumerate(methods) if method not in models.bounds]
    row = [Cell(model)]
    for method, seeds, rank in zip(methods, values, best_marks(by_rank, ranked, refused), strict=True):
        cell = mean_sd_cell(list(seeds.values()), rank)
        row.append(signed(cell, SIGN) if seeds and method in blind else cell)
    return tuple(row)


def _numbers_of_seeds(cells: Cells) -> Iterator[int]:
    for of_models in cells.values():
        yield from map(len, of_models.values())


def pairs_of(models: ModelStudies, references: Sequence[str] | None = None) -> list[tuple[str, str]]:
    """The pairs of methods that are compared over models: all of a few, else each with each reference, once."""
    methods = [method for method in models.labels if models.measures[OVERALL][method]]
    wanted: list[tuple[str, str]] = []
    if references is None and len(methods) <= ALL_PAIRS_UP_TO:
        wanted = list(combinations(methods, 2))
    else:
        for reference in models.references(references):
            wanted += [(method, reference) for method in methods if method != reference]
    allowed = [(a, b) for a, b in wanted if b not in models.refused.get(a, {})]
    return [pair for i, pair in enumerate(allowed) if pair[::-1] not in allowed[:i]]


def pair_table(models: ModelStudies, pairs: Sequence[ModelPair], measure: str = OVERALL) -> Table:
    """Tests over models: the paired ones, and beside them the unpaired one that suits no such data."""
    paired, unpaired, ranks = "paired t-test over models", "unpaired t-test", "Wilcoxon"

    def interval(pair: ModelPair) -> str:
        return f"{formats.points(pair.paired.low)} to {formats.points(pair.paired.high)}"

    columns = (
        *_pair_columns(models),
        Column("models", read=lambda pair: pair.paired.n),
        Column("difference", unit="points", read=lambda pair: points_cell(pair.paired.difference)),
        Column("95 % CI", paired, words=True, read=interval),
        Column("low", paired, "points", detail=True, read=lambda pair: points_cell(pair.paired.low)),
        Column("high", paired, "points", detail=True, read=lambda pair: points_cell(pair.paired.high)),
        Column("t", paired, read=lambda pair: pair.paired.statistic, form=_statistic),
        Column("df", paired, read=lambda pair: pair.paired.n - 1),
        Column("p", paired, read=lambda pair: p_cell(pair.paired_p)),
        Column("p uncorrected", paired, detail=True, read=lambda pair: p_cell(pair.paired.p)),
        Column("t", unpaired, read=lambda pair: pair.unpaired.statistic, form=_statistic),
        Column("p", unpaired, read=lambda pair: p_cell(pair.unpaired.p)),
        Column("p", ranks, read=lambda pair: p_cell(pair.signed_ranks_p)),
        Column("p uncorrected", ranks, detail=True, read=lambda pair: p_cell(pair.signed_ranks.p)),
        Column("least p", ranks, detail=True, read=lambda pair: p_cell(pair.signed_ranks.smallest_p)),
    )
    title = f"Methods compared over models{models.subject(measure)}: first minus second, in points"
    return pivot(title, columns, pairs, notes=_notes(pairs))


def difference_of_models(models: ModelStudies, pairs: Sequence[ModelPair], measure: str = OVERALL) -> Table:
    """Differences tested over models: a row per pair of methods, a difference per model, in points."""
    columns = [*_pair_columns(models)]
    for model in models.studies:
        columns.append(Column(model, unit="points", read=lambda pair, of=model: points_cell(pair.differences.get(of))))
    title = f"Differences model by model{models.subject(measure)}: first minus second, in points, means over seeds"
    return pivot(title, columns, pairs)


def _pair_columns(models: ModelStudies) -> tuple[Column, Column]:
    return (
        Column("first", words=True, read=lambda pair: models.labels[pair.first]),
        Column("second", words=True, read=lambda pair: models.labels[pair.second]),
    )


def _statistic(value: float | None) -> str:
    if value is None:
        return formats.MISSING
    text = f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"
    return text.replace("-", "−")


def model_tables(models: ModelStudies, references: Sequence[str] | None = None) -> Tables:
    """All tables of several models: their values, and where methods have models in common the tests over these."""
    wanted = pairs_of(models, references)
    tables: dict[str, dict[str, Table]] = {"models": {}, "pairs": {}, "differences": {}}
    for measure, cells in models.measures.items():
        tables["models"][measure] = model_table(models, measure)
        if pairs := pairs_over_models(cells, wanted, models.blind):
            tables["pairs"][measure] = pair_table(models, pairs, measure)
            tables["differences"][measure] = difference_of_models(models, pairs, measure)
    return tables


def shown_first(tables: Tables) -> list[Table]:
    """The tables for a terminal: values overall, and per type where there are few types, and the tests overall."""
    values = list(tables["models"].values())
    return [*(values if len(values) <= 1 + FEW_TYPES else values[:1]), *_overall(tables, "pairs")]


def _overall(tables: Tables, *kinds: str) -> list[Table]:
    return [tables[kind][OVERALL] for kind in kinds if OVERALL in tables[kind]]


def files(tables: Tables) -> dict[str, str]:
    """Name of a file -> its content: values and overall tests in Markdown and LaTeX, and everything as CSV."""
    main = [*tables["models"].values(), *_overall(tables, "pairs", "differences")]
    texts = {"models.md": "\n".join(map(to_markdown, main)), "models.tex": "\n".join(map(to_latex, main))}
    for kind, by_measure in tables.items():
        if by_measure:
            name = "models" if kind == "models" else f"models-{kind}"
            texts[f"{name}.csv"] = to_csv(joined("questions", by_measure))
    return texts


def _notes(pairs: Sequence[ModelPair]) -> tuple[str, ...]:
    most = max((pair.paired.n for pair in pairs), default=0)
    least = min(1.0, len(pairs) * smallest_p(most))
    after = f", and after the correction over {len(pairs)} pairs none below {least:.4g}" if len(pairs) > 1 else ""
    return (
        "Each model counts once, with its mean over the seeds that both methods have. Paired: tests of the "
        "differences model by model; p-values are corrected by Holm's procedure over the pairs.",
        "Unpaired: the same values taken as two independent samples, uncorrected. BiCSL's paper computed this "
        "statistic (1.357) under the name of the paired one (7.05). It suits no such data, because both methods "
        "share each model; it is shown for comparison with the paper, and nothing rests on it.",
        f"With {most} models Wilcoxon's test cannot give a p-value below {smallest_p(most):.4g}{after}. Models are "
        "no random sample, and they share data and seeds: the tests speak of models like these on these data. A large "
        "p-value is no evidence of equality.",
    )


def _value_notes(models: ModelStudies) -> list[str]:
    complete = {run.method: run.summary for run in reversed(models.runs) if run.complete}
    firsts = {label: complete[method] for method, label in models.labels.items() if method in complete}
    notes = ["Personal: each client's own model on its own test data, mean over clients."]
    if models.view is View.DEPLOYED:
        notes = [deployed_note(firsts)]
    elif note := personal_note(firsts):
        notes.append(note)
    if models.bounds:
        labels = formats.names([models.labels[method] for method in models.bounds])
        notes.append(f"{labels}: all data in one place, which privacy forbids; a bound, not ranked.")
    notes += filter(None, [metric_note(models.runs)])
    notes += _not_tested(models)
    sizes = {*_numbers_of_seeds(models.measures[OVERALL])}
    if len(sizes) > 1:
        notes.append(f"Cells have {min(sizes)} to {max(sizes)} finished seeds.")
    for model, study in models.studies.items():
        notes += [f"{model}: {text}" for text in study.failed]
    return [*notes, *(f"{model}: {text}" for model, text in models.absent.items())]


def _not_tested(models: ModelStudies) -> list[str]:
    """The pairs of methods that are not tested, and those that are not tested with some models."""
    refused: list[str] = []
    unseeing: list[str] = []
    for a, b in combinations(models.labels, 2):
        names = f"{models.labels[a]} and {models.labels[b]}"
        if b in models.refused.get(a, {}):
            refused.append(f"Not tested against each other: {names}: {models.refused[a][b]}.")
        both = [model for model, methods in models.blind.items() if {a, b} <= {*methods}]
        if both:
            with_models = formats.names(both)
            unseeing.append(f"{names}: not tested with {with_models}, where neither is shown to use its input.")
    return refused + unseeing


# The page -----------------------------------------------------------------------------------------------------


def write_models(root: Path, studies: ModelStudies, tables: Tables, models: Mapping[str, str]) -> list[Path]:
    """Export of ``models.md``, ``.csv``, ``.tex``, the CSV files of the tests and ``report.html`` to a folder."""
    pages = {label: f"{row}/report.html" for row, label in distinct_labels(models).items()}
    links = {label: path for label, path in pages.items() if (root / path).is_file()}
    return write_files(root, {**files(tables), "report.html": render(studies, tables, links)})


def render(studies: ModelStudies, tables: Tables, links: Mapping[str, str]) -> str:
    """The page as HTML: tables, and links to the report of each model."""
    tabs = Tabs()
    title = of_recipe(studies.recipe, f"{len(studies.studies)} models, {len(studies.labels)} methods")
    lead = (
        "The same methods with each of several models, on the same data. A cell is the mean over clients, and over "
        "seeds with their standard deviation where there are several."
    )
    entries: list[tuple[str, str, str]] = []
    kinds = {
        "models": ("results", "Results"),
        "pairs": ("pairs", "Methods compared over models"),
        "differences": ("differences", "Differences model by model"),
    }
    for kind, heading in kinds.items():
        panels: list[tuple[str, str]] = []
        for measure, table in tables[kind].items():
            panels.append((measure, page.paragraph(table.title, "muted") + wide_html(table)))
        entries.append((*heading, tabs(panels) if panels else ""))
    inner = ""
    for label, where in links.items():
        inner += f'<li><a href="{page.escape(where)}">{page.escape(label)}</a></li>'
    entries.append(("reports", "The report of each model", f"<ul>{inner}</ul>" if inner else ""))
    head = f"<h1>{page.escape(title)}</h1>{page.paragraph(lead, 'lead')}"
    return page.document(title, head, entries)

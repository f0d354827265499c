"""Tables over several models: models in rows, methods in columns, with paired tests.

BiCSL's table 2 is one: seven models, centralised and split contrastive learning, all questions and three types.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations

from confed.metrics.statistics import smallest_p
from confed.report.over_models import ALL_PAIRS_UP_TO, OVERALL, ModelPair, ModelStudies, pairs_over_models
from confed.report.tables.cells import best_marks, bold_note, mean_sd_cell
from confed.report.tables.control_marks import MEANING, SIGN
from confed.report.tables.table import Cell, Column, Mark, Table, joined, to_csv, to_latex, to_markdown
from confed.results.metric import metric_note, metric_of
from confed.results.summary import average, deployed_note, personal_note
from confed.results.views import View
from confed.system import format as formats

FEW_TYPES = 4
"""With more types of question than this their tables are left to the files and the page."""


def model_table(models: ModelStudies, measure: str = OVERALL, notes: Sequence[str] = ()) -> Table:
    """Models in rows, methods in columns: mean and standard deviation over seeds, in percent.

    In each row the federated methods that paired tests over seeds do not tell from the best one are bold; the last row
    is the mean over the models that all methods have.
    """
    cells, bounds, further = models.measures[measure], models.bounds, models.further.get(measure)
    unit, sign = ("%", 1) if further is None else (further.unit, -1 if further.lower_is_better else 1)
    methods = list(models.labels)
    ranked = [i for i, method in enumerate(methods) if method not in bounds]

    def row(model: str) -> tuple[Cell, ...]:
        values = [cells[method].get(model, {}) for method in methods]
        blind = {*models.blind.get(model, ())}

        def refused(i: int, j: int) -> bool:
            pair = {methods[i], methods[j]}
            return methods[j] in models.refused.get(methods[i], {}) or pair <= blind

        signed: list[dict[int, float]] = []
        for seeds in values:
            signed.append({seed: sign * value for seed, value in seeds.items()})
        ranks = best_marks(signed, ranked, refused)
        shown = zip(methods, values, ranks, strict=True)
        return (
            Cell(model),
            *(cell(model, method, list(cell_values.values()), rank) for method, cell_values, rank in shown),
        )

    def cell(model: str, method: str, values: Sequence[float], rank: Mark) -> Cell:
        shown = mean_sd_cell(values, rank)
        return (
            replace(shown, text=f"{shown.text} {SIGN}") if values and method in models.blind.get(model, ()) else shown
        )

    sections = [tuple(row(model) for model in models.studies)]
    shown = [method for method in models.labels if cells[method]]
    common = [model for model in models.studies if all(model in cells[method] for method in shown)]
    if len(common) > 1:
        # A mean over models has no spread over seeds of its own: seeds are averaged first.
        means: dict[str, float | None] = {}
        for m in shown:
            means[m] = average([average(list(cells[m][model].values())) for model in common])
        some = "" if len(common) == len(models.studies) else f" of {len(common)}"
        sections.append(((Cell(f"mean{some}"), *(mean_sd_cell([means.get(method)]) for method in models.labels)),))
    columns = (Column("model", words=True), *(Column(label, unit=unit) for label in models.labels.values()))
    runs = list(chain.from_iterable(study.runs for study in models.studies.values()))
    seeds = max(map(len, chain.from_iterable(of.values() for of in cells.values())), default=0)
    over = f", mean ± sd over {seeds} seeds" if seeds > 1 else ""
    of = models.subject(measure)
    metric = metric_of(runs) if further is None else "values"
    recipe = next((study.recipe for study in models.studies.values() if study.recipe), "")
    title = f"{recipe + ': ' if recipe else ''}test {metric} in {unit} after the last round{of}{over}"
    notes = (*notes, *bold_note(sections[0], "row"), *[MEANING] * bool(models.blind))
    return Table(title, columns, tuple(sections), notes)


def pairs_of(models: ModelStudies, references: Sequence[str] | None = None) -> list[tuple[str, str]]:
    """The pairs of methods that are compared over models.

    All pairs where there are few methods and no reference is asked for; else each method with each reference, two
    references with each other once: a hypothesis that counts twice would count twice in the correction too. Without
    the pairs that may not be tested.

    Raises ``ValueError``: an unknown reference.
    """
    methods = [method for method in models.labels if models.measures[OVERALL][method]]
    if references is None and len(methods) <= ALL_PAIRS_UP_TO:
        asked = list(combinations(methods, 2))
    else:
        asked: list[tuple[str, str]] = []
        for reference in models.references(references):
            for m in methods:
                if m != reference:
                    asked.append((m, reference))
    allowed = [(a, b) for a, b in asked if b not in models.refused.get(a, {})]
    return [pair for i, pair in enumerate(allowed) if pair[::-1] not in allowed[:i]]


def pair_table(models: ModelStudies, pairs: Sequence[ModelPair], measure: str = OVERALL) -> Table:
    """Tests over models: the paired ones, and beside them the unpaired one that suits no such data."""
    paired, unpaired, ranks = "paired t-test over models", "unpaired t-test", "Wilcoxon"
    columns = (
        Column("first", words=True),
        Column("second", words=True),
        Column("models"),
        Column("difference", unit="points"),
        Column("95 % CI", paired, words=True),
        Column("low", paired, "points", detail=True),
        Column("high", paired, "points", detail=True),
        Column("t", paired),
        Column("df", paired),
        Column("p", paired),
        Column("p uncorrected", paired, detail=True),
        Column("t", unpaired),
        Column("p", unpaired),
        Column("p", ranks),
        Column("p uncorrected", ranks, detail=True),
        Column("least p", ranks, detail=True),
    )
    of = models.subject(measure)
    rows = tuple(_pair_row(models, pair) for pair in pairs)
    return Table(f"Methods compared over models{of}: first minus second, in points", columns, (rows,), _notes(pairs))


def difference_of_models(models: ModelStudies, pairs: Sequence[ModelPair], measure: str = OVERALL) -> Table:
    """Differences tested over models: a row per pair of methods, a difference per model, in points."""
    columns = (Column("first", words=True), Column("second", words=True))
    columns += tuple(Column(model, unit="points") for model in models.studies)
    items = []
    for pair in pairs:
        items.append(
            (
                Cell(models.labels[pair.first]),
                Cell(models.labels[pair.second]),
                *(_points(pair.differences.get(model)) for model in models.studies),
            )
        )
    rows = tuple(items)
    of = models.subject(measure)
    return Table(f"Differences model by model{of}: first minus second, in points, means over seeds", columns, (rows,))


def model_tables(models: ModelStudies, references: Sequence[str] | None = None) -> dict[str, Table]:
    """All tables of several models: name -> table.

    Raises ``ValueError``: an unknown reference.
    """
    asked = pairs_of(models, references)
    tables: dict[str, Table] = {}
    for measure in models.measures:
        suffix = "" if measure == OVERALL else f" {measure}"
        notes = _value_notes(models) if measure == OVERALL else ()
        tables[f"models{suffix}"] = model_table(models, measure, notes)
    for measure, cells in models.measures.items():
        suffix = "" if measure == OVERALL else f" {measure}"
        pairs = pairs_over_models(cells, asked, models.blind)
        if pairs:
            tables[f"pairs{suffix}"] = pair_table(models, pairs, measure)
            tables[f"differences{suffix}"] = difference_of_models(models, pairs, measure)
    return tables


def shown_first(tables: Mapping[str, Table]) -> list[str]:
    """The tables for a terminal: values overall, and per type where there are few types, and the tests overall."""
    values = [name for name in tables if name.startswith("models")]
    return [*(values if len(values) <= 1 + FEW_TYPES else values[:1]), *(["pairs"] if "pairs" in tables else [])]


def files(models: ModelStudies, references: Sequence[str] | None = None) -> dict[str, str]:
    """Name of a file -> its content: values and overall tests in Markdown and LaTeX, and everything as CSV."""
    tables = model_tables(models, references)
    main = [table for name, table in tables.items() if name.startswith("models") or name in ("pairs", "differences")]
    texts = {"models.md": "\n".join(map(to_markdown, main)), "models.tex": "\n".join(map(to_latex, main))}
    for kind in ("models", "pairs", "differences"):
        suffix = "" if kind == "models" else f"-{kind}"
        by_measure = {
            measure: tables[name]
            for measure in models.measures
            if (name := kind if measure == OVERALL else f"{kind} {measure}") in tables
        }
        if by_measure:
            texts[f"models{suffix}.csv"] = to_csv(joined("questions", by_measure))
    return texts


def _pair_row(models: ModelStudies, pair: ModelPair) -> tuple[Cell, ...]:
    paired = pair.paired
    interval = f"{formats.points(paired.low)} to {formats.points(paired.high)}"
    return (
        Cell(models.labels[pair.first]),
        Cell(models.labels[pair.second]),
        Cell(str(paired.n), float(paired.n)),
        _points(paired.difference),
        Cell(interval),
        Cell(formats.points(paired.low), 100 * paired.low),
        Cell(formats.points(paired.high), 100 * paired.high),
        _statistic(paired.statistic),
        Cell(str(paired.n - 1), float(paired.n - 1)),
        Cell(formats.p_value(pair.paired_p), pair.paired_p),
        Cell(formats.p_value(paired.p), paired.p),
        _statistic(pair.unpaired.statistic),
        Cell(formats.p_value(pair.unpaired.p), pair.unpaired.p),
        Cell(formats.p_value(pair.signed_ranks_p), pair.signed_ranks_p),
        Cell(formats.p_value(pair.signed_ranks.p), pair.signed_ranks.p),
        Cell(formats.p_value(pair.signed_ranks.smallest_p), pair.signed_ranks.smallest_p),
    )


def _notes(pairs: Sequence[ModelPair]) -> tuple[str, ...]:
    most = max((pair.paired.n for pair in pairs), default=0)
    least = min(1.0, len(pairs) * smallest_p(most))
    after = f", and after the correction over {len(pairs)} pairs none below {least:.4g}" if len(pairs) > 1 else ""
    notes = [
        "Each model counts once, with its mean over the seeds that both methods have. Paired: tests of the "
        "differences model by model; p-values are corrected by Holm's procedure over the pairs.",
        "Unpaired: the same values taken as two independent samples, uncorrected. BiCSL's paper computed this "
        "statistic (1.357) under the name of the paired one (7.05). It suits no such data, because both methods "
        "share each model; it is shown for comparison with the paper, and nothing rests on it.",
        f"With {most} models Wilcoxon's test cannot give a p-value below {smallest_p(most):.4g}{after}. Models are "
        "no random sample, and they share data and seeds: the tests speak of models like these on these data. A large "
        "p-value is no evidence of equality.",
    ]
    return tuple(notes)


def _value_notes(models: ModelStudies) -> tuple[str, ...]:
    runs = list(chain.from_iterable(study.runs for study in models.studies.values()))
    firsts = {}
    for m in models.labels:
        firsts[models.labels[m]] = next((r for r in runs if r.method == m and r.complete), None)
    runs_with_method = {label: run for label, run in firsts.items() if run is not None}
    notes = ["Personal: each client's own model on its own test data, mean over clients."]
    if models.view is View.DEPLOYED:
        notes = [deployed_note({label: run.summary for label, run in runs_with_method.items()})]
    if models.view is View.PERSONAL:
        notes += filter(None, [personal_note({label: run.summary for label, run in runs_with_method.items()})])
    if models.bounds:
        labels = formats.names([models.labels[method] for method in models.bounds])
        notes.append(f"{labels}: all data in one place, which privacy forbids; a bound, not ranked.")
    metric = metric_note(runs)
    notes += [metric] if metric else []
    refused = [(a, b) for a, b in combinations(models.labels, 2) if b in models.refused.get(a, {})]
    for a, b in refused:
        text = f"{models.labels[a]} and {models.labels[b]}: {models.refused[a][b]}"
        notes.append(f"Not tested against each other: {text}.")
    notes += [
        f"{models.labels[a]} and {models.labels[b]}: not tested with {formats.names(both)}, where neither is shown to "
        "use its input."
        for a, b in combinations(models.labels, 2)
        if (
            both := [
                model for model, blind_methods in models.blind.items() if a in blind_methods and b in blind_methods
            ]
        )
    ]
    sizes: set[int] = set()
    for of in models.measures[OVERALL].values():
        for values in of.values():
            sizes.add(len(values))
    if len(sizes) > 1:
        notes.append(f"Cells have {min(sizes)} to {max(sizes)} finished seeds.")
    for model, study in models.studies.items():
        notes += [f"{model}: {text}" for text in study.failed]
    notes += [f"{model}: {text}" for model, text in models.absent.items()]
    return tuple(notes)


def _points(value: float | None) -> Cell:
    return Cell(formats.points(value), None if value is None else 100 * value)


def _statistic(value: float | None) -> Cell:
    if value is None:
        return Cell(formats.MISSING)
    text = f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"
    return Cell(text.replace("-", "−"), value)

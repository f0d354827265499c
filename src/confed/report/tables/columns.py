"""Column declarations of tables with one row per method, used by all tables that name them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, product
from pathlib import Path
from typing import Literal

from confed.comparison.records import Record
from confed.comparison.refusals import blind_pair, other_places, refusal_of
from confed.data.few_shot import NEW, harmonic_mean
from confed.metrics.scores import RECALLS, title_of
from confed.report.tables.cells import SIGN, best_marks, bold_note, mean_sd_cell, signed
from confed.report.tables.control_marks import controls_note, marked
from confed.report.tables.table import Cell, Column, Table
from confed.results.records import further_of, record_of
from confed.results.runs import RunResults
from confed.results.stored import TRAINING
from confed.results.summary import WORST, Summary, average
from confed.results.views import TESTED, View
from confed.system import format as formats

MANY_PLACES = 8  # with more clients or unseen places than this their columns are left to the CSV file

TableName = Literal["results", "paper", "labels", "labels and cost", "captions", "sweep"]
"""Tables that take declared columns. In "sweep" they stand at the end."""

Kind = Literal["quality", "share", "count", "size", "duration"]

_UNITS: dict[Kind, str] = {"quality": "%", "share": "%", "count": "", "size": "bytes", "duration": "s"}
_FORMATS: dict[Kind, Callable[[float | None], str]] = {
    "count": formats.count,
    "size": formats.size,
    "duration": formats.duration,
    "share": lambda value: formats.MISSING if value is None else f"{value:.2f}",
}


@dataclass(frozen=True)
class MethodRow:
    """A method's row: its label, its runs (one per seed), and whether it is a bound, which is not ranked."""

    label: str
    runs: Sequence[RunResults]
    bound: bool = False

    @property
    def summaries(self) -> list[Summary]:
        """The summaries of the runs."""
        return [run.summary for run in self.runs]

    @cached_property
    def records(self) -> list[Record]:
        """The runs as records."""
        return [record_of(run) for run in self.runs]

    @property
    def title(self) -> str:
        """The label, with over how many sites the means are where not all are in them."""
        parts = dict.fromkeys(filter(None, (summary.membership for summary in self.summaries)))
        return f"{self.label} ({', '.join(parts)})" if parts else self.label


@dataclass(frozen=True)
class Context:
    """What a table is about, by which columns decide whether they are shown."""

    rows: Sequence[MethodRow]
    clients: Sequence[str] = ()
    scenes: Sequence[str] = ()
    judged: View = View.PERSONAL

    @property
    def runs(self) -> list[RunResults]:
        """The runs of all methods."""
        return list(chain.from_iterable(row.runs for row in self.rows))


@dataclass(frozen=True)
class RunColumn:
    """A column whose cells are means over a method's runs, one run per seed."""

    title: str
    # A run's value; None where it has none. Qualities are fractions, times seconds, sizes bytes.
    value: Callable[[RunResults], float | None]
    tables: tuple[TableName, ...] = ()
    group: str = ""  # heading above the heading, shared with the neighbours
    # How values are written. Qualities are in percent with their standard deviation over seeds, and what tests do not
    # tell from the best is marked.
    kind: Kind = "quality"
    shown: Callable[[Context], bool] = lambda context: True  # whether a table about this has the column
    # Measure whose control conditions mark the cells (`control_marks`), and by which pairs of rows may be tested.
    measure: str = ""
    place: str = ""  # client or unseen place that the values are of
    ranked: bool = True  # whether the best qualities are marked
    lower_is_better: bool = False  # whether small qualities are the best
    of_bounds: bool = True  # whether rows that are bounds have values
    detail: bool = False  # in the CSV file only
    unit: str = ""  # of qualities, where it is not per cent; values are in hundredths of it

    @property
    def heading(self) -> Column:
        """The column without its values."""
        return Column(self.title, self.group, self.unit or _UNITS[self.kind], detail=self.detail)

    def cells(self, rows: Sequence[MethodRow]) -> list[Cell]:
        """The cell of every row."""
        values: list[list[float | None]] = []
        for row in rows:
            values.append([self.value(run) for run in row.runs] if self.of_bounds or not row.bound else [])
        means = [average(row_values) for row_values in values]
        if self.kind != "quality":
            return [Cell(_FORMATS[self.kind](mean), mean) for mean in means]
        cells = [mean_sd_cell(row_values) for row_values in values]
        if self.ranked and not self.detail:
            by_seed: list[dict[int, float]] = []
            for row, row_values in zip(rows, values, strict=True):
                sign = -1 if self.lower_is_better else 1
                pairs = zip(row.runs, row_values, strict=False)
                by_seed.append({run.seed: sign * value for run, value in pairs if value is not None})
            federated = [i for i, row in enumerate(rows) if not row.bound]
            marks = best_marks(by_seed, federated, lambda i, j: self._refused(rows[i], rows[j]))
            cells = [replace(cell, mark=mark) for cell, mark in zip(cells, marks, strict=True)]
        return [self._with_signs(cell, row) for cell, row in zip(cells, rows, strict=True)]

    def _with_signs(self, cell: Cell, row: MethodRow) -> Cell:
        """A cell with the signs of models that do not beat their controls, and of places that lack examples."""
        cell = marked(cell, row.records, self.measure) if self.measure else cell
        lacks = cell.value is not None and any(self.place in summary.left_out for summary in row.summaries)
        return signed(cell, SIGN) if lacks else cell

    def _refused(self, row: MethodRow, other: MethodRow) -> str:
        """Why two rows may not be tested against each other, as in comparisons; "" if they may."""
        others = {record.seed: record for record in other.records}
        pairs = [(record, others[record.seed]) for record in row.records if record.seed in others]
        if (reason := refusal_of(pairs)) or not self.measure:
            return reason
        return other_places(pairs, self.measure) or blind_pair(row.records, other.records, self.measure)


def columns_of(table: TableName, context: Context) -> list[RunColumn]:
    """The declared columns that a table about this has."""
    declared = [column for column in COLUMNS if table in column.tables and column.shown(context)]
    return declared + (_further(context) if table in ("results", "paper", "sweep") else [])


def _further(context: Context) -> list[RunColumn]:
    """A column for each further measure and view that some run has values of."""
    columns: list[RunColumn] = []
    for measure, further in further_of(context.runs).items():
        column = RunColumn(
            further.view.heading,
            lambda run, of=further: of.mean(run.summary),
            group=further.title,
            measure=measure,
            lower_is_better=further.lower_is_better,
            unit=further.unit,
        )
        if any(column.value(run) is not None for run in context.runs):
            columns.append(column)
    return columns


def place_columns(view: View, group: str, places: Sequence[str], detail: bool) -> list[RunColumn]:
    """A column for each place."""
    columns: list[RunColumn] = []
    for place in places:

        def value(run: RunResults, at: str = place) -> float | None:
            return run.summary.values(view).get(at)

        columns.append(RunColumn(place, value, (), group, place=place, detail=detail))
    return columns


def method_table(
    title: str, rows: Sequence[MethodRow], columns: Sequence[RunColumn | tuple[Column, Sequence[Cell]]],
    notes: Sequence[str] = (),
) -> Table:  # fmt: skip
    """A table with a row per method; bounds stand below a rule."""
    cells = [column.cells(rows) if isinstance(column, RunColumn) else column[1] for column in columns]
    lines = [(Cell(row.title), *row_cells) for row, row_cells in zip(rows, zip(*cells, strict=True), strict=True)]
    cut = sum(not row.bound for row in rows)
    headings = (column.heading if isinstance(column, RunColumn) else column[0] for column in columns)
    judged = [column.measure for column in columns if isinstance(column, RunColumn) and column.measure]
    meaning = controls_note([row.records for row in rows if row.runs], judged)
    sections = (tuple(lines[:cut]), tuple(lines[cut:]))
    notes = (*notes, *bold_note(lines), *meaning)
    return Table(title, (Column("method", words=True), *headings), sections, notes)


def method_row(label: str, summaries: Sequence[Summary]) -> MethodRow:
    """The row of a method of which only the summaries are known, one per seed."""
    runs = [RunResults(Path(), label, label, summary.seed, summary, {}) for summary in summaries]
    return MethodRow(label, runs, bool(runs) and summaries[0].is_bound)


def in_order(rows: Sequence[MethodRow]) -> list[MethodRow]:
    """Federated methods before bounds."""
    return sorted(rows, key=lambda row: row.bound)


def bytes_up(run: RunResults) -> float | None:
    """Bytes that one client sends in one round, mean over rounds and the clients that took part; None if unknown."""
    rounds = run.records.by_round(TRAINING, "bytes_up").items()
    return average(list(chain.from_iterable(of.values() for number, of in rounds if number <= run.records.reached)))


def _headline(name: str) -> Callable[[RunResults], float | None]:
    return lambda run: run.summary.headline(name)


def _cost(key: str) -> Callable[[RunResults], float | None]:
    return lambda run: run.summary.cost(key)


def _parameters(key: str) -> Callable[[RunResults], float | None]:
    return lambda run: run.summary.parameters.get(key)


def _share_sent(run: RunResults) -> float | None:
    sent, total = _parameters("sent")(run), _parameters("total")(run)
    return 100 * sent / total if sent is not None and total else None


def _base_and_new(run: RunResults) -> float | None:
    """Harmonic mean of the global model's accuracies on clients' (base) and on new classes."""
    base, new = run.summary.headline(View.SEEN.mean), run.summary.values(View.UNSEEN).get(NEW)
    return None if base is None or new is None else harmonic_mean(base, new)


def _caption_column(score: str, view: View) -> RunColumn:
    """A mean over places of a score of captions."""

    def value(run: RunResults) -> float | None:
        summary = run.summary
        return average([*(summary.bleu4(view) if score == "bleu4" else summary.counted(view)).values()])

    return RunColumn(title_of(score), value, ("captions",), view.heading, ranked=False)


def _recall_column(cut: str, view: View, group: str) -> RunColumn:
    """A share of the task ``retrieval``, mean over the places of a view."""

    def value(run: RunResults) -> float | None:
        return average([*run.summary.measured(cut, view).values()])

    return RunColumn(cut, value, ("paper",), group, shown=_retrieval, detail=True)


def _retrieval(context: Context) -> bool:
    """Whether texts are looked for by pictures, and pictures by texts."""
    return any(run.summary.metric == "tr@1" for run in context.runs)


def _deployed(context: Context) -> bool:
    return context.judged is View.DEPLOYED


def _personal(context: Context) -> bool:
    return context.judged is View.PERSONAL


def _some_deployed(context: Context) -> bool:
    return any(run.summary.deploys is not None for run in context.runs)


def _several_trainable(context: Context) -> bool:
    """Whether methods train different parts of the model, so that numbers of parameters differ."""
    return len({run.summary.trainable for run in context.runs}) > 1


def _unseen(context: Context) -> bool:
    return bool(context.scenes) or context.judged is View.PERSONAL


COLUMNS: tuple[RunColumn, ...] = (
    # Where heads are the clients' own: what a client trains and sends (FedDAT's table 2, "Comm. overhead").
    RunColumn("trained", _parameters("trained"), ("paper",), "parameters", "count", _deployed, of_bounds=False),
    RunColumn("sent", _parameters("sent"), ("paper",), "parameters", "count", _deployed, of_bounds=False),
    RunColumn("share", _share_sent, ("paper",), "parameters", "share", _deployed, of_bounds=False),
    RunColumn("sent up", bytes_up, ("paper",), "round and client", "size", _deployed, of_bounds=False),
    RunColumn("average", _headline(View.DEPLOYED.mean), ("paper",), "deployed", shown=_deployed,
              measure=View.DEPLOYED.mean),
    RunColumn("average", _headline(View.PERSONAL.mean), ("paper",), "personal", shown=_personal,
              measure=View.PERSONAL.mean),
    RunColumn("average", _headline(View.UNSEEN.mean), ("paper",), "unseen", shown=_unseen,
              measure=View.UNSEEN.mean),
    RunColumn("harmonic mean", _base_and_new, ("paper",), "base and new", shown=lambda context: NEW in context.scenes),
    RunColumn("mean", _headline(View.DEPLOYED.mean), ("results",), "deployed", shown=_some_deployed,
              measure=View.DEPLOYED.mean),
    RunColumn("mean", _headline(View.PERSONAL.mean), ("results",), "personal", measure=View.PERSONAL.mean),
    RunColumn("worst", _headline(WORST), ("results",), "personal"),
    RunColumn("seen", _headline(View.SEEN.mean), ("results",), "global", measure=View.SEEN.mean),
    RunColumn("unseen", _headline(View.UNSEEN.mean), ("results",), "global", measure=View.UNSEEN.mean),
    *(_caption_column(score, view) for view, score in product(TESTED, ("cider", "bleu4"))),
    *(_recall_column(cut, View.SEEN, "recall, global") for cut in RECALLS),
    *(_recall_column(cut, View.PERSONAL, "recall, own") for cut in RECALLS),
    RunColumn("trained", _parameters("trained"), ("results",), "parameters", "count", _several_trainable),
    RunColumn("shared", _parameters("sent"), ("results",), "parameters", "count", _several_trainable),
    RunColumn("sent", _cost("bytes_total"), ("results", "labels and cost"), kind="size"),
    RunColumn("time", _cost("seconds"), ("results", "labels and cost"), kind="duration"),
)  # fmt: skip
"""Every declared column, in the order of the tables."""

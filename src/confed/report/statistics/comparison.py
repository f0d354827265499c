"""Comparison of methods: spread over seeds and paired differences to references, with tests.

Three questions are kept apart. *Would another seed show the same?* is answered by the paired t-test over seeds.
*Are these trained models different on this test data?* is answered over examples, by a stratified sign-flip test of the
mean over clients that the tables show, and the interval that it gives. *Is the method no worse, or no different?* is
answered by two one-sided tests against a margin. Each family of tests (one measure, all pairs of methods) is corrected
by Holm's procedure, so that a pair has one p-value in all tables. Differences are method minus reference.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from confed.report.statistics.caveats import remarks, table_remarks
from confed.report.statistics.comparable import refusals
from confed.report.statistics.paired import (
    MARGIN,
    MEASURES,
    Difference,
    Methods,
    against,
    all_pairs,
    references_of,
    values_of,
    with_places,
)
from confed.report.statistics.pairing import BY_POSITION, Scores
from confed.report.tables.control_marks import MEANING, blind_pair, fails, with_marks
from confed.report.tables.differences import client_table, difference_table, seed_table
from confed.report.tables.headline import view_key
from confed.report.tables.relative import Values, relative_drawing, relative_table
from confed.report.tables.table import Table, in_files, joined, to_csv, to_html, to_latex, to_markdown, to_rich
from confed.results.headline import LABELS
from confed.results.metric import metric_note, metric_of
from confed.results.runs import Run, Summary, counted, distinct_labels, load, with_deployed_of
from confed.results.settings import differing_keys, named_apart
from confed.system.processor import machine_differences

if TYPE_CHECKING:
    from pandas import DataFrame
    from rich.console import Group

__all__ = ["Comparison", "compare", "compare_runs"]


@dataclass(frozen=True)
class Comparison:
    """Result of :func:`compare`.

    Attributes:
        references: the methods that the others are compared with, one table each.
        labels: method -> its name as people write it, in order.
        metric: name of the headline metric.
        margin: differences smaller than this are taken not to matter, a fraction.
        values: measure -> method -> seed -> value.
        differences: one per reference, measure and method that share a seed.
        pairs: one per measure and pair of methods that share a seed: the family that p-values are corrected over.
        warnings: settings in which the runs differ although only the algorithm and the seed should.
        remarks: how to read the figures.
        table_remarks: how to read the tables of this comparison: their tests of equivalence and corrections.
        clients_of: method -> client -> seed -> value of what is deployed at the client, where the study says so, or of
            its personal model.
        places_of: measure -> method -> place -> seed -> value, of measures that are means over places.
        refused: method -> other method -> why the two are not tested against each other, nor compared client by client.
        blind: measure and method of models that do not beat their controls (:mod:`confed.report.tables.control_marks`).
    """

    references: tuple[str, ...]
    labels: Mapping[str, str]
    metric: str
    margin: float
    values: Mapping[str, Mapping[str, Mapping[int, float]]]
    differences: tuple[Difference, ...]
    warnings: tuple[str, ...]
    remarks: tuple[str, ...]
    table_remarks: tuple[str, ...]
    clients_of: Values = field(default_factory=dict[str, Mapping[str, Mapping[int, float]]])
    places_of: Mapping[str, Values] = field(default_factory=dict[str, Values])
    refused: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    blind: tuple[tuple[str, str], ...] = ()
    pairs: tuple[Difference, ...] = ()

    def against(self, reference: str) -> tuple[Difference, ...]:
        """The differences to one reference."""
        return tuple(d for d in self.differences if d.reference == reference)

    def table(self, reference: str | None = None, notes: Sequence[str] = ()) -> Table:
        """All methods against one reference, by default the first."""
        reference = reference or self.references[0]
        means = [name for name in LABELS if name in self.values and " " not in name]
        what = f"{', '.join(means)} of all examples together, mean {self.metric}" if means else self.metric
        title = f"Test {what} in %, and differences to {self.labels[reference]} in points"
        found = self.against(reference)
        table = difference_table(title, reference, self.labels, self.values, found, self.margin, notes)
        return with_marks(table, {(MEASURES[m].words, self.labels[method]) for m, method in self.blind})

    def tables(self) -> tuple[Table, ...]:
        """One table per reference; warnings and remarks are the notes of the last."""
        notes = (*(f"Warning: {warning}" for warning in self.warnings), *self.remarks, *self.table_remarks)
        last = self.references[-1]
        return tuple(self.table(name, notes if name == last else ()) for name in self.references)

    def frame(self, reference: str | None = None) -> "DataFrame":
        """All methods against one reference as a pandas data frame, by default the first."""
        return self.table(reference).frame()

    def _repr_html_(self) -> str:
        return "".join(map(to_html, self.tables()))

    def clients(self, reference: str | None = None) -> Table | None:
        """The sign-flip test place by place against one reference; None without predictions."""
        reference = reference or self.references[0]
        return client_table(self.labels, self.differences, reference)

    def relative(self, own: str) -> Table:
        """Relative improvement of one method over each other one, per client (figure 7 of Cao et al., 2025).

        Raises ``ValueError``: the method is not among those with values for single clients.
        """
        table = relative_table(self._comparable(own), self.labels, self._own(own), self.metric)
        refused = self.refused.get(own, {})
        out = [f"{self.labels[method]}: {refused[method]}" for method in self.clients_of if method in refused]
        return replace(table, notes=(*table.notes, *(f"Not compared with {text}." for text in out)))

    def relative_files(self, own: str) -> dict[str, bytes]:
        """Name of a file -> its content: that table in Markdown, CSV and LaTeX, and the same as bars."""
        found = {name: text.encode() for name, text in in_files("relative", self.relative(own)).items()}
        drawn = relative_drawing(self._comparable(own), self.labels, own)
        return found | ({} if drawn is None else {"relative.png": drawn.png(), "relative.svg": drawn.svg()})

    def _comparable(self, own: str) -> Values:
        """The clients' values of a method and of those that it may be compared with."""
        refused = self.refused.get(own, {})
        return {method: values for method, values in self.clients_of.items() if method not in refused}

    def _own(self, own: str) -> str:
        if own not in self.clients_of:
            there = ", ".join(self.clients_of) or "none"
            raise ValueError(f"relative must name a method with results for single clients, of {there}; got {own!r}")
        return own

    def rich(self) -> "Group":
        """The main tables for a terminal, and where to find the others."""
        from rich.console import Group
        from rich.text import Text

        more = (
            "Place by place (sign flips) and the values of every seed are not shown here: compare.md, .tex, "
            "compare-clients.csv and compare-seeds.csv have them (written with --recipe or --out)."
        )
        return Group(*map(to_rich, self.tables()), *([Text(more)] if self._details() else []))

    def markdown(self) -> str:
        """The main tables in Markdown, then the tables per client."""
        return "\n".join(map(to_markdown, (*self.tables(), *self._details())))

    def csv(self) -> str:
        """The main tables as one, with both uncorrected and corrected p-values and the ends of the intervals."""
        return to_csv(joined("reference", {self.labels[name]: self.table(name) for name in self.references}))

    def latex(self) -> str:
        """The main tables in LaTeX, then the tables per client."""
        return "\n".join(map(to_latex, (*self.tables(), *self._details())))

    def files(self) -> dict[str, str]:
        """Name of a file -> its content: everything in Markdown and LaTeX, and CSV in a file per kind of table."""
        found = {"compare.md": self.markdown(), "compare.csv": self.csv(), "compare.tex": self.latex()}
        found["compare-seeds.csv"] = to_csv(seed_table(self.labels, self.values, self.places_of))
        tables = {self.labels[r]: table for r in self.references if (table := self.clients(r)) is not None}
        return found | ({"compare-clients.csv": to_csv(joined("reference", tables))} if tables else {})

    def _details(self) -> list[Table]:
        return [table for name in self.references if (table := self.clients(name)) is not None]


def compare(
    folders: Sequence[Path],
    reference: str | Sequence[str] | None = None,
    margin: float = MARGIN,
    headline: str = "",
) -> Comparison:
    """Comparison of methods over the runs in some folders.

    Args:
        folders: run folders and study folders, also mixed. Runs of one algorithm with other hyper-parameters
            are methods of their own, named by the values that differ.
        reference: the method or methods that the others are compared with; by default FedAvg and FedAvg + FT as
            far as they are there.
        margin: differences smaller than this are taken not to matter, a fraction.
        headline: what all methods are taken to deploy, "personal" or "global_seen"; see
            :mod:`confed.results.deployed`. By default what their studies say.

    Raises:
        ValueError: a folder is neither a run nor a study, there are no folders, a reference is not among
            the methods, or the margin is not positive.
    """
    if not folders:
        raise ValueError("folders must name at least one run or study, got none")
    return compare_runs([run for folder in folders for run in load(Path(folder)).runs], reference, margin, headline)


def compare_runs(
    runs: Sequence[Run],
    reference: str | Sequence[str] | None = None,
    margin: float = MARGIN,
    headline: str = "",
) -> Comparison:
    """Comparison of methods over loaded runs; see :func:`compare`.

    Raises:
        ValueError: a reference is not among the methods, the margin is not positive, or an unknown headline.
    """
    if not 0 < margin < 1:
        raise ValueError(f"margin must lie between 0 and 1 (0.01 is one percentage point), got {margin}")
    # Runs that were interrupted or failed have no test results; without any other, the remarks say what is missing.
    ended = with_deployed_of([run for run in runs if run.complete] or runs, headline)
    methods: dict[str, dict[int, Run]] = {}
    for run in named_apart(ended):
        methods.setdefault(run.method, {})[run.seed] = run
    references = references_of(methods, reference)
    scores = Scores()
    pairs = all_pairs(methods, margin, scores)
    found = [with_places(d, methods, scores) for name in references for d in against(pairs, name)]
    values = {measure: values_of(methods, measure) for measure in MEASURES}
    summaries = {method: [run.summary for run in own.values()] for method, own in methods.items()}
    blind = tuple(
        (name, method)
        for name, there in values.items()
        for method in there
        if fails(summaries[method], view_key(name, summaries[method][0]))
    )
    view = "deployed" if values["deployed_mean"] else "personal"
    sentences = [*filter(None, [metric_note(ended)]), *[MEANING] * bool(blind), *remarks(found, methods)]
    return Comparison(
        references=references,
        labels=distinct_labels({method: next(iter(runs.values())).label for method, runs in methods.items()}),
        metric=metric_of(ended),
        margin=margin,
        values={measure: there for measure, there in values.items() if there},
        differences=tuple(found),
        warnings=(*_warnings(methods, references[0]), *_failures(methods)),
        remarks=(*sentences, *[BY_POSITION] * scores.by_position),
        table_remarks=tuple(table_remarks(found, pairs, margin)),
        clients_of=_clients_of(methods, view),
        places_of={name: _clients_of(methods, m.key) for name, m in MEASURES.items() if m.key and values[name]},
        refused=_refused(methods, scores, summaries, view),
        blind=blind,
        pairs=tuple(pairs),
    )


def _refused(
    methods: Methods, scores: Scores, summaries: Mapping[str, Sequence[Summary]], view: str
) -> dict[str, dict[str, str]]:
    """Why methods are not compared client by client: other data, or neither uses its input."""
    found = refusals(methods, scores.strict)
    for a in methods:
        for b in methods:
            if a != b and (reason := blind_pair(summaries[a], summaries[b], view)):
                found.setdefault(a, {}).setdefault(b, reason)
    return found


def _clients_of(methods: Methods, view: str) -> dict[str, dict[str, dict[int, float]]]:
    """Method -> client -> seed -> value, of clients that stayed to the end."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for method, runs in methods.items():
        for seed, run in sorted(runs.items()):
            for client, value in counted(run.summary, view).items():
                found.setdefault(method, {}).setdefault(client, {})[seed] = value
    return found


def _failures(methods: Methods) -> list[str]:
    """A line per method of which clients failed: how often, and the first error."""
    lines: list[str] = []
    for method, runs in methods.items():
        failed = [
            (run.seed, int(line["round"]), str(client), str(error))
            for _, run in sorted(runs.items())
            for line in run.rounds
            for client, error in line.get("errors", {}).items()
        ]
        if failed:
            asked = sum(
                len({*line.get("loss", {}), *line.get("errors", {})}) for r in runs.values() for line in r.rounds
            )
            seed, number, client, error = failed[0]
            lines.append(
                f"{method}: clients failed in {len(failed)} of {asked} (client, round) pairs and were left out there; "
                f"the first, {client!r} in round {number} of seed {seed}: {error}"
            )
    return lines


def _warnings(methods: Methods, reference: str) -> list[str]:
    """A line per method whose settings outside its algorithm differ among its seeds or from the first reference's."""
    lines: list[str] = []
    base = methods[reference]
    for method, runs in methods.items():
        first, other = next(iter(runs.values())), next(iter(base.values()))
        among = _differing([(run, first) for run in runs.values()])
        if among:
            lines.append(f"the seeds of {method} differ in more than the seed: {among}")
        found = _differing([(run, base.get(seed, other)) for seed, run in runs.items()])
        if found:
            lines.append(f"{method} and {reference} differ in more than the algorithm: {found}")
    return lines


def _differing(pairs: Sequence[tuple[Run, Run]]) -> str:
    """The keys in which any of these pairs differs, with the values of the last such pair; not what tuning chose."""
    found = {
        key: values
        for a, b in pairs
        for key, values in (differing_keys(a, b) | machine_differences(a.summary, b.summary)).items()
        if key not in a.tuned and key not in b.tuned
    }
    return ", ".join(f"{key} ({values})" for key, values in found.items())

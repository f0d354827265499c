"""Comparison of methods: spread over seeds and paired differences to references, with tests.

Three questions are kept apart. *Would another seed show the same?* is answered by the paired t-test over seeds.
*Are these trained models different on this test data?* is answered over examples, by a stratified sign-flip test of the
mean over clients that the tables show, and the interval that it gives. *Is the method no worse, or no different?* is
answered by two one-sided tests against a margin. Each family of tests (one measure, all pairs of methods) is corrected
by Holm's procedure, so that a pair has one p-value in all tables. Differences are method minus reference.

It reads the p-values of a comparison and computes none: whatever it says of a pair stands in the table of that pair.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from confed.comparison.paired import LEVEL, MARGIN, MIN_SEEDS, Difference, with_places
from confed.comparison.pairing import BY_POSITION
from confed.comparison.records import distinct_labels
from confed.comparison.refusals import blind_pair, refusals
from confed.comparison.verdict import Compared
from confed.comparison.verdict import compare as compare_records
from confed.metrics.statistics import Bootstrap, Swap, smallest_p
from confed.report.tables.control_marks import MEANING, with_marks
from confed.report.tables.differences import client_table, difference_table, seed_table
from confed.report.tables.methods import without_positives
from confed.report.tables.relative import Values, relative_drawing, relative_table
from confed.report.tables.table import Table, in_files, joined, to_csv, to_html, to_latex, to_markdown, to_rich
from confed.results.metric import metric_note, metric_of
from confed.results.records import MEANS_OF_VIEWS, further_of, outcomes_of, record_of, words_of
from confed.results.runs import RunResults, StudyResults, load, with_deployed_of
from confed.results.settings import differing_keys, named_apart, tuning_note
from confed.results.stored import TRAINING
from confed.results.summary import LABELS, deployed_note, personal_note
from confed.results.views import View
from confed.system import format as formats
from confed.system.processor import machine_differences

if TYPE_CHECKING:
    from pandas import DataFrame
    from rich.console import Group

Methods = Mapping[str, Mapping[int, RunResults]]  # method -> seed -> run

# Caveats of a comparison of methods, in sentences -------------------------------------------------------------


def remarks(differences: Sequence[Difference], methods: Methods) -> list[str]:
    """Caveats of differences between methods, common to all tables."""
    sentences = [*_on_seeds(differences), *_on_examples(differences), *_on_refusals(differences, methods)]
    sentences += _on_methods(methods)
    if note := tuning_note([next(iter(runs.values())) for runs in methods.values()]):
        sentences.append(f"{note} A difference between methods includes that of their tuned values.")
    return sentences


def table_remarks(differences: Sequence[Difference], pairs: Sequence[Difference], margin: float) -> list[str]:
    """Caveats of one table of differences: its tests of equivalence, and the family of Holm's correction."""
    return [*_on_margin(differences, margin), *_on_families(pairs)]


def _on_seeds(differences: Sequence[Difference]) -> list[str]:
    """Caveats of tests over seeds."""
    if not differences:
        return ["No method shares a seed and a measure with the reference: nothing can be compared."]
    seeds_of_pairs = [len(d.seeds) for d in differences]
    least, most = min(seeds_of_pairs), max(seeds_of_pairs)
    if most < 2:
        return ["One seed in common: nothing can be said about other seeds."]
    seeds = f"{most}" if least == most else f"{least} to {most}"
    lines = [
        f"Over seeds: paired t-test over {seeds} seeds. A test of signs or ranks over {most} seeds cannot give "
        f"a p-value below {smallest_p(most):.4g}."
    ]
    if least < MIN_SEEDS:
        few = least if most >= MIN_SEEDS else seeds
        lines.append(
            f"With {few} seeds no significance is claimed at the level of seeds (that takes {MIN_SEEDS}); "
            "intervals and p-values over seeds are for orientation."
        )
    if any(d.over_seeds and not d.over_seeds.sd for d in differences):
        lines.append(
            "Where all seeds show the same difference there is no spread: the interval is a point, there are no "
            "p-values over seeds, and Holm's correction is without that row."
        )
    if most >= MIN_SEEDS:
        lines.append(f"* p-value over seeds at most {LEVEL} after Holm's correction.")
    return lines


def _on_margin(differences: Sequence[Difference], margin: float) -> list[str]:
    """Interpretation of the tests of equivalence."""
    if not any(d.equivalence for d in differences):
        return []
    points = f"{100 * margin:g} point" + ("" if margin == 0.01 else "s")
    return [
        f"Margin: two one-sided t-tests over seeds (TOST). A small p says that the method loses less than {points} "
        f"(no worse), or differs by less than {points} either way (equal). A large p shows nothing: a difference "
        "that is not significant is not equality."
    ]


def _on_examples(differences: Sequence[Difference]) -> list[str]:
    """Caveats of tests over examples."""
    resampled = [d for d in differences if d.over_examples]
    if not resampled:
        # Reasons for single pairs are said one by one.
        unsaid = bool(differences) and not all(d.refused or d.unpaired for d in differences)
        return ["No tests over examples: predictions of both methods on the same examples are missing."] * unsaid
    means = [d for d in resampled if d.signs]
    line = "Over examples: these trained models on this test data; it says nothing about other seeds."
    if means:
        line += (
            " p is of sign flips within clients, and the interval holds what they do not reject; clients are averaged "
            "as in the values, and an example counts once, with its mean over seeds."
        )
    if any(isinstance(d.over_examples, Bootstrap) for d in resampled):
        line += " C-AP and O-F1 are of all examples together; their p and interval are of a bootstrap over them."
    further = dict.fromkeys(words_of(d.measure) for d in resampled if isinstance(d.over_examples, Swap))
    if further:
        line += (
            f" No mean over examples ({formats.names([*further])}): p is of random exchanges of what both methods said "
            "of an example, within clients; there is no interval."
        )
    bound = max((d.signs.smallest_p for d in means if d.signs and d.signs.won + d.signs.lost), default=0.0)
    return [line + (f" Sign flips cannot give a p-value below {bound:.2g} in some rows." if bound > 1e-4 else "")]


def _on_refusals(differences: Sequence[Difference], methods: Methods) -> list[str]:
    """Pairs that were not tested, or not over examples, with reasons: one sentence per pair and reason."""
    lines: list[str] = []
    for words, attribute in (("Not tested", "refused"), ("No tests over examples", "unpaired")):
        pairs: dict[tuple[str, str, str], list[str]] = {}
        for d in differences:
            if reason := getattr(d, attribute):
                pairs.setdefault((d.method, d.reference, reason), []).append(words_of(d.measure))
        for (method, reference, reason), measures in pairs.items():
            a, b = (next(iter(methods[name].values())).label for name in (method, reference))
            lines.append(f"{words}: {a} against {b} ({', '.join(measures)}): {reason}.")
    return lines


def _on_families(pairs: Sequence[Difference]) -> list[str]:
    """Note on multiple comparisons: the size of Holm's families."""
    most = max(Counter(pair.measure for pair in pairs).values(), default=0)
    if most < 2:
        return []
    return [
        f"p-values are corrected by Holm's procedure over all pairs of methods on a measure, up to {most}, whichever "
        "of them a table shows: a pair has the same p-value in every table."
    ]


def _on_methods(methods: Methods) -> list[str]:
    """Deployed models, and rows that are bounds."""
    firsts = [next(iter(runs.values())) for runs in methods.values()]
    shown = {run.label: run.summary for run in firsts}
    deployed = all(summary.deploys is not None for summary in shown.values())
    lines = [deployed_note(shown)] if deployed else []
    lines += filter(None, [personal_note(shown)])
    lines += without_positives([(s, s.label_section()) for s in shown.values() if s.is_labelled])
    bounds = [run.label for run in firsts if run.summary.is_bound]
    if bounds:
        lines.append(f"{formats.names(bounds)}: all data in one place, a bound and not a federated method.")
    return lines


# Comparison of methods ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """Result of :func:`compare`."""

    references: tuple[str, ...]  # the methods that the others are compared with, one table each
    labels: Mapping[str, str]  # method -> its name as people write it, in order
    metric: str  # name of the headline metric
    margin: float  # differences smaller than this are taken not to matter, a fraction
    values: Mapping[str, Mapping[str, Mapping[int, float]]]  # measure -> method -> seed -> value
    differences: tuple[Difference, ...]  # one per reference, measure and method that share a seed
    warnings: tuple[str, ...]  # settings in which the runs differ although only the algorithm and the seed should
    remarks: tuple[str, ...]  # how to read the figures
    # How to read the tables of this comparison: their tests of equivalence and corrections.
    table_remarks: tuple[str, ...]
    compared: Compared  # the tests of all pairs
    # Method -> client -> seed -> value of what is deployed at the client, where the study says so, or of its personal
    # model.
    clients_of: Values = field(default_factory=dict[str, Mapping[str, Mapping[int, float]]])
    # Measure -> method -> place -> seed -> value, of measures that are means over places.
    places_of: Mapping[str, Values] = field(default_factory=dict[str, Values])
    # Method -> other method -> why the two are not tested against each other, nor compared client by client.
    refused: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    # Measure and method of models that do not beat their controls (`control_marks`).
    blind: tuple[tuple[str, str], ...] = ()

    @property
    def pairs(self) -> tuple[Difference, ...]:
        """One per measure and pair of methods that share a seed: the family that p-values are corrected over."""
        return self.compared.pairs

    def content(self) -> dict[str, Any]:
        """Everything for machines."""
        plain = asdict(replace(self, compared=Compared({}, (), {}, ())))
        del plain["compared"]
        return {**plain, "pairs": [asdict(pair) for pair in self.pairs]}

    def against(self, reference: str) -> tuple[Difference, ...]:
        """The differences to one reference."""
        return tuple(d for d in self.differences if d.reference == reference)

    def table(self, reference: str | None = None, notes: Sequence[str] = ()) -> Table:
        """All methods against one reference, by default the first."""
        reference = reference or self.references[0]
        means = [name for name in LABELS if name in self.values and " " not in name]
        what = f"{', '.join(means)} of all examples together, mean {self.metric}" if means else self.metric
        title = f"Test {what} in %, and differences to {self.labels[reference]} in points"
        pairs = self.against(reference)
        table = difference_table(title, reference, self.labels, self.values, pairs, self.margin, notes)
        return with_marks(table, {(words_of(m), self.labels[method]) for m, method in self.blind})

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

    def relative(self, method: str) -> Table:
        """Relative improvement of one method over each other one, per client (figure 7 of Cao et al., 2025)."""
        if method not in self.clients_of:
            available = ", ".join(self.clients_of) or "none"
            raise ValueError(
                f"relative must name a method with results for single clients, of {available}; got {method!r}"
            )
        table = relative_table(self._comparable(method), self.labels, method, self.metric)
        refused = self.refused.get(method, {})
        out = [f"{self.labels[other]}: {refused[other]}" for other in self.clients_of if other in refused]
        return replace(table, notes=(*table.notes, *(f"Not compared with {text}." for text in out)))

    def relative_files(self, method: str) -> dict[str, bytes]:
        """Name of a file -> its content: that table in Markdown, CSV and LaTeX, and the same as bars."""
        files = {name: text.encode() for name, text in in_files("relative", self.relative(method)).items()}
        drawn = relative_drawing(self._comparable(method), self.labels, method)
        return files | ({} if drawn is None else {"relative.png": drawn.png(), "relative.svg": drawn.svg()})

    def _comparable(self, method: str) -> Values:
        """The clients' values of a method and of those that it may be compared with."""
        refused = self.refused.get(method, {})
        return {other: values for other, values in self.clients_of.items() if other not in refused}

    def rich(self) -> "Group":
        """The main tables for a terminal, and where to find the others."""
        from rich.console import Group
        from rich.text import Text

        more = (
            "Place by place (sign flips) and the values of every seed are not shown here: compare.md, .tex, "
            "compare-clients.csv and compare-seeds.csv have them (written with --out, and of a recipe)."
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
        texts = {"compare.md": self.markdown(), "compare.csv": self.csv(), "compare.tex": self.latex()}
        texts["compare-seeds.csv"] = to_csv(seed_table(self.labels, self.values, self.places_of))
        tables = {self.labels[r]: table for r in self.references if (table := self.clients(r)) is not None}
        return texts | ({"compare-clients.csv": to_csv(joined("reference", tables))} if tables else {})

    def _details(self) -> list[Table]:
        return [table for name in self.references if (table := self.clients(name)) is not None]


def compare(
    folders: Sequence[Path],
    reference: str | Sequence[str] | None = None,
    margin: float = MARGIN,
    headline: str = "",
) -> Comparison:
    """Comparison of methods over the runs in some folders."""
    if not folders:
        raise ValueError("folders must name at least one run or study, got none")
    runs = chain.from_iterable(load(Path(folder)).runs for folder in folders)
    return compare_runs(list(runs), reference, margin, headline)


def compare_runs(
    runs: Sequence[RunResults],
    reference: str | Sequence[str] | None = None,
    margin: float = MARGIN,
    headline: str = "",
) -> Comparison:
    """Comparison of methods over loaded runs; see :func:`compare`."""
    # Runs that were interrupted or failed have no test results; without any other, the remarks say what is missing.
    ended = with_deployed_of([run for run in runs if run.complete] or runs, headline)
    named = named_apart(ended)
    methods: dict[str, dict[int, RunResults]] = {}
    for run in named:
        methods.setdefault(run.method, {})[run.seed] = run
    compared = compare_records([*map(record_of, named)], outcomes_of(named), reference, margin)
    differences: list[Difference] = []
    for name in compared.references:
        differences += [with_places(difference, compared.methods) for difference in compared.against(name)]
    view = View.DEPLOYED if View.DEPLOYED.mean in compared.values else View.PERSONAL
    sentences = [*filter(None, [metric_note(ended)]), *[MEANING] * bool(compared.blind)]
    sentences += remarks(differences, methods)
    places_of: dict[str, Values] = {}
    for measure in [*MEANS_OF_VIEWS, *further_of(named)]:
        if measure in compared.values:
            places_of[measure] = _values_at(compared, measure)
    return Comparison(
        references=compared.references,
        labels=distinct_labels(compared.labels),
        metric=metric_of(ended),
        margin=margin,
        values=compared.values,
        differences=tuple(differences),
        warnings=(*_warnings(methods, compared.references[0]), *_failures(methods)),
        remarks=(*sentences, *[BY_POSITION] * any(pair.by_position for pair in compared.pairs)),
        table_remarks=tuple(table_remarks(differences, compared.pairs, margin)),
        clients_of=_values_at(compared, view.mean),
        places_of=places_of,
        refused=_refused(compared, view),
        blind=compared.blind,
        compared=compared,
    )


def _refused(compared: Compared, view: View) -> dict[str, dict[str, str]]:
    """Why methods are not compared client by client: other data, or neither uses its input."""
    refused = refusals(compared.methods, [*MEANS_OF_VIEWS])
    for a, records in compared.methods.items():
        for b, others in compared.methods.items():
            if a != b and (reason := blind_pair(records.values(), others.values(), view.mean)):
                refused.setdefault(a, {}).setdefault(b, reason)
    return refused


def _values_at(compared: Compared, measure: str) -> dict[str, dict[str, dict[int, float]]]:
    """Method -> place -> seed -> value, of clients that stayed to the end."""
    values: dict[str, dict[str, dict[int, float]]] = {}
    for method, records in compared.methods.items():
        for seed, record in sorted(records.items()):
            for place, value in record.of_places(measure).items():
                values.setdefault(method, {}).setdefault(place, {})[seed] = value
    return values


def _failures(methods: Methods) -> list[str]:
    """A line per method of which clients failed: how often, and the first error."""
    lines: list[str] = []
    for method, runs in methods.items():
        failed: list[tuple[int, int, str, str]] = []
        pairs = 0
        for seed, run in sorted(runs.items()):
            losses = run.records.by_round(TRAINING, "loss")
            for facts in run.records.rounds:
                errors, number = facts.get("errors") or {}, int(facts["round"])
                failed += [(seed, number, str(client), str(error)) for client, error in errors.items()]
                pairs += len({*losses.get(number, ()), *errors})
        if failed:
            seed, number, client, error = failed[0]
            lines.append(
                f"{method}: clients failed in {len(failed)} of {pairs} (client, round) pairs and were left out there; "
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
        differing = _differing([(run, base.get(seed, other)) for seed, run in runs.items()])
        if differing:
            lines.append(f"{method} and {reference} differ in more than the algorithm: {differing}")
    return lines


def _differing(pairs: Sequence[tuple[RunResults, RunResults]]) -> str:
    """The keys in which any of these pairs differs, with the values of the last such pair; not what tuning chose."""
    differing: dict[str, str] = {}
    for a, b in pairs:
        for key, values in (differing_keys(a, b) | machine_differences(a.summary.content, b.summary.content)).items():
            if key not in a.tuned and key not in b.tuned:
                differing[key] = values
    return ", ".join(f"{key} ({values})" for key, values in differing.items())


# Verdict of a study: which method is best, by how much --------------------------------------------------------

VERDICTS = {
    View.DEPLOYED.mean: "Deployed models",
    View.PERSONAL.mean: "Personal models on their own clients' data",
    View.UNSEEN.mean: "The global model in unseen places",
    "C-AP": "C-AP",
}
"""Measures that a verdict is given on -> what they are called there; personal means only where nothing is deployed."""


def verdict(study: StudyResults, comparison: Comparison) -> str:
    """The verdict of a study's comparison; "" for a run on its own. See :meth:`confed.comparison.Compared.verdict`."""
    words = dict(VERDICTS)
    if View.DEPLOYED.mean in comparison.values:
        del words[View.PERSONAL.mean]
    return "" if study.single else comparison.compared.verdict(words, by_reference=(View.UNSEEN.mean,))

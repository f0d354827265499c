"""Paired differences between methods, over seeds and over test examples.

All differences are of the values in the tables: means over places (clients or unseen ones), each of which counts the
same whatever its number of test examples. Tests over examples therefore resample and flip signs within places
(:mod:`confed.metrics.stratified`). Of multi-label runs C-AP and O-F1 are of all examples together, and so are their
draws.
"""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from confed.metrics.equivalence import Equivalence, tost
from confed.metrics.resampling import Bootstrap
from confed.metrics.statistics import PairedT, Wilcoxon, holm, paired_t, wilcoxon
from confed.metrics.stratified import RESAMPLES, SignFlip, sign_flip, stratified_bootstrap
from confed.report.statistics.comparable import OtherExamples, other_places, refusal_of
from confed.report.statistics.pairing import Scores
from confed.report.tables.control_marks import blind_pair
from confed.report.tables.headline import view_key
from confed.results.headline import LABELS, headline, is_bound
from confed.results.runs import Run, counted
from confed.results.traits import traits_of

__all__ = [
    "LEVEL",
    "MARGIN",
    "MEASURES",
    "MIN_SEEDS",
    "MOST_SIGNS",
    "REFERENCE_ROWS",
    "Difference",
    "Measure",
    "Methods",
    "Scores",
    "by_place_test",
    "corrected",
    "differences",
    "references_of",
    "values_of",
]

MIN_SEEDS = 5
"""With fewer seeds nothing is called significant at the level of seeds."""

LEVEL = 0.05
"""A corrected p-value up to this is called significant."""

MARGIN = 0.01
"""Differences smaller than this (one percentage point) are taken not to matter, unless told otherwise."""

MOST_SIGNS = 200_000
"""Random signs at most of a test by place."""

REFERENCE_ROWS = ("adapter",)
"""Rows that methods are compared with by their name, after the methods that are references."""


class Measure(NamedTuple):
    """A number that heads a run's results.

    Attributes:
        words: its name as people read it.
        view: the view of the predictions that it is a mean of; empty if it is no mean over examples.
        key: the key of its values per place in a run's summary; empty if it is no mean over places.
    """

    words: str
    view: str
    key: str


MEASURES: Mapping[str, Measure] = {
    # Of multi-label runs: no means over examples, so that their tests over examples resample the metric itself.
    **{name: Measure(name, "", "") for name in LABELS},
    "deployed_mean": Measure("deployed at each client", "deployed", "deployed"),
    "personal_mean": Measure("personal on own data", "personal", "personal"),
    "global_seen_mean": Measure("global on seen", "global", "global_seen"),
    "global_unseen_mean": Measure("global on unseen", "unseen", "global_unseen"),
}
"""Key of the summary -> measure."""

Methods = Mapping[str, Mapping[int, Run]]
"""Method -> seed -> run."""


@dataclass(frozen=True)
class Difference:
    """One method against a reference on one measure. P-values "after the correction" are Holm's, over methods.

    Attributes:
        reference: what the method is compared with.
        measure: key of :data:`MEASURES`.
        method: which method.
        seeds: the seeds that both have.
        points: mean difference over these seeds, a fraction.
        over_seeds: paired t-test over seeds; None with fewer than two.
        seeds_p: its p-value after the correction; None where all seeds show the same difference, which is no evidence.
        equivalence: two one-sided tests over seeds; None with fewer than two.
        no_worse_p: p-value against "worse by the margin or more", after the correction.
        equivalence_p: p-value against "different by the margin or more", after the correction.
        over_examples: stratified paired bootstrap over test examples; None without predictions of both.
        bootstrap_p: its p-value after the correction.
        over_both: the same over seeds and examples; None without predictions or with one seed.
        signs: stratified sign-flip test over test examples, one vote per example; None without predictions, and of what
            is no mean over examples.
        signs_p: its p-value after the correction.
        by_place: place -> sign-flip test on its own examples; empty where ``signs`` is None.
        by_place_p: place -> p-value corrected over all methods and places of the measure.
        pairs: Wilcoxon's test over all pairs of place and seed, which are not independent; None if there are
            none.
        refused: why nothing is tested between the two (:mod:`confed.report.statistics.comparable`); "" where it is.
        unpaired: why there are no tests over examples; "" where there are, or where nothing is tested.
    """

    reference: str
    measure: str
    method: str
    seeds: tuple[int, ...]
    points: float
    over_seeds: PairedT | None = None
    seeds_p: float | None = None
    equivalence: Equivalence | None = None
    no_worse_p: float | None = None
    equivalence_p: float | None = None
    over_examples: Bootstrap | None = None
    bootstrap_p: float | None = None
    over_both: Bootstrap | None = None
    signs: SignFlip | None = None
    signs_p: float | None = None
    by_place: Mapping[str, SignFlip] = field(default_factory=dict[str, SignFlip])
    by_place_p: Mapping[str, float] = field(default_factory=dict[str, float])
    pairs: Wilcoxon | None = None
    refused: str = ""
    unpaired: str = ""

    @property
    def significant(self) -> bool:
        """Whether it is claimed to hold for other seeds: enough of them, and a small corrected p-value."""
        return self._claimed(self.seeds_p)

    @property
    def no_worse(self) -> bool:
        """Whether it is claimed, for other seeds, that the method does not lose the margin."""
        return self._claimed(self.no_worse_p)

    @property
    def equivalent(self) -> bool:
        """Whether it is claimed, for other seeds, that the two differ by less than the margin."""
        return self._claimed(self.equivalence_p)

    def _claimed(self, p: float | None) -> bool:
        return len(self.seeds) >= MIN_SEEDS and p is not None and p <= LEVEL


def references_of(methods: Methods, asked: str | Sequence[str] | None = None) -> tuple[str, ...]:
    """The methods that the others are compared with.

    Args:
        methods: what there is.
        asked: their names. By default FedAvg and FedAvg + FT as far as they are there, else the first method
            that is no bound.

    Raises:
        ValueError: a name is not among the methods, or none is given.
    """
    if asked is not None:
        names = tuple(dict.fromkeys([asked] if isinstance(asked, str) else asked))
        for name in names:
            if name not in methods:
                raise ValueError(f"reference must be one of {', '.join(methods)}, got {name!r}")
        if not names:
            raise ValueError(f"reference must name at least one of {', '.join(methods)}, got none")
        return names
    firsts = {method: next(iter(runs.values())) for method, runs in methods.items()}
    ranks = {method: traits_of(run.summary).reference for method, run in firsts.items()}
    found: list[str] = []
    for rank in sorted({rank for rank in ranks.values() if rank}):
        # The row named as its method comes first; a variant of it (another aggregation, say) only without that.
        same = [method for method in firsts if ranks[method] == rank]
        found.append(next((m for m in same if firsts[m].summary.get("algorithm") == m), same[0]))
    found += [name for name in REFERENCE_ROWS if name in methods and name not in found]
    federated = (method for method, run in firsts.items() if not is_bound(run.summary))
    return tuple(found) or (next(federated, next(iter(methods))),)


def values_of(methods: Methods, measure: str) -> dict[str, dict[int, float]]:
    """Method -> seed -> value of a measure; methods without any are left out."""
    found: dict[str, dict[int, float]] = {}
    for method, runs in methods.items():
        seeds = {seed: headline(run.summary, measure) for seed, run in sorted(runs.items())}
        present = {seed: value for seed, value in seeds.items() if value is not None}
        if present:
            found[method] = present
    return found


def differences(
    methods: Methods, reference: str, margin: float = MARGIN, scores: Scores | None = None
) -> list[Difference]:
    """Every method against the reference on every measure that both have.

    In the order of measures, then methods. Each kind of test is corrected by Holm's procedure over the
    methods of one measure.

    Args:
        methods: what is compared.
        reference: one of them.
        margin: differences smaller than this do not matter, a fraction.
        scores: predictions read so far, shared by several calls.
    """
    scores = scores or Scores()
    found: list[Difference] = []
    for name, measure in MEASURES.items():
        values = values_of(methods, name)
        family: list[Difference] = []
        for method in values:
            seeds = [seed for seed in values[method] if seed in values.get(reference, {})]
            if method == reference or not seeds:
                continue
            runs = [(methods[method][seed], methods[reference][seed]) for seed in seeds]
            a, b = ([values[key][seed] for seed in seeds] for key in (method, reference))
            points = sum(x - y for x, y in zip(a, b, strict=True)) / len(seeds)
            difference = Difference(reference, name, method, tuple(seeds), points)
            own, others = ([pair[side].summary for pair in runs] for side in (0, 1))
            blind = blind_pair(own, others, view_key(name, own[0]))
            if refused := refusal_of(runs, scores.strict) or other_places(runs, measure.key) or blind:
                family.append(replace(difference, refused=refused))
                continue
            if measure.key:
                difference = replace(difference, pairs=_over_pairs(runs, measure.key))
            if len(seeds) > 1:
                difference = replace(difference, over_seeds=paired_t(a, b), equivalence=tost(a, b, margin))
            if name in LABELS:
                difference = _over_labels(difference, runs, scores)
            if measure.view:
                difference = _over_examples(difference, runs, measure.view, scores, len(values) - 1)
            family.append(difference)
        found += corrected(family)
    return found


def _over_pairs(runs: Sequence[tuple[Run, Run]], key: str) -> Wilcoxon | None:
    """Wilcoxon's test over pairs of place and seed."""
    tables = [(counted(a.summary, key), counted(b.summary, key)) for a, b in runs]
    pairs = [(a[place], b[place]) for a, b in tables for place in a if place in b]
    return wilcoxon(*zip(*pairs, strict=True)) if pairs else None


def _over_labels(difference: Difference, runs: Sequence[tuple[Run, Run]], scores: Scores) -> Difference:
    """The same difference of multi-label runs with its tests over examples, or with the reason why there are none."""
    if reason := scores.labels.unpaired(runs, difference.measure):
        return _without(difference, reason)
    return replace(
        difference,
        over_examples=scores.labels.over_examples(runs, difference.measure),
        over_both=scores.labels.over_both(runs, difference.measure),
    )


def _without(difference: Difference, reason: str) -> Difference:
    """The same difference without tests over examples; of other examples, without any test."""
    if isinstance(reason, OtherExamples):
        d = difference
        return Difference(d.reference, d.measure, d.method, d.seeds, d.points, refused=reason)
    return replace(difference, unpaired=reason)


def _over_examples(
    difference: Difference, runs: Sequence[tuple[Run, Run]], view: str, scores: Scores, methods: int
) -> Difference:
    """The same difference with its tests over examples, or with the reason why there are none.

    Args:
        difference: of one method.
        runs: method and reference of each seed.
        view: the view of the predictions.
        scores: predictions read so far.
        methods: how many methods the correction is over.
    """
    strata = scores.differences(runs, view)
    if isinstance(strata, str):
        return _without(difference, strata)
    # In the federation's order, as tables have the places.
    order = dict.fromkeys(place for place in (*runs[0][0].clients, *runs[0][0].scenes, *strata) if place in strata)
    # A place without test examples has no value either.
    strata = {place: strata[place] for place in order if strata[place].size}
    if not strata:
        return replace(difference, unpaired="there are no test examples")
    seed = zlib.crc32(f"{difference.measure} {difference.method} {difference.reference}".encode())
    over_examples, over_both = stratified_bootstrap([*strata.values()])
    return replace(
        difference,
        over_examples=over_examples,
        over_both=over_both,
        signs=sign_flip([*strata.values()], seed),
        by_place={
            place: by_place_test(d, zlib.crc32(place.encode(), seed), methods * len(strata))
            for place, d in strata.items()
        },
    )


def by_place_test(differences: np.ndarray, seed: int, family: int) -> SignFlip:
    """The sign-flip test of one place; with more random signs where Holm's correction could else not be passed.

    With n random signs p is at least 1 / (n + 1), which the correction multiplies by up to the number of tests. The
    second test has signs of its own and is asked only where the first one's p-value is small, so that neither finds
    more than its level.

    Args:
        differences: shape (S, N).
        seed: random signs are a function of it.
        family: number of tests that are corrected together.
    """
    found = sign_flip([differences], seed)
    most = min(MOST_SIGNS, math.ceil(2 * family / LEVEL))
    if found.exact or most <= RESAMPLES or found.p > LEVEL / 10:
        return found
    return sign_flip([differences], seed + 1, most)


def corrected(family: Sequence[Difference]) -> list[Difference]:
    """The same differences with Holm's correction within each kind of test.

    Args:
        family: the comparisons among which a reader may look for the best.
    """

    def adjusted(read: Callable[[Difference], float | None]) -> Mapping[str, float]:
        found = {str(i): p for i, d in enumerate(family) if (p := read(d)) is not None}
        return holm(found).adjusted

    seeds = adjusted(lambda d: d.over_seeds.p if d.over_seeds else None)
    no_worse = adjusted(lambda d: d.equivalence.no_worse_p if d.equivalence else None)
    equivalent = adjusted(lambda d: d.equivalence.p if d.equivalence else None)
    resampled = adjusted(lambda d: d.over_examples.p if d.over_examples else None)
    signs = adjusted(lambda d: d.signs.p if d.signs else None)
    keys = {(i, place): f"{i} {place}" for i, d in enumerate(family) for place in d.by_place}
    places = holm({key: family[i].by_place[place].p for (i, place), key in keys.items()}).adjusted
    return [
        replace(
            d,
            seeds_p=seeds.get(str(i)),
            no_worse_p=no_worse.get(str(i)),
            equivalence_p=equivalent.get(str(i)),
            bootstrap_p=resampled.get(str(i)),
            signs_p=signs.get(str(i)),
            by_place_p={place: places[keys[i, place]] for place in d.by_place},
        )
        for i, d in enumerate(family)
    ]

"""Paired differences between methods, over seeds and over test examples.

All differences are of the values in the tables: means over places (clients or unseen ones), each of which counts the
same whatever its number of test examples. Tests over examples therefore flip signs within places
(:mod:`confed.metrics.stratified`). Of multi-label runs C-AP and O-F1 are of all examples together, and so are their
draws (a bootstrap).

All pairs of methods on one measure are one family of tests, whichever of them a table shows: a reader may look at any
of them, and a verdict at the best. A pair has one corrected p-value, the same in every table.
"""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np

from confed.comparison.pairing import by_position, paired_bootstrap, paired_differences, swapped
from confed.comparison.records import Methods, Outcome, Record
from confed.comparison.refusals import OtherExamples, blind_pair, other_places, refusal_of
from confed.metrics.statistics import (
    LEVEL,
    MIN_SEEDS,
    Bootstrap,
    Equivalence,
    PairedT,
    Swap,
    detectable,
    holm,
    paired_t,
    tost,
)
from confed.metrics.stratified import RESAMPLES, Interval, SignFlip, flip_interval, sign_flip

MARGIN = 0.01  # differences smaller than this (one percentage point) are taken not to matter, unless told otherwise
MOST_SIGNS = 200_000  # random signs at most of a test by place

REFERENCE_ROWS = ("adapter",)
"""Rows that methods are compared with by their name, after the methods that are references."""


Outcomes = Mapping[str, Outcome]  # outcomes that methods are compared by, in the order of tables


@dataclass(frozen=True)
class Difference:
    """One method against a reference on one measure. P-values "after the correction" are Holm's, over all pairs.

    Attributes:
        reference: what the method is compared with.
        seeds: the seeds that both have.
        points: mean difference over these seeds, a fraction.
        over_seeds: paired t-test over seeds; None with fewer than two.
        seeds_p: its p-value after the correction; None where all seeds show the same difference, which is no evidence.
        equivalence: two one-sided tests over seeds; None with fewer than two.
        no_worse_p: p-value against "worse by the margin or more", after the correction over both ways of all pairs.
        no_better_p: p-value against "better by the margin or more", likewise.
        equivalence_p: p-value against "different by the margin or more", after the correction.
        over_examples: interval over test examples, or their test where there is none; None without predictions of both.
        examples_p: p-value over test examples after the correction, of sign flips; of what is no mean over examples,
            of random exchanges, or of the bootstrap where it is of all examples together.
        signs: stratified sign-flip test over test examples, one vote per example; None without predictions, and of what
            is no mean over examples.
        by_place: place -> sign-flip test on its own examples; empty until :func:`with_places` adds them.
        by_place_p: place -> p-value times the number of pairs and places of the measure (Bonferroni).
        refused: why nothing is tested between the two (:mod:`confed.comparison.refusals`); "" where it is.
        unpaired: why there are no tests over examples; "" where there are, or where nothing is tested.
        by_position: whether examples without names were paired by their position.
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
    no_better_p: float | None = None
    equivalence_p: float | None = None
    over_examples: Interval | Bootstrap | Swap | None = None
    examples_p: float | None = None
    signs: SignFlip | None = None
    by_place: Mapping[str, SignFlip] = field(default_factory=dict[str, SignFlip])
    by_place_p: Mapping[str, float] = field(default_factory=dict[str, float])
    refused: str = ""
    unpaired: str = ""
    by_position: bool = False

    @property
    def mirrored(self) -> "Difference":
        """The reference against the method, with the same p-values."""
        return replace(
            self,
            reference=self.method,
            method=self.reference,
            points=0.0 - self.points,
            over_seeds=self.over_seeds and self.over_seeds.mirrored,
            equivalence=self.equivalence and self.equivalence.mirrored,
            no_worse_p=self.no_better_p,
            no_better_p=self.no_worse_p,
            over_examples=self.over_examples and self.over_examples.mirrored,
            signs=self.signs and self.signs.mirrored,
            by_place={place: test.mirrored for place, test in self.by_place.items()},
        )

    @property
    def examples_p_uncorrected(self) -> float | None:
        """The p-value over test examples before the correction."""
        if self.signs is not None:
            return self.signs.p
        return self.over_examples.p if isinstance(self.over_examples, Bootstrap | Swap) else None

    @property
    def detectable(self) -> float | None:
        """The true difference that so many seeds show with 80 % power, a fraction; None without a spread over seeds."""
        test = self.over_seeds
        return detectable(test.sd, test.n) if test is not None and test.sd > 0 else None

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


def baseline_methods(methods: Methods, wanted: str | Sequence[str] | None = None) -> tuple[str, ...]:
    """The methods that the others are compared with."""
    if wanted is not None:
        names = tuple(dict.fromkeys([wanted] if isinstance(wanted, str) else wanted))
        for name in names:
            if name not in methods:
                raise ValueError(f"reference must be one of {', '.join(methods)}, got {name!r}")
        if not names:
            raise ValueError(f"reference must name at least one of {', '.join(methods)}, got none")
        return names
    roles = {method: next(iter(records.values())).role for method, records in methods.items()}
    baselines: list[str] = []
    for rank in sorted({role.reference for role in roles.values() if role.reference}):
        # The row named as its method comes first; a variant of it (another aggregation, say) only without that.
        same = [method for method, role in roles.items() if role.reference == rank]
        baselines.append(next((method for method in same if roles[method].algorithm == method), same[0]))
    baselines += [name for name in REFERENCE_ROWS if name in methods and name not in baselines]
    federated = (method for method, role in roles.items() if not role.bound)
    return tuple(baselines) or (next(federated, next(iter(methods))),)


def values_of(methods: Methods, measure: str) -> dict[str, dict[int, float]]:
    """Method -> seed -> value of a measure; methods without any are left out."""
    values: dict[str, dict[int, float]] = {}
    for method, records in methods.items():
        seeds = {seed: record.value(measure) for seed, record in sorted(records.items())}
        present = {seed: value for seed, value in seeds.items() if value is not None}
        if present:
            values[method] = present
    return values


def all_pairs(methods: Methods, measures: Outcomes, margin: float = MARGIN) -> list[Difference]:
    """Every method against every one before it, on every measure that both have, corrected by Holm's procedure."""
    pairs: list[Difference] = []
    for measure in measures:
        values = values_of(methods, measure)
        family: list[Difference] = []
        for reference, method in combinations(values, 2):
            seeds = tuple(seed for seed in values[method] if seed in values[reference])
            if seeds:
                a, b = [values[method][seed] for seed in seeds], [values[reference][seed] for seed in seeds]
                points = sum(x - y for x, y in zip(a, b, strict=True)) / len(seeds)
                pair = Difference(reference, measure, method, seeds, points)
                family.append(_tested(pair, measures[measure], a, b, methods, margin))
        pairs += corrected(family, math.comb(len(values), 2))
    return pairs


def against(pairs: Sequence[Difference], reference: str) -> list[Difference]:
    """Every other method against one, from the tests of all pairs."""
    return [
        pair if pair.reference == reference else pair.mirrored
        for pair in pairs
        if reference in (pair.reference, pair.method)
    ]


def _tested(
    pair: Difference, measure: Outcome, a: Sequence[float], b: Sequence[float], methods: Methods, margin: float
) -> Difference:
    """A pair with its tests, uncorrected, or with the reason why there are none."""
    records = _records(pair, methods)
    blind = blind_pair([record for record, _ in records], [reference for _, reference in records], pair.measure)
    if refused := refusal_of(records) or other_places(records, pair.measure) or blind:
        return replace(pair, refused=refused)
    if len(records) > 1:
        pair = replace(pair, over_seeds=paired_t(a, b), equivalence=tost(a, b, margin) if measure.is_share else None)
    seed = _sign_seed(pair)
    if measure.combine is not None:
        tested = swapped(records, pair.measure, measure.combine, seed)
    elif not measure.is_mean:
        tested = paired_bootstrap(records, pair.measure)
    else:
        tested = paired_differences(records, pair.measure)
    if isinstance(tested, OtherExamples):  # means of other examples are not tested over seeds either
        return Difference(pair.reference, pair.measure, pair.method, pair.seeds, pair.points, refused=tested)
    if isinstance(tested, str):
        return replace(pair, unpaired=tested)
    if not isinstance(tested, dict):
        return replace(pair, over_examples=tested)
    signs, interval = sign_flip([*tested.values()], seed), flip_interval([*tested.values()], seed)
    return replace(pair, over_examples=interval, signs=signs, by_position=by_position(records, pair.measure))


def with_places(pair: Difference, methods: Methods) -> Difference:
    """A pair with the tests of its places, where its examples are tested."""
    strata = "" if pair.signs is None else paired_differences(_records(pair, methods), pair.measure)
    if isinstance(strata, str):
        return pair
    tests = math.comb(len(values_of(methods, pair.measure)), 2) * len(strata)
    by_place: dict[str, SignFlip] = {}
    for place, differences in strata.items():
        by_place[place] = by_place_test(differences, zlib.crc32(place.encode(), _sign_seed(pair)), tests)
    corrected_p = {place: min(1.0, tests * test.p) for place, test in by_place.items()}
    return replace(pair, by_place=by_place, by_place_p=corrected_p)


def _records(pair: Difference, methods: Methods) -> list[tuple[Record, Record]]:
    """Method and reference of each seed."""
    return [(methods[pair.method][seed], methods[pair.reference][seed]) for seed in pair.seeds]


def _sign_seed(pair: Difference) -> int:
    """The seed of random signs, the same for a pair and its mirror image."""
    return zlib.crc32(" ".join([pair.measure, *sorted([pair.method, pair.reference])]).encode())


def by_place_test(differences: np.ndarray, seed: int, family: int) -> SignFlip:
    """The sign-flip test of one place; with more, new random signs where the correction could else not be passed."""
    test = sign_flip([differences], seed)
    most = min(MOST_SIGNS, math.ceil(2 * family / LEVEL))
    if test.exact or most <= RESAMPLES or test.p > LEVEL / 10:
        return test
    return sign_flip([differences], seed + 1, most)


def corrected(family: Sequence[Difference], tests: int = 0) -> list[Difference]:
    """The same differences with Holm's correction within each kind of test."""

    def adjusted(read: Callable[[Difference], float | None]) -> Mapping[str, float]:
        p_values = {str(i): p for i, d in enumerate(family) if (p := read(d)) is not None}
        return holm(p_values, tests=max(tests, len(family))).adjusted

    seeds = adjusted(lambda d: d.over_seeds.p if d.over_seeds else None)
    equivalent = adjusted(lambda d: d.equivalence.p if d.equivalence else None)
    examples = adjusted(lambda d: d.examples_p_uncorrected)
    one_sided: dict[str, float] = {}
    for i, test in enumerate(d.equivalence for d in family):
        if test is not None and test.no_worse_p is not None and test.no_better_p is not None:
            one_sided |= {f"{i} no worse": test.no_worse_p, f"{i} no better": test.no_better_p}
    either_way = holm(one_sided, tests=2 * max(tests, len(family))).adjusted
    return [
        replace(
            d,
            seeds_p=seeds.get(str(i)),
            no_worse_p=either_way.get(f"{i} no worse"),
            no_better_p=either_way.get(f"{i} no better"),
            equivalence_p=equivalent.get(str(i)),
            examples_p=examples.get(str(i)),
        )
        for i, d in enumerate(family)
    ]

"""Stratified sign-flip test over examples, and the interval that it gives, of a mean over places.

The tables' values are means over clients, whatever number of test questions a client has, and so is what is tested
here: with d_ki the difference of example i of place k, its mean over seeds where there are several,

    D = 1/K sum_k 1/n_k sum_i d_ki.

Where seeds have other test examples, n_k is that of each seed, and seeds are averaged last.

*Test*: if two methods do not differ, an example's difference is as likely as its negative (Fisher's randomisation test
of paired data; Good, "Permutation, Parametric and Bootstrap Tests of Hypotheses" (2005), section 3.6). Every example
has one sign, hence one vote, however many seeds there are. Of one place with answers right or wrong and one seed it is
McNemar's exact test.

*Interval*: all differences delta that the test of d_ki - delta does not reject (Tritchler, "On inverting permutation
tests" (1984)), so that interval and p-value agree but for random signs. With signs e_ki, A = sum e_ki d_ki / (K n_k)
and B = sum e_ki / (K n_k), a draw is at least as large as what was observed, tested against D + x, where
|A - D B - x B| >= |x|: for x between the roots -(A - D B) / (1 - B) and (A - D B) / (1 + B). The ends are quantiles of
these roots over draws.

A bootstrap within places is not offered: with few examples in some places it finds differences where there are none
(20 % instead of 5 % with 3, 3, 300 and 300 examples), as a place's spread is underestimated.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from confed.metrics.statistics import Mirrored, check_confidence

Strata = Sequence[Float64[np.ndarray, "S _"]]
"""Differences of each place: float64, shape (S, n_k), a row per seed and a column per example; NaN where a seed has no
such example."""

RESAMPLES = 10_000
"""Resamples, and random signs where they are not counted exactly; with many places fewer, see :func:`_fewer`."""

LEAST_EXAMPLES = 4
"""An interval is given where every place has so many examples; with three it covers 90 % where it should cover 95 %."""

_EXACT_UP_TO = 200_000  # outcomes of sign flips that are counted one by one
_MOST_DRAWS = 500_000  # places times resamples


@dataclass(frozen=True)
class Interval(Mirrored):
    """Confidence interval of a mean over places."""

    difference: float  # D, the mean over places of a - b
    low: float  # lower end
    high: float  # upper end
    n: int  # number of examples


@dataclass(frozen=True)
class SignFlip(Mirrored):
    """Stratified sign-flip test of a mean over places."""

    difference: float  # D, the mean over places of a - b
    p: float  # two-sided p-value
    smallest_p: float  # the least p-value that it could have given with these sizes of differences
    exact: bool  # whether all signs were counted; else so many were drawn that p is never 0
    won: int  # examples whose mean difference over seeds is above 0
    lost: int  # those where it is below
    n: int  # number of examples


def macro_mean(strata: Strata) -> float:
    """D: the mean over places of the mean over examples and seeds."""
    return float(np.mean([np.nanmean(d, axis=1).mean() for d in _checked(strata)]))


def flip_interval(
    strata: Strata, seed: int = 0, resamples: int = RESAMPLES, confidence: float = 0.95
) -> Interval | None:
    """Confidence interval of D by inverting the sign-flip test.

    None where it would cover less than it says: with a place of fewer than :data:`LEAST_EXAMPLES`, with so few in all
    that no signs reach the level (six do for 95 %), or without any difference.
    """
    check_confidence(confidence)
    parts = np.concatenate(_parts(strata))
    # What a difference of 1 in every example of every seed would be: the examples' weights, in all 1.
    weights = np.concatenate(_parts([np.where(np.isnan(d), np.nan, 1.0) for d in strata]))
    fewest = min(np.shape(d)[1] for d in strata)
    if fewest < LEAST_EXAMPLES or 2.0 ** (1 - len(parts)) > 1 - confidence or not parts.any():
        return None
    difference = float(parts.sum())
    draws = _fewer(resamples, len(strata))
    flipped, flipped_weights = np.zeros(draws), np.zeros(draws)
    rng = np.random.default_rng(seed)
    distinct, counts = np.unique([parts, weights], axis=1, return_counts=True)
    for (value, weight), count in zip(distinct.T.tolist(), counts.tolist(), strict=True):
        signs = 2.0 * rng.binomial(count, 0.5, size=draws) - count
        flipped += value * signs
        flipped_weights += weight * signs
    centred = flipped - difference * flipped_weights
    # With all signs equal B is 1 or -1, and such a draw counts against every difference.
    with np.errstate(divide="ignore", invalid="ignore"):
        roots = np.stack([-centred / (1 - flipped_weights), centred / (1 + flipped_weights)])
    roots = np.where(np.abs(flipped_weights) > 1 - 1e-9, np.array([[-np.inf], [np.inf]]), np.sort(roots, axis=0))
    # The observed signs, which count against every difference too, are one draw of all.
    outside = int((1 - confidence) * (draws + 1)) - 1
    low, high = np.sort(roots[0])[outside], np.sort(roots[1])[-1 - outside]
    return Interval(macro_mean(strata), difference + float(low), difference + float(high), len(parts))


def sign_flip(strata: Strata, seed: int = 0, resamples: int = RESAMPLES) -> SignFlip:
    """Sign-flip test of D, with one sign for each example of each place.

    Counted exactly where different sizes of differences leave few enough outcomes, else from random signs, of which the
    observed ones count as one draw.

    No place or no example, other numbers of seeds, an infinite value, and a place of which a seed has no example, are a
    ValueError.
    """
    parts = _parts(strata)
    # Examples of places with equally many may share a size.
    sizes, counts = np.unique(
        np.abs(np.concatenate([differences[differences != 0] for differences in parts])), return_counts=True
    )
    observed = abs(sum(float(differences.sum()) for differences in parts))
    with np.errstate(over="ignore"):  # more outcomes than a number can say are too many
        outcomes = float(np.prod(counts + 1.0))
    # What is equal on paper is equal here: sums of the same numbers in another order differ in their last bits.
    least = observed * (1 - 1e-9) - 1e-12
    if outcomes <= _EXACT_UP_TO:
        values, chances = _all_outcomes(sizes, counts)
        p = min(1.0, float(chances[np.abs(values) >= least].sum()))
        smallest = min(1.0, 2.0 ** float(1 - counts.sum()))
    else:
        many = _fewer(resamples, len(parts))
        rng = np.random.default_rng(seed)
        values = np.zeros(many)
        for size, count in zip(sizes.tolist(), counts.tolist(), strict=True):
            values += size * (2.0 * rng.binomial(count, 0.5, size=many) - count)
        p, smallest = (1 + int((np.abs(values) >= least).sum())) / (many + 1), 1 / (many + 1)
    return SignFlip(
        macro_mean(strata),
        p,
        smallest,
        outcomes <= _EXACT_UP_TO,
        sum(int((differences > 0).sum()) for differences in parts),
        sum(int((differences < 0).sum()) for differences in parts),
        sum(map(len, parts)),
    )


def _parts(strata: Strata) -> list[np.ndarray]:
    """Each example's part in D, by place: its mean over seeds divided by the numbers of examples and of places."""
    checked = _checked(strata)
    parts: list[np.ndarray] = []
    for d in checked:
        examples = (~np.isnan(d)).sum(axis=1, keepdims=True)
        parts.append((np.nansum(d / examples, axis=0) / (len(d) * len(checked))).round(15))
    return parts


def _all_outcomes(sizes: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All values that D can take under random signs, and the chance of each."""
    values, chances = np.zeros(1), np.ones(1)
    for size, count in zip(sizes.tolist(), counts.tolist(), strict=True):
        positive = np.arange(count + 1)
        values = np.add.outer(values, size * (2.0 * positive - count)).reshape(-1)
        chances = np.multiply.outer(chances, _chances(positive, count)).reshape(-1)
    return values, chances


def _chances(positive: np.ndarray, count: int) -> np.ndarray:
    """Chance of each number of positive signs among ``count``, all as likely as negative ones."""
    if count > 1000:  # more choices than a number can say
        from scipy.stats import binom

        return binom.pmf(positive, count, 0.5)
    from scipy import special

    return special.binom(count, positive) / 2.0**count


def _fewer(resamples: int, places: int) -> int:
    """So many resamples that thousands of clients cost seconds; never fewer than a thousand if as many are asked."""
    return min(resamples, max(1000, _MOST_DRAWS // places))


def _checked(strata: Strata) -> list[np.ndarray]:
    arrays = [np.asarray(d, dtype=np.float64) for d in strata]
    if not arrays or any(d.ndim != 2 or not d.size for d in arrays):
        raise ValueError(f"each place needs differences of shape (seeds, examples), got {[d.shape for d in arrays]}")
    if len({len(d) for d in arrays}) > 1:
        raise ValueError(f"every place must have the same seeds, got {[len(d) for d in arrays]} of them")
    if any(np.isinf(d).any() or np.isnan(d).all(axis=1).any() for d in arrays):
        raise ValueError("differences must be finite, and every seed needs one at every place")
    return [d.round(12) for d in arrays]

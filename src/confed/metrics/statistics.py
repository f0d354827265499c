"""Statistical tests that compare methods: paired tests over seeds and examples, and their correction.

Every comparison is paired: entry i of both samples has the same seed, client or example. Differences are
taken as ``a - b``. P-values are two-sided. With few seeds most tests cannot reach a small p-value at all; see
:func:`smallest_p`.

Values that belong together (two methods on the same model, seed or client) are compared by
:func:`confed.metrics.statistics.paired_t`. A paper that took such values as two independent samples can be checked
with the test here.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any, TypeVar, cast

import numpy as np
from jaxtyping import Float

MIN_SEEDS = 5
"""With fewer seeds nothing is called significant at the level of seeds."""

LEVEL = 0.05
"""A corrected p-value up to this is called significant."""

Sample = Sequence[float] | np.ndarray
"""Numbers, one per seed, client or example."""

_EXACT_UP_TO = 50  # 2^50 sign patterns are still counted exactly in double precision


@dataclass(frozen=True)
class SampleMean:
    """Mean and standard deviation of a sample."""

    mean: float  # arithmetic mean
    sd: float  # sample standard deviation (divisor n - 1); NaN for a single value
    n: int  # size of the sample


_Test = TypeVar("_Test")


class Mirrored:
    """A test of a - b that has that of b - a: what has a sign changes it, and opposite fields change places."""

    @property
    def mirrored(self: _Test) -> _Test:
        """The test of b - a."""
        opposite = _OPPOSITE | {second: first for first, second in _OPPOSITE.items()}
        changed: dict[str, Any] = {}
        for field in fields(cast(Any, self)):
            value = getattr(self, opposite.get(field.name, field.name))
            changed[field.name] = 0.0 - value if field.name in _SIGNED and value is not None else value
        return replace(cast(Any, self), **changed)


_SIGNED = ("difference", "low", "high", "statistic")
_OPPOSITE = {"low": "high", "won": "lost", "no_worse_p": "no_better_p"}


@dataclass(frozen=True)
class PairedT(Mirrored):
    """Student's paired t-test."""

    difference: float  # mean of a - b
    sd: float  # standard deviation of the differences
    low: float  # lower end of the confidence interval of the difference
    high: float  # upper end
    statistic: float | None  # t, with n - 1 degrees of freedom; None where the differences have no spread
    # two-sided p-value; None where the differences have no spread: nothing is estimated of further pairs then
    p: float | None
    n: int  # number of pairs


@dataclass(frozen=True)
class Wilcoxon:
    """Wilcoxon's signed-rank test."""

    statistic: float  # the smaller of the two rank sums
    p: float  # two-sided p-value
    smallest_p: float  # the least p-value that this many non-zero differences can give
    n: int  # number of non-zero differences


@dataclass(frozen=True)
class Holm:
    """Holm's step-down correction of a family of tests."""

    adjusted: Mapping[str, float]  # test -> adjusted p-value, in the order given
    rejected: tuple[str, ...]  # the tests whose adjusted p-value is at most alpha
    alpha: float  # family-wise error rate


def mean(values: Sample) -> SampleMean:
    """Mean and standard deviation of a sample."""
    x = _sample("values", values, least=1)
    return SampleMean(float(x.mean()), float(x.std(ddof=1)) if len(x) > 1 else math.nan, len(x))


def mean_sd(values: Sample) -> tuple[float, float]:
    """Mean and standard deviation of a sample as figures show them: of a single value the latter is 0."""
    average = mean(values)
    return average.mean, average.sd if average.n > 1 else 0.0


def paired_t(a: Sample, b: Sample, confidence: float = 0.95) -> PairedT:
    """Paired t-test of the mean difference a - b and its confidence interval.

    Equal differences have no spread, such as between two methods without anything random: the interval is then a point,
    and there is neither a statistic nor a p-value.
    """
    from scipy import special

    check_confidence(confidence)
    d = differences(a, b, least=2)
    n, difference, sd = len(d), float(d.mean()), float(d.std(ddof=1))
    if np.ptp(d) == 0:
        difference = float(d[0])
        return PairedT(difference, 0.0, difference, difference, None, None, n)
    error = sd / math.sqrt(n)
    half = float(special.stdtrit(n - 1, (1 + confidence) / 2)) * error
    statistic = difference / error
    p = 2 * float(special.stdtr(n - 1, -abs(statistic)))
    return PairedT(difference, sd, difference - half, difference + half, statistic, p, n)


def wilcoxon(a: Sample, b: Sample) -> Wilcoxon:
    """Wilcoxon's signed-rank test of a - b; zero differences are dropped and ties share their mean rank.

    Up to 50 differences the p-value is exact, also with ties; beyond, it is the normal approximation.
    """
    from scipy import stats

    d = differences(a, b, least=1)
    d = d[d != 0]
    if not len(d):
        return Wilcoxon(0.0, 1.0, 1.0, 0)
    ranks = stats.rankdata(np.abs(d))
    statistic = min(float(ranks[d > 0].sum()), float(ranks[d < 0].sum()))
    if len(d) > _EXACT_UP_TO:
        approximation: Any = stats.wilcoxon(d, method="approx")
        p = float(approximation.pvalue)
    else:
        p = min(1.0, 2 * _share_of_signs(ranks, statistic))
    return Wilcoxon(statistic, p, smallest_p(len(d)), len(d))


def smallest_p(n: int) -> float:
    """The least two-sided p-value that a test of signs or signed ranks can give: 2^(1 - n), at most 1.

    Five seeds give 0.0625 at best, so Wilcoxon's test cannot reach 0.05 with fewer than six.
    """
    return min(1.0, 2.0 ** (1 - n))


def detectable(sd: float, n: int, power: float = 0.8, level: float = 0.05) -> float:
    """The true mean difference that a paired t-test of n pairs finds with this power, in the unit of the deviation.

    From the noncentral t distribution (Cohen, "Statistical Power Analysis", 1988, section 2.3, for pairs): 3.26
    standard deviations with three pairs, 1.68 with five.
    """
    from scipy import optimize, special

    root, bound = math.sqrt(n), float(special.stdtrit(n - 1, 1 - level / 2))

    def missed(effect: float) -> float:
        # The chance of a significant result in the wrong direction is below 1 % of the level here.
        return float(special.nctdtr(n - 1, effect * root, bound)) - (1 - power)

    effect: Any = optimize.brentq(missed, 0.0, 2 * (bound + 4))
    return sd * float(effect)


def holm(p: Mapping[str, float], alpha: float = 0.05, tests: int = 0) -> Holm:
    """Holm's correction (1979): the i-th smallest of m p-values is multiplied by m - i + 1, monotonically.

    ``tests`` is m where more could have been made than have p-values; theirs count as 1.
    """
    for name, value in p.items():
        if not 0 <= value <= 1:
            raise ValueError(f"p[{name!r}] must lie in [0, 1], got {value}")
    family = max(len(p), tests)
    adjusted, running = dict(p), 0.0
    for rank, name in enumerate(sorted(p, key=p.__getitem__)):
        running = max(running, min(1.0, (family - rank) * p[name]))
        adjusted[name] = running
    return Holm(adjusted, tuple(name for name in p if adjusted[name] <= alpha), alpha)


def _sample(name: str, values: Sample, least: int) -> np.ndarray:
    """The values as a finite float64 vector of at least the given size."""
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 1 or len(x) < least:
        raise ValueError(f"{name} must be a list of at least {least} numbers, got shape {x.shape}")
    if not np.isfinite(x).all():
        raise ValueError(f"{name} must be finite, got {x[~np.isfinite(x)][0]}")
    return x


def differences(a: Sample, b: Sample, least: int) -> np.ndarray:
    """The paired differences a - b, to 12 decimals, so that what is equal on paper, such as .9 - .6 and .6 - .3, is."""
    x, y = _sample("a", a, least), _sample("b", b, least)
    if len(x) != len(y):
        raise ValueError(f"a and b must be paired, got {len(x)} and {len(y)} values")
    return (x - y).round(12)


def _share_of_signs(ranks: np.ndarray, statistic: float) -> float:
    """Share of all sign patterns whose positive rank sum is at most the statistic."""
    doubled = np.rint(2 * ranks).astype(np.int64)  # mean ranks of ties end in .5
    patterns = np.zeros(int(doubled.sum()) + 1)
    patterns[0] = 1.0
    for rank in doubled:
        patterns[rank:] = patterns[rank:] + patterns[:-rank]
    return float(patterns[: round(2 * statistic) + 1].sum() / 2.0 ** len(ranks))


def check_confidence(confidence: float) -> None:
    """Check that a coverage is inside (0, 1)."""
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie in (0, 1), got {confidence}")


# Student's t-test of two independent samples ------------------------------------------------------------------


@dataclass(frozen=True)
class UnpairedT:
    """Student's t-test of two independent samples with a common variance."""

    difference: float  # mean of a minus mean of b
    statistic: float  # t
    df: int  # degrees of freedom, both sizes minus 2
    p: float  # two-sided p-value


def unpaired_t(a: Sample, b: Sample) -> UnpairedT:
    """Two-sample t-test with pooled variance; with equal sizes its t is also Welch's.

    Samples without any spread give a p of 0, or 1 if their means are equal.
    """
    from scipy import special

    x, y = mean(a), mean(b)
    if min(x.n, y.n) < 2:
        raise ValueError(f"a and b must each have at least 2 values, got {x.n} and {y.n}")
    difference, df = x.mean - y.mean, x.n + y.n - 2
    pooled = ((x.n - 1) * x.sd**2 + (y.n - 1) * y.sd**2) / df
    error = math.sqrt(pooled * (1 / x.n + 1 / y.n))
    if not error:
        statistic = math.copysign(math.inf, difference) if difference else 0.0
        return UnpairedT(difference, statistic, df, 0.0 if difference else 1.0)
    statistic = difference / error
    return UnpairedT(difference, statistic, df, 2 * float(special.stdtr(df, -abs(statistic))))


# Bootstrap of a paired difference (Efron and Tibshirani, 1993, sections 8.3, 13.3 and 16.2) -------------------


@dataclass(frozen=True)
class Bootstrap(Mirrored):
    """Paired bootstrap of a mean difference."""

    difference: float  # mean of a - b
    low: float  # lower end of the percentile interval
    high: float  # upper end
    p: float  # two-sided p-value
    n: int  # number of pairs
    resamples: int  # number of resamples


def bootstrap_of(
    difference: float, resampled: Float[np.ndarray, "resamples"], n: int, confidence: float = 0.95
) -> Bootstrap:
    """Interval and p-value from differences that were resampled elsewhere, of any statistic."""
    check_confidence(confidence)
    if not len(resampled):
        raise ValueError("resampled must hold at least 1 difference, got none")
    low, high = np.quantile(resampled, [(1 - confidence) / 2, (1 + confidence) / 2])
    tail = min(int((resampled <= 0).sum()), int((resampled >= 0).sum()))
    p = min(1.0, 2 * (tail + 1) / (len(resampled) + 1))
    return Bootstrap(difference, float(low), float(high), p, n, len(resampled))


# Paired randomisation test (Noreen, 1989, chapter 2) ----------------------------------------------------------

DRAWS = 499
"""Random exchanges; no p-value can be below 1 / 500."""

Kept = tuple[np.ndarray, np.ndarray, np.ndarray]
"""What was kept of a place's examples with two methods, (N,) or (N, K) each, and the examples' names, int64 (N,)."""


@dataclass(frozen=True)
class Swap(Mirrored):
    """Paired randomisation test."""

    difference: float  # mean over seeds and places of the first method's value minus the second's
    p: float  # two-sided p-value
    n: int  # number of examples
    low: None = None  # there is no interval
    high: None = None  # there is no interval


def swap_test(
    places: Sequence[Sequence[Kept]], combine: Callable[[np.ndarray], float], seed: int = 0, draws: int = DRAWS
) -> Swap:
    """The test of a mean over places."""
    if not places or not all(len(names) for _, _, names in chain.from_iterable(places)):
        raise ValueError("every place must have test examples, and there must be a place")
    rng = np.random.default_rng(seed)
    observed = np.zeros(len(places))
    drawn = np.zeros((draws, len(places)))
    examples = 0
    for number, seeds in enumerate(places):
        every = np.unique(np.concatenate([names for _, _, names in seeds]))
        exchanged = rng.random((draws, len(every))) < 0.5
        examples += len(every)
        for first, second, names in seeds:
            observed[number] += (combine(first) - combine(second)) / len(seeds)
            rows = exchanged[:, np.searchsorted(every, names)]
            for draw, chosen in enumerate(rows):
                mask = chosen if first.ndim == 1 else chosen[:, None]
                one, other = np.where(mask, second, first), np.where(mask, first, second)
                drawn[draw, number] += (combine(one) - combine(other)) / len(seeds)
    difference = float(observed.mean())
    # Sums of floating point numbers may differ in their last bits although they are the same on paper.
    as_large = int((np.abs(drawn.mean(1)) >= abs(difference) - 1e-12).sum())
    return Swap(difference, (as_large + 1) / (draws + 1), examples)


# Equivalence and non-inferiority: two one-sided tests (Schuirmann, 1987) --------------------------------------


@dataclass(frozen=True)
class Equivalence(Mirrored):
    """Two one-sided paired t-tests."""

    difference: float  # mean of a - b
    # lower end of the interval of coverage 1 - 2 alpha; the two are equivalent at level alpha exactly if the whole
    # interval lies within the margin
    low: float
    high: float  # upper end
    margin: float  # differences smaller than this do not matter, in the unit of a and b
    # p-value against "a is worse than b by the margin or more"; None where differences have no spread
    no_worse_p: float | None
    no_better_p: float | None  # p-value against "a is better than b by the margin or more"; None likewise
    n: int  # number of pairs

    @property
    def p(self) -> float | None:
        """P-value against "they differ by the margin or more": the larger of the two; None where there are none."""
        if self.no_worse_p is None or self.no_better_p is None:
            return None
        return max(self.no_worse_p, self.no_better_p)


def tost(a: Sample, b: Sample, margin: float, alpha: float = 0.05) -> Equivalence:
    """Equivalence test (TOST): whether the paired difference a - b is smaller than a margin, both ways.

    Equal differences have no spread, such as between two methods without anything random: the interval is then a point,
    and there are no p-values.
    """
    from scipy import special

    if not (margin > 0 and math.isfinite(margin)):
        raise ValueError(f"margin must be a positive number, got {margin}")
    if not 0 < alpha < 0.5:
        raise ValueError(f"alpha must lie in (0, 0.5), got {alpha}")
    d = differences(a, b, least=2)
    n, difference = len(d), float(d.mean())
    if np.ptp(d) == 0:
        difference = float(d[0])
        return Equivalence(difference, difference, difference, margin, None, None, n)
    error = float(d.std(ddof=1)) / math.sqrt(n)
    half = float(special.stdtrit(n - 1, 1 - alpha)) * error
    no_worse = float(special.stdtr(n - 1, -(difference + margin) / error))
    no_better = float(special.stdtr(n - 1, (difference - margin) / error))
    return Equivalence(difference, difference - half, difference + half, margin, no_worse, no_better, n)

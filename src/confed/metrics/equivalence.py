"""Equivalence and non-inferiority of two methods: two one-sided tests (TOST).

A difference that is not significant is no evidence of equality. Here the burden of proof is reversed: the null
hypothesis is that the mean difference lies outside (-margin, margin), and a small p-value rejects that.

Source: Schuirmann, "A comparison of the two one-sided tests procedure and the power approach for assessing the
equivalence of average bioavailability" (1987).
"""

import math
from dataclasses import dataclass

import numpy as np

from confed.metrics.statistics import Mirrored, Sample, differences


@dataclass(frozen=True)
class Equivalence(Mirrored):
    """Two one-sided paired t-tests.

    Attributes:
        difference: mean of a - b.
        low: lower end of the interval of coverage 1 - 2 alpha; the two are equivalent at level alpha exactly if
            the whole interval lies within the margin.
        high: upper end.
        margin: differences smaller than this do not matter, in the unit of a and b.
        no_worse_p: p-value against "a is worse than b by the margin or more"; None where differences have no spread.
        no_better_p: p-value against "a is better than b by the margin or more"; None likewise.
        n: number of pairs.
    """

    difference: float
    low: float
    high: float
    margin: float
    no_worse_p: float | None
    no_better_p: float | None
    n: int

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
    from scipy import stats

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
    half = float(stats.t.ppf(1 - alpha, n - 1)) * error
    no_worse = float(stats.t.sf((difference + margin) / error, n - 1))
    no_better = float(stats.t.cdf((difference - margin) / error, n - 1))
    return Equivalence(difference, difference - half, difference + half, margin, no_worse, no_better, n)

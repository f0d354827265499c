"""Student's t-test of two independent samples, for the comparison with the paired test only.

Values that belong together (two methods on the same model, seed or client) are compared by
:func:`confed.metrics.statistics.paired_t`. A paper that took such values as two independent samples can be checked
with the test here.
"""

import math
from dataclasses import dataclass

from confed.metrics.statistics import Sample, mean

__all__ = ["UnpairedT", "unpaired_t"]


@dataclass(frozen=True)
class UnpairedT:
    """Student's t-test of two independent samples with a common variance.

    Attributes:
        difference: mean of a minus mean of b.
        statistic: t.
        df: degrees of freedom, both sizes minus 2.
        p: two-sided p-value.
    """

    difference: float
    statistic: float
    df: int
    p: float


def unpaired_t(a: Sample, b: Sample) -> UnpairedT:
    """Two-sample t-test with pooled variance; with equal sizes its t is also Welch's.

    Samples without any spread give a p of 0, or 1 if their means are equal.

    Raises:
        ValueError: fewer than two values in a sample, or a value that is not finite.
    """
    from scipy import stats

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
    return UnpairedT(difference, statistic, df, 2 * float(stats.t.sf(abs(statistic), df)))

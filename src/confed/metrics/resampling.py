"""Bootstrap of a paired difference over test examples.

Differences are taken as ``a - b``. The interval is a percentile interval. The p-value is twice the smaller
share of resampled means on one side of zero, where the observed sample counts as one resample: it is never 0,
and the least it can be is 2 / (resamples + 1).

Sources: Efron and Tibshirani, "An Introduction to the Bootstrap" (1993), sections 8.3, 13.3 and 16.2.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from confed.metrics.statistics import Mirrored, check_confidence


@dataclass(frozen=True)
class Bootstrap(Mirrored):
    """Paired bootstrap of a mean difference.

    Attributes:
        difference: mean of a - b.
        low: lower end of the percentile interval.
        high: upper end.
        p: two-sided p-value.
        n: number of pairs.
        resamples: number of resamples.
    """

    difference: float
    low: float
    high: float
    p: float
    n: int
    resamples: int


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

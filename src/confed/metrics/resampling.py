"""Bootstrap of a paired difference over test examples.

Differences are taken as ``a - b``. The interval is a percentile interval. The p-value is twice the smaller
share of resampled means on one side of zero, where the observed sample counts as one resample: it is never 0,
and the least it can be is 2 / (resamples + 1).

Drawing n examples with replacement is drawing how often each distinct difference occurs, which is done here:
it has the same distribution and is much faster for scores that take few values, such as correctness.

Sources: Efron and Tibshirani, "An Introduction to the Bootstrap" (1993), sections 8.3, 13.3 and 16.2.
"""

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float

from confed.metrics.statistics import Sample, check_confidence, differences

__all__ = ["Bootstrap", "bootstrap", "bootstrap_of"]

_DRAWS_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Bootstrap:
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

    @property
    def mirrored(self) -> "Bootstrap":
        """The bootstrap of b - a."""
        return replace(self, difference=0.0 - self.difference, low=0.0 - self.high, high=0.0 - self.low)


def bootstrap(a: Sample, b: Sample, seed: int = 0, resamples: int = 10_000, confidence: float = 0.95) -> Bootstrap:
    """Paired bootstrap over examples.

    No pairs, unequal sizes, fewer than one resample, and a confidence outside (0, 1) are a ValueError.

    Args:
        a: one score per example.
        b: one score per example, in the same order.
        seed: the result is a function of it.
        resamples: number of resamples.
        confidence: coverage of the interval.
    """
    _check(resamples, confidence)
    d = differences(a, b, least=1)
    values, counts = _distinct(d)
    rng = np.random.default_rng(seed)
    means = np.concatenate(
        [rng.multinomial(len(d), counts / len(d), size=n) @ values / len(d) for n in _chunks(resamples, len(values))]
    )
    return _summary(float(d.mean()), means, len(d), confidence)


def _distinct(d: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The values that occur and how often."""
    return np.unique(d, return_counts=True)


def _chunks(resamples: int, width: int) -> list[int]:
    """Numbers of resamples drawn at a time, so that memory stays small."""
    step = max(1, _DRAWS_AT_ONCE // width)
    return [min(step, resamples - start) for start in range(0, resamples, step)]


def bootstrap_of(
    difference: float, resampled: Float[np.ndarray, "resamples"], n: int, confidence: float = 0.95
) -> Bootstrap:
    """Interval and p-value from differences that were resampled elsewhere, of any statistic.

    No resample, and a confidence outside (0, 1), are a ValueError.

    Args:
        difference: what was observed.
        resampled: the difference in every resample, shape (R,).
        n: number of pairs that were drawn.
        confidence: coverage of the interval.
    """
    _check(len(resampled), confidence)
    return _summary(difference, resampled, n, confidence)


def _summary(difference: float, means: np.ndarray, n: int, confidence: float) -> Bootstrap:
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    tail = min(int((means <= 0).sum()), int((means >= 0).sum()))
    p = min(1.0, 2 * (tail + 1) / (len(means) + 1))
    return Bootstrap(difference, float(low), float(high), p, n, len(means))


def _check(resamples: int, confidence: float) -> None:
    check_confidence(confidence)
    if resamples < 1:
        raise ValueError(f"resamples must be at least 1, got {resamples}")

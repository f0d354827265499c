"""Bootstrap over test examples of multi-label metrics that are no means over examples: C-AP and O-F1.

A resample draws N of the N examples with replacement, an example w_i times. Its metric is that of the examples repeated
so often: with P(t) and R(t) from counts in which example i counts w_i times, AP is still the mean over positives (each
w_i times) of the precision at their own scores, and O-F1 still 2 tp / (predicted + positives). Of a pair of methods the
same draws are taken, so that the difference of two rows of values is a paired bootstrap
(:func:`confed.metrics.statistics.bootstrap_of`).

Source: Efron and Tibshirani, "An Introduction to the Bootstrap" (1993), section 8.3: the principle holds for any
statistic of a sample. A class without positives in a resample counts as 0 there, with both methods.
"""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Float, Float32, Float64, Shaped

from confed.metrics.multilabel import Undefined

RESAMPLES = 1000
"""Resamples; no p-value can be below 2 / 1001."""

_AT_ONCE = 1 << 22  # draws held at a time: 16 MiB


def draws(examples: int, resamples: int = RESAMPLES, seed: int = 0) -> Iterator[Float32[np.ndarray, "{examples} _"]]:
    """Bootstrap counts of each example, in blocks of resamples."""
    if examples < 1 or resamples < 1:
        raise ValueError(f"at least one example and one resample are needed, got {examples} and {resamples}")
    rng = np.random.default_rng(seed)
    step = max(1, _AT_ONCE // examples)
    for start in range(0, resamples, step):
        size = min(step, resamples - start)
        drawn = rng.integers(examples, size=(size, examples))
        drawn += np.arange(size)[:, None] * examples
        counts = np.bincount(drawn.reshape(-1), minlength=size * examples)
        yield np.ascontiguousarray(counts.reshape(size, examples).T, dtype=np.float32)


def resampled_class_precision(
    scores: Float[np.ndarray, "N C"],
    truth: Shaped[np.ndarray, "N C"],
    undefined: Undefined = "zero",
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Float64[np.ndarray, "{resamples}"]:
    """Mean over classes of average precision (C-AP), of every resample."""
    positive = _checked(scores, truth)
    classes = np.flatnonzero(positive.any(0))
    ranks = [_Ranks(scores[:, c], positive[:, c]) for c in classes]
    count = len(classes) if undefined == "omit" else scores.shape[1]
    means: list[np.ndarray] = []
    for drawn in draws(len(scores), resamples, seed):
        total = np.zeros(drawn.shape[1])
        for rank in ranks:
            total += rank.average_precision(drawn)
        means.append(total / max(count, 1))
    return np.concatenate(means)


def resampled_overall_f1(
    scores: Float[np.ndarray, "N C"],
    truth: Shaped[np.ndarray, "N C"],
    threshold: float,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Float64[np.ndarray, "{resamples}"]:
    """F1 over all entries (O-F1), of every resample."""
    positive = _checked(scores, truth)
    predicted = scores >= threshold
    hits, either = (predicted & positive).sum(1), predicted.sum(1) + positive.sum(1)
    values: list[np.ndarray] = []
    for drawn in draws(len(scores), resamples, seed):
        wide = drawn.T.astype(np.float64)
        right, all_of_them = wide @ (2.0 * hits), wide @ either.astype(np.float64)
        values.append(np.divide(right, all_of_them, out=np.zeros(len(right)), where=all_of_them > 0))
    return np.concatenate(values)


class _Ranks:
    """One class's examples in the order of their scores, and where its positives stand in it."""

    def __init__(self, scores: np.ndarray, positive: np.ndarray) -> None:
        order = np.argsort(-scores, kind="stable")
        ranked = -scores[order]
        hits = np.flatnonzero(positive[order])
        # Entries that tie stand or fall together: a positive's precision is that at the end of its ties.
        ends = np.searchsorted(ranked, ranked[hits], side="right")
        self._order = order[: ends[-1]]
        self._hits = order[hits]
        self._ends = ends - 1
        self._above = np.searchsorted(hits, ends) - 1

    def average_precision(self, drawn: np.ndarray) -> np.ndarray:
        """AP of every resample; 0 where no positive is drawn. ``drawn`` has shape (N, R)."""
        weights = drawn[self._hits]
        hits_above = np.cumsum(weights, 0)[self._above]
        retrieved = np.cumsum(drawn[self._order], 0)[self._ends]
        precision = np.divide(hits_above, retrieved, out=np.zeros_like(hits_above), where=retrieved > 0)
        total = weights.sum(0, dtype=np.float64)
        summed = (weights * precision).sum(0, dtype=np.float64)
        return np.divide(summed, total, out=np.zeros_like(total), where=total > 0)


def _checked(scores: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """The positives (N, C), after checks."""
    if scores.ndim != 2 or scores.shape != truth.shape:
        raise ValueError(f"scores and truth must have one shape (N, C), got {scores.shape} and {truth.shape}")
    if np.isnan(scores).any():
        raise ValueError("scores must be numbers, got NaN")
    return truth != 0

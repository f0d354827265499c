"""Paired randomisation test of a statistic of test examples that is no mean over them, such as macro-F1.

If two methods do not differ, what they said of an example may be exchanged. Every draw exchanges it for a random half
of the examples, the same ones in all seeds, and computes the statistic of each place anew. The p-value is the share of
draws whose difference is at least as large as what was observed, which counts as a draw itself: it holds its level with
any number of examples, where a bootstrap within small places does not.

Source: Noreen, "Computer-Intensive Methods for Testing Hypotheses" (1989), chapter 2, approximate randomisation.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from confed.metrics.statistics import Mirrored

DRAWS = 499
"""Random exchanges; no p-value can be below 1 / 500."""

Kept = tuple[np.ndarray, np.ndarray, np.ndarray]
"""What was kept of a place's examples with two methods, (N,) or (N, K) each, and the examples' names, int64 (N,)."""


@dataclass(frozen=True)
class Swap(Mirrored):
    """Paired randomisation test.

    Attributes:
        difference: mean over seeds and places of the first method's value minus the second's.
        p: two-sided p-value.
        n: number of examples.
        low: there is no interval.
        high: there is no interval.
    """

    difference: float
    p: float
    n: int
    low: None = None
    high: None = None


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

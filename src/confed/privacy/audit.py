"""Lower bound of the epsilon of one training run, from guesses of which canaries were in it.

Steinke, Nasr and Jagielski, "Privacy auditing with one (1) training run", NeurIPS 2023, theorem 5.2 and appendix D: m
canaries are each put into the training data with probability 1/2, independently; who sees the model guesses r of them.
If training is (epsilon, delta)-private, the number of right guesses is at most that of r coins which show heads with
probability e^epsilon / (1 + e^epsilon), but for a correction in delta.
"""

import math


def audited_epsilon(correct: int, guesses: int, canaries: int, delta: float, confidence: float = 0.95) -> float:
    """The largest epsilon that so many right guesses refute, with a probability of error of 1 - ``confidence``.

    Args:
        correct: v, right guesses.
        guesses: r, of v right and wrong ones; canaries about which nothing is guessed do not count.
        canaries: m.
        delta: of the (epsilon, delta) that is refuted.
        confidence: in (0, 1).

    Raises:
        ValueError: the numbers do not fit each other.
    """
    if not 0 <= correct <= guesses <= canaries or not 0 < confidence < 1:
        raise ValueError(
            f"expected 0 <= right guesses <= guesses <= canaries and a confidence in (0, 1), got {correct}, {guesses}, "
            f"{canaries} and {confidence}"
        )
    low, high = 0.0, 60.0
    if _probability(correct, guesses, canaries, 0.0, delta) > 1 - confidence:
        return 0.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        refuted = _probability(correct, guesses, canaries, middle, delta) <= 1 - confidence
        low, high = (middle, high) if refuted else (low, middle)
    return low


def _probability(correct: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    """The largest probability of at least so many right guesses under (epsilon, delta)-privacy."""
    import numpy as np
    from scipy.stats import binom

    heads = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(correct - 1, guesses, heads))
    if not correct or not delta:
        return min(tail, 1.0)
    # alpha = max_i P(v - i <= coins < v) / i
    numbers = np.arange(1, correct + 1)
    below = np.cumsum(binom.pmf(correct - numbers, guesses, heads))
    return min(tail + 2 * canaries * delta * float((below / numbers).max()), 1.0)

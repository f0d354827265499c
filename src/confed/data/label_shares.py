"""Label distributions of clients, for generated or paired data."""

from collections.abc import Sequence

import numpy as np

__all__ = ["label_counts", "label_shares"]

_SWEEPS = 2000
_LEAST = 1e-9
"""No label is altogether absent from a client: scaling rows and columns needs positive numbers."""


def label_shares(clients: int, labels: int, alpha: float | None, rng: np.random.Generator) -> np.ndarray:
    """Each client's shares of the labels, such that all clients together have all labels equally often.

    Every client's shares are a draw from a Dirichlet(alpha); then columns and rows are scaled in turns until both have
    equal sums (Sinkhorn, "A relationship between arbitrary positive matrices and doubly stochastic matrices", Annals
    of Mathematical Statistics 35, 1964). So clients differ in their labels and not in their sizes, and no label runs
    out.

    Args:
        clients: K.
        labels: C.
        alpha: concentration; small is skewed. None for equal shares.
        rng: source of the draws.

    Returns:
        Shape (K, C); each row sums to 1.

    Raises:
        ValueError: ``alpha`` is not positive and finite.
    """
    if alpha is None:
        return np.full((clients, labels), 1 / labels)
    if not (np.isfinite(alpha) and alpha > 0):
        raise ValueError(f"alpha must be positive and finite, got {alpha}")
    shares = rng.dirichlet(np.full(labels, alpha), clients) + _LEAST
    for _ in range(_SWEEPS):
        shares *= clients / labels / shares.sum(axis=0)
        shares /= shares.sum(axis=1, keepdims=True)
    return shares


def label_counts(total: int, shares: Sequence[float] | np.ndarray) -> np.ndarray:
    """A number of examples divided by shares, largest remainders first, int64, shape (C,); sums to ``total``."""
    exact = total * np.asarray(shares) / np.sum(shares)
    counts = np.floor(exact + 1e-9).astype(np.int64)
    order = np.argsort(counts - exact, kind="stable")
    counts[order[: total - int(counts.sum())]] += 1
    return counts

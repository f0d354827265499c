"""Calibration of confidences: expected calibration error.

The calibration error is kept as sums per confidence bin, which add up over batches, clients and processes;
the error itself is taken once, at the end. (Errors of parts do not average to the error of the whole.)
"""

from collections.abc import Mapping
from itertools import product

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

_PREFIX = "calibration/"


def calibration_names(bins: int = 15) -> list[str]:
    """All names that :func:`calibration_tally` can give."""
    return [f"{_PREFIX}{i:02d}/{quantity}" for i, quantity in product(range(bins), ("confidence", "correct"))]


def calibration_tally(
    confidence: Float[Tensor, "B"], correct: Shaped[Tensor, "B"], bins: int = 15
) -> dict[str, tuple[float, float]]:
    """Sums per bin of equal width; bin i holds the confidences in (i / bins, (i + 1) / bins]."""
    if confidence.shape != correct.shape or confidence.ndim != 1:
        raise ValueError(
            f"confidence and correct must have one shape (B,), got {tuple(confidence.shape)} and {tuple(correct.shape)}"
        )
    # One copy to the host; a bin's sums are then taken there in double precision and in a fixed order.
    host = torch.stack((confidence.detach().float(), correct.detach().float())).cpu().double()
    outside = host[0][~((host[0] >= 0) & (host[0] <= 1))]
    if len(outside):
        raise ValueError(f"confidence must lie in [0, 1], got {outside[0].item()}")
    bin_of = ((host[0] * bins).ceil().long() - 1).clamp(0, bins - 1)
    counts = torch.bincount(bin_of, minlength=bins).tolist()
    sums = {
        name: torch.bincount(bin_of, weights=row, minlength=bins).tolist()
        for name, row in (("confidence", host[0]), ("correct", host[1]))
    }
    result = {}
    for i in range(bins):
        if counts[i]:
            for name, rows in sums.items():
                result[f"{_PREFIX}{i:02d}/{name}"] = (rows[i], float(counts[i]))
    return result


def expected_calibration_error(tally: Mapping[str, tuple[float, float]]) -> float:
    """ECE of a tally: the mean over examples of |confidence - accuracy| of their bin, a fraction in [0, 1].

    Guo et al., "On calibration of modern neural networks" (ICML 2017), Eq. (3).
    """
    gaps = total = 0.0
    for key, (confidence, count) in tally.items():
        if key.startswith(_PREFIX) and key.endswith("/confidence"):
            correct, _ = tally[key.removesuffix("confidence") + "correct"]
            gaps += abs(confidence - correct)
            total += count
    if total == 0:
        raise ValueError(f"the tally must have keys {_PREFIX}<bin>/confidence with examples, got {sorted(tally)}")
    return gaps / total

r"""Aggregation that a few malicious clients cannot steer at will: clipped means, medians, trimmed means, Krum.

Notation: w the server's weights, x_k client k's, K replies, d_k = x_k - w its update, f how many clients may lie.

    clip      w + sum_k p_k d_k min(1, c / |d_k|)
    median    the median over k, value by value
    trimmed   the mean over k without the f smallest and the f largest, value by value
    krum      the x_k with the smallest sum of squared distances to its K - f - 2 nearest others

Sources: Sun et al., "Can You Really Backdoor Federated Learning?", 2019 (clip); Yin et al., "Byzantine-Robust
Distributed Learning: Towards Optimal Statistical Rates", ICML 2018 (median, trimmed); Blanchard et al., "Machine
Learning with Adversaries: Byzantine Tolerant Gradient Descent", NeurIPS 2017 (krum).

|.| is the Euclidean norm over all floating-point values together. With an even K the median is the mean of the middle
two. Only ``clip`` uses weights p_k: a count of examples is what a client says of itself. Of integers (counters of
batches) every rule keeps the maximum, as the plain mean does.

The guarantee of Krum's authors needs K >= 2 f + 3; with fewer replies liars that agree can be in the midst.
None is a guarantee against backdoors: an update that stays within the norm or the range of the others passes, and with
clients that differ honestly, what these rules cut off is also what honest minorities have learned.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from confed.federation.params import Mean, Params

__all__ = ["Rule", "clipped", "distance", "krum", "median", "trimmed_mean"]

Rule = Literal["clip", "median", "trimmed", "krum"]
"""A way to aggregate."""


def distance(one: Params, other: Params) -> Tensor:
    """Squared Euclidean distance over all floating-point tensors of ``one``, a float64 scalar."""
    parts = [
        (tensor.double() - other[name].double()).square().sum()
        for name, tensor in one.items()
        if tensor.is_floating_point()
    ]
    return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64)


def clipped(update: Params, start: Params, most: float) -> dict[str, Tensor]:
    """An update of at most a given length: w + d min(1, c / |d|).

    Args:
        update: a client's values x_k.
        start: the values it started from, w.
        most: c.

    Raises:
        ValueError: c is not positive.
    """
    if not most > 0:
        raise ValueError(f"the largest norm of an update must be positive, got {most}")
    norm = float(distance(update, start).sqrt())
    if norm <= most:
        return dict(update)
    share = most / norm
    return {
        name: torch.lerp(start[name].to(tensor), tensor, share) if tensor.is_floating_point() else tensor
        for name, tensor in update.items()
    }


def median(updates: Sequence[Params]) -> dict[str, Tensor]:
    """The median, value by value.

    Raises:
        ValueError: there is no update, or they do not hold the same tensors.
    """
    k = len(updates)
    return _by_value(updates, (k - 1) // 2)


def trimmed_mean(updates: Sequence[Params], trim: int) -> dict[str, Tensor]:
    """The mean without the smallest and the largest values, value by value.

    Args:
        updates: of K clients.
        trim: f, how many values are left out on either side.

    Raises:
        ValueError: nothing would be left, or the updates do not hold the same tensors.
    """
    if trim < 0 or 2 * trim >= len(updates):
        raise ValueError(f"trim must leave a value of {len(updates)} clients, got {trim} on either side")
    return _by_value(updates, trim)


def krum(updates: Sequence[Params], liars: int) -> int:
    """Which update is in the midst of the others.

    Args:
        updates: of K clients.
        liars: f, how many clients may lie.

    Returns:
        Its position; of equals the one nearest to all others.

    Raises:
        ValueError: K < f + 3, so that no neighbours are left, or the updates do not hold the same tensors.
    """
    k, near = len(updates), len(updates) - liars - 2
    _check(updates)
    if liars < 0 or near < 1:
        raise ValueError(f"krum with {liars} lying clients needs at least {max(liars, 0) + 3} replies, got {k}")
    apart = torch.zeros(k, k, dtype=torch.float64)
    for i in range(k):
        for j in range(i):
            apart[i, j] = apart[j, i] = distance(updates[i], updates[j])
    sums = [torch.cat([apart[i, :i], apart[i, i + 1 :]]).sort().values for i in range(k)]
    # Two that are each other's nearest are equally good; then all distances decide, and not the order of clients.
    return min(range(k), key=lambda i: (float(sums[i][:near].sum()), float(sums[i].sum())))


def _by_value(updates: Sequence[Params], trim: int) -> dict[str, Tensor]:
    """The mean of what is left, value by value, without ``trim`` values on either side."""
    _check(updates)
    found: dict[str, Tensor] = {}
    for name, first in updates[0].items():
        stacked = torch.stack([update[name] for update in updates])
        if first.is_floating_point():
            left = stacked.sort(0).values[trim : len(updates) - trim]
            mean = Mean()  # of equal values exactly that value
            for row in left:
                mean.add({name: row}, 1.0)
            found[name] = mean.result({name: first})[name]
        else:
            found[name] = stacked.amax(0)
    return found


def _check(updates: Sequence[Params]) -> None:
    if not updates:
        raise ValueError("robust aggregation needs at least one update, got none")
    for update in updates[1:]:
        if update.keys() != updates[0].keys():
            raise ValueError("robust aggregation needs the same tensors of every client; this method sends others")

"""Entropic optimal transport between patches of pictures and prompts, batched, by scaling of a kernel.

Cuturi, "Sinkhorn distances", NIPS 2013; Benamou et al., "Iterative Bregman projections for regularized transportation
problems", SIAM J. Sci. Comput. 2015, section 5, for rows whose mass has an upper bound.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor


def transport_plan(
    cost: Float[Tensor, "*B V N"],
    *,
    mass: float = 1.0,
    strength: float = 0.1,
    steps: int = 100,
    tolerance: float = 1e-4,
) -> Float[Tensor, "*B V N"]:
    """The plan T that moves ``mass`` from V equal sources to N equal sinks at the least cost, without gradient.

        min over T >= 0 of sum T C + strength * sum T (log T - 1)
        sum_n T_vn <= 1 / V (equal where mass = 1),      sum_v T_vn = mass / N

    Sources may keep what is left: with ``mass`` below 1 those with the highest cost move the least. The plan meets the
    sinks exactly and the sources up to the tolerance, also where the steps did not suffice for that: then what is above
    a source's share goes to those that have some left. Where the range of costs over the strength could overflow, the
    iterations are in logarithms, which take about seven times as long.

    Args:
        cost: C.
        mass: in (0, 1].
        strength: weight of the entropy; 0 would be a linear programme.
        steps: most iterations.
        tolerance: largest relative change of an iteration at which they end.

    Raises:
        ValueError: mass outside (0, 1], or a strength that is not positive.
    """
    if not 0 < mass <= 1:
        raise ValueError(f"mass must lie in (0, 1], got {mass}")
    if not strength > 0:
        raise ValueError(f"strength must be positive, got {strength}")
    sources, sinks = cost.shape[-2:]
    # Sinks before sources, so that sums over the many sources are over neighbours in memory.
    kernel = (-cost.detach() / strength).transpose(-1, -2).contiguous()
    kernel = kernel - kernel.amax((-2, -1), keepdim=True) if kernel.numel() else kernel
    solve = _in_logarithms if kernel.numel() and float(kernel.min()) < -_exponents(kernel.dtype) else _by_scaling
    plan = solve(kernel, mass / sinks, 1 / sources, mass < 1, steps, tolerance)
    return _onto_margins(plan, mass / sinks, 1 / sources, mass < 1, tolerance).transpose(-1, -2)


def _onto_margins(plan: Tensor, column: float, row: float, bounded: bool, tolerance: float) -> Tensor:
    """The plan; where sources move more than they have (or less, if not bounded), a near one that meets both margins.

    Altschuler, Weed and Rigollet, "Near-linear time approximation algorithms for optimal transport via Sinkhorn
    iteration", NIPS 2017, algorithm 2.
    """
    moved = plan.sum(-2, keepdim=True)
    excess = moved / row - 1
    missed = ((excess if bounded else excess.abs()) > tolerance).any(-1, keepdim=True)
    shortened = plan * (row / moved).clamp_max(1.0)
    left = (row - shortened.sum(-2, keepdim=True)).clamp_min(0.0)
    missing = (column - shortened.sum(-1, keepdim=True)).clamp_min(0.0)
    return torch.where(missed, shortened + missing * left / left.sum(-1, keepdim=True), plan)


def _exponents(dtype: torch.dtype) -> float:
    """Range of exponents in which products of a kernel's value and both factors stay finite."""
    return 0.45 * math.log(torch.finfo(dtype).max)


def _by_scaling(kernel: Tensor, column: float, row: float, bounded: bool, steps: int, tolerance: float) -> Tensor:
    """The plan as the kernel's exponential times a factor per source and one per sink, (..., N, V).

    Factors of sources follow from those of sinks, and do not change by a larger share: sinks decide when to end.
    """
    values = kernel.exp()
    a, b = values.new_ones(*values.shape[:-2], 1, values.shape[-1]), values.new_ones(*values.shape[:-1], 1)
    for _ in range(steps):
        before = b
        a = row / (values * b).sum(-2, keepdim=True)
        if bounded:
            a = a.clamp_max(1.0)  # the projection onto "at most 1 / V": a row below its bound is not scaled
        b = column / (values * a).sum(-1, keepdim=True)
        if float((b / before - 1).abs().max()) < tolerance:
            break
    return values * a * b


def _in_logarithms(kernel: Tensor, column: float, row: float, bounded: bool, steps: int, tolerance: float) -> Tensor:
    """:func:`_by_scaling` with logarithms of kernel and factors."""
    v = kernel.new_zeros(*kernel.shape[:-1], 1)
    u = v
    for _ in range(steps):
        before = v
        u = math.log(row) - (kernel + v).logsumexp(-2, keepdim=True)
        if bounded:
            u = u.clamp_max(0.0)
        v = math.log(column) - (kernel + u).logsumexp(-1, keepdim=True)
        if float((v - before).abs().max()) < tolerance:
            break
    return (kernel + u + v).exp()

"""Sums of low-rank products B A: exactly, as more factors or as a matrix; and approximately, as fewer factors.

Notation: client k has factors A_k (r_k x n) and B_k (m x r_k), whose product B_k A_k (m x n) is LoRA's update of a
weight matrix (up to LoRA's common factor alpha / r), and a weight w_k; the w_k sum to 1.

Stacking (FLoRA; Wang et al., NeurIPS 2024, arXiv 2409.05976): B = [B_1 ... B_K], A = [w_1 A_1; ...; w_K A_K] gives
B A = sum_k w_k B_k A_k, with a rank of sum_k r_k.

Residual (FedEx-LoRA; Singhal et al., ACL 2025, arXiv 2410.09432): sum_k w_k B_k A_k = B' A' + R, where
B' = sum_k w_k B_k and A' = sum_k w_k A_k are the means that travel anyway.

Redistribution (FlexLoRA; Bai et al., NeurIPS 2024, arXiv 2402.11505): of the singular value decomposition U S V of the
sum, the r largest values and their vectors, B = U_r S_r and A = V_r, which is the best approximation of rank r (Eckart
and Young, 1936).

Dimension-wise mean (FediLoRA; Yang et al., 2025, arXiv 2509.06984): row i of A, and column i of B, is the mean over the
clients whose rank is more than i, so that those of smaller ranks do not dilute it with zeros.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["Factors", "decomposed", "dimension_wise", "redistribute", "residual", "stack", "widened"]

Factors = tuple[Float[Tensor, "_ n"], Float[Tensor, "m _"]]
"""A (r, n) and B (m, r)."""

_qr: Callable[[Tensor], tuple[Tensor, Tensor]] = torch.linalg.qr  # pyright: ignore
_svd: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]] = torch.linalg.svd  # pyright: ignore


def stack(factors: Sequence[Factors], weights: Sequence[float]) -> Factors:
    """Factors whose product is the weighted mean of the products.

    Args:
        factors: (A_k, B_k) of every client; ranks may differ.
        weights: positive, of any sum; divided by it.

    Returns:
        A (sum of the ranks, n) and B (m, sum of the ranks), in the dtype of the factors.

    Raises:
        ValueError: there are no factors, or not as many weights.
    """
    if not factors or len(factors) != len(weights):
        raise ValueError(f"stacking needs factors and as many weights, got {len(factors)} and {len(weights)}")
    total = sum(weights)
    a = torch.cat([weight / total * a for (a, _), weight in zip(factors, weights, strict=True)])
    return a, torch.cat([b for _, b in factors], dim=1)


def residual(stacked: Factors, mean: Factors) -> Float[Tensor, "m n"]:
    """R, what the product of the mean factors lacks: B A of the stacked factors minus B' A', (m, n)."""
    return stacked[1] @ stacked[0] - mean[1] @ mean[0]


def redistribute(factors: Factors, rank: int) -> Factors:
    """The best approximation of B A of a given rank, in order of singular values, computed in double precision.

    The matrix B A itself is never decomposed: with B = Q R and A^T = P T (QR decompositions) its singular values are
    those of R T^T, a matrix of the factors' rank. So leading rows of A and columns of B are the best approximation of
    their number, too. Every row of A has its largest entry positive, which makes the result unique unless singular
    values are equal. Rows that belong to singular values of 0 are orthonormal as all others, with B's columns at 0: as
    in a new LoRA, they can learn.

    Args:
        factors: A (r, n) and B (m, r).
        rank: of the approximation, at most min(r, n, m).

    Returns:
        A (rank, n), orthonormal rows, and B (m, rank), in the dtype of the factors.

    Raises:
        ValueError: a rank that is not in 1..min(r, n, m).
    """
    a, b = factors
    most = min(*a.shape, len(b))
    if not 1 <= rank <= most:
        raise ValueError(f"the rank must lie in 1..{most}, which the factors have, got {rank}")
    left, inner_left = _qr(b.double())
    right, inner_right = _qr(a.double().T)
    u, s, v = _svd(inner_left @ inner_right.T)
    rows = (v[:rank] @ right.T).contiguous()
    columns = left @ u[:, :rank] * s[:rank]
    signs = rows.gather(1, rows.abs().argmax(dim=1, keepdim=True)).sign()
    return (rows * signs).to(a.dtype), (columns * signs.T).to(b.dtype)


def decomposed(factors: Sequence[Factors], weights: Sequence[float], like: Factors) -> Factors:
    """The best approximation of the weighted mean of the products, of the rank of the current factors.

    The current rows of A join with weight 0, so that there are enough rows for the rank even if few clients answered.

    Args:
        factors: (A_k, B_k) of every client; ranks may differ.
        weights: w_k, positive, of any sum.
        like: the current factors.
    """
    a, b = stack(factors, weights)
    a, b = torch.cat([a, like[0]]), torch.cat([b, torch.zeros_like(like[1])], dim=1)
    return redistribute((a, b), len(like[0]))


def dimension_wise(
    factors: Sequence[Float[Tensor, "_ _"]], weights: Sequence[float], like: Float[Tensor, "rows columns"], dim: int
) -> Float[Tensor, "rows columns"]:
    """The mean of each row or column over the clients that have it.

    With i counted from 0, the weights of the clients whose rank is more than i are divided by their sum. It is a
    running mean: equal rows give exactly that row.

    Args:
        factors: one A_k (``dim`` 0) or B_k (``dim`` 1) of every client, in the order of the clients; ranks may differ.
        weights: w_k, positive, of any sum.
        like: the current factor; rows or columns that no client has keep its values.
        dim: along which the rank lies.

    Returns:
        A factor of the shape and dtype of ``like``.

    Raises:
        ValueError: not as many weights as factors, or a rank above that of ``like``.
    """
    if len(factors) != len(weights):
        raise ValueError(f"as many weights as factors are needed, got {len(weights)} and {len(factors)}")
    mean = like.movedim(dim, 0).clone()
    totals = mean.new_zeros(len(mean), dtype=torch.float64)
    for factor, weight in zip(factors, weights, strict=True):
        rows = factor.movedim(dim, 0)
        if len(rows) > len(mean):
            raise ValueError(f"ranks must be at most {len(mean)}, got {len(rows)}")
        totals[: len(rows)] += weight
        shares = (weight / totals[: len(rows)]).to(mean.dtype)
        mean[: len(rows)] = torch.lerp(mean[: len(rows)], rows, shares.unsqueeze(1))
    return mean.movedim(0, dim).contiguous()


def widened(factor: Float[Tensor, "_ _"], rank: int, dim: int) -> Float[Tensor, "_ _"]:
    """A factor with rows (``dim`` 0) or columns (1) of 0 added up to ``rank`` of them."""
    shape = list(factor.shape)
    shape[dim] = rank - factor.shape[dim]
    return torch.cat([factor, factor.new_zeros(shape)], dim) if shape[dim] else factor

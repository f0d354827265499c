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

Notation of :mod:`confed.losses.low_rank`: client k has A_k (r_k x n), B_k (m x r_k) and a weight w_k, the w_k sum to 1;
A' and B' are the weighted means of the factors, W = sum_k w_k B_k A_k is what they should give.

**Corrected mean** (LoRA-FAIR; Bian et al., ICCV 2025, arXiv 2411.14961, read from its abstract and from a published
summary of its section on the method, not from the paper itself): A' stays, and B' + dB takes the place of B', with

    dB = argmin  1 - cos(W, (B' + dB) A') + lambda ||dB||,

norms and cosine over the whole matrix. The summary calls the first term the cosine similarity; 1 minus it is what can
be minimised. The authors take steps of SGD, of a number that is not given; here it is minimised to the end. Columns of
the solution are combinations of those of W A'^T and B', so the search has 2 r x r unknowns, whatever m is. The norm is
absolute and the cosine is not: the larger B', the smaller lambda has to be for a correction at all.

**Fitted weights** (FLoRA-NA; Nguyen et al., 2025, arXiv 2509.26399, read from its abstract and its public reviews):
A = sum_k q_k A_k and B = sum_k p_k B_k with the vectors p and q that minimise ||W - B A||_F. How it is minimised, and
whether layers have vectors of their own, was not to be found; here every layer has its own, and p and q are solved for
in turn by least squares from p = q = w on, which never makes the gap larger than the mean's.

**Means weighted by norms** (HetLoRA; Cho et al., EMNLP 2024, arXiv 2401.06432, read from its abstract and from a
published summary): factors are padded with 0 to the largest rank, and client k weighs ||B_k A_k||_F, so that clients
whose update has little in it count less.

Sending a matrix as a few singular values and vectors.

Wu et al., "Communication-efficient federated learning via knowledge distillation", Nature Communications 13, 2022
(arXiv 2108.13323), "Dynamic gradients approximation": P = U diag(s) V with the fewest singular values whose share
of the sum of squares is above a threshold.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

FACTORS = ("u", "s", "v")
_eigenvectors: Callable[[Tensor], tuple[Tensor, Tensor]] = torch.linalg.eigh  # pyright: ignore


def energy_rank(values: Float[Tensor, "K"], energy: float) -> int:
    """The smallest number of leading singular values whose share of the sum of squares is above ``energy``.

    All of them where no number is enough, as with an energy of 1; none where all values are 0.
    """
    squares = values.double().square()
    total = squares.sum()
    if not total > 0:
        return 0
    return min(int((squares.cumsum(0) / total <= energy).sum()) + 1, len(values))


def truncate(
    matrix: Float[Tensor, "M N"], energy: float
) -> tuple[Float[Tensor, "M R"], Float[Tensor, "R"], Float[Tensor, "R N"]] | None:
    """The truncated singular value decomposition of a matrix: the best approximation of its rank.

    Args:
        matrix: shape (M, N).
        energy: share of the sum of squares that the kept singular values must exceed.

    Returns:
        U (M, R), s (R,) and V (R, N), in the matrix's dtype; None where they would hold as many values as the
        matrix or more, and for a matrix with values that are not finite.
    """
    rows, columns = matrix.shape
    if not torch.isfinite(matrix).all():
        return None
    # Eigenvectors of the smaller Gram matrix, in double precision: at single precision's accuracy the same as a
    # singular value decomposition, in a third of the time for a Transformer's matrices.
    wide = matrix.double() if rows <= columns else matrix.double().T
    squares, vectors = _eigenvectors(wide @ wide.T)
    s = squares.flip(0).clamp_min(0).sqrt()
    rank = energy_rank(s, energy)
    if rank * (rows + columns + 1) >= rows * columns:
        return None
    s, near = s[:rank], vectors.flip(1)[:, :rank]
    far = near.T @ wide / s.unsqueeze(1)
    u, v = (near, far) if rows <= columns else (far.T, near.T)
    return u.to(matrix.dtype).contiguous(), s.to(matrix.dtype), v.to(matrix.dtype).contiguous()


def compress(tensors: Mapping[str, Tensor], energy: float, prefix: str = "") -> dict[str, Tensor]:
    """Matrices as truncated decompositions, everything else as it is.

    Args:
        tensors: name -> tensor. Floating matrices become three tensors where that is smaller; vectors, tensors of
            more than two dimensions and integers are not touched.
        energy: share of each matrix's sum of squares that is kept at least.
        prefix: put before every name of the result.
    """
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        factors = truncate(tensor, energy) if tensor.ndim == 2 and tensor.is_floating_point() else None
        if factors is None:
            result[prefix + name] = tensor
        else:
            result |= {f"{prefix}{name}/{factor_name}": t for factor_name, t in zip(FACTORS, factors, strict=True)}
    return result


def restore(tensors: Mapping[str, Tensor], like: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """The inverse of :func:`compress`: (U * s) V for every matrix that was decomposed.

    Args:
        tensors: what :func:`compress` made, from anybody.
        like: tensors of the names, shapes and dtypes that must come out.
        prefix: as given to :func:`compress`.

    Raises:
        ValueError: a tensor is missing, unknown, or of a shape or dtype that does not fit.
    """
    result: dict[str, Tensor] = {}
    used: set[str] = set()
    for name, wanted in like.items():
        keys = [prefix + name] if prefix + name in tensors else [f"{prefix}{name}/{factor}" for factor in FACTORS]
        missing = [key for key in keys if key not in tensors]
        if missing:
            raise ValueError(f"compressed update: {name!r} is missing, or lacks {missing}")
        used.update(keys)
        parts = [tensors[key] for key in keys]
        if any(factor.dtype != wanted.dtype for factor in parts):
            got = sorted({str(factor.dtype) for factor in parts})
            raise ValueError(f"compressed update: {name!r} must be {wanted.dtype}, got {', '.join(got)}")
        result[name] = parts[0] if len(parts) == 1 else _product(name, parts, wanted)
        if result[name].shape != wanted.shape:
            raise ValueError(
                f"compressed update: {name!r} must have shape {tuple(wanted.shape)}, got {tuple(result[name].shape)}"
            )
    unknown = sorted(set(tensors) - used)
    if unknown:
        raise ValueError(f"compressed update: unknown tensors {unknown}")
    return result


def _product(name: str, parts: list[Tensor], wanted: Tensor) -> Tensor:
    u, s, v = parts
    # Checked before the product, which a stranger's sizes could make arbitrarily large.
    fits = wanted.ndim == 2 and s.ndim == 1 and len(s) <= min(wanted.shape)
    if not fits or u.shape != (wanted.shape[0], len(s)) or v.shape != (len(s), wanted.shape[1]):
        raise ValueError(
            f"compressed update: {name!r} must be factors (M, R), (R,), (R, N) of shape {tuple(wanted.shape)}, got "
            f"{tuple(u.shape)}, {tuple(s.shape)} and {tuple(v.shape)}"
        )
    return (u * s) @ v


Factors = tuple[Float[Tensor, "_ n"], Float[Tensor, "m _"]]  # A (r, n) and B (m, r)
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


# Low-rank factors fitted at a server: corrections of the mean -------------------------------------------------

_linalg: Any = torch.linalg  # its functions have no types


def corrected(factors: Sequence[Factors], weights: Sequence[float], strength: float) -> Factors:
    """The mean A', and the mean B' with its correction dB.

    Args:
        factors: (A_k, B_k) of every client, all of one rank.
        weights: w_k, positive, of any sum.
        strength: lambda, not negative; with 0 the least-squares solution, which has the best cosine.

    Returns:
        A' (r, n) and B' + dB (m, r), in the dtype of the factors.
    """
    shares = [weight / sum(weights) for weight in weights]
    a = sum((w * a.double() for (a, _), w in zip(factors, shares, strict=True)), torch.zeros(()))
    b = sum((w * b.double() for (_, b), w in zip(factors, shares, strict=True)), torch.zeros(()))
    rows, columns = stack([(a.double(), b.double()) for a, b in factors], weights)
    target, gram = columns @ (rows @ a.T), a @ a.T
    size = float(((columns.T @ columns) * (rows @ rows.T)).sum().clamp_min(0).sqrt())
    dtype = factors[0][0].dtype
    if size == 0 or not target.any():  # there is nothing to be alike to
        return a.to(dtype), b.to(dtype)
    basis, small = _linalg.qr(torch.cat([target, b], dim=1))
    correction = _closest(small[:, : len(a)], small[:, len(a) :], gram, size, strength)
    return a.to(dtype), (basis @ correction).to(dtype)


def _closest(target: Tensor, start: Tensor, gram: Tensor, size: float, strength: float) -> Tensor:
    """Minimiser X of 1 - <target, X> / (size sqrt(tr(X gram X^T))) + strength ||X - start||."""

    def misses(x: Tensor) -> Tensor:
        length = ((x @ gram) * x).sum().clamp_min(1e-300).sqrt()
        return 1 - (target * x).sum() / (size * length)

    if strength == 0:
        return target @ _linalg.pinv(gram, hermitian=True)
    if ((start @ gram) * start).sum() > 0:
        x = start.clone().requires_grad_()
        (slope,) = torch.autograd.grad(misses(x), x)
        if _linalg.norm(slope) <= strength:  # a smallest step costs more than it gains
            return start
    ridge = strength * gram.diagonal().mean()
    eye = torch.eye(len(gram), dtype=gram.dtype)
    x = _linalg.solve(gram + ridge * eye, (target + ridge * start).T).T.contiguous().requires_grad_()
    # Gradients and changes are compared with absolute numbers, so the unknowns are brought to the size of 1.
    unit = float(_linalg.norm(x.detach()))
    x = (x.detach() / unit).requires_grad_()
    optimizer = torch.optim.LBFGS(
        [x], max_iter=1000, tolerance_grad=1e-11, tolerance_change=1e-15, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = misses(unit * x) + strength * _linalg.norm(unit * x - start)
        value.backward()  # pyright: ignore[reportUnknownMemberType]
        return value

    optimizer.step(loss)  # pyright: ignore[reportArgumentType, reportUnknownMemberType]
    return unit * x.detach()


def fitted(factors: Sequence[Factors], weights: Sequence[float], *, rounds: int = 200) -> Factors:
    """The combinations of the clients' factors whose product is nearest to W, among those reached from the mean.

    Args:
        factors: (A_k, B_k) of every client, all of one rank.
        weights: w_k, positive, of any sum.
        rounds: solutions for p and for q, at most.

    Returns:
        A (r, n) and B (m, r), in the dtype of the factors.
    """
    count, rank = len(factors), len(factors[0][0])
    w = torch.tensor([weight / sum(weights) for weight in weights], dtype=torch.float64)
    rows, columns = torch.cat([a for a, _ in factors]).double(), torch.cat([b for _, b in factors], dim=1).double()
    # [u, v, i, j]: rows i of A_u against rows j of A_v, and columns i of B_u against columns j of B_v.
    grams = [g.reshape(count, rank, count, rank).transpose(1, 2) for g in (rows @ rows.T, columns.T @ columns)]
    p, q, last = w.clone(), w.clone(), math.inf
    whole = float(torch.einsum("u,v,uvij,uvij->", w, w, *grams))
    for _ in range(rounds):
        gap = math.inf
        for factor, other, gram_own, gram_other in ((p, q, *grams[::-1]), (q, p, *grams)):
            fixed = torch.einsum("u,v,uvij->ij", other, other, gram_other)
            normal = torch.einsum("uvij,ij->uv", gram_own, fixed)
            wanted = torch.einsum("k,v,kvij,ukji->u", w, other, gram_other, gram_own)
            # From where they are, by the shortest way: equal clients keep equal weights.
            factor.add_(_linalg.pinv(normal, hermitian=True, rtol=1e-12) @ (wanted - normal @ factor))
            gap = whole - 2 * float(factor @ wanted) + float(factor @ normal @ factor)
        if last - gap <= 1e-14 * whole:
            break
        last = gap
    dtype = factors[0][0].dtype
    a = torch.einsum("u,uin->in", q, rows.reshape(count, rank, -1))
    b = torch.einsum("u,miu->mi", p, columns.reshape(len(columns), count, rank).transpose(1, 2))
    return a.to(dtype), b.to(dtype)


def mean_by_norm(factors: Sequence[Factors], weights: Sequence[float], rank: int) -> Factors:
    """The means of the padded factors, with ||B_k A_k||_F times w_k as weights; w_k where all products are 0.

    Args:
        factors: (A_k, B_k) of every client; ranks may differ.
        weights: w_k, positive, of any sum.
        rank: of the result, at least every client's.
    """
    norms = [weight * norm_of_product(pair) for pair, weight in zip(factors, weights, strict=True)]
    used = norms if any(norms) else list(weights)
    a, b = widened(factors[0][0], rank, 0), widened(factors[0][1], rank, 1)
    total = used[0]
    for (own_a, own_b), weight in zip(factors[1:], used[1:], strict=True):
        total += weight
        share = weight / total if total else 0.0
        a, b = torch.lerp(a, widened(own_a, rank, 0), share), torch.lerp(b, widened(own_b, rank, 1), share)
    return a, b


def norm_of_product(factors: Factors) -> float:
    """||B A||_F, without the product."""
    a, b = (factor.double() for factor in factors)
    return math.sqrt(max(float(((b.T @ b) * (a @ a.T)).sum()), 0.0))

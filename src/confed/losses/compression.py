"""Sending a matrix as a few singular values and vectors.

Wu et al., "Communication-efficient federated learning via knowledge distillation", Nature Communications 13, 2022
(arXiv 2108.13323), "Dynamic gradients approximation": P = U diag(s) V with the fewest singular values whose share
of the sum of squares is above a threshold.
"""

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor

FACTORS = ("u", "s", "v")
_eigenvectors: Callable[[Tensor], tuple[Tensor, Tensor]] = torch.linalg.eigh  # pyright: ignore


def energy_rank(values: Float[Tensor, "K"], energy: float) -> int:
    """The smallest number of leading singular values whose share of the sum of squares is above ``energy``.

    All of them where no number is enough, as with an energy of 1; none where all values are 0.

    Args:
        values: singular values in descending order, shape (K,).
        energy: share in [0, 1].
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

    Returns:
        ``<prefix><name>``, or ``<prefix><name>/u``, ``/s`` and ``/v``.
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

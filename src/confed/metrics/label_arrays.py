"""Scores and labels as NumPy arrays, for metrics that read them block by block."""

from collections.abc import Iterator

import numpy as np
from torch import Tensor

Array = np.ndarray | Tensor
"""A NumPy array, or a tensor of any precision on any device."""

BLOCK = 1 << 22
"""Entries handled at once: 16 MiB in single precision."""


def arrays(
    scores: Array, truth: Array, mask: Array | None, dimensions: int = 2
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """All three as NumPy arrays of one shape, without copies where possible."""
    first, second = _array(scores), _array(truth)
    third = None if mask is None else _array(mask)
    if first.ndim != dimensions or not first.shape[-1]:
        shape = "(N, C)" if dimensions == 2 else "(N,)"
        raise ValueError(f"scores must have shape {shape} and not be empty, got {first.shape}")
    for name, other in (("truth", second), ("mask", third)):
        if other is not None and other.shape != first.shape:
            raise ValueError(f"{name} must have the shape of the scores, {first.shape}, got {other.shape}")
    return first, second, third


def _array(values: Array) -> np.ndarray:
    if isinstance(values, Tensor):
        host = values.detach().cpu()
        # NumPy has no bfloat16; whatever is below single precision is exact in it.
        return (host.float() if host.is_floating_point() and host.dtype.itemsize < 4 else host).numpy()
    return np.asarray(values)


def wide(values: np.ndarray) -> np.ndarray:
    """In single precision at least, contiguous."""
    is_wide = values.dtype in (np.float32, np.float64)
    return np.ascontiguousarray(values if is_wide else values.astype(np.float32 if values.itemsize < 4 else np.float64))


def blocks(count: int, width: int) -> Iterator[slice]:
    """Slices of at most :data:`BLOCK` entries each, at least one row."""
    step = max(1, BLOCK // max(width, 1))
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def ratio(share: np.ndarray | np.integer | float, whole: np.ndarray | np.integer | float) -> np.ndarray:
    """Ratio of share and whole in double precision, 0 where whole is 0."""
    a, b = np.broadcast_arrays(np.asarray(share, np.float64), np.asarray(whole, np.float64))
    return np.divide(a, b, out=np.zeros(a.shape), where=b != 0)

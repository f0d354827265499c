"""Real numbers as integers modulo 2^k, so that sums are exact and masks can hide them."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from confed.privacy.secure_sum.masks import Integers


def encode(
    updates: Sequence[Tensor], weight: int, fraction: int, reach: float, bits: int, names: Sequence[str] = ()
) -> Integers:
    """Fixed-point encoding w round(2^f d) of tensors, in one vector of integers."""
    if weight < 1:
        raise ValueError(f"an update's weight must be at least 1, got {weight}")
    parts = [update.detach().double().reshape(-1) for update in updates]
    beyond = next(
        (i for i, values in enumerate(parts) if not bool((values.abs() <= reach).all())), None
    )  # a NaN is, too
    if beyond is not None:
        name = f" of {names[beyond]!r}" if names else ""
        raise ValueError(f"algorithm.secure_sum.reach is {reach}, and a value{name} in the update moved further")
    flat = torch.cat(parts)
    whole = np.rint(np.ldexp(flat.numpy(), fraction)).astype(np.int64) * weight
    return whole.astype(np.int32).view(np.uint32) if bits == 32 else whole.view(np.uint64)


def decode(total: Integers, weights: int, fraction: int, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Fixed-point decoding: the weighted mean 2^-f total / weights, cut into tensors of float64."""
    signed = total.view(np.int32 if total.dtype.itemsize == 4 else np.int64)
    flat = torch.from_numpy(np.ldexp(signed.astype(np.float64), -fraction) / weights)
    parts = flat.split([shape.numel() for shape in shapes])
    return [values.reshape(shape) for values, shape in zip(parts, shapes, strict=True)]


def to_wire(vector: Integers) -> Tensor:
    """The same bits as a tensor of signed integers, which messages can carry."""
    return torch.from_numpy(vector.view(np.int32 if vector.dtype.itemsize == 4 else np.int64))


def from_wire(tensor: Tensor) -> Integers:
    """The vector of :func:`to_wire`."""
    return tensor.numpy().view(np.uint32 if tensor.dtype is torch.int32 else np.uint64)

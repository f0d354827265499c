"""Size and device of a batch."""

import torch
from torch import Tensor

from confed.federation.protocols import Batch

__all__ = ["gathered", "rows", "to_device"]


def rows(batch: Batch) -> int:
    """Number of examples of a batch, B."""
    return len(next(iter(batch.values())))


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on that device; itself where it is there already.

    To a GPU it goes through page-locked memory, from where it is copied while the GPU computes.
    """
    if device.type == "cpu":
        return batch
    return {name: _sent(tensor, device) for name, tensor in batch.items()}


def gathered(table: Tensor, numbers: Tensor) -> Tensor:
    """Rows of a table, on its device, by their numbers, which may be on the host."""
    return table[numbers if table.device == numbers.device else _sent(numbers, table.device)]


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)

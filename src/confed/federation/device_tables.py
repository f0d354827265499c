"""Clients' examples in a GPU's memory: each tensor of a table is moved once, up to a budget."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from confed.federation.protocols import ClientData, Movable


@dataclass(frozen=True)
class DeviceCounts:
    """What lies on the device."""

    held: int = 0  # bytes of tables there
    left: int = 0  # bytes of tables that had no room there; their batches are moved one by one
    reason: str = ""  # why nothing is kept there; "" where something may be


class DeviceTables:
    """Copies of tensors on a device; called with a tensor, returns the copy, or the tensor where there is no room.

    A table that several clients share is there once. The copy of a table that nobody holds any more, as of users
    whose examples are made when they are asked for, is given up with it.
    """

    def __init__(self, device: torch.device, budget: int, move: Callable[[Tensor], Tensor] | None = None) -> None:
        self.device, self.budget = device, budget
        self._move: Callable[[Tensor], Tensor] = (lambda tensor: tensor.to(device)) if move is None else move
        self._used = 0
        self._held: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}
        self._left: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        """The copy of a tensor, or the tensor."""
        key = id(tensor)
        if key in self._held:
            return self._held[key][1]
        reference = self._reference(key, tensor)
        if self._used + tensor.nbytes > self.budget:
            self._left[key] = reference, tensor.nbytes
            return tensor
        copy = self._move(tensor)
        self._left.pop(key, None)
        self._held[key] = reference, copy
        self._used += copy.nbytes
        return copy

    @property
    def counts(self) -> DeviceCounts:
        """What lies on the device now."""
        return DeviceCounts(self._used, sum(size for _, size in self._left.values()))

    def _reference(self, key: int, tensor: Tensor) -> weakref.ref[Tensor]:
        """Reference to a tensor that forgets its copy when it dies, so that no other one is taken for it."""
        me = weakref.ref(self)  # or a finished run would hold the device's memory as long as its data live

        def gone(_: object) -> None:
            if (tables := me()) is not None:
                tables._left.pop(key, None)
                if key in tables._held:
                    tables._used -= tables._held.pop(key)[1].nbytes

        return weakref.ref(tensor, gone)


def on_device(data: ClientData, tables: DeviceTables | None) -> ClientData:
    """A client's examples, with their tensors on the device where that is wanted and can be."""
    return data if tables is None or not isinstance(data, Movable) else data.on(tables)

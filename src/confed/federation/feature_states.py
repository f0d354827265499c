"""States of a pass as tensors with a row per example, and digests of what the stages of a pass read."""

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn

from confed.federation.batches import rows
from confed.federation.feature_store import DIGEST_BYTES, Field, Layout
from confed.federation.protocols import Batch, FromRows
from confed.federation.stages import Staged

Constants = tuple[type | None, tuple[int | None, ...]]
"""Type of a state, and its whole numbers where it has no tensors."""


class Seen(Mapping[str, Tensor]):
    """A batch that notes which of its keys are read or asked for."""

    def __init__(self, batch: Batch) -> None:
        self._batch, self.read = batch, set[str]()

    def __getitem__(self, key: str) -> Tensor:
        self.read.add(key)
        return self._batch[key]

    def __contains__(self, key: object) -> bool:
        if isinstance(key, str):
            self.read.add(key)
        return key in self._batch

    def __iter__(self) -> Iterator[str]:
        return iter(self._batch)

    def __len__(self) -> int:
        return len(self._batch)


def tensors_before(model: nn.Module, cut: int) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """The tensors that the first ``cut`` stages read, with the dictionary of their module and their key in it."""
    assert isinstance(model, Staged)
    stages = model.stages[:cut]
    within: Any = model
    for prefix, held in within.named_modules():
        for container in (held._parameters, held._buffers):
            for key, tensor in container.items():
                name = f"{prefix}.{key}" if prefix else key
                if tensor is not None and any(stage.reads(name) for stage in stages):
                    yield container, key, tensor


def count(batch: Batch) -> int:
    """Number of examples; of a table's rows without reading one."""
    return len(batch.rows) if isinstance(batch, FromRows) else rows(batch)


def shapes(inputs: Iterable[str], batch: Batch) -> Hashable:
    """Types and shapes of an example's tensors."""
    tensors = {key: batch[key] for key in inputs if key in batch}
    return tuple((key, str(tensor.dtype), tuple(tensor.shape[1:])) for key, tensor in tensors.items())


def digests(inputs: Iterable[str], batch: Batch, kind: Hashable) -> Iterator[bytes]:
    """What stands for each example: a digest of everything that the stages may read of it.

    Args:
        inputs: keys that they may read.
        batch: the examples.
        kind: what else decides the result.
    """
    common = sha256(repr(kind).encode())
    number = count(batch)
    arrays = [batch[key].contiguous().view(number, -1).view(torch.uint8).numpy() for key in inputs if key in batch]
    for row in range(number):
        digest = common.copy()
        for array in arrays:
            digest.update(array[row])
        yield digest.digest()[:DIGEST_BYTES]


def tensors_in(state: Any) -> list[Tensor]:
    """The tensors of a state."""
    return [state] if isinstance(state, Tensor) else [item for item in state if isinstance(item, Tensor)]


def layout_of(tensors: Sequence[Tensor]) -> Layout:
    """The layout of tensors (B, ...)."""
    return tuple(Field(t.dtype, tuple(t.shape[1:])) for t in tensors)


def packed(state: Any, number: int) -> tuple[list[Tensor], Constants] | None:
    """A state as tensors (B, ...), and what of it is no tensor; None where that cannot be.

    Args:
        state: a tensor, or a named tuple of tensors and whole numbers.
        number: B.
    """
    tensors = tensors_in(state)
    # Layers may round differently where values lie otherwise in memory.
    if any(len(tensor) % number or not tensor.is_contiguous() for tensor in tensors):
        return None
    each = tuple(len(tensor) // number for tensor in tensors)
    parts = [
        t.detach() if n == 1 else t.detach().view(number, n, *t.shape[1:]) for t, n in zip(tensors, each, strict=True)
    ]
    if isinstance(state, Tensor):
        return parts, (None, each)
    whole = tuple(None if isinstance(item, Tensor) else int(item) for item in state)
    return parts, (state.__class__, (*whole, *each))


def unpacked(tensors: Sequence[Tensor], constants: Constants) -> Any:
    """The state of which :func:`packed` made these parts."""
    kind, numbers = constants
    each = numbers[-len(tensors) :]
    whole = [t if n == 1 else t.flatten(0, 1) for t, n in zip(tensors, each, strict=True)]
    if kind is None:
        return whole[0]
    parts = iter(whole)
    return kind(*(next(parts) if number is None else number for number in numbers[: -len(tensors)]))


def stacked(found: Sequence[Any]) -> tuple[Any, Any]:
    """States of several batches of one shape as one, with a dimension in front, and what ``vmap`` maps over: 0 or None.

    Args:
        found: tensors, or named tuples of tensors and whole numbers, which are the same in all.
    """
    first = found[0]
    if isinstance(first, Tensor):
        return torch.stack(list(found)), 0
    columns = [torch.stack(c) if isinstance(c[0], Tensor) else c[0] for c in zip(*found, strict=True)]
    return first.__class__(*columns), first.__class__(*(0 if isinstance(p, Tensor) else None for p in first))


def joined(found: Sequence[Any]) -> Any:
    """States of several batches as that of one batch with all their examples; see :func:`stacked`."""
    first = found[0]
    if isinstance(first, Tensor):
        return torch.cat(list(found))
    return first.__class__(
        *(torch.cat(column) if isinstance(column[0], Tensor) else column[0] for column in zip(*found, strict=True))
    )


def gap(kept: Sequence[Tensor], plain: Sequence[Tensor]) -> float:
    """Largest difference over the largest value; 0 for equal bits alone."""
    worst = 0.0
    for a, b in zip(kept, plain, strict=True):
        if torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)):
            continue
        if not a.is_floating_point():
            return math.inf
        apart = float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-30))
        # -0 and 0 are equal numbers and no equal bits; NaN is as far from everything as can be.
        worst = max(worst, math.inf if math.isnan(apart) else max(apart, 5e-324))
    return worst

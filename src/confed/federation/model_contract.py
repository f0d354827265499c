"""Contract of models: what every model must be like before a federation trains it, as checks that name what is wrong.

``confed.testing.check_model(model)`` runs them in a test; a run makes them before round 1 of models that do not come
with confed.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from inspect import getclosurevars
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from confed.federation.params import named_tensors, tied_names
from confed.federation.protocols import Batch
from confed.federation.randomness import isolated
from confed.federation.specs import frozen_names
from confed.federation.wire import STORABLE


def _storable(model: nn.Module) -> Iterator[str]:
    """Tensors of dtypes and layouts that messages and files can hold, with values."""
    allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in STORABLE)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not torch.is_tensor(tensor):
            yield f"{name!r} is no tensor (get_extra_state), and only tensors are sent and stored: make it a buffer"
        elif is_lazy(tensor):
            yield f"{name!r} has no shape yet: give the layer its sizes in place of a lazy one"
        elif tensor.is_meta:
            yield f"{name!r} is on the device 'meta' and has no values: make the model with values"
        elif tensor.layout is not torch.strided:
            yield f"{name!r} is {tensor.layout}, which cannot be sent or stored: make it dense (to_dense)"
        elif tensor.dtype not in STORABLE:
            yield (
                f"{name!r} is {str(tensor.dtype).removeprefix('torch.')}, which cannot be sent or stored: use one of "
                f"{allowed}, or register_buffer(..., persistent=False) where it is computed anew"
            )


def _named(model: nn.Module) -> Iterator[str]:
    """Names that rules can match and files can hold."""
    for name in model.state_dict(keep_vars=True):
        if any(sign in name for sign in "*?[") or not name.isprintable() or name == "__metadata__":
            yield f"{name!r} is no name for a tensor: rules read * ? [ as patterns, files hold printable names only"


def _frozen_alike(model: nn.Module) -> Iterator[str]:
    """Names that are declared frozen: those of tensors, and all names of one tensor or none."""
    frozen, tensors = frozen_names(model), named_tensors(model)
    names = {name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}
    for name in sorted(frozen - names - tensors.keys()):
        yield f"its attribute frozen names {name!r}, which is none of its tensors"
    for later, first in tied_names(model).items():
        if tensors[first].requires_grad and (later in frozen) != (first in frozen):
            still, moved = (later, first) if later in frozen else (first, later)
            yield f"{still!r} is frozen and {moved!r} is not, and both are one tensor (tied): freeze both or none"


def _own_memory(model: nn.Module) -> Iterator[str]:
    """Values that each lie in a place of their own: no expanded tensors, none that is a view of another."""
    by_storage: dict[int, dict[str, Tensor]] = {}
    for name, tensor in named_tensors(model).items():
        if tensor.numel():
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), {})[name] = tensor
    for tensors in by_storage.values():
        taken = dict[str, Tensor]()
        for name, tensor in tensors.items():
            if len(tensors) == 1 and tensor.is_contiguous():
                continue
            places = _places(tensor)
            if int(places.count_nonzero()) < tensor.nbytes:
                yield f"values of {name!r} share memory (an expanded view): give each its own with .clone()"
            other = next((n for n, p in taken.items() if bool((p & places).any())), None)
            if other is not None:
                yield (
                    f"{other!r} and {name!r} share memory: register one tensor under both names, or give each its own "
                    "with .clone()"
                )
            taken[name] = places


def _places(tensor: Tensor) -> Tensor:
    """Bytes of its storage that a tensor covers, bool (bytes,)."""
    size = tensor.element_size()
    covered = torch.zeros(tensor.untyped_storage().nbytes(), dtype=torch.bool)
    strides = (*(stride * size for stride in tensor.stride()), 1)
    covered.as_strided((*tensor.shape, size), strides, tensor.storage_offset() * size).fill_(True)
    return covered


def _copyable(model: nn.Module) -> Iterator[str]:
    """Copies that compute with their own values."""
    values = [*model.parameters(), *model.buffers()]
    try:
        twin = deepcopy(model, {id(tensor): tensor for tensor in values})
    except Exception as error:
        why = " ".join(str(error).split())[:80]
        yield (
            f"it cannot be copied ({type(error).__name__}: {why}): keep locks, files, generators and tensors with a "
            "history out of its attributes"
        )
        return
    for module in twin.modules():
        for attribute, value in vars(module).items():
            functions: Iterable[Any] = cast("Any", value).values() if isinstance(value, dict) else (value,)
            if any(map(_holds_model, functions)):
                named = f"{attribute!r} of {type(module).__name__}"
                yield f"the function {named} holds a module or tensor, which copies would share: make it a method"


def _holds_model(value: Any) -> bool:
    """Whether a function has a module or tensor of the place that it was made in."""
    return isinstance(value, FunctionType) and any(
        isinstance(held, nn.Module | Tensor) for held in getclosurevars(value).nonlocals.values()
    )


MODEL_CHECKS: Mapping[str, Callable[[nn.Module], Iterator[str]]] = {
    "tensors can be stored": _storable,
    "names can be matched": _named,
    "tied tensors are frozen alike": _frozen_alike,
    "tensors have memory of their own": _own_memory,
    "copies are whole": _copyable,
}
"""Check -> generator of what is wrong; each presumes that those before it found nothing."""


def model_faults(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Check and fault, of the first check of the contract that fails; nothing for a model that keeps it."""
    for check, faults in MODEL_CHECKS.items():
        if problems := [*faults(model)]:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            yield check, problems[0] + more
            return


def check_model_kept(name: str, model: nn.Module) -> None:
    """Check that a model keeps the contract."""
    for _, fault in model_faults(model):
        raise ValueError(f"the model {name!r} cannot be trained: {fault}")


@contextmanager
def on_trial(model: nn.Module) -> Generator[None]:
    """Within it a model may be run in evaluation mode; modes, buffers and random states are as before afterwards."""
    modes = {module: module.training for module in model.modules()}
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with torch.no_grad(), isolated(0):
            model.eval()
            yield
    finally:
        for module, training in modes.items():
            module.training = training
        for buffer, values in before:
            buffer.data.copy_(values)


def reading_fault(model: nn.Module, batch: Batch) -> str:
    """What is wrong with a model's answer to a batch, as the end of a sentence; "" where nothing is."""
    rows = len(next(iter(batch.values())))
    try:
        with on_trial(model):
            output = model(batch)
        if len(output.logits) < rows or not torch.is_tensor(output.features):
            return f"must give an Output with a row of logits for each of {rows} examples and their features"
    except Exception as error:
        return f"raises {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return ""

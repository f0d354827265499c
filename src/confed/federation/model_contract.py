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
from confed.federation.protocols import Batch, Output, Task
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


# Contract of tasks ---------------------------------------------------------------------------------------------


TASK_CHECKS = (
    "declares what it scores",
    "scores lie in their ranges",
    "the loss is a finite number with a gradient",
    "predictions are a number per example",
    "the headline is the mean of the predictions",
    "the headline adds up over batches",
    "batches stay as they are",
)


def task_faults(own_task: object, output: Output, batch: Batch) -> Iterator[tuple[str, str]]:
    """Checks that a task fails on a batch of at least two examples, each with the end of a sentence on why."""
    if getattr(own_task, "measures", None) is None:
        yield TASK_CHECKS[0], "does not declare what it scores: give it measures, names -> (lowest, highest value)"
        return
    task: Any = own_task
    before = {name: value.clone() for name, value in batch.items()}
    tally = task.tally(output, batch)
    for name in sorted({*tally, task.metric} - task.measures.keys()):
        declared = ", ".join(task.measures) or "nothing"
        needed = f"its measures must have {name!r} -> (lowest, highest value), as they have {declared}"
        yield TASK_CHECKS[0], f"scores {name!r} and does not declare it: {needed}"
    for name, (total, weight) in tally.items():
        low, high = task.measures.get(name, (float("-inf"), float("inf")))
        if weight and not low - 1e-9 <= total / weight <= high + 1e-9:
            yield TASK_CHECKS[1], f"declares {name!r} between {low:g} and {high:g}, and gave {total / weight:g}"
    yield from _loss_faults(task, output, batch)
    yield from _headline_faults(task, output, batch)
    for name, value in before.items():
        if not torch.equal(value, batch[name]):
            yield TASK_CHECKS[6], f"changes batch[{name!r}], which other readers of the batch see"


def _loss_faults(task: Task, output: Output, batch: Batch) -> Iterator[tuple[str, str]]:
    logits = output.logits.detach().clone().requires_grad_()
    loss = task.loss(output._replace(logits=logits), batch)
    if loss.ndim or not bool(torch.isfinite(loss)):
        yield TASK_CHECKS[2], f"must have a loss that is one finite number, got shape {tuple(loss.shape)}: {loss}"
    elif not loss.requires_grad:
        yield TASK_CHECKS[2], "has a loss that does not depend on the logits: nothing can learn from it"


def _headline_faults(task: Task, output: Output, batch: Batch) -> Iterator[tuple[str, str]]:
    count = len(output.logits)
    predictions = task.predictions(output, batch)
    if tuple(predictions.shape) != (count,) or not bool(torch.isfinite(predictions.float()).all()):
        shape = tuple(predictions.shape)
        yield TASK_CHECKS[3], f"must give {count} finite predictions for {count} examples, got shape {shape}"
        return
    total, weight = task.tally(output, batch).get(task.metric, (0.0, 0.0))
    mean = float(predictions.double().mean())
    if not weight or abs(total / weight - mean) > 1e-5:
        value = f"{total / weight:g}" if weight else "nothing"
        both = f"gives {task.metric!r} the value {value}, and the mean of its predictions is {mean:g}"
        yield TASK_CHECKS[4], f"{both}: paired tests would be of another number than tables"
    halves = (slice(0, count // 2), slice(count // 2, count))
    parts = [task.tally(*_rows(output, batch, half)).get(task.metric, (0.0, 0.0)) for half in halves]
    sums, weights = zip(*parts, strict=True)
    if abs(sum(sums) - total) > 1e-5 or sum(weights) != weight:
        yield TASK_CHECKS[5], f"gives {task.metric!r} other sums for two halves of a batch than for the whole"


def _rows(output: Output, batch: Batch, rows: slice) -> tuple[Output, dict[str, Tensor]]:
    """A part of a batch and of what a model says of it."""
    fields = {name: value[rows] for name, value in output._asdict().items() if isinstance(value, Tensor)}
    return output._replace(**fields), {name: value[rows] for name, value in batch.items()}

"""Contract of tasks: what a run relies on of a task that does not come with confed."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from confed.federation.protocols import Batch, Output, Task

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

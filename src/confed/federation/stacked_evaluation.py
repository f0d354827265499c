"""Evaluation of several clients' own models at once: their tensors stacked, one forward pass per step for all.

Results are those of one model after the other but for rounding (:mod:`confed.federation.stacked`).
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from confed.federation.batches import to_device
from confed.federation.evaluate import Tallies, Tally
from confed.federation.params import combined
from confed.federation.protocols import Batch, Output, Task
from confed.federation.stacked import alike
from confed.federation.stacked_passes import StackedPasses


def evaluate_stacked(
    values: Sequence[Mapping[str, Tensor]],
    batches: Sequence[Iterable[Batch]],
    task: Task,
    passes: StackedPasses,
    limit: int | None = None,
) -> list[tuple[Tallies, dict[str, Tensor]]]:
    """Sums and weights of the task's metrics of each client's model on that client's batches.

    What torch cannot map over clients is a ``RuntimeError``.

    Args:
        values: each client's values of all tensors that it does not share with the others for good.
        batches: each client's examples.
        task: what to count; the same for all.
        passes: of the clients' model, in evaluation mode.
        limit: examples after which a client's evaluation ends; None for all.

    Returns:
        Each client's tallies, and its counts where the task has some.
    """
    stack = combined(torch.stack, values)
    device = next(iter(stack.values())).device
    everyone, streams = list(range(len(values))), [iter(examples) for examples in batches]
    counts = [dict[str, Tensor]() for _ in everyone]
    tallies = [Tally(task, limit, counts=of_client) for of_client in counts]
    with torch.no_grad():
        while pending := {
            i: to_device(batch, device)
            for i in everyone
            if not tallies[i].full and (batch := next(streams[i], None)) is not None
        }:
            for group in alike(pending):
                examples = [pending[i] for i in group]
                own = stack if group == everyone else {name: tensor[group] for name, tensor in stack.items()}
                output = passes(own, examples, task)[1]
                parts = zip(*(client_output.chunk(len(group)) for client_output in output), strict=True)
                for i, client_output, batch in zip(group, parts, examples, strict=True):
                    tallies[i].add(Output(*client_output), batch)
    return [(tally.tallies, of_client) for tally, of_client in zip(tallies, counts, strict=True)]

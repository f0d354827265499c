"""Evaluation of one model on batches of examples: tallies, scores, counts and records."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from confed.federation.actions import OFFERED, among_offered
from confed.federation.batches import rows, to_device
from confed.federation.measure import Measure, kept_of
from confed.federation.protocols import Batch, Counting, Output, Task

Tallies = dict[str, tuple[float, float]]


def evaluate(model: nn.Module, tally: "Tally", batches: Iterable[Batch], precision: str = "fp32") -> "Tally":
    """The tally of batches, in eval mode and without gradients."""
    model.eval()
    device = next(model.parameters()).device
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
        for cpu_batch in batches:
            batch = to_device(cpu_batch, device)
            tally.add(model(batch), batch)
            if tally.full:
                break
    return tally


@dataclass
class Tally:
    """Sums and weights of a task's metrics, batch by batch."""

    task: Task
    limit: int | None = None  # number of examples
    each: bool = False  # whether scores and records of each example are kept, and no counts
    measures: Sequence[Measure] = ()
    tallies: Tallies = field(default_factory=Tallies)  # metric -> sum over the examples, and their weight
    counts: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    scores: list[tuple[Tensor, Tensor]] = field(default_factory=list[tuple[Tensor, Tensor]])
    records: list[Mapping[str, Tensor]] = field(default_factory=list[Mapping[str, Tensor]])
    seen: int = 0

    @property
    def full(self) -> bool:
        """Whether as many examples were added as the limit says."""
        return self.limit is not None and self.seen >= self.limit

    def add(self, output: Output, batch: Batch) -> None:
        """A further batch and the model's output for it."""
        task = self.task
        counting = task if isinstance(task, Counting) else None
        if OFFERED in batch:
            output = output._replace(logits=among_offered(output.logits, batch))
        if self.each:
            # Whole numbers are a text that was written, token by token.
            chosen = output.logits.argmax(-1) if output.logits.is_floating_point() else output.logits
            self.scores.append((task.predictions(output, batch), chosen))
            columns: Mapping[str, Tensor] = {} if counting is None else counting.records(output, batch)
            self.records.append({**columns, **kept_of(self.measures, output, batch)})
        elif counting is not None:
            for name, value in counting.counts(output, batch).items():
                self.counts[name] = self.counts[name] + value if name in self.counts else value
        for name, (total, weight) in task.tally(output, batch).items():
            before = self.tallies.get(name, (0.0, 0.0))
            self.tallies[name] = (before[0] + total, before[1] + weight)
        self.seen += rows(batch)

"""Evaluation of one model on batches of examples: tallies, scores, counts and records."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from confed.federation.actions import OFFERED, among_offered
from confed.federation.batches import rows, to_device
from confed.federation.measure import Measure, kept_of
from confed.federation.protocols import Batch, Counting, Output, Task

Tallies = dict[str, tuple[float, float]]


def evaluate(
    model: nn.Module,
    task: Task,
    batches: Iterable[Batch],
    *,
    limit: int | None = None,
    precision: str = "fp32",
    scores: list[tuple[Tensor, Tensor]] | None = None,
    counts: dict[str, Tensor] | None = None,
    records: list[Mapping[str, Tensor]] | None = None,
    measures: Sequence[Measure] = (),
) -> Tallies:
    """Sums and weights of the task's metrics over batches, in eval mode and without gradients."""
    model.eval()
    device = next(model.parameters()).device
    tally = Tally(task, limit, scores, counts, records, measures)
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
        for cpu_batch in batches:
            batch = to_device(cpu_batch, device)
            tally.add(model(batch), batch)
            if tally.full:
                break
    return tally.tallies


class Tally:
    """Sums and weights of a task's metrics, batch by batch."""

    def __init__(
        self,
        task: Task,
        limit: int | None = None,
        scores: list[tuple[Tensor, Tensor]] | None = None,
        counts: dict[str, Tensor] | None = None,
        records: list[Mapping[str, Tensor]] | None = None,
        measures: Sequence[Measure] = (),
    ) -> None:
        self.tallies: Tallies = {}  # metric -> sum over the examples, and their weight
        self._task, self._limit, self._seen = task, limit, 0
        self._scores, self._counts, self._records = scores, counts, records
        self._measures = measures

    @property
    def full(self) -> bool:
        """Whether as many examples were added as the limit says."""
        return self._limit is not None and self._seen >= self._limit

    def add(self, output: Output, batch: Batch) -> None:
        """A further batch and the model's output for it."""
        task = self._task
        counting = task if isinstance(task, Counting) else None
        if OFFERED in batch:
            output = output._replace(logits=among_offered(output.logits, batch))
        if self._scores is not None:
            # Whole numbers are a text that was written, token by token.
            chosen = output.logits.argmax(-1) if output.logits.is_floating_point() else output.logits
            self._scores.append((task.predictions(output, batch), chosen))
        if counting is not None and self._counts is not None:
            for name, value in counting.counts(output, batch).items():
                self._counts[name] = self._counts[name] + value if name in self._counts else value
        if self._records is not None and (counting is not None or self._measures):
            columns: Mapping[str, Tensor] = {} if counting is None else counting.records(output, batch)
            self._records.append({**columns, **kept_of(self._measures, output, batch)})
        for name, (total, weight) in task.tally(output, batch).items():
            before = self.tallies.get(name, (0.0, 0.0))
            self.tallies[name] = (before[0] + total, before[1] + weight)
        self._seen += rows(batch)

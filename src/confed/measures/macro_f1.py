"""F1 of each right answer, averaged over the answers that occur."""

import torch
from torch import Tensor

from confed.federation.measure import Measure
from confed.federation.protocols import Batch, Output
from confed.registry import register_measure


@register_measure
class MacroF1(Measure):
    """F1 of each answer that is right for some example, averaged over these answers: rare ones count as frequent ones.

    F1 of an answer is 2 hits / (times given + times right). It is no mean over examples; a bootstrap tests it.
    """

    name = "macro-F1"

    def per_example(self, output: Output, batch: Batch) -> Tensor:
        """The answer given and the right one; shape (B, 2)."""
        return torch.stack([output.logits.argmax(1), batch["label"]], 1).float()

    def combine(self, kept: Tensor) -> float:
        """Mean of F1 over the answers that are right for some example."""
        given, right = kept.long().unbind(1)
        answers = int(kept.max()) + 1
        hits = torch.bincount(right[given == right], minlength=answers)
        times_given, times_right = (torch.bincount(column, minlength=answers) for column in (given, right))
        occurs = times_right > 0
        return float((2 * hits[occurs] / (times_given + times_right)[occurs]).double().mean())

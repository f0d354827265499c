"""Share of examples whose right answer is among the five best."""

from torch import Tensor

from confed.federation.measure import Measure
from confed.federation.protocols import Batch, Output
from confed.registry import register_measure


@register_measure
class Top5(Measure):
    """Share of examples whose right answer is among the five with the largest scores."""

    name = "top-5"
    title = "top-5 accuracy"

    def per_example(self, output: Output, batch: Batch) -> Tensor:
        """1 where the label is among the five best, else 0; shape (B,)."""
        best = output.logits.topk(min(5, output.logits.shape[1]), dim=1).indices
        return (best == batch["label"].unsqueeze(1)).any(1).float()

"""The task of the federations that are timed; a module of its own, as processes whose start is timed import it."""

from torch import Tensor
from torch.nn import functional

from confed.federation.protocols import Batch, Output


class Classification:
    """Cross-entropy and nothing else."""

    metric = "accuracy"

    def loss(self, output: Output, batch: Batch) -> Tensor:
        """Mean over the batch."""
        return functional.cross_entropy(output.logits, batch["label"])

    def example_losses(self, output: Output, batch: Batch) -> Tensor:
        """Of each example."""
        return functional.cross_entropy(output.logits, batch["label"], reduction="none")

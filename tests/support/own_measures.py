"""Measures of somebody else's, outside of the package: one is no mean, one not in per cent; small values are good."""

import torch
from torch import Tensor

import confed


@confed.register_measure
class Unsure(confed.Measure):
    """Share of answers that are never given."""

    name = "never given"
    better = "lower"

    def per_example(self, output: confed.Output, batch: confed.Batch) -> Tensor:
        """The answer given and the number of answers; shape (B, 2)."""
        given = output.logits.argmax(1)
        return torch.stack([given, torch.full_like(given, output.logits.shape[1])], 1)

    def combine(self, kept: Tensor) -> float:
        """1 minus the share of answers that are given."""
        return 1 - len(kept[:, 0].unique()) / float(kept[0, 1])


@confed.register_measure
class Rank(confed.Measure):
    """Rank of the right answer."""

    name = "rank"
    unit = "places"
    low, high = 1.0, 1e6
    better = "lower"

    def per_example(self, output: confed.Output, batch: confed.Batch) -> Tensor:
        """1 for the best; shape (B,)."""
        right = output.logits.gather(1, batch["label"].unsqueeze(1))
        return 1.0 + (output.logits > right).sum(1)


class Wrong(confed.Measure):
    """A measure that keeps nothing of single examples."""

    name = "wrong"

    def per_example(self, output: confed.Output, batch: confed.Batch) -> Tensor:
        """A single number, shape ()."""
        return output.logits.mean()


class TooLarge(confed.Measure):
    """A measure beyond its declared range."""

    name = "too large"

    def per_example(self, output: confed.Output, batch: confed.Batch) -> Tensor:
        """2 for every example."""
        return 2 * torch.ones(len(output.logits))

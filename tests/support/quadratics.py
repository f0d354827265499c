"""Quadratic losses of a point in the plane, whose optima are known."""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from confed.federation.protocols import Batch, Output

Array = NDArray[np.float64]


class Bowl:
    """The loss (1/2) sum of a (theta - b)^2: a client wants the point b, and how much is a."""

    metric = "accuracy"

    def loss(self, output: Output, batch: Batch) -> Tensor:
        return 0.5 * (batch["a"] * (output.logits - batch["b"]).square()).sum(dim=1).mean()

    def tally(self, output: Output, batch: Batch) -> dict[str, tuple[float, float]]:
        return {}

    def predictions(self, output: Output, batch: Batch) -> Tensor:
        return torch.zeros(len(batch["a"]))


class Same:
    """The same example ``size`` times: one step per epoch."""

    deterministic = True

    def __init__(self, a: Array, b: Array, size: int) -> None:
        self.size = size
        rows = {"a": torch.tensor(a).expand(size, 2).float(), "b": torch.tensor(b).expand(size, 2).float()}
        self.batch = {"index": torch.arange(size), **rows}

    def __len__(self) -> int:
        return self.size

    def train(self, batch_size: int, rng: torch.Generator) -> Iterator[Batch]:
        yield self.batch

    def validation(self, batch_size: int) -> Iterator[Batch]:
        yield self.batch

    test = validation

"""Adapters on a dual encoder's picture features, which are then compared with the texts of classes.

Lu et al., "FedCLIP: Fast generalization and personalization for CLIP in federated learning", IEEE Data Engineering
Bulletin 2023 (arXiv 2302.13485): attention over features. Gao et al., "CLIP-Adapter: Better vision-language models with
feature adapters", IJCV 2024 (arXiv 2110.04544): a bottleneck, mixed with the features as they were. Both learn these
layers alone, federated by whichever method.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from confed.models.layers import seeded_linear

__all__ = ["AttentionAdapter", "BottleneckAdapter"]


class AttentionAdapter(nn.Module):
    """FedCLIP's attention: softmax(W_2 tanh(W_1 f)) times f, scaled to unit length.

    Features are multiplied by sqrt(D) in front of W_1: the paper's have not been scaled to unit length there.

    Args:
        features: D.
        rng: of the initial values, with which all features count almost alike.
    """

    def __init__(self, features: int, rng: torch.Generator) -> None:
        super().__init__()
        self.hidden = seeded_linear(features, features, features**-0.5, rng)
        self.output = seeded_linear(features, features, features**-0.5, rng)

    def forward(self, features: Tensor) -> Tensor:
        """Features of unit length, (B, D), of such features."""
        scaled = features * features.shape[1] ** 0.5
        weights = self.output(self.hidden(scaled).tanh()).softmax(dim=1)
        return F.normalize(weights * features, dim=1)


class BottleneckAdapter(nn.Module):
    """CLIP-Adapter: a share of relu(W_2 relu(W_1 f)) and the rest of f, scaled to unit length.

    Args:
        features: D.
        reduction: D over the width of the layer between.
        share: of the adapter, in the paper alpha, 0.2 for most data.
        rng: of the initial values.
    """

    def __init__(self, features: int, reduction: int, share: float, rng: torch.Generator) -> None:
        super().__init__()
        width = max(1, features // reduction)
        self.down = seeded_linear(features, width, features**-0.5, rng)
        self.up = seeded_linear(width, features, width**-0.5, rng)
        self.down.register_parameter("bias", None)
        self.up.register_parameter("bias", None)
        self.share = share

    def forward(self, features: Tensor) -> Tensor:
        """Features of unit length, (B, D), of such features."""
        adapted = self.up(self.down(features).relu()).relu()
        return F.normalize(self.share * adapted + (1 - self.share) * features, dim=1)

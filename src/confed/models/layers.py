"""Layers with initial values from a given random generator.

Group normalisation: Wu and He, "Group Normalization", ECCV 2018.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from confed.federation.ranges import check_value

# Normalisation layers without statistics of a batch -----------------------------------------------------------

Norm = Literal["batch", "frozen", "group"]
"""Batch normalisation; the same with all four of its tensors constant; group normalisation in its place."""

CHANNELS_PER_GROUP = 16


class Constants(nn.Module):
    """A module whose buffers are constants, which need not be sent; other modules' are running statistics."""


def constant_names(model: nn.Module) -> set[str]:
    result: set[str] = set()
    for path, module in model.named_modules():
        if isinstance(module, Constants):
            for name, _ in module.named_buffers():
                result.add(f"{path}.{name}")
    return result


class FrozenBatchNorm2d(Constants):
    """Batch normalisation with constant statistics, scale and shift: an affine map of every channel."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, layer: nn.BatchNorm2d) -> None:
        super().__init__()
        self.eps = layer.eps
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, getattr(layer, name).detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """The map, (B, c, h, w) to the same shape."""
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        shift = self.bias - self.running_mean * scale
        return x * scale[:, None, None] + shift[:, None, None]


def renormalise(body: nn.Module, norm: Norm) -> None:
    """Puts another kind of normalisation in the place of every batch normalisation."""
    check_value(norm, Norm, "model.norm")
    if norm == "batch":
        return
    for parent in list(body.modules()):
        for name, layer in parent.named_children():
            if isinstance(layer, nn.BatchNorm2d):
                setattr(parent, name, FrozenBatchNorm2d(layer) if norm == "frozen" else _group_norm(layer))


def _group_norm(layer: nn.BatchNorm2d) -> nn.GroupNorm:
    channels = layer.num_features
    groups = channels // CHANNELS_PER_GROUP if channels % CHANNELS_PER_GROUP == 0 else 1
    fresh = nn.GroupNorm(groups, channels)
    fresh.load_state_dict({"weight": layer.weight.detach(), "bias": layer.bias.detach()})
    return fresh


# Layers with initial values from a given random generator -----------------------------------------------------


def seeded_linear(inputs: int, outputs: int, std: float, rng: torch.Generator) -> nn.Linear:
    """A linear layer with weights from N(0, std) and zero biases; the global generator is not touched."""
    layer = nn.Linear(inputs, outputs, device="meta").to_empty(device="cpu")
    nn.init.normal_(layer.weight, 0.0, std, generator=rng)
    nn.init.zeros_(layer.bias)
    return layer


def uniform_linear(inputs: int, outputs: int, rng: torch.Generator) -> nn.Linear:
    """A linear layer with weights and biases from U(-1 / sqrt(inputs), 1 / sqrt(inputs)), drawn from ``rng`` alone."""
    layer = nn.Linear(inputs, outputs, device="meta").to_empty(device="cpu")
    bound = 1 / math.sqrt(inputs)
    nn.init.uniform_(layer.weight, -bound, bound, generator=rng)
    nn.init.uniform_(layer.bias, -bound, bound, generator=rng)
    return layer

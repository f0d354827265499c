"""Layers with initial values from a given random generator."""

import torch
from torch import nn

__all__ = ["seeded_linear"]


def seeded_linear(inputs: int, outputs: int, std: float, rng: torch.Generator) -> nn.Linear:
    """A linear layer with weights from N(0, std) and zero biases; the global generator is not touched."""
    layer = nn.Linear(inputs, outputs, device="meta").to_empty(device="cpu")
    nn.init.normal_(layer.weight, 0.0, std, generator=rng)
    nn.init.zeros_(layer.bias)
    return layer

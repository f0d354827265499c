"""Network that answers for a finished model."""

from typing import Any

from torch import nn

__all__ = ["settle"]


def settle(algorithm: Any, model: nn.Module) -> nn.Module:
    """The network that answers as the method's models do in evaluations.

    The model itself, unless the method has a method ``answering(model)``: that returns the model with the right
    adapters switched on, or a network around it.
    """
    answering = getattr(algorithm, "answering", None)
    return model if answering is None else answering(model)

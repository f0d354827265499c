"""Values of models that are larger than the initial ones, so that differences show."""

from typing import TypeVar

import torch
from torch import nn

Model = TypeVar("Model", bound=nn.Module)


def spread(model: Model, std: float = 0.2) -> Model:
    """The model with all of its parameters drawn anew, in evaluation mode."""
    rng = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, std, generator=rng)
    return model.eval()

"""How far a model has moved: the term that holds it near a given point."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor


def half_squared_distance(parameters: Sequence[Tensor], anchor: Sequence[Tensor]) -> Float[Tensor, ""]:
    """(1/2) ||theta - a||^2 over a list of tensors, with gradient theta - a for the parameters.

    FedProx (Li et al., MLSys 2020, Eq. 2), Ditto (Li et al., ICML 2021, Eq. 2), FedDyn and FedDC weight it.

    Args:
        parameters: tensors of any shapes; at least one.
        anchor: tensors of the same shapes, in the same order. The order decides the last bit of the sum.

    Returns:
        A scalar.

    Without tensors, or with another number of anchors, torch raises a RuntimeError.
    """
    moved = torch._foreach_sub(list(parameters), list(anchor))  # pyright: ignore
    return 0.5 * torch.stack([d.square().sum() for d in moved]).sum()

"""Modality slots: representations side by side, one per modality, so that a missing one can be replaced.

Every modality that a network may see has a slot. Here is what methods share that fill the empty ones, each with
something else: where r_m, a modality's representation, comes from, and z = tanh(W [norm r_1, ..., norm r_M] / M), which
the model's answer head then reads (the fusion of PmcmFL, see :mod:`confed.algorithms.pmcmfl`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from confed.federation.ownership import owned, restricted
from confed.federation.protocols import Batch, Output
from confed.federation.specs import model_spec


class Slots(nn.Module):
    """z of the representations of all modalities.

    Args:
        slots: all modalities that the model reads.
        width: features of a representation, D.
        rng: where initial values come from.
    """

    def __init__(self, slots: Sequence[str], width: int, rng: torch.Generator) -> None:
        super().__init__()
        self.slots = tuple(slots)
        self.norms = nn.ModuleDict({name: nn.LayerNorm(width) for name in slots})
        skipped = nn.utils.skip_init(nn.Linear, len(slots) * width, width)  # pyright: ignore[reportUnknownMemberType]
        self.dense = cast(nn.Linear, skipped)
        with torch.no_grad():
            self.dense.weight.normal_(0, width**-0.5, generator=rng)
            self.dense.bias.zero_()

    def fused(self, filled: Mapping[str, Tensor]) -> Tensor:
        """z, (B, D), of what is in each slot, (B, D)."""
        side_by_side = torch.cat([self.norms[name](filled[name]) for name in self.slots], dim=1)
        return torch.tanh(self.dense(side_by_side) / len(self.slots))


def represented(model: nn.Module, batch: Batch, slots: Sequence[str]) -> dict[str, Tensor]:
    """The model's features (B, D) when it is given one modality of a batch at a time, for each that is there.

    The model's class makes them, whatever takes the place of ``forward`` in this model.

    Raises:
        ValueError: the batch has none of the modalities.
    """
    backbone = cast(Callable[[nn.Module, Batch], Output], type(model).forward)
    modalities = [name for name in owned(batch) if name in slots]
    if not modalities:
        raise ValueError(f"a batch must have at least one of {', '.join(slots)}, got {', '.join(sorted(batch))}")
    return {name: backbone(model, restricted(batch, (name,))).features for name in modalities}


def head_name(model: nn.Module) -> str:
    """Name of the submodule that turns features into answers."""
    return model_spec(model).answer_head or ""

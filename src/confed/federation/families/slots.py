"""Modality slots: representations side by side, one per modality, so that a missing one can be replaced.

Every modality that a network may see has a slot. Here is what methods share that fill the empty ones, each with
something else: where r_m, a modality's representation, comes from, and z = tanh(W [norm r_1, ..., norm r_M] / M), which
the model's answer head then reads (the fusion of PmcmFL, see :mod:`confed.algorithms.pmcmfl`).
"""

import functools
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

    def stand_in(self, name: str, seen: Mapping[str, Tensor], labels: Tensor | None) -> Tensor:
        """What takes the place of a missing modality, (B, D).

        Args:
            name: the modality.
            seen: the representations of those that are there.
            labels: classes of the examples, where these are known.
        """
        raise NotImplementedError

    def forward(self, seen: Mapping[str, Tensor], labels: Tensor | None = None) -> Tensor:
        """z, (B, D), of the representations of the modalities that are there, (B, D) each."""
        filled = [seen[name] if name in seen else self.stand_in(name, seen, labels) for name in self.slots]
        normed = [self.norms[name](slot) for name, slot in zip(self.slots, filled, strict=True)]
        return torch.tanh(self.dense(torch.cat(normed, dim=1)) / len(self.slots))


FUSION = "fusion"  # the module beside the backbone


def insert(model: nn.Module, fusion: Slots) -> None:
    """Insertion of a fusion between a model's backbone and its head."""
    model.add_module(FUSION, fusion)
    # A partial object refers to the copy where the model is copied.
    model.forward = functools.partial(_answer, model)


def fused(model: nn.Module, batch: Batch, labels: Tensor | None = None) -> tuple[dict[str, Tensor], Output]:
    """The representations of the modalities that are there, each (B, D), and scores with z as features."""
    fusion = cast(Slots, model.get_submodule(FUSION))
    seen = represented(model, batch, fusion.slots)
    features: Tensor = fusion(seen, labels)
    return seen, Output(model.get_submodule(head_name(model))(features), features)


def _answer(model: nn.Module, batch: Batch) -> Output:
    return fused(model, batch)[1]


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

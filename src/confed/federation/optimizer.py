"""Optimisers of local training and of split learning, as :class:`confed.federation.local.Local` describes them."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from confed.federation.local import Local

SCALE = "scale"
"""Key of a parameter group: the factor on ``local.lr`` of its tensors."""


def make_optimizer(
    parameters: Sequence[Tensor], local: Local, scales: Sequence[float] | None = None
) -> torch.optim.Optimizer:
    """The optimiser that ``local`` describes; vectors are not decayed.

    "adamw8bit" keeps moments of tensors with fewer than 4,096 values in 32 bits, and needs the library bitsandbytes.

    Args:
        parameters: what learns.
        local: the settings.
        scales: of each parameter, the factor on ``local.lr``; 1 for all by default.
    """
    each = [1.0] * len(parameters) if scales is None else scales
    groups: list[dict[str, Any]] = []
    for scale in dict.fromkeys(each):
        own = [p for p, factor in zip(parameters, each, strict=True) if factor == scale]
        # Biases and norms are vectors; decaying them is not what any of the papers mean by weight decay.
        matrices, vectors = [p for p in own if p.ndim > 1], [p for p in own if p.ndim <= 1]
        groups += [
            {"params": group, "weight_decay": decay, "lr": local.lr * scale, SCALE: scale}
            for group, decay in ((matrices, local.weight_decay), (vectors, 0.0))
            if group
        ]
    if local.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=local.lr, momentum=local.momentum)
    if local.optimizer == "adamax":
        return torch.optim.Adamax(groups, lr=local.lr, betas=local.betas)
    if local.optimizer == "adamw8bit":
        from bitsandbytes.optim.adamw import AdamW8bit

        return AdamW8bit(groups, lr=local.lr, betas=local.betas)
    kind = torch.optim.AdamW if local.optimizer == "adamw" else torch.optim.Adam
    return kind(groups, lr=local.lr, betas=local.betas, fused=True)


def set_rates(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Learning rate of every group: this one, times the group's own factor."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group[SCALE]


def scheduled_step(
    optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor], local: Local, progress: float
) -> None:
    """One step with the gradients there are, clipped, at the rate after a share ``progress`` of the run's steps."""
    set_rates(optimizer, local.lr * local.factor(progress))
    if local.clip is not None:
        nn.utils.clip_grad_norm_(list(parameters), local.clip)
    optimizer.step()

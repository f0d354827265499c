"""Bottleneck adapters: small residual networks inside a frozen backbone.

An adapter computes ``A(x) = up(relu(down(x)))`` and is added to the output of a feed-forward block,
``x = x + A(x)`` (Houlsby et al., "Parameter-Efficient Transfer Learning for NLP", ICML 2019, without its own
normalisation; FedDAT's released code places it so in ViLT, after the block's residual sum).

An adapter is a child of the module that hosts it and is applied by a forward hook, so the backbone's own
state-dict keys stay as they are and a copy of the model owns copies of its adapters.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from confed.models.layers import seeded_linear

__all__ = ["Adapter", "add_adapters", "blend"]


class Adapter(nn.Module):
    """The branch ``up(relu(down(x)))``; the caller adds it to ``x``.

    Args:
        width: features of the hosting block's output, D.
        bottleneck: hidden features, r; the adapter has ``2 D r + D + r`` parameters.
        zero_up: start with ``up.weight = 0``, so that the adapted model starts equal to its backbone;
            otherwise both matrices are drawn from N(0, 0.02).
        rng: where the initial values come from; default: a generator seeded with 0.
    """

    def __init__(
        self, width: int, bottleneck: int, *, zero_up: bool = False, rng: torch.Generator | None = None
    ) -> None:
        super().__init__()
        if bottleneck < 1:
            raise ValueError(f"bottleneck must be at least 1, got {bottleneck}")
        rng = torch.Generator().manual_seed(0) if rng is None else rng
        self.down = seeded_linear(width, bottleneck, 0.02, rng)
        self.up = seeded_linear(bottleneck, width, 0.02, rng)
        if zero_up:
            nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """The branch's value, same shape as ``x`` (..., D)."""
        return self.up(torch.relu(self.down(x)))


def add_adapters(
    hosts: Iterable[nn.Module],
    width: int,
    reduction: int,
    *,
    name: str = "adapter",
    zero_up: bool = False,
    rng: torch.Generator | None = None,
) -> None:
    """Gives every host module an adapter called ``name`` and switches it on.

    Calling this again with another name adds a second adapter to the same hosts, switched off until
    :func:`blend` names it.

    Args:
        hosts: modules whose output is a tensor (..., width), such as a Transformer's feed-forward blocks.
        width: features of that output, D.
        reduction: D / r; the bottleneck is ``width // reduction``.
        name: child name; keys of the state dict are ``<host>.<name>.down.weight`` and so on.
        zero_up: see :class:`Adapter`.
        rng: source of the initial values, drawn host after host.

    Raises:
        ValueError: the reduction is not in 1..width, or a host has a child of that name already.
    """
    if not 1 <= reduction <= width:
        raise ValueError(f"reduction must lie in 1..{width} (the width), got {reduction}")
    rng = torch.Generator().manual_seed(0) if rng is None else rng
    host: Any
    for host in hosts:
        if hasattr(host, name):
            raise ValueError(f"the host {type(host).__name__} already has a child called {name!r}")
        host.add_module(name, Adapter(width, width // reduction, zero_up=zero_up, rng=rng))
        if not hasattr(host, "adapter_weights"):
            host.adapter_weights = {name: 1.0}
            host.register_forward_hook(_apply)


def blend(model: nn.Module, weights: Mapping[str, float]) -> None:
    """Sets which adapters count, and how much: every host returns ``y + sum_i w_i A_i(y)``.

    An empty mapping switches all adapters off; the model then equals its backbone.

    Raises:
        ValueError: the model has no adapters, or not one of a given name.
    """
    hosts: list[Any] = [module for module in model.modules() if hasattr(module, "adapter_weights")]
    if not hosts:
        raise ValueError(f"the model {type(model).__name__} has no adapters")
    for name in weights:
        if any(not isinstance(getattr(host, name, None), Adapter) for host in hosts):
            raise ValueError(f"no adapter is called {name!r}")
    for host in hosts:
        host.adapter_weights = dict(weights)


def _apply(host: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    # Adapters are looked up on the host itself, never closed over: a copied model must use its own.
    del inputs
    weights: Mapping[str, float] = host.adapter_weights
    total = output
    for name, weight in weights.items():
        branch = getattr(host, name)(output)
        total = total + (branch if weight == 1.0 else weight * branch)
    return total

"""Linear and normalising layers of several clients on one common batch: each client's rows through its own weights.

``torch.func.vmap`` maps any model over stacked parameters, but costs about as much per operation as a small layer
computes. Where all that clients learn lies in linear layers and layer normalisations, the model runs once on the
examples of all of them, end to end; these layers alone look at whose rows they are.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

__all__ = ["layers_of", "reads_apart", "stacked_layers"]

Layers = Mapping[str, nn.Linear | nn.LayerNorm]
"""Name of a layer in its model -> the layer."""

TOLERANCE = 1e-4
"""Largest difference of outputs of a common batch and of one by one, over the largest value."""


def layers_of(model: nn.Module, names: Sequence[str]) -> Layers | None:
    """The linear layers and layer normalisations that the named tensors belong to; None where one belongs to another.

    Args:
        model: the model.
        names: of tensors that clients have their own of.
    """
    within: Any = model  # its modules have no types
    modules, found = dict[str, nn.Module](within.named_modules()), dict[str, nn.Linear | nn.LayerNorm]()
    for name in names:
        prefix, _, last = name.rpartition(".")
        layer = modules.get(prefix)
        if not isinstance(layer, nn.Linear | nn.LayerNorm) or last not in ("weight", "bias"):
            return None
        # A subclass, or a layer whose pass was replaced, may compute something else.
        if type(layer) not in (nn.Linear, nn.LayerNorm) or "forward" in vars(layer):
            return None
        found[prefix] = layer
    return found


@contextmanager
def stacked_layers(layers: Layers, own: Mapping[str, Tensor], clients: int) -> Generator[None]:
    """Layers that take a batch of the examples of K clients, end to end, while the block runs.

    Args:
        layers: whose tensors clients have their own of.
        own: the stacked tensors, (K, ...), by the names they have in the model.
        clients: K.
    """
    for name, layer in layers.items():
        # What clients do not have their own of is the same for all; a layer may have no weights, or no biases.
        common: dict[str, Tensor | None] = dict(layer.named_parameters(recurse=False))
        weight, bias = (
            own.get(f"{name}.{key}", None if (t := common.get(key)) is None else t.expand(clients, *t.shape))
            for key in ("weight", "bias")
        )
        held = cast("Any", layer)  # an attribute of the module hides its class's method
        held.forward = (
            partial(_linear, cast(Tensor, weight), bias)
            if isinstance(layer, nn.Linear)
            else partial(_normalised, layer, clients, weight, bias)
        )
    try:
        yield
    finally:
        for layer in layers.values():
            del layer.forward


def reads_apart(common: Sequence[Tensor], alone: Sequence[Sequence[Tensor]]) -> bool:
    """Whether outputs of a common batch are those of each client's own, but for rounding.

    Args:
        common: the outputs, each with the rows of all clients end to end.
        alone: each client's outputs.
    """
    for both in zip(common, *alone, strict=True):
        found, wanted = both[0], torch.cat(both[1:])
        if found.shape != wanted.shape:
            return False
        apart, most = (found - wanted).abs().max(), wanted.abs().max()
        if not bool(apart <= TOLERANCE * most.clamp_min(1e-30)):  # of NaN, too
            return False
    return True


def _linear(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    rows = x.reshape(len(weight), -1, x.shape[-1])
    y = cast(Tensor, cast("Any", _Product).apply(rows, weight, bias))
    return y.view(*x.shape[:-1], weight.shape[1])


class _Product(torch.autograd.Function):
    """Products x W^T + b of stacks; the gradient of W is formed with its shorter side first.

    PyTorch forms x^T g of y = x W^T, which takes up to five times as long as g^T x where y has few values.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None
        return torch.bmm(x, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, weight.mT)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator hides the name of its argument
        ctx: Any, *grad_outputs: Any
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (g,), (x, weight) = grad_outputs, ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        wide = weight.shape[1] > weight.shape[2]
        return (
            torch.bmm(g, weight) if of_x else None,
            (torch.bmm(x.mT, g).mT if wide else torch.bmm(g.mT, x)) if of_weight else None,
            g.sum(1) if of_bias and ctx.biased else None,
        )


def _normalised(layer: nn.LayerNorm, clients: int, weight: Tensor | None, bias: Tensor | None, x: Tensor) -> Tensor:
    plain = functional.layer_norm(x, layer.normalized_shape, None, None, layer.eps)
    rows = plain.view(clients, -1, *layer.normalized_shape)
    rows = rows if weight is None else rows * weight.unsqueeze(1)
    rows = rows if bias is None else rows + bias.unsqueeze(1)
    return rows.view(x.shape)

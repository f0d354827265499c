"""Linear and normalising layers of several clients on one common batch: each client's rows through its own weights.

``torch.func.vmap`` maps any model over stacked parameters, but costs about as much per operation as a small layer
computes. Where all that clients learn lies in linear layers and layer normalisations, the model runs once on the
examples of all of them, end to end; these layers alone look at whose rows they are.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

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
    modules, found = dict(model.named_modules()), dict[str, nn.Linear | nn.LayerNorm]()
    for name in names:
        prefix, _, last = name.rpartition(".")
        layer = modules.get(prefix)
        # A subclass, or a layer whose pass was replaced, may compute something else.
        if type(layer) not in (nn.Linear, nn.LayerNorm) or last not in ("weight", "bias") or "forward" in vars(layer):
            return None
        assert isinstance(layer, nn.Linear | nn.LayerNorm)
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
        weight, bias = own.get(f"{name}.weight"), own.get(f"{name}.bias")
        forward: Callable[[Tensor], Tensor]
        if isinstance(layer, nn.Linear):
            # What clients do not have their own of is the same for all.
            weight = layer.weight.expand(clients, *layer.weight.shape) if weight is None else weight
            if bias is None and layer.bias is not None:
                bias = layer.bias.expand(clients, -1)
            forward = partial(_linear, weight, bias)
        else:
            forward = partial(_normalised, layer, clients, weight, bias)
        layer.forward = forward
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
    y: Tensor = _Product.apply(rows, weight, bias)
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
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
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
    weight = layer.weight if weight is None else weight.unsqueeze(1)
    bias = layer.bias if bias is None else bias.unsqueeze(1)
    # A layer may have no weights, or no biases.
    rows = rows if weight is None else rows * weight
    rows = rows if bias is None else rows + bias
    return rows.view(x.shape)

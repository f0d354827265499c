"""Bottleneck adapters: small residual networks inside a frozen backbone, several side by side.

An adapter computes ``A(x) = up(act(down(x)))`` (Houlsby et al., "Parameter-Efficient Transfer Learning for NLP",
ICML 2019, without its own normalisation). It sits in one of two places, as in FedDAT's released code:

- after a block's residual sum, ``y = x + A(x)``: ViLT, ViT;
- inside a block that normalises its residual sum s, where the adapter reads the normalised value and the same
  normalisation follows (Pfeiffer et al., "AdapterFusion", EACL 2021): ``y = LN(s + A(LN(s)))``: BERT.

An adapter is a child of the module that hosts it and is applied by a forward hook, so the backbone's own
state-dict keys stay as they are and a copy of the model owns copies of its adapters.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from confed.federation.ranges import AT_LEAST_ONE, check_value
from confed.models.layers import seeded_linear

Activation = Literal["relu", "gelu"]  # the function between an adapter's two matrices
Weights = tuple[Mapping[str, float], ...]


class Adapter(nn.Module):
    """The branch ``up(act(down(x)))``; the caller adds it to ``x``."""

    def __init__(
        self,
        width: int,
        bottleneck: int,
        *,
        activation: Activation = "relu",
        zero_up: bool = False,
        planes: bool = False,
        rng: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.planes = planes
        check_value(bottleneck, Annotated[int, AT_LEAST_ONE], "bottleneck")
        check_value(activation, Activation, "activation")
        rng = torch.Generator().manual_seed(0) if rng is None else rng
        self.act = torch.relu if activation == "relu" else nn.functional.gelu
        self.down = seeded_linear(width, bottleneck, 0.02, rng)
        self.up = seeded_linear(bottleneck, width, 0.02, rng)
        if zero_up:
            nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """The branch's value, same shape as ``x``, (..., D) or planes (B, D, H, W)."""
        x = x.movedim(1, -1) if self.planes else x
        branch = self.up(self.act(self.down(x)))
        return branch.movedim(-1, 1) if self.planes else branch


@dataclass(frozen=True)
class Host:
    """A place for adapters in a backbone."""

    # the module whose output, a tensor (..., width), an adapter changes: the one that ends with the block's residual
    # sum; or, with after_norm, the block's last layer normalisation itself, whose input is the residual sum
    # (BertOutput.LayerNorm)
    module: nn.Module
    width: int  # features of that output, D
    after_norm: bool = False  # whether the module is that layer normalisation
    planes: bool = False  # whether the output is planes of a convolution, (B, D, H, W)


class AdapterBank:
    """The adapters of a model, by name: at every place one network of each name.

    The model keeps its bank as an attribute; it is no module, so the adapters' tensors are their hosts':
    ``<host>.<name>.down.weight`` and so on. It implements :class:`confed.federation.structure.Adapters`.
    """

    def __init__(
        self, hosts: Sequence[Host], reduction: int, *, activation: Activation = "relu", zero_up: bool = False
    ) -> None:
        self.hosts = tuple(hosts)
        self.reduction = reduction
        self.activation: Activation = activation
        self.zero_up = zero_up
        self._names: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The adapters there are, in the order in which they were added."""
        return self._names

    @property
    def weights(self) -> Weights:
        """Which adapters are switched on, per chunk of the batch; none without adapters."""
        return self.hosts[0].module.adapter_weights if self._names else ({},)  # pyright: ignore

    def add(self, name: str, rng: torch.Generator) -> None:
        """Adds an adapter to every place, with values from ``rng``, place after place."""
        if not self.hosts:
            raise ValueError("the backbone has no places for adapters")
        if not name.isidentifier():
            raise ValueError(f"an adapter's name must be letters, digits and _, got {name!r}")
        for host in self.hosts:
            if not 1 <= self.reduction <= host.width:
                raise ValueError(
                    f"model.peft.reduction must lie in 1..{host.width}, the features of the block, got {self.reduction}"
                )
            if hasattr(host.module, name) or name == "adapter_weights":
                kind = type(host.module).__name__
                raise ValueError(f"adapter {name!r}: the host {kind} already has a child or attribute called so")
        for host in self.hosts:
            bottleneck = host.width // self.reduction
            adapter = Adapter(
                host.width, bottleneck, activation=self.activation, zero_up=self.zero_up, planes=host.planes, rng=rng
            )
            reference = next(host.module.parameters(), None)
            if reference is not None and not reference.is_meta:
                # Beside weights of half precision or quantised ones, what learns is of single precision.
                adapter.to(reference.device, torch.promote_types(reference.dtype, torch.float32))
            host.module.add_module(name, adapter)
            if not self._names:
                place: Any = host.module
                place.adapter_weights = ({name: 1.0},)
                place.register_forward_hook(_apply_after_norm if host.after_norm else _apply)
        self._names = (*self._names, name)

    def using(self, *weights: Mapping[str, float]) -> AbstractContextManager[None]:
        """For the duration of a ``with`` block, which adapters count and how much; blocks may be nested."""
        if not weights:
            raise ValueError("using needs at least one mapping of adapters to weights, got none")
        for name in chain.from_iterable(weights):
            if name not in self._names:
                raise ValueError(f"no adapter is called {name!r}; there are {', '.join(self._names) or 'none'}")
        return self._switched(tuple(dict(blend) for blend in weights))

    def switch(self, weights: Mapping[str, float]) -> None:
        """Sets which adapters count outside of all ``with`` blocks."""
        self.using(weights)
        self._set((dict(weights),))

    def finish(self, place: int, output: Tensor) -> Tensor:
        """What the adapters that are switched on make of the output that a place has without them."""
        host = self.hosts[place]
        assert not host.after_norm
        return _apply(host.module, (), output) if self._names else output

    @contextmanager
    def _switched(self, weights: Weights) -> Iterator[None]:
        before = self.weights
        self._set(weights)
        try:
            yield
        finally:
            self._set(before)

    def _set(self, weights: Weights) -> None:
        host: Any
        for host in (host.module for host in self.hosts if self._names):
            host.adapter_weights = weights


def _apply(host: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """``y + sum_i w_i A_i(y)``."""
    return _sum(host, output, output) if any(host.adapter_weights) else output


def _apply_after_norm(host: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """``LN(s + sum_i w_i A_i(LN(s)))``."""
    # The method, not the module: calling the module would apply this hook again.
    return host.forward(_sum(host, output, inputs[0])) if any(host.adapter_weights) else output


def _sum(host: Any, x: Tensor, base: Tensor) -> Tensor:
    # Adapters are looked up on the host itself, never closed over: a copied model must use its own.
    weights: Weights = host.adapter_weights
    if len(weights) == 1:
        return _blend(host, weights[0], x, base)
    if len(x) % len(weights):
        raise ValueError(f"{len(weights)} blends of adapters need a multiple of as many rows, got {len(x)}")
    chunks = zip(weights, x.chunk(len(weights)), base.chunk(len(weights)), strict=True)
    return torch.cat([_blend(host, blend, rows, start) for blend, rows, start in chunks])


def _blend(host: Any, weights: Mapping[str, float], x: Tensor, total: Tensor) -> Tensor:
    for name, weight in weights.items():
        branch = getattr(host, name)(x)
        total = total + (branch if weight == 1.0 else weight * branch)
    return total

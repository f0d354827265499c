"""Forward passes of several clients' examples, each through its own client's model, in one.

In one pass over a common batch where all that clients have their own of lies in layers that can tell clients' rows
apart (:mod:`confed.federation.stacked_passes`), else by ``torch.func.vmap``. Whether a model reads a common batch as it
reads each client's own, and its stacked tensors nowhere else, is tried on the first batch of each kind.

``torch.func.vmap`` maps any model over stacked parameters, but costs about as much per operation as a small layer
computes. Where all that clients learn lies in linear layers and layer normalisations, the model runs once on the
examples of all of them, end to end; these layers alone look at whose rows they are.
"""

from collections.abc import Generator, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional

from confed.federation.feature_store import joined, stacked
from confed.federation.params import combined
from confed.federation.protocols import Batch, Output
from confed.federation.stages import staged_part

# Linear and normalising layers of several clients on one common batch -----------------------------------------

Layers = Mapping[str, nn.Linear | nn.LayerNorm]  # name of a layer in its model -> the layer
TOLERANCE = 1e-4  # largest difference of outputs of a common batch and of one by one, over the largest value


def layers_of(model: nn.Module, names: Sequence[str]) -> Layers | None:
    """The linear layers and layer normalisations of the named tensors; None where a tensor belongs to another layer."""
    within: Any = model  # its modules have no types
    modules, layers = dict[str, nn.Module](within.named_modules()), dict[str, nn.Linear | nn.LayerNorm]()
    for name in names:
        prefix, _, last = name.rpartition(".")
        layer = modules.get(prefix)
        if not isinstance(layer, nn.Linear | nn.LayerNorm) or last not in ("weight", "bias"):
            return None
        # A subclass, or a layer whose pass was replaced, may compute something else.
        if type(layer) not in (nn.Linear, nn.LayerNorm) or "forward" in vars(layer):
            return None
        layers[prefix] = layer
    return layers


@contextmanager
def stacked_layers(layers: Layers, values: Mapping[str, Tensor], clients: int) -> Generator[None]:
    """Layers that take a batch of the examples of K clients, end to end, while the block runs."""
    for name, layer in layers.items():
        # What clients do not have their own of is the same for all; a layer may have no weights, or no biases.
        both: list[Tensor | None] = []
        for key, common in (("weight", layer.weight), ("bias", cast("Tensor | None", layer.bias))):
            stack = values.get(f"{name}.{key}")
            both.append(common.expand(clients, *common.shape) if stack is None and common is not None else stack)
        # An attribute of the module hides its class's method.
        vars(layer)["forward"] = (
            partial(_linear, cast(Tensor, both[0]), both[1])
            if isinstance(layer, nn.Linear)
            else partial(_normalised, layer, clients, *both)
        )
    try:
        yield
    finally:
        for layer in layers.values():
            del vars(layer)["forward"]


def reads_apart(common: Sequence[Tensor], alone: Sequence[Sequence[Tensor]]) -> bool:
    """Whether outputs of a common batch are those of each client's own, but for rounding."""
    for both in zip(common, *alone, strict=True):
        common_rows, wanted = both[0], torch.cat(both[1:])
        if common_rows.shape != wanted.shape:
            return False
        apart, most = (common_rows - wanted).abs().max(), wanted.abs().max()
        if not bool(apart <= TOLERANCE * most.clamp_min(1e-30)):  # of NaN, too
            return False
    return True


def _linear(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """Products x W^T + b of stacks, in the order in which PyTorch forms the gradient of W with its shorter side first.

    The gradient g^T x of y = W x^T takes a fifth of the time of (x^T g)^T, that of y = x W^T, where y has few values.
    """
    rows = x.reshape(len(weight), -1, x.shape[-1])
    if weight.shape[1] > weight.shape[2]:
        y = torch.bmm(rows, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), rows, weight.mT)
    else:
        y = torch.bmm(weight, rows.mT) if bias is None else torch.baddbmm(bias.unsqueeze(2), weight, rows.mT)
        y = y.mT
    return y.reshape(*x.shape[:-1], weight.shape[1])


def _normalised(layer: nn.LayerNorm, clients: int, weight: Tensor | None, bias: Tensor | None, x: Tensor) -> Tensor:
    plain = functional.layer_norm(x, layer.normalized_shape, None, None, layer.eps)
    rows = plain.view(clients, -1, *layer.normalized_shape)
    rows = rows if weight is None else rows * weight.unsqueeze(1)
    rows = rows if bias is None else rows + bias.unsqueeze(1)
    return rows.view(x.shape)


# Forward passes of several clients' examples ------------------------------------------------------------------


@dataclass(frozen=True)
class JointBatch:
    """Examples of several clients with batches of the same shapes."""

    batch: Batch  # client by client, end to end
    clients: int  # how many there are
    given: Sequence[Batch] = ()  # batches of the clients, where they are more than tensors

    @staticmethod
    def of(each: Sequence[Batch]) -> "JointBatch":
        """Batches of clients, put together."""
        return JointBatch(combined(torch.cat, each), len(each), each)

    @property
    def each(self) -> Sequence[Batch]:
        """Each client's batch."""
        if self.given:
            return self.given
        rows = zip(*(tensor.chunk(self.clients) for tensor in self.batch.values()), strict=True)
        return [dict(zip(self.batch, of_client, strict=True)) for of_client in rows]


class StackedPasses:
    """Passes of several clients' batches through their models; kept features are looked up before."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        staged = staged_part(model)
        self._staged = None if staged is None else staged[1]
        self._tried: dict[Hashable, Layers | None] = {}

    @property
    def keeps_features(self) -> bool:
        """Whether what frozen layers make of an example is kept."""
        return self._staged is not None and self._staged.frozen_features is not None

    def __call__(self, values: Mapping[str, Tensor], joint: JointBatch, task: object) -> Output:
        """The outputs of K clients' examples, all with K B rows: client by client.

        Frozen layers that draw random numbers, and what torch cannot map over clients, are a ``RuntimeError``.
        """
        states = self._states(joint)
        shapes = tuple((name, tensor.ndim) for name, tensor in joint.batch.items())
        key = (id(task), self.model.training, tuple(values), shapes)
        if key not in self._tried:
            self._tried[key] = self._layers(values, joint, states)
        layers = self._tried[key]
        return self._mapped(values, joint, states) if layers is None else self._joint(layers, values, joint, states)

    def _states(self, joint: JointBatch) -> list[Any] | None:
        """Each client's state after the frozen layers; None where no features are kept."""
        staged = self._staged
        if staged is None or (features := staged.frozen_features) is None:
            return None
        # Also once nothing is kept any more: inside of `vmap` these layers would round otherwise from then on.
        before = torch.get_rng_state()
        states = [features.state(staged, examples) for examples in joint.each]
        if not torch.equal(before, torch.get_rng_state()):
            raise RuntimeError("the frozen layers draw random numbers, which would be others")
        return states

    def _given(self, batch: Batch, state: Any) -> AbstractContextManager[None]:
        """Declaration of a state, where features are kept, for the time of a pass."""
        features = None if state is None or self._staged is None else self._staged.frozen_features
        return nullcontext() if features is None else features.given(batch, state)

    def _joint(
        self, layers: Layers, values: Mapping[str, Tensor], joint: JointBatch, states: list[Any] | None
    ) -> Output:
        state = None if states is None else joined(states)
        with stacked_layers(layers, values, joint.clients), self._given(joint.batch, state):
            return self.model(joint.batch)

    def _mapped(self, values: Mapping[str, Tensor], joint: JointBatch, states: list[Any] | None) -> Output:
        whole = {name: tensor.view(joint.clients, -1, *tensor.shape[1:]) for name, tensor in joint.batch.items()}
        state, dims = (None, None) if states is None else stacked(states)

        def one(values: dict[str, Tensor], batch: Batch, state: Any) -> Output:
            with self._given(batch, state):
                return functional_call(self.model, values, (batch,))

        mapped = vmap(one, in_dims=cast("Any", (0, 0, dims)), randomness="error")(dict(values), whole, state)
        return Output(*(rows_of_clients.flatten(0, 1) for rows_of_clients in mapped))

    def _layers(self, values: Mapping[str, Tensor], joint: JointBatch, states: list[Any] | None) -> Layers | None:
        """The layers that tell clients' rows apart; None where the model needs ``vmap``.

        Tried with values that differ between clients and from the model's.
        """
        layers = layers_of(self.model, list(values))
        if layers is None:
            return None
        rng = torch.Generator().manual_seed(0)
        with torch.no_grad():
            changed = {name: tensor + _noise(tensor, rng) for name, tensor in values.items()}
            try:
                alone = list[Output]()
                for place, examples in enumerate(joint.each):
                    mine = {name: tensor[place] for name, tensor in changed.items()}
                    with self._given(examples, None if states is None else states[place]):
                        alone.append(functional_call(self.model, mine, (examples,)))
                common = self._joint(layers, changed, joint, states)
            except (RuntimeError, ValueError, TypeError, IndexError):
                return None  # what is wrong in any case is met again with `vmap`
            return layers if reads_apart(common, alone) else None


def _noise(tensor: Tensor, rng: torch.Generator) -> Tensor:
    size = 0.1 * tensor.abs().mean().clamp_min(0.1)
    return size * torch.randn(tensor.shape, generator=rng).to(tensor)

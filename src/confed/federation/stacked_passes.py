"""Forward passes of several clients' examples, each through its own client's model, in one.

In one pass over a common batch where all that clients have their own of lies in layers that can tell clients' rows
apart (:mod:`confed.federation.stacked_layers`), else by ``torch.func.vmap``. Whether a model reads a common batch as it
reads each client's own, and its stacked tensors nowhere else, is tried on the first batch of each kind.
"""

from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from confed.federation.feature_states import joined, stacked
from confed.federation.protocols import Batch, Output
from confed.federation.stacked_layers import Layers, layers_of, reads_apart, stacked_layers
from confed.federation.stages import staged_part

__all__ = ["StackedPasses"]


class StackedPasses:
    """Passes of several clients' batches through their models; kept features are looked up before.

    Args:
        model: the clients' model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        found = staged_part(model)
        self._staged = None if found is None else found[1]
        self._tried: dict[Hashable, Layers | None] = {}

    def __call__(
        self, own: Mapping[str, Tensor], each: Sequence[Batch], task: object
    ) -> tuple[dict[str, Tensor], Output]:
        """The examples of K clients as one batch, and their outputs, all with K B rows: client by client.

        Frozen layers that draw random numbers, and what torch cannot map over clients, are a ``RuntimeError``.

        Args:
            own: the clients' stacked tensors, (K, ...).
            each: their batches, of equal shapes.
            task: what the model was told to answer.
        """
        batch = {name: torch.cat([examples[name] for examples in each]) for name in each[0]}
        states = self._states(each)
        shapes = tuple((name, tensor.ndim) for name, tensor in batch.items())
        key = (id(task), self.model.training, tuple(own), shapes)
        if key not in self._tried:
            self._tried[key] = self._layers(own, batch, each, states)
        layers = self._tried[key]
        output = self._mapped(own, batch, each, states) if layers is None else self._joint(layers, own, batch, states)
        return batch, output

    def _states(self, each: Sequence[Batch]) -> list[Any] | None:
        """Each client's state after the frozen layers; None where no features are kept."""
        staged = self._staged
        if staged is None or (kept := staged.frozen_features) is None:
            return None
        # Also once nothing is kept any more: inside of `vmap` these layers would round otherwise from then on.
        before = torch.get_rng_state()
        states = [kept.state(staged, examples) for examples in each]
        if not torch.equal(before, torch.get_rng_state()):
            raise RuntimeError("the frozen layers draw random numbers, which would be others")
        return states

    def _given(self, batch: Batch, state: Any) -> AbstractContextManager[None]:
        """Declaration of a state, where features are kept, for the time of a pass."""
        kept = None if state is None or self._staged is None else self._staged.frozen_features
        return nullcontext() if kept is None else kept.given(batch, state)

    def _joint(self, layers: Layers, own: Mapping[str, Tensor], batch: Batch, states: list[Any] | None) -> Output:
        clients = len(next(iter(own.values())))
        state = None if states is None else joined(states)
        with stacked_layers(layers, own, clients), self._given(batch, state):
            return self.model(batch)

    def _mapped(
        self, own: Mapping[str, Tensor], batch: Batch, each: Sequence[Batch], states: list[Any] | None
    ) -> Output:
        whole = {name: tensor.view(len(each), -1, *tensor.shape[1:]) for name, tensor in batch.items()}
        state, dims = (None, None) if states is None else stacked(states)

        def one(own: dict[str, Tensor], batch: Batch, state: Any) -> Output:
            with self._given(batch, state):
                return functional_call(self.model, own, (batch,))

        mapped = vmap(one, in_dims=cast("Any", (0, 0, dims)), randomness="error")(dict(own), whole, state)
        return Output(*(part.flatten(0, 1) for part in mapped))

    def _layers(
        self, own: Mapping[str, Tensor], batch: Batch, each: Sequence[Batch], states: list[Any] | None
    ) -> Layers | None:
        """The layers that tell clients' rows apart; None where the model needs ``vmap``.

        Tried with values that differ between clients and from the model's.
        """
        layers = layers_of(self.model, list(own))
        if layers is None:
            return None
        rng = torch.Generator().manual_seed(0)
        with torch.no_grad():
            changed = {name: tensor + _noise(tensor, rng) for name, tensor in own.items()}
            try:
                alone = list[Output]()
                for place, examples in enumerate(each):
                    mine = {name: tensor[place] for name, tensor in changed.items()}
                    with self._given(examples, None if states is None else states[place]):
                        alone.append(functional_call(self.model, mine, (examples,)))
                common = self._joint(layers, changed, batch, states)
            except (RuntimeError, ValueError, TypeError, IndexError):
                return None  # what is wrong in any case is met again with `vmap`
            return layers if reads_apart(common, alone) else None


def _noise(tensor: Tensor, rng: torch.Generator) -> Tensor:
    size = 0.1 * tensor.abs().mean().clamp_min(0.1)
    return size * torch.randn(tensor.shape, generator=rng).to(tensor)

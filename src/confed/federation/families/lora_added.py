"""What rounds add to a layer beside the factors of LoRA: a matrix D, so that it computes W_0 + s (D + B A).

D is 0 at first and is not trained. A client that took part in the round before has its D, and is sent the factors whose
product is D's change; to others, and where it is smaller, D itself is sent. Nothing of D is ever sent back.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from confed.federation.client import Client
from confed.federation.families.lora import lora_layers
from confed.federation.messages import Message
from confed.federation.params import Params, named_tensors
from confed.federation.state import ServerState

__all__ = ["ADDED", "STACKED", "add_matrices", "added_weight", "change_for", "hold", "noted", "received"]

ADDED = "lora_added"
"""Name of the matrix D beside a layer's factors."""

STACKED = ("lora_stack.A", "lora_stack.B")
"""Names of the factors whose product is a change of D."""

_HELD, _HOLDERS, _LAST = "lora_held", "holders", "last_stack"
"""On a client: D, and of which round. On the server: who has D of the round before, and the stacks since."""

Addition = Callable[[tuple[Tensor, Tensor], tuple[Tensor, Tensor]], Tensor]
"""Change of D, from the stacked factors and those that the layer has now."""


def add_matrices(model: nn.Module) -> None:
    """Addition of D to every layer with LoRA."""
    tensors = named_tensors(model)
    for target, (a, b) in lora_layers(tensors).items():
        layer: Any = model.get_submodule(target)
        # A parameter, because models freeze their buffers; the hook keeps gradients away from it.
        layer.register_parameter(ADDED, nn.Parameter(tensors[b].new_zeros(len(tensors[b]), tensors[a].shape[1])))
        layer.register_forward_hook(_add)


def added_weight(layer: Any) -> Tensor | None:
    """S D of a layer with LoRA; None where its rounds add nothing."""
    if ADDED not in layer._parameters:
        return None
    (scale,) = layer.scaling.values()
    return scale * layer.get_parameter(ADDED).detach()


def _add(layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """A layer's output with s D x added to it."""
    (scale,) = layer.scaling.values()
    return output + scale * functional.linear(inputs[0], layer.get_parameter(ADDED).detach())


# Server ---------------------------------------------------------------------------------------------------------


def noted(server: ServerState, clients: Iterable[str], stacks: Params) -> dict[str, Params]:
    """Slots of a server after a round: who took part, and the stacks that changed D."""
    return {**server.slots, _LAST: stacks, _HOLDERS: {client: torch.tensor(server.round - 1) for client in clients}}


def change_for(server: ServerState, client: str) -> dict[str, Tensor]:
    """Tensors that bring a client's matrices up to date: stacks, or D itself; nothing in the first round."""
    # The change is of use only to who took part in the very last round; a round may go by without any answer.
    since = server.slots.get(_HOLDERS, {}).get(client)
    holds = since is not None and int(since) == server.round - 1
    tensors: dict[str, Tensor] = {}
    for target in lora_layers(server.params) if server.round else ():  # D starts at 0
        stacked = {name: server.slots[_LAST].get(name) for name in (f"{target}.{part}" for part in STACKED)}
        known = {name: t for name, t in stacked.items() if holds and t is not None}
        tensors |= known or {f"{target}.{ADDED}": server.params[f"{target}.{ADDED}"]}
    return tensors


# Client ---------------------------------------------------------------------------------------------------------


def received(client: Client, message: Message, tensors: Mapping[str, Tensor], addition: Addition) -> dict[str, Tensor]:
    """Every layer's D in this round; a change of a D that this client does not hold is a ``ValueError``."""
    matrices: dict[str, Tensor] = {}
    for target, (a, b) in lora_layers(tensors).items():
        name, stacks = f"{target}.{ADDED}", tuple(f"{target}.{part}" for part in STACKED)
        if stacks[0] in message.tensors:
            before, held = int(message.scalars["round"]) - 1, client.state.scalars.get(_HELD)
            if held != before:
                raise ValueError(
                    f"client {client.info.id!r}: what round {before} adds to the weights came, but the weights "
                    f"held are of round {'none' if held is None else held}"
                )
            stacked = (message.tensors[stacks[0]], message.tensors[stacks[1]])
            matrices[name] = client.state.tensors[_HELD][name] + addition(stacked, (tensors[a], tensors[b]))
        else:
            matrices[name] = message.tensors[name] if name in message.tensors else client.initial[name].cpu()
    return matrices


def hold(client: Client, message: Message, matrices: Mapping[str, Tensor]) -> None:
    """Storage of the matrices at the client, for the next round's change."""
    client.state.tensors[_HELD] = dict(matrices)
    client.state.scalars[_HELD] = message.scalars["round"]
    if client.keep_personal:  # once in memory
        client.state.tensors["personal"] = {**client.state.tensors["personal"], **matrices}

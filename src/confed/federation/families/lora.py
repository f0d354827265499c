"""Factors of LoRA among a model's tensors: names, layers, ranks.

The library ``peft`` calls them ``<layer>.lora_A.<adapter>.weight`` (r x n) and ``<layer>.lora_B.<adapter>.weight``
(m x r).

D is 0 at first and is not trained. A client that took part in the round before has its D, and is sent the factors whose
product is D's change; to others, and where it is smaller, D itself is sent. Nothing of D is ever sent back.

Step of HetLoRA (Cho, Liu, Xu, Fahrezi and Joshi, "Heterogeneous LoRA for federated fine-tuning of on-device foundation
models", EMNLP 2024, arXiv 2401.06432). Its abstract and a published summary name the step; what follows is the
description of a reimplementation in a public repository, as are both constants. With r a client's rank and j = gamma r,
rounded down, its tail is the sum over layers of

    ||B[:, j:]||_F ||A[j:, :]||_F.

The loss of a batch is the task's plus lambda times the tail. Where the tail is smaller after training than before, the
client drops it: its rank is j from then on.
"""

import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from confed.federation.client import Client
from confed.federation.families.fisher import FISHER
from confed.federation.messages import Message
from confed.federation.params import Params, named_tensors
from confed.federation.protocols import Batch
from confed.federation.state import ServerState
from confed.federation.train import Objective, Train

_FACTOR = re.compile(r"(?P<target>.+)\.lora_(?P<factor>[AB])\.[^.]+\.weight")


def factor_names(tensors: Iterable[str]) -> list[tuple[str, int]]:
    """The names of factors among others, and along which dimension each has its rank."""
    matches = ((name, _FACTOR.fullmatch(name)) for name in tensors)
    return [(name, "AB".index(match["factor"])) for name, match in matches if match]


def lora_layers(tensors: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Layer -> the names of its A and B, for layers that have both here."""
    names: dict[str, dict[int, str]] = {}
    for name, dim in factor_names(tensors):
        names.setdefault(name.split(".lora_")[0], {})[dim] = name
    return {target: (pair[0], pair[1]) for target, pair in names.items() if len(pair) == 2}


def cut_to_rank(tensors: Params, rank: int | None) -> dict[str, Tensor]:
    """The same tensors, of the factors only the first rows and columns; all of them without a rank."""
    cut = dict(tensors)
    for name, dim in factor_names(tensors) if rank is not None else ():
        cut[name] = tensors[name].narrow(dim, 0, min(rank or 0, tensors[name].shape[dim])).contiguous()
    return cut


def padded(factors: Params, full: Params) -> dict[str, Tensor]:
    """Factors, and their Fisher information, with 0 beyond their rank, up to that of the tensors in ``full``."""
    wide = dict[str, Tensor]()
    for name, dim in factor_names(factors):
        missing = full[name.removeprefix(FISHER)].shape[dim] - factors[name].shape[dim]
        wide[name] = functional.pad(factors[name], (0, 0, 0, missing) if dim == 0 else (0, missing))
    return wide


def zero_beyond(tensors: Params, rank: int | None) -> dict[str, Tensor]:
    """Copies of the factors among tensors with 0 beyond a rank; nothing without one."""
    return {} if rank is None else padded(cut_to_rank(tensors, rank), tensors)


def fresh_factors(tensors: Params, rng: torch.Generator) -> dict[str, Tensor]:
    """New factors as LoRA starts with, for those among tensors: A uniform in +-1/sqrt(n), B at 0."""
    fresh: dict[str, Tensor] = {}
    for name, dim in factor_names(tensors):
        fresh[name] = torch.zeros(tensors[name].shape, dtype=tensors[name].dtype)
        if dim == 0:
            bound = tensors[name].shape[1] ** -0.5
            fresh[name].uniform_(-bound, bound, generator=rng)
    return fresh


# What rounds add to a layer beside the factors of LoRA: a matrix D --------------------------------------------

ADDED = "lora_added"  # name of the matrix D beside a layer's factors
STACKED = ("lora_stack.A", "lora_stack.B")  # names of the factors whose product is a change of D
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
    return output + scale * functional.linear(inputs[0], getattr(layer, ADDED).detach())


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
        stacked = {f"{target}.{factor}": server.slots[_LAST].get(f"{target}.{factor}") for factor in STACKED}
        last = {name: t for name, t in stacked.items() if holds and t is not None}
        tensors |= last or {f"{target}.{ADDED}": server.params[f"{target}.{ADDED}"]}
    return tensors


# Client ---------------------------------------------------------------------------------------------------------


def received(client: Client, message: Message, tensors: Mapping[str, Tensor], addition: Addition) -> dict[str, Tensor]:
    """Every layer's D in this round; a change of a D that this client does not hold is a ``ValueError``."""
    matrices: dict[str, Tensor] = {}
    for target, (a, b) in lora_layers(tensors).items():
        name, stacks = f"{target}.{ADDED}", tuple(f"{target}.{factor}" for factor in STACKED)
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


# Self-pruning of ranks ----------------------------------------------------------------------------------------

_linalg: Any = torch.linalg  # its functions have no types


def tail_product(a: Tensor, b: Tensor, rank: int) -> Tensor:
    """||B[:, rank:]||_F ||A[rank:, :]||_F, with a gradient; 0 where nothing is beyond."""
    return _linalg.vector_norm(b[:, rank:]) * _linalg.vector_norm(a[rank:])


def limit_rank(client: Client, rank: int | None) -> None:
    """Puts 0 into the workspace's factors beyond a rank."""
    with torch.no_grad():
        for name, tensor in zero_beyond(client.tensors, rank).items():
            client.tensors[name].copy_(tensor)


def train_and_prune(
    client: Client, objective: Objective, rank: int, *, decay: float, penalty: float, least: int
) -> Generator[Train, float, tuple[float, int]]:
    """Local training with the penalty; the mean loss, and the rank that is left.

    Args:
        client: a client whose workspace is loaded.
        objective: the losses of a batch.
        rank: r.
        decay: gamma; with 1 nothing is pruned.
        penalty: lambda.
        least: the smallest rank that is pruned to.
    """
    least_rank = max(min(least, rank), int(decay * rank))
    if least_rank == rank:
        return (yield Train(objective)), rank
    pairs = [(client.tensors[a], client.tensors[b]) for a, b in lora_layers(client.tensors).values()]

    def tail() -> Tensor:
        return torch.stack([tail_product(a, b, least_rank) for a, b in pairs]).sum()

    def losses(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
        for loss in objective(model, batch):
            yield loss + penalty * tail()

    before = float(tail().detach())
    loss = yield Train(losses if penalty else objective)
    if float(tail().detach()) >= before:
        return loss, rank
    limit_rank(client, least_rank)
    return loss, least_rank

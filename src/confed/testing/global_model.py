"""Contract check of the global model: what a method says of it is what its answers show."""

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from confed.engines.local import Simulation
from confed.engines.perform import Setup, Workspace
from confed.federation.algorithm import Algorithm
from confed.federation.messages import Call, Message
from confed.federation.params import Scope, copy_into, matches_any
from confed.federation.protocols import Batch, Output
from confed.federation.state import ClientState, MemoryStore, ServerState
from confed.testing.trial import ContractViolation, Recording, toy, undisturbed


def one_global_model(algorithm: Algorithm) -> None:
    """The global model answers alike at clients, in unseen places and from its file, or needs clients' own parts."""
    outcome = undisturbed(algorithm)
    check_global_model(toy(algorithm), outcome.servers, outcome.states)


def check_global_model(
    setup: Setup, servers: Mapping[str, ServerState], states: Mapping[str, ClientState], tolerance: float = 1e-6
) -> None:
    """Check of ``Algorithm.global_model`` on a federation that has been trained."""
    declared, gaps = setup.algorithm.global_model, list[float]()
    for number in range(len(setup.population)):
        client = setup.population.info(number).id
        private = states[client].tensors.get("private", {})
        at_client = _scores(setup, servers, number, states[client])
        if declared == "with own parts":
            scrambled = ClientState({**states[client].tensors, "private": _noise(private)}, states[client].scalars)
            gaps.append(_gap(at_client, _scores(setup, servers, number, scrambled)))
            continue
        others = {
            "in an unseen place": _scores(setup, servers, number, ClientState()),
            "from its file": _scores_of_file(setup, servers, number),
            "with other values for what clients keep and train": _scores_of_file(setup, servers, number, noisy=True),
        }
        for where, scores in others.items():
            if (gap := _gap(at_client, scores)) > tolerance:
                raise ContractViolation(
                    f"one global model: scores at {client!r} and {where} differ by {gap:.3g}; if it needs parts of the "
                    "clients' own, global_model must be 'with own parts'"
                )
    if declared == "with own parts" and max(gaps) <= tolerance:
        raise ContractViolation(
            "one global model: said to need parts of the clients' own, it answers the same with any"
        )


def _scores(setup: Setup, servers: Mapping[str, ServerState], number: int, state: ClientState) -> Tensor:
    """Scores of a client's test examples with the global model, where the client keeps ``state``."""
    info, seen, store = setup.population.info(number), list[Tensor](), MemoryStore()
    store.save(info.id, state)
    recording = Recording(replace(setup, task=_telling(setup.task_of(info.id), seen), tasks={}))
    shared = Simulation(setup, store, recording).shared(servers, info)
    call = Call(info, "evaluate", Message(shared, {"split": "test", "limit": 0, "personal": False}))
    (reply,) = recording([call], store, setup.rounds)
    if reply.error is not None:
        raise ContractViolation(f"one global model: the evaluation at {info.id!r} failed: {reply.error}")
    return torch.cat(seen)


def _scores_of_file(setup: Setup, servers: Mapping[str, ServerState], number: int, noisy: bool = False) -> Tensor:
    """Scores of a client's test examples with what it is sent alone, as read from a file; ``noisy``: beside noise."""
    info, workspace = setup.population.info(number), Workspace(setup.model())
    tensors = Simulation(setup, MemoryStore()).shared(servers, info)
    given = setup.algorithm.initial_private(tensors)
    values = {**workspace.initial, **tensors, **given}
    if noisy:
        scopes, passive = workspace.scopes(setup.algorithm, info), setup.algorithm.traits.aggregates
        kept = [name for name in workspace.initial if scopes[name] is Scope.PRIVATE and name not in given]
        values |= _noise({name: values[name] for name in kept if not matches_any(name, passive)})
    copy_into([workspace.tensors[name] for name in values], list(values.values()))
    workspace.set_task(setup.task_of(info.id))
    network = setup.algorithm.deployed_model(workspace.model.eval())
    with torch.no_grad():
        return torch.cat([network(batch).logits for batch in setup.data(info.id).test(setup.local.eval_batch_size)])


def _telling(task: Any, seen: list[Tensor]) -> Any:
    """The task, which keeps the scores that it counts."""
    kind = type(task)

    class Telling(kind):
        def tally(self, output: Output, batch: Batch) -> Any:
            seen.append(output.logits)
            return kind.tally(self, output, batch)

    telling = copy(task)
    object.__setattr__(telling, "__class__", Telling)
    return telling


def _noise(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(3)
    return {n: torch.rand(t.shape, generator=rng).to(t) if t.is_floating_point() else t for n, t in tensors.items()}


def _gap(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().max())

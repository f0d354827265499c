"""Contract check of the global model: what a method says of it is what its answers show."""

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from confed.engines.local import Simulation
from confed.engines.perform import Setup, Workspace
from confed.federation.algorithm import Algorithm
from confed.federation.messages import Call, Message
from confed.federation.params import Scope, copy_into
from confed.federation.protocols import Batch, Output
from confed.federation.state import ClientState, MemoryStore, ServerState
from confed.testing.trial import ContractViolation, Recording, toy, undisturbed

CHECK = "one global model"


def one_global_model(algorithm: Algorithm) -> None:
    """The global model answers alike at clients, in unseen places and from its file, or needs clients' own parts."""
    outcome = undisturbed(algorithm)
    check_global_model(toy(algorithm), outcome.servers, outcome.states)


def check_global_model(
    setup: Setup, servers: Mapping[str, ServerState], states: Mapping[str, ClientState], tolerance: float = 1e-6
) -> None:
    """Check of ``Algorithm.global_model`` on a federation that has been trained.

    Args:
        setup: the federation; models must give scores for test examples, not texts.
        servers: its servers' last states.
        states: client -> what it keeps.
        tolerance: largest difference of scores.

    Raises:
        ContractViolation: a global model that is said to answer alone gives other scores where a client's private
            values are others or missing, or when it is read from its file; or one that is said to need parts of the
            clients' own gives the same scores with any values of these.
    """
    said, gaps = setup.algorithm.global_model, list[float]()
    for number in range(len(setup.population)):
        client = setup.population.info(number).id
        state = states[client]
        at_client = _scores(setup, servers, number, state)
        if said == "with own parts":
            scrambled = replace(state, tensors={**state.tensors, "private": _noise(state.tensors.get("private", {}))})
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
                    f"{CHECK}: scores at {client!r} and {where} differ by {gap:.3g}; if it needs parts of the clients' "
                    "own, global_model must be 'with own parts'"
                )
    if said == "with own parts" and max(gaps) <= tolerance:
        raise ContractViolation(f"{CHECK}: it is said to need parts of the clients' own, and answers the same with any")


def _scores(setup: Setup, servers: Mapping[str, ServerState], number: int, state: ClientState) -> Tensor:
    """Scores of a client's test examples with the global model, where the client keeps ``state``."""
    info, seen = setup.population.info(number), list[Tensor]()
    told = replace(setup, task=_recording(setup.task_of(info.id), seen), tasks={})
    store, recording = MemoryStore(), Recording(told)
    store.save(info.id, state)
    simulation = Simulation(told, store, recording)
    message = Message(simulation.shared(servers, info), {"split": "test", "limit": 0})
    without_personal = Message(message.tensors, {**message.scalars, "personal": False})
    (reply,) = recording([Call(info, "evaluate", without_personal)], store, setup.rounds)
    if reply.error is not None:
        raise ContractViolation(f"{CHECK}: the evaluation at {info.id!r} failed: {reply.error}")
    return torch.cat(seen)


def _scores_of_file(setup: Setup, servers: Mapping[str, ServerState], number: int, noisy: bool = False) -> Tensor:
    """Scores of a client's test examples with what a run writes as its global model, as predictions read it.

    ``noisy``: what clients keep to themselves and train has other than initial values.
    """
    info = setup.population.info(number)
    workspace = Workspace(setup.model())
    tensors = {name: value for server in servers.values() for name, value in server.params.items()}
    given = setup.algorithm.initial_private(tensors)
    values = {**workspace.initial, **tensors, **given}
    if noisy:
        scopes = workspace.scopes(setup.algorithm, info)
        passive = setup.algorithm.traits.aggregates
        kept = [name for name in workspace.initial if scopes[name] is Scope.PRIVATE and name not in given]
        values |= _noise({name: values[name] for name in kept if not any(fnmatchcase(name, p) for p in passive)})
    copy_into([workspace.tensors[name] for name in values], list(values.values()))
    workspace.model.eval()
    workspace.set_task(setup.task_of(info.id))
    network = setup.algorithm.deployed_model(workspace.model)
    with torch.no_grad():
        batches = setup.data(info.id).test(setup.local.eval_batch_size)
        return torch.cat([network(batch).logits for batch in batches])


def _recording(task: Any, seen: list[Tensor]) -> Any:
    """The task, which keeps the scores that it counts."""
    kind = type(task)

    class Recorder(kind):
        def tally(self, output: Output, batch: Batch) -> Any:
            seen.append(output.logits)
            return kind.tally(self, output, batch)

    recorder = copy(task)
    object.__setattr__(recorder, "__class__", Recorder)
    return recorder


def _noise(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(3)
    return {
        name: torch.rand(value.shape, generator=rng).to(value) if value.is_floating_point() else value
        for name, value in tensors.items()
    }


def _gap(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().max())

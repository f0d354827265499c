"""Contract checks of privacy: what a method sends, to whom, and what it must not change."""

from dataclasses import replace

import torch
from torch import Tensor

from confed.engines.local import Simulation
from confed.engines.perform import Workspace
from confed.federation.algorithm import Algorithm
from confed.federation.messages import drive
from confed.federation.params import Scope
from confed.federation.state import MemoryStore
from confed.testing.toy import toy_clients
from confed.testing.trial import ROUNDS, ContractViolation, Recording, run, toy, undisturbed


def sends_only_what_is_shared(algorithm: Algorithm) -> None:
    """No private or frozen tensor travels up, by name or by value."""
    check = "sends only what is shared"
    setup = toy(algorithm)
    outcome = undisturbed(algorithm)
    workspace = Workspace(setup.model())
    for client, call, reply in outcome.replies:
        if reply.error is not None:
            raise ContractViolation(f"{check}: {call.action} failed on {client}: {reply.error}")
        scopes = workspace.scopes(setup.algorithm, call.client)
        hidden = list(outcome.states[client].tensors.get("private", {}).values())
        for name, tensor in reply.message.tensors.items():
            if scopes.get(name, Scope.SHARED) is not Scope.SHARED:
                raise ContractViolation(f"{check}: {call.action} of {client} sent {name}, which is {scopes[name]}")
            if any(t.shape == tensor.shape and t.numel() > 2 and torch.equal(t, tensor) for t in hidden):
                raise ContractViolation(f"{check}: {call.action} of {client} sent a private tensor as {name}")


def nothing_leaks(algorithm: Algorithm) -> None:
    """Another client's data cannot be seen in what a client sends and keeps in the same round."""
    check = "nothing leaks from client to client"
    clients, other = (toy_clients(seed, kind=algorithm.traits.made_for) for seed in (0, 5))
    mixed = {**clients, "client-0": other["client-0"]}
    one, two = run(toy(algorithm, clients), stop=1), run(toy(algorithm, mixed), stop=1)
    first, second = ([(c, r) for c, _, r in run.replies if c != "client-0"] for run in (one, two))
    for (client, a), (_, b) in zip(first, second, strict=True):
        for name, tensor in a.message.tensors.items():
            if not torch.equal(tensor, b.message.tensors[name]):
                raise ContractViolation(f"{check}: client-0's data show in {client}'s {name}")


def servers_see_their_own_part(algorithm: Algorithm) -> None:
    """Where there are several servers, what one asks and what it is told holds no tensor of another's.

    Neither by its name nor by its values: those that another server holds, or was sent or told in the same round.
    """
    check = "servers see their own part only"
    setup = toy(algorithm)
    executor = Recording(setup)
    simulation = Simulation(setup, MemoryStore(), executor)
    servers = simulation.start(executor.workspace)
    if len(servers) == 1:
        return
    cohort = simulation.clients()
    parts = {name: set(server.params) for name, server in servers.items()}
    if len(set.union(*parts.values())) != sum(map(len, parts.values())):
        raise ContractViolation(f"{check}: two servers hold the same tensor")
    seen: list[tuple[str, str, Tensor]] = []
    for name, flow in setup.algorithm.phases():
        executor.replies.clear()
        given = replace(servers[name], clients=len(cohort), rounds=ROUNDS, local=setup.local)
        servers[name] = drive(flow(given, cohort), lambda calls: executor(calls, simulation.store, 0))
        others = set.union(*(server_part for other, server_part in parts.items() if other != name))
        values = [t for other, s in servers.items() if other != name for t in s.params.values()]
        for client, call, reply in executor.replies:
            for tensor_name, tensor in (*call.message.tensors.items(), *reply.message.tensors.items()):
                where = f"{tensor_name} in {call.action} of {client}"
                seen.append((name, where, tensor))
                if tensor_name in others or any(_same_values(t, tensor) for t in values):
                    raise ContractViolation(f"{check}: {name} sees {where}")
    for number, (server, where, tensor) in enumerate(seen):
        for other, tensors_seen, foreign in seen[:number]:
            if other != server and _same_values(tensor, foreign):
                raise ContractViolation(f"{check}: {server} sees {where}, which {other} sees as {tensors_seen}")


def _same_values(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of some size are the same; constants, such as biases of zeros, tell nothing."""
    if one.numel() <= 2 or one.shape != other.shape or not torch.equal(one, other):
        return False
    return bool((one != one.flatten()[0]).any())


def keeps_frozen_tensors(algorithm: Algorithm) -> None:
    """Frozen tensors hold the same bits after a run."""
    initial = toy(algorithm).model().state_dict()
    for name, tensor in undisturbed(algorithm).frozen.items():
        if not torch.equal(tensor, initial[name]):
            raise ContractViolation(f"keeps frozen tensors: {name} changed")

"""Contract checks of privacy and of protections: what a method has by default or declares holds in a round."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from types import MappingProxyType
from typing import Any, get_args

import torch
from torch import Tensor

from confed.engines.local import Setup, Simulation
from confed.engines.perform import Workspace
from confed.federation.algorithm import Algorithm, Protection
from confed.federation.messages import Call, Message, Reply, drive
from confed.federation.params import Params, Scope
from confed.federation.record_privacy import RecordPrivacy
from confed.federation.reports import Number
from confed.federation.robust_mean import RobustMean
from confed.federation.secure_sum import SecureSum
from confed.federation.state import MemoryStore, Store
from confed.federation.update_privacy import UpdatePrivacy, origin
from confed.privacy.protections import ANALYSIS
from confed.privacy.secure_sum import masks
from confed.testing.steadiness import DESCENT
from confed.testing.toy import toy_setup
from confed.testing.trial import (
    ROUNDS,
    SIZES,
    ContractViolation,
    Outcome,
    Recording,
    clients_of,
    run,
    toy,
    undisturbed,
)


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
    clients, other = (clients_of(algorithm, seed) for seed in (0, 5))
    mixed = {**clients, "client-0": other["client-0"]}
    one, two = run(toy(algorithm, clients), stop=1), run(toy(algorithm, mixed), stop=1)
    for (client, _, a), (_, _, b) in zip(one.replies, two.replies, strict=True):
        for name, tensor in a.message.tensors.items():
            if client != "client-0" and not torch.equal(tensor, b.message.tensors[name]):
                raise ContractViolation(f"{check}: client-0's data show in {client}'s {name}")


def servers_see_their_own_part(algorithm: Algorithm) -> None:
    """What one of several servers asks and is told holds no other's tensor, by name or by values."""
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
        values = list(chain.from_iterable(s.params.values() for other, s in servers.items() if other != name))
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


ONE_EPOCH = replace(DESCENT, epochs=1)
CLIP = 1.0
NOTHING = 1e-9  # clip at which examples have no influence
FAR, FARTHER = 1e3, 1e5  # distances of a lying client's values from its own ones
CLIENTS = (*SIZES, 7, 8)
"""Sizes of so many clients that every shared tensor has three senders; the last two have all modalities."""

LIAR, OTHER = 3, 4  # positions of clients whose replies are changed on their way
Lies = Mapping[int, float]
"""Position of a client -> how far all its values are from the start (of updates that are clipped) or from its own."""

PROTECTED: Mapping[str, tuple[Protection, UpdatePrivacy | RobustMean | SecureSum | RecordPrivacy]] = {
    "noise at the client covers what is sent": ("update_privacy", UpdatePrivacy(CLIP)),
    "noise at the server covers one client": ("update_privacy", UpdatePrivacy(CLIP, at="server")),
    "noise on records covers what is sent": ("record_privacy", RecordPrivacy(NOTHING)),
    "the robust mean is used": ("robust", RobustMean("median")),
    "the secure sum equals the plain one": ("secure_sum", SecureSum()),
}
"""Check -> the protection that it proves, and its options."""


def lacks_protection(algorithm: Algorithm, check: str) -> str:
    """Why a method lacks the protection that a check is about, as the end of a sentence; "" where it has it."""
    protection = PROTECTED[check][0]
    if protection == "secure_sum" and not masks.available():
        return "the library cryptography is not installed"
    return _protected(algorithm, check).unsupported_reason(protection)


def noise_at_the_client_covers_what_is_sent(algorithm: Algorithm) -> None:
    """All that leaves a client and depends on its examples is an update of at most the norm to which it is clipped."""
    trial = _Trial(algorithm, "noise at the client covers what is sent")
    if trial.refused:
        return
    for client, call, reply, _ in trial.replies():
        if (norm := _norm_of_update(algorithm, call, reply)) > CLIP * (1 + 1e-6):
            raise trial.violation(f"{client} sent an update of the norm {norm:.3g}, clipped to {CLIP:g}")


def noise_on_records_covers_what_is_sent(algorithm: Algorithm) -> None:
    """What a client sends depends on its examples by clipped gradients alone: with gradients of nothing, not at all."""
    trial = _Trial(algorithm, "noise on records covers what is sent")
    if trial.refused:
        return
    for client, call, reply, other in trial.replies():
        gap, name = _largest_gap(reply.message.tensors, other.message.tensors)
        if gap > 1e-6:
            raise trial.violation(f"{client} sent a {name} in {call.action} that moves with its examples, by {gap:.3g}")


def noise_at_the_server_covers_one_client(algorithm: Algorithm) -> None:
    """The server depends on the sum of the clipped updates alone, to whose sensitivity the noise is scaled."""
    trial = _Trial(algorithm, "noise at the server covers one client")
    if trial.refused:
        return
    resting = trial.servers({LIAR: 0.0, OTHER: 0.0})
    single = trial.servers({LIAR: FAR, OTHER: 0.0})
    most, _ = _largest_gap(resting, single)
    gap, name = _largest_gap(single, trial.servers({LIAR: FARTHER, OTHER: 0.0}))
    if gap > 1e-3 * most:
        raise trial.violation(
            f"an update far beyond the clip, with other scalars, moves {name} by {gap:.3g} more than a nearer one: "
            "more is used than the clipped updates, to which the noise is scaled"
        )
    gap, name = _largest_gap(resting, trial.servers({LIAR: FARTHER, OTHER: -FARTHER}))
    if gap > 1e-3 * most:
        raise trial.violation(
            f"two updates that cancel in the sum, to which the noise is scaled, move {name} by {gap:.3g} "
            f"(one alone moves the server by {most:.3g})"
        )


def the_robust_mean_is_used(algorithm: Algorithm) -> None:
    """The server follows the robust mean, and how far out one client's values are has no influence."""
    trial = _Trial(algorithm, "the robust mean is used")
    if trial.refused:
        return
    gap, name = _largest_gap(trial.servers({LIAR: FAR}), trial.servers({LIAR: FARTHER}))
    if gap > 0:
        raise trial.violation(f"one client whose values are farther out than all others' moves {name} by {gap:.3g}")
    unmoved, moved = (trial.servers(robust=_Fixed("median", amount=amount)) for amount in (0.0, 1.0))
    if _largest_gap(unmoved, moved)[0] == 0:
        raise trial.violation("the server is the same whatever the robust mean is")


def the_secure_sum_equals_the_plain_one(algorithm: Algorithm) -> None:
    """Two rounds of secure aggregation give the servers that two plain rounds give, within rounding."""
    trial = _Trial(algorithm, "the secure sum equals the plain one")
    if trial.refused:
        return
    gap, name = _largest_gap(trial.servers(rounds=2, secure_sum=None), trial.servers(rounds=2))
    if gap > 1e-4:
        raise trial.violation(f"{name} differs from the plain one by {gap:.3g}")


class _Trial:
    """Rounds of the toy federation under one protection."""

    def __init__(self, algorithm: Algorithm, check: str) -> None:
        self.check, self.method = check, _protected(algorithm, check)
        self.refused = lacks_protection(algorithm, check)

    def violation(self, what: str) -> ContractViolation:
        """The violation, with the hooks that are to blame and their declaration."""
        name, method = PROTECTED[self.check][0], type(self.method).__name__
        hooks = " and ".join(f"{method}.{hook}" for hook in self.method.own_hooks(name)) or method
        return ContractViolation(f"{self.check}: {hooks} must keep {name!r}, as declared, but {what}")

    def outcome(self, lies: Lies = MappingProxyType({}), *, seed: int = 0, rounds: int = 1, **options: Any) -> Outcome:
        """The end of a run with other fields of the method, the clients' examples by seed."""
        method = replace(self.method, **options)
        clients = clients_of(method, seed, CLIENTS)
        try:
            noisy = method.record_privacy is None  # which goes without batch normalisation
            setup = toy_setup(method, clients=clients, local=ONE_EPOCH, rounds=rounds, noisy=noisy)
            outcome = run(setup, lambda s: _Lying(s, lies))
        except Exception as error:
            raise self.violation(f"a run with it ends with {type(error).__name__}: {error}") from error
        if failed := list(chain.from_iterable(errors.values() for errors in outcome.errors)):
            raise self.violation(f"clients fail with it: {failed[0]}")
        return outcome

    def replies(self) -> Iterator[tuple[str, Call, Reply, Reply]]:
        """What clients send in training, and send with other examples; their scalars must be the same."""
        first, second = self.outcome(), self.outcome(seed=5)
        for (client, call, reply), (_, _, other) in zip(first.replies, second.replies, strict=True):
            if call.action in ANALYSIS:
                continue
            yield client, call, reply, other
            if reply.message.scalars != other.message.scalars:
                raise self.violation(f"{client} sent scalars of its examples without noise: {reply.message.scalars}")

    def servers(self, lies: Lies = MappingProxyType({}), **options: Any) -> dict[str, Tensor]:
        """What the servers hold at the end of a run."""
        return replace(self.outcome(lies, **options), states={}).tensors()


class _Lying(Recording):
    """Executor that changes the updates of some clients."""

    def __init__(self, setup: Setup, lies: Lies) -> None:
        super().__init__(setup)
        self._lies = lies

    def __call__(self, calls: Sequence[Call], store: Store, round: int) -> Iterator[Reply]:
        replies = super().__call__(calls, store, round)
        for position, (call, reply) in enumerate(zip(calls, replies, strict=True)):
            lies = position in self._lies and call.action not in ANALYSIS and reply.error is None
            yield self._changed(call, reply, self._lies[position]) if lies else reply

    def _changed(self, call: Call, reply: Reply, distance: float) -> Reply:
        method, tensors = self.setup.algorithm, dict(reply.message.tensors)
        for name, tensor in tensors.items():
            start = tensor if method.update_privacy is None else _start(method, call, name, tensor)
            tensors[name] = start + distance if tensor.is_floating_point() else tensor
        reports = method.reports(call.action)
        ranges = {name: report for name, report in reports.items() if isinstance(report, Number)}
        ends = {n: min(r.high, 1e12) if abs(distance) < FARTHER else max(r.low, -1e12) for n, r in ranges.items()}
        scalars = {name: ends.get(name, value) for name, value in reply.message.scalars.items()}
        return replace(reply, message=Message(tensors, scalars))


@dataclass(frozen=True)
class _Fixed(RobustMean):
    """A mean that does not depend on the replies: the server's values plus a number."""

    amount: float = 0.0

    def of(
        self, updates: Iterable[tuple[Params, float]], start: Params, *, precision: torch.dtype, clients: int = 0
    ) -> dict[str, Tensor]:
        for _ in updates:
            pass
        return {n: t + self.amount if t.is_floating_point() else t for n, t in start.items()}


def _protected(algorithm: Algorithm, check: str) -> Algorithm:
    name, options = PROTECTED[check]
    alone: dict[str, Any] = dict.fromkeys(get_args(Protection))
    return replace(algorithm, **alone | {name: options})


def _start(algorithm: Algorithm, call: Call, name: str, sent: Tensor) -> Tensor:
    return origin(name, sent, call.message.tensors, algorithm.traits.changes)


def _norm_of_update(algorithm: Algorithm, call: Call, reply: Reply) -> float:
    """L2 norm over all floating-point values together."""
    squares = 0.0
    for name, tensor in reply.message.tensors.items():
        if tensor.is_floating_point():
            squares += float((tensor.double() - _start(algorithm, call, name, tensor).double()).square().sum())
    return math.sqrt(squares)


def _largest_gap(first: Params, second: Params) -> tuple[float, str]:
    """The largest difference of servers' floating-point values, and its tensor; infinite where one lacks a tensor."""
    if lacking := first.keys() ^ second.keys():
        return math.inf, min(lacking)
    compared = [name for name, tensor in first.items() if tensor.is_floating_point() and tensor.numel()]
    gaps = ((float((first[name].double() - second[name].double()).abs().max()), name) for name in compared)
    return max(gaps, default=(0.0, ""))

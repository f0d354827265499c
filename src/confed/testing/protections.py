"""Contract checks of protections: what a method has by default or declares (``keeps_protections``) holds in a round."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from confed.engines.local import Setup
from confed.federation.algorithm import Algorithm, Protection
from confed.federation.messages import Call, Message, Reply
from confed.federation.params import Params
from confed.federation.reports import Number
from confed.federation.robust_mean import RobustMean
from confed.federation.secure_sum import SecureSum
from confed.federation.state import Store
from confed.federation.update_privacy import UpdatePrivacy, origin
from confed.privacy.protections import ANALYSIS
from confed.privacy.secure_sum import masks
from confed.testing.steadiness import DESCENT
from confed.testing.toy import SIZES, toy_clients, toy_setup
from confed.testing.trial import ContractViolation, Outcome, Recording, run

CLIP = 1.0
FAR, FARTHER = 1e3, 1e5
"""Distances of a lying client's values from its own ones."""

CLIENTS = (*SIZES, 9, 11)
"""Sizes of so many clients that every shared tensor has three senders; the last two have all modalities."""

LIAR, OTHER = 3, 4
"""Positions of clients whose replies are changed on their way."""

Lies = Mapping[int, float]
"""Position of a client -> how far all its values are from the start (of updates that are clipped) or from its own."""

PROTECTED: Mapping[str, tuple[Protection, UpdatePrivacy | RobustMean | SecureSum]] = {
    "noise at the client covers what is sent": ("update_privacy", UpdatePrivacy(CLIP)),
    "noise at the server covers one client": ("update_privacy", UpdatePrivacy(CLIP, at="server")),
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
    first, second = trial.outcome(), trial.outcome(seed=5)
    for (client, call, reply), (_, _, other) in zip(first.replies, second.replies, strict=True):
        if call.action in ANALYSIS:
            continue
        if (norm := _norm_of_update(algorithm, call, reply)) > CLIP * (1 + 1e-6):
            raise trial.violation(f"{client} sent an update of the norm {norm:.3g}, clipped to {CLIP:g}")
        if reply.message.scalars != other.message.scalars:
            raise trial.violation(f"{client} sent scalars of its examples without noise: {reply.message.scalars}")


def noise_at_the_server_covers_one_client(algorithm: Algorithm) -> None:
    """The server depends on the sum of the clipped updates alone, to whose sensitivity the noise is scaled.

    So an update moves it as far as it is clipped, and two that cancel in the sum no more than none at all.
    """
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
        clients = toy_clients(seed, CLIENTS, method.traits.made_for)
        try:
            setup = toy_setup(method, clients=clients, local=DESCENT, rounds=rounds)
            outcome = run(setup, lambda s: _Lying(s, lies))
        except Exception as error:
            raise self.violation(f"a run with it ends with {type(error).__name__}: {error}") from error
        if failed := list(chain.from_iterable(errors.values() for errors in outcome.errors)):
            raise self.violation(f"clients fail with it: {failed[0]}")
        return outcome

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
    """The method with one protection alone."""
    name, options = PROTECTED[check]
    alone: dict[str, Any] = {"update_privacy": None, "robust": None, "secure_sum": None}
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
    return max((float((first[name].double() - second[name].double()).abs().max()), name) for name in compared)

"""Protections of a method (privacy and secure aggregation) around a client's actions and a server's exchange.

A protection (``algorithm.update_privacy``, ``algorithm.robust``, ``algorithm.secure_sum``) is chosen in a recipe, for
any method. The method does not know of it: :func:`actions` wraps what a client does, :func:`protect` wraps the exchange
of messages that an engine provides. Engines call both, and nothing else of this package.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import get_args

import torch

from confed.federation.algorithm import Algorithm, Protection
from confed.federation.client import Client, SignatureCheck
from confed.federation.messages import Call, Exchange, Message, Reply
from confed.federation.params import Params, Scope, matches_any
from confed.federation.randomness import generator
from confed.federation.secure_sum import LEAST
from confed.federation.update_privacy import STATISTICS, UpdatePrivacy
from confed.privacy import accountant
from confed.privacy.cut import cut_privacy
from confed.privacy.examples import ProtectsExamples
from confed.privacy.secure_sum import masks
from confed.privacy.secure_sum.exchange import SummedRound
from confed.privacy.secure_sum.exchange import actions as secure_actions

# Checks of a client's message before it is used ---------------------------------------------------------------

LARGEST = 1e6  # how many times the largest value of the initial model, or 1, a value that travels may be
SUMMED = 2.0**32  # how many times that a sum over examples may be


def first_non_finite(params: Params) -> str | None:
    """The name of a tensor that holds a NaN or an infinity, or None; a sum is non-finite if any element is."""
    for name, tensor in params.items():
        if tensor.is_floating_point():
            wide = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype
            if not math.isfinite(tensor.sum(dtype=wide).item()):
                return name
    return None


@dataclass(frozen=True)
class ValueBound:
    """Absolute bound on values that travel, the same at sites and server: adding larger ones would lose all others."""

    most: float  # the largest absolute value
    sums: tuple[str, ...] = ()

    @classmethod
    def of(cls, initial: Iterable[torch.Tensor], sums: tuple[str, ...]) -> "ValueBound":
        """The bound of a run, from the values that every party starts from."""
        floating = [tensor.detach() for tensor in initial if tensor.is_floating_point() and tensor.numel()]
        return cls(LARGEST * max([1.0, *(float(tensor.abs().max()) for tensor in floating)]), sums)

    def check(self, params: Params) -> None:
        if (problem := self.problem(params)) is not None:
            raise ValueError(problem)

    def problem(self, params: Params) -> str | None:
        """The first tensor with a value beyond the bound, a NaN or an infinity, in words; None where there is none."""
        for name, tensor in params.items():
            if not tensor.is_floating_point() or not tensor.numel():
                continue
            most = self.most * (SUMMED if matches_any(name, self.sums) else 1.0)
            low, high = (float(end) for end in tensor.detach().aminmax())
            if not (-most <= low and high <= most):  # a NaN is in no range
                return f"{name!r} holds values from {low:.3g} to {high:.3g}, and {most:.3g} is the most in this run"
        return None


def check_reply(call: Call, reply: Reply) -> Reply:
    """The reply, or an error where a tensor is not finite, or names, shapes or dtypes are not what the call expects."""
    if reply.error is not None:
        return reply
    problem = _problem(call, reply.message)
    return reply if problem is None else replace(reply, message=Message(), error=problem)


def _problem(call: Call, message: Message) -> str | None:
    if call.expects is not None:
        missing, extra = (call.expects.keys() - message.tensors.keys(), message.tensors.keys() - call.expects.keys())
        if missing or extra:
            return f"ValueError: update refused: missing {sorted(missing)}, unexpected {sorted(extra)}"
        for name, wanted in call.expects.items():
            got = message.tensors[name]
            if got.shape != wanted.shape or got.dtype != wanted.dtype:
                return (
                    f"ValueError: update refused: {name!r} must be {wanted.dtype} of shape {tuple(wanted.shape)}, "
                    f"got {got.dtype} of shape {tuple(got.shape)}"
                )
    name = first_non_finite(message.tensors)
    return None if name is None else f"ValueError: update refused: {name!r} holds a NaN or an infinity"


# Protections of a method --------------------------------------------------------------------------------------

UPDATE = "fit"  # the action whose reply is an update
ANALYSIS = ("evaluate", "examine")  # actions that measure and do not train; what they tell is not protected
PURPOSE = "update privacy"  # of the stream that noise is drawn from
Action = Callable[[Client, Message], Message]


def check(algorithm: Algorithm) -> None:
    """Check that a method's protections fit the method and each other."""
    name = algorithm.title
    for protection in get_args(Protection):
        reason = algorithm.unsupported_reason(protection) if getattr(algorithm, protection) is not None else ""
        if reason:
            raise ValueError(f"algorithm.{protection} must be left out for {name}: {reason}")
    privacy, robust = algorithm.update_privacy, algorithm.robust
    if privacy is not None and privacy.at == "server" and robust is not None:
        raise ValueError(
            f"algorithm.update_privacy.at must be 'client' together with algorithm.robust.rule = {robust.rule!r}, got "
            "'server': the noise at the server is that of a mean"
        )
    if algorithm.secure_sum is not None and robust is not None:
        raise ValueError(
            f"algorithm.robust.rule = {robust.rule!r} needs every client's update, which algorithm.secure_sum hides: "
            "leave one of them out"
        )
    if algorithm.secure_sum is not None and privacy is not None and privacy.at == "server":
        raise ValueError(
            "algorithm.update_privacy.at must be 'client' together with algorithm.secure_sum, got 'server': the server "
            "cannot clip updates that it does not see"
        )
    for section, noised in (("update_privacy", privacy), ("record_privacy", algorithm.record_privacy)):
        if noised is not None and noised.noise > 0 and not accountant.available():
            raise ValueError(
                f"algorithm.{section}.noise needs the library dp-accounting, which says what it is worth; install it "
                "with: pip install '.[privacy]' -c constraints.txt"
            )
    if algorithm.secure_sum is not None and not masks.available():
        raise ValueError(
            "algorithm.secure_sum needs the library cryptography; install it with: "
            "pip install '.[privacy]' -c constraints.txt"
        )


def check_layouts(algorithm: Algorithm, layouts: Iterable[Mapping[str, Scope]]) -> None:
    """Check that the protections fit the tensors that clients send."""
    senders: Counter[str] = Counter()
    for scopes in layouts:
        senders.update(name for name, scope in scopes.items() if scope is Scope.SHARED)
    privacy = algorithm.update_privacy
    statistics = [name for name in senders if name.endswith(STATISTICS)]
    if statistics and privacy is not None and privacy.noise > 0:
        raise ValueError(
            f"algorithm.update_privacy.noise must be 0 where running statistics are shared, such as "
            f"{statistics[0]!r}, got "
            f"{privacy.noise}: take a model without batch normalisation, or a method that keeps it private (fedbn)"
        )
    if algorithm.secure_sum is None:
        return
    least = algorithm.secure_sum.least
    why = f"algorithm.secure_sum.colluders = {algorithm.secure_sum.colluders} and two others"
    if least == LEAST:
        why = "of two, each would know the other's update from the sum"
    for name, count in senders.items():
        if count < least:
            raise ValueError(
                f"algorithm.secure_sum needs at least {least} clients that send a tensor, and {name!r} has {count}: "
                f"{why}"
            )


# At a client --------------------------------------------------------------------------------------------------


def actions(algorithm: Algorithm) -> dict[str, Action]:
    """Actions of a client under its protections: those of the method and those of secure aggregation.

    With noise at the client, on updates or on gradients of records, or secure aggregation, no other action than
    ``fit`` may send tensors, and none a loss.
    """
    offered = dict(algorithm.actions())
    privacy = algorithm.update_privacy
    local = privacy is not None and privacy.at == "client"
    if not local and algorithm.secure_sum is None and algorithm.record_privacy is None:
        return offered
    guarded = {name: run if name in ANALYSIS else _silent(name, run) for name, run in offered.items()}
    if UPDATE in guarded and privacy is not None and local:
        guarded[UPDATE] = _released(guarded[UPDATE], privacy, algorithm.traits.changes)
    if algorithm.secure_sum is not None:
        guarded |= secure_actions(
            guarded[UPDATE],
            algorithm.traits.changes,
            lambda info: algorithm.weight(Reply(info, Message())),
            algorithm.secure_sum,
        )
    return guarded


def _silent(name: str, run: Action) -> Action:
    """An action whose reply has nothing of the data but its update."""

    def act(client: Client, message: Message) -> Message:
        reply = run(client, message)
        if reply.tensors and name != UPDATE:
            raise ValueError(
                f"the action {name!r} would send {', '.join(reply.tensors)}, which is neither noised nor masked"
            )
        return Message(reply.tensors, {key: value for key, value in reply.scalars.items() if key != "loss"})

    return act


def _released(run: Action, privacy: UpdatePrivacy, changes: Sequence[str]) -> Action:
    """An action whose update is clipped and noised before it leaves the client."""

    def act(client: Client, message: Message) -> Message:
        reply = run(client, message)
        rng = client.noise(PURPOSE) if privacy.repeatable else None
        return Message(privacy.release(reply.tensors, message.tensors, rng, changes=changes), reply.scalars)

    return act


# At a server --------------------------------------------------------------------------------------------------


def protect(
    algorithm: Algorithm,
    exchange: Exchange,
    *,
    seed: int,
    round: int,
    errors: dict[str, str] | None = None,
    signatures: SignatureCheck | None = None,
) -> Exchange:
    """An engine's exchange under the method's protections; the exchange itself where there are none."""
    privacy, secure_sum = algorithm.update_privacy, algorithm.secure_sum
    if secure_sum is None and (privacy is None or privacy.at != "server"):
        return exchange
    refused = {} if errors is None else errors

    def ask(calls: Sequence[Call]) -> Iterator[Reply]:
        if not any(call.action == UPDATE for call in calls):
            return exchange(calls)
        if secure_sum is not None:
            title = f"round {round + 1}"
            return SummedRound(algorithm, secure_sum, exchange, calls, title, refused, signatures).replies()
        answers = exchange(calls)  # at once, so that clients begin
        return _noised(algorithm, calls, answers, (seed, round))

    return ask


def _noised(
    algorithm: Algorithm, calls: Sequence[Call], answers: Iterable[Reply], stream: tuple[int, int]
) -> Iterator[Reply]:
    """Replies with clipped updates and each client's share of the noise; a failed client sent an update of zero."""
    privacy = algorithm.update_privacy
    assert privacy is not None
    among = Counter(chain.from_iterable(call.expects or () for call in calls))
    for call, reply in zip(calls, answers, strict=True):
        if call.expects is None:
            raise ValueError(
                f"algorithm.update_privacy needs to know what {call.action!r} sends, and the method does not say"
            )
        start = {name: call.message.tensors.get(name, value) for name, value in call.expects.items()}
        failed = reply.error is not None
        sent = privacy.nothing(start, algorithm.traits.changes) if failed else reply.message.tensors
        rng = generator(*stream, call.client.id, PURPOSE) if privacy.repeatable else None
        released = privacy.release(sent, start, rng, changes=algorithm.traits.changes, among=among)
        yield Reply(call.client, Message(released, {} if failed else reply.message.scalars))


def noise_is_fixed(algorithm: object) -> bool:
    """Whether noise at a site is a function of a secret (``Client.fixed_noise``): at the cut and of single examples."""
    cut = cut_privacy(algorithm)
    examples = isinstance(algorithm, ProtectsExamples) and algorithm.example_privacy.noise > 0
    records = isinstance(algorithm, Algorithm) and algorithm.record_privacy is not None
    return records or cut.noise > 0 or cut.gradient_noise > 0 or examples

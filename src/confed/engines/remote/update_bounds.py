"""Bounds on the norm of an update and on a client's weight, relative to the others of the cohort.

One site's update with values of a million, or one that claims 10^12 examples, would decide the mean alone. Where
updates come from other machines, an update whose norm is more than so many times the cohort's median is scaled down to
that, and a client's number of examples counts up to so many times the median of all members. The factors are generous:
sites that train honestly on data of different sizes stay below. A majority of sites with bad intentions moves the
medians, and secure aggregation shows no single update, so there no norm is bounded. Nor is one where replies are no new
values of what was sent (scores, factors of compressed updates), or are part of a session.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from confed.federation.algorithm import Algorithm
from confed.federation.client_info import ClientInfo
from confed.federation.messages import Call, Message
from confed.federation.update_privacy import origin
from confed.privacy.protections import UPDATE

__all__ = ["FEWEST", "Bounds", "bounded_members", "most_of", "norm_of", "scaled"]

FEWEST = 3
"""Clients that a median is taken of, at least: of two, neither can be told from the other."""


@dataclass(frozen=True)
class Bounds:
    """Bounds on one client's influence.

    Attributes:
        update: times the median norm of the round's updates; 0 for no bound.
        weight: times the median number of examples of all members; 0 for no bound.
    """

    update: float = 10.0
    weight: float = 10.0

    def __post_init__(self) -> None:
        for name, value in (("update", self.update), ("weight", self.weight)):
            if not (value == 0 or (math.isfinite(value) and value >= 1)):
                raise ValueError(f"the bound on an {name} must be a factor of at least 1, or 0 for none, got {value}")

    def apply_to(self, algorithm: Algorithm, calls: Sequence[Call]) -> bool:
        """Whether the replies to some calls are updates of a cohort, which are seen one by one and have a bound."""
        if self.update == 0 or algorithm.secure_sum is not None or algorithm.robust is not None:
            return False
        # The second call to a client is sent when the first one's reply was read.
        alone = len({call.client.id for call in calls}) == len(calls) >= FEWEST
        return alone and all(call.action == UPDATE and not call.session for call in calls)


def norm_of(call: Call, message: Message, changes: Sequence[str]) -> float:
    """Euclidean norm of the change in a reply, in double precision; integers do not count.

    Tensors that nothing of their name and shape was sent of, and that are no changes, do not count either: numbers of
    examples, summaries and the like differ between honest sites by more than updates do.

    Args:
        call: what was sent.
        message: the reply.
        changes: globs of tensors that are changes already.
    """
    total = 0.0
    for name, tensor in message.tensors.items():
        if tensor.is_floating_point():
            with suppress(ValueError):  # a method's own: a count, a summary, a compressed update
                moved = tensor.double() - origin(name, tensor, call.message.tensors, changes)
                total += float((moved * moved).sum())
    return math.sqrt(total)


def most_of(norms: Mapping[str, float], factor: float) -> float:
    """The largest norm that an update may have; infinity where there are too few, or where most change nothing.

    Args:
        norms: client -> norm of its update.
        factor: see :class:`Bounds`.
    """
    if factor == 0 or len(norms) < FEWEST:
        return math.inf
    # Of an even number the lower one: half of the cohort may be far away without moving it there.
    return factor * statistics.median_low(norms.values()) or math.inf


def scaled(call: Call, message: Message, changes: Sequence[str], scale: float) -> Message:
    """A reply whose change is scaled by a factor between 0 and 1.

    A tensor that was not sent and is not a change either is a ValueError.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in message.tensors.items():
        if tensor.is_floating_point():
            start = origin(name, tensor, call.message.tensors, changes).double()
            tensors[name] = (start * (1 - scale) + tensor.double() * scale).to(tensor.dtype)
        else:
            tensors[name] = tensor
    return Message(tensors, message.scalars)


def bounded_members(members: Sequence[ClientInfo], factor: float) -> tuple[list[ClientInfo], dict[str, str]]:
    """Members whose numbers of examples are at most so many times the median, and in words whose was more.

    Args:
        members: as they introduced themselves.
        factor: see :class:`Bounds`.
    """
    if factor == 0 or len(members) < FEWEST:
        return list(members), {}
    most = int(factor * statistics.median_low(member.num_examples for member in members))
    said = {
        member.id: f"says that it has {member.num_examples} examples, and counts as one with {most}: {factor:g} times "
        "the median of all sites"
        for member in members
        if member.num_examples > most
    }
    return [replace(member, num_examples=min(member.num_examples, most)) for member in members], said

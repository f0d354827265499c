"""Bounds on the norm of an update and on a client's weight, relative to the others of the cohort.

One site's update with values of a million, or one that claims 10^12 examples, would decide the mean alone. Where
updates come from other machines, an update whose norm is more than so many times the cohort's median is scaled down to
that, and a client's number of examples counts up to so many times the median of all members. The factors are generous:
sites that train honestly on data of different sizes stay below. A majority of sites with bad intentions moves the
medians, and secure aggregation shows no single update, so there no norm is bounded. Nor is one of what is no new value
of what was sent (scores, counts).

Of two sites neither can be told from the other by one round. There an update is compared with what all sites have sent
so far (:class:`NormHistory`): the reference is the smaller one's median, so that no site moves its own bound, however
slowly it grows, and an update beyond it is left out. In a session of split learning the largest value of a reply is
compared with those of the first rounds in the same way.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from confed.federation.algorithm import Algorithm
from confed.federation.atomic import write_atomically
from confed.federation.client_info import ClientInfo
from confed.federation.messages import Call, Message
from confed.federation.reading import FAULTS
from confed.federation.update_privacy import origin
from confed.privacy.protections import UPDATE

FEWEST = 3  # clients that a median is taken of, at least: of two, neither can be told from the other
HARMLESS = 0.1
"""An update of this share of the norm of what was sent passes always: no site can stop others by tiny updates."""

IN_SESSION = 100.0
"""Times the usual largest value that activations and gradients may have: honest ones differ by more than updates do."""

FIRST = 5  # rounds whose activations and gradients say what is usual: later some sites have learned more than others
RECENT = 50  # rounds of a site whose updates say what is usual


@dataclass(frozen=True)
class Bounds:
    """Bounds on one client's influence."""

    update: float = 10.0  # times the median norm of the round's updates; 0 for no bound
    weight: float = 10.0  # times the median number of examples of all members; 0 for no bound

    def __post_init__(self) -> None:
        for name, value in (("update", self.update), ("weight", self.weight)):
            if not (value == 0 or (math.isfinite(value) and value >= 1)):
                raise ValueError(f"the bound on an {name} must be a factor of at least 1, or 0 for none, got {value}")

    def apply_to(self, algorithm: Algorithm, calls: Sequence[Call]) -> bool:
        """Whether the replies to some calls are updates of a cohort, which are seen one by one and have a bound."""
        if self.update == 0 or algorithm.secure_sum is not None or algorithm.robust is not None:
            return False
        # The second call to a client is sent when the first one's reply was read.
        alone = len({call.client.id for call in calls}) == len(calls)
        return alone and all(call.action == UPDATE and not call.session for call in calls)


class NormHistory:
    """Sizes of the replies that counted, in a file where there is one: action -> site -> round -> size."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._sizes: dict[str, dict[str, dict[int, float]]] = {}
        self._examples: dict[str, int] = {}

    def begin(self, start: int) -> None:
        """Reading of what is on disk, without rounds that are done again."""
        self._sizes = {}
        if self._path is None or not self._path.is_file():
            return
        try:
            stored = json.loads(self._path.read_text(encoding="utf-8"))
            self._examples = {str(name): int(count) for name, count in stored["examples"].items()}
            for action, site, round, size in stored["sizes"]:
                if round < start:
                    self.note(action, site, round, float(size))
        except FAULTS as error:
            raise ValueError(
                f"{self._path} must hold the sizes of sites' updates as JSON, got {type(error).__name__}: {error}; put "
                "it back, or remove it to have the next round say what is usual"
            ) from error

    def save(self) -> None:
        """Writing of all sizes to disk."""
        if self._path is None:
            return
        sizes: list[tuple[str, str, int, float]] = []
        for action, sites in self._sizes.items():
            for site, rounds in sites.items():
                sizes += [(action, site, round, size) for round, size in rounds.items()]
        write_atomically(self._path, json.dumps({"examples": self._examples, "sizes": sizes}).encode(), sync=True)

    def note(self, action: str, site: str, round: int, size: float) -> None:
        """Record of a reply that counted; of several in a round the first."""
        rounds = self._sizes.setdefault(action, {}).setdefault(site, {})
        if size > 0:
            rounds.setdefault(round, size)
        while len(rounds) > RECENT:
            del rounds[min(rounds)]

    def meet(self, calls: Sequence[Call]) -> None:
        """Record of the sites' numbers of examples."""
        self._examples |= {call.client.id: call.client.num_examples for call in calls}

    def knows(self, action: str) -> bool:
        """Whether two sites have said what is usual."""
        return sum(bool(rounds) for rounds in self._sizes.get(action, {}).values()) > 1

    def most(self, call: Call, sizes: Mapping[str, float], factor: float) -> float:
        """The largest size of a reply, beside those of calls made together; infinity where one site alone answers."""
        usual = self._usual(call.action, sizes, FIRST if call.session and call.expects is None else RECENT)
        if call.session:
            return usual * (factor if call.expects is not None else IN_SESSION)
        usual *= factor * self._share(call.client.id)
        within = sizes.get(call.client.id, 0.0) <= usual
        return usual if within else max(usual, HARMLESS * _norm(call.message))

    def _usual(self, action: str, sizes: Mapping[str, float], rounds: int) -> float:
        past = self._sizes.get(action, {})
        medians: list[float] = []
        for name in past.keys() | sizes.keys():
            sent = [*past.get(name, {}).values(), *([sizes[name]] if sizes.get(name, 0.0) > 0 else [])][:rounds]
            medians += [statistics.median_low(sent)] if sent else []
        return statistics.median_low(medians) if len(medians) > 1 else math.inf

    def _share(self, name: str) -> float:
        """How many times the fewest examples a site has: it makes as many more steps."""
        return max(1.0, self._examples[name] / max(1, min(self._examples.values())))


def _norm(message: Message) -> float:
    floating = [tensor.double() for tensor in message.tensors.values() if tensor.is_floating_point()]
    return math.sqrt(sum(float((tensor * tensor).sum()) for tensor in floating))


def largest_of(message: Message) -> float:
    """Largest absolute value of a reply."""
    floating = [tensor for tensor in message.tensors.values() if tensor.is_floating_point() and tensor.numel()]
    return max((float(tensor.abs().max()) for tensor in floating), default=0.0)


def norm_of(call: Call, message: Message, changes: Sequence[str]) -> float:
    """Euclidean norm of the change in a reply, in double precision; integers do not count."""
    total = 0.0
    for name, tensor in message.tensors.items():
        if tensor.is_floating_point():
            with suppress(ValueError):  # a method's own: a count, a summary, a compressed update
                moved = tensor.double() - origin(name, tensor, call.message.tensors, changes)
                total += float((moved * moved).sum())
    return math.sqrt(total)


def most_of(norms: Mapping[str, float], factor: float) -> float:
    """The largest norm that an update may have; infinity where there are too few, or where most change nothing."""
    if factor == 0 or len(norms) < FEWEST:
        return math.inf
    # Of an even number the lower one: half of the cohort may be far away without moving it there.
    return factor * statistics.median_low(norms.values()) or math.inf


def scaled(call: Call, message: Message, changes: Sequence[str], scale: float) -> Message:
    """A reply whose change is scaled by a factor between 0 and 1."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in message.tensors.items():
        if tensor.is_floating_point():
            start = origin(name, tensor, call.message.tensors, changes).double()
            tensors[name] = (start * (1 - scale) + tensor.double() * scale).to(tensor.dtype)
        else:
            tensors[name] = tensor
    return Message(tensors, message.scalars)


def bounded_members(members: Sequence[ClientInfo], factor: float) -> tuple[list[ClientInfo], dict[str, str]]:
    """Members whose numbers of examples are at most so many times the median, and in words whose was more."""
    if factor == 0 or len(members) < 2:
        return list(members), {}
    most = int(factor * statistics.median_low(member.num_examples for member in members))
    sentences = {
        member.id: f"says that it has {member.num_examples} examples, and counts as one with {most}: {factor:g} times "
        "the median of all sites"
        for member in members
        if member.num_examples > most
    }
    return [replace(member, num_examples=min(member.num_examples, most)) for member in members], sentences

"""Asynchronous rounds in the simulator: buffered aggregation of updates that began with older models (FedBuff).

Source: Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation" (AISTATS 2022), read as its abstract
and in public implementations. M clients train at any time. Each sends its update when it has finished, another
client begins at once with the server's current model, and after K updates the server makes its step:

    x_{t+1} = server step along the mean over the K updates of s(τ_k) Δ_k,   Δ_k = y_k - x_{t - τ_k},
    s(τ) = (1 + τ)^-a,   a = 1/2 in the paper's experiments as its implementations give it,

where τ_k is the number of steps since client k began. A round of a run is one such step. Which client finishes when
follows from drawn training times, so that a run repeats to the last bit. The paper's mean is unweighted; here the
method's own weights stay, which are the clients' numbers of examples.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from confed.engines.participation import Participation, Population
from confed.engines.perform import Setup
from confed.federation.algorithm import Algorithm
from confed.federation.client_info import ClientInfo
from confed.federation.compression import Compression
from confed.federation.equivalence import unbuffered_hook
from confed.federation.messages import Call, Exchange, Message, Reply
from confed.federation.params import Params, is_change
from confed.federation.randomness import derive
from confed.federation.state import ServerState
from confed.federation.update_privacy import STATISTICS

Delays = Literal["half-normal", "exponential", "examples", "equal"]


@dataclass(frozen=True)
class Buffered:
    """Settings of asynchronous rounds."""

    size: int  # K, updates that the server waits for before it makes a step
    staleness: float = 0.5  # a, by which an update that is τ steps old counts (1 + τ)^-a
    # what a client's training time is: "half-normal", the absolute value of a standard normal number, or
    # "exponential", drawn anew each time; "examples", proportional to its number of training examples, with a mean of
    # 1 over the clients that have begun; "equal", 1
    delays: Delays = "half-normal"

    def scale(self, staleness: int) -> float:
        """s(τ)."""
        return float((1 + staleness) ** -self.staleness)


def unsupported_reason(algorithm: Algorithm) -> str:
    """Why a method has no asynchronous rounds, as the end of a sentence; "" where it has."""
    if algorithm.traits.centralised:
        return "all data are in one place"
    if not algorithm.traits.communicates:
        return "its clients send nothing"
    if algorithm.secure_sum is not None:
        return "under secure aggregation the server cannot scale single updates; leave algorithm.secure_sum out"
    if algorithm.update_privacy is not None:
        why = "the privacy accountant counts on cohorts that are drawn anew for every round"
        return f"{why}; leave algorithm.update_privacy out"
    if (reason := algorithm.unsupported_reason("robust")) and not algorithm.traits.synchronous:
        return f"its server uses more of the clients' replies than the mean of their updates: {reason}"
    return algorithm.traits.synchronous or unbuffered_hook(algorithm)


def check_buffered(
    settings: Buffered,
    algorithm: Algorithm,
    participation: Participation,
    clients: int,
    concurrency: int,
    downlink: Compression,
) -> None:
    """Check that a method and a federation can have asynchronous rounds."""
    reason = unsupported_reason(algorithm)
    if not downlink.plain:
        reason = reason or "with run.downlink all clients of a round train from the same model; leave it out"
    if reason:
        raise ValueError(f"run.async.buffer must be 0 for {algorithm.title}, got {settings.size}: {reason}")
    if participation.joins or participation.leaves:
        raise ValueError(f"run.async.buffer must be 0 together with run.joins and run.leaves, got {settings.size}")
    if settings.size > clients:
        raise ValueError(
            f"run.async.buffer must be at most the number of clients, {clients}, as a client is in a buffer once, got "
            f"{settings.size}"
        )
    if not 1 <= concurrency <= clients:
        raise ValueError(f"run.cohort must give between 1 and {clients} clients that train at once, got {concurrency}")


class Arrival(NamedTuple):
    """An update that reaches the server."""

    client: int  # number of the client in the population
    version: int  # number of the server's steps before the client began
    time: float  # when it arrives, in mean training times


class UpdateSource(Protocol):
    """What an asynchronous round asks about updates: drawn times in the simulator, sites that answer elsewhere."""

    settings: Buffered  # of the asynchronous rounds
    concurrency: int  # M, clients that train at any time

    def offer(self, round: int, server: ServerState) -> None:
        """Tells the model that clients begin with after so many rounds."""
        ...

    def __getitem__(self, round: int) -> tuple[Arrival, ...]:
        """The updates of the step that ends a round, in the order of the clients' numbers."""
        ...

    def needed(self, rounds: int) -> frozenset[int]:
        """Versions that clients still train with once so many rounds, at least one, are finished."""
        ...

    def clock(self, round: int) -> float:
        """Time at which a round ends."""
        ...


class Arrivals:
    """Updates in the order in which they arrive, round by round: a discrete-event simulation without any training."""

    def __init__(self, settings: Buffered, population: Population, concurrency: int, seed: int) -> None:
        self.settings, self.concurrency, self._population = settings, concurrency, population
        self._random = Random(derive(seed, 0, "", "arrivals"))
        self._training: list[tuple[float, int, int]] = []  # a heap of time of arrival, client, version
        self._unavailable: set[int] = set()
        self._rounds: list[tuple[Arrival, ...]] = []
        self._in_training: list[frozenset[int]] = []
        self._begun, self._examples = 0, 0
        self._clock = 0.0
        self._fill(0)

    def offer(self, round: int, server: ServerState) -> None:
        """Nothing: whoever begins is known beforehand."""

    def __getitem__(self, round: int) -> tuple[Arrival, ...]:
        """The updates of the step that ends a round, in the order of the clients' numbers."""
        while len(self._rounds) <= round:
            self._advance()
        return self._rounds[round]

    def needed(self, rounds: int) -> frozenset[int]:
        """Versions that clients still train with once so many rounds, at least one, are finished."""
        self[rounds - 1]
        return self._in_training[rounds - 1]

    def clock(self, round: int) -> float:
        """Time at which a round ends, in mean training times."""
        return max(arrival.time for arrival in self[round])

    def _advance(self) -> None:
        version, arrivals = len(self._rounds), list[Arrival]()
        while len(arrivals) < self.settings.size:
            time, client, began = heapq.heappop(self._training)
            self._clock = time
            arrivals.append(Arrival(client, began, time))
            self._fill(version)  # the client itself stays out: it is in the buffer
        self._unavailable.difference_update(arrival.client for arrival in arrivals)
        self._rounds.append(tuple(sorted(arrivals)))
        self._fill(version + 1)
        self._in_training.append(frozenset(began for _, _, began in self._training))

    def _fill(self, version: int) -> None:
        """Other clients begin, as long as fewer than M are training and one is free."""
        while len(self._training) < self.concurrency and len(self._unavailable) < len(self._population):
            client = self._draw()
            self._unavailable.add(client)
            heapq.heappush(self._training, (self._clock + self._duration(client), client, version))

    def _draw(self) -> int:
        """A free client, uniformly: by rejection while most are free, else from a list of those that are."""
        count = len(self._population)
        if 2 * len(self._unavailable) < count:
            while (client := self._random.randrange(count)) in self._unavailable:
                pass
            return client
        return self._random.choice([number for number in range(count) if number not in self._unavailable])

    def _duration(self, client: int) -> float:
        if self.settings.delays == "equal":
            return 1.0
        if self.settings.delays == "exponential":
            return self._random.expovariate(1.0)
        if self.settings.delays == "half-normal":
            return abs(self._random.gauss(0.0, 1.0))
        examples = max(self._population.info(client).num_examples, 1)
        self._begun, self._examples = self._begun + 1, self._examples + examples
        return examples * self._begun / self._examples


class BufferedRound:
    """One asynchronous round: an exchange in which clients began with earlier models."""

    def __init__(self, setup: Setup, arrivals: UpdateSource, server: ServerState, round: int) -> None:
        self.server, self._earlier = without_earlier(server)  # its state as the method knows it
        self._algorithm, self._settings = setup.algorithm, arrivals.settings
        # client -> number of rounds since the model that it began with
        self.staleness = {setup.population.info(a.client).id: round - a.version for a in arrivals[round]}
        self._round = round
        self._needed = arrivals.needed(round + 1) if round + 1 < setup.rounds else frozenset[int]()

    def exchange(self, plain: Exchange) -> Exchange:
        """An engine's exchange, with what clients were asked for when they began."""

        def ask(calls: Sequence[Call]) -> Iterator[Reply]:
            sent = [self._as_begun(call) for call in calls]
            answers = plain(sent)  # at once, so that clients begin
            return (self._corrected(*each) for each in zip(calls, sent, answers, strict=True))

        return ask

    def after(self, server: ServerState) -> ServerState:
        """The server's state after the round, with the earlier ones that clients in training began with."""
        slots = dict(server.slots)
        earlier = {**self._earlier, self._round: self.server}
        for version in sorted(self._needed & earlier.keys()):
            slots[f"{_EARLIER}:{version}:params"] = earlier[version].params
            slots |= {f"{_EARLIER}:{version}:slot:{name}": t for name, t in earlier[version].slots.items()}
        return replace(server, slots=slots)

    def _as_begun(self, call: Call) -> Call:
        staleness = self.staleness[call.client.id]
        if not staleness:
            return call
        version = self._round - staleness
        if version not in self._earlier:
            raise ValueError(
                f"asynchronous round {self._round + 1}: client {call.client.id!r} began with the model of round "
                f"{version}, which the server's state does not hold; a run goes on from its own checkpoints only"
            )
        return begun_call(self._algorithm, self._earlier[version], call.client)

    def _corrected(self, call: Call, sent: Call, reply: Reply) -> Reply:
        staleness = self.staleness[call.client.id]
        if reply.error is not None or not staleness:
            return reply
        scale, changes = self._settings.scale(staleness), self._algorithm.traits.changes
        tensors = _corrected(reply.message, sent.message, call.message, scale, changes)
        return replace(reply, message=Message(tensors, reply.message.scalars))


def begun_call(algorithm: Algorithm, server: ServerState, client: ClientInfo) -> Call:
    """What a server in a certain state asks a client for."""
    flow = algorithm.round(server, [client])
    (begun,) = next(flow)
    flow.close()
    return begun


_EARLIER = "earlier"  # prefix of the slots that hold earlier states of a server


def without_earlier(server: ServerState) -> tuple[ServerState, dict[int, ServerState]]:
    """A server's state as its method knows it, and its earlier states by version."""
    slots, older_params = dict[str, Params](), dict[int, dict[str, Params]]()
    for name, tensors in server.slots.items():
        if name.startswith(f"{_EARLIER}:"):
            version, group = name.split(":", 2)[1:]
            older_params.setdefault(int(version), {})[group] = tensors
        else:
            slots[name] = tensors
    earlier: dict[int, ServerState] = {}
    for version, groups in older_params.items():
        older = {name.removeprefix("slot:"): t for name, t in groups.items() if name.startswith("slot:")}
        earlier[version] = replace(server, round=version, params=groups["params"], slots=older)
    return replace(server, slots=slots), earlier


def _corrected(reply: Message, began: Message, now: Message, scale: float, changes: Sequence[str]) -> dict[str, Tensor]:
    """x_t + s (y - x_{t-τ}) for new values of what was received, s y for changes; whole numbers stay as they are.

    Running statistics of normalisation layers are no sums of updates: a difference of older ones could make a variance
    negative. They become (1 - s) x_t + s y.
    """
    tensors = dict[str, Tensor]()
    for name, value in reply.tensors.items():
        if not value.is_floating_point():
            tensors[name] = value
        elif name.endswith(STATISTICS) and name in now.tensors:
            tensors[name] = torch.lerp(now.tensors[name], value, scale)
        elif name not in began.tensors or is_change(name, changes):
            tensors[name] = value * scale
        else:
            tensors[name] = now.tensors[name] + scale * (value - began.tensors[name])
    return tensors

"""Simulator: all clients in one process, one after the other, and the loop over rounds."""

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Protocol

import torch
from torch import Tensor

from confed.engines.participation import Participation
from confed.engines.perform import Members, Population, Setup, Workspace, answer, perform
from confed.engines.timeline import SPANS, Span, Timeline
from confed.engines.traffic import Ledger, Traffic
from confed.federation.algorithm import Algorithm
from confed.federation.client_info import ClientInfo
from confed.federation.evaluation import read_counts, read_tallies
from confed.federation.messages import Call, Exchange, Flow, Message, Reply, drive
from confed.federation.ownership import MODALITIES, unowned
from confed.federation.params import Scalar, Scope, layout, pick, widest
from confed.federation.randomness import sample_cohort
from confed.federation.specs import task_spec
from confed.federation.state import ServerState, Store
from confed.privacy.guards import first_non_finite
from confed.privacy.protections import protect

__all__ = [
    "Executor",
    "InProcess",
    "Ledger",
    "Members",
    "Participation",
    "Population",
    "RoundRecord",
    "Setup",
    "Simulation",
    "Traffic",
    "Workspace",
    "check_finite",
    "perform",
    "simulate",
]  # fmt: skip

MOST = 10_000
"""So many clients are enough to meet every kind of client in any sensible federation."""


class Executor(Protocol):
    """Computes replies to calls, in their order; processes or machines may do it ahead of time.

    Attributes:
        timeline: where it writes down when clients were at work.
    """

    timeline: Timeline

    def __call__(self, calls: Sequence[Call], store: Store, round: int) -> Iterator[Reply]:
        """Replies in the order of the calls; the store holds the clients' states."""
        ...


class InProcess:
    """Answers calls one by one in this process, when they are asked for."""

    def __init__(self, setup: Setup, workspace: Workspace | None = None) -> None:
        self._setup = setup
        self.workspace = Workspace(setup.model(), setup.device) if workspace is None else workspace
        self.timeline = Timeline(0)

    def __call__(self, calls: Sequence[Call], store: Store, round: int) -> Iterator[Reply]:
        """See :class:`Executor`."""
        for call in calls:
            with self.timeline.span(call.client.id, call.action):
                reply = answer(self._setup, self.workspace, call, store, round)
            yield reply

    def close(self) -> None:
        """Nothing to release."""


Tallies = Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class RoundRecord:
    """What one round did.

    Attributes:
        round: its number, from 1.
        servers: every server's state after it.
        losses: client -> mean training loss.
        errors: client -> what went wrong there.
        bytes_up: client -> bytes it sent.
        bytes_down: client -> bytes it received.
        seconds: wall-clock time of the round without evaluation.
        traffic: action -> its calls and bytes.
        timeline: who was at work when, for the first spans of the first round.
    """

    round: int
    servers: Mapping[str, ServerState]
    losses: Mapping[str, float]
    errors: Mapping[str, str]
    bytes_up: Mapping[str, int]
    bytes_down: Mapping[str, int]
    seconds: float
    traffic: Mapping[str, Traffic] = field(default_factory=dict[str, Traffic])
    timeline: Sequence[Span] = ()


@dataclass
class _Books:
    """Records of a round while it lasts; see :class:`RoundRecord`."""

    ledger: Ledger = field(default_factory=Ledger)
    errors: dict[str, str] = field(default_factory=dict[str, str])
    losses: dict[str, float] = field(default_factory=dict[str, float])


_Part = tuple[ServerState, _Books]


class Simulation(AbstractContextManager["Simulation"]):
    """A federation on this machine: a setup, somewhere to keep client states, and who answers calls.

    Args:
        setup: the run.
        store: client states.
        executor: who computes replies; by default this process.
        cohort: clients per round, at most those present, or a function of their number; all by default.
        participation: clients that join late or leave early; none by default.
        by_size: draw cohorts with probabilities proportional to numbers of training examples.
        lenient: clients whose evaluation fails are left out of it; otherwise it ends the run.

    Attributes:
        unanswered: clients that were left out of the last evaluation, and why.
        attempt: drives a part of a round; by default once, so that a method's own errors are seen as they are.
    """

    def __init__(
        self,
        setup: Setup,
        store: Store,
        executor: "InProcess | Executor | None" = None,
        cohort: int | Callable[[int], int] | None = None,
        participation: Participation | None = None,
        by_size: bool = False,
        lenient: bool = False,
    ) -> None:
        if len(setup.population) == 0:
            raise ValueError("a federation needs at least one client, got 0")
        self.setup, self.store, self.lenient = setup, store, lenient
        self.unanswered = dict[str, str]()
        self.attempt: Callable[[Callable[[], _Part]], _Part] = lambda part: part()
        self.executor = InProcess(setup) if executor is None else executor
        size = len(setup.population) if cohort is None else cohort
        self.cohort: Callable[[int], int] = size if callable(size) else lambda present: min(size, present)
        self.participation = Participation() if participation is None else participation
        self.sizes: Tensor | None = None
        self._sum: tuple[Sequence[int], int] | None = None
        if by_size:  # asked for once: a population may have to look at every client's data for it
            infos = map(setup.population.info, range(len(setup.population)))
            self.sizes = torch.tensor([info.num_examples for info in infos], dtype=torch.int64)

    def __exit__(self, *exception: object) -> None:
        close = getattr(self.executor, "close", None)
        if close is not None:
            close()

    def start(self, workspace: Workspace) -> dict[str, ServerState]:
        """Every server's state before the first round."""
        # Distinct rules only.
        layouts = {
            id(scopes): scopes for scopes in (workspace.scopes(self.setup.algorithm, c) for c in self.clients(MOST))
        }
        scopes = widest(layouts.values())
        return self.setup.algorithm.init({n: t.cpu() for n, t in workspace.initial.items()}, scopes)

    def clients(self, most: int | None = None) -> list[ClientInfo]:
        """All clients, or the first ``most`` of them."""
        count = len(self.setup.population)
        return [self.setup.population.info(i) for i in range(count if most is None else min(most, count))]

    def observer(self, name: str) -> ClientInfo:
        """The client that stands for a place that takes no part: it may be sent everything that any client owns."""
        return ClientInfo(name, 0, self._everything, task_spec(self.setup.task_of(name)).head)

    @cached_property
    def _everything(self) -> tuple[str, ...]:
        """The modalities of all clients together; empty where they are not told apart."""
        sets = {client.modalities for client in self.clients(MOST)}
        return () if () in sets else tuple(m for m in MODALITIES if any(m in owned for owned in sets))

    def present(self, round: int, most: int | None = None) -> list[ClientInfo]:
        """The clients, or the first ``most`` of them, that belong to the federation in a round.

        Args:
            round: counted from 1; before the first round it is that one, after the last round the last.
            most: how many at most.
        """
        numbers = self.participation.members(self.setup.population, min(max(round, 1), self.setup.rounds))
        return [self.setup.population.info(number) for number in numbers[:most]]

    def sample(self, round: int) -> tuple[int, list[ClientInfo]]:
        """How many clients belong to the federation in a round, and its cohort.

        Args:
            round: number of finished rounds.
        """
        members = self.participation.members(self.setup.population, round + 1)
        there = len(members)
        sizes = self.sizes
        if sizes is not None and there < len(sizes):
            sizes = sizes[torch.tensor(members, dtype=torch.int64)]
        numbers = sample_cohort(there, self.cohort(there), self.setup.seed, round, sizes)
        return there, [self.setup.population.info(members[number]) for number in numbers]

    def examples(self, round: int) -> int:
        """Training examples of all clients that belong to the federation in a round; 0 if the method does not ask.

        Args:
            round: number of finished rounds.
        """
        if not self.setup.algorithm.traits.counts_examples:
            return 0
        members = self.participation.members(self.setup.population, round + 1)
        if self._sum is None or self._sum[0] != members:  # a population may have to look at every client's data for it
            self._sum = (members, sum(self.setup.population.info(number).num_examples for number in members))
        return self._sum[1]

    def exchange(
        self,
        round: int,
        ledger: Ledger,
        errors: dict[str, str],
        losses: dict[str, float],
        server: str = "main",
        timeline: Timeline | None = None,
    ) -> Exchange:
        """An exchange that also records calls, bytes, losses and errors."""
        timeline = Timeline(0) if timeline is None else timeline

        def ask(calls: Sequence[Call]) -> Iterator[Reply]:
            # Asked for before the flow reads a reply, so that processes are at work while it does other things.
            answers = self.executor(calls, self.store, round)
            return book(calls, answers, time.perf_counter())

        def book(calls: Sequence[Call], answers: Iterator[Reply], asked: float) -> Iterator[Reply]:
            if calls and calls[0].session:  # what the server does before it reads the first reply
                timeline.add(server, calls[0].action, asked, time.perf_counter())
            failed = 0
            for call, reply in zip(calls, answers, strict=True):
                ledger.count(call, reply)
                if reply.error is not None:
                    failed += 1
                    errors.setdefault(call.client.id, reply.error)  # what follows from it is no news
                elif "loss" in reply.message.scalars:
                    losses[call.client.id] = float(reply.message.scalars["loss"])
                with timeline.span(server, call.action):
                    yield reply
            if calls and failed == len(calls) and not calls[0].session:
                first = next(iter(errors.items()))
                raise RuntimeError(f"every client failed in round {round + 1}; {first[0]}: {first[1]}")

        return ask

    def evaluate(
        self,
        servers: Mapping[str, ServerState],
        round: int,
        *,
        split: str,
        limit: int = 0,
        most: int | None = 100,
        counted: Callable[[str, str, Mapping[str, Tensor]], None] | None = None,
    ) -> dict[str, dict[str, Tallies]]:
        """Global and personal models on the present clients' examples, and the global one in unseen places.

        Args:
            servers: every server's state.
            round: number of finished rounds.
            split: "validation" or "test".
            limit: examples per client; 0 for all.
            most: evaluate the first so many clients; None for all.
            counted: told, where the task counts things for metrics that are no means over examples, the view, the
                client or place, and its counts, which may be added to those of others.

        Returns:
            View ("global", "personal", "unseen") -> client or place -> tallies.

        Raises:
            RuntimeError: an evaluation failed; names the client and the error.
        """
        algorithm = self.setup.algorithm
        infos = self.present(round, most)
        if algorithm.traits.has_global and not algorithm.traits.private_heads:  # there is no head for an unseen place
            infos += [self.observer(name) for name in self.setup.observers]
        scalars = {"split": split, "limit": limit}
        calls = [Call(c, "evaluate", Message(self.shared(servers, c), scalars)) for c in infos]
        result: dict[str, dict[str, Tallies]] = {"global": {}, "personal": {}, "unseen": {}}
        self.unanswered = {}
        for call, reply in zip(calls, self.executor(calls, self.store, round), strict=True):
            if reply.error is not None:
                if self.lenient:
                    self.unanswered[call.client.id] = reply.error
                    continue
                raise RuntimeError(f"evaluation on {call.client.id!r} failed: {reply.error}")
            for view in ("global", "personal"):
                tallies = read_tallies(reply.message.scalars, view)
                if tallies:
                    place = "unseen" if call.client.id in self.setup.observers else view
                    result[place][call.client.id] = tallies
                    if counted is not None and (counts := read_counts(reply.message.tensors, view)):
                        counted(place, call.client.id, counts)
        return result

    def shared(self, servers: Mapping[str, ServerState], client: ClientInfo) -> Mapping[str, Tensor]:
        """The shared tensors a client would receive, and those that servers keep to themselves, from all servers."""
        tensors: dict[str, Tensor] = {}
        for server in servers.values():
            tensors.update(self.setup.algorithm.broadcast(server, client).tensors)
        # What lives on a server only is put to it: the simulator alone may look at a model whose parts nobody else
        # has together.
        for server in servers.values():
            foreign = unowned(server.params, client.modalities)
            scopes = layout(server.params, self.setup.algorithm.rules(client), frozen=foreign, partial=True)
            tensors.update(pick(server.params, scopes, Scope.SERVER))
        return tensors

    def examine(
        self, jobs: Sequence[tuple[str, Mapping[str, Tensor], Mapping[str, Scalar]]], round: int
    ) -> Iterator[Message]:
        """Given models on given places' test examples, example by example; for analysis.

        Args:
            jobs: client or observer id, the model's trained tensors, and scalars of the action ``examine``.
            round: number of finished rounds.

        Raises:
            RuntimeError: a job failed.
        """
        calls = [Call(ClientInfo(place, 0), "examine", Message(tensors, how)) for place, tensors, how in jobs]
        for reply in self.executor(calls, self.store, round):
            if reply.error is not None:
                raise RuntimeError(f"evaluation on {reply.client.id!r} failed: {reply.error}")
            yield reply.message


def simulate(simulation: Simulation, servers: Mapping[str, ServerState], start: int = 0) -> Iterator[RoundRecord]:
    """Runs the rounds ``start`` to the last, and the method's finish; yields after each.

    The caller logs, evaluates, plots, checkpoints or stops: there are no callbacks.

    Args:
        simulation: the federation.
        servers: every server's state after ``start`` rounds.
        start: number of finished rounds; ``setup.rounds + 1`` means that the finish is done too.
    """
    setup = simulation.setup
    servers = dict(servers)
    for round in range(start, setup.rounds + 1):
        began = time.perf_counter()
        simulation.store.begin(round + 1)
        books = _Books()
        # Of a session's many short calls a reader wants to see who waits for whom; the first of them show it.
        timeline = Timeline(SPANS if round == 0 and len(setup.algorithm.phases()) > 1 else 0)
        simulation.executor.timeline = timeline
        if round < setup.rounds:
            there, cohort = simulation.sample(round)
            known = {"clients": there, "examples": simulation.examples(round), "rounds": setup.rounds}
            for name, flow in setup.algorithm.phases():
                server = replace(servers[name], **known, local=setup.local)
                servers[name], books = _drive(simulation, partial(flow, server, cohort), round, books, name, timeline)
        else:
            name = next(iter(servers))
            if type(setup.algorithm).finish is Algorithm.finish:
                return
            flow = partial(setup.algorithm.finish, servers[name], simulation.present(round))
            servers[name], books = _drive(simulation, flow, round, books)
        for name, server in servers.items():
            check_finite(name, server)
        yield RoundRecord(
            round + 1, dict(servers), books.losses, books.errors, books.ledger.up, books.ledger.down,
            time.perf_counter() - began, books.ledger.actions, timeline.spans,
        )  # fmt: skip


def _drive(
    simulation: Simulation,
    flow: Callable[[], Flow],
    round: int,
    before: _Books,
    server: str = "",
    timeline: Timeline | None = None,
) -> _Part:
    """The server's state after a part of a round, and the records; of the finish, which has no ``server``, too."""
    setup = simulation.setup

    def part() -> _Part:
        books = copy.deepcopy(before)  # another attempt begins with the same ones
        plain = simulation.exchange(round, books.ledger, books.errors, books.losses, server or "main", timeline)
        if not server:
            return drive(flow(), plain), books
        exchange = protect(setup.algorithm, plain, seed=setup.seed, round=round, errors=books.errors)
        return replace(drive(flow(), exchange), local=None), books

    return simulation.attempt(part)


def check_finite(name: str, server: ServerState) -> None:
    """Check that a server's state is finite before it is kept: from any other no run can go on.

    Raises:
        RuntimeError: a value among its parameters or slots is a NaN or an infinity; names the tensor.
    """
    for group, tensors in {"parameters": server.params, **server.slots}.items():
        if (lost := first_non_finite(tensors)) is not None:
            raise RuntimeError(
                f"server {name!r}: {lost!r} of its {group} holds a NaN or an infinity after round {server.round}; the "
                "last checkpoint is sound"
            )

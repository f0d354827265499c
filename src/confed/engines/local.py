"""Simulator: the loop over rounds, with all clients on this machine."""

import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from confed.engines.buffered import Arrivals, Buffered, BufferedRound, UpdateSource, check_buffered
from confed.engines.dispatch import Dispatcher
from confed.engines.executor import Executor, InProcess
from confed.engines.participation import Members, Participation, Population
from confed.engines.perform import Setup, Workspace, opened, perform
from confed.engines.usage import SPANS, Ledger, Span, Timeline, Traffic
from confed.federation.algorithm import Algorithm
from confed.federation.client_info import ClientInfo
from confed.federation.compression import Downlink
from confed.federation.equivalence import unbatchable_evaluation
from confed.federation.evaluation import read_counts, read_tallies
from confed.federation.messages import Call, Exchange, Flow, Message, Reply, drive
from confed.federation.ownership import MODALITIES, unowned
from confed.federation.params import Scalar, Scope, layout, pick, widest
from confed.federation.randomness import sample_cohort
from confed.federation.specs import task_spec
from confed.federation.state import ServerState, Store
from confed.privacy.protections import first_non_finite, protect

Tallies = Mapping[str, tuple[float, float]]
MOST = 10_000  # number of clients among which every kind of client is assumed to occur


class Membership:
    """Clients of a run, round by round."""

    def __init__(
        self,
        setup: Setup,
        cohort: int | Callable[[int], int] | None = None,
        participation: Participation | None = None,
        by_size: bool = False,
    ) -> None:
        if len(setup.population) == 0:
            raise ValueError("a federation needs at least one client, got 0")
        self.setup = setup
        size = len(setup.population) if cohort is None else cohort
        self.cohort: Callable[[int], int] = size if callable(size) else lambda present: min(size, present)
        self.participation = Participation() if participation is None else participation
        self.sizes: Tensor | None = None
        self._sum: tuple[Sequence[int], int] | None = None
        if by_size:  # asked for once: a population may have to look at every client's data for it
            infos = map(setup.population.info, range(len(setup.population)))
            self.sizes = torch.tensor([info.num_examples for info in infos], dtype=torch.int64)

    def clients(self, most: int | None = None) -> list[ClientInfo]:
        """All clients, or the first ``most`` of them."""
        count = len(self.setup.population)
        return [self.setup.population.info(i) for i in range(count if most is None else min(most, count))]

    def observer(self, name: str) -> ClientInfo:
        """An unseen place as a client, which may be sent the tensors of all modalities."""
        return ClientInfo(name, 0, self._everything, task_spec(self.setup.task_of(name)).head)

    @cached_property
    def _everything(self) -> tuple[str, ...]:
        """The modalities of all clients together; empty where they are not told apart."""
        sets = {client.modalities for client in self.clients(MOST)}
        anywhere = set[str]().union(*sets)
        return () if () in sets else tuple(modality for modality in MODALITIES if modality in anywhere)

    def present(self, round: int, most: int | None = None) -> list[ClientInfo]:
        """The clients, or the first ``most`` of them, that belong to the federation in a round."""
        numbers = self.participation.members(self.setup.population, min(max(round, 1), self.setup.rounds))
        return [self.setup.population.info(number) for number in numbers[:most]]

    def sample(self, round: int) -> tuple[int, list[ClientInfo]]:
        """How many clients belong to the federation in a round, and its cohort."""
        members = self.participation.members(self.setup.population, round + 1)
        member_count = len(members)
        sizes = self.sizes
        if sizes is not None and member_count < len(sizes):
            sizes = sizes[torch.tensor(members, dtype=torch.int64)]
        numbers = sample_cohort(member_count, self.cohort(member_count), self.setup.seed, round, sizes)
        return member_count, [self.setup.population.info(members[number]) for number in numbers]

    def examples(self, round: int) -> int:
        """Training examples of all clients that belong to the federation in a round; 0 if the method does not ask."""
        if not self.setup.algorithm.traits.counts_examples:
            return 0
        members = self.participation.members(self.setup.population, round + 1)
        if self._sum is None or self._sum[0] != members:  # a population may have to look at every client's data for it
            self._sum = (members, sum(self.setup.population.info(number).num_examples for number in members))
        return self._sum[1]


class Simulation(Membership, AbstractContextManager["Simulation"]):
    """A federation on this machine: a setup, somewhere to keep client states, and who answers calls.

    Attributes:
        arrivals: of asynchronous rounds: which updates end which round; None where rounds are synchronous.
        unanswered: clients that were left out of the last evaluation, and why.
        attempt: drives a part of a round; by default once, so that a method's own errors are seen as they are.
        check: called with a server's name and state before they are kept; raises where no run can go on from them.
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
        buffered: Buffered | None = None,
    ) -> None:
        super().__init__(setup, cohort, participation, by_size)
        self.arrivals: UpdateSource | None = None
        if buffered is not None:
            concurrency = self.cohort(len(setup.population))
            check_buffered(
                buffered, setup.algorithm, self.participation, len(setup.population), concurrency, setup.downlink
            )
            self.arrivals = Arrivals(buffered, setup.population, concurrency, setup.seed)
        self.store, self.lenient = store, lenient
        self.unanswered = dict[str, str]()
        # What personal models scored, until their clients are asked for anything else.
        self._personal = dict[str, dict[tuple[str, int], tuple[Tallies, Mapping[str, Tensor]]]]()
        self.attempt: Callable[[Callable[[], Any]], Any] = lambda act: act()
        self.check: Callable[[str, ServerState], None] = check_finite
        self.answered: Callable[[int, int, int], None] = lambda round, replies, calls: None
        self.executor = InProcess(setup) if executor is None else executor

    def __exit__(self, *exception: object) -> None:
        if isinstance(self.executor, Dispatcher):
            self.executor.close()

    def start(self, workspace: Workspace) -> dict[str, ServerState]:
        """Every server's state before the first round."""
        # Distinct rules only.
        layouts: dict[int, Mapping[str, Scope]] = {}
        for client in self.clients(MOST):
            scopes = workspace.scopes(self.setup.algorithm, client)
            layouts[id(scopes)] = scopes
        scopes = widest(layouts.values())
        return self.setup.algorithm.init({n: t.cpu() for n, t in workspace.initial.items()}, scopes)

    def sample(self, round: int) -> tuple[int, list[ClientInfo]]:
        """How many clients belong to the federation in a round, and whose updates end it."""
        if self.arrivals is None:
            return super().sample(round)
        population = self.setup.population
        return len(population), [population.info(arrival.client) for arrival in self.arrivals[round]]

    def offer(self, servers: Mapping[str, ServerState], round: int) -> None:
        """Tells clients of asynchronous rounds the model that they begin with."""
        if self.arrivals is not None:
            population = {"clients": len(self.setup.population), "examples": self.examples(round)}
            (server,) = servers.values()
            self.arrivals.offer(round, replace(server, **population, rounds=self.setup.rounds, local=self.setup.local))

    def exchange(
        self,
        round: int,
        records: "RoundRecords",
        server: str,
        timeline: Timeline,
    ) -> Exchange:
        """An exchange that also records calls, bytes, losses and errors."""

        def ask(calls: Sequence[Call]) -> Iterator[Reply]:
            for call in calls:
                self._personal.pop(call.client.id, None)
            # Asked for before the flow reads a reply, so that processes are at work while it does other things.
            answers = self.executor(calls, self.store, round)
            return book(calls, answers, time.perf_counter())

        def book(calls: Sequence[Call], answers: Iterator[Reply], began: float) -> Iterator[Reply]:
            if calls and calls[0].session:  # what the server does before it reads the first reply
                timeline.add(server, calls[0].action, began, time.perf_counter())
            failed = 0
            for number, (call, sent) in enumerate(zip(calls, answers, strict=True), 1):
                records.ledger.count(call, sent)
                reply = opened(self.setup, call, sent)
                self.answered(round, number, len(calls))
                if reply.error is not None:
                    failed += 1
                    records.errors.setdefault(call.client.id, reply.error)  # what follows from it is no news
                elif "loss" in reply.message.scalars:
                    records.losses[call.client.id] = float(reply.message.scalars["loss"])
                with timeline.span(server, call.action):
                    yield reply
            if calls and failed == len(calls) and not calls[0].session:
                client, error = next(iter(records.errors.items()))
                raise RuntimeError(f"every client failed in round {round + 1}; {client}: {error}")

        return ask

    def evaluate(
        self,
        servers: Mapping[str, ServerState],
        round: int,
        *,
        split: str,
        limit: int = 0,
        most: int | None = 100,
        among: Container[str] | None = None,
        counted: Callable[[str, str, Mapping[str, Tensor]], None] | None = None,
    ) -> dict[str, dict[str, Tallies]]:
        """Global and personal models on the present clients' examples, and the global one in unseen places.

        In the simulator a personal model whose client was asked for nothing since is not evaluated again.
        """
        algorithm = self.setup.algorithm
        infos = [info for info in self.present(round, most) if among is None or info.id in among]
        if algorithm.global_model == "alone":  # else an unseen place would lack a part
            infos += [self.observer(name) for name in self.setup.observers]
        # Methods that evaluate in their own way may show a personal model what others have learned.
        alone = not self.lenient and not unbatchable_evaluation(algorithm)
        key = split, limit
        known = {name: scores[key] for name, scores in self._personal.items() if key in scores}
        calls = list[Call]()
        for info in infos:
            scalars: dict[str, Scalar] = {"split": split, "limit": limit}
            if self._at_once:
                scalars["at_once"] = True
            if info.id in known:
                scalars["personal"] = False
            calls.append(Call(info, "evaluate", Message(self.shared(servers, info), scalars)))
        result: dict[str, dict[str, Tallies]] = {"global": {}, "personal": {}, "unseen": {}}
        self.unanswered = {}
        for call, reply in zip(calls, self.executor(calls, self.store, round), strict=True):
            if reply.error is not None:
                if self.lenient:
                    self.unanswered[call.client.id] = reply.error
                    continue
                raise RuntimeError(f"evaluation on {call.client.id!r} failed: {reply.error}")
            name, message = call.client.id, reply.message
            views: dict[str, tuple[Tallies, Mapping[str, Tensor]]] = {}
            for view in ("global", "personal"):
                views[view] = read_tallies(message.scalars, view), read_counts(message.tensors, view)
            views["personal"] = known.get(name, views["personal"])
            if alone and name not in self.setup.observers:
                self._personal.setdefault(name, {})[key] = views["personal"]
            for view, (tallies, counts) in views.items():
                if tallies:
                    place = "unseen" if name in self.setup.observers else view
                    result[place][name] = tallies
                    if counted is not None and counts:
                        counted(place, name, counts)
        return result

    @property
    def _at_once(self) -> bool:
        """Whether own models are evaluated at once: where all clients take part in every round."""
        population = len(self.setup.population)
        return self.setup.batch_clients > 1 and self.arrivals is None and self.cohort(population) >= population

    def shared(self, servers: Mapping[str, ServerState], client: ClientInfo) -> Mapping[str, Tensor]:
        """The shared tensors a client would receive, and those that servers keep to themselves, from all servers."""
        tensors: dict[str, Tensor] = {}
        for server in servers.values():
            tensors.update(self.setup.algorithm.broadcast(server, client).tensors)
        # Tensors of a server only are added: only the simulator may evaluate a model whose parts no party has together.
        for server in servers.values():
            foreign = unowned(server.params, client.modalities)
            scopes = layout(server.params, self.setup.algorithm.rules(client), frozen=foreign, partial=True)
            tensors.update(pick(server.params, scopes, Scope.SERVER))
        return tensors

    def examine(
        self, jobs: Sequence[tuple[str, Mapping[str, Tensor], Mapping[str, Scalar]]], round: int
    ) -> Iterator[Message]:
        """Given models on given places' test examples, example by example; for analysis.

        Examples that are shown in the same way to few of these models are not kept for later
        (:mod:`confed.federation.frozen_features`).
        """
        passes = Counter((place, frozenset(how.items())) for place, _, how in jobs)
        calls = [
            Call(
                ClientInfo(place, 0),
                "examine",
                Message(tensors, {**how, "passes": passes[place, frozenset(how.items())]}),
            )
            for place, tensors, how in jobs
        ]
        for reply in self.executor(calls, self.store, round):
            if reply.error is not None:
                raise RuntimeError(f"evaluation on {reply.client.id!r} failed: {reply.error}")
            yield reply.message


def check_finite(name: str, server: ServerState) -> None:
    """Check that a server's state is finite before it is kept: from any other no run can go on."""
    for group, tensors in {"parameters": server.params, **server.slots}.items():
        if (lost := first_non_finite(tensors)) is not None:
            raise RuntimeError(
                f"server {name!r}: {lost!r} of its {group} holds a NaN or an infinity after round {server.round}; the "
                "last checkpoint is sound"
            )


# Simulator: the loop over rounds, with all clients on this machine --------------------------------------------

__all__ = ["Executor", "Members", "Population", "perform"]


@dataclass(frozen=True)
class RoundRecord:
    """Record of one round."""

    round: int  # its number, from 1
    servers: Mapping[str, ServerState]  # every server's state after it
    losses: Mapping[str, float]  # client -> mean training loss
    errors: Mapping[str, str]
    bytes_up: Mapping[str, int]  # client -> bytes it sent
    bytes_down: Mapping[str, int]  # client -> bytes it received
    seconds: float  # wall-clock time of the round without evaluation
    traffic: Mapping[str, Traffic] = field(default_factory=dict[str, Traffic])  # action -> its calls and bytes
    timeline: Sequence[Span] = ()  # when clients and servers were at work, for the first spans of the first round
    # of asynchronous rounds: when the round ended, in mean training times; None of synchronous ones
    clock: float | None = None
    # of asynchronous rounds: client -> the number of rounds since the model that it began with
    staleness: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass
class RoundRecords:
    """Records of a round while it lasts; see :class:`RoundRecord`."""

    ledger: Ledger = field(default_factory=Ledger)
    errors: dict[str, str] = field(default_factory=dict[str, str])
    losses: dict[str, float] = field(default_factory=dict[str, float])


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
        # Of a session's many short calls a reader wants to see who waits for whom; the first of them show it.
        timeline = Timeline(SPANS if round == 0 and len(setup.algorithm.phases()) > 1 else 0)
        simulation.executor.timeline = timeline
        records, asynchronous = RoundRecords(), dict[str, Any]()
        if round < setup.rounds:
            if simulation.arrivals is not None:
                simulation.offer(servers, round)
            present, cohort = simulation.sample(round)
            population = {"clients": present, "examples": simulation.examples(round), "rounds": setup.rounds}
            for name, flow in setup.algorithm.phases():
                server = replace(servers[name], **population, local=setup.local)
                between: Downlink | BufferedRound | None = None
                if not setup.downlink.plain:
                    between = Downlink(setup.downlink, server, setup.seed, round)
                elif simulation.arrivals is not None:
                    between = BufferedRound(setup, simulation.arrivals, server, round)
                    asynchronous = {"clock": simulation.arrivals.clock(round), "staleness": between.staleness}
                part = partial(flow, server if between is None else between.server, cohort)
                servers[name], records = _drive(simulation, part, round, records, name, timeline, between)
        else:
            name = next(iter(servers))
            if type(setup.algorithm).finish is Algorithm.finish:
                return
            part = partial(setup.algorithm.finish, servers[name], simulation.present(round))
            servers[name], records = _drive(simulation, part, round, records, "", timeline)
        for name, server in servers.items():
            simulation.check(name, server)
        yield RoundRecord(
            round + 1, dict(servers), records.losses, records.errors, records.ledger.up, records.ledger.down,
            time.perf_counter() - began, records.ledger.actions, timeline.spans, **asynchronous,
        )  # fmt: skip


def _drive(
    simulation: Simulation,
    flow: Callable[[], Flow],
    round: int,
    before: RoundRecords,
    server: str,
    timeline: Timeline,
    between: Downlink | BufferedRound | None = None,
) -> tuple[ServerState, RoundRecords]:
    """The server's state after a part of a round, and the records; of the finish, which has no ``server``, too."""
    setup = simulation.setup

    def drive_once() -> tuple[ServerState, RoundRecords]:
        records = deepcopy(before)  # another attempt begins with the same ones
        exchange = simulation.exchange(round, records, server or "main", timeline)
        if not server:
            return drive(flow(), exchange), records
        if between is not None:
            exchange = between.exchange(exchange)
        exchange = protect(
            setup.algorithm, exchange, seed=setup.seed, round=round, errors=records.errors, signatures=setup.signatures
        )
        return replace(drive(flow(), exchange), local=None), records

    state, records = simulation.attempt(drive_once)
    return (state if between is None else between.after(state)), records

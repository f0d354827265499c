"""The simulator: one workspace, clients one after the other, the loop in plain sight."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from confed.engines.perform import Members, Population, Setup, Workspace, answer, perform
from confed.federation.algorithm import Algorithm, read_tallies
from confed.federation.messages import Call, ClientInfo, Exchange, Message, Reply, drive
from confed.federation.params import widest
from confed.federation.randomness import sample_cohort
from confed.federation.state import ServerState, Store
from confed.federation.wire import size

__all__ = [
    "Answerer", "InProcess", "Ledger", "Members", "Population", "RoundRecord", "Setup", "Simulation", "Workspace",
    "perform", "simulate",
]  # fmt: skip


@dataclass
class Ledger:
    """Bytes per client, counted from the serialised messages; what a client's refused update cost is not counted."""

    up: dict[str, int] = field(default_factory=dict[str, int])
    down: dict[str, int] = field(default_factory=dict[str, int])

    def count(self, call: Call, reply: Reply) -> None:
        """Counts one call and its reply."""
        name = call.client.id
        self.down[name] = self.down.get(name, 0) + size(call.message)
        if reply.error is None:
            self.up[name] = self.up.get(name, 0) + size(reply.message)


class Answerer(Protocol):
    """Computes replies to calls, in their order; processes or machines may do it ahead of time."""

    def __call__(self, calls: Sequence[Call], store: Store, round: int) -> Iterator[Reply]:
        """Replies in the order of the calls; the store holds the clients' states."""
        ...


class InProcess:
    """Answers calls one by one in this process, when they are asked for."""

    def __init__(self, setup: Setup, workspace: Workspace | None = None) -> None:
        self._setup = setup
        self.workspace = Workspace(setup.model(), setup.device) if workspace is None else workspace

    def __call__(self, calls: Sequence[Call], store: Store, round: int) -> Iterator[Reply]:
        """See :class:`Answerer`."""
        for call in calls:
            yield answer(self._setup, self.workspace, call, store, round)

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
    """

    round: int
    servers: Mapping[str, ServerState]
    losses: Mapping[str, float]
    errors: Mapping[str, str]
    bytes_up: Mapping[str, int]
    bytes_down: Mapping[str, int]
    seconds: float


class Simulation(AbstractContextManager["Simulation"]):
    """A federation on this machine: a setup, somewhere to keep client states, and who answers calls.

    Args:
        setup: the run.
        store: client states.
        answerer: who computes replies; by default this process.
        cohort: clients per round; all by default.
    """

    def __init__(
        self,
        setup: Setup,
        store: Store,
        answerer: "InProcess | Answerer | None" = None,
        cohort: int | None = None,
    ) -> None:
        if len(setup.population) == 0:
            raise ValueError("a federation needs at least one client, got 0")
        self.setup, self.store = setup, store
        self.answerer = InProcess(setup) if answerer is None else answerer
        self.cohort = len(setup.population) if cohort is None else cohort

    def __exit__(self, *exception: object) -> None:
        close = getattr(self.answerer, "close", None)
        if close is not None:
            close()

    def start(self, workspace: Workspace) -> dict[str, ServerState]:
        """Every server's state before the first round."""
        # Distinct rules only; ten thousand clients are enough to meet them all in any sensible federation.
        layouts = {
            id(scopes): scopes for scopes in (workspace.scopes(self.setup.algorithm, c) for c in self.clients(10_000))
        }
        scopes = widest(layouts.values())
        return self.setup.algorithm.init({n: t.cpu() for n, t in workspace.initial.items()}, scopes)

    def clients(self, most: int | None = None) -> list[ClientInfo]:
        """All clients, or the first ``most`` of them."""
        count = len(self.setup.population)
        return [self.setup.population.info(i) for i in range(count if most is None else min(most, count))]

    def exchange(self, round: int, ledger: Ledger, errors: dict[str, str], losses: dict[str, float]) -> Exchange:
        """An exchange that also keeps the books."""

        def ask(calls: Sequence[Call]) -> Iterator[Reply]:
            failed = 0
            for call, reply in zip(calls, self.answerer(calls, self.store, round), strict=True):
                ledger.count(call, reply)
                if reply.error is not None:
                    failed += 1
                    errors[call.client.id] = reply.error
                elif "loss" in reply.message.scalars:
                    losses[call.client.id] = float(reply.message.scalars["loss"])
                yield reply
            if calls and failed == len(calls):
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
    ) -> dict[str, dict[str, Tallies]]:
        """Global and personal models on the clients' examples, and the global one in unseen places.

        Returns:
            View ("global", "personal", "unseen") -> client or place -> tallies.
        """
        algorithm = self.setup.algorithm
        infos = self.clients(most)
        if algorithm.has_global:
            modalities = self.setup.population.info(0).modalities
            infos += [ClientInfo(name, 0, modalities) for name in self.setup.observers]
        scalars = {"split": split, "limit": limit}
        calls = [Call(c, "evaluate", Message(self.shared(servers, c), scalars)) for c in infos]
        result: dict[str, dict[str, Tallies]] = {"global": {}, "personal": {}, "unseen": {}}
        for call, reply in zip(calls, self.answerer(calls, self.store, round), strict=True):
            if reply.error is not None:
                raise RuntimeError(f"evaluation on {call.client.id!r} failed: {reply.error}")
            for view in ("global", "personal"):
                tallies = read_tallies(reply.message.scalars, view)
                if tallies:
                    place = "unseen" if call.client.id in self.setup.observers else view
                    result[place][call.client.id] = tallies
        return result

    def shared(self, servers: Mapping[str, ServerState], client: ClientInfo) -> Mapping[str, Tensor]:
        """The shared tensors a client would receive, from all servers."""
        tensors: dict[str, Tensor] = {}
        for server in servers.values():
            tensors.update(self.setup.algorithm.broadcast(server, client).tensors)
        return tensors

    def examine(self, jobs: Sequence[tuple[str, Mapping[str, Tensor]]], round: int) -> Iterator[Message]:
        """Given models on given places' test examples, example by example; for analysis.

        Args:
            jobs: client or observer id, and the model's trained tensors.
            round: number of finished rounds.

        Raises:
            RuntimeError: a job failed.
        """
        calls = [Call(ClientInfo(place, 0), "examine", Message(tensors)) for place, tensors in jobs]
        for reply in self.answerer(calls, self.store, round):
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
        ledger, errors, losses = Ledger(), dict[str, str](), dict[str, float]()
        exchange = simulation.exchange(round, ledger, errors, losses)
        if round < setup.rounds:
            numbers = sample_cohort(len(setup.population), simulation.cohort, setup.seed, round)
            cohort = [setup.population.info(number) for number in numbers]
            for name, flow in setup.algorithm.phases():
                server = replace(servers[name], clients=len(setup.population))
                servers[name] = drive(flow(server, cohort), exchange)
        else:
            name = next(iter(servers))
            if type(setup.algorithm).finish is Algorithm.finish:
                return
            servers[name] = drive(setup.algorithm.finish(servers[name], simulation.clients()), exchange)
        yield RoundRecord(round + 1, dict(servers), losses, errors, ledger.up, ledger.down, time.perf_counter() - began)

"""Simulator: the loop over rounds, with all clients on this machine."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from confed.engines.buffered import BufferedRound
from confed.engines.executor import Executor, InProcess
from confed.engines.participation import Participation
from confed.engines.perform import Setup, Workspace, perform
from confed.engines.population import Members, Population
from confed.engines.simulation import Simulation, check_finite
from confed.engines.timeline import SPANS, Span, Timeline
from confed.engines.traffic import Ledger, Traffic
from confed.federation.algorithm import Algorithm
from confed.federation.messages import Exchange, Flow, drive
from confed.federation.state import ServerState
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


@dataclass(frozen=True)
class RoundRecord:
    """Record of one round.

    Attributes:
        round: its number, from 1.
        servers: every server's state after it.
        losses: client -> mean training loss.
        errors: client -> error.
        bytes_up: client -> bytes it sent.
        bytes_down: client -> bytes it received.
        seconds: wall-clock time of the round without evaluation.
        traffic: action -> its calls and bytes.
        timeline: when clients and servers were at work, for the first spans of the first round.
        clock: of asynchronous rounds: when the round ended, in mean training times; None of synchronous ones.
        staleness: of asynchronous rounds: client -> the number of rounds since the model that it began with.
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
    clock: float | None = None
    staleness: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass
class _Records:
    """Records of a round while it lasts; see :class:`RoundRecord`."""

    ledger: Ledger = field(default_factory=Ledger)
    errors: dict[str, str] = field(default_factory=dict[str, str])
    losses: dict[str, float] = field(default_factory=dict[str, float])

    def copy(self) -> "_Records":
        """The same, to which another attempt adds."""
        return _Records(self.ledger.copy(), dict(self.errors), dict(self.losses))


_Part = tuple[ServerState, _Records]


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
        records = _Records()
        # Of a session's many short calls a reader wants to see who waits for whom; the first of them show it.
        timeline = Timeline(SPANS if round == 0 and len(setup.algorithm.phases()) > 1 else 0)
        simulation.executor.timeline = timeline
        asynchronous: dict[str, Any] = {}
        if round < setup.rounds:
            if simulation.arrivals is not None:
                simulation.offer(servers, round)
            there, cohort = simulation.sample(round)
            known = {"clients": there, "examples": simulation.examples(round), "rounds": setup.rounds}
            for name, flow in setup.algorithm.phases():
                server = replace(servers[name], **known, local=setup.local)
                if simulation.arrivals is None:
                    part = partial(flow, server, cohort)
                    servers[name], records = _drive(simulation, part, round, records, name, timeline)
                    continue
                begun = BufferedRound(
                    setup.algorithm, simulation.arrivals, setup.population, server, round, setup.rounds
                )
                part = partial(flow, begun.server, cohort)
                state, records = _drive(simulation, part, round, records, name, timeline, begun.exchange)
                servers[name] = begun.after(state)
                asynchronous = {"clock": simulation.arrivals.clock(round), "staleness": begun.staleness}
        else:
            name = next(iter(servers))
            if type(setup.algorithm).finish is Algorithm.finish:
                return
            flow = partial(setup.algorithm.finish, servers[name], simulation.present(round))
            servers[name], records = _drive(simulation, flow, round, records)
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
    before: _Records,
    server: str = "",
    timeline: Timeline | None = None,
    begun: Callable[[Exchange], Exchange] = lambda exchange: exchange,
) -> _Part:
    """The server's state after a part of a round, and the records; of the finish, which has no ``server``, too."""
    setup = simulation.setup

    def part() -> _Part:
        records = before.copy()
        plain = simulation.exchange(round, records.ledger, records.errors, records.losses, server or "main", timeline)
        if not server:
            return drive(flow(), plain), records
        exchange = protect(
            setup.algorithm,
            begun(plain),
            seed=setup.seed,
            round=round,
            errors=records.errors,
            signatures=setup.signatures,
        )
        return replace(drive(flow(), exchange), local=None), records

    return simulation.attempt(part)

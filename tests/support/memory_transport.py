"""A post in memory for federations without a transport, and the rounds that go through it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from confed.engines.local import Executor, InProcess, RoundRecord, Simulation, simulate
from confed.engines.perform import Setup, Workspace, answer
from confed.engines.remote.client import Site, client_named
from confed.engines.remote.protocol import HELLO, Request, seal, version_of
from confed.engines.remote.server import Remote
from confed.engines.remote.sites import Connection, Timeouts
from confed.federation.messages import Call, Message, Reply
from confed.federation.state import MemoryStore, ServerState, Store

QUICK = Timeouts(deadline=0.05, away=0.02, interval=1e-4)
PATIENT = Timeouts(deadline=60, away=60, interval=1e-4)
CLIENTS = ("client-0", "client-1", "client-2")
Tamper = Callable[[str, bytes, bytes], tuple[bytes, bytes]]


class Letters:
    """A post in memory. Sites answer when they are asked for the reply, unless a test has them do otherwise."""

    def __init__(self, setup: Setup, root: Path, clients: tuple[str, ...] = CLIENTS) -> None:
        self.setup, self.root = setup, root
        self.sites = {number: self.site(name) for number, name in enumerate(clients)}
        self.since = dict.fromkeys(self.sites, "1")
        self.sent: list[tuple[int, str, bytes, bytes]] = []
        self.over: list[str] = []
        self.forgotten: list[str] = []
        self.answered: dict[str, tuple[bytes, bytes]] = {}
        self.silent: set[int] = set()
        self.tamper: dict[int, Tamper] = {}

    def site(self, name: str) -> Site:
        return Site(self.setup, client_named(self.setup, name), self.root / name)

    def connections(self) -> Mapping[int, Connection]:
        return {number: Connection(since) for number, since in self.since.items()}

    def send(self, to: int, kind: str, head: bytes, body: bytes, lasts: float) -> str | None:
        self.sent.append((to, kind, head, body))
        self.over.append(self.since[to])
        return str(len(self.sent) - 1)

    def wait(self, seconds: float) -> bool:
        return False

    def set_max_reply_bytes(self, largest: int) -> None: ...

    def forget(self, sent: str) -> None:
        self.forgotten.append(sent)

    def receive(self, sent: str) -> tuple[bytes, bytes] | str | None:
        to, kind, head, body = self.sent[int(sent)]
        if to not in self.since:
            return "ConnectionError: gone"
        if (kind != HELLO and to in self.silent) or self.since[to] != self.over[int(sent)]:
            return None
        if sent not in self.answered:
            self.answered[sent] = self.sites[to].handle(head, body)
        reply = self.answered[sent]
        return self.tamper[to](kind, *reply) if to in self.tamper and kind != HELLO else reply


def remote_of(letters: Letters, timeouts: Timeouts = QUICK) -> Remote:
    remote = Remote(letters.setup, letters, timeouts=timeouts)
    remote.sites.gather(CLIENTS, wait=5)
    return remote


def rounds(
    setup: Setup, executor: Executor, servers: Mapping[str, ServerState] | None = None, start: int = 0, stop: int = 99
) -> list[RoundRecord]:
    simulation = Simulation(setup, MemoryStore(), executor)
    if servers is None:
        servers = simulation.start(InProcess(setup).workspace)
    records: list[RoundRecord] = []
    for record in simulate(simulation, servers, start):
        records.append(record)
        if record.round == stop:
            break
    return records


def same(one: Mapping[str, ServerState], other: Mapping[str, ServerState]) -> bool:
    return all(torch.equal(t, other[s].params[n]) for s, state in one.items() for n, t in state.params.items())


class Without:
    """The simulator, in which one client fails in one round."""

    def __init__(self, setup: Setup, client: str, round: int) -> None:
        self.inner, self.setup, self.client, self.round = InProcess(setup), setup, client, round
        self.timeline = self.inner.timeline

    def __call__(self, calls: Sequence[Call], store: Store, round: int) -> Iterator[Reply]:
        for call in calls:
            if (call.client.id, round) == (self.client, self.round):
                yield Reply(call.client, Message(), "gone")
            else:
                yield answer(self.setup, self.inner.workspace, call, store, round)


def fit(setup: Setup, round: int = 0, base: int | None = None) -> tuple[bytes, bytes]:
    base = version_of(round, 0) - 1 if base is None else base
    request = Request("id", "client-0", "fit", round, version_of(round, 0), base)
    return request.to_bytes(), seal(Message(dict(Workspace(setup.model()).initial)))

"""SIGKILL at random moments of a federation's sites: they go on with their journals, to the model of a run without.

The server is this process, every site a fork of it, which gets requests and sends replies over a pair of sockets. It is
killed again and again, at any moment of its work, and another one opens the same folder. A site that wrote into a
journal and was killed before the server signed it must not be refused, and no round may leave a site out. Every tenth
time the server is another object as well, which has what is on disk.

    python benchmarks/kill_sites.py --seed 1 --count 60
"""

import argparse
import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from confed.algorithms.fedavg import FedAvg
from confed.algorithms.split_learning import SplitLearning
from confed.engines.local import InProcess, Simulation, simulate
from confed.engines.perform import Setup
from confed.engines.remote.client import Site, client_named
from confed.engines.remote.server import Remote
from confed.engines.remote.sites import Connection, Timeouts
from confed.engines.remote.update_bounds import Bounds
from confed.federation.local import Local
from confed.federation.state import MemoryStore
from confed.testing.toy import toy_clients, toy_setup

NAMES = ("client-0", "client-1")


def exactly(line: socket.socket, count: int) -> bytes:
    """So many bytes; a ConnectionError where the other end is gone."""
    data = b""
    while len(data) < count:
        if not (piece := line.recv(count - len(data))):
            raise ConnectionError("the other end is gone")
        data += piece
    return data


def received(line: socket.socket) -> tuple[bytes, bytes]:
    sizes = [int.from_bytes(exactly(line, 8), "little") for _ in range(2)]
    return exactly(line, sizes[0]), exactly(line, sizes[1])


def sent(line: socket.socket, head: bytes, body: bytes) -> None:
    line.sendall(len(head).to_bytes(8, "little") + len(body).to_bytes(8, "little") + head + body)


@dataclass
class Post:
    """Requests to forks of this process, which are killed; see :class:`confed.engines.remote.sites.Transport`."""

    setup: Setup
    root: Path
    rng: random.Random
    most: int
    kills: int = 0
    lines: dict[int, socket.socket] = field(default_factory=dict)
    processes: dict[int, int] = field(default_factory=dict)
    since: dict[int, int] = field(default_factory=dict)
    waiting: dict[str, tuple[int, int]] = field(default_factory=dict)
    order: dict[int, list[str]] = field(default_factory=dict)
    replies: dict[str, tuple[bytes, bytes]] = field(default_factory=dict)
    next_kill: float = 0.0
    in_row: dict[int, int] = field(default_factory=dict)  # a site that loses a request three times is left out

    def start(self, number: int) -> None:
        """A new process for a site."""
        ours, theirs = socket.socketpair()
        process = os.fork()
        if process == 0:
            try:
                for line in (ours, *self.lines.values()):
                    line.close()
                self.serve(theirs, NAMES[number])
            finally:
                os._exit(0)
        theirs.close()
        self.lines[number], self.processes[number] = ours, process
        self.since[number], self.order[number] = self.since.get(number, 0) + 1, []

    def serve(self, line: socket.socket, name: str) -> None:
        """One site, until it is killed or the server is gone."""
        root = self.root / name
        log = (self.root / f"{name}.log").open("a")
        site = Site(
            self.setup, client_named(self.setup, name), root, audit=root / "audit.jsonl",
            progress=lambda event: print(getattr(event, "text", ""), file=log, flush=True),
        )  # fmt: skip
        while True:
            sent(line, *site.handle(*received(line)))

    def kill(self, number: int) -> None:
        """The end of a site's process."""
        self.lines.pop(number).close()
        os.kill(self.processes[number], signal.SIGKILL)
        os.waitpid(self.processes.pop(number), 0)

    def connections(self) -> Mapping[int, Connection]:
        return {number: Connection(str(since), NAMES[number]) for number, since in self.since.items()}

    def send(self, to: int, kind: str, head: bytes, body: bytes, lasts: float) -> str | None:
        sent(self.lines[to], head, body)
        name = f"{kind}-{time.monotonic()}"
        self.waiting[name] = (to, self.since[to])
        self.order[to].append(name)
        return name

    def wait(self, seconds: float) -> bool:
        return False

    def set_max_reply_bytes(self, largest: int) -> None: ...

    def receive(self, name: str) -> tuple[bytes, bytes] | str | None:
        to, since = self.waiting[name]
        if since != self.since[to]:
            return "ConnectionError: the site was killed"
        now = time.monotonic()
        if self.kills < self.most and now > self.next_kill and self.in_row.get(to, 0) < 2:
            self.in_row[to] = self.in_row.get(to, 0) + 1
            self.next_kill = now + self.rng.uniform(0.0, 1.5)
            self.kills += 1
            self.kill(to)
            self.start(to)
            return "ConnectionError: the site was killed"
        line = self.lines[to]
        line.settimeout(0.001)
        try:
            line.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return self.replies.pop(name, None)
        line.settimeout(None)
        self.replies[self.order[to].pop(0)], self.in_row[to] = received(line), 0
        return self.replies.pop(name, None)

    def forget(self, name: str) -> None:
        self.waiting.pop(name, None)


def trial(method: FedAvg | SplitLearning, seed: int, count: int, until: float) -> tuple[int, int, list[str]]:
    """Kills made in a run, its rounds, and what was wrong."""
    clients, findings = toy_clients(), list[str]()
    local = Local(epochs=20, batch_size=4, lr=0.01)
    setup = toy_setup(method, clients={name: clients[name] for name in NAMES}, rounds=1000, local=local)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        post = Post(setup, root, random.Random(seed), count)
        for number in range(len(NAMES)):
            post.start(number)

        def opened() -> Remote:
            timeouts = Timeouts(minimum=len(NAMES), away=120, interval=0.01)
            remote = Remote(setup, post, timeouts=timeouts, bounds=Bounds(), memory=root / "state")
            remote.sites.gather(NAMES, wait=60)
            return remote

        plain = Simulation(setup, MemoryStore())
        servers = plain.start(InProcess(setup).workspace)
        expected, round = simulate(plain, servers), 0
        while post.kills < count and time.monotonic() < until and not findings:
            remote = opened()
            remote.begin(round, (0, round))
            simulation = Simulation(setup, MemoryStore(), remote)
            simulation.attempt, simulation.check = remote.attempt, remote.check
            for record in simulate(simulation, servers, round):
                remote.remember()
                round, servers = record.round, record.servers
                findings += [f"round {round}: {name}: {error}" for name, error in record.errors.items()]
                undisturbed = next(expected).servers
                for server, state in servers.items():
                    same = (torch.equal(t, undisturbed[server].params[n]) for n, t in state.params.items())
                    findings += [] if all(same) else [f"round {round}: another {server} than without kills"]
                if round % 10 == 0 or post.kills >= count or time.monotonic() > until or findings:
                    break
        for number in list(post.lines):
            post.kill(number)
        for name in NAMES:
            log = (root / f"{name}.log").read_text()
            findings += [line for line in log.splitlines() if "the journal" in line]
        stored = json.loads((root / "state" / "journals.json").read_text())
        if len(stored) < len(NAMES):
            findings.append(f"the server knows the journals of {sorted(stored)} only")
    return post.kills, round, findings


def main() -> int:
    """Kills, compares and prints; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the moments (default: the time)")
    parser.add_argument("--count", type=int, default=60, help="kills in all, at most")
    parser.add_argument("--minutes", type=float, default=6.0, help="after which no more rounds are run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    worst = 0
    for number, method in enumerate((FedAvg(), SplitLearning())):
        until = time.monotonic() + 30 * options.minutes
        kills, rounds, findings = trial(method, options.seed + number, options.count // 2, until)
        print(f"{type(method).__name__}: {kills} kills in {rounds} rounds, {len(findings)} findings", flush=True)
        print(*findings, sep="\n")
        worst |= bool(findings)
    print(f"seed {options.seed}")
    return worst


if __name__ == "__main__":
    sys.exit(main())

"""Two and three sites over TLS, one of which sends what no honest site does, in twelve modes; others must stay sound.

The server listens on a socket with TLS, sites sign with their keys, each in a thread of this process. From its second
reply on one site is hostile. After half of the rounds the server is replaced by a new one, which has what is on disk.
At the end of each run every value of the servers is finite and below 50 (honest runs end below 5), no honest site has
refused a message, and where the run ended, it did so in one line that names the hostile site.

    python benchmarks/hostile_sites.py --seed 1
"""

import argparse
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from confed.algorithms.fedavg import FedAvg
from confed.algorithms.fedkd import FedKD
from confed.algorithms.fedper import FedPer
from confed.algorithms.scaffold import Scaffold
from confed.algorithms.split_learning import SplitLearning
from confed.deployment.provision import SITES, Federation, provision, read_sites
from confed.engines.flower.superlink import open_superlink
from confed.engines.flower.supernode import SuperNode, read_key, read_public
from confed.engines.flower.transport import FlowerTransport, client_app
from confed.engines.local import InProcess, Simulation, simulate
from confed.engines.perform import Setup
from confed.engines.remote.client import Site, client_named
from confed.engines.remote.protocol import Limits, Request, open_body, seal
from confed.engines.remote.server import Remote
from confed.engines.remote.sites import Registered, Timeouts
from confed.engines.remote.update_bounds import Bounds, bounded_members
from confed.federation.messages import Message
from confed.federation.state import MemoryStore, ServerState
from confed.testing.toy import toy_clients, toy_setup

ROUNDS = 4
METHODS = (FedAvg, FedPer, FedKD, Scaffold, SplitLearning)
Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors, random.Random], Tensors]


def _each(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda tensors, _: {name: change(t) if t.is_floating_point() else t for name, t in tensors.items()}


def _one(value: float) -> Change:
    """One value, of a tensor and at a place that are drawn."""

    def change(tensors: Tensors, rng: random.Random) -> Tensors:
        floating = [name for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.numel()]
        if floating:
            name = rng.choice(floating)
            tensors[name] = tensors[name].clone()
            tensors[name].view(-1)[rng.randrange(tensors[name].numel())] = value
        return tensors

    return change


CHANGES: Mapping[str, Change] = {
    "NaN": _one(float("nan")),
    "infinity": _one(float("inf")),
    "one value 1e38": _one(1e38),
    "0.9 of the absolute bound": _each(lambda tensor: torch.full_like(tensor, 0.9e6)),
    "nine times all values": _each(lambda tensor: 9 * tensor),
    "other shapes": _each(lambda tensor: torch.cat([tensor.reshape(-1)] * 2)),
    "another type": _each(lambda tensor: tensor.double()),
    "a tensor missing": lambda tensors, _: dict(list(tensors.items())[1:]),
    "a tensor too many": lambda tensors, _: {**tensors, "extra": torch.ones(3)},
}
FORGED = ("a head that is none", "a body that is none", "an old reply and a claim of 10^12 examples")
MODES = (*CHANGES, *FORGED)


class Shared(Site):
    """A site that shares its process with others; the hostile one changes its replies to training."""

    turn = threading.Lock()
    mode, updates, rng, old = "", 0, random.Random(0), (b"", b"")

    def handle(self, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        with self.turn:
            answer = super().handle(head, body)
        action = Request.from_bytes(head, self._limits).action
        if not self.mode or action in ("evaluate", "goodbye"):
            return answer
        if action == "hello":
            return answer if self.mode != FORGED[2] else (answer[0], _claiming(answer[1]))
        self.updates += 1
        if self.updates == 1:
            self.old = answer
            return answer
        if self.mode in CHANGES:
            message = open_body(answer[1], Limits(), {}, frozenset())
            return answer[0], seal(Message(CHANGES[self.mode](dict(message.tensors), self.rng), message.scalars))
        noise = self.rng.randbytes(200)
        return {FORGED[0]: (noise, answer[1]), FORGED[1]: (answer[0], noise), FORGED[2]: self.old}[self.mode]


def _claiming(body: bytes) -> bytes:
    message = open_body(body, Limits(), {}, frozenset())
    return seal(Message(message.tensors, {**message.scalars, "examples": 10**12}))


def led(
    setup: Setup, remote: Remote, servers: Mapping[str, ServerState], start: int, stop: int
) -> dict[str, ServerState]:
    """The servers' states after some rounds."""
    simulation = Simulation(setup, MemoryStore(), remote, lenient=True)
    simulation.attempt, simulation.check = remote.attempt, remote.check
    remote.begin(start, (0, start))
    kept = dict(servers)
    for record in simulate(simulation, servers, start):
        kept = dict(record.servers)
        remote.remember()
        simulation.evaluate(kept, record.round, split="validation")
        if record.round == stop:
            break
    return kept


def largest(servers: Mapping[str, ServerState]) -> float:
    """Largest absolute value of the servers' parameters; a NaN where there is one."""
    found = [t.abs().max() for state in servers.values() for t in state.params.values() if t.is_floating_point()]
    return float(torch.stack([value.float() for value in found]).max())


def trial(mode: str, count: int, seed: int) -> tuple[str, list[str]]:
    """One run; what became of it, and what is wrong with that."""
    rng = random.Random(f"{mode} {count} {seed}")
    names = tuple(f"client-{number}" for number in range(count))
    bad, method = rng.choice(names), rng.choice(METHODS)()
    clients = toy_clients(kind=method.traits.made_for)
    setup = toy_setup(method, clients={name: clients[name] for name in names}, rounds=ROUNDS, seed=seed)
    heard: dict[str, list[str]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        root = Path(folder)
        provision(root / "made", Federation(names, "localhost", 8443, ""))
        server, stop = root / "made" / "server", threading.Event()
        keys = {read_public(key): name for name, key in read_sites(server / SITES).items()}
        post = open_superlink(keys, certificate=server / "server.crt", key=server / "server.key", waiting=root / "post")
        grid, port = opened.enter_context(post)
        opened.callback(stop.set)
        for name in names:
            own, private = root / "made" / "sites" / name, root / "private" / name
            site = Shared(
                setup, client_named(setup, name), private, audit=private / "audit.jsonl",
                progress=lambda event, said=heard[name]: said.append(getattr(event, "text", "")),
            )  # fmt: skip
            site.mode, site.rng = (mode if name == bad else ""), rng
            line = SuperNode(f"localhost:{port}", read_key(own / "key"), (own / "ca.crt").read_bytes(), interval=0.02)
            app = client_app(lambda _, site=site: site)
            threading.Thread(target=line.serve, args=(app, stop), daemon=True).start()
        servers: dict[str, ServerState] = {}
        ended = ""
        for start, end in ((0, ROUNDS // 2), (ROUNDS // 2, 99)):
            transport = FlowerTransport(grid, keys.get)
            remote = Remote(
                setup, transport, timeouts=Timeouts(deadline=20, away=5, interval=0.02), bounds=Bounds(),
                memory=root / "state",
            )  # fmt: skip
            members = remote.sites.gather(names, wait=10)
            weight = 0.0 if method.traits.in_sessions else 10.0
            led_setup = replace(setup, population=Registered(bounded_members(members, weight)[0]))
            try:
                simulation = Simulation(led_setup, MemoryStore(), remote)
                servers = servers or simulation.start(InProcess(setup).workspace)
                servers = led(led_setup, remote, servers, start, end)
            except RuntimeError as error:
                ended = str(error)
                break
        size = largest(servers)
    wrong = [f"a value of {size:.3g} is kept"] if not size < 50 else []
    for name in set(names) - {bad}:
        wrong += [f"{name} {line}" for line in heard[name] if line.startswith("refused") and "already" not in line]
    if ended and ("\n" in ended or (bad not in ended and "sites refuse" not in ended)):
        wrong.append(f"it ended with {ended!r}")
    return f"{type(method).__name__}, {'ended: ' + ended[:110] if ended else 'went on'}, largest {size:.2f}", wrong


def main() -> int:
    """All modes with two and with three sites; the exit status says whether anything was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=int(time.time()), help="default: the time")
    parser.add_argument("--minutes", type=float, default=10.0, help="after which no further run is begun")
    options = parser.parse_args()
    torch.set_num_threads(1)
    until, runs, findings = time.monotonic() + 60 * options.minutes, 0, 0
    print(f"seed {options.seed}")
    for mode in MODES:
        for count in (2, 3):
            if time.monotonic() > until:
                continue
            began = time.monotonic()
            said, wrong = trial(mode, count, options.seed)
            runs, findings = runs + 1, findings + bool(wrong)
            print(f"{mode}, {count} sites: {said} ({time.monotonic() - began:.1f} s)", *wrong, sep="\n    ", flush=True)
    print(f"{runs} of {2 * len(MODES)} runs, {findings} with a finding")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())

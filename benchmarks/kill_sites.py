"""SIGKILL at random moments of sites over TLS: they go on with their books, and the model is that of an undisturbed run.

The server is this process; every site is a process of its own, which is killed again and again, at any moment from its
start, and started anew. A site that wrote into a book and was killed before the server signed it must not be refused,
and no round may leave a site out.

    python benchmarks/kill_sites.py --seed 1 --count 20
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from confed.algorithms.fedavg import FedAvg
from confed.deployment.provision import SITES, Federation, provision, read_sites
from confed.engines.flower.superlink import open_superlink
from confed.engines.flower.supernode import SuperNode, read_key, read_public
from confed.engines.flower.transport import FlowerTransport, client_app
from confed.engines.local import InProcess, Simulation, simulate
from confed.engines.perform import Setup
from confed.engines.remote.client import Site, client_named
from confed.engines.remote.server import Remote
from confed.engines.remote.sites import Timeouts
from confed.federation.local import Local
from confed.federation.state import MemoryStore
from confed.testing.toy import toy_clients, toy_setup

NAMES = ("client-0", "client-1")


def setup_of(rounds: int) -> Setup:
    clients = toy_clients()
    local = Local(epochs=30, batch_size=4, lr=0.01)
    return toy_setup(FedAvg(), clients={name: clients[name] for name in NAMES}, rounds=rounds, local=local)


def serve(root: Path, name: str, port: int, rounds: int) -> None:
    """One site, until it is killed."""
    setup, own, private = setup_of(rounds), root / "made" / "sites" / name, root / "private" / name
    log = (root / f"{name}.log").open("a")
    site = Site(
        setup, client_named(setup, name), private, audit=private / "audit.jsonl",
        progress=lambda event: print(getattr(event, "text", ""), file=log, flush=True),
    )  # fmt: skip
    (root / f"{name}.up").touch()
    line = SuperNode(f"localhost:{port}", read_key(own / "key"), (own / "ca.crt").read_bytes(), interval=0.02)
    line.serve(client_app(lambda _: site), threading.Event())


@contextmanager
def killed(root: Path, port: int, rounds: int, count: int, rng: random.Random) -> Iterator[list[int]]:
    """All sites, killed so many times in all while this lasts; yields a list with the kills made."""
    made, over = [0], threading.Event()
    names = [NAMES[number % len(NAMES)] for number in range(count)]

    def start(name: str) -> "subprocess.Popen[bytes]":
        (root / f"{name}.up").unlink(missing_ok=True)
        given = ["--root", str(root), "--site", name, "--port", str(port), "--rounds", str(rounds)]
        return subprocess.Popen([sys.executable, __file__, *given])

    running = {name: start(name) for name in NAMES}

    def kill() -> None:
        for name in names:
            while not (root / f"{name}.up").is_file() and not over.is_set():
                time.sleep(0.01)
            over.wait(rng.uniform(0.0, 1.5))
            if over.is_set():
                return
            running[name].send_signal(signal.SIGKILL)
            running[name].wait()
            made[0] += 1
            running[name] = start(name)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield made
    finally:
        over.set()
        thread.join()
        for process in running.values():
            process.kill()
            process.wait()


def main() -> int:
    """Kills, compares and prints; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the moments (default: the time)")
    parser.add_argument("--count", type=int, default=20, help="kills in all, at most")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--minutes", type=float, default=4.0, help="after which no more rounds are run")
    for hidden in ("--root", "--site", "--port"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.site:
        serve(Path(options.root), options.site, int(options.port), options.rounds)
        return 0
    rng, setup, findings = random.Random(options.seed), setup_of(options.rounds), list[str]()
    until = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        provision(root / "made", Federation(NAMES, "localhost", 8443, ""))
        server = root / "made" / "server"
        keys = {read_public(key): name for name, key in read_sites(server / SITES).items()}
        post = open_superlink(keys, certificate=server / "server.crt", key=server / "server.key", waiting=root / "post")
        with post as (grid, port), killed(root, port, options.rounds, options.count, rng) as made:
            timeouts = Timeouts(minimum=len(NAMES), away=120, interval=0.02)
            remote = Remote(setup, FlowerTransport(grid, keys), timeouts=timeouts, memory=root / "state")
            remote.sites.gather(NAMES, wait=120)
            simulation, plain = Simulation(setup, MemoryStore(), remote), Simulation(setup, MemoryStore())
            expected = simulate(plain, plain.start(InProcess(setup).workspace))
            for record in simulate(simulation, simulation.start(remote._local.workspace)):
                remote.remember()
                findings += [f"round {record.round}: {name}: {error}" for name, error in record.errors.items()]
                undisturbed = next(expected).servers["main"].params
                if not all(torch.equal(tensor, undisturbed[name]) for name, tensor in record.servers["main"].params.items()):
                    findings.append(f"round {record.round}: another model than without kills")
                if made[0] >= options.count or time.monotonic() > until:
                    break
        for name in NAMES:
            findings += [line for line in (root / f"{name}.log").read_text().splitlines() if "book" in line]
        longest = max(entry[0] for told in _books(root).values() for entry in told["books"].values())
    print(f"seed {options.seed}: {made[0]} kills in {record.round} rounds, longest book {longest}, {len(findings)} findings")
    print(*findings, sep="\n")
    return 1 if findings else 0


def _books(root: Path) -> dict[str, dict[str, dict[str, list[int]]]]:
    return {name: json.loads(told) for name, told in json.loads((root / "state" / "books.json").read_text()).items()}


if __name__ == "__main__":
    sys.exit(main())

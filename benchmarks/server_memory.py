"""Memory of a federation's server: over many rounds, and with large updates that all sites send at once.

The server is this process, with TLS, keys and sockets; all sites are one other process, in which each sends back the
model that it received. No site computes, so that updates come as fast as they can, all together.

``rounds``: memory after every round, and the slope of a line through it behind the first ten.
``large``: the peak of one round above what the server holds between rounds, in updates. Of each update one copy may be
on its way in or out, and one is the mean that the round makes; the others wait on disk. The yardstick is what
the server would hold if it kept the updates of all sites.
"""

import argparse
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from confed.algorithms.fedavg import FedAvg
from confed.deployment.provision import SITES, Federation, provision, read_sites
from confed.engines.flower.superlink import open_superlink
from confed.engines.flower.supernode import SuperNode, read_key, read_public
from confed.engines.flower.transport import FlowerTransport, client_app
from confed.engines.local import Simulation, simulate
from confed.engines.remote.protocol import GOODBYE, HELLO, Answer, Limits, Request, open_body, seal
from confed.engines.remote.server import Remote
from confed.engines.remote.sites import Registered, Timeouts
from confed.engines.usage import peak_memory, reset_peak
from confed.federation.client_info import ClientInfo
from confed.federation.messages import Message
from confed.federation.state import MemoryStore
from confed.testing.toy import toy_setup
from measure import finish


class Echo:
    """A site that sends back what it received."""

    def __init__(self, name: str) -> None:
        self.name = name

    def handle(self, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        request = Request.from_bytes(head, Limits())
        reply = Answer(request.id, None, False, 0.0).to_bytes()
        if request.action == HELLO:
            told = open_body(body, Limits(), {}, frozenset()).scalars
            return reply, seal(Message({}, {**told, "client": self.name, "examples": 10, "head": "", "modalities": ""}))
        return reply, seal(Message()) if request.action == GOODBYE else body


def sites(root: Path, port: int) -> None:
    """All sites, until the server is gone."""
    stop, threads = threading.Event(), list[threading.Thread]()
    for folder in sorted((root / "sites").iterdir()):
        echo = Echo(folder.name)
        line = SuperNode(f"localhost:{port}", read_key(folder / "key"), (folder / "ca.crt").read_bytes(), interval=0.2)
        app = client_app(lambda _, echo=echo: echo)  # type: ignore[arg-type, return-value]
        threads.append(threading.Thread(target=line.serve, args=(app, stop), daemon=True))
        threads[-1].start()
    sys.stdin.read()  # closed when the server ends
    stop.set()


def model(megabytes: float) -> nn.Module:
    """Eight tensors of so many megabytes together."""
    return nn.ParameterDict({f"part{i}": torch.full((int(megabytes * 2**20 / 32),), 0.01) for i in range(8)})


def resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmRSS:"))) * 1024


def led(count: int, rounds: int, megabytes: float) -> tuple[list[int], list[int]]:
    """Bytes of memory after every round, and each round's peak, the second with the ones of a first round before it."""
    names = tuple(f"site{i}" for i in range(count))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        provision(root / "made", Federation(names, "localhost", 8443, ""))
        server = root / "made" / "server"
        keys = {read_public(key): name for name, key in read_sites(server / SITES).items()}
        setup = replace(
            toy_setup(FedAvg(), rounds=rounds), build=lambda: model(megabytes),
            population=Registered([ClientInfo(name, 10) for name in names]),
        )  # fmt: skip
        opened = open_superlink(
            keys, certificate=server / "server.crt", key=server / "server.key", waiting=root / "post"
        )
        with opened as (grid, port):
            command = [sys.executable, __file__, "--echo", str(root / "made"), "--port", str(port)]
            with subprocess.Popen(command, stdin=subprocess.PIPE) as others:
                try:
                    transport = FlowerTransport(grid, keys.get)
                    remote = Remote(setup, transport, timeouts=Timeouts(interval=0.05), spool=root / "spool")
                    remote.sites.gather(names, wait=300)
                    simulation = Simulation(setup, MemoryStore(), remote)
                    servers = simulation.start(remote._local.workspace)
                    after, peaks = list[int](), list[int]()
                    reset_peak()
                    for record in simulate(simulation, servers):
                        if record.errors:
                            raise RuntimeError(f"a site failed: {record.errors}")
                        peaks.append(peak_memory())
                        after.append(resident())
                        reset_peak()
                finally:
                    others.kill()
    return after, peaks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("rounds", "large"), default="rounds")
    parser.add_argument("--sites", type=int, default=0, help="by default 4, and 8 for large updates")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--megabytes", type=float, default=0.0, help="of an update; by default 2, and 350 for large")
    parser.add_argument("--echo", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    given, _ = parser.parse_known_args()
    if given.echo is not None:
        sites(given.echo, given.port)
        return
    torch.set_num_threads(1)
    if given.what == "rounds":
        after, _ = led(given.sites or 4, given.rounds, given.megabytes or 2.0)
        late = np.array(after[10:]) / 2**20
        slope, _ = np.polyfit(np.arange(len(late)), late, 1)
        finish(
            "server memory, rounds", float("inf"), sites=given.sites or 4, rounds=given.rounds,
            first_mb=after[0] / 2**20, tenth_mb=float(late[0]), last_mb=float(late[-1]), mb_per_round=float(slope),
            spread_mb=float(late.std()),
        )  # fmt: skip
        return
    count, megabytes = given.sites or 8, given.megabytes or 350.0
    after, peaks = led(count, 2, megabytes)
    # Between the rounds the server holds its model, the one it started with, and one of the workspace.
    above = (peaks[1] - after[0]) / 2**20
    finish(
        "server memory, large updates", float("inf"), sites=count, megabytes=megabytes,
        between_rounds_mb=after[0] / 2**20, peak_mb=peaks[1] / 2**20, above_in_updates=above / megabytes,
        all_sites_in_updates=count,
    )  # fmt: skip


if __name__ == "__main__":
    main()

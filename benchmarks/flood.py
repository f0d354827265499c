"""Rounds of a federation while strangers flood its server's port: their time against that of rounds without.

The server is this process, with TLS, keys and sockets; three honest sites, which send back what they received, are
another, and the strangers a third, at addresses of their own (127.0.0.2 and up, on Linux) or, with ``--same``, at that
of the sites. They open connections as fast as they are told and hold all that they get, a third each without a byte,
with half a TLS handshake, and with a head that grows by a byte now and then. As no site computes, the rounds have
nothing but traffic: a federation that trains loses less, and one whose strangers compute elsewhere, and not on
its server's own cores, loses less again; hence the server's processor time is given, too. The yardstick: 1.5 times the
time without.
"""

import argparse
import resource
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch

from confed.algorithms.fedavg import FedAvg
from confed.deployment.provision import SITES, Federation, provision, read_sites
from confed.engines.flower.superlink import open_superlink
from confed.engines.flower.supernode import read_public
from confed.engines.flower.transport import FlowerTransport
from confed.engines.local import Simulation, simulate
from confed.engines.remote.server import Remote
from confed.engines.remote.sites import Registered, Timeouts
from confed.federation.client_info import ClientInfo
from confed.federation.state import MemoryStore
from confed.testing.toy import toy_setup
from measure import finish
from server_memory import model, resident

HALF = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
"""The beginning of a TLS handshake."""


def flood(port: int, rate: int, most: int, same: bool) -> None:
    """Opens connections until there are so many, and again those that were ended, until this process is ended."""
    held: list[socket.socket] = []
    opened = 0
    while opened < 200_000:
        began = time.monotonic()
        for _ in range(max(rate // 10, 1)):
            stranger = socket.socket()
            stranger.setblocking(False)
            stranger.bind(("127.0.0.1" if same else f"127.0.0.{2 + opened % 8}", 0))
            stranger.connect_ex(("127.0.0.1", port))
            held.append(stranger)
            opened += 1
        for number, stranger in enumerate(held[-200:]):
            try:
                if number % 3:
                    stranger.send(HALF if number % 3 == 1 else b"P")
            except OSError:
                continue
        while len(held) > most:
            held.pop(0).close()
        time.sleep(max(0.1 - (time.monotonic() - began), 0.0))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="without strangers, and as many with them")
    parser.add_argument("--megabytes", type=float, default=5.0, help="of an update")
    parser.add_argument("--rate", type=int, default=300, help="connections a second")
    parser.add_argument("--most", type=int, default=600, help="connections that strangers hold at a time")
    parser.add_argument("--same", action="store_true", help="strangers at the address of the sites")
    parser.add_argument("--files", type=int, default=1024, help="that the server may have open")
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    return parser.parse_known_args()[0]


def main() -> None:
    given = parsed()
    if given.port is not None:
        flood(given.port, given.rate, given.most, given.same)
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (given.files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    torch.set_num_threads(1)
    names = ("site0", "site1", "site2")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        provision(root / "made", Federation(names, "localhost", 8443, ""))
        server = root / "made" / "server"
        keys = {read_public(key): name for name, key in read_sites(server / SITES).items()}
        setup = replace(
            toy_setup(FedAvg(), rounds=2 * given.rounds), build=lambda: model(given.megabytes),
            population=Registered([ClientInfo(name, 10) for name in names]),
        )  # fmt: skip
        post = open_superlink(keys, certificate=server / "server.crt", key=server / "server.key", waiting=root / "post")
        here = Path(__file__)
        with post as (grid, port):
            echo = [sys.executable, str(here.with_name("server_memory.py"))]
            echo += ["--echo", str(root / "made"), "--port", str(port)]
            strangers = [sys.executable, str(here), "--port", str(port), "--rate", str(given.rate)]
            strangers += ["--most", str(given.most)] + ["--same"] * given.same
            with subprocess.Popen(echo, stdin=subprocess.PIPE) as others:
                flooding: subprocess.Popen[bytes] | None = None
                try:
                    transport = FlowerTransport(grid, keys.get)
                    remote = Remote(setup, transport, timeouts=Timeouts(interval=0.05), spool=root / "spool")
                    remote.sites.gather(names, wait=300)
                    simulation = Simulation(setup, MemoryStore(), remote)
                    seconds, memory, cpu = list[float](), list[int](), [time.process_time()]
                    for record in simulate(simulation, simulation.start(remote._local.workspace)):
                        if record.errors:
                            raise RuntimeError(f"a site failed: {record.errors}")
                        seconds.append(record.seconds)
                        memory.append(resident())
                        cpu.append(time.process_time())
                        if record.round == given.rounds:
                            flooding = subprocess.Popen(strangers)
                            time.sleep(3.0)
                            cpu[-1] = time.process_time()
                finally:
                    others.kill()
                    if flooding is not None:
                        flooding.kill()
                        flooding.wait()
            turned_away = sum(n for (who, why), n in grid.notices.counts.items() if "connection" in why)
    without, flooded = median(seconds[1 : given.rounds]), median(seconds[given.rounds :])
    spent = [after - before for before, after in pairwise(cpu)]
    finish(
        "flood", 1.5, ratio=flooded / without, seconds=without, flooded_seconds=flooded,
        slowest_seconds=max(seconds[given.rounds :]), refused_connections=turned_away,
        server_cpu_seconds=median(spent[1 : given.rounds]), flooded_cpu_seconds=median(spent[given.rounds :]),
        more_mb=(max(memory[given.rounds :]) - memory[given.rounds - 1]) / 2**20,
    )  # fmt: skip


if __name__ == "__main__":
    main()

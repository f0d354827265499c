"""Rounds of a federation while strangers flood its server's port: their time against that of rounds without.

The server is this process, with TLS, keys and sockets; three honest sites, which send back what they received, are
another, and the strangers a third, at addresses of their own (127.0.0.2 and up, on Linux) or, with ``--same``, at that
of the sites. They open connections as fast as they are told and hold all that they get, a third each without a byte,
with half a TLS handshake, and with a head that grows by a byte now and then; with ``--tls`` all of them finish the
handshake, and send such a head inside. A newcomer is a listed site at an address that the server does not know, which
asks for the server's version every half second over a new connection. ``--proxy`` puts nginx in front, with
packaging/nginx.conf. As no site computes, the rounds have nothing but traffic: a federation that trains loses less, and
one whose strangers compute elsewhere, and not on its server's own cores, loses less again; hence the server's processor
time is given, too. The yardstick: 1.5 times the time without.
"""

import argparse
import http.client
import json
import math
import resource
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import psutil
import torch

from confed.algorithms.fedavg import FedAvg
from confed.deployment.provision import SITES, Federation, provision, read_sites
from confed.engines.flower.fleet_api import ABOUT
from confed.engines.flower.superlink import open_superlink
from confed.engines.flower.supernode import read_key, read_public, signed_headers
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


def stranger(port: int, address: str, context: ssl.SSLContext | None) -> socket.socket:
    """A connection from an address, which waits for nothing; with TLS one that is ready for its handshake."""
    line = socket.socket()
    line.bind((address, 0))
    if context is None:
        line.setblocking(False)
        line.connect_ex(("127.0.0.1", port))
        return line
    line.settimeout(0.5)  # only what is connected can be wrapped
    line.connect(("127.0.0.1", port))
    line = context.wrap_socket(line, do_handshake_on_connect=False)
    line.setblocking(False)
    return line


def flood(port: int, rate: int, most: int, same: bool, tls: bool) -> None:
    """Opens connections until there are so many, and again those that were ended, until this process is ended."""
    held: list[socket.socket] = []
    context = None
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    print("begun", flush=True)
    opened = 0
    while opened < 200_000:
        began = time.monotonic()
        for _ in range(max(rate // 10, 1)):
            opened += 1
            with suppress(OSError):  # as the server is busy, or closes it at once
                held.append(stranger(port, "127.0.0.1" if same else f"127.0.0.{2 + opened % 8}", context))
        for number, line in enumerate(held[-200:]):
            with suppress(OSError):
                if isinstance(line, ssl.SSLSocket):
                    line.do_handshake()
                    line.send(b"P")
                elif number % 3:
                    line.send(HALF if number % 3 == 1 else b"P")
        while len(held) > most:
            held.pop(0).close()
        time.sleep(max(0.1 - (time.monotonic() - began), 0.0))


def come_anew(root: Path, port: int) -> None:
    """A listed site's question over a new connection twice a second, until standard input ends; prints the shares."""
    key, context = read_key(root / "sites" / "site0" / "key"), ssl.create_default_context(cafile=root / "server/ca.crt")
    waits, asked = list[float](), 0
    print("begun", flush=True)
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    while not ended.wait(0.5):
        asked += 1
        began = time.monotonic()
        line = http.client.HTTPSConnection(
            "localhost", port, timeout=5, context=context, source_address=("127.0.0.50", 0)
        )
        with suppress(OSError, http.client.HTTPException), closing(line):
            line.request("POST", ABOUT, headers=signed_headers(key))
            if line.getresponse().status == 200:
                waits.append(time.monotonic() - began)
    print(json.dumps({"newcomers": asked, "served": len(waits), "served_seconds": median(waits or [math.inf])}))


@contextmanager
def proxied(port: int, folder: Path, wanted: bool) -> Iterator[tuple[int, psutil.Process | None]]:
    """The port to reach a server at: that of nginx before it, with nginx's worker, or its own."""
    if not wanted:
        yield port, None
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        front = free.getsockname()[1]
    text = (Path(__file__).parents[1] / "packaging" / "nginx.conf").read_text(encoding="utf-8")
    (folder / "nginx.conf").write_text(text.replace("8444", str(port)).replace("8443", str(front)), encoding="utf-8")
    command = ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf"), "-g", "daemon off;"]
    with subprocess.Popen(command) as nginx:
        try:
            time.sleep(1.0)
            yield front, psutil.Process(nginx.pid).children()[0]
        finally:
            nginx.terminate()


def begin(command: list[str]) -> subprocess.Popen[bytes]:
    """A process of this file that has begun with its work, once its libraries are there."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="without strangers, and as many with them")
    parser.add_argument("--megabytes", type=float, default=5.0, help="of an update")
    parser.add_argument("--rate", type=int, default=300, help="connections a second")
    parser.add_argument("--most", type=int, default=600, help="connections that strangers hold at a time")
    parser.add_argument("--same", action="store_true", help="strangers at the address of the sites")
    parser.add_argument("--tls", action="store_true", help="strangers finish the TLS handshake")
    parser.add_argument("--proxy", action="store_true", help="nginx in front of the server")
    parser.add_argument("--files", type=int, default=1024, help="that the server may have open")
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--newcomer", type=Path, help=argparse.SUPPRESS)
    return parser.parse_known_args()[0]


def main() -> None:
    given = parsed()
    if given.newcomer is not None:
        return come_anew(given.newcomer, given.port)
    if given.port is not None:
        return flood(given.port, given.rate, given.most, given.same, given.tls)
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
        with post as (grid, own_port), proxied(own_port, root, given.proxy) as (port, proxy):
            echo = [sys.executable, str(here.with_name("server_memory.py"))]
            echo += ["--echo", str(root / "made"), "--port", str(port)]
            strangers = [sys.executable, str(here), "--port", str(port), "--rate", str(given.rate)]
            strangers += ["--most", str(given.most)] + ["--same"] * given.same + ["--tls"] * given.tls
            newcomer = [sys.executable, str(here), "--port", str(port), "--newcomer", str(root / "made")]
            with subprocess.Popen(echo, stdin=subprocess.PIPE) as others:
                begun: list[subprocess.Popen[bytes]] = []
                try:
                    transport = FlowerTransport(grid, keys.get)
                    remote = Remote(setup, transport, timeouts=Timeouts(interval=0.05), spool=root / "spool")
                    remote.sites.gather(names, wait=300)
                    simulation = Simulation(setup, MemoryStore(), remote)
                    seconds, memory, cpu = list[float](), list[int](), [time.process_time()]
                    for record in simulate(simulation, simulation.start(remote._local.workspace)):
                        assert not record.errors, f"a site failed: {record.errors}"
                        seconds.append(record.seconds)
                        memory.append(resident())
                        cpu.append(time.process_time())
                        if record.round == given.rounds:
                            begun += [begin(strangers), begin(newcomer)]
                            cpu[-1] = time.process_time()
                    served = json.loads(begun[1].communicate(timeout=60)[0])
                    spent_by_proxy = sum(proxy.cpu_times()[:2]) if proxy else 0.0
                    more_in_proxy = proxy.memory_info().rss if proxy else 0
                finally:
                    for process in (others, *begun):
                        process.kill()
                        process.wait()
            turned_away = sum(n for (who, why), n in grid.notices.counts.items() if "connection" in why)
    without, flooded = median(seconds[1 : given.rounds]), median(seconds[given.rounds :])
    spent = [after - before for before, after in pairwise(cpu)]
    finish(
        "flood", 1.5, ratio=flooded / without, seconds=without, flooded_seconds=flooded,
        slowest_seconds=max(seconds[given.rounds :]), refused_connections=turned_away,
        server_cpu_seconds=median(spent[1 : given.rounds]), flooded_cpu_seconds=median(spent[given.rounds :]),
        more_mb=(max(memory[given.rounds :]) - memory[given.rounds - 1]) / 2**20,
        proxy_cpu_seconds=spent_by_proxy, proxy_mb=more_in_proxy / 2**20, **served,
    )  # fmt: skip


if __name__ == "__main__":
    main()

"""Sites in threads, over sockets with TLS and keys."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from confed.deployment.provision import SITES, read_sites
from confed.engines.flower.superlink import open_superlink
from confed.engines.flower.supernode import SuperNode, read_key, read_public
from confed.engines.flower.transport import client_app
from confed.engines.local import InProcess, RoundRecord, Simulation, simulate
from confed.engines.perform import Setup
from confed.engines.remote.client import Site, client_named
from confed.engines.remote.server import Remote
from confed.federation.state import MemoryStore

CLIENTS = ("client-0", "client-1", "client-2")


class Serial(Site):
    """A site that shares its process with others: torch's global generators serve one at a time."""

    turn = threading.Lock()

    def handle(self, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        with self.turn:
            return super().handle(head, body)


@contextmanager
def on_line(folder: Path, setup: Setup, port: int, private: Path, said: list[str]) -> Iterator[None]:
    """All sites, each in a thread."""
    stop, threads = threading.Event(), list[threading.Thread]()
    for name in CLIENTS:
        own = folder / "sites" / name
        site = Serial(setup, client_named(setup, name), private / name)
        line = SuperNode(
            f"localhost:{port}",
            read_key(own / "key"),
            (own / "ca.crt").read_bytes(),
            interval=0.05,
            progress=lambda event: said.append(event.text),
        )
        app = client_app(lambda _, site=site: site)
        threads.append(threading.Thread(target=line.serve, args=(app, stop)))
        threads[-1].start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(timeout=30)


def keys_of(folder: Path) -> dict[bytes, str]:
    return {read_public(key): name for name, key in read_sites(folder / "server" / SITES).items()}


def over_tls(folder: Path, keys: Mapping[bytes, str] | None = None, **more: Any) -> Any:
    """The server of a federation's folder, with its certificate."""
    server = folder / "server"
    pair = {"certificate": server / "server.crt", "key": server / "server.key"}
    return open_superlink(keys_of(folder) if keys is None else keys, **pair, **more)


def rounds(setup: Setup, executor: Remote | InProcess) -> list[RoundRecord]:
    simulation = Simulation(setup, MemoryStore(), executor)
    return list(simulate(simulation, simulation.start(InProcess(setup).workspace)))

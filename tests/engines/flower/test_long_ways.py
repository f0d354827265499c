"""Ways between site and server that are not straight: a proxy, a clock that goes wrong, a server that is silent."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path

import flwr.app.message.message as flower_message
import httpx
import pytest
from flwr.common import now

from confed.algorithms.fedper import FedPer
from confed.engines.flower import supernode
from confed.engines.flower.transport import FlowerTransport
from confed.engines.local import InProcess
from confed.engines.remote.server import Remote
from confed.engines.remote.sites import Timeouts
from confed.testing.toy import toy_setup
from flower_sites import CLIENTS, keys_of, on_line, over_tls, rounds
from memory_transport import same

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def federated(folder: Path, tmp_path: Path) -> None:
    """Two rounds over TLS, which must have the simulator's bits."""
    setup, keys, said = toy_setup(FedPer(), rounds=2), keys_of(folder), list[str]()
    with over_tls(folder) as (grid, port), on_line(folder, setup, port, tmp_path, said):
        remote = Remote(setup, FlowerTransport(grid, keys.get), timeouts=Timeouts(interval=0.02))
        assert len(remote.sites.gather(CLIENTS, wait=60)) == 3, said
        records = rounds(setup, remote)
    assert not any(record.errors for record in records)
    assert same(records[-1].servers, rounds(setup, InProcess(setup))[-1].servers)


class ConnectProxy:
    """An HTTP proxy that answers CONNECT and carries bytes."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.asked: list[str] = []
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        while True:
            try:
                line, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self.carry, args=(line,), daemon=True).start()

    def carry(self, line: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            head += line.recv(4096)
        method, address, _ = head.split(b"\r\n")[0].decode().split()
        self.asked.append(f"{method} {address.partition(':')[0]}")
        host, _, port = address.partition(":")
        server = socket.create_connection((host, int(port)))
        line.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        threading.Thread(target=self.copy, args=(server, line), daemon=True).start()
        self.copy(line, server)

    @staticmethod
    def copy(source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                target.sendall(data)
        except OSError:
            pass
        finally:
            target.close()


def test_a_federation_goes_through_a_proxy(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY", "all_proxy", "ALL_PROXY", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    proxy = ConnectProxy()
    monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.port}")
    federated(folder, tmp_path)
    proxy.listener.close()
    assert len(proxy.asked) >= 3
    assert set(proxy.asked) == {"CONNECT localhost"}


@contextmanager
def site_clocks(monkeypatch: pytest.MonkeyPatch, ahead: timedelta) -> Iterator[None]:
    """Sites, which are threads of this process, whose clocks are ahead of the server's."""
    serving, serve = set[int](), supernode.SuperNode.serve

    def marked(*given: object, **more: object) -> str:
        serving.add(threading.get_ident())
        return serve(*given, **more)  # type: ignore[arg-type]

    def clock() -> datetime:
        return now() + (ahead if threading.get_ident() in serving else timedelta())

    monkeypatch.setattr(supernode.SuperNode, "serve", marked)
    monkeypatch.setattr(supernode, "now", clock)
    monkeypatch.setattr(flower_message, "now", clock)
    yield


@pytest.mark.parametrize("hours", [-3.0, 3.0])
def test_a_clock_that_goes_wrong_stops_no_site(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: float
) -> None:
    with site_clocks(monkeypatch, timedelta(hours=hours)):
        federated(folder, tmp_path)


def test_a_site_leaves_a_server_that_says_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A half-open connection: the other end is there no more, and nobody says so."""
    monkeypatch.setattr(supernode, "SILENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port, own, began = silent.getsockname()[1], folder / "sites" / "client-0", time.monotonic()
        node = supernode.SuperNode(f"127.0.0.1:{port}", supernode.read_key(own / "key"), None)
        with node.client() as client, pytest.raises(httpx.ReadTimeout):
            node.enter(client)
    assert time.monotonic() - began < 5

"""Strangers who flood a server's port, and honest sites that go on meanwhile."""

import asyncio
import errno
import os
import socket
import ssl
import time
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from confed.algorithms.fedper import FedPer
from confed.deployment.provision import Federation, provision
from confed.engines.flower.fleet_api import WholeBody
from confed.engines.flower.superlink import (
    HEAD,
    ConnectionLimits,
    ConnectionTable,
    OpenConnection,
    _listener,
    open_superlink,
)
from confed.engines.flower.transport import FlowerTransport
from confed.engines.remote.server import Remote
from confed.engines.remote.sites import Timeouts, patiently
from confed.testing.toy import toy_setup
from flower_sites import CLIENTS, keys_of, on_line, rounds

# Flower's and FastAPI's own.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

LIMITS = ConnectionLimits(most=60, reserved=30, each=20, grace=0.3, handshake=0.6, first=0.6, head=0.6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("federation") / "made"
    provision(root, Federation(CLIENTS, "localhost", 8443, "name = 'toy'\n"))
    return root


def admitted(table: ConnectionTable, count: int, host: str) -> list[OpenConnection]:
    return [entry for entry in (table.admit(host) for _ in range(count)) if entry is not None]


def test_a_full_table_refuses_newcomers_and_keeps_sites() -> None:
    now, put_out = [100.0], list[OpenConnection]()
    table = ConnectionTable(ConnectionLimits(most=10, reserved=4, each=3, grace=1.0), clock=lambda: now[0])
    site = table.admit("10.0.0.9")
    assert site is not None
    site.put_out = lambda: put_out.append(site)
    table.prove(site, "a")
    assert len(admitted(table, 5, "10.0.0.1")) == 3  # an address has its share
    assert len(admitted(table, 5, "10.0.0.2")) == 3
    assert table.admit("10.0.0.3") is None  # all places are taken that strangers may have
    assert len(admitted(table, 9, "10.0.0.9")) == 3  # a site's address has others
    assert len(table) == 10
    assert table.admit("10.0.0.9") is None
    now[0] += 1.5  # strangers who did not use their time make room; the site, which is older, does not
    assert len(admitted(table, 20, "10.0.0.1")) == 3
    assert len(table) == 10
    assert not put_out
    table.leave(site)
    assert len(table) == 9


def test_one_sites_key_does_not_take_the_places_of_others() -> None:
    put_out, table = list[int](), ConnectionTable(ConnectionLimits(most=20, reserved=10, each=20, of_site=3))
    other, *own = admitted(table, 6, "10.0.0.1")
    other.put_out = lambda: put_out.append(-1)
    table.prove(other, "b")
    for number, entry in enumerate(own):
        entry.put_out = lambda number=number: put_out.append(number)
        table.prove(entry, "a")
    table.prove(own[-1], "a")  # the next request over the same connection
    assert put_out == [0, 1]
    assert len(table) == 4
    table.leave(own[-1])
    table.prove(admitted(table, 1, "10.0.0.1")[0], "a")
    assert put_out == [0, 1]


def test_networks_of_version_6_and_mapped_addresses_count_as_one_address() -> None:
    table = ConnectionTable(ConnectionLimits(most=100, reserved=0, each=2))
    assert [table.admit(f"2001:db8::{n}") is None for n in range(1, 5)] == [False, False, True, True]
    assert table.admit("2001:db8:0:1::1") is not None
    assert [table.admit(host) is None for host in ("::ffff:10.0.0.1", "10.0.0.1", "10.0.0.1")] == [False, False, True]


def test_descriptors_are_kept_for_files() -> None:
    assert ConnectionLimits().for_file_limit(1024).most == 512
    small = ConnectionLimits().for_file_limit(64)
    assert (small.most, small.reserved) == (32, 16)
    with pytest.raises(ValueError, match="fewer places must be reserved"):
        ConnectionLimits(most=5, reserved=5)
    tries: list[int] = []

    def opened() -> str:
        tries.append(1)
        if len(tries) < 2:
            raise OSError(errno.EMFILE, "Too many open files")
        return "open"

    assert patiently(opened) == "open"
    with pytest.raises(OSError, match="Too many"):
        patiently(lambda: (_ for _ in ()).throw(OSError(errno.EMFILE, "Too many open files")), most=0.0)
    with pytest.raises(FileNotFoundError):
        patiently(lambda: Path("/nowhere/at/all").read_bytes())


def dribble(connection: socket.socket, data: bytes) -> None:
    """Twenty bytes a second."""
    for letter in data:
        connection.send(bytes([letter]))
        time.sleep(0.05)


def ended(connection: socket.socket, within: float) -> float:
    """Seconds until the other side ends a connection."""
    began = time.monotonic()
    connection.settimeout(within)
    try:
        while connection.recv(65536):
            pass
    except (ConnectionError, ssl.SSLError):
        pass
    return time.monotonic() - began


def test_who_sends_nothing_or_too_slowly_is_put_out(folder: Path) -> None:
    server = folder / "server"
    trusted = ssl.create_default_context(cafile=str(server / "ca.crt"))
    with open_superlink(
        keys_of(folder), certificate=server / "server.crt", key=server / "server.key", limits=LIMITS
    ) as (
        _,
        port,
    ):
        with socket.create_connection(("127.0.0.1", port)) as silent:  # no TLS
            assert ended(silent, 8) < 4
        plain = socket.create_connection(("127.0.0.1", port))
        with trusted.wrap_socket(plain, server_hostname="localhost") as silent:  # TLS, and no request
            assert ended(silent, 8) < 4
        plain = socket.create_connection(("127.0.0.1", port))
        with trusted.wrap_socket(plain, server_hostname="localhost") as slow:
            began = time.monotonic()
            with pytest.raises((ConnectionError, ssl.SSLError)):
                dribble(slow, b"POST /v1/fleet/pull-messages HTTP/1.1\r\nx: " + b"y" * 200)
            assert time.monotonic() - began < 5


def test_a_head_without_end_is_not_stored(folder: Path) -> None:
    with open_superlink(keys_of(folder), limits=LIMITS) as (_, port):
        for start in (b"POST /v1/fleet/pull-messages HTTP/1.1\r\n", b"POST /"):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                sent, piece = len(start), b"x-pad: " + b"y" * 1000 + b"\r\n"
                connection.sendall(start)
                try:
                    while sent < 50 * 2**20:
                        sent += connection.send(piece if b"HTTP" in start else b"y" * 1000)
                except ConnectionError:
                    pass
                assert HEAD < sent < 20 * 2**20  # the rest of it in the sockets' buffers


def test_a_stranger_who_was_turned_away_cannot_stay(folder: Path) -> None:
    with open_superlink(keys_of(folder), limits=LIMITS) as (grid, port):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"POST /v1/fleet/pull-messages HTTP/1.1\r\nhost: x\r\ncontent-length: 8000000\r\n\r\n")
            assert connection.recv(1000).startswith(b"HTTP/1.1 40")
            with pytest.raises(ConnectionError):
                dribble(connection, b"x" * 160)
        assert any("turned away" in why for _, why in grid.notices.counts)


def test_too_many_open_files_make_the_server_wait(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accept, failed = asyncio.selector_events.BaseSelectorEventLoop.sock_accept, list[int]()

    async def scarce(loop: object, listener: socket.socket) -> object:
        if len(failed) < 2:
            failed.append(1)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return await accept(loop, listener)  # type: ignore[arg-type]

    monkeypatch.setattr(asyncio.selector_events.BaseSelectorEventLoop, "sock_accept", scarce)
    with (
        open_superlink(keys_of(folder), limits=LIMITS) as (grid, port),
        socket.create_connection(("127.0.0.1", port)) as asking,
    ):
        asking.sendall(b"GET /x HTTP/1.1\r\nhost: x\r\n\r\n")
        assert asking.recv(1000).startswith(b"HTTP/1.1 404")
        assert grid.notices.counts["somebody", "too many files are open to accept connections"] == 2


def test_sites_go_on_while_strangers_hold_all_they_can_get(folder: Path, tmp_path: Path) -> None:
    """Three hundred idle connections, refused ones included; the rounds are those without them."""
    server, setup, said, keys = folder / "server", toy_setup(FedPer(), rounds=2), list[str](), keys_of(folder)
    flood: list[socket.socket] = []

    def hold(count: int, source: str) -> None:
        for _ in range(count):
            idle = socket.socket()
            idle.bind((source, 0))
            idle.settimeout(5)
            idle.connect(("127.0.0.1", port))
            flood.append(idle)

    opened = open_superlink(keys, certificate=server / "server.crt", key=server / "server.key", limits=LIMITS)
    try:
        with opened as (grid, port), on_line(folder, setup, port, tmp_path, said):
            remote = Remote(setup, FlowerTransport(grid, keys), timeouts=Timeouts(interval=0.02))
            remote.sites.gather(CLIENTS, wait=120)
            for number in range(2, 5):
                hold(100, f"127.0.0.{number}")
            records = rounds(setup, remote)
            assert grid.notices.counts["somebody", "a connection was refused, as there were too many"] >= 200
    finally:
        for idle in flood:
            idle.close()
    assert [record.errors for record in records] == [{}, {}]
    assert sum("connected to" in text for text in said) == 3


def test_a_request_has_a_length_and_no_other_encoding(folder: Path) -> None:
    with (
        open_superlink(keys_of(folder), limits=LIMITS) as (_, port),
        socket.create_connection(("127.0.0.1", port)) as connection,
    ):
        head = b"POST /v1/fleet/pull-messages HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n"
        connection.sendall(head + b"transfer-encoding: chunked\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 400")
        assert ended(connection, 8) < 4


@pytest.mark.parametrize(
    ("pieces", "wait", "status"),
    [([b"ab", b"cd"], 0.0, 200), ([b"abcd", b"e"], 0.0, 413), ([b"ab"], 9.0, 408)],
    ids=["whole", "too long", "too slow"],
)
def test_a_body_is_counted_and_timed_as_it_comes(pieces: list[bytes], wait: float, status: int) -> None:
    parts, sent, got = list(pieces), list[MutableMapping[str, Any]](), list[bytes]()

    async def receive() -> MutableMapping[str, Any]:
        if parts:
            body = parts.pop(0)
            return {"type": "http.request", "body": body, "more_body": bool(parts) or wait > 0}
        await asyncio.sleep(wait)
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    async def app(scope: object, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        got.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200})

    scope: dict[str, Any] = {"type": "http", "headers": [], "state": {}}
    asyncio.run(WholeBody(app, 0.1, 4)(scope, receive, send))
    assert sent[0]["status"] == status
    assert got == ([b"abcd"] if status == 200 else [])
    assert ("why" in scope["state"]) == (status != 200)


def test_accepted_connections_send_at_once() -> None:
    """Else the body of a response waits 40 ms for the acknowledgement of its head."""
    with _listener(socket.AF_INET, "127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        listener.setblocking(True)
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

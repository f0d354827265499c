"""Flower's Fleet API over TLS, and a grid over the same state, both in this process.

Flower's own SuperLink also offers, on the same port, an interface through which anyone who reaches the port may submit
code to run. Here only requests of SuperNodes whose keys are on the list are answered, and no code is stored or handed
out. uvicorn accepts every connection, starts TLS with all of them, and reads heads of any length for any time. Here
connections are counted before anything of them is read, in all and per address, and end where TLS, a first byte or a
head takes too long (:class:`ConnectionLimits`); those of listed sites never have to make room for others.
"""

import asyncio
import errno
import ipaddress
import logging
import shutil
import socket
import ssl
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from confed.engines.flower.fleet_api import ANONYMOUS, FleetApplication
from confed.engines.flower.grid import SuperLinkGrid, link_state, piece_store
from confed.engines.flower.private_api import HEARTBEAT_DEFAULT_INTERVAL
from confed.federation.ranges import AT_LEAST_ONE, POSITIVE, check_fields

HEAD = 16 * 2**10  # bytes of a request's head, at most; one of Flower's has less than one tenth of that
WAIT = 0.2  # seconds until the next try where the process has too many files open to accept a connection
KNOWN = 24 * 3600.0  # seconds for which an address counts as a site's after a listed site has signed a request there


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits on the number of connections and on their time."""

    most: int = 512
    # those of them that are kept for sites on the list, and for addresses from which one has signed
    reserved: int = 256
    # connections of one address over which no site has signed a request; of version 6 those of a network of 64 bits
    each: int = 64
    grace: Annotated[float, POSITIVE] = 1.0  # seconds for which such a connection keeps its place while others want it
    # seconds until its first byte, and from the end of the TLS handshake to the first byte inside
    first: Annotated[float, POSITIVE] = 5.0
    handshake: Annotated[float, POSITIVE] = 5.0  # seconds from the first byte to the end of the TLS handshake
    head: Annotated[float, POSITIVE] = 5.0  # seconds from the first byte of a request's head to the last
    body: Annotated[float, POSITIVE] = 300.0  # seconds for a request's body of at most 8 MiB, of a site on the list
    of_site: Annotated[int, AT_LEAST_ONE] = 8  # connections over which one site has signed a request

    def __post_init__(self) -> None:
        check_fields(self, "")
        if self.each < 1 or not 0 <= self.reserved < self.most:
            raise ValueError(
                f"each address needs a place, and fewer places must be reserved than there are, got each {self.each}, "
                f"most {self.most}, reserved {self.reserved}"
            )

    def for_file_limit(self, files: int) -> "ConnectionLimits":
        """At most half of the files that the process may have open are connections; the others are files."""
        room = max(files // 2, 2)
        return replace(self, most=min(self.most, room), reserved=min(self.reserved, room // 2))


def open_files() -> int:
    """The number of files that this process may have open."""
    try:
        import resource
    except ImportError:  # not on Windows
        return 1024
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 2**20 if soft == resource.RLIM_INFINITY else soft


@dataclass(eq=False)
class OpenConnection:
    address: str
    came: float  # when, of the clock monotonic
    proved: bool = False  # a site on the list has signed a request from there before
    site: bool = False  # a site on the list has signed a request over it
    put_out: Callable[[], object] = lambda: None


class ConnectionTable:
    """Table of the open connections."""

    def __init__(self, limits: ConnectionLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits, self._clock = limits, clock
        self._strangers: dict[OpenConnection, None] = {}  # in the order in which they came
        self._sites: dict[OpenConnection, str] = {}  # and whose it is, in the order in which they signed
        self._by_address: Counter[str] = Counter()  # strangers
        self._proved: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._strangers) + len(self._sites)

    def admit(self, host: str) -> OpenConnection | None:
        """A place for a connection from an address; None where there is none."""
        now, address = self._clock(), _network(host)
        proved_lately = now - self._proved.get(address, -KNOWN) < KNOWN
        strangers_there = self._by_address[address]
        if strangers_there >= self.limits.each and not self._make_room(now, lambda entry: entry.address == address):
            return None
        unproved = sum(not stranger.proved for stranger in self._strangers)
        open_to_all = self.limits.most - self.limits.reserved
        full = len(self) >= self.limits.most or (not proved_lately and unproved >= open_to_all)

        def may_end(entry: OpenConnection) -> bool:
            if proved_lately and entry.address == address:
                return True
            return self._by_address[entry.address] > strangers_there and (proved_lately or not entry.proved)

        # An address makes room for one that has fewer, and only a site's for itself: a flood from few keeps nobody out.
        if full and not self._make_room(now, may_end):
            return None
        entry = OpenConnection(address, now, proved_lately)
        self._strangers[entry] = None
        self._by_address[address] += 1
        return entry

    def _make_room(self, now: float, may_end: Callable[[OpenConnection], bool]) -> bool:
        """Ends the oldest stranger of the address that has most of them, among those that may be ended."""
        late = [entry for entry in self._strangers if now - entry.came >= self.limits.grace and may_end(entry)]
        if not late:
            return False
        entry = max(late, key=lambda entry: self._by_address[entry.address])
        self.leave(entry)
        entry.put_out()
        return True

    def prove(self, entry: OpenConnection, site: str) -> None:
        """A site on the list has signed a request over a connection."""
        if entry in self._strangers or self._sites.get(entry, site) != site:
            self.leave(entry)
            connections_of_site = [connection for connection, whose in self._sites.items() if whose == site]
            for oldest in connections_of_site[: max(len(connections_of_site) - self.limits.of_site + 1, 0)]:
                self.leave(oldest)
                oldest.put_out()
            self._sites[entry] = site
        entry.site = True
        self._proved[entry.address] = self._clock()
        if len(self._proved) > 10_000:  # sites of one federation have few addresses
            del self._proved[min(self._proved, key=self._proved.__getitem__)]

    def leave(self, entry: OpenConnection) -> None:
        self._sites.pop(entry, None)
        if entry in self._strangers:
            del self._strangers[entry]
            self._by_address[entry.address] -= 1
            if not self._by_address[entry.address]:
                del self._by_address[entry.address]


def _network(host: str) -> str:
    """An address; of version 6 its network, in which one machine may have as many as it likes."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        mapped = address.ipv4_mapped
        return str(mapped) if mapped is not None else str(ipaddress.ip_network((int(address), 64), strict=False))
    return str(address)


class _Timed(H11Protocol):
    """uvicorn's protocol with a time limit for a first byte and for every head."""

    def __init__(
        self,
        table: ConnectionTable,
        entry: OpenConnection,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
    ) -> None:
        super().__init__(config, server_state, {**app_state, "connections": table, "connection": entry})
        self._table, self._entry = table, entry
        self._timer: asyncio.TimerHandle | None = None
        self._end: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._entry.put_out = transport.abort
        self._within(self._table.limits.first)

    def connection_lost(self, exc: Exception | None) -> None:
        self._in_time()
        if self._end is not None:
            self._end.cancel()
        self._table.leave(self._entry)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # Who was turned away may read why; what it still sends in the meantime is dropped.
        if not self._entry.site and self._end is None:
            self._end = self.loop.call_later(
                self._table.limits.head, lambda: self._entry.site or self.transport.abort()
            )

    def data_received(self, data: bytes) -> None:
        begun = self._timer is not None and self.conn.trailing_data[0]
        if not begun:  # the first byte of a head, or of what follows one
            self._in_time()
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._in_time()
        elif self._timer is None and self.conn.trailing_data[0]:
            self._within(self._table.limits.head)

    def _within(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self.transport.abort)

    def _in_time(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Listening:
    """The interface of a listener that uvicorn uses."""

    def __init__(self, listeners: list[socket.socket], tasks: list[asyncio.Task[None]]) -> None:
        self.sockets, self._tasks = listeners, tasks

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for listener in self.sockets:
            listener.close()

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)


class LimitedServer(uvicorn.Server):
    """uvicorn's server, in front of which connections are counted."""

    def __init__(
        self, config: uvicorn.Config, limits: ConnectionLimits, turned_away: Callable[[str], None] = lambda _: None
    ) -> None:
        super().__init__(config)
        self.table = ConnectionTable(limits.for_file_limit(open_files()))
        self._turned_away = turned_away
        self._entering: set[asyncio.Task[None]] = set()

    @property
    def port(self) -> int:
        return int(self.servers[0].sockets[0].getsockname()[1])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn; ends the process's thread where the port cannot be opened."""
        del sockets
        await self.lifespan.startup()
        loop, listeners = asyncio.get_running_loop(), list[socket.socket]()
        try:
            addresses = await loop.getaddrinfo(
                self.config.host, self.config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            port = self.config.port
            for family, address in dict.fromkeys((entry[0], entry[4][0]) for entry in addresses):
                listeners.append(_listener(family, str(address), port))
                port = port or int(listeners[0].getsockname()[1])
        except OSError:
            for listener in listeners:
                listener.close()
            await self.lifespan.shutdown()
            sys.exit(1)
        accepting = [loop.create_task(self._accept(listener)) for listener in listeners]
        self.servers: list[Any] = [_Listening(listeners, accepting)]
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn; who is still busy with TLS is put out."""
        for task in list(self._entering):
            task.cancel()
        await super().shutdown(sockets)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while not self.should_exit:
            try:
                connection, peer = await loop.sock_accept(listener)
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._turned_away("too many files are open to accept connections")
                    await asyncio.sleep(WAIT)
                elif error.errno == errno.EBADF:
                    return
                continue
            entry = self.table.admit(str(peer[0]))
            if entry is None:
                connection.close()
                self._turned_away("a connection was refused, as there were too many")
            else:
                task = loop.create_task(self._enter(connection, entry))
                entry.put_out = task.cancel
                self._entering.add(task)
                task.add_done_callback(self._entering.discard)
            await asyncio.sleep(0)  # connections that are there already come first

    async def _enter(self, connection: socket.socket, entry: OpenConnection) -> None:
        """TLS, where there is any, and then the protocol."""
        config, limits = self.config, self.table.limits
        times: dict[str, Any] = {}
        if config.ssl is not None:
            times = {"ssl": config.ssl, "ssl_handshake_timeout": limits.handshake, "ssl_shutdown_timeout": 2.0}
        try:
            connection.setblocking(False)
            if config.ssl is not None:  # a quarter of a megabyte each, which who says nothing does not get
                await asyncio.wait_for(_readable(connection), limits.first)
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: _Timed(self.table, entry, config, self.server_state, self.lifespan.state), connection, **times
            )
        except (OSError, TimeoutError, ssl.SSLError, asyncio.CancelledError):  # a stranger's, and of no interest
            self.table.leave(entry)
            connection.close()


async def _readable(connection: socket.socket) -> None:
    """Waits for a first byte, or for the end."""
    loop = asyncio.get_running_loop()
    readable = loop.create_future()
    descriptor = connection.fileno()
    loop.add_reader(descriptor, lambda: None if readable.done() else readable.set_result(None))
    try:
        await readable
    finally:
        loop.remove_reader(descriptor)


def _listener(family: int, address: str, port: int) -> socket.socket:
    listener = socket.create_server((address, port), family=family, backlog=1024)
    # Accepted connections inherit it, and asyncio sets it only where sockets were made with the protocol's number.
    # Without it the body of a response waits for the acknowledgement of its head, 40 ms in most systems.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setblocking(False)
    return listener


@contextmanager
def open_superlink(
    keys: Iterable[bytes],
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    certificate: Path | None = None,
    key: Path | None = None,
    largest: int = 2**31,
    waiting: Path | None = None,
    limits: ConnectionLimits | None = None,
    refusal: Callable[[bytes], str] = lambda key: "this key is not on the server's list",
) -> Iterator[tuple[SuperLinkGrid, int]]:
    """Fleet API that is served for as long as the ``with`` block lasts."""
    if (certificate is None) != (key is None):
        raise ValueError("certificate and key belong together, got one of them")
    if certificate is not None and key is not None:
        _check_pair(certificate, key)
    limits = ConnectionLimits() if limits is None else limits
    # Every attempt of a stranger would be an error of Flower's, in the middle of what the server shows.
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    names = keys if isinstance(keys, Mapping) else {key: f"key {sha256(key).hexdigest()[:16]}" for key in keys}
    store = piece_store(waiting)
    state = link_state(names, store)
    grid = SuperLinkGrid(state.state(), store, largest)
    application = FleetApplication(names, grid, limits.body, refusal)
    config = uvicorn.Config(
        application, host=host, port=port, log_level="error", access_log=False,
        ssl_certfile=certificate, ssl_keyfile=key, timeout_graceful_shutdown=2, http="h11", ws="none", loop="asyncio",
        h11_max_incomplete_event_size=HEAD, backlog=1024, timeout_keep_alive=30, lifespan="off", proxy_headers=False,
        log_config=None,
    )  # fmt: skip
    server = LimitedServer(config, limits, lambda why: grid.notices.add(ANONYMOUS, why))
    if certificate is not None and key is not None:
        grid.renew_certificate = lambda: _renew(config, certificate, key)
    thread = threading.Thread(target=_serve, args=(server,), daemon=True)
    thread.start()
    alive = threading.Event()
    heart = threading.Thread(target=_keep_alive, args=(grid, alive), daemon=True)
    heart.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise RuntimeError(f"cannot listen on {host}:{port}; is another server running there?")
            time.sleep(0.02)
        yield grid, server.port
    finally:
        grid.inbox.polls.close()
        server.should_exit = True
        alive.set()
        thread.join(timeout=10)
        heart.join(timeout=10)
        if waiting is not None:
            shutil.rmtree(waiting, ignore_errors=True)


def _renew(config: uvicorn.Config, certificate: Path, key: Path) -> None:
    """Reads certificate and key again, for connections from now on."""
    _check_pair(certificate, key)
    assert config.ssl is not None
    config.ssl.load_cert_chain(certificate, key)


def _serve(server: uvicorn.Server) -> None:
    try:
        server.run()
    except SystemExit:  # uvicorn's way to say that the port is taken; the caller sees that this thread ended
        return


def _check_pair(certificate: Path, key: Path) -> None:
    for path in (certificate, key):
        if not path.is_file():
            raise ValueError(f"no file at {path}")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        raise ValueError(f"{certificate} and {key} are no certificate and its key: {error.reason}") from error


def _keep_alive(grid: SuperLinkGrid, stop: threading.Event) -> None:
    """Flower ends runs whose leader has not been heard of for a while."""
    while not stop.wait(HEARTBEAT_DEFAULT_INTERVAL / 3):
        grid.beat()

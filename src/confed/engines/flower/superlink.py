"""Flower's Fleet API over TLS, and a grid over the same state, both in this process.

Flower's own SuperLink also offers, on the same port, an interface through which anyone who reaches the port may submit
code to run. Here only requests of SuperNodes whose keys are on the list are answered, and no code is stored or handed
out.
"""

import logging
import shutil
import ssl
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import uvicorn

from confed.engines.flower.connection_limits import HEAD, ConnectionLimits, LimitedServer
from confed.engines.flower.fleet_api import ABOUT, ANONYMOUS, fleet_application
from confed.engines.flower.grid import SuperLinkGrid, link_state, piece_store
from confed.engines.flower.objects import PIECE
from confed.engines.flower.private_api import HEARTBEAT_DEFAULT_INTERVAL

__all__ = ["ABOUT", "PIECE", "SuperLinkGrid", "open_superlink"]


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
) -> Iterator[tuple[SuperLinkGrid, int]]:
    """Fleet API that is served for as long as the ``with`` block lasts."""
    if (certificate is None) != (key is None):
        raise ValueError("certificate and key belong together, got one of them")
    if certificate is not None and key is not None:
        _check_pair(certificate, key)
    limits = ConnectionLimits() if limits is None else limits
    # Every attempt of a stranger would be an error of Flower's, in the middle of what the server shows.
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    named = keys if isinstance(keys, Mapping) else {}
    names = {key: named.get(key) or f"key {sha256(key).hexdigest()[:16]}" for key in keys}
    store = piece_store(waiting)
    state = link_state(names, store)
    grid = SuperLinkGrid(state.state(), store, largest)
    config = uvicorn.Config(
        fleet_application(state, names, grid, limits.body), host=host, port=port, log_level="error", access_log=False,
        ssl_certfile=certificate, ssl_keyfile=key, timeout_graceful_shutdown=2, http="h11", ws="none", loop="asyncio",
        h11_max_incomplete_event_size=HEAD, backlog=1024, timeout_keep_alive=30,
    )  # fmt: skip
    server = LimitedServer(config, limits, lambda why: grid.notices.add(ANONYMOUS, why))
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

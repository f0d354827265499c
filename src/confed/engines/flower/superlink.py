"""Flower's Fleet API over TLS, and a grid over the same state, both in this process.

A SuperLink of Flower's own also offers, on the same port, an interface through which anybody who reaches it may hand in
code to run. A federation of hospitals wants no such thing: here the only requests that are answered are those of
SuperNodes, and of these only the ones whose keys are on the list. What SuperNodes are told to run is not asked either:
no code is stored or handed out.
"""

import logging
import shutil
import ssl
import threading
import time
from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from flwr.app import Error, Message, Metadata, RecordDict
from flwr.serverapp import Grid
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint

from confed.engines.flower.connection_limits import HEAD, ConnectionLimits, LimitedServer
from confed.engines.flower.inbox import Inbox, RejectionLog, RequestRejected, router
from confed.engines.flower.objects import PIECE, PieceStore, check_expansion
from confed.engines.flower.private_api import (
    FLEET_HTTP_PUBLIC_KEY_HEADER,
    FLEET_HTTP_SIGNATURE_HEADER,
    FLWR_IN_MEMORY_DB_NAME,
    HEARTBEAT_DEFAULT_INTERVAL,
    NOOP_ACCOUNT_NAME,
    NOOP_FEDERATION_ID,
    NOOP_FLWR_AID,
    SUPERLINK_NODE_ID,
    TIMESTAMP_HEADER,
    ErrorCode,
    LinkState,
    LinkStateFactory,
    NodeAuthMiddleware,
    NodeInfo,
    NoOpFederationManager,
    ObjectStoreFactory,
    ProtobufTranslationMiddleware,
    Run,
    TaskIdentity,
    TaskType,
    bytes_to_public_key,
    fleet_router,
    get_all_nested_objects,
    get_object_tree,
    http_error_translator,
    inflate_object_from_contents,
    make_message,
    remove_content_from_message,
    verify_signature,
)
from confed.engines.flower.request_limits import WholeBody
from confed.federation.checkpoint import private_folder
from confed.system.release import VERSION

__all__ = ["ABOUT", "PIECE", "SuperLinkGrid", "open_superlink"]

ABOUT = "/v1/fleet/about"
"""Where a site on the list may ask for the server's versions and clock, without joining."""

ANONYMOUS = "somebody"
"""Who is not on the list, in the log."""


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
) -> Iterator[tuple["SuperLinkGrid", int]]:
    """Fleet API that is served for as long as the ``with`` block lasts.

    Args:
        keys: the public keys of the sites that may come in, as Flower writes them; where it maps them to names, the log
            of what was turned away has these.
        host: the address to listen on.
        port: its port; 0 for a free one.
        certificate: of this server, PEM; without it nothing is encrypted.
        key: that belongs to it, PEM.
        largest: bytes of a reply, about.
        waiting: a folder on disk, for this server alone, for the pieces of messages that are on their way; None keeps
            them in memory.
        limits: on connections, see :class:`confed.engines.flower.connection_limits.ConnectionLimits`.

    Yields:
        The grid, and the port.

    Raises:
        ValueError: certificate or key cannot be read or do not belong together.
        RuntimeError: the port cannot be opened.
    """
    if (certificate is None) != (key is None):
        raise ValueError("certificate and key belong together, got one of them")
    if certificate is not None and key is not None:
        _check_pair(certificate, key)
    limits = ConnectionLimits() if limits is None else limits
    # Every attempt of a stranger would be an error of Flower's, in the middle of what the server shows.
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    named = keys if isinstance(keys, Mapping) else {}
    names = {key: named.get(key) or f"key {sha256(key).hexdigest()[:16]}" for key in keys}
    store = _store(waiting)
    state = _state(names, store)
    grid = SuperLinkGrid(state.state(), store, largest)
    config = uvicorn.Config(
        _application(state, names, grid, limits.body), host=host, port=port, log_level="error", access_log=False,
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
        server.should_exit = True
        alive.set()
        thread.join(timeout=10)
        heart.join(timeout=10)
        if waiting is not None:
            shutil.rmtree(waiting, ignore_errors=True)


def _whole(reply: Message, contents: dict[str, bytes], largest: int) -> Message:
    """A reply with its content; without any where that is not what it says it is."""
    if reply.has_error():
        return reply
    try:
        check_expansion(contents, largest)
        whole = inflate_object_from_contents(reply.metadata.message_id, contents)
    except Exception:  # whatever a site may have sent in place of its content
        whole = None
    return whole if isinstance(whole, Message) else make_message(reply.metadata, content=RecordDict())


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


def _store(waiting: Path | None) -> PieceStore:
    if waiting is not None:  # leftovers of a process that was killed
        shutil.rmtree(waiting, ignore_errors=True)
        private_folder(waiting)
    return PieceStore(waiting)


def _state(keys: Iterable[bytes], store: PieceStore) -> LinkStateFactory:
    """A state that knows these keys and one run."""
    objects = ObjectStoreFactory(FLWR_IN_MEMORY_DB_NAME)
    objects.store_instance = store
    factory = LinkStateFactory(FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), objects)
    state = factory.state()
    for public in keys:
        state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, public, 0)
    return factory


def _application(
    factory: LinkStateFactory, names: Mapping[bytes, str], grid: "SuperLinkGrid", seconds: float
) -> FastAPI:
    middleware = [
        Middleware(BaseHTTPMiddleware, dispatch=_noted),
        Middleware(BaseHTTPMiddleware, dispatch=http_error_translator),
        Middleware(BaseHTTPMiddleware, dispatch=_bounded),
        Middleware(BaseHTTPMiddleware, dispatch=_listed),
        Middleware(WholeBody, seconds=seconds),
        Middleware(ProtobufTranslationMiddleware),
        Middleware(NodeAuthMiddleware),
    ]
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, middleware=middleware)
    app.state.linkstate_factory = factory
    app.state.enable_supernode_auth = True
    app.state.names = names
    app.state.grid = grid
    app.include_router(router)  # before Flower's: the first route that fits is taken
    app.include_router(fleet_router)
    app.post(ABOUT)(_about)
    app.add_exception_handler(RequestRejected, _turned_away)
    return app


def _refuse(request: Request, status: int, why: str, closing: bool = False) -> Response:
    request.state.why = why
    return JSONResponse({"detail": why}, status, {"connection": "close"} if closing else None)


async def _turned_away(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestRejected)
    return _refuse(request, error.status_code, error.why)


async def _noted(request: Request, call_next: RequestResponseEndpoint) -> Response:
    """Log of all rejected requests, at whichever layer they are rejected."""
    response = await call_next(request)
    if response.status_code >= 400:
        why = getattr(request.state, "why", f"Flower says {response.status_code}")
        who = getattr(request.state, "who", ANONYMOUS)
        request.app.state.grid.notices.add(who, f"a request was turned away: {why}")
    return response


async def _bounded(request: Request, call_next: RequestResponseEndpoint) -> Response:
    """Limit on requests: one that is too long, or for another of Flower's interfaces, is rejected before it is read."""
    if not request.url.path.startswith("/v1/fleet/"):
        return _refuse(request, 404, "not found")
    if "transfer-encoding" in request.headers:  # counts instead of a length where both are given
        return _refuse(request, 400, "a request has a length and no transfer encoding", closing=True)
    length = request.headers.get("content-length", "")
    if request.method != "POST" or not length.isdigit() or int(length) > PIECE:
        return _refuse(request, 413, f"a request is a POST of at most {PIECE} bytes")
    return await call_next(request)


async def _listed(request: Request, call_next: RequestResponseEndpoint) -> Response:
    """Check of the sender's key before anything of a request is read; Flower checks the time of its signature."""
    headers = request.headers
    try:
        public = b64decode(headers.get(FLEET_HTTP_PUBLIC_KEY_HEADER, ""), validate=True)
        signature = b64decode(headers.get(FLEET_HTTP_SIGNATURE_HEADER, ""), validate=True)
        signed = headers.get(TIMESTAMP_HEADER, "").encode("ascii")
    except (ValueError, UnicodeError):
        return _refuse(request, 401, "a request is signed")
    name = request.app.state.names.get(public)
    if name is None:
        return _refuse(request, 403, "this key is not on the server's list")
    if not verify_signature(bytes_to_public_key(public), signed, signature):
        return _refuse(request, 401, "a request is signed by whom it is from")
    request.state.who = name
    request.state.connections.prove(request.state.connection, name)
    return await call_next(request)


def _about() -> dict[str, str | float]:
    """What a site compares with its own before it joins."""
    return {"confed": VERSION, "flwr": version("flwr"), "time": time.time()}


def _keep_alive(grid: "SuperLinkGrid", stop: threading.Event) -> None:
    """Flower ends runs whose leader has not been heard of for a while."""
    while not stop.wait(HEARTBEAT_DEFAULT_INTERVAL / 3):
        grid.beat()


class SuperLinkGrid(Grid):
    """Flower's grid over a state in this process.

    Args:
        state: Flower's state, with nodes, run and messages.
        store: where it has the pieces of messages.
        largest: bytes of a reply.

    Attributes:
        inbox: the replies that are waited for.
        notices: what was turned away.
    """

    def __init__(self, state: LinkState, store: PieceStore, largest: int = 2**31) -> None:
        self._state, self._store = state, store
        self.notices = RejectionLog(logging.getLogger(__name__))
        self.inbox = Inbox(state, store, largest, self.notices)
        self._run_id = state.create_run(
            None, None, None, {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP
        )
        runs = state.get_run_info(run_ids=[self._run_id])
        self._run = runs[0]
        task = self._run.primary_task_id
        if task is None or state.claim_task(task) is None or not state.activate_task(task):
            raise RuntimeError("Flower did not start the run")
        self._task = task
        self._partial: dict[str, list[Message]] = {}
        # Flower writes these into every message that this process makes.
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = self._run_id, SUPERLINK_NODE_ID, task

    @property
    def pieces(self) -> int:
        """The most pieces that a reply may consist of."""
        return self.inbox.pieces

    def bound(self, largest: int) -> None:
        """See :class:`confed.engines.remote.sites.Bounded`."""
        self.inbox.largest = min(self.inbox.largest, largest)

    def beat(self) -> None:
        """Heartbeat of the run; also drops requests whose time is over."""
        self._state.acknowledge_task_heartbeat(self._task)
        self.inbox.sweep(self._run_id)

    def set_run(self, run: Run) -> None:
        """Not supported: this grid has one run, its own."""
        raise NotImplementedError("a SuperLinkGrid has one run, its own")

    @property
    def run(self) -> Run:
        """See Flower's ``Grid``."""
        return self._run

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Deprecated in Flower, and not offered here."""
        raise NotImplementedError("make messages with flwr.app.Message")

    def get_node_ids(self) -> Iterable[int]:
        """See Flower's ``Grid``."""
        return self._state.get_nodes(self._run_id)

    def get_nodes(self) -> Iterable[NodeInfo]:
        """See Flower's ``Grid``: the nodes that are online."""
        return self._state.get_node_info(node_ids=list(self.get_node_ids()))

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """See Flower's ``Grid``; "" for a message that was not taken."""
        return [self._push(message) for message in messages]

    def _push(self, message: Message) -> str:
        message.metadata.__dict__["_message_id"] = message.object_id
        session = self._state.start_session(self._run_id)
        bare = remove_content_from_message(message)
        stored, missing = self._state.store_message_and_object_tree(bare, get_object_tree(message), session)
        if not stored:
            return ""
        self.inbox.expect(message.metadata.message_id, message.metadata.dst_node_id)
        objects, wanted = get_all_nested_objects(message), set(missing)
        for object_id, part in objects.items():
            if object_id in wanted:
                content = part.deflate()
                self._state.store_object(self._run_id, session, object_id, content)
                if self._store.size([object_id]) != len(content):  # Flower notes the error in its log
                    self.notices.add("this server", "a request could not be stored, and was not sent")
                    self.forget(message.metadata.message_id)
                    return ""
        return message.metadata.message_id

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """See Flower's ``Grid``: the replies that have arrived whole."""
        return [m for number in message_ids for m in self._pull(number)]

    def _pull(self, number: str) -> list[Message]:
        found: list[Message] = []
        # Flower hands a reply out once, whether or not its pieces have come in yet.
        for reply in self._partial.pop(number, None) or self._replies(number):
            contents = {} if reply.has_error() else self.inbox.contents(number)
            if contents is None:
                self._partial[number] = [reply]
            else:
                found.append(_whole(reply, contents, self.inbox.largest))
                self._store.delete(reply.metadata.message_id)  # of Flower's own making, where a node is away
        if found:
            self.forget(number)
        return found

    def _replies(self, number: str) -> list[Message]:
        if number in self._state.get_message_ids_from_run_id(self._run_id):
            with suppress(KeyError):  # its time was over at this moment
                return self._state.get_message_res({number}, self._run_id)
        about = Metadata(
            self._run_id, "", self.inbox.node(number), SUPERLINK_NODE_ID, number, "", time.time(), 0.0, "train"
        )
        return [make_message(about, error=Error(ErrorCode.MESSAGE_UNAVAILABLE, "nobody waits for this reply"))]

    def forget(self, number: str) -> None:
        """Removal of a message that is no longer waited for, with all its pieces and those of its reply."""
        self._partial.pop(number, None)
        self.inbox.forget(number)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """See Flower's ``Grid``; waits for all."""
        waiting, began, replies = set(self.push_messages(messages)) - {""}, time.monotonic(), list[Message]()
        while waiting and (timeout is None or time.monotonic() - began < timeout):
            for number in list(waiting):
                if got := self._pull(number):
                    replies += got
                    waiting.discard(number)
            time.sleep(0.05)
        return replies

"""Transport over Flower: requests and replies are Flower messages; and Flower's two applications.

Flower carries our own bytes (:mod:`confed.engines.remote.protocol`): a head, with a small body, in a ``ConfigRecord``;
a large body in an ``ArrayRecord`` of one array of bytes, which Flower cuts in pieces and, where it goes to several
sites, keeps once. There are two kinds of messages, "query.hello" and "train.call"; which action a call names is for the
site to judge.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Protocol

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from confed.engines.flower.grid import SuperLinkGrid
from confed.engines.remote.client import RefusingSite, Site
from confed.engines.remote.protocol import HELLO, Answer, Limits, Request, seal
from confed.engines.remote.sites import Connection
from confed.federation.messages import Message as Content

_KINDS = {HELLO: "query.hello"}
_GONE = ("registered", "offline", "unregistered")


SMALL = 2**20  # bytes up to which a body goes along with its head: Flower asks for every record of a message separately


BUSY = "ValueError: another process works in the folder of this site; its log says which"
"""Error of a site whose folder is locked."""


def pack(head: bytes, body: bytes) -> RecordDict:
    """Head and body as the content of a Flower message."""
    if len(body) <= SMALL:
        return RecordDict({"head": ConfigRecord({"head": head, "body": body})})
    array = Array(dtype="uint8", shape=(len(body),), stype="confed", data=body)
    return RecordDict({"head": ConfigRecord({"head": head}), "body": ArrayRecord({"body": array})})


def unpack(message: Message) -> tuple[bytes, bytes]:
    """Head and body of a Flower message."""
    content = message.content
    record, arrays = content.config_records.get("head"), content.array_records.get("body")
    if record is None or not content.keys() <= {"head", "body"}:
        raise ValueError(f"a message must hold the record 'head', and may hold 'body', got {sorted(content)[:10]}")
    head, body = record.get("head"), record.get("body")
    if arrays is not None and arrays.keys() == {"body"}:
        body = arrays["body"].data
    if not isinstance(head, bytes) or not isinstance(body, bytes):
        raise ValueError("a message must hold the bytes of a head and of a body")
    return head, body


class MessageGrid(Protocol):
    """What a transport needs of Flower's ``Grid``."""

    def get_nodes(self) -> Iterable[Any]: ...

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]: ...

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]: ...


class FlowerTransport:
    """A :class:`confed.engines.remote.sites.Transport` over a Flower grid."""

    def __init__(self, grid: MessageGrid, names: Callable[[bytes], str | None] | None = None) -> None:
        self._grid, self._names = grid, names
        self._own = grid if isinstance(grid, SuperLinkGrid) else None  # else Flower's, which has fewer methods

    def connections(self) -> Mapping[int, Connection]:
        connected: dict[int, Connection] = {}
        for node in self._grid.get_nodes():
            name = None if self._names is None else self._names(node.public_key)
            if node.status not in _GONE and (self._names is None or name is not None):
                connected[node.node_id] = Connection(node.last_activated_at, name)
        return connected

    def send(self, to: int, kind: str, head: bytes, body: bytes, lasts: float) -> str | None:
        # The reply, too, must be on its way before the message's time is over.
        message = Message(pack(head, body), to, _KINDS.get(kind, "train.call"), ttl=lasts + 60)
        sent = [number for number in self._grid.push_messages([message]) if number]
        return sent[0] if sent else None

    def receive(self, sent: str) -> tuple[bytes, bytes] | str | None:
        for message in self._grid.pull_messages([sent]):
            if message.has_error():
                return f"ConnectionError: {message.error.reason or f'Flower error {message.error.code}'}"
            try:
                return unpack(message)
            except ValueError:
                return b"", b""  # no head is refused where heads are read
        return None

    def wait(self, seconds: float) -> bool:
        """A grid of Flower's own does not tell what arrives."""
        return self._own is not None and self._own.wait(seconds)

    def set_max_reply_bytes(self, largest: int) -> None:
        """A grid of Flower's own has its own bounds."""
        if self._own is not None:
            self._own.set_max_reply_bytes(largest)

    def forget(self, sent: str) -> None:
        """Flower's own grids drop messages that expire."""
        if self._own is not None:
            self._own.forget(sent)


def client_app(
    site: Callable[[Context], Site | RefusingSite],
    alone: Callable[[Context], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> ClientApp:
    """A Flower application that answers for a site."""
    app = ClientApp()

    def answer(message: Message, context: Context) -> Message:
        (head, body), lock = unpack(message), alone(context)
        with ExitStack() as held:
            try:
                held.enter_context(lock)
            except ValueError as error:
                logging.getLogger(__name__).error("%s", error)
                refused = Answer(Request.from_bytes(head, Limits()).id, BUSY, False, 0.0)
                return Message(pack(refused.to_bytes(), seal(Content())), reply_to=message)
            return Message(pack(*site(context).handle(head, body)), reply_to=message)

    app.query(HELLO)(answer)
    app.train("call")(answer)
    return app


def server_app(main: Callable[[Grid, Context], None]) -> ServerApp:
    """A Flower application that leads a federation."""
    app = ServerApp()
    app.main()(main)
    return app

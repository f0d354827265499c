"""A site's connection to the server: a SuperNode in this process, over Flower's Fleet API.

Flower's own SuperNode fetches the application that it runs from the server, with all its code, and starts a process for
every message. This one runs the application that it is given, which is installed at the site, and stays: it dials out,
asks for messages, and when the connection breaks it dials again. Nothing that the server sends is ever code.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from confed.engines.flower.long_polls import WAIT
from confed.engines.flower.objects import INLINE, PIECE, attach, check_expansion, detach, most_pieces, pieces_of
from confed.engines.flower.private_api import (
    HEARTBEAT_MIN_INTERVAL,
    ActivateNodeRequest,
    DeactivateNodeRequest,
    ErrorCode,
    FleetHttpClient,
    FlowerError,
    InflatableObject,
    Node,
    NodeAuthHttpInterceptor,
    PullMessagesRequest,
    PullMessagesResponse,
    PushMessagesRequest,
    RuntimeVersionHttpInterceptor,
    SendNodeHeartbeatRequest,
    get_all_nested_objects,
    get_object_tree,
    inflate_object_from_contents,
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
    message_from_proto,
    message_to_proto,
    no_object_id_recompute,
    public_key_to_bytes,
    pull_objects,
    push_objects,
    remove_content_from_message,
)
from confed.engines.remote.protocol import printable, redact
from confed.system.events import Note, Progress, ignore

SOON = 0.02  # seconds from a reply to the next question to a server that answers at once where it has no message


def read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = load_ssh_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError, LookupError, NotImplementedError, UnsupportedAlgorithm) as error:
        raise ValueError(f"{path} is no private key of a site: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{path} must hold an elliptic curve key, got {type(key).__name__}")
    return key


def public_of(key: ec.EllipticCurvePrivateKey) -> str:
    """The public half of a site's key in OpenSSH's format."""
    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


def read_public(text: str) -> bytes:
    """A site's public key, written as OpenSSH does, as Flower writes it."""
    try:
        key = load_ssh_public_key(text.encode())
    except (ValueError, NotImplementedError, UnsupportedAlgorithm) as error:
        raise ValueError(f"{text[:60]!r} is no public key in OpenSSH's format: {str(error)[:200]}") from error
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError(f"a site's public key must be of an elliptic curve, got {text[:30]!r}")
    return public_key_to_bytes(key)


class SuperNode:
    """A connection that is opened again whenever it breaks."""

    def __init__(
        self,
        server: str,
        key: ec.EllipticCurvePrivateKey,
        root: bytes | None,
        *,
        interval: float = 2.0,
        largest: int = 2**31,
        progress: Progress = ignore,
    ) -> None:
        self._server, self._key, self._root = server, key, root
        self._interval, self._progress = interval, progress
        self._largest, self._most = largest, most_pieces(largest)
        self._public = public_key_to_bytes(key.public_key())

    def serve(self, app: ClientApp, stop: threading.Event, patience: float = math.inf) -> str:
        """Answers messages with the application until told to stop, or until the server was away for too long."""
        pause, last_error, lost = 1.0, "", time.monotonic()
        proxy = proxy_of(self._server.rpartition(":")[0].strip("[]"), "http" if self._root is None else "https")
        while not stop.is_set():
            connected = False
            try:
                with self._client() as client:
                    node = self._enter(client)
                    self._progress(Note(f"connected to {self._server}"))
                    pause, last_error, connected = 1.0, "", True
                    self._answer(client, node, app, stop)
            except Exception as error:  # whatever a server may send, the site stays
                text = f"no connection to {self._server}: {_reason(error, proxy)}; trying again"
                if text != last_error:
                    self._progress(Note(text))
                last_error, lost = text, time.monotonic() if connected else lost
                if time.monotonic() - lost >= patience:
                    return f"no connection to {self._server} for {patience:g} s" + (f"; {proxy}" if proxy else "")
                stop.wait(pause)
                pause = min(2 * pause, 10.0)
        return ""

    def _client(self) -> FleetHttpClient:
        client = _Bounded.from_server_address(
            self._server,
            self._root is None,
            self._root,
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="SuperNode"),
                NodeAuthHttpInterceptor(self._key, self._key.public_key()),
            ],
        )
        client.wait_for_messages(self._interval)
        return client

    def _enter(self, client: FleetHttpClient) -> Node:
        request = ActivateNodeRequest(public_key=self._public, heartbeat_interval=HEARTBEAT_MIN_INTERVAL)
        return Node(node_id=client.ActivateNode(request).node_id)

    def _answer(self, client: FleetHttpClient, node: Node, app: ClientApp, stop: threading.Event) -> None:
        quiet, lost = threading.Event(), threading.Event()
        heart = threading.Thread(target=self._beat, args=(node, quiet, lost), daemon=True)
        heart.start()
        pause, inline = SOON, False
        try:
            while not stop.is_set():
                if lost.is_set():
                    raise _Lost("the server does not know this connection any more")
                began = time.monotonic()
                came = client.PullMessages(PullMessagesRequest(node=node))
                if came.messages_list:
                    message, whole = self._fetch(client, node, came)
                    inline |= whole  # a server that sends pieces inside of messages takes them, too
                    self._reply(client, node, app, message, inline)
                    pause = SOON
                elif time.monotonic() - began < self._interval / 2:  # it does not let questions wait
                    stop.wait(pause)
                    pause = min(1.5 * pause, self._interval)
        finally:
            quiet.set()
            heart.join(timeout=10)
            with suppress(Exception):
                client.DeactivateNode(DeactivateNodeRequest(node_id=node.node_id))

    def _beat(self, node: Node, quiet: threading.Event, lost: threading.Event) -> None:
        """Heartbeat of this site while it computes, on a separate connection."""
        request = SendNodeHeartbeatRequest(node=node, heartbeat_interval=HEARTBEAT_MIN_INTERVAL)
        with self._client() as client:
            while not quiet.wait(HEARTBEAT_MIN_INTERVAL / 3):
                try:
                    if not client.SendNodeHeartbeat(request).success:
                        lost.set()
                except Exception:
                    continue  # asking for messages finds out what it means

    def _fetch(self, client: FleetHttpClient, node: Node, came: PullMessagesResponse) -> tuple[Message, bool]:
        """A message with its content, and whether it came with all its pieces."""
        try:
            inline = detach(came.messages_list[0])
            bare, tree = message_from_proto(came.messages_list[0]), came.message_object_trees[0]
            pieces, run = pieces_of(tree, self._most), bare.metadata.run_id
        except Exception as error:  # whatever a server may have sent in its place
            raise _Lost(f"the server sent what is no message: {error}") from error
        pull = _Counted(make_pull_object_fn_protobuf(client.PullObject, node, run), self._largest)
        if whole := inline.keys() == set(pieces):
            contents = inline
        else:
            contents = pull_objects(list(pieces), pull)
            make_confirm_message_received_fn_protobuf(client.ConfirmMessageReceived, node, run)(tree.object_id)
        try:
            check_expansion(contents, self._largest)
            message = inflate_object_from_contents(tree.object_id, contents)
        except Exception as error:
            raise _Lost(f"the server sent what is no message: {error}") from error
        if not isinstance(message, Message):
            raise _Lost(f"the server sent a {type(message).__name__}, which is no message")
        message.metadata.__dict__["_message_id"] = tree.object_id
        return message, whole

    def _reply(self, client: FleetHttpClient, node: Node, app: ClientApp, message: Message, inline: bool) -> None:
        began, run = time.perf_counter(), message.metadata.run_id
        try:
            reply = app(message, Context(run, node.node_id, {}, RecordDict(), {}))
        except Exception as error:  # a fault of ours must not end the connection
            text = f"{type(error).__name__}: {error}"
            self._progress(Note(f"refused: {text}"))
            reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, redact(text)), reply_to=message)
        seconds = time.perf_counter() - began
        reply.metadata.__dict__["_message_id"] = reply.object_id
        with no_object_id_recompute():
            bare, parts = message_to_proto(remove_content_from_message(reply)), get_all_nested_objects(reply)
            if inline and not reply.has_error() and (pieces := _small(parts)) is not None:
                attach(bare, pieces)
            answer = client.PushMessages(
                PushMessagesRequest(
                    node=node,
                    messages_list=[bare],
                    message_object_trees=[get_object_tree(reply)],
                    clientapp_runtime_list=[seconds],
                )
            )
            if wanted := set(answer.objects_to_push):
                push = make_push_object_fn_protobuf(client.PushObject, node, run, answer.session_id)
                push_objects(parts, push, object_ids_to_push=wanted)


def _small(parts: Mapping[str, InflatableObject]) -> dict[str, bytes] | None:
    """The pieces of a message as bytes; None where they are too many to travel inside of it."""
    pieces, room = dict[str, bytes](), INLINE
    for number, piece in parts.items():
        pieces[number] = piece.deflate()
        room -= len(pieces[number])
        if room < 0:
            return None
    return pieces


class _Bounded(FleetHttpClient):
    """Flower's client with responses of bounded size, from the requested address only and uncompressed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._client.follow_redirects = False
        self._client.headers["accept-encoding"] = "identity"
        self._client.event_hooks = {"response": [_bound]}  # called before anything of the content is read

    def wait_for_messages(self, seconds: float) -> None:
        """Lets questions for messages wait at the server for so long."""
        self._client.headers[WAIT] = f"{seconds:g}"


class _Short(httpx.SyncByteStream):
    """A response's content, up to the size of a piece."""

    def __init__(self, stream: httpx.SyncByteStream) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        came = 0
        for chunk in self._stream:
            came += len(chunk)
            if came > PIECE:
                raise _Lost(f"the server sent a response of more than {PIECE} bytes")
            yield chunk

    def close(self) -> None:
        self._stream.close()


def _bound(response: httpx.Response) -> None:
    if response.headers.get("content-encoding", "identity") != "identity":
        raise _Lost("the server sent a packed response")
    if isinstance(response.stream, httpx.SyncByteStream):
        response.stream = _Short(response.stream)


class _Counted:
    """Fetches pieces until they are together more than a message may have."""

    def __init__(self, pull: Callable[[str], bytes], largest: int) -> None:
        self._pull, self._left, self._lock = pull, largest, threading.Lock()

    def __call__(self, number: str) -> bytes:
        content = self._pull(number)
        with self._lock:
            self._left -= len(content)
            if self._left < 0:
                raise _Lost("the server sent a message of more bytes than this run's have")
        return content


class _Lost(Exception):
    """The server has forgotten the connection, or sends what it should not."""


def proxy_of(host: str, scheme: str = "https") -> str:
    """The proxy that the environment puts in front of a host, in words; "" where there is none."""
    named = getproxies().get(scheme) or getproxies().get("all", "")
    if not named or proxy_bypass(host):
        return ""
    address = urlsplit(named if "//" in named else f"//{named}")
    place = printable(address.netloc.rpartition("@")[2], 100)  # without a password
    return (
        f"the way goes through the proxy {place}, which the environment variable {scheme.upper()}_PROXY or ALL_PROXY "
        f"names; NO_PROXY={host} goes past it"
    )


def _reason(error: Exception, proxy: str = "") -> str:
    """Explanation of an error to the person at the site, with the proxy on the way there."""
    if isinstance(error, httpx.HTTPStatusError):
        told = FlowerError.from_json(error.response.text)
        if error.response.status_code == httpx.codes.UNAUTHORIZED:
            return "the server does not accept this site's signature; is its clock right?"
        if error.response.status_code == httpx.codes.FORBIDDEN:
            return "this site's key is not on the server's list"
        return f"the server says {error.response.status_code if told is None else printable(told.message, 200)}"
    text = printable((str(error) if isinstance(error, _Lost) else f"{type(error).__name__} {error}").strip(), 500)
    return f"{text}; {proxy}" if proxy and isinstance(error, httpx.TransportError) else text

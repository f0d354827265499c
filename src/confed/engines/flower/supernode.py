"""A site's connection to the server: a SuperNode in this process, over Flower's Fleet API.

Flower's own SuperNode fetches the application that it runs from the server, with all its code, and starts a process for
every message. This one runs the application that it is given, which is installed at the site, and stays: it dials out,
asks for messages, and when the connection breaks it dials again. Nothing that the server sends is ever code. Requests
are signed; responses are of bounded size, from the requested address only and uncompressed.
"""

import math
import ssl
import threading
import time
from base64 import b64encode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from email.utils import parsedate_to_datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_public_key,
)
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import now

from confed.engines.flower import private_api as internal
from confed.engines.flower.long_polls import WAIT
from confed.engines.flower.objects import (
    INLINE,
    PIECE,
    attach,
    carried,
    carry,
    check_expansion,
    detach,
    most_pieces,
    pieces_of,
)
from confed.engines.remote.protocol import printable, redact
from confed.system.events import Note, Progress, ignore
from confed.system.private_keys import load_private

SILENCE = 30.0  # seconds without a byte after which a connection counts as lost; a question may wait half of that
AGAIN = 1.0  # seconds until a heartbeat that was lost with its connection comes again
SKEW = 60.0  # seconds by which a server's clock must differ for a site to go by it
SOON = 0.02  # seconds from a reply to the next question to a server that answers at once where it has no message
PROTOBUF = "application/protobuf"
Response = TypeVar("Response")


def read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = load_private(path.read_bytes(), str(path))
    except OSError as error:
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
    return internal.public_key_to_bytes(key)


@lru_cache(8)
def _public_header(key: ec.EllipticCurvePrivateKey) -> str:
    return b64encode(internal.public_key_to_bytes(key.public_key())).decode()


def signed_headers(key: ec.EllipticCurvePrivateKey, ahead: float = 0.0) -> dict[str, str]:
    """Headers with a site's public key and its signature of the time; the server's clock is so many seconds ahead."""
    timestamp = (now() + timedelta(seconds=ahead)).isoformat()
    return {
        internal.FLEET_HTTP_PUBLIC_KEY_HEADER: _public_header(key),
        internal.TIMESTAMP_HEADER: timestamp,
        internal.FLEET_HTTP_SIGNATURE_HEADER: b64encode(internal.sign_message(key, timestamp.encode())).decode(),
    }


class LostConnection(Exception):
    """The server has forgotten the connection, or sends what it should not."""


class CallRefused(Exception):
    """The server's answer is no success."""

    def __init__(self, status: int, text: str, ahead: float = 0.0) -> None:
        detail = text.removeprefix('{"detail":"').removesuffix('"}')
        super().__init__(f"the server says {status} {printable(detail, 200)}".strip())
        self.status, self.ahead = status, ahead


def _ahead_of_here(date: str) -> float:
    """Seconds by which a server's clock is ahead, by the date of its response; 0 where that has none."""
    with suppress(ValueError, TypeError):
        return (parsedate_to_datetime(date) - now()).total_seconds()
    return 0.0


class FleetClient(httpx.Client):
    """Calls of the Fleet API, signed by a site."""

    def __init__(self, server: str, key: ec.EllipticCurvePrivateKey, root: bytes | None) -> None:
        trusted: ssl.SSLContext | bool = True
        if root is not None:
            trusted = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            trusted.load_verify_locations(cadata=root.decode("ascii"))
        super().__init__(
            base_url=f"{'http' if root is None else 'https'}://{server}/v1/fleet/", verify=trusted, timeout=SILENCE,
            headers={"accept-encoding": "identity", "content-type": PROTOBUF, "accept": PROTOBUF},
        )  # fmt: skip
        self._key, self._ahead = key, 0.0

    def call(self, path: str, request: Any, kind: type[Response], **headers: str) -> Response:
        """The response to a protobuf message."""
        try:
            return self._call(path, request, kind, headers)
        except CallRefused as error:
            if error.status != httpx.codes.UNAUTHORIZED or abs(error.ahead - self._ahead) < SKEW:
                raise
            self._ahead = error.ahead  # signed by the server's clock, as this one goes wrong
        return self._call(path, request, kind, headers)

    def _call(self, path: str, request: Any, kind: type[Response], headers: Mapping[str, str]) -> Response:
        headers = {**signed_headers(self._key, self._ahead), **headers}
        content, body = request.SerializeToString(deterministic=True), bytearray()
        with self.stream("POST", path, content=content, headers=headers) as response:
            if response.headers.get("content-encoding", "identity") != "identity":
                raise LostConnection("the server sent a packed response")
            for chunk in response.iter_raw():
                body += chunk
                if len(body) > PIECE:
                    raise LostConnection(f"the server sent a response of more than {PIECE} bytes")
        if not response.is_success:
            ahead = _ahead_of_here(response.headers.get("date", ""))
            raise CallRefused(response.status_code, body.decode(errors="replace"), ahead)
        parsed: Any = kind()
        try:
            parsed.ParseFromString(bytes(body))
        except Exception as error:
            raise LostConnection("the server sent what is no protobuf message") from error
        return parsed


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
        self._public = internal.public_key_to_bytes(key.public_key())

    def serve(self, app: ClientApp, stop: threading.Event, patience: float = math.inf) -> str:
        """Answers messages with the application until told to stop, or until the server was away for too long."""
        pause, last_error, lost = 1.0, "", time.monotonic()
        proxy = proxy_of(self._server.rpartition(":")[0].strip("[]"), "http" if self._root is None else "https")
        while not stop.is_set():
            connected = False
            try:
                with self.client() as client:
                    node = self.enter(client)
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

    def client(self) -> FleetClient:
        return FleetClient(self._server, self._key, self._root)

    def enter(self, client: FleetClient) -> internal.Node:
        """The node of the server's that is this site's."""
        request = internal.ActivateNodeRequest(
            public_key=self._public, heartbeat_interval=internal.HEARTBEAT_MIN_INTERVAL
        )
        return internal.Node(node_id=client.call("activate-node", request, internal.ActivateNodeResponse).node_id)

    def _answer(self, client: FleetClient, node: internal.Node, app: ClientApp, stop: threading.Event) -> None:
        quiet, lost = threading.Event(), threading.Event()
        heart = threading.Thread(target=self._beat, args=(node, quiet, lost), daemon=True)
        heart.start()
        pause, inline = SOON, False
        reply: internal.PushMessagesRequest | None = None  # what the next request carries
        try:
            while not stop.is_set():
                if lost.is_set():
                    raise LostConnection("the server does not know this connection any more")
                began = time.monotonic()
                waits, request = {WAIT: f"{self._interval:g}"}, internal.PullMessagesRequest(node=node)
                if reply is not None:
                    carry(request, reply.SerializeToString(deterministic=True))
                    reply = None
                came = client.call("pull-messages", request, internal.PullMessagesResponse, **waits)
                if came.messages_list:
                    message, whole = self._fetch(client, node, came)
                    inline |= whole  # a server that sends pieces inside of messages takes them, too
                    reply = self._reply(client, node, app, message, inline, carried(came) is not None)
                    pause = SOON
                elif time.monotonic() - began < self._interval / 2:  # it does not let questions wait
                    stop.wait(pause)
                    pause = min(1.5 * pause, self._interval)
            if reply is not None:
                client.call("push-messages", reply, internal.PushMessagesResponse)
        finally:
            quiet.set()
            heart.join(timeout=10)
            with suppress(Exception):
                client.call(
                    "deactivate-node",
                    internal.DeactivateNodeRequest(node_id=node.node_id),
                    internal.DeactivateNodeResponse,
                )

    def _beat(self, node: internal.Node, quiet: threading.Event, lost: threading.Event) -> None:
        """Heartbeat of this site while it computes, on a separate connection."""
        request = internal.SendNodeHeartbeatRequest(node=node, heartbeat_interval=internal.HEARTBEAT_MIN_INTERVAL)
        with self.client() as client:
            pause = internal.HEARTBEAT_MIN_INTERVAL / 3
            while not quiet.wait(pause):
                pause = AGAIN
                try:
                    if not client.call("send-node-heartbeat", request, internal.SendNodeHeartbeatResponse).success:
                        lost.set()
                except Exception:
                    continue  # asking for messages finds out what it means
                pause = internal.HEARTBEAT_MIN_INTERVAL / 3

    def _fetch(
        self, client: FleetClient, node: internal.Node, came: internal.PullMessagesResponse
    ) -> tuple[Message, bool]:
        """A message with its content, and whether it came with all its pieces."""
        try:
            inline = detach(came.messages_list[0])
            bare, tree = internal.message_from_proto(came.messages_list[0]), came.message_object_trees[0]
            pieces, run = pieces_of(tree, self._most), bare.metadata.run_id
        except Exception as error:  # whatever a server may have sent in its place
            raise LostConnection(f"the server sent what is no message: {error}") from error
        if whole := inline.keys() == set(pieces):
            contents = inline
        else:
            contents = self._pull(client, node, run, pieces)
            received = internal.ConfirmMessageReceivedRequest(node=node, run_id=run, message_object_id=tree.object_id)
            client.call("confirm-message-received", received, internal.ConfirmMessageReceivedResponse)
        try:
            check_expansion(contents, self._largest)
            message = internal.inflate_object_from_contents(tree.object_id, contents)
        except Exception as error:
            raise LostConnection(f"the server sent what is no message: {error}") from error
        if not isinstance(message, Message):
            raise LostConnection(f"the server sent a {type(message).__name__}, which is no message")
        message.metadata.__dict__["_message_id"] = tree.object_id
        return message, whole

    def _pull(self, client: FleetClient, node: internal.Node, run: int, pieces: Sequence[str]) -> dict[str, bytes]:
        """The pieces of a message, until they are together more than it may have."""
        contents, left = dict[str, bytes](), self._largest
        for piece in pieces:
            request = internal.PullObjectRequest(node=node, run_id=run, object_id=piece)
            came = client.call("pull-object", request, internal.PullObjectResponse)
            if not came.object_found or not came.object_available:
                raise LostConnection("the server has no such piece of its message")
            contents[piece] = came.object_content
            left -= len(came.object_content)
            if left < 0:
                raise LostConnection("the server sent a message of more bytes than this run's have")
        return contents

    def _reply(
        self, client: FleetClient, node: internal.Node, app: ClientApp, message: Message, inline: bool, carries: bool
    ) -> internal.PushMessagesRequest | None:
        """Answers a message; what is returned is for the next request to carry."""
        began, run = time.perf_counter(), message.metadata.run_id
        try:
            reply = app(message, Context(run, node.node_id, {}, RecordDict(), {}))
        except Exception as error:  # a fault of ours must not end the connection
            text = f"{type(error).__name__}: {error}"
            self._progress(Note(f"refused: {text}"))
            reply = Message(Error(internal.ErrorCode.CLIENT_APP_RAISED_EXCEPTION, redact(text)), reply_to=message)
        seconds = time.perf_counter() - began
        # A reply lasts as long as its request, by the server's clock; by ours that time may be over.
        reply.metadata.created_at, reply.metadata.ttl = message.metadata.created_at, message.metadata.ttl
        with internal.no_object_id_recompute():
            reply.metadata.__dict__["_message_id"] = reply.object_id
            bare, parts = (
                internal.message_to_proto(internal.remove_content_from_message(reply)),
                internal.get_all_nested_objects(reply),
            )
            pieces = _small(parts) if inline and not reply.has_error() else None
            if pieces is not None:
                attach(bare, pieces)
            request = internal.PushMessagesRequest(
                node=node, messages_list=[bare], message_object_trees=[internal.get_object_tree(reply)],
                clientapp_runtime_list=[seconds],
            )  # fmt: skip
            if pieces is not None and carries:
                return request
            answer = client.call("push-messages", request, internal.PushMessagesResponse)
            for piece in answer.objects_to_push:
                content = parts[piece].deflate()
                push = internal.PushObjectRequest(
                    node=node, run_id=run, object_id=piece, object_content=content, session_id=answer.session_id
                )
                if not client.call("push-object", push, internal.PushObjectResponse).stored:
                    raise LostConnection("the server did not take a piece of the reply")
        return None


def _small(parts: Mapping[str, internal.InflatableObject]) -> dict[str, bytes] | None:
    """The pieces of a message as bytes; None where they are too many to travel inside of it."""
    pieces, room = dict[str, bytes](), INLINE
    for number, piece in parts.items():
        pieces[number] = piece.deflate()
        room -= len(pieces[number])
        if room < 0:
            return None
    return pieces


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
    if isinstance(error, CallRefused):
        if error.status == httpx.codes.UNAUTHORIZED:
            return "the server does not accept this site's signature; is its clock right?"
        return str(error)
    text = str(error) if isinstance(error, LostConnection) else f"{type(error).__name__} {error}".strip()
    text = printable(text, 500)
    return f"{text}; {proxy}" if proxy and isinstance(error, httpx.TransportError) else text

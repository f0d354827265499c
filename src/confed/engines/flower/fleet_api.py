"""HTTP application of Flower's Fleet API for SuperNodes on a list: limits and signatures of requests.

It is one ASGI application, without Flower's middleware and routes: a request is checked, read, and answered by Flower's
handlers or by :class:`confed.engines.flower.grid.Inbox`. A site of confed's may ask in a way that Flower's SuperNode
does not: its request for a message waits (:mod:`confed.engines.flower.long_polls`), and carries its reply to the
message before (:mod:`confed.engines.flower.objects`).
"""

import asyncio
import time
from base64 import b64decode
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache
from importlib.metadata import version
from typing import Any, TypeVar

from flwr.common import now
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from confed.engines.flower import private_api as internal
from confed.engines.flower.grid import RequestRejected, SuperLinkGrid
from confed.engines.flower.long_polls import LONGEST, WAIT
from confed.engines.flower.objects import PIECE, carried, carry
from confed.system.release import PROTOCOL, VERSION

Answer = TypeVar("Answer")

FLEET = "/v1/fleet/"
ABOUT = f"{FLEET}about"  # path under which a listed site may ask for the server's versions and clock, without joining
ANONYMOUS = "somebody"  # name of senders that are not on the list, in the log
BRIEF = 2**16  # bytes of a request that no thread of its own is needed for
REQUESTS: Mapping[str, Any] = {
    f"{FLEET}activate-node": internal.ActivateNodeRequest,
    f"{FLEET}deactivate-node": internal.DeactivateNodeRequest,
    f"{FLEET}send-node-heartbeat": internal.SendNodeHeartbeatRequest,
    f"{FLEET}pull-messages": internal.PullMessagesRequest,
    f"{FLEET}push-messages": internal.PushMessagesRequest,
    f"{FLEET}pull-object": internal.PullObjectRequest,
    f"{FLEET}push-object": internal.PushObjectRequest,
    f"{FLEET}confirm-message-received": internal.ConfirmMessageReceivedRequest,
}
parsed_key = lru_cache(1024)(internal.bytes_to_public_key)  # of the keys on the list only


async def whole_body(receive: Receive, seconds: float, most: int = PIECE) -> bytes | None:
    """A request's body that comes whole, within its limits; None where the connection has ended."""
    try:
        return await asyncio.wait_for(_read(receive, most), seconds)
    except TimeoutError as error:
        raise RequestRejected(408, f"its body took more than {seconds:g} s", closing=True) from error


async def _read(receive: Receive, most: int) -> bytes | None:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if len(body) > most:
            raise RequestRejected(413, f"a request is a POST of at most {most} bytes", closing=True)
        if not message.get("more_body", False):
            return bytes(body)


def check_bounds(request: Request) -> None:
    """Rejection of a request that is too long, or for another of Flower's interfaces, before it is read."""
    if request.url.path not in REQUESTS and request.url.path != ABOUT:
        raise RequestRejected(404, "not found")
    if "transfer-encoding" in request.headers:  # counts instead of a length where both are given
        raise RequestRejected(400, "a request has a length and no transfer encoding", closing=True)
    length = request.headers.get("content-length", "")
    if request.method != "POST" or not length.isdigit() or int(length) > PIECE:
        raise RequestRejected(413, f"a request is a POST of at most {PIECE} bytes")


class FleetApplication:
    """The application; ``seconds`` is the time for the body of a request, ``refusal`` says why a key may not join."""

    def __init__(
        self, names: Mapping[bytes, str], grid: SuperLinkGrid, seconds: float, refusal: Callable[[bytes], str]
    ) -> None:
        self._names, self._grid, self._seconds, self._refusal = names, grid, seconds, refusal
        self._inbox = inbox = grid.inbox
        self._in_memory: Mapping[type, Callable[[Any, internal.LinkState], Any]] = {
            internal.ActivateNodeRequest: self._activate,
            internal.DeactivateNodeRequest: internal.deactivate_node,
            internal.SendNodeHeartbeatRequest: internal.send_node_heartbeat,
        }
        self._on_disk: Mapping[type, Callable[[Any, str], Any]] = {
            internal.PushMessagesRequest: inbox.announce,
            internal.PushObjectRequest: inbox.take,
            internal.PullObjectRequest: lambda call, who: internal.pull_object(call, inbox.state),
            internal.ConfirmMessageReceivedRequest: lambda call, who: inbox.confirm(call),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        request = Request(scope, receive)
        response = await internal.http_error_translator(request, self._answer)
        if response.status_code >= 400:
            why = getattr(request.state, "why", f"Flower says {response.status_code}")
            who = getattr(request.state, "who", ANONYMOUS)
            self._grid.notices.add(who, f"a request was turned away: {why}")
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        try:
            check_bounds(request)
            public = self._check_signature(request)
            body = await whole_body(request.receive, self._seconds)
            if body is None:
                return Response()  # to nobody: the connection has ended
            if request.url.path == ABOUT:
                return JSONResponse(_about())
            answer = await self._answer_call(request, self._read_call(request, public, body))
        except RequestRejected as error:
            request.state.why = error.why
            raise
        return Response(answer.SerializeToString(), media_type="application/protobuf")

    def _check_signature(self, request: Request) -> bytes:
        """The sender's key, from the list, with which the time of the request is signed."""
        headers = request.headers
        try:
            public = b64decode(headers.get(internal.FLEET_HTTP_PUBLIC_KEY_HEADER, ""), validate=True)
            signature = b64decode(headers.get(internal.FLEET_HTTP_SIGNATURE_HEADER, ""), validate=True)
            signed = headers.get(internal.TIMESTAMP_HEADER, "").encode("ascii")
        except (ValueError, UnicodeError) as error:
            raise RequestRejected(401, "a request is signed") from error
        name = self._names.get(public)
        if name is None:
            raise RequestRejected(403, self._refusal(public))
        if not internal.verify_signature(parsed_key(public), signed, signature):
            raise RequestRejected(401, "a request is signed by whom it is from")
        try:
            age = (now() - datetime.fromisoformat(signed.decode())).total_seconds()
        except (ValueError, TypeError) as error:  # no time, or one without its zone
            raise RequestRejected(401, "a request is signed with its time") from error
        if not -internal.SYSTEM_TIME_TOLERANCE < age < internal.TIMESTAMP_TOLERANCE + internal.SYSTEM_TIME_TOLERANCE:
            raise RequestRejected(401, "a request is signed at the time when it is sent")
        request.state.who = name
        request.state.connections.prove(request.state.connection, name)
        return public

    def _read_call(self, request: Request, public: bytes, body: bytes) -> Any:
        """The protobuf message of a request, from the node that the key belongs to."""
        try:
            call = REQUESTS[request.url.path].FromString(body)
        except Exception as error:
            raise RequestRejected(400, "what was sent is no request") from error
        if isinstance(call, internal.ActivateNodeRequest):
            genuine = call.public_key == public
        else:
            node = call.node_id if isinstance(call, internal.DeactivateNodeRequest) else call.node.node_id
            genuine = self._inbox.state.get_node_id_by_public_key(public) == node
        if not genuine:
            raise RequestRejected(401, "a request is for the node whose key has signed it")
        return call

    async def _answer_call(self, request: Request, call: Any) -> Any:
        who = request.state.who
        if isinstance(call, internal.PullMessagesRequest):
            return await self._pull(call, who, _seconds(request))
        if (at_once := self._in_memory.get(type(call))) is not None:
            return at_once(call, self._inbox.state)
        return await run_in_threadpool(self._on_disk[type(call)], call, who)

    def _activate(self, call: internal.ActivateNodeRequest, state: internal.LinkState) -> internal.ActivateNodeResponse:
        node = state.get_node_id_by_public_key(call.public_key)
        if node is not None:
            self._inbox.polls.end(node)
        return internal.activate_node(call, state)

    async def _pull(
        self, call: internal.PullMessagesRequest, who: str, seconds: float
    ) -> internal.PullMessagesResponse:
        inbox = self._inbox
        # A site that asks is alive, also where its heartbeats hang on a connection over which nothing comes any more.
        inbox.state.acknowledge_node_heartbeat(call.node.node_id, internal.HEARTBEAT_MIN_INTERVAL)
        waiting = inbox.polls.begin(call.node.node_id) if seconds else None

        def next_message(reply: bytes | None = None) -> internal.PullMessagesResponse | None:
            if reply:
                self._take_carried(call, reply, who)
            if waiting is None:
                return internal.pull_messages(call, inbox.state, inbox.store)
            return inbox.polls.take(waiting, lambda: inbox.hand_out(call))

        end = time.monotonic() + seconds
        reply = carried(call)
        try:
            if reply is not None and len(reply) > BRIEF:
                came = await run_in_threadpool(next_message, reply)
            else:
                came = await self._soon(next_message, reply)
            while waiting is not None and came is not None and not came.messages_list:
                left = end - time.monotonic()
                if left <= 0:
                    break
                await waiting.pause(left)
                came = await self._soon(next_message)
        finally:
            if waiting is not None:
                inbox.polls.leave(waiting)
        came = came or internal.PullMessagesResponse()
        carry(came, b"")
        return came

    async def _soon(self, act: Callable[..., Answer], *given: object) -> Answer:
        """A result; a thread of its own is needed only while another one is busy with replies, perhaps with a disk."""
        if not self._inbox.lock.acquire(blocking=False):
            return await run_in_threadpool(act, *given)
        try:
            return act(*given)
        finally:
            self._inbox.lock.release()

    def _take_carried(self, call: internal.PullMessagesRequest, reply: bytes, who: str) -> None:
        """Takes a reply that came with a request for the next message, as if it had come alone."""
        try:
            push = internal.PushMessagesRequest.FromString(reply)
        except Exception as error:
            raise RequestRejected(400, "what a request carries is no reply") from error
        push.node.CopyFrom(call.node)  # which was compared with the signature
        self._inbox.announce(push, who)


def _seconds(request: Request) -> float:
    """How long a request may wait; 0 for what is no such number."""
    try:
        seconds = float(request.headers.get(WAIT, "0"))
    except ValueError:
        return 0.0
    return min(seconds, LONGEST) if seconds > 0 else 0.0


def _about() -> dict[str, str | int | float]:
    """What a site compares with its own before it joins."""
    return {"confed": VERSION, "protocol": PROTOCOL, "flwr": version("flwr"), "time": time.time()}

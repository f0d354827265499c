"""HTTP application of Flower's Fleet API for SuperNodes on a list: limits and signatures of requests.

A site of confed's may ask in a way that Flower's SuperNode does not: its request for a message waits
(:mod:`confed.engines.flower.long_polls`), and carries its reply to the message before
(:mod:`confed.engines.flower.objects`).
"""

import asyncio
import time
from base64 import b64decode
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from confed.engines.flower.grid import Inbox, RequestRejected, SuperLinkGrid
from confed.engines.flower.long_polls import LONGEST, WAIT
from confed.engines.flower.objects import PIECE, carried, carry
from confed.engines.flower.private_api import (
    FLEET_HTTP_PUBLIC_KEY_HEADER,
    FLEET_HTTP_SIGNATURE_HEADER,
    TIMESTAMP_HEADER,
    ActivateNodeRequest,
    ActivateNodeResponse,
    ConfirmMessageReceivedRequest,
    ConfirmMessageReceivedResponse,
    LinkStateFactory,
    NodeAuthMiddleware,
    ProtobufRoute,
    ProtobufTranslationMiddleware,
    PullMessagesRequest,
    PullMessagesResponse,
    PushMessagesRequest,
    PushMessagesResponse,
    PushObjectRequest,
    PushObjectResponse,
    activate_node,
    bytes_to_public_key,
    fleet_router,
    get_protobuf_request,
    http_error_translator,
    pull_messages,
    verify_signature,
)
from confed.system.release import PROTOCOL, VERSION


class WholeBody:
    """An ASGI middleware that hands on requests whose body has come whole, within its limits."""

    def __init__(self, app: ASGIApp, seconds: float, most: int = PIECE) -> None:
        self._app, self._seconds, self._most = app, seconds, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        try:
            body = await asyncio.wait_for(self._read(receive), self._seconds)
        except TimeoutError:
            return await _refused(408, f"its body took more than {self._seconds:g} s", scope, receive, send)
        except ValueError as error:
            return await _refused(413, str(error), scope, receive, send)
        if body is None:
            return None  # the connection has ended
        waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return waiting.pop() if waiting else await receive()

        return await self._app(scope, replay, send)

    async def _read(self, receive: Receive) -> bytes | None:
        """The body; None where the connection has ended."""
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return None
            body += message.get("body", b"")
            if len(body) > self._most:
                raise ValueError(f"a request is a POST of at most {self._most} bytes")
            if not message.get("more_body", False):
                return bytes(body)


async def _refused(status: int, why: str, scope: Scope, receive: Receive, send: Send) -> None:
    Request(scope).state.why = why
    # What is still on its way is not waited for.
    await JSONResponse({"detail": why}, status, {"connection": "close"})(scope, receive, send)


router = APIRouter(prefix="/v1/fleet", route_class=ProtobufRoute)
"""Takes the place of Flower's routes of the same names."""


# A plain function would be called in another thread, which takes longer than each of these.
async def _whose(http: Request) -> tuple[Inbox, str]:
    return http.app.state.grid.inbox, http.state.who


async def _parsed(http: Request) -> Any:
    return get_protobuf_request(http)


async def _seconds(http: Request) -> float:
    """How long a request may wait; 0 for what is no such number."""
    try:
        seconds = float(http.headers.get(WAIT, "0"))
    except ValueError:
        return 0.0
    return min(seconds, LONGEST) if seconds > 0 else 0.0


Whose = Annotated[tuple[Inbox, str], Depends(_whose)]
PARSED = Depends(_parsed)


@router.post("/activate-node")
def _activate(request: Annotated[ActivateNodeRequest, PARSED], whose: Whose) -> ActivateNodeResponse:
    inbox = whose[0]
    node = inbox.state.get_node_id_by_public_key(request.public_key)
    if node is not None:
        inbox.polls.end(node)
    return activate_node(request=request, state=inbox.state)


@router.post("/pull-messages")
async def _pull(
    request: Annotated[PullMessagesRequest, PARSED],
    whose: Whose,
    seconds: Annotated[float, Depends(_seconds)],
) -> PullMessagesResponse:
    inbox, polls = whose[0], whose[0].polls
    waiting = polls.begin(request.node.node_id) if seconds else None

    def next_message(reply: bytes | None = None) -> PullMessagesResponse | None:
        if reply:
            _take_carried(request, reply, whose)
        if waiting is None:
            return pull_messages(request, inbox.state, inbox.store)
        return polls.take(waiting, lambda: inbox.hand_out(request))

    end = time.monotonic() + seconds
    try:
        came = await run_in_threadpool(next_message, carried(request))
        while waiting is not None and came is not None and not came.messages_list:
            left = end - time.monotonic()
            if left <= 0:
                break
            await waiting.pause(left)
            came = await run_in_threadpool(next_message)
    finally:
        if waiting is not None:
            polls.leave(waiting)
    came = came or PullMessagesResponse()
    carry(came, b"")
    return came


def _take_carried(request: PullMessagesRequest, reply: bytes, whose: tuple[Inbox, str]) -> None:
    """Takes a reply that came with a request for the next message, as if it had come alone."""
    try:
        push = PushMessagesRequest.FromString(reply)
    except Exception as error:
        raise RequestRejected(400, "what a request carries is no reply") from error
    push.node.CopyFrom(request.node)  # which Flower has compared with the signature
    whose[0].announce(push, whose[1])


@router.post("/push-messages")
def _announce(request: Annotated[PushMessagesRequest, PARSED], whose: Whose) -> PushMessagesResponse:
    return whose[0].announce(request, whose[1])


@router.post("/push-object")
def _take(request: Annotated[PushObjectRequest, PARSED], whose: Whose) -> PushObjectResponse:
    return whose[0].take(request, whose[1])


@router.post("/confirm-message-received")
def _confirm(request: Annotated[ConfirmMessageReceivedRequest, PARSED], whose: Whose) -> ConfirmMessageReceivedResponse:
    return whose[0].confirm(request)


ABOUT = "/v1/fleet/about"  # path under which a listed site may ask for the server's versions and clock, without joining
ANONYMOUS = "somebody"  # name of senders that are not on the list, in the log


def fleet_application(
    factory: LinkStateFactory,
    names: Mapping[bytes, str],
    grid: SuperLinkGrid,
    seconds: float,
    refusal: Callable[[bytes], str],
) -> FastAPI:
    middleware = [
        Middleware(Gate),
        Middleware(WholeBody, seconds=seconds),
        Middleware(BaseHTTPMiddleware, dispatch=http_error_translator),
        Middleware(ProtobufTranslationMiddleware),
        Middleware(NodeAuthMiddleware),
    ]
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, middleware=middleware)
    app.state.linkstate_factory = factory
    app.state.enable_supernode_auth = True
    app.state.names, app.state.refusal = names, refusal
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


class Gate:
    """An ASGI middleware that lets bounded requests of listed sites in; whatever is rejected behind it, it notes."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        request = Request(scope)

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                why = getattr(request.state, "why", f"Flower says {message['status']}")
                who = getattr(request.state, "who", ANONYMOUS)
                request.app.state.grid.notices.add(who, f"a request was turned away: {why}")
            await send(message)

        refusal = _unbounded(request) or _unlisted(request)
        return await (self._app if refusal is None else refusal)(scope, receive, noted)


def _unbounded(request: Request) -> Response | None:
    """Rejection of a request that is too long, or for another of Flower's interfaces, before it is read."""
    if not request.url.path.startswith("/v1/fleet/"):
        return _refuse(request, 404, "not found")
    if "transfer-encoding" in request.headers:  # counts instead of a length where both are given
        return _refuse(request, 400, "a request has a length and no transfer encoding", closing=True)
    length = request.headers.get("content-length", "")
    if request.method != "POST" or not length.isdigit() or int(length) > PIECE:
        return _refuse(request, 413, f"a request is a POST of at most {PIECE} bytes")
    return None


def _unlisted(request: Request) -> Response | None:
    """Rejection by the sender's key before anything of a request is read; Flower checks the time of its signature."""
    headers = request.headers
    try:
        public = b64decode(headers.get(FLEET_HTTP_PUBLIC_KEY_HEADER, ""), validate=True)
        signature = b64decode(headers.get(FLEET_HTTP_SIGNATURE_HEADER, ""), validate=True)
        signed = headers.get(TIMESTAMP_HEADER, "").encode("ascii")
    except (ValueError, UnicodeError):
        return _refuse(request, 401, "a request is signed")
    name = request.app.state.names.get(public)
    if name is None:
        return _refuse(request, 403, request.app.state.refusal(public))
    if not verify_signature(bytes_to_public_key(public), signed, signature):
        return _refuse(request, 401, "a request is signed by whom it is from")
    request.state.who = name
    request.state.connections.prove(request.state.connection, name)
    return None


def _about() -> dict[str, str | int | float]:
    """What a site compares with its own before it joins."""
    return {"confed": VERSION, "protocol": PROTOCOL, "flwr": version("flwr"), "time": time.time()}

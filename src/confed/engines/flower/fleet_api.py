"""HTTP application of Flower's Fleet API for SuperNodes on a list: limits and signatures of requests."""

import time
from base64 import b64decode
from collections.abc import Mapping
from importlib.metadata import version

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint

from confed.engines.flower.fleet_routes import router
from confed.engines.flower.grid import SuperLinkGrid
from confed.engines.flower.inbox import RequestRejected
from confed.engines.flower.objects import PIECE
from confed.engines.flower.private_api import (
    FLEET_HTTP_PUBLIC_KEY_HEADER,
    FLEET_HTTP_SIGNATURE_HEADER,
    TIMESTAMP_HEADER,
    LinkStateFactory,
    NodeAuthMiddleware,
    ProtobufTranslationMiddleware,
    bytes_to_public_key,
    fleet_router,
    http_error_translator,
    verify_signature,
)
from confed.engines.flower.request_limits import WholeBody
from confed.system.release import VERSION

ABOUT = "/v1/fleet/about"
"""Path under which a listed site may ask for the server's versions and clock, without joining."""

ANONYMOUS = "somebody"
"""Name of senders that are not on the list, in the log."""


def fleet_application(
    factory: LinkStateFactory, names: Mapping[bytes, str], grid: SuperLinkGrid, seconds: float
) -> FastAPI:
    """The application."""
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

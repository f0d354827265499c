"""Limits on the body of an HTTP request, in bytes as they arrive and in seconds."""

import asyncio

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from confed.engines.flower.objects import PIECE


class WholeBody:
    """An ASGI middleware that hands on requests whose body has come whole, within its limits.

    Flower's own middleware waits for the whole body of whatever length. What a head says of the length is not relied
    on here.
    """

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

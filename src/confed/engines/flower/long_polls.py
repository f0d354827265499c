"""Requests of sites for messages that wait at the server until there is one.

Flower's SuperNode asks for messages at intervals. A site of confed's says in a header for how long its request may wait
(:data:`WAIT`), and gets a message as soon as the server sends one. Requests without the header are answered at once.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

Handed = TypeVar("Handed")

WAIT = "confed-wait"  # header with the seconds for which a site's request for a message may wait
LONGEST = 30.0  # seconds for which a request waits, at most; Flower's clients wait that long for a response


class WaitingRequest:
    """One request of a node for its next message."""

    def __init__(self, node: int) -> None:
        self.node = node
        self._loop, self._rung = asyncio.get_running_loop(), asyncio.Event()

    def ring(self) -> None:
        """Ends the pause of the request; from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._rung.set)

    async def pause(self, seconds: float) -> None:
        """Waits until :meth:`ring` was called since the last pause, or so many seconds."""
        try:
            await asyncio.wait_for(self._rung.wait(), seconds)
        except TimeoutError:
            return
        self._rung.clear()


class LongPolls:
    """The requests that wait, one of each node.

    A message is handed out once. Hence a request whose connection has broken must not take one: a node's newer request,
    and its return (:meth:`end`), put an end to the older one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, WaitingRequest] = {}
        self._closed = False

    def begin(self, node: int) -> WaitingRequest:
        """A node's new request, in place of its older one."""
        self.end(node)
        request = WaitingRequest(node)
        with self._lock:
            if not self._closed:
                self._waiting[node] = request
        return request

    def end(self, node: int) -> None:
        """A node's request takes no message any more."""
        with self._lock:
            request = self._waiting.pop(node, None)
        if request is not None:
            request.ring()

    def leave(self, request: WaitingRequest) -> None:
        with self._lock:
            if self._waiting.get(request.node) is request:
                del self._waiting[request.node]

    def ring(self, node: int) -> None:
        with self._lock:
            if (request := self._waiting.get(node)) is not None:
                request.ring()

    def close(self) -> None:
        """All requests are answered now, and later ones at once."""
        with self._lock:
            self._closed = True
        for node in list(self._waiting):
            self.end(node)

    def take(self, request: WaitingRequest, hand_out: Callable[[], Handed]) -> Handed | None:
        """What is handed out to a node; None where this request has ended."""
        with self._lock:
            return hand_out() if self._waiting.get(request.node) is request else None

"""A site's requests for messages wait at the server, and a small message is one request each way."""

import asyncio
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

pytest.importorskip("flwr")

import httpx

from confed.deployment.provision import make_key
from confed.engines.flower import grid as grid_module
from confed.engines.flower import supernode
from confed.engines.flower.grid import SuperLinkGrid
from confed.engines.flower.long_polls import LongPolls
from confed.engines.flower.private_api import DeactivateNodeRequest, Node, PullMessagesRequest
from confed.engines.flower.superlink import open_superlink
from confed.engines.flower.supernode import SuperNode, public_of, read_key, read_public
from confed.engines.flower.transport import FlowerTransport, client_app

# Flower's and FastAPI's own.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

INTERVAL = 20.0
"""Seconds for which requests wait: far more than any test takes."""


@dataclass
class Line:
    """A server and a site that sends back what it receives, with the requests of the site in order."""

    grid: SuperLinkGrid
    transport: FlowerTransport
    node: SuperNode
    paths: list[str] = field(default_factory=list[str])

    def ask(self, body: bytes) -> bytes:
        """A message there and back, and the site's next request begun."""
        while not self.transport.connections():
            time.sleep(0.01)
        (number,) = self.transport.connections()
        while number not in self.grid.inbox.polls._waiting:  # the site's request waits
            time.sleep(0.01)
        self.paths.clear()
        sent = self.transport.send(number, "fit", b"{}", body, 60.0)
        assert sent is not None
        while (reply := self.transport.receive(sent)) is None:
            self.transport.wait(1.0)
        assert isinstance(reply, tuple), reply
        while self.paths[-1] != "pull-messages":
            time.sleep(0.01)
        return reply[1]


class _Echo:
    def handle(self, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        return head, body


@pytest.fixture
def line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Line]:
    make_key(tmp_path / "key")
    key, stop, send = read_key(tmp_path / "key"), threading.Event(), httpx.Client.send
    with open_superlink({read_public(public_of(key)): "one"}) as (grid, port):
        node = SuperNode(f"127.0.0.1:{port}", key, None, interval=INTERVAL)
        made = Line(grid, FlowerTransport(grid), node)

        def noted(client: httpx.Client, request: httpx.Request, **more: object) -> httpx.Response:
            made.paths.append(request.url.path.rpartition("/")[2])
            return send(client, request, **more)  # type: ignore[arg-type]

        monkeypatch.setattr(httpx.Client, "send", noted)
        app = client_app(lambda _: _Echo())  # type: ignore[arg-type, return-value]
        thread = threading.Thread(target=node.serve, args=(app, stop), daemon=True)
        thread.start()
        try:
            yield made
        finally:
            stop.set()
            grid.inbox.polls.close()
            thread.join(timeout=30)
    assert not thread.is_alive()


def test_a_small_message_is_one_request_each_way(line: Line) -> None:
    began = time.monotonic()
    for body in (b"x", bytes(300_000)):
        assert line.ask(body) == body
        assert line.paths == ["push-messages", "pull-messages"]  # the reply, and the next question
    assert time.monotonic() - began < INTERVAL  # no question had to be answered with nothing
    assert not line.grid.inbox.store._wholes


def test_a_large_message_travels_in_pieces(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    assert line.ask(b"x") == b"x"
    monkeypatch.setattr(grid_module, "INLINE", 1000)
    monkeypatch.setattr(supernode, "INLINE", 1000)
    assert line.ask(bytes(5000)) == bytes(5000)
    assert line.paths.count("pull-object") == line.paths.count("push-object") > 1
    assert "confirm-message-received" in line.paths


def test_a_question_that_may_not_wait_is_answered_at_once_as_flower_does(tmp_path: Path) -> None:
    make_key(tmp_path / "key")
    key = read_key(tmp_path / "key")
    with open_superlink({read_public(public_of(key)): "one"}) as (grid, port):
        site, transport = SuperNode(f"127.0.0.1:{port}", key, None), FlowerTransport(grid)
        with site._client() as client:
            node = site._enter(client)
            client.wait_for_messages(0)
            began = time.monotonic()
            assert not client.PullMessages(PullMessagesRequest(node=node)).messages_list
            assert time.monotonic() - began < 2
            transport.send(node.node_id, "fit", b"{}", b"body", 60.0)
            came = client.PullMessages(PullMessagesRequest(node=node))
            assert not came.messages_list[0].content.items
            assert len(grid.inbox.store._wholes) == 1  # its pieces wait to be fetched
            for odd in ("nan", "-1", "soon"):
                client._client.headers["confed-wait"] = odd
                assert not client.PullMessages(PullMessagesRequest(node=node)).messages_list


def test_an_older_request_of_a_site_takes_no_message() -> None:
    """Its connection may have broken, and what it took would be lost."""

    async def asked() -> None:
        polls = LongPolls()
        first = polls.begin(1)
        assert polls.take(first, lambda: "empty") == "empty"
        other, second = polls.begin(2), polls.begin(1)
        await asyncio.wait_for(first.pause(60), 10)  # it is ended, not left to wait
        assert polls.take(first, lambda: "message") is None
        assert polls.take(second, lambda: "message") == "message"
        polls.leave(first)
        assert polls.take(second, lambda: "message") == "message"
        polls.end(1)  # the site has come back, and asks anew
        assert polls.take(second, lambda: "message") is None
        assert polls.take(other, lambda: "message") == "message"
        polls.ring(2)
        await asyncio.wait_for(other.pause(60), 10)
        began = time.monotonic()
        await other.pause(0.05)
        assert time.monotonic() - began > 0.04

    asyncio.run(asked())


def test_a_site_that_comes_back_ends_its_request(line: Line) -> None:
    assert line.ask(b"x") == b"x"
    (number,) = line.transport.connections()
    while number not in line.grid.inbox.polls._waiting:
        time.sleep(0.01)
    waiting = line.grid.inbox.polls._waiting[number]
    with line.node._client() as client:
        client.DeactivateNode(DeactivateNodeRequest(node_id=number))
        assert line.node._enter(client) == Node(node_id=number)
    assert line.grid.inbox.polls.take(waiting, lambda: "message") is None

"""Bodies in pieces: the bits of whole messages, and after a lost connection no byte twice but those of one piece."""

import json
import random
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

import pytest

from confed.algorithms.fedavg import FedAvg
from confed.engines.local import InProcess
from confed.engines.remote import pieces, server
from confed.engines.remote.client import Site
from confed.engines.remote.pieces import Piece, is_piece
from confed.engines.remote.protocol import Answer
from confed.engines.remote.server import Remote
from confed.engines.remote.sites import Connection
from confed.testing.toy import toy_setup
from memory_transport import CLIENTS, PATIENT, Letters, fit, rounds, same


def _digest_of(content: bytes) -> str:
    return sha256(content).hexdigest()


SMALL = 300  # bytes of a piece in these tests: a model of these has about 1200, an introduction fewer


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "SMALLEST", SMALL)
    monkeypatch.setattr(server, "SMALLEST", SMALL)
    monkeypatch.setattr(pieces, "LARGEST", SMALL)
    monkeypatch.setattr(pieces, "AT_ONCE", 0.0)
    monkeypatch.setattr(pieces, "SHARE", 0.0)


class BadLine(Letters):
    """A post that loses connections: now the question, now the answer."""

    def __init__(self, setup, root: Path, loss: float = 0.0, seed: int = 0) -> None:
        super().__init__(setup, root)
        self.loss, self.random = loss, random.Random(seed)
        self.lost = 0
        self.carried = 0  # bytes of bodies and pieces
        self.restarts = False  # whether a lost connection is a killed site

    def connections(self) -> Mapping[int, Connection]:
        return {number: Connection(since, CLIENTS[number]) for number, since in self.since.items()}

    def receive(self, sent: str) -> tuple[bytes, bytes] | str | None:
        to, kind, _, body = self.sent[int(sent)]
        if kind == "hello" or sent in self.answered or self.since[to] != self.over[int(sent)]:
            return super().receive(sent)
        self.carried += len(body)
        when = self.random.random() / self.loss if self.loss else 2.0
        if when < 0.5:  # the question is lost
            return self.lose(to)
        reply = super().receive(sent)
        if isinstance(reply, tuple):
            self.carried += len(reply[1])
            if when < 1.0:
                return self.lose(to)
        return reply

    def lose(self, to: int) -> None:
        self.lost += 1
        self.since[to] += "'"
        if self.restarts:
            self.sites[to] = self.site(CLIENTS[to])


def led(letters: Letters, folder: Path) -> Remote:
    remote = Remote(letters.setup, letters, timeouts=PATIENT, pieces=folder)
    remote.sites.gather(CLIENTS, wait=5)
    return remote


def test_pieces_have_the_bits_of_whole_messages(tmp_path: Path) -> None:
    setup = toy_setup(FedAvg(), rounds=3)
    letters = BadLine(setup, tmp_path)
    records = rounds(setup, led(letters, tmp_path / "pieces"))
    assert same(records[-1].servers, rounds(setup, InProcess(setup))[-1].servers)
    assert max(len(body) for _, kind, _, body in letters.sent if kind != "hello") == SMALL
    assert max(len(body) for _, body in letters.answered.values() if is_piece(_)) == SMALL


def test_the_last_piece_of_a_request_calls(tmp_path: Path) -> None:
    setup = toy_setup(FedAvg(), rounds=1)
    letters = BadLine(setup, tmp_path)
    rounds(setup, led(letters, tmp_path / "pieces"))
    heads = [json.loads(head) for to, _, head, _ in letters.sent if to == 0 and is_piece(head)]
    requests = [head for head in heads if head["piece"] != "get"]
    assert [head["piece"] for head in requests] == ["call", *["put"] * (len(requests) - 1)]
    assert [bool(head["head"]) for head in requests] == [True, *[False] * (len(requests) - 2), True]


def test_a_site_of_before_is_called_after_the_last_piece(tmp_path: Path) -> None:
    setup = toy_setup(FedAvg(), rounds=1)
    letters = BadLine(setup, tmp_path)
    remote = led(letters, tmp_path / "pieces")
    handle = letters.sites[0].handle

    def before(head: bytes, body: bytes) -> tuple[bytes, bytes]:
        """A site that reads the head of a call only."""
        if is_piece(head) and json.loads(head)["piece"] == "put":
            head = json.dumps(json.loads(head) | {"head": ""}).encode()
        return handle(head, body)

    letters.sites[0].handle = before  # type: ignore[method-assign]
    records = rounds(setup, remote)
    assert not records[-1].errors
    assert same(records[-1].servers, rounds(setup, InProcess(setup))[-1].servers)


@pytest.mark.parametrize("restarts", [False, True], ids=["connections", "sites"])
def test_what_was_lost_goes_on_at_the_byte(tmp_path: Path, restarts: bool) -> None:
    setup = toy_setup(FedAvg(), rounds=4)
    whole = BadLine(setup, tmp_path / "whole")
    rounds(setup, led(whole, tmp_path / "whole-pieces"))
    letters = BadLine(setup, tmp_path / "bad", loss=0.04, seed=5)
    letters.restarts = restarts
    records = rounds(setup, led(letters, tmp_path / "pieces"))
    assert not any(record.errors for record in records)
    assert same(records[-1].servers, rounds(setup, InProcess(setup))[-1].servers)
    assert letters.lost > 5
    assert whole.carried <= letters.carried <= whole.carried + letters.lost * SMALL


def test_a_server_started_again_fetches_what_is_missing(tmp_path: Path) -> None:
    setup = toy_setup(FedAvg(), rounds=1)
    letters = BadLine(setup, tmp_path)
    first = led(letters, tmp_path / "pieces")
    rounds(setup, first)
    model_bytes, letters.carried = letters.carried, 0
    again = led(letters, tmp_path / "pieces")
    records = rounds(setup, again)
    assert same(records[-1].servers, rounds(setup, InProcess(setup))[-1].servers)
    assert model_bytes > 1000
    assert letters.carried == 0  # sites and server have both bodies still, and the digests say so


class LosesOneReply(BadLine):
    """A good line, but for one reply to training in the second round."""

    def receive(self, sent: str) -> tuple[bytes, bytes] | str | None:
        reply = super().receive(sent)
        to, kind, head, _ = self.sent[int(sent)]
        if not self.lost and isinstance(reply, tuple) and kind == "fit" and json.loads(head).get("round") == 1:
            return self.lose(to)
        return reply


@pytest.mark.parametrize("restarts", [False, True], ids=["connections", "sites"])
def test_a_body_that_came_whole_does_not_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: bool
) -> None:
    monkeypatch.setattr(pieces, "AT_ONCE", 60.0)
    setup = toy_setup(FedAvg(), rounds=2)
    undisturbed = BadLine(setup, tmp_path / "undisturbed")
    rounds(setup, led(undisturbed, tmp_path / "undisturbed-pieces"))
    letters = LosesOneReply(setup, tmp_path / "bad")
    letters.restarts = restarts
    records = rounds(setup, led(letters, tmp_path / "pieces"))
    assert same(records[-1].servers, rounds(setup, InProcess(setup))[-1].servers)
    assert letters.lost == 1
    reply_size = max(len(body) for head, body in undisturbed.answered.values() if b"/1/0/client-0" in head)
    assert letters.carried == undisturbed.carried + reply_size


def test_one_body_of_each_kind_stays_on_disk(tmp_path: Path) -> None:
    setup = toy_setup(FedAvg(), rounds=3)
    remote = led(letters := BadLine(setup, tmp_path), tmp_path / "pieces")
    rounds(setup, remote)
    assert not list((tmp_path / "pieces" / "requests").iterdir())
    assert [len(list(folder.iterdir())) for folder in (tmp_path / "pieces" / "replies").iterdir()] == [1, 1, 1]
    assert [len(list((letters.root / name / "request").iterdir())) for name in CLIENTS] == [1, 1, 1]
    remote.take_leave()
    assert not (tmp_path / "pieces").exists()


@pytest.mark.parametrize("where", ["request", "reply"])
def test_a_piece_with_another_digest_is_refused(tmp_path: Path, where: str) -> None:
    setup = toy_setup(FedAvg(), rounds=1)
    letters = BadLine(setup, tmp_path)
    remote = led(letters, tmp_path / "pieces")
    handle = letters.sites[0].handle

    def damaged(head: bytes, body: bytes) -> tuple[bytes, bytes]:
        if where == "request":
            return handle(head, body and b"?" + body[1:])
        reply_head, reply = handle(head, body)
        return reply_head, reply and b"?" + reply[1:]

    letters.sites[0].handle = damaged  # type: ignore[method-assign]
    (record,) = rounds(setup, remote)
    assert set(record.errors) == {"client-0"}
    assert "the piece from byte 0 of " in record.errors["client-0"]
    assert "is not what its digest says" in record.errors["client-0"]


def site(tmp_path: Path) -> Site:
    return Letters(toy_setup(FedAvg()), tmp_path).sites[0]


def error_of(reply: tuple[bytes, bytes]) -> str:
    return json.loads(reply[0])["error"]


def test_a_body_that_its_digest_does_not_name_is_dropped(tmp_path: Path) -> None:
    door, content = site(tmp_path), b"x" * 100
    of = _digest_of(b"something else")
    put = Piece("put", of, 100, 0, _digest_of(content))
    assert Piece.from_bytes(door.handle(put.to_bytes(), content)[0], pieces.Limits()).at == 100
    assert "a body of 100 bytes is not what" in error_of(door.handle(Piece("call", of, 100, head="{}").to_bytes(), b""))
    assert not list((tmp_path / "client-0" / "request").iterdir())


@pytest.mark.parametrize(
    ("piece", "content", "says"),
    [
        (Piece("put", "0" * 64, 10**12), b"", "a body has at most"),
        (Piece("put", "../../../x", 10), b"", "a piece is a part of a body"),
        (Piece("put", "0" * 64, 10, 11), b"", "a piece is a part of a body"),
        (Piece("put", "0" * 64, 2, 0, _digest_of(b"abc")), b"abc", "a body of 2 bytes was announced"),
        (Piece("get", "0" * 64, 10, most=10), b"", "not here any more"),
    ],
)
def test_pieces_of_nothing_are_refused_in_one_line(tmp_path: Path, piece: Piece, content: bytes, says: str) -> None:
    error = error_of(site(tmp_path).handle(piece.to_bytes(), content))
    assert says in error
    assert "\n" not in error


def test_a_server_that_asks_for_whole_replies_gets_them(tmp_path: Path) -> None:
    head, body = site(tmp_path).handle(*fit(toy_setup(FedAvg())))
    assert Answer.from_bytes(head, pieces.Limits()).error is None
    assert len(body) > 2 * SMALL


def test_on_a_fast_line_bodies_travel_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "AT_ONCE", 60.0)
    setup = toy_setup(FedAvg(), rounds=2)
    letters = BadLine(setup, tmp_path)
    records = rounds(setup, led(letters, tmp_path / "pieces"))
    assert same(records[-1].servers, rounds(setup, InProcess(setup))[-1].servers)
    first = next(n for n, (_, _, head, _) in enumerate(letters.sent) if b'"round": 1' in head)
    assert not any(is_piece(head) for _, _, head, _ in letters.sent[first:])

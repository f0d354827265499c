"""Bodies of messages in pieces with a digest each: after a lost connection both ends go on at the byte that they had.

A large body does not travel with its head. The server asks with the head and names the body by its digest; the site
says how many bytes of it are there, and the server sends what follows, piece by piece. A large reply is fetched in the
same way. What has come of a body is in a file of that name at either end, so that it survives their processes, too.
Nothing here knows a transport.
"""

import json
import mmap
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from hashlib import file_digest, sha256
from itertools import count
from pathlib import Path
from typing import Any

from confed.engines.remote.protocol import HELLO, Answer, Limits, Refused, read_head
from confed.engines.remote.sites import Transport, patiently
from confed.federation.atomic import private_folder
from confed.federation.file_names import file_name

SMALLEST, LARGEST = 2**18, 2**26  # bytes of a piece
WAIT = 60.0  # seconds for a piece, after which its connection counts as lost
WHOLE = "whole"  # file of a request's body that did not come in pieces

AT_ONCE, SHARE = 1.0, 0.1
"""What travels at once, and is lost with a connection: what the line carries in so many seconds, or, where it has held
for longer, in this share of the time that it has."""


@dataclass(frozen=True)
class Piece:
    """Head of a message about a body that travels in pieces."""

    piece: str  # server: "call" (answer it), "put" (keep this) or "get" (send that); site: "have" or "part"
    of: str  # digest of the body
    size: int  # bytes of the body
    at: int = 0  # where the piece begins; of "have" the bytes that are there
    digest: str = ""  # of the body up to the end of the piece
    most: int = 0  # of "get": the bytes that may come; of a call: those of a reply that comes at once
    head: str = ""  # head of the message whose body it is: of "call", which may be the last "put", and of "part"

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes, limits: Limits) -> "Piece":
        piece = cls(**read_head(data, limits, cls))
        if not re.fullmatch(r"[0-9a-f]{64}", piece.of) or not 0 <= piece.at <= piece.size or piece.most < 0:
            raise Refused(f"a piece is a part of a body, got bytes {piece.at} of {piece.size} of {piece.of[:32]!r}")
        if piece.size > limits.body:
            raise Refused(f"a body has at most {limits.body} bytes, got {piece.size}")
        return piece


def is_piece(head: bytes) -> bool:
    """Whether a head is one of :class:`Piece`."""
    return head.startswith(b'{"piece": ')


class ArrivingBody:
    """What has come of a body, in a file, and its digest."""

    def __init__(self, path: Path, piece: Piece) -> None:
        self.path, self.of, self.size = path, piece.of, piece.size
        path.touch()
        with path.open("rb") as file:
            self._digest = file_digest(file, "sha256")
        self.held = path.stat().st_size
        if self.held >= self.size and self._digest.hexdigest() != self.of:  # another body, which came whole
            self.held, self._digest = 0, sha256()

    def add(self, piece: Piece, content: bytes) -> None:
        """Adds a piece; one that comes out of turn, because an answer was lost, is left out."""
        if piece.at + len(content) > self.size:
            raise Refused(f"a body of {self.size} bytes was announced, and a piece ends at {piece.at + len(content)}")
        if piece.at != self.held:
            return
        digest = self._digest.copy()
        digest.update(content)
        if digest.hexdigest() != piece.digest:
            raise Refused(f"the piece from byte {piece.at} of {self.size} is not what its digest says")
        with patiently(lambda: self.path.open("r+b")) as file:
            file.seek(self.held)
            file.write(content)
            file.truncate()
        self.held, self._digest = self.held + len(content), digest

    def whole(self) -> bytes:
        """The body that has come; one that is not what its digest says is removed, and comes again."""
        if self._digest.hexdigest() != self.of:
            self.path.unlink()
            raise Refused(f"a body of {self.size} bytes is not what its digest says")
        return patiently(self.path.read_bytes)


class LeavingBody:
    """A body that leaves in pieces, and the digests of its beginnings."""

    def __init__(self, content: bytes) -> None:
        self.size = len(content)
        self.content: bytes | mmap.mmap = content
        self._digests: list[Any] = []  # of the bytes before each multiple of SMALLEST
        digest, view = sha256(), memoryview(content)
        for begin in range(0, self.size, SMALLEST):
            self._digests.append(digest.copy())
            digest.update(view[begin : begin + SMALLEST])
        self.of = digest.hexdigest()

    def piece(self, kind: str, at: int, size: int) -> tuple[Piece, bytes]:
        """A piece from a byte on, and its content."""
        content = self.content[at : at + size]
        return Piece(kind, self.of, self.size, at, self._digest_up_to(at + len(content))), content

    def _digest_up_to(self, end: int) -> str:
        if end == self.size:
            return self.of
        digest = self._digests[end // SMALLEST].copy()
        digest.update(self.content[end // SMALLEST * SMALLEST : end])
        return digest.hexdigest()


def _only(folder: Path, name: str) -> Path:
    """A file, the only one that stays in its folder."""
    private_folder(folder)
    for other in folder.iterdir():
        if other.name != name:
            other.unlink()
    return folder / name


class SitePieces:
    """A site's end: the body of the request in hand, in a file, and of its last reply."""

    def __init__(self, folder: Path, limits: Limits, answer: Callable[[bytes, bytes], tuple[bytes, bytes]]) -> None:
        self._folder, self._limits, self._answer = folder, limits, answer
        self._request: ArrivingBody | None = None
        self._reply: LeavingBody | None = None
        self._call: Piece | None = None  # with which the request in hand came, where it came in pieces

    def take(self, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        """Head and body of the answer to a piece, or of the reply to the request that is complete with it."""
        piece = Piece.from_bytes(head, self._limits)
        if piece.piece == "get":
            if self._reply is None or piece.of != self._reply.of:
                raise Refused("the reply of which a piece is asked for is not here any more")
            part, content = self._reply.piece("part", piece.at, min(piece.most, LARGEST))
            return part.to_bytes(), content
        if self._request is None or self._request.of != piece.of or not self._request.path.is_file():
            if (whole := self._folder / WHOLE).is_file():
                whole.replace(self._folder / piece.of)
            self._request = ArrivingBody(_only(self._folder, piece.of), piece)
        request = self._request
        if piece.piece == "put":
            request.add(piece, body)
        if not piece.head or request.held < piece.size:
            return Piece("have", piece.of, piece.size, request.held).to_bytes(), b""
        self._request, self._call = None, piece
        try:
            return self._answer(piece.head.encode(), request.whole())
        finally:
            self._call = None

    def keep(self, body: bytes) -> None:
        """Keeps a request's body that came whole: where its reply is lost, with this process, too, it is asked for."""
        if self._call is None and len(body) > SMALLEST:
            patiently(lambda: _only(self._folder, WHOLE).write_bytes(body))

    def cut(self, head: bytes, body: bytes, most: int) -> tuple[bytes, bytes]:
        """A reply as it leaves: one with a larger body than that without it, and the server fetches it; 0: no bound."""
        if self._call is not None:
            most = max(most, self._call.most)  # by then the server may know that its line carries more
        if not 0 < most < len(body):
            return head, body
        self._reply = LeavingBody(body)
        return Piece("part", self._reply.of, len(body), head=head.decode()).to_bytes(), b""


@dataclass
class _Transfer:
    """A request that is on its way, and what came of its reply."""

    to: int
    kind: str
    lasts: float
    head: bytes
    body: LeavingBody | None = None  # of the request; None where that went along with the head
    sent: str = ""  # what the transport knows the present message by
    began: float = 0.0  # when that was sent
    had: int | None = None  # bytes of the request's body that the site had; None before it says so
    reply: ArrivingBody | None = None  # of the reply, where that is fetched
    reply_head: str = ""
    moved: int = 0  # bytes of the request's body and of the reply's that have arrived


@dataclass
class _Line:
    """What is known of the line to a site, until a connection is lost."""

    rate: float  # bytes in a second
    since: float = field(default_factory=time.monotonic)


class PieceTransport:
    """The server's end, a :class:`confed.engines.remote.sites.Transport` over another one."""

    def __init__(self, transport: Transport, folder: Path, limits: Limits) -> None:
        self._transport, self._folder, self._limits = transport, folder, limits
        self._numbers = count()
        self._open: dict[str, _Transfer] = {}
        self._lines: dict[int, _Line] = {}  # sites that pieces have come from, or gone to
        self.connections, self.wait = transport.connections, transport.wait
        self.set_max_reply_bytes = transport.set_max_reply_bytes
        shutil.rmtree(folder / "requests", ignore_errors=True)  # of a process that was killed; replies stay

    def send(self, to: int, kind: str, head: bytes, body: bytes, lasts: float) -> str | None:
        transfer = _Transfer(to, kind, lasts, head)
        if kind != HELLO and len(body) > self.at_once(to):  # a greeting takes no other body's place at the site
            transfer.body = self._leaving(body)
            sent = self._call(transfer, Piece("call", transfer.body.of, transfer.body.size))
        else:
            sent = self._send(transfer, head, body, lasts)
        if not sent:
            return None
        number = str(next(self._numbers))
        self._open[number] = transfer
        return number

    def receive(self, sent: str) -> tuple[bytes, bytes] | str | None:
        transfer = self._open[sent]
        came = self._transport.receive(transfer.sent)
        if not isinstance(came, tuple):
            return came
        try:
            if is_piece(came[0]):
                came = self._go_on(transfer, Piece.from_bytes(came[0], self._limits), came[1])
            elif transfer.body is not None or transfer.reply is not None:
                answer = Answer.from_bytes(came[0], self._limits)
                if not answer.id:  # to no request, but to a piece
                    return f"ValueError: the site refused a piece: {answer.error}"
        except Refused as error:
            return f"ValueError: {error}"
        if isinstance(came, tuple):
            self._close(sent)
        return came

    def at_once(self, to: int) -> int:
        """Bytes of a body that travels whole to a site, or from it."""
        if (line := self._lines.get(to)) is None:
            return SMALLEST
        seconds = max(AT_ONCE, SHARE * (time.monotonic() - line.since))
        return max(SMALLEST, round(min(seconds, WAIT / 2) * line.rate))

    def moved(self, sent: str) -> int:
        """Bytes of the bodies of a request and of its reply that have arrived, also in earlier tries."""
        return self._open[sent].moved

    def forget(self, sent: str) -> None:
        transfer = self._close(sent)
        if transfer is not None:
            self._lines.pop(transfer.to, None)  # it may be another one now
            self._transport.forget(transfer.sent)

    def close(self) -> None:
        """Removes what is left of requests and replies."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _close(self, sent: str) -> _Transfer | None:
        transfer = self._open.pop(sent, None)
        if transfer is not None and transfer.body is not None:
            used = {other.body.of for other in self._open.values() if other.body is not None}
            if transfer.body.of not in used:
                (self._folder / "requests" / transfer.body.of).unlink(missing_ok=True)
        return transfer

    def _leaving(self, body: bytes) -> LeavingBody:
        """A request's body in a file, so that the same one for many sites is not in memory many times."""
        leaving = LeavingBody(body)
        path = self._folder / "requests" / leaving.of
        if not path.is_file() or path.stat().st_size != len(body):
            private_folder(path.parent)
            patiently(lambda: path.write_bytes(body))
        with patiently(lambda: path.open("rb")) as file:
            leaving.content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return leaving

    def _call(self, transfer: _Transfer, piece: Piece, content: bytes = b"") -> bool:
        call = replace(piece, most=self.at_once(transfer.to), head=transfer.head.decode())
        return self._send(transfer, call.to_bytes(), content, transfer.lasts)

    def _send(self, transfer: _Transfer, head: bytes, body: bytes, lasts: float) -> bool:
        transfer.began = time.monotonic()
        transfer.sent = self._transport.send(transfer.to, transfer.kind, head, body, lasts) or ""
        return bool(transfer.sent)

    def _go_on(self, transfer: _Transfer, piece: Piece, content: bytes) -> tuple[bytes, bytes] | str | None:
        """The next message of a transfer is sent; its reply, once that is whole, or what went wrong."""
        body, reply = transfer.body, transfer.reply
        if piece.piece == "have" and body is not None and (piece.of, piece.size) == (body.of, body.size):
            went = self._put_next(transfer, body, piece.at)
        elif piece.piece == "part" and reply is None:
            connection = self._transport.connections().get(transfer.to)
            site = (connection and connection.name) or str(transfer.to)
            path = _only(self._folder / "replies" / file_name(site), piece.of)
            transfer.reply, transfer.reply_head = ArrivingBody(path, piece), piece.head
            return self._fetch_next(transfer, transfer.reply)
        elif piece.piece == "part" and reply is not None and piece.of == reply.of:
            if not 0 < len(content) <= LARGEST or piece.size != reply.size:
                raise Refused("a piece of a reply is none of what was announced")
            reply.add(piece, content)
            self._pace(transfer, len(content))
            return self._fetch_next(transfer, reply)
        else:
            raise Refused(f"{piece.piece[:20]!r} is no answer to a piece of this request")
        return None if went else "ConnectionError: the connection was lost"

    def _put_next(self, transfer: _Transfer, body: LeavingBody, held: int) -> bool:
        if transfer.had is not None and held > transfer.had:
            self._pace(transfer, held - transfer.had)
        transfer.had = transfer.moved = held
        kind = "put" if held < body.size else "call"
        put, content = body.piece(kind, held, self._piece_size(transfer, body.size - held))
        if held + len(content) == body.size:
            return self._call(transfer, put, content)
        return self._send(transfer, put.to_bytes(), content, WAIT)

    def _fetch_next(self, transfer: _Transfer, reply: ArrivingBody) -> tuple[bytes, bytes] | str | None:
        transfer.moved = reply.held + (0 if transfer.body is None else transfer.body.size)
        if reply.held == reply.size:
            return transfer.reply_head.encode(), reply.whole()
        most = self._piece_size(transfer, reply.size - reply.held)
        get = Piece("get", reply.of, reply.size, reply.held, most=most)
        went = self._send(transfer, get.to_bytes(), b"", WAIT)
        return None if went else "ConnectionError: the connection was lost"

    def _piece_size(self, transfer: _Transfer, left: int) -> int:
        return min(LARGEST, left, self.at_once(transfer.to))

    def _pace(self, transfer: _Transfer, moved: int) -> None:
        """A piece has arrived: how fast its line is."""
        rate = moved / max(time.monotonic() - transfer.began, 1e-3)
        self._lines.setdefault(transfer.to, _Line(rate)).rate = rate

"""Bodies of messages in pieces with a digest each: after a lost connection both ends go on at the byte that they had.

A large body does not travel with its head. The server asks with the head and names the body by its digest; the site
says how many bytes of it are there, and the server sends what follows, piece by piece. A large reply is fetched in the
same way. What has come of a body is in a file of that name at either end, so that it survives their processes, too.
Nothing here knows a transport.
"""

import json
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import count
from pathlib import Path

from confed.engines.remote.protocol import Answer, Limits, Refused, read_head
from confed.engines.remote.sites import Connection, Transport, patiently
from confed.federation.atomic import private_folder
from confed.federation.file_names import file_name

SMALLEST, LARGEST = 2**18, 3 * 2**20
"""Bytes of a piece: as many as the line carried in a second before, within these bounds."""

AT_ONCE = 2.0  # seconds of a body that travels whole: so much is lost with a connection
WAIT = 120.0  # seconds for a piece, after which its connection counts as lost


@dataclass(frozen=True)
class Piece:
    """Head of a message about a body that travels in pieces."""

    piece: str  # server: "call" (answer it), "put" (keep this) or "get" (send that); site: "have" or "part"
    of: str  # digest of the body
    size: int  # bytes of the body
    at: int = 0  # where the piece begins; of "have" the bytes that are there
    digest: str = ""  # of the piece
    most: int = 0  # of "get": the bytes that may come
    head: str = ""  # head of the message whose body it is: of "call", and of the first "part"

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes, limits: Limits) -> "Piece":
        fields = {"piece": str, "of": str, "size": int, "at": int, "digest": str, "most": int, "head": str}
        piece = cls(**read_head(data, limits, fields))
        if not re.fullmatch(r"[0-9a-f]{64}", piece.of) or not 0 <= piece.at <= piece.size or piece.most < 0:
            raise Refused(f"a piece is a part of a body, got bytes {piece.at} of {piece.size} of {piece.of[:32]!r}")
        if piece.size > limits.body:
            raise Refused(f"a body has at most {limits.body} bytes, got {piece.size}")
        return piece


def digest_of(content: bytes) -> str:
    return sha256(content).hexdigest()


def is_piece(head: bytes) -> bool:
    """Whether a head is one of :class:`Piece`."""
    return head.startswith(b'{"piece": ')


def _held(path: Path) -> int:
    """Bytes of a body that have come."""
    return path.stat().st_size if path.is_file() else 0


def _append(path: Path, piece: Piece, content: bytes) -> None:
    """Adds a piece to what has come; one that comes out of turn, because an answer was lost, is left out."""
    if digest_of(content) != piece.digest:
        raise Refused(f"the piece from byte {piece.at} of {piece.size} is not what its digest says")
    if piece.at + len(content) > piece.size:
        raise Refused(f"a body of {piece.size} bytes was announced, and a piece ends at {piece.at + len(content)}")
    if piece.at == _held(path):
        with patiently(lambda: path.open("ab")) as file:
            file.write(content)


def _whole(path: Path, piece: Piece) -> bytes:
    """A body that has come; one that is not what its digest says is removed, and comes again."""
    data = patiently(path.read_bytes)
    if digest_of(data) != piece.of:
        path.unlink()
        raise Refused(f"a body of {piece.size} bytes is not what its digest says")
    return data


def _only(folder: Path, name: str) -> Path:
    """A file, the only one that stays in its folder."""
    private_folder(folder)
    for other in folder.iterdir():
        if other.name != name:
            other.unlink()
    return folder / name


class SitePieces:
    """A site's end: the body of the request in hand, in a file, and of its last reply, in memory."""

    def __init__(self, folder: Path, limits: Limits, answer: Callable[[bytes, bytes], tuple[bytes, bytes]]) -> None:
        self._folder, self._limits, self._answer = folder, limits, answer
        self._reply, self._digest = b"", ""

    def take(self, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        """Head and body of the answer to a piece, or of the reply to the request that is complete with it."""
        piece = Piece.from_bytes(head, self._limits)
        if piece.piece == "get":
            if piece.of != self._digest:
                raise Refused("the reply of which a piece is asked for is not here any more")
            content = self._reply[piece.at : piece.at + min(piece.most, LARGEST)]
            return Piece("part", piece.of, len(self._reply), piece.at, digest_of(content)).to_bytes(), content
        path = _only(self._folder, piece.of)
        if piece.piece == "put":
            _append(path, piece, body)
        if piece.piece == "call" and _held(path) == piece.size:
            return self._answer(piece.head.encode(), _whole(path, piece))
        return Piece("have", piece.of, piece.size, _held(path)).to_bytes(), b""

    def cut(self, head: bytes, body: bytes, most: int) -> tuple[bytes, bytes]:
        """A reply as it leaves: one with a larger body than that without it, and the server fetches it; 0: no bound."""
        if not 0 < most < len(body):
            return head, body
        self._reply, self._digest = body, digest_of(body)
        return Piece("part", self._digest, len(body), head=head.decode()).to_bytes(), b""


@dataclass
class _Transfer:
    """A request that is on its way, and what came of its reply."""

    to: int
    kind: str
    lasts: float
    head: bytes
    of: str = ""  # digest of the request's body; empty where that went along with the head
    size: int = 0
    sent: str = ""  # what the transport knows the present message by
    began: float = 0.0  # when that was sent
    had: int | None = None  # bytes of the request's body that the site had; None before it says so
    reply: Piece | None = None  # the reply that is fetched
    moved: int = 0  # bytes of the request's body and of the reply's that have arrived


class PieceTransport:
    """The server's end, a :class:`confed.engines.remote.sites.Transport` over another one."""

    def __init__(self, transport: Transport, folder: Path, limits: Limits) -> None:
        self._transport, self._folder, self._limits = transport, folder, limits
        self._numbers = count()
        self._open: dict[str, _Transfer] = {}
        self._rates: dict[int, float] = {}  # site -> bytes in a second on its line, where that is known
        self.connections, self.wait = transport.connections, transport.wait
        self.set_max_reply_bytes = transport.set_max_reply_bytes
        shutil.rmtree(folder / "requests", ignore_errors=True)  # of a process that was killed; replies stay

    def send(self, to: int, kind: str, head: bytes, body: bytes, lasts: float) -> str | None:
        transfer = _Transfer(to, kind, lasts, head)
        if len(body) > self.at_once(to):
            transfer.of, transfer.size = digest_of(body), len(body)
            path = self._request_body(transfer)
            if _held(path) != len(body):
                private_folder(path.parent)
                patiently(lambda: path.write_bytes(body))
            sent = self._call(transfer)
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
            elif transfer.of or transfer.reply is not None:
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
        return max(SMALLEST, round(AT_ONCE * self._rates.get(to, 0.0)))

    def moved(self, sent: str) -> int:
        """Bytes of the bodies of a request and of its reply that have arrived, also in earlier tries."""
        return self._open[sent].moved

    def forget(self, sent: str) -> None:
        transfer = self._close(sent)
        if transfer is not None:
            self._rates.pop(transfer.to, None)  # the line may be another one
            self._transport.forget(transfer.sent)

    def close(self) -> None:
        """Removes what is left of requests and replies."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _close(self, sent: str) -> _Transfer | None:
        transfer = self._open.pop(sent, None)
        if transfer is not None and transfer.of and transfer.of not in {other.of for other in self._open.values()}:
            self._request_body(transfer).unlink(missing_ok=True)
        return transfer

    def _request_body(self, transfer: _Transfer) -> Path:
        return self._folder / "requests" / transfer.of

    def _call(self, transfer: _Transfer) -> bool:
        call = Piece("call", transfer.of, transfer.size, head=transfer.head.decode())
        return self._send(transfer, call.to_bytes(), b"", transfer.lasts)

    def _send(self, transfer: _Transfer, head: bytes, body: bytes, lasts: float) -> bool:
        transfer.began = time.monotonic()
        transfer.sent = self._transport.send(transfer.to, transfer.kind, head, body, lasts) or ""
        return bool(transfer.sent)

    def _go_on(self, transfer: _Transfer, piece: Piece, content: bytes) -> tuple[bytes, bytes] | str | None:
        """The next message of a transfer is sent; its reply, once that is whole, or what went wrong."""
        if piece.piece == "have" and piece.of == transfer.of and piece.size == transfer.size:
            went = self._put_next(transfer, piece.at)
        elif piece.piece == "part" and transfer.reply is None:
            transfer.reply = piece
            return self._fetch_next(transfer, piece)
        elif piece.piece == "part" and transfer.reply is not None and piece.of == transfer.reply.of:
            reply = transfer.reply
            if not 0 < len(content) <= LARGEST or piece.size != reply.size:
                raise Refused("a piece of a reply is none of what was announced")
            _append(self._reply_body(transfer, reply), piece, content)
            self._pace(transfer, len(content))
            return self._fetch_next(transfer, reply)
        else:
            raise Refused(f"{piece.piece[:20]!r} is no answer to a piece of this request")
        return None if went else "ConnectionError: the connection was lost"

    def _put_next(self, transfer: _Transfer, held: int) -> bool:
        if transfer.had is not None and held > transfer.had:
            self._pace(transfer, held - transfer.had)
        transfer.had = transfer.moved = held
        if held == transfer.size:
            return self._call(transfer)
        with patiently(lambda: self._request_body(transfer).open("rb")) as file:
            file.seek(held)
            content = file.read(self._piece_size(transfer))
        put = Piece("put", transfer.of, transfer.size, held, digest_of(content))
        return self._send(transfer, put.to_bytes(), content, WAIT)

    def _fetch_next(self, transfer: _Transfer, reply: Piece) -> tuple[bytes, bytes] | str | None:
        path = self._reply_body(transfer, reply)
        held = _held(path)
        transfer.moved = transfer.size + held
        if held == reply.size:
            return reply.head.encode(), _whole(path, reply)
        get = Piece("get", reply.of, reply.size, held, most=self._piece_size(transfer))
        went = self._send(transfer, get.to_bytes(), b"", WAIT)
        return None if went else "ConnectionError: the connection was lost"

    def _reply_body(self, transfer: _Transfer, reply: Piece) -> Path:
        connection: Mapping[int, Connection] = self._transport.connections()
        name = connection[transfer.to].name if transfer.to in connection else None
        return _only(self._folder / "replies" / file_name(name or str(transfer.to)), reply.of)

    def _piece_size(self, transfer: _Transfer) -> int:
        return max(SMALLEST, min(LARGEST, round(self._rates.get(transfer.to, 0.0))))

    def _pace(self, transfer: _Transfer, moved: int) -> None:
        """A piece has arrived: how fast its line is."""
        self._rates[transfer.to] = moved / max(time.monotonic() - transfer.began, 1e-3)

"""What pieces cost on a good line: one large body there and one back, in pieces and whole, over Flower with TLS.

Server and site are threads of this process, so that its processor time is that of both ends. In pieces a body has a
digest of its own, one of every piece, and is written down at either end, so that it survives a lost connection; whole
it is sent as Flower cuts it, and comes again from its first byte. Of a line that nothing is known of yet a body's first
piece finds out how much it carries; what it carries in a second then travels whole. So ``first`` is the first body
over a connection beside a whole one, and ``later`` the next. The site answers with as many bytes as it got.

    python benchmarks/pieces.py [--megabytes 70] [--repeats 5]
"""

import argparse
import os
import tempfile
import threading
import time
from contextlib import ExitStack
from itertools import count
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from confed.deployment.demo import free_port
from confed.deployment.provision import SITES, Federation, provision, read_sites
from confed.engines.flower.superlink import open_superlink
from confed.engines.flower.supernode import SuperNode, read_key, read_public
from confed.engines.flower.transport import FlowerTransport, pack, unpack
from confed.engines.remote.pieces import PieceTransport, SitePieces, is_piece
from confed.engines.remote.protocol import Answer, Limits
from confed.engines.remote.sites import Transport
from measure import finish, side_by_side

BOUND = 2**30  # bytes of a body, at most
NUMBER = 8  # bytes of the number that a body begins with, so that none is like one before


def site_in(folder: Path) -> ClientApp:
    """A site that answers a body with the same bytes behind its number backwards."""
    limits = Limits(body=BOUND)
    answered = Answer("1", None, False, 0.0).to_bytes()
    at_once = [0]

    def answer(head: bytes, body: bytes) -> tuple[bytes, bytes]:
        at_once[0] = int(head)
        if at_once[0]:  # as a site does; beside it is what Flower does
            pieces.keep(body)
        return answered, body[NUMBER - 1 :: -1] + body[NUMBER:]

    pieces = SitePieces(folder, limits, lambda head, body: pieces.cut(*answer(head, body), at_once[0]))
    app = ClientApp()

    @app.train("call")
    def _(message: Message, context: Context) -> Message:
        head, body = unpack(message)
        came = pieces.take(head, body) if is_piece(head) else pieces.cut(*answer(head, body), at_once[0])
        return Message(pack(*came), reply_to=message)

    return app


def exchange(transport: Transport, to: int, body: bytes, at_once: int) -> None:
    """One request with a body, and its reply; a body that went before is not the same."""
    sent = transport.send(to, "fit", str(at_once).encode(), body, 600.0)
    assert sent is not None
    while (came := transport.receive(sent)) is None:
        transport.wait(1.0)
    transport.forget(sent)
    assert isinstance(came, tuple), came
    assert len(came[1]) == len(body)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=70.0)
    parser.add_argument("--repeats", type=int, default=5)
    given, _ = parser.parse_known_args()
    size = round(given.megabytes * 1e6)
    with ExitStack() as opened:
        made = opened.enter_context(tempfile.TemporaryDirectory())
        root, port = Path(made) / "federation", free_port()
        provision(root, Federation(("site",), "localhost", port, ""))
        server, site = root / "server", root / "sites" / "site"
        names = {read_public(key): name for name, key in read_sites(server / SITES).items()}
        grid, _ = opened.enter_context(
            open_superlink(
                names, "127.0.0.1", port, certificate=server / "server.crt", key=server / "server.key",
                waiting=server / "waiting", largest=BOUND,
            )
        )  # fmt: skip
        whole = FlowerTransport(grid, names.get)
        in_pieces = PieceTransport(whole, root / "pieces", Limits(body=BOUND))
        stop = threading.Event()
        node = SuperNode(f"localhost:{port}", read_key(site / "key"), (site / "ca.crt").read_bytes(), largest=BOUND)
        line = threading.Thread(target=node.serve, args=(site_in(site / "request"), stop), daemon=True)
        line.start()
        while not (connected := whole.connections()):
            time.sleep(0.1)
        to = next(iter(connected))

        random, numbers = os.urandom(size), count(1)

        def body() -> bytes:
            return next(numbers).to_bytes(NUMBER) + random

        def sent_whole() -> None:
            exchange(whole, to, body(), 0)

        def sent_first() -> None:
            in_pieces._lines.clear()  # pyright: ignore[reportPrivateUsage]
            sent_later()

        def sent_later() -> None:
            exchange(in_pieces, to, body(), in_pieces.at_once(to))

        first = side_by_side(sent_whole, sent_first, given.repeats)
        later = side_by_side(sent_whole, sent_later, given.repeats)
        stop.set()
        line.join(timeout=30)
    figures = {f"first_{name}": value for name, value in first.items()}
    finish("pieces on a good line", 1.05, megabytes=given.megabytes, **figures, **later)


if __name__ == "__main__":
    main()

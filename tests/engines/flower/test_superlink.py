"""The server's door and the sites' lines: real sockets, TLS and keys, in one process."""

import asyncio
import errno
import os
import socket
import ssl
import stat
import threading
import time
from base64 import b64encode
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from cryptography import x509
from flwr.app import Array
from flwr.common import now
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PushMessagesRequest, PushMessagesResponse
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import Metadata as ProtoMetadata
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

from confed.algorithms.fedper import FedPer
from confed.deployment.provision import SITES, Federation, make_key, provision, read_sites
from confed.engines.flower import grid as grid_module
from confed.engines.flower import objects, supernode
from confed.engines.flower.fleet_api import whole_body
from confed.engines.flower.grid import RequestRejected, SuperLinkGrid
from confed.engines.flower.long_polls import LongPolls
from confed.engines.flower.objects import PIECE, PieceStore, carry, check_expansion
from confed.engines.flower.private_api import (
    FLEET_HTTP_PUBLIC_KEY_HEADER,
    FLEET_HTTP_SIGNATURE_HEADER,
    TIMESTAMP_HEADER,
    DeactivateNodeRequest,
    DeactivateNodeResponse,
    Node,
    PullMessagesRequest,
    PullMessagesResponse,
    public_key_to_bytes,
    sign_message,
)
from confed.engines.flower.superlink import (
    HEAD,
    ConnectionLimits,
    ConnectionTable,
    OpenConnection,
    _listener,
    open_superlink,
)
from confed.engines.flower.supernode import CallRefused, SuperNode, public_of, read_key, read_public
from confed.engines.flower.transport import FlowerTransport, client_app
from confed.engines.local import InProcess
from confed.engines.remote.server import Remote
from confed.engines.remote.sites import Timeouts, patiently
from confed.testing.toy import toy_setup
from flower_sites import CLIENTS, keys_of, on_line, over_tls, rounds

# Flower's and FastAPI's own.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def trusted(folder: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(folder / "server" / "ca.crt"))


def test_a_federation_over_tls_gives_the_simulators_bits(folder: Path, tmp_path: Path) -> None:
    setup, said, keys = toy_setup(FedPer(), rounds=2), list[str](), keys_of(folder)
    with (
        over_tls(folder, waiting=tmp_path / "post") as (grid, port),
        on_line(folder, setup, port, tmp_path, said),
    ):
        transport, audit = FlowerTransport(grid, keys.get), tmp_path / "audit.jsonl"
        remote = Remote(setup, transport, timeouts=Timeouts(interval=0.02), audit=audit)
        infos = remote.sites.gather(CLIENTS, wait=120)
        assert [info.num_examples for info in infos] == [12, 20, 16]
        through = rounds(setup, remote)
    here = rounds(setup, InProcess(setup))
    for one, other in zip(here, through, strict=True):
        assert one.losses == other.losses
        assert not other.errors
        assert one.bytes_up == other.bytes_up
        for name, tensor in one.servers["main"].params.items():
            assert torch.equal(tensor, other.servers["main"].params[name])
    assert len((tmp_path / "audit.jsonl").read_text().splitlines()) == 2 * (3 + 2 * 3)
    assert sum("connected to" in text for text in said) == 3


def test_only_supernodes_on_the_list_are_let_in(folder: Path, tmp_path: Path) -> None:
    said, setup = list[str](), toy_setup(FedPer(), rounds=1)
    keys = {key: name for key, name in keys_of(folder).items() if name != "client-1"}
    with over_tls(folder, keys) as (grid, port):
        with on_line(folder, setup, port, tmp_path, said):
            remote = Remote(setup, FlowerTransport(grid, keys.get), timeouts=Timeouts(interval=0.02, minimum=2))
            assert [info.id for info in remote.sites.gather(CLIENTS, wait=3)] == ["client-0", "client-2"]
        assert any("not on the server's list" in text for text in said)
        base = f"https://localhost:{port}"
        with httpx.Client(verify=trusted(folder), base_url=base) as client:
            for path in ("/v1/control/start-run", "/v1/runtime/acquire-task", "/docs", "/openapi.json", "/x"):
                assert client.post(path, content=b"").status_code == 404, path
            fleet = {"content-type": "application/x-protobuf", "accept": "application/x-protobuf"}
            assert client.post("/v1/fleet/pull-messages", content=b"", headers=fleet).status_code >= 400
            assert client.get("/v1/fleet/pull-messages").status_code == 413
            assert client.post("/v1/fleet/push-object", content=bytes(PIECE + 1)).status_code == 413
        with pytest.raises(httpx.ConnectError), httpx.Client(base_url=base) as client:
            client.post("/")  # nobody vouches for the server but its own authority


def test_a_signature_of_five_minutes_ago_is_refused(folder: Path) -> None:
    key = read_key(folder / "sites" / "client-0" / "key")
    with (
        over_tls(folder) as (_, port),
        httpx.Client(verify=trusted(folder), base_url=f"https://localhost:{port}") as client,
    ):
        public = public_key_to_bytes(key.public_key())
        body = ActivateNodeRequest(public_key=public, heartbeat_interval=60).SerializeToString()

        def status(age: float, signed: float) -> int:
            """Of a request whose time is ``age`` seconds ago, with the signature of a time ``signed`` seconds ago."""
            at = now()
            said, other = ((at - timedelta(seconds=seconds)).isoformat() for seconds in (age, signed))
            headers = {
                FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(public).decode(),
                TIMESTAMP_HEADER: said,
                FLEET_HTTP_SIGNATURE_HEADER: b64encode(sign_message(key, other.encode())).decode(),
                "content-type": "application/protobuf",
            }  # fmt: skip
            return client.post("/v1/fleet/activate-node", content=body, headers=headers).status_code

        assert status(0, 0) == 200
        assert status(600, 600) == 401
        assert status(0, 600) == 401  # an old signature under a new time


def test_certificates_are_for_the_host_and_keys_are_their_owners(folder: Path, tmp_path: Path) -> None:
    certificate = x509.load_pem_x509_certificate((folder / "server" / "server.crt").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost"]
    authority = x509.load_pem_x509_certificate((folder / "server" / "ca.crt").read_bytes())
    certificate.verify_directly_issued_by(authority)
    assert 364 < (certificate.not_valid_after_utc - certificate.not_valid_before_utc).days < 367
    for secret in (folder / "server" / "server.key", folder / "sites" / "client-0" / "key"):
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    listed = read_sites(folder / "server" / SITES)
    for name in CLIENTS:
        own = read_key(folder / "sites" / name / "key").public_key()
        assert read_public(listed[name]) == read_public_of(own)
        assert name in (folder / "sites" / name / "README.md").read_text()
    with pytest.raises(ValueError, match="never overwritten"):
        make_key(folder / "sites" / "client-0" / "key")
    with pytest.raises(ValueError, match="is not empty"):
        provision(folder, Federation(CLIENTS, "localhost", 1, ""))


def read_public_of(key: object) -> bytes:
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    return public_key_to_bytes(key)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"sites": ()}, "sites must be different names"),
        ({"sites": ("a", "a")}, "sites must be different names"),
        ({"sites": ("../a",)}, "letters, digits"),
        ({"sites": ("a", "Server")}, "no site can be called 'Server'"),
        ({"host": "x y"}, "host must be"),
        ({"port": 0}, "port must lie"),
        ({"days": 0}, "at least a day"),
    ],
)  # fmt: skip
def test_a_federation_is_founded_on_sound_values(values: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Federation(**{"sites": ("a",), "host": "h", "port": 1, "recipe": "", **values})  # type: ignore[arg-type]


def test_faulty_keys_and_certificates_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no private key"):
        read_key(tmp_path / "nothing")
    with pytest.raises(ValueError, match="no public key in OpenSSH"):
        read_public("ssh-x yz")
    with pytest.raises(ValueError, match="sites' names and public keys"):
        read_sites(tmp_path / "sites.json")
    server = folder / "server"
    with pytest.raises(ValueError, match="belong together"), open_superlink([], certificate=server / "server.crt"):
        pass
    pair = open_superlink([], certificate=server / "server.crt", key=server.parent / "authority" / "ca.key")
    with pytest.raises(ValueError, match="no certificate and its key"), pair:
        pass
    with (
        open_superlink([]) as (_, port),
        pytest.raises(RuntimeError, match="cannot listen"),
        open_superlink([], port=port),
    ):
        pass


def test_pieces_that_would_become_more_than_was_sent_are_refused() -> None:
    """One piece of an array may stand in any number of places: a bomb."""
    array = Array(dtype="uint8", shape=(8,), stype="confed", data=b"12345678")
    parts = {number: part.deflate() for number, part in get_all_nested_objects(array).items()}
    check_expansion(parts, 100)
    said = parts[array.object_id]
    bomb = said.replace(b'"arraychunk_ids": [0]', b'"arraychunk_ids": [' + b",".join([b"0"] * 1000) + b"]")
    head, _, body = bomb.partition(b"\x00")
    kind, chunks, _ = head.decode().rsplit(" ", 2)
    bomb = f"{kind} {chunks} {len(body)}".encode() + b"\x00" + body
    with pytest.raises(ValueError, match="a message of at most 1000 bytes would become one of more than"):
        check_expansion({**parts, array.object_id: bomb}, 1000)


def test_a_door_is_as_wide_as_the_runs_replies_are_large(folder: Path, tmp_path: Path) -> None:
    setup = toy_setup(FedPer(), rounds=1)
    with over_tls(folder) as (grid, _):
        before = grid.inbox.pieces
        Remote(setup, FlowerTransport(grid, keys_of(folder).get))
        assert grid.inbox.pieces < before / 4


def test_pieces_wait_on_disk_and_are_gone_with_their_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "IN_MEMORY", 9)  # no piece is as small
    store = PieceStore(tmp_path)
    array = Array(dtype="uint8", shape=(8,), stype="confed", data=b"12345678")
    tree, parts = get_object_tree(array), get_all_nested_objects(array)
    assert set(store.preregister(1, tree)) == set(parts)
    assert store.get(array.object_id) == b""
    assert store.get("0" * 64) is None
    for number, part in parts.items():
        store.put(number, part.deflate())
    assert {path.name for path in tmp_path.iterdir()} == set(parts)
    assert store.get(array.object_id) == parts[array.object_id].deflate()
    with pytest.raises(ValueError, match="does not match content hash"):
        store.put(array.object_id, b"another")
    store.delete(array.object_id)
    assert not list(tmp_path.iterdir())
    store.preregister(1, tree)
    store.put(*next((number, part.deflate()) for number, part in parts.items()))
    store.clear()
    assert not list(tmp_path.iterdir())


def test_a_reply_in_anothers_name_is_turned_away(folder: Path) -> None:
    own = read_key(folder / "sites" / "client-0" / "key")
    with over_tls(folder) as (_, port):
        line = SuperNode(f"localhost:{port}", own, (folder / "sites" / "client-0" / "ca.crt").read_bytes())
        with line.client() as client:
            node = line.enter(client)
            for source, status in ((node.node_id, 400), (node.node_id + 1, 403)):
                bare = ProtoMessage(metadata=ProtoMetadata(src_node_id=source, run_id=1))
                request = PushMessagesRequest(node=node, messages_list=[bare], message_object_trees=[ObjectTree()])
                with pytest.raises(CallRefused) as refused:
                    client.call("push-messages", request, PushMessagesResponse)
                assert (refused.value.status == 403) == (status == 403)
                question = PullMessagesRequest(node=node)
                carry(question, request.SerializeToString())
                with pytest.raises(CallRefused) as refused:
                    client.call("pull-messages", question, PullMessagesResponse)
                assert (refused.value.status == 403) == (status == 403)
            question = PullMessagesRequest(node=node)
            carry(question, b"\xff")
            with pytest.raises(CallRefused, match="no reply"):
                client.call("pull-messages", question, PullMessagesResponse)


# Requests that wait -----------------------------------------------------------------------------------------------

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


def test_a_small_message_and_its_reply_are_one_request(line: Line) -> None:
    began = time.monotonic()
    for body in (b"x", bytes(300_000)):
        assert line.ask(body) == body
        assert line.paths == ["pull-messages"]  # the reply with the next question
    assert time.monotonic() - began < INTERVAL  # no question had to be answered with nothing
    assert not line.grid.inbox.store._wholes


def test_a_large_message_travels_in_pieces(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    assert line.ask(b"x") == b"x"
    monkeypatch.setattr(grid_module, "INLINE", 1000)
    monkeypatch.setattr(supernode, "INLINE", 1000)
    assert line.ask(bytes(5000)) == bytes(5000)
    assert line.paths.count("pull-object") == line.paths.count("push-object") > 1
    assert "confirm-message-received" in line.paths


def test_a_question_that_may_not_wait_is_answered_at_once(tmp_path: Path) -> None:
    make_key(tmp_path / "key")
    key = read_key(tmp_path / "key")
    with open_superlink({read_public(public_of(key)): "one"}) as (grid, port):
        site, transport = SuperNode(f"127.0.0.1:{port}", key, None), FlowerTransport(grid)
        with site.client() as client:
            node = site.enter(client)

            def pulled(**wait: str) -> PullMessagesResponse:
                return client.call("pull-messages", PullMessagesRequest(node=node), PullMessagesResponse, **wait)

            began = time.monotonic()
            assert not pulled().messages_list
            assert time.monotonic() - began < 2
            transport.send(node.node_id, "fit", b"{}", b"body", 60.0)
            came = pulled()
            assert not came.messages_list[0].content.items
            assert len(grid.inbox.store._wholes) == 1  # its pieces wait to be fetched
            for odd in ("nan", "-1", "soon"):
                assert not pulled(**{"confed-wait": odd}).messages_list


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
    with line.node.client() as client:
        client.call("deactivate-node", DeactivateNodeRequest(node_id=number), DeactivateNodeResponse)
        assert line.node.enter(client) == Node(node_id=number)
    assert line.grid.inbox.polls.take(waiting, lambda: "message") is None


# Limits on connections --------------------------------------------------------------------------------------------

LIMITS = ConnectionLimits(most=60, reserved=30, each=20, grace=0.3, handshake=0.6, first=0.6, head=0.6)


def admitted(table: ConnectionTable, count: int, host: str) -> list[OpenConnection]:
    return [entry for entry in (table.admit(host) for _ in range(count)) if entry is not None]


def test_a_full_table_refuses_newcomers_and_keeps_sites() -> None:
    now, put_out = [100.0], list[OpenConnection]()
    table = ConnectionTable(ConnectionLimits(most=10, reserved=4, each=3, grace=1.0), clock=lambda: now[0])
    site = table.admit("10.0.0.9")
    assert site is not None
    site.put_out = lambda: put_out.append(site)
    table.prove(site, "a")
    assert len(admitted(table, 5, "10.0.0.1")) == 3  # an address has its share
    assert len(admitted(table, 5, "10.0.0.2")) == 3
    assert table.admit("10.0.0.3") is None  # all places are taken that strangers may have
    assert len(admitted(table, 9, "10.0.0.9")) == 3  # a site's address has others
    assert len(table) == 10
    assert table.admit("10.0.0.9") is None
    now[0] += 1.5  # strangers who did not use their time make room; the site, which is older, does not
    assert len(admitted(table, 20, "10.0.0.1")) == 3
    assert len(table) == 10
    assert not put_out
    table.leave(site)
    assert len(table) == 9


def test_a_flood_from_few_addresses_keeps_no_newcomer_out() -> None:
    """An address makes room for one that has fewer connections, and gets none by ending others' or its own."""
    now = [0.0]
    table = ConnectionTable(ConnectionLimits(most=12, reserved=4, each=6, grace=1.0), clock=lambda: now[0])
    assert [len(admitted(table, 9, host)) for host in ("10.0.0.1", "10.0.0.2")] == [6, 2]
    now[0] += 5.0
    (newcomer,) = admitted(table, 1, "10.0.0.3")
    ended: list[OpenConnection] = []
    newcomer.put_out = lambda: ended.append(newcomer)
    assert table._by_address == {"10.0.0.1": 5, "10.0.0.2": 2, "10.0.0.3": 1}
    for _ in range(50):
        now[0] += 5.0
        admitted(table, 3, "10.0.0.1")
        admitted(table, 3, "10.0.0.2")
    assert ended == []
    assert len(table) == 8
    table.prove(newcomer, "a")
    assert len(admitted(table, 9, "10.0.0.3")) == 4  # all places that there are
    now[0] += 5.0
    assert table.admit("10.0.0.3") is not None  # a site's address makes room for itself, too


def test_one_sites_key_does_not_take_the_places_of_others() -> None:
    put_out, table = list[int](), ConnectionTable(ConnectionLimits(most=20, reserved=10, each=20, of_site=3))
    other, *own = admitted(table, 6, "10.0.0.1")
    other.put_out = lambda: put_out.append(-1)
    table.prove(other, "b")
    for number, entry in enumerate(own):
        entry.put_out = lambda number=number: put_out.append(number)
        table.prove(entry, "a")
    table.prove(own[-1], "a")  # the next request over the same connection
    assert put_out == [0, 1]
    assert len(table) == 4
    table.leave(own[-1])
    table.prove(admitted(table, 1, "10.0.0.1")[0], "a")
    assert put_out == [0, 1]


def test_networks_of_version_6_count_as_one_address() -> None:
    table = ConnectionTable(ConnectionLimits(most=100, reserved=0, each=2))
    assert [table.admit(f"2001:db8::{n}") is None for n in range(1, 5)] == [False, False, True, True]
    assert table.admit("2001:db8:0:1::1") is not None
    assert [table.admit(host) is None for host in ("::ffff:10.0.0.1", "10.0.0.1", "10.0.0.1")] == [False, False, True]


def test_descriptors_are_kept_for_files() -> None:
    assert ConnectionLimits().for_file_limit(1024).most == 512
    small = ConnectionLimits().for_file_limit(64)
    assert (small.most, small.reserved) == (32, 16)
    with pytest.raises(ValueError, match="fewer places must be reserved"):
        ConnectionLimits(most=5, reserved=5)
    tries: list[int] = []

    def opened() -> str:
        tries.append(1)
        if len(tries) < 2:
            raise OSError(errno.EMFILE, "Too many open files")
        return "open"

    assert patiently(opened) == "open"
    with pytest.raises(OSError, match="Too many"):
        patiently(lambda: (_ for _ in ()).throw(OSError(errno.EMFILE, "Too many open files")), most=0.0)
    with pytest.raises(FileNotFoundError):
        patiently(lambda: Path("/nowhere/at/all").read_bytes())


def dribble(connection: socket.socket, data: bytes) -> None:
    """Twenty bytes a second."""
    for letter in data:
        connection.send(bytes([letter]))
        time.sleep(0.05)


def ended(connection: socket.socket, within: float) -> float:
    """Seconds until the other side ends a connection."""
    began = time.monotonic()
    connection.settimeout(within)
    try:
        while connection.recv(65536):
            pass
    except (ConnectionError, ssl.SSLError):
        pass
    return time.monotonic() - began


def test_who_sends_nothing_or_too_slowly_is_put_out(folder: Path) -> None:
    with over_tls(folder, limits=LIMITS) as (_, port):
        with socket.create_connection(("127.0.0.1", port)) as silent:  # no TLS
            assert ended(silent, 8) < 4
        plain = socket.create_connection(("127.0.0.1", port))
        with trusted(folder).wrap_socket(plain, server_hostname="localhost") as silent:  # TLS, and no request
            assert ended(silent, 8) < 4
        plain = socket.create_connection(("127.0.0.1", port))
        with trusted(folder).wrap_socket(plain, server_hostname="localhost") as slow:
            began = time.monotonic()
            with pytest.raises((ConnectionError, ssl.SSLError)):
                dribble(slow, b"POST /v1/fleet/pull-messages HTTP/1.1\r\nx: " + b"y" * 200)
            assert time.monotonic() - began < 5


def test_a_head_without_end_is_not_stored(folder: Path) -> None:
    with open_superlink(keys_of(folder), limits=LIMITS) as (_, port):
        for start in (b"POST /v1/fleet/pull-messages HTTP/1.1\r\n", b"POST /"):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                sent, piece = len(start), b"x-pad: " + b"y" * 1000 + b"\r\n"
                connection.sendall(start)
                try:
                    while sent < 50 * 2**20:
                        sent += connection.send(piece if b"HTTP" in start else b"y" * 1000)
                except ConnectionError:
                    pass
                assert HEAD < sent < 20 * 2**20  # the rest of it in the sockets' buffers


def test_a_stranger_who_was_turned_away_cannot_stay(folder: Path) -> None:
    with open_superlink(keys_of(folder), limits=LIMITS) as (grid, port):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"POST /v1/fleet/pull-messages HTTP/1.1\r\nhost: x\r\ncontent-length: 8000000\r\n\r\n")
            assert connection.recv(1000).startswith(b"HTTP/1.1 40")
            with pytest.raises(ConnectionError):
                dribble(connection, b"x" * 160)
        assert any("turned away" in why for _, why in grid.notices.counts)


def test_too_many_open_files_make_the_server_wait(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accept, failed = asyncio.selector_events.BaseSelectorEventLoop.sock_accept, list[int]()

    async def scarce(loop: object, listener: socket.socket) -> object:
        if len(failed) < 2:
            failed.append(1)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return await accept(loop, listener)  # type: ignore[arg-type]

    monkeypatch.setattr(asyncio.selector_events.BaseSelectorEventLoop, "sock_accept", scarce)
    with (
        open_superlink(keys_of(folder), limits=LIMITS) as (grid, port),
        socket.create_connection(("127.0.0.1", port)) as asking,
    ):
        asking.sendall(b"GET /x HTTP/1.1\r\nhost: x\r\n\r\n")
        assert asking.recv(1000).startswith(b"HTTP/1.1 404")
        assert grid.notices.counts["somebody", "too many files are open to accept connections"] == 2


def test_sites_go_on_while_strangers_hold_all_they_can_get(folder: Path, tmp_path: Path) -> None:
    """Three hundred idle connections, refused ones included; the rounds are those without them."""
    setup, said, keys = toy_setup(FedPer(), rounds=2), list[str](), keys_of(folder)
    flood: list[socket.socket] = []

    def hold(count: int, source: str) -> None:
        for _ in range(count):
            idle = socket.socket()
            idle.bind((source, 0))
            idle.settimeout(5)
            idle.connect(("127.0.0.1", port))
            flood.append(idle)

    try:
        with over_tls(folder, limits=LIMITS) as (grid, port), on_line(folder, setup, port, tmp_path, said):
            remote = Remote(setup, FlowerTransport(grid, keys.get), timeouts=Timeouts(interval=0.02))
            remote.sites.gather(CLIENTS, wait=120)
            for number in range(2, 5):
                hold(100, f"127.0.0.{number}")
            records = rounds(setup, remote)
            assert grid.notices.counts["somebody", "a connection was refused, as there were too many"] >= 200
    finally:
        for idle in flood:
            idle.close()
    assert [record.errors for record in records] == [{}, {}]
    assert sum("connected to" in text for text in said) == 3


def test_a_request_has_a_length_and_no_other_encoding(folder: Path) -> None:
    with (
        open_superlink(keys_of(folder), limits=LIMITS) as (_, port),
        socket.create_connection(("127.0.0.1", port)) as connection,
    ):
        head = b"POST /v1/fleet/pull-messages HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n"
        connection.sendall(head + b"transfer-encoding: chunked\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 400")
        assert ended(connection, 8) < 4


@pytest.mark.parametrize(
    ("pieces", "wait", "status"),
    [([b"ab", b"cd"], 0.0, 200), ([b"abcd", b"e"], 0.0, 413), ([b"ab"], 9.0, 408)],
    ids=["whole", "too long", "too slow"],
)
def test_a_body_is_counted_and_timed_as_it_comes(pieces: list[bytes], wait: float, status: int) -> None:
    parts = list(pieces)

    async def receive() -> MutableMapping[str, Any]:
        if parts:
            body = parts.pop(0)
            return {"type": "http.request", "body": body, "more_body": bool(parts) or wait > 0}
        await asyncio.sleep(wait)
        return {"type": "http.disconnect"}

    if status == 200:
        assert asyncio.run(whole_body(receive, 0.1, 4)) == b"abcd"
        return
    with pytest.raises(RequestRejected) as turned:
        asyncio.run(whole_body(receive, 0.1, 4))
    assert turned.value.status_code == status
    assert turned.value.headers == {"connection": "close"}  # what is still on its way is not waited for


def test_accepted_connections_send_at_once() -> None:
    """Else the body of a response waits 40 ms for the acknowledgement of its head."""
    with _listener(socket.AF_INET, "127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        listener.setblocking(True)
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

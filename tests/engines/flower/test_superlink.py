"""The server's door and the sites' lines: real sockets, TLS and keys, in one process."""

import ssl
import stat
from base64 import b64encode
from datetime import timedelta
from pathlib import Path

import pytest

pytest.importorskip("flwr")

import httpx
import torch
from cryptography import x509
from flwr.app import Array
from flwr.common import now
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PushMessagesRequest
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import Metadata as ProtoMetadata
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

from confed.algorithms.fedper import FedPer
from confed.deployment.provision import SITES, Federation, make_key, provision, read_sites
from confed.engines.flower.objects import PieceStore, check_expansion
from confed.engines.flower.private_api import (
    FLEET_HTTP_PUBLIC_KEY_HEADER,
    FLEET_HTTP_SIGNATURE_HEADER,
    TIMESTAMP_HEADER,
    public_key_to_bytes,
    sign_message,
)
from confed.engines.flower.superlink import PIECE, open_superlink
from confed.engines.flower.supernode import SuperNode, read_key, read_public
from confed.engines.flower.transport import FlowerTransport
from confed.engines.local import InProcess
from confed.engines.remote.server import Remote
from confed.engines.remote.sites import Timeouts
from confed.testing.toy import toy_setup
from flower_sites import CLIENTS, keys_of, on_line, rounds

# Flower's and FastAPI's own.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("federation") / "made"
    provision(root, Federation(CLIENTS, "localhost", 8443, "name = 'toy'\n"))
    return root


def test_a_federation_over_tls_gives_the_simulators_bits(folder: Path, tmp_path: Path) -> None:
    setup, said = toy_setup(FedPer(), rounds=2), list[str]()
    keys = keys_of(folder)
    server = folder / "server"
    with (
        open_superlink(
            keys, certificate=server / "server.crt", key=server / "server.key", waiting=tmp_path / "post"
        ) as (
            grid,
            port,
        ),
        on_line(folder, setup, port, tmp_path, said),
    ):
        transport, audit = FlowerTransport(grid, keys), tmp_path / "audit.jsonl"
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


def test_the_door_lets_in_supernodes_on_the_list_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    server, said = folder / "server", list[str]()
    keys = {key: name for key, name in keys_of(folder).items() if name != "client-1"}
    trusted = ssl.create_default_context(cafile=str(server / "ca.crt"))
    setup = toy_setup(FedPer(), rounds=1)
    with open_superlink(keys, certificate=server / "server.crt", key=server / "server.key") as (grid, port):
        with on_line(folder, setup, port, tmp_path, said):
            remote = Remote(setup, FlowerTransport(grid, keys), timeouts=Timeouts(interval=0.02, minimum=2))
            assert [info.id for info in remote.sites.gather(CLIENTS, wait=3)] == ["client-0", "client-2"]
        assert any("not on the server's list" in text for text in said)
        base = f"https://localhost:{port}"
        with httpx.Client(verify=trusted, base_url=base) as client:
            for path in ("/v1/control/start-run", "/v1/runtime/acquire-task", "/docs", "/openapi.json", "/x"):
                assert client.post(path, content=b"").status_code == 404, path
            fleet = {"content-type": "application/x-protobuf", "accept": "application/x-protobuf"}
            assert client.post("/v1/fleet/pull-messages", content=b"", headers=fleet).status_code >= 400
            assert client.get("/v1/fleet/pull-messages").status_code == 413
            assert client.post("/v1/fleet/push-object", content=bytes(PIECE + 1)).status_code == 413
        with pytest.raises(httpx.ConnectError), httpx.Client(base_url=base) as client:
            client.post("/")  # nobody vouches for the server but its own authority


def test_a_signature_of_five_minutes_ago_is_refused(folder: Path) -> None:
    key, server = read_key(folder / "sites" / "client-0" / "key"), folder / "server"
    trusted = ssl.create_default_context(cafile=str(server / "ca.crt"))
    with (
        open_superlink(keys_of(folder), certificate=server / "server.crt", key=server / "server.key") as (_, port),
        httpx.Client(verify=trusted, base_url=f"https://localhost:{port}") as client,
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
    keys, setup = keys_of(folder), toy_setup(FedPer(), rounds=1)
    server = folder / "server"
    with open_superlink(keys, certificate=server / "server.crt", key=server / "server.key") as (grid, _):
        before = grid.pieces
        Remote(setup, FlowerTransport(grid, keys))
        assert grid.pieces < before / 4


def test_pieces_wait_on_disk_and_are_gone_with_their_message(tmp_path: Path) -> None:
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
    server, keys = folder / "server", keys_of(folder)
    own = read_key(folder / "sites" / "client-0" / "key")
    with open_superlink(keys, certificate=server / "server.crt", key=server / "server.key") as (_, port):
        line = SuperNode(f"localhost:{port}", own, (folder / "sites" / "client-0" / "ca.crt").read_bytes())
        with line._client() as client:
            node = line._enter(client)
            for source, status in ((node.node_id, 400), (node.node_id + 1, 403)):
                bare = ProtoMessage(metadata=ProtoMetadata(src_node_id=source, run_id=1))
                request = PushMessagesRequest(node=node, messages_list=[bare], message_object_trees=[ObjectTree()])
                with pytest.raises(httpx.HTTPStatusError) as refused:
                    client.PushMessages(request)
                assert (refused.value.response.status_code == 403) == (status == 403)

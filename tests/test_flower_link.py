"""The server's door and the sites' lines: real sockets, TLS and keys, in one process."""

import ssl
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("flwr")

import httpx
import torch
from cryptography import x509

from confed.algorithms.fedper import FedPer
from confed.engines.flower import GridPost, client_app
from confed.engines.flower_line import Line, read_key, read_public
from confed.engines.flower_link import PIECE, link
from confed.engines.local import InProcess, RoundRecord, Simulation, simulate
from confed.engines.perform import Setup
from confed.engines.remote import Remote
from confed.engines.roll import Patience
from confed.engines.site import Site, client_named
from confed.federation.state import MemoryStore
from confed.founding import SITES, Federation, found, make_key, read_sites
from confed.toy import toy_setup

# Flower's and FastAPI's own.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

CLIENTS = ("client-0", "client-1", "client-2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("federation") / "made"
    found(root, Federation(CLIENTS, "localhost", 8443, "name = 'toy'\n"))
    return root


class Serial(Site):
    """A site that shares its process with others: torch's global generators serve one at a time."""

    turn = threading.Lock()

    def handle(self, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        with self.turn:
            return super().handle(head, body)


@contextmanager
def on_line(folder: Path, setup: Setup, port: int, private: Path, said: list[str]) -> Iterator[None]:
    """All sites, each in a thread."""
    stop, threads = threading.Event(), list[threading.Thread]()
    for name in CLIENTS:
        own = folder / "sites" / name
        site = Serial(setup, client_named(setup, name), private / name)
        line = Line(
            f"localhost:{port}", read_key(own / "key"), (own / "ca.crt").read_bytes(), interval=0.05, tell=said.append
        )
        app = client_app(lambda _, site=site: site)
        threads.append(threading.Thread(target=line.serve, args=(app, stop)))
        threads[-1].start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(timeout=30)


def keys_of(folder: Path) -> dict[bytes, str]:
    return {read_public(key): name for name, key in read_sites(folder / "server" / SITES).items()}


def rounds(setup: Setup, answerer: Remote | InProcess) -> list[RoundRecord]:
    simulation = Simulation(setup, MemoryStore(), answerer)
    return list(simulate(simulation, simulation.start(InProcess(setup).workspace)))


def test_a_federation_over_tls_gives_the_simulators_bits(folder: Path, tmp_path: Path) -> None:
    setup, said = toy_setup(FedPer(), rounds=2), list[str]()
    keys = keys_of(folder)
    server = folder / "server"
    with (
        link(keys, certificate=server / "server.crt", key=server / "server.key") as (grid, port),
        on_line(folder, setup, port, tmp_path, said),
    ):
        remote = Remote(setup, GridPost(grid, keys), patience=Patience(interval=0.02), audit=tmp_path / "audit.jsonl")
        infos = remote.roll.gather(CLIENTS, wait=120)
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
    with link(keys, certificate=server / "server.crt", key=server / "server.key") as (grid, port):
        with on_line(folder, setup, port, tmp_path, said):
            remote = Remote(setup, GridPost(grid, keys), patience=Patience(interval=0.02, minimum=2))
            assert [info.id for info in remote.roll.gather(CLIENTS, wait=3)] == ["client-0", "client-2"]
        assert any("the server says" in text for text in said)
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
        found(folder, Federation(CLIENTS, "localhost", 1, ""))


def read_public_of(key: object) -> bytes:
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    return public_key_to_bytes(key)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"sites": ()}, "sites must be different names"),
        ({"sites": ("a", "a")}, "sites must be different names"),
        ({"sites": ("../a",)}, "letters, digits"),
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
    with pytest.raises(ValueError, match="belong together"), link([], certificate=server / "server.crt"):
        pass
    pair = link([], certificate=server / "server.crt", key=server / "ca.key")
    with pytest.raises(ValueError, match="no certificate and its key"), pair:
        pass
    with link([]) as (_, port), pytest.raises(RuntimeError, match="cannot listen"), link([], port=port):
        pass

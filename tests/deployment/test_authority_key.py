"""The authority of a federation: where its key is made, and how long its certificate and the server's are good."""

import os
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509

from confed.deployment.manifest import verified
from confed.deployment.provision import Federation, key_of_authority, provision, sign_again


@pytest.fixture
def root(tmp_path: Path) -> Path:
    provision(tmp_path / "fed", Federation(("a", "b"), "localhost", 8443, "", days=30))
    return tmp_path / "fed"


def test_the_authoritys_key_is_in_no_folder_of_a_party(root: Path) -> None:
    assert [path.relative_to(root).as_posix() for path in root.rglob("ca.key")] == ["authority/ca.key"]
    assert (root / "authority").stat().st_mode & 0o777 == 0o700 & ~_umask()
    assert (root / "authority" / "ca.key").stat().st_mode & 0o777 == 0o600
    secret = (root / "authority" / "ca.key").read_bytes()
    assert [path for path in root.rglob("*") if path.is_file() and secret in path.read_bytes()] == [
        root / "authority" / "ca.key"
    ]


def _umask() -> int:
    before = os.umask(0)
    os.umask(before)
    return before & 0o077


def test_the_authority_outlives_the_certificate_of_the_server(root: Path) -> None:
    authority, server = (
        x509.load_pem_x509_certificate((root / "server" / f"{name}.crt").read_bytes()) for name in ("ca", "server")
    )
    assert authority.not_valid_after_utc - server.not_valid_after_utc == timedelta(days=30)
    server.verify_directly_issued_by(authority)


def test_the_authoritys_key_is_found_where_any_version_made_it(root: Path) -> None:
    server = root / "server"
    assert key_of_authority(server) == root / "authority" / "ca.key"
    sign_again(server, key_of_authority(server))
    (root / "authority" / "ca.key").rename(server / "ca.key")
    assert key_of_authority(server) == server / "ca.key"
    sign_again(server, key_of_authority(server))
    assert verified(server, (server / "ca.crt").read_bytes()).serial == 3
    (server / "ca.key").unlink()
    with pytest.raises(ValueError, match=r"authority/ca\.key must hold the authority's private key"):
        sign_again(server, key_of_authority(server))

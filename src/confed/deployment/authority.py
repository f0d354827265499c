"""Certificate authority of a federation, certificates of its server, and keys of its sites.

The authority is a folder with ``ca.key`` and ``ca.crt`` that the server never needs: it may be made elsewhere, before
the federation, and its key may be encrypted. Certificates have ends of their own, and a new one goes into use while the
server runs. ``ca.crt`` at a site may hold two authorities, so that the next one is trusted before the last one ends.
"""

import datetime
import ipaddress
from pathlib import Path
from typing import Any

from confed.federation.checkpoint import write_atomically
from confed.system.private_keys import load_private, passphrase

KEY, CERTIFICATE = "ca.key", "ca.crt"
NEXT_KEY = "server.key.next"  # becomes server.key when its certificate is there


def _encryption(what: str, encrypted: bool) -> Any:
    from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, NoEncryption

    return BestAvailableEncryption(passphrase(what, new=True)) if encrypted else NoEncryption()


def make_key(path: Path, encrypted: bool = False) -> str:
    """A new private key of a site, readable by its owner only; returns the public half in OpenSSH's format."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, PrivateFormat

    key = ec.generate_private_key(ec.SECP384R1())
    form = PrivateFormat.PKCS8 if encrypted else PrivateFormat.OpenSSH  # which has no encryption without bcrypt
    _write_secret(path, key.private_bytes(Encoding.PEM, form, _encryption(str(path), encrypted)))
    return public_text(key)


def public_text(key: Any) -> str:
    """The public half of a private key, or the key of a certificate, in OpenSSH's format."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


def _write_secret(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read, whole or not at all."""
    if path.exists():
        raise ValueError(f"{path} is there already; a key is never overwritten")
    write_atomically(path, data, sync=True, mode=0o600)


def make_authority(folder: Path, days: int, encrypted: bool = False) -> bytes:
    """A new authority in a folder of its own; returns its certificate in PEM. No key is overwritten."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, PrivateFormat

    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path, unfinished = folder / KEY, (folder / KEY).is_file() and not (folder / CERTIFICATE).is_file()
    key = load_private(path.read_bytes(), str(path)) if unfinished else ec.generate_private_key(ec.SECP384R1())
    name = _named("confed federation authority")
    builder = _begun(name, name, key.public_key(), days, authority=True)
    identity = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    certificate = builder.add_extension(identity, critical=False).sign(key, hashes.SHA384())
    data = certificate.public_bytes(Encoding.PEM)
    if not unfinished:
        protection = _encryption(str(path), encrypted)
        _write_secret(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, protection))
    write_atomically(folder / CERTIFICATE, data)
    return data


def issue_server(server: Path, authority: Path, host: str, days: int) -> bytes:
    """A new key and certificate of a server in place of those of before; returns the authority's certificate."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    from cryptography.x509.oid import ExtendedKeyUsageOID

    try:
        vouching = (authority / CERTIFICATE).read_bytes()
        root_key = load_private((authority / KEY).read_bytes(), str(authority / KEY))
        root = x509.load_pem_x509_certificate(vouching)
    except (OSError, ValueError) as error:
        raise ValueError(f"{authority} must hold an authority's {KEY} and {CERTIFICATE}: {error}") from error
    key = ec.generate_private_key(ec.SECP384R1())
    builder = _begun(_named(host), root.subject, key.public_key(), days, authority=False)
    names = [_alternative(name) for name in dict.fromkeys((host, "localhost", "127.0.0.1"))]
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    identity = x509.SubjectKeyIdentifier.from_public_key(root.public_key())
    issuer = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identity)
    certificate = builder.add_extension(issuer, critical=False).sign(root_key, hashes.SHA384())
    if not (server / CERTIFICATE).is_file() or vouching not in (server / CERTIFICATE).read_bytes():
        write_atomically(server / CERTIFICATE, vouching)
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_atomically(server / NEXT_KEY, secret, sync=True, mode=0o600)
    write_atomically(server / "server.crt", certificate.public_bytes(Encoding.PEM), sync=True)
    settle_key(server)
    return vouching


def settle_key(server: Path) -> None:
    """The key of a server's certificate in its place, also where the command that made both was killed."""
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key: Any = load_pem_private_key((server / NEXT_KEY).read_bytes(), password=None)
        certificate = x509.load_pem_x509_certificate((server / "server.crt").read_bytes())
        if key.public_key() == certificate.public_key():
            (server / NEXT_KEY).replace(server / "server.key")
    except FileNotFoundError:  # there is none, or another process was faster
        return


def trusted(certificates: bytes) -> list[Any]:
    """The authorities in a file of one or several certificates; a fault is a ValueError."""
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        return list(x509.load_pem_x509_certificates(certificates))
    except (ValueError, NotImplementedError, UnsupportedAlgorithm) as error:
        raise ValueError(f"the certificate of the authority must be one in PEM: {error}") from error


def _named(text: str) -> Any:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _begun(subject: Any, issuer: Any, key: Any, days: int, *, authority: bool) -> Any:
    """A certificate of an authority or of a server, valid from an hour ago, as clocks may be behind."""
    from cryptography import x509

    start = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(start)
    builder = builder.not_valid_after(start + datetime.timedelta(days=days, hours=1))
    usage = x509.KeyUsage(
        digital_signature=not authority, key_cert_sign=authority, crl_sign=authority, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    constraints = x509.BasicConstraints(ca=authority, path_length=0 if authority else None)
    return builder.add_extension(constraints, critical=True).add_extension(usage, critical=True)


def _alternative(name: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)

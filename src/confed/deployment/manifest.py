"""A federation's signed manifest: its sites and their public keys, and digests of its recipe, card and wheel file.

The coordinator signs it with the key of the authority that the sites trust (``ca.crt``, with FLARE
``startup/rootCA.pem``), and every site checks it before it takes part, so that no party on the way can give it another
recipe or other members. Beside ``federation.json`` lies ``federation.json.sig``, in base64 the signature of a fixed
heading and of the file's bytes: ECDSA with SHA-384 by a key on P-384, or RSA-PSS with SHA-384 by FLARE's.

A signature does not age: without a serial number anybody on the way could hand a site a manifest, recipe and list of
sites that the coordinator signed long ago. The coordinator counts signatures up, and a site keeps, in its private
folder, the highest serial number of each authority with the digest of that manifest. A new private folder has no such
memory, so its first manifest is taken as it is.
"""

import base64
import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from confed.deployment.authority import trusted
from confed.federation.checkpoint import write_atomically
from confed.federation.reading import FAULTS, read_bounded
from confed.system.private_keys import load_private

MANIFEST = "federation.json"
SIGNATURE = f"{MANIFEST}.sig"
FORMAT = 2  # version of the file's content; version 1 had no serial number, which counts as 0
_HEADING = b"confed federation manifest 1\n"
"""Comes before what is signed, so that no signature of the authority's for another purpose can be one of a manifest."""


@dataclass(frozen=True)
class Manifest:
    """Content of a signed manifest: what all parties of a federation can rely on."""

    sites: Mapping[str, str]  # site -> its public key in OpenSSH's format
    recipe: str  # SHA-256 of the recipe's file
    card: str = ""  # of the card's file; empty where there is none
    # the wheel file to install -> its SHA-256; empty where the coordinator handed out none
    wheel: Mapping[str, str] = field(default_factory=dict[str, str])
    # number of the manifest, from 1; higher for each new one, so that sites can refuse an older one (manifest)
    serial: int = 0

    def to_bytes(self) -> bytes:
        """The content of ``federation.json``."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1, sort_keys=True, ensure_ascii=False).encode()


def digest_of(path: Path) -> str:
    """SHA-256 of a file; a fault is a ValueError."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error


def sign(manifest: Manifest, private: bytes, folders: Sequence[Path]) -> None:
    """Signature of a manifest; both files are written into some folders; a fault is a ValueError."""
    write_signed([folder / MANIFEST for folder in folders], _HEADING, manifest.to_bytes(), private)


def write_signed(files: Sequence[Path], heading: bytes, data: bytes, private: bytes) -> None:
    """The same data in some files, with the authority's signature of heading and data beside each."""
    line = base64.b64encode(signature_by(load_private(private, "the authority's key"), heading + data)) + b"\n"
    for file in files:
        # Who is killed, or reads, in between has data with their signature: beside the old one there are both.
        before = file.with_name(f"{file.name}.sig")
        write_atomically(before, line + (before.read_bytes() if before.is_file() else b""))
        write_atomically(file, data)
        write_atomically(before, line)


def signature_by(key: Any, data: bytes) -> bytes:
    """A signature of a private key on an elliptic curve or of RSA."""
    return key.sign(data, *_scheme(key))


def signed_by(key: Any, signature: bytes, data: bytes) -> bool:
    """Whether data are signed by the owner of a public key."""
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(signature, data, *_scheme(key))
    except (InvalidSignature, ValueError):
        return False
    return True


def _scheme(key: Any) -> tuple[Any, ...]:
    """What a key signs and verifies with."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa

    if isinstance(key, ec.EllipticCurvePrivateKey | ec.EllipticCurvePublicKey):
        return (ec.ECDSA(hashes.SHA384()),)
    if isinstance(key, rsa.RSAPrivateKey | rsa.RSAPublicKey):
        return padding.PSS(mgf=padding.MGF1(hashes.SHA384()), salt_length=48), hashes.SHA384()
    raise ValueError(f"a key that signs must be one on an elliptic curve or of RSA, got {type(key).__name__}")


def verified(folder: Path, authority: bytes) -> Manifest:
    """The manifest in a folder, if an authority of those in a file of certificates signed it; else a ValueError."""
    return _read(folder / MANIFEST, read_signed(folder / MANIFEST, _HEADING, authority))


def read_signed(path: Path, heading: bytes, authority: bytes) -> bytes:
    """The data of a file, if an authority of those in a file of certificates signed them; else a ValueError."""
    signed = path.with_name(f"{path.name}.sig")
    try:
        data = read_bounded(path)
        lines = read_bounded(signed, 2**16).splitlines()
        signatures = [base64.b64decode(line.strip(), validate=True) for line in lines]
    except OSError as error:
        raise ValueError(
            f"the coordinator's signature is missing: {error.filename} cannot be read; ask the coordinator for "
            f"{path.name} and {signed.name} (`confed federation sign` writes them)"
        ) from error
    except ValueError as error:
        raise ValueError(f"{signed} must hold a signature in base64: {error}") from error
    keys = [certificate.public_key() for certificate in trusted(authority)]
    if not any(signed_by(key, signature, heading + data) for key, signature in itertools.product(keys, signatures)):
        raise ValueError(
            f"{path} is not signed by the authority that this site trusts: the file was changed, or is of another "
            "federation; ask the coordinator before you continue"
        )
    return data


def check_site(
    manifest: Manifest, site: str, public: str = "", *, recipe: Path | None = None, card: Path | None = None
) -> None:
    """Check of a site's files against what the coordinator signed; a fault is a ValueError."""
    if site not in manifest.sites:
        raise ValueError(f"site {site!r} is not among those that the coordinator signed: {', '.join(manifest.sites)}")
    if public and not same_key(public, manifest.sites[site]):
        raise ValueError(
            f"the key of this site is not the one that the coordinator signed for {site!r}; send the coordinator the "
            "public half of yours, who puts it into sites.json and runs `confed federation sign`"
        )
    for what, path, signed in (("recipe", recipe, manifest.recipe), ("card", card, manifest.card)):
        if path is not None and (file_digest := digest_of(path)) != signed:
            raise ValueError(
                f"the {what} {path} is not the one that the coordinator signed: its SHA-256 must be "
                f"{signed or 'that of a card, and none was signed'}, got {file_digest}; what differs here goes into "
                "--data and --device, and a new file needs a new signature (`confed federation sign`)"
            )


def read_certificate(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"--ca: cannot read {path}: {error.strerror}") from error


def check_signed(
    folder: Path, authority: Path, recipe: str, card: Path | None, site: str, public: str = ""
) -> tuple[bytes, Manifest]:
    """The authority's certificate and its manifest, after a check of this site's recipe, card and key."""
    certificate = read_certificate(authority)
    manifest, own = verified(folder, certificate), folder / "startup" / "client.crt"
    if not public and own.is_file():  # with FLARE the certificate says who this is
        public = public_half(own.read_bytes())
        site = next((name for name, key in manifest.sites.items() if key == public), site)
    check_site(manifest, site, public, recipe=Path(recipe) if Path(recipe).is_file() else None, card=card)
    return certificate, manifest


def public_half(certificate: bytes) -> str:
    """The public key of a certificate (PEM) in OpenSSH's format."""
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    key: Any = x509.load_pem_x509_certificate(certificate).public_key()
    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


def same_key(one: str, other: str) -> bool:
    """Whether two lines in OpenSSH's format, which may end with a comment, are of the same key."""
    return one.split()[:2] == other.split()[:2]


def _read(path: Path, data: bytes) -> Manifest:
    try:
        content: Any = json.loads(data)
        form = content.pop("format")
        manifest = Manifest(**content)
        texts = [*manifest.sites, *manifest.sites.values(), manifest.recipe, manifest.card, *manifest.wheel.values()]
    except FAULTS as error:
        raise ValueError(f"{path} must be a manifest of a federation: {error!r}") from error
    sound = all(isinstance(text, str) for text in texts) and type(manifest.serial) is int and manifest.serial >= 0
    if form not in (1, FORMAT) or not sound:
        raise ValueError(f"{path} must be a manifest of format {FORMAT}; was it made by another version of confed?")
    return manifest


# Serial numbers of manifests ----------------------------------------------------------------------------------

ACCEPTED = "manifests.json"
"""File in a site's private folder: SHA-256 of the authority's certificate -> ``serial`` and ``digest``."""


def check_serial(private: Path, authority: bytes, manifest: Manifest) -> None:
    """Check that a manifest is not older than the last one that a site accepted."""
    serials = _manifest_serial_read(private / ACCEPTED)
    accepted = max((serials[name] for name in _names(authority) if name in serials), default=None)
    if accepted is None or manifest.serial > accepted[0]:
        return
    if manifest.serial < accepted[0]:
        raise ValueError(
            f"{MANIFEST} has the serial number {manifest.serial}, and this site has accepted {accepted[0]}: it is an "
            "older one; ask the coordinator for the newest, or, if that is the newest, for one with a higher number "
            "(`confed federation sign --serial`)"
        )
    if _digest(manifest) != accepted[1]:
        raise ValueError(
            f"{MANIFEST} differs from the one with the same serial number {accepted[0]} that this site has accepted; "
            "ask "
            "the coordinator which holds, and for one with a higher number (`confed federation sign --serial`)"
        )


def accept(private: Path, authority: bytes, manifest: Manifest) -> None:
    """:func:`check_serial`, and storage of the serial number in the private folder, which is made if it is missing."""
    check_serial(private, authority, manifest)
    path, newest = private / ACCEPTED, (manifest.serial, _digest(manifest))
    accepted, names = _manifest_serial_read(path), _names(authority)
    if all(accepted.get(name) == newest for name in names):
        return
    private.mkdir(mode=0o700, parents=True, exist_ok=True)
    content = {
        key: {"serial": serial, "digest": digest}
        for key, (serial, digest) in {**accepted, **dict.fromkeys(names, newest)}.items()
    }
    write_atomically(path, json.dumps(content, indent=1).encode())


def _names(authority: bytes) -> list[str]:
    """Digests of the authorities in a file: with a second one the serial numbers of the first go on."""
    from cryptography.hazmat.primitives.serialization import Encoding

    certificates = trusted(authority)
    single = len(certificates) == 1
    texts = [authority] if single else [certificate.public_bytes(Encoding.PEM) for certificate in certificates]
    return [hashlib.sha256(text).hexdigest() for text in texts]


def _digest(manifest: Manifest) -> str:
    return hashlib.sha256(manifest.to_bytes()).hexdigest()


def _manifest_serial_read(path: Path) -> dict[str, tuple[int, str]]:
    """What was accepted; nothing where there is no file."""
    if not path.exists():
        return {}
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        serials = {str(name): (entry["serial"], entry["digest"]) for name, entry in content.items()}
    except (OSError, *FAULTS) as error:
        raise ValueError(f"{path} must hold serial numbers of manifests as JSON: {error!r}") from error
    if not all(type(serial) is int and isinstance(digest, str) for serial, digest in serials.values()):
        raise ValueError(f"{path} must hold a whole number and a digest for each authority")
    return serials

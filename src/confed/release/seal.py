"""Digest and signature of a dossier.

The file ``dossier.json`` holds ``content``, its SHA-256 (of JSON with sorted keys, without blanks, in UTF-8) and, where
a key was given, a signature of :data:`HEADING` and that text.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

HEADING = b"confed dossier 1\n"
"""Comes before what is signed, so that no other signature of the key can be one of a dossier."""
ON_CURVE = "ECDSA on P-384 with SHA-384"


def canonical(content: Mapping[str, Any]) -> bytes:
    """JSON with sorted keys and without blanks, in UTF-8."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def read_key(path: Path) -> Any:
    """A private key from a file, on Ed25519 or, as sites of a federation have it, on P-384; a fault is a ValueError."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key

    wanted = f"{path} must hold an Ed25519 or P-384 private key without a password"
    try:
        data = path.read_bytes()
        load: Callable[..., Any] = load_ssh_private_key if b"OPENSSH" in data[:40] else load_pem_private_key
        key = load(data, None)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{wanted}: {error}") from error
    on_curve = isinstance(key, ec.EllipticCurvePrivateKey) and key.curve.name == "secp384r1"
    if not isinstance(key, Ed25519PrivateKey) and not on_curve:
        raise ValueError(f"{wanted}, got {type(key).__name__}")
    return key


def seal(content: Mapping[str, Any], key: Any = None) -> dict[str, Any]:
    """The content with its digest, and with a signature where there is a key."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    data = canonical(content)
    sealed: dict[str, Any] = {"content": content, "sha256": hashlib.sha256(data).hexdigest()}
    if isinstance(key, Ed25519PrivateKey):
        kind, public = "Ed25519", base64.b64encode(key.public_key().public_bytes_raw()).decode()
        signature = key.sign(HEADING + data)
    elif key is not None:
        kind, public = ON_CURVE, key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
        signature = key.sign(HEADING + data, _ecdsa())
    else:
        return sealed
    value = base64.b64encode(signature).decode()
    return {**sealed, "signature": {"kind": kind, "public_key": public, "value": value}}


def check_seal(sealed: Mapping[str, Any], public_key: str = "") -> None:
    """Check of a dossier's digest and signature.

    Args:
        sealed: content of ``dossier.json``.
        public_key: whose signature it must be: in base64 as on the page, or in OpenSSH's format on P-384; "" checks
            the signature only if there is one.

    Raises:
        ValueError: the content was changed, or it is not signed by that key.
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    data = canonical(sealed["content"])
    if hashlib.sha256(data).hexdigest() != sealed["sha256"]:
        raise ValueError("the dossier's content is not what its digest is of: it was changed")
    signature = sealed.get("signature")
    if public_key and (signature is None or signature["public_key"].split()[:2] != public_key.split()[:2]):
        raise ValueError("the dossier is not signed by the expected key")
    if signature is None:
        return
    value = base64.b64decode(signature["value"])
    try:
        if signature["kind"] == ON_CURVE:
            of_site: Any = load_ssh_public_key(signature["public_key"].encode())
            of_site.verify(value, HEADING + data, _ecdsa())
        else:
            key = Ed25519PublicKey.from_public_bytes(base64.b64decode(signature["public_key"]))
            key.verify(value, HEADING + data)
    except InvalidSignature:
        raise ValueError("the dossier's signature does not fit its content") from None


def _ecdsa() -> Any:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.ECDSA(hashes.SHA384())

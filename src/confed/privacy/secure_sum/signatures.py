"""Signatures on the public keys of secure aggregation's members, by keys that a server does not hand out.

A server that carries the members' public keys could put its own keys in their place and read every update. Against
that a site signs the keys that it draws for a sum, together with the sum's plan, with the key by which it is known in
the federation, and shares its secrets with members only whose keys are signed likewise (Bonawitz et al., CCS 2017, the
variant for active adversaries). Whom a key belongs to says the list that the coordinator gave the site when the
federation was founded (:class:`ListedKeys`), or the federation's own authority (:class:`VouchedKeys`).

The server checks the signatures too (:class:`PublicKeys`, :class:`Authority`) and leaves out a member whose own is bad:
otherwise all others would refuse to go on, and one site could end every round.
"""

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from confed.privacy.secure_sum.member import Keys
from confed.privacy.secure_sum.plan import Plan

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey


LARGEST = 8192  # bytes of a signature, with a certificate where one belongs to it, at most


def statement(plan: Plan, name: str, keys: Keys) -> bytes:
    """Text that a member signs: its keys, for this aggregation only."""
    return b"confed secure sum keys\x1f" + json.dumps([plan.digest, name, keys.seal.hex(), keys.mask.hex()]).encode()


class PublicKeys:
    """Check of signatures (ECDSA, SHA-384) by the keys with which sites prove to the server who they are."""

    def __init__(self, public: Mapping[str, str]) -> None:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
        from cryptography.hazmat.primitives.serialization import load_ssh_public_key

        self._public = dict[str, EllipticCurvePublicKey]()
        for name, text in public.items():
            try:
                public_key = load_ssh_public_key(text.encode())
            except (ValueError, UnsupportedAlgorithm) as error:
                raise ValueError(f"the list of members has no public key in OpenSSH's format for {name!r}") from error
            if not isinstance(public_key, EllipticCurvePublicKey):
                raise ValueError(f"the key of {name!r} in the list of members must be of an elliptic curve")
            self._public[name] = public_key

    def check(self, client: str, statement: bytes, signature: bytes) -> None:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
        from cryptography.hazmat.primitives.hashes import SHA384

        if client not in self._public:
            raise ValueError(f"{client!r} is not in the list of members")
        try:
            self._public[client].verify(signature, statement, ECDSA(SHA384()))
        except InvalidSignature as error:
            raise ValueError(f"the keys of {client!r} are not signed by the key in the list of members") from error


class ListedKeys(PublicKeys):
    """Signatures (ECDSA, SHA-384) by the keys with which sites prove to the server who they are."""

    def __init__(self, key: "EllipticCurvePrivateKey", public: Mapping[str, str]) -> None:
        super().__init__(public)
        self._key = key

    def names(self, client: str) -> bool:
        """Whether the list has this site's own key under a client's name."""
        return client in self._public and self._public[client] == self._key.public_key()

    def sign(self, statement: bytes) -> bytes:
        from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
        from cryptography.hazmat.primitives.hashes import SHA384

        return self._key.sign(statement, ECDSA(SHA384()))


class Authority:
    """Check of signatures by keys whose certificates the federation's authority has signed, as in the kits of FLARE."""

    def __init__(self, startup: Path, names: Mapping[str, str]) -> None:
        from cryptography import x509

        try:
            self._authority = x509.load_pem_x509_certificate((startup / "rootCA.pem").read_bytes())
        except (OSError, ValueError) as error:
            raise ValueError(f"{startup} must hold the authority's certificate rootCA.pem: {error}") from error
        self._names = dict(names)

    def check(self, client: str, statement: bytes, signature: bytes) -> None:
        from cryptography import x509
        from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
        from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

        length = int.from_bytes(signature[:2], "big")
        try:
            certificate = x509.load_der_x509_certificate(signature[2 + length :])
            certificate.verify_directly_issued_by(self._authority)
            key: Any = certificate.public_key()
            if isinstance(key, RSAPublicKey):
                key.verify(signature[2 : 2 + length], statement, PKCS1v15(), _sha384())
            else:
                key.verify(signature[2 : 2 + length], statement, _ecdsa())
        except (ValueError, TypeError, AttributeError, InvalidSignature, UnsupportedAlgorithm) as error:
            raise ValueError(f"the keys of {client!r} are not signed by a site of this federation") from error
        named = [
            str(attribute.value) for attribute in certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
        ]
        if named != [self._names.get(client, client)]:
            raise ValueError(f"the keys of {client!r} are signed by {', '.join(named)[:80]!r}")
        now = datetime.datetime.now(datetime.UTC)
        if not certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc:
            raise ValueError(f"the certificate of {client!r} is not valid now")


class VouchedKeys(Authority):
    """Signatures by keys whose certificates the federation's authority has signed, as in the kits of FLARE."""

    def __init__(self, startup: Path, names: Mapping[str, str]) -> None:
        from cryptography import x509
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

        try:
            self._key: Any = load_pem_private_key((startup / "client.key").read_bytes(), password=None)
            certificate = x509.load_pem_x509_certificate((startup / "client.crt").read_bytes())
        except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise ValueError(f"{startup} must hold client.key, client.crt and rootCA.pem: {error}") from error
        super().__init__(startup, names)
        self._own = certificate.public_bytes(Encoding.DER)

    def sign(self, statement: bytes) -> bytes:
        """See :class:`confed.federation.client.Signer`; the site's certificate goes with it."""
        from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
        from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey

        if isinstance(self._key, RSAPrivateKey):
            signature = self._key.sign(statement, PKCS1v15(), _sha384())
        else:
            signature = self._key.sign(statement, _ecdsa())
        return len(signature).to_bytes(2, "big") + signature + self._own


def _sha384() -> Any:
    from cryptography.hazmat.primitives.hashes import SHA384

    return SHA384()


def _ecdsa() -> Any:
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA

    return ECDSA(_sha384())

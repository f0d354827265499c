"""Readers of the files of a federation across machines, for fuzz_readers.py."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fuzz_reader import Reader, reads, told


def federation_readers(root: Path) -> list[Reader]:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    from confed.datasets.card import Card, CardClient, read_card
    from confed.deployment.manifest import _HEADING, MANIFEST, SIGNATURE, Manifest, sign, verified  # pyright: ignore
    from confed.deployment.provision import make_key, read_sites
    from confed.engines.flower.supernode import public_of, read_key, read_public
    from confed.engines.remote.client import EvaluationRecord, Journal, kept_policy
    from confed.federation.update_privacy import UpdatePrivacy
    from confed.privacy.evaluation_policy import EvaluationPolicy

    public = make_key(root / "site.key")
    private, authority = _authority()
    signed = root / "signed"
    signed.mkdir()
    sign(Manifest({"site": public}, "0" * 64, "", {"confed.whl": "1" * 64}), private, [signed])
    key: Any = load_pem_private_key(private, None)
    manifest, signature = ((signed / name).read_bytes() for name in (MANIFEST, SIGNATURE))

    def check(data: bytes) -> None:
        body, _, tail = data.partition(b"\n\0\n")
        (signed / MANIFEST).write_bytes(body)
        (signed / SIGNATURE).write_bytes(tail)
        verified(signed, authority)

    def resigned(data: bytes) -> bytes:
        body = data.partition(b"\n\0\n")[0]
        return body + b"\n\0\n" + base64.b64encode(key.sign(_HEADING + body, ec.ECDSA(hashes.SHA384()))) + b"\n"

    def trusted(data: bytes) -> None:
        (signed / MANIFEST).write_bytes(manifest)
        (signed / SIGNATURE).write_bytes(signature)
        verified(signed, data)

    card = Card("scenes", False, ("no", "yes"), ("exist",), ("a", "b"), {"x": CardClient(("yes",))}, {"home": 3})
    costs = [
        {"time": 1.0, "run": "r", "round": 1, "action": "fit", "noise": 2.0, "delta": 1e-5, "epsilon": 3.0},
        {"time": 1.0, "run": "r", "round": 1, "action": "evaluate", "noise": 4.0, "delta": 1e-5, "epsilon": 3.0},
        {"time": 1.0, "run": "r", "round": 2, "action": "fit", "noise": 0.0, "epsilon": None},
    ]
    evaluations = [{"time": 1.0, "run": "r", "round": number, "noise": 0.0, "sums": 3} for number in range(3)]
    privacy = UpdatePrivacy(clip=1.0, noise=2.0)

    def journal(name: str) -> Callable[[bytes], str | None]:
        folder = root / name
        folder.mkdir()

        def read(data: bytes) -> str | None:
            (folder / name).write_bytes(data)
            book = Journal(folder, "r")
            if name == "evaluations.jsonl":
                EvaluationRecord(folder, "r", EvaluationPolicy(per_round=1000), book, None).check(1, "a model")
            if name == "privacy.jsonl" and not book.epsilon(privacy) >= 0:
                return "an epsilon that is none"
            return None

        return read

    lines = ["\n".join(map(json.dumps, rows)).encode() + b"\n" for rows in (costs, evaluations)]
    secrets = json.dumps({"secret": "ab" * 16, "asked": "cd"}).encode() + b"\n"
    policy = reads(root / "site" / "evaluations.txt", lambda path: kept_policy(path.parent, None))
    sites = json.dumps({"a": public, "b": public_of(read_key(root / "site.key"))}).encode()
    return [
        Reader("manifest", "json", (manifest + b"\n\0\n" + signature,), check, sealed=resigned),
        Reader("authority", "bytes", (authority,), trusted),
        Reader("sites.json", "json", (sites,), reads(root / "sites.json", read_sites)),
        Reader("card", "json", (card.to_json().encode(),), reads(root / "card.json", read_card)),
        Reader("private_key", "bytes", ((root / "site.key").read_bytes(),), reads(root / "a.key", read_key)),
        Reader("public_key", "text", (public.encode(),), told(lambda d: read_public(d.decode("latin-1")))),
        Reader("used.jsonl", "json", (secrets,), journal("used.jsonl")),
        Reader("privacy.jsonl", "json", (lines[0],), journal("privacy.jsonl")),
        Reader("evaluations.jsonl", "json", (lines[1],), journal("evaluations.jsonl")),
        Reader("evaluation_policy", "text", (b"noise=4.0,per_round=1,least=2\n", b"off\n"), policy),
    ]


def _authority() -> tuple[bytes, bytes]:
    """A private key and its certificate, PEM."""
    from datetime import UTC, datetime, timedelta

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "authority")])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now).not_valid_after(now + timedelta(days=1))
    certificate = builder.sign(key, hashes.SHA384()).public_bytes(Encoding.PEM)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), certificate

"""Serial numbers of manifests: what a site has accepted once it never replaces by an older one.

A signature does not age: without a serial number anybody on the way could hand a site a manifest, recipe and list of
sites that the coordinator signed long ago. The coordinator counts signatures up, and a site keeps, in its private
folder, the highest serial number of each authority with the digest of that manifest. A new private folder has no such
memory, so its first manifest is taken as it is.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from confed.deployment.manifest import MANIFEST, Manifest
from confed.federation.checkpoint import write_atomically

__all__ = ["ACCEPTED", "accept", "check_serial"]

ACCEPTED = "manifests.json"
"""File in a site's private folder: SHA-256 of the authority's certificate -> ``serial`` and ``digest``."""


def check_serial(private: Path, authority: bytes, manifest: Manifest) -> None:
    """Check that a manifest is not older than the last one that a site accepted.

    Args:
        private: the site's private folder; it may be missing.
        authority: the certificate of the authority that signed, PEM.
        manifest: what was signed.

    Raises:
        ValueError: it is older, or another one with the same serial number, or the file with the last one is damaged.
    """
    known = _read(private / ACCEPTED).get(_name(authority))
    if known is None or manifest.serial > known[0]:
        return
    if manifest.serial < known[0]:
        raise ValueError(
            f"{MANIFEST} has the serial number {manifest.serial}, and this site has accepted {known[0]}: it is an "
            "older one; ask the coordinator for the newest, or, if that is the newest, for one with a higher number "
            "(`confed federation sign --serial`)"
        )
    if _digest(manifest) != known[1]:
        raise ValueError(
            f"{MANIFEST} differs from the one with the same serial number {known[0]} that this site has accepted; ask "
            "the coordinator which holds, and for one with a higher number (`confed federation sign --serial`)"
        )


def accept(private: Path, authority: bytes, manifest: Manifest) -> None:
    """:func:`check_serial`, and storage of the serial number in the private folder, which is made if it is missing.

    Args:
        private: the site's private folder.
        authority: the certificate of the authority that signed, PEM.
        manifest: what was signed.
    """
    check_serial(private, authority, manifest)
    path, name = private / ACCEPTED, _name(authority)
    known, newest = _read(path), (manifest.serial, _digest(manifest))
    if known.get(name) == newest:
        return
    private.mkdir(mode=0o700, parents=True, exist_ok=True)
    content = {key: {"serial": serial, "digest": digest} for key, (serial, digest) in {**known, name: newest}.items()}
    write_atomically(path, json.dumps(content, indent=1).encode())


def _name(authority: bytes) -> str:
    return hashlib.sha256(authority).hexdigest()


def _digest(manifest: Manifest) -> str:
    return hashlib.sha256(manifest.to_bytes()).hexdigest()


def _read(path: Path) -> dict[str, tuple[int, str]]:
    """What was accepted; nothing where there is no file."""
    if not path.exists():
        return {}
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        found = {str(name): (entry["serial"], entry["digest"]) for name, entry in content.items()}
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} must hold serial numbers of manifests as JSON: {error!r}") from error
    if not all(type(serial) is int and isinstance(digest, str) for serial, digest in found.values()):
        raise ValueError(f"{path} must hold a whole number and a digest for each authority")
    return found

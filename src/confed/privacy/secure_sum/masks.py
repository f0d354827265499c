"""Keys, seeds and masks of secure aggregation, by the library ``cryptography``."""

import importlib.util
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

KEY = 32
"""Bytes of a key, private or public, and of a seed."""
NONCE = 12
"""Bytes of a seal that are drawn for every text."""
SEAL = NONCE + 16
"""Bytes by which a sealed text is longer."""
CHUNK = 2**20
"""Numbers of a mask that are in memory at a time."""

Integers = NDArray[Any]
"""A vector of unsigned integers of 32 or 64 bits, which wrap around."""


def available() -> bool:
    """Whether the library is installed."""
    return importlib.util.find_spec("cryptography") is not None


def new_key() -> bytes:
    """A private key."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.generate().private_bytes_raw()


def public_key(private: bytes) -> bytes:
    """The public key of a private key."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def pair_secret(private: bytes, public: bytes, purpose: str) -> bytes:
    """Shared secret of two key pairs (X25519), 32 bytes, different for every purpose.

    A faulty public key is a ValueError.
    """
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

    shared = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    return derived(shared, purpose, KEY)


def derived(secret: bytes, purpose: str, length: int) -> bytes:
    """Key derivation (HKDF, RFC 5869): bytes from a secret that tell nothing of it, different for every purpose."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), length, salt=None, info=f"confed secure sum\x1f{purpose}".encode()).derive(secret)


def usable(public: bytes) -> bool:
    """Whether a public key gives a secret with another one; with a key that does not, the aggregation would stop."""
    try:
        pair_secret(new_key(), public, "trial")
    except ValueError:
        return False
    return True


def sealed(key: bytes, text: bytes) -> bytes:
    """Authenticated encryption of a text, behind its nonce."""
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    nonce = os.urandom(NONCE)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, text, None)


def opened(key: bytes, text: bytes) -> bytes:
    """The text of :func:`sealed`."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    try:
        return ChaCha20Poly1305(key).decrypt(text[:NONCE], text[NONCE:], None)
    except (InvalidTag, ValueError) as error:  # of a text that is shorter than a nonce
        raise ValueError("a sealed share was changed on its way") from error


def add_mask(vector: Integers, seed: bytes, sign: int) -> None:
    """Addition of the mask of a seed to a vector in place, or its subtraction, modulo 2^32 or 2^64."""
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    stream = Cipher(ChaCha20(seed, bytes(16)), mode=None).encryptor()
    width = vector.dtype.itemsize
    for start in range(0, len(vector), CHUNK):
        chunk = vector[start : start + CHUNK]
        mask = np.frombuffer(stream.update(bytes(width * len(chunk))), dtype=f"<u{width}")
        if sign > 0:
            chunk += mask
        else:
            chunk -= mask

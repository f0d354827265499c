"""Keys, seeds and masks of secure aggregation, by the library ``cryptography``.

Shamir's secret sharing: any t of n shares give the secret, and fewer tell nothing.

Shamir, "How to share a secret", Communications of the ACM 22, 1979: the shares are values of a random polynomial of
degree t - 1 whose value at 0 is the secret, in the integers modulo a prime.
"""

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PRIME = 2**256 + 297  # the least prime above all secrets of 32 bytes
SHARE = 33  # bytes of a share


def split_secret(secret: bytes, threshold: int, count: int, coefficient: Callable[[int], int]) -> list[bytes]:
    """Shares of a secret by a polynomial with these coefficients, beginning with holder 1."""
    if len(secret) != 32:
        raise ValueError(f"a secret must have 32 bytes, got {len(secret)}")
    if not 1 <= threshold <= count:
        raise ValueError(f"the threshold must lie in [1, {count}], got {threshold}")
    coefficients = [int.from_bytes(secret, "big"), *(coefficient(power) % PRIME for power in range(1, threshold))]
    shares: list[bytes] = []
    for holder in range(1, count + 1):
        value = 0
        for factor in reversed(coefficients):
            value = (value * holder + factor) % PRIME
        shares.append(value.to_bytes(SHARE, "big"))
    return shares


def join_shares(shares: Mapping[int, bytes]) -> bytes:
    """The secret from shares by their holders' numbers, from 1; all that are given are used."""
    if not shares:
        raise ValueError("a secret needs shares, got none")
    for holder, share in shares.items():
        if len(share) != SHARE:
            raise ValueError(f"share {holder} must have {SHARE} bytes, got {len(share)}")
    total = 0
    for holder, share in shares.items():
        above, below = 1, 1
        for other in shares:
            if other != holder:
                above, below = above * other % PRIME, below * (other - holder) % PRIME
        total = (total + int.from_bytes(share, "big") * above * pow(below, -1, PRIME)) % PRIME
    if total >= 2**256:
        raise ValueError("these are no shares of one secret")
    return total.to_bytes(32, "big")


KEY = 32  # bytes of a key, private or public, and of a seed
NONCE = 12  # bytes of a seal that are drawn for every text
SEAL = NONCE + 16  # bytes by which a sealed text is longer
CHUNK = 2**20  # numbers of a mask that are in memory at a time
Integers = NDArray[Any]  # a vector of unsigned integers of 32 or 64 bits, which wrap around


def available() -> bool:
    return importlib.util.find_spec("cryptography") is not None


def new_key() -> bytes:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.generate().private_bytes_raw()


def public_key(private: bytes) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def pair_secret(private: bytes, public: bytes, purpose: str) -> bytes:
    """Shared secret of two key pairs (X25519), 32 bytes, different for every purpose."""
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


def encode(
    updates: Sequence[Tensor], weight: int, fraction: int, reach: float, bits: int, names: Sequence[str] = ()
) -> Integers:
    """Fixed-point encoding w round(2^f d) of tensors, in one vector of integers."""
    if weight < 1:
        raise ValueError(f"an update's weight must be at least 1, got {weight}")
    parts = [update.detach().double().reshape(-1) for update in updates]
    beyond = next(
        (i for i, values in enumerate(parts) if not bool((values.abs() <= reach).all())), None
    )  # a NaN is, too
    if beyond is not None:
        name = f" of {names[beyond]!r}" if names else ""
        raise ValueError(f"algorithm.secure_sum.reach is {reach}, and a value{name} in the update moved further")
    flat = torch.cat(parts)
    whole = np.rint(np.ldexp(flat.numpy(), fraction)).astype(np.int64) * weight
    return whole.astype(np.int32).view(np.uint32) if bits == 32 else whole.view(np.uint64)


def decode(total: Integers, weights: int, fraction: int, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Fixed-point decoding: the weighted mean 2^-f total / weights, cut into tensors of float64."""
    signed = total.view(np.int32 if total.dtype.itemsize == 4 else np.int64)
    flat = torch.from_numpy(np.ldexp(signed.astype(np.float64), -fraction) / weights)
    parts = flat.split([shape.numel() for shape in shapes])
    return [values.reshape(shape) for values, shape in zip(parts, shapes, strict=True)]


def to_wire(vector: Integers) -> Tensor:
    """The same bits as a tensor of signed integers, which messages can carry."""
    return torch.from_numpy(vector.view(np.int32 if vector.dtype.itemsize == 4 else np.int64))


def from_wire(tensor: Tensor) -> Integers:
    return tensor.numpy().view(np.uint32 if tensor.dtype is torch.int32 else np.uint64)

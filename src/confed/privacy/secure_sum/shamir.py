"""Shamir's secret sharing: any t of n shares give the secret, and fewer tell nothing.

Shamir, "How to share a secret", Communications of the ACM 22, 1979: the shares are values of a random polynomial of
degree t - 1 whose value at 0 is the secret, in the integers modulo a prime.
"""

import secrets
from collections.abc import Callable, Mapping

PRIME = 2**256 + 297
"""The least prime above all secrets of 32 bytes."""
SHARE = 33
"""Bytes of a share."""


def _drawn(_: int) -> int:
    return secrets.randbelow(PRIME)


def split(secret: bytes, threshold: int, count: int, coefficient: Callable[[int], int] = _drawn) -> list[bytes]:
    """Shares of a secret, beginning with holder 1."""
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


def join(shares: Mapping[int, bytes]) -> bytes:
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

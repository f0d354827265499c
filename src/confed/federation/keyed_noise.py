"""Gaussian noise as a function of a secret and of what it hides, so that asking twice is no second draw.

Who may have a client release the same values again and again averages noise away that is drawn anew each time: the mean
of n releases has 1/n of its variance. Here the bits of the noise are a pseudorandom function of the values,

    SHAKE256(secret || label || digest of the values),

where the label says what was released, when, by whom, in answer to which messages, and with what clip and noise
multiplier. The same release has the same noise, bit for bit; whatever differs in any of these has noise of its own. The
answer to other messages differs even where the values do not: else equal noise would tell that values are equal. For
who does not know the secret the bits are as good as the operating system's as long as SHAKE256 (FIPS 202) is a
pseudorandom function: the guarantee of differential privacy is then a computational one.
"""

import hashlib
import json

import torch
from torch import Tensor

from confed.federation.randomness import normal, normal_of

_DOMAIN = "confed noise at a site, 1"
_SECRET = 32  # bytes of a secret


class KeyedNoise:
    """Stream of noise for one purpose in one call.

    Args:
        secret: 32 bytes that the other parties do not know.
        heard: digest of the messages that the values follow from.
        round: number of the round.
        client: whose values they are.
        purpose: what they are for.
    """

    def __init__(self, secret: bytes, heard: str, round: int, client: str, purpose: str) -> None:
        if len(secret) != _SECRET:
            raise ValueError(f"the secret of a site's noise must have {_SECRET} bytes, got {len(secret)}")
        self._secret, self._label, self._drawn = secret, (_DOMAIN, heard, round, client, purpose), 0

    def normal(self, clean: Tensor, dtype: torch.dtype, *scale: float) -> Tensor:
        """Standard normal numbers for values, of their shape, on the CPU; the next values have others."""
        flat = clean.detach().cpu().contiguous().reshape(-1)  # a copy of the bytes, as they are in memory
        digest = hashlib.blake2b(flat.view(torch.uint8).numpy().data, digest_size=32).hexdigest()
        what = [str(clean.dtype), list(clean.shape), digest, str(dtype), [float(s).hex() for s in scale]]
        label = json.dumps([*self._label, self._drawn, what]).encode()  # one text for one list: nothing is ambiguous
        self._drawn += 1
        bits = hashlib.shake_256(self._secret + label).digest(8 * clean.numel())
        return normal_of(bits, clean.shape, dtype)


Noise = torch.Generator | KeyedNoise | None  # where noise comes from: a seed, a secret, or the operating system


def noise_for(clean: Tensor, rng: Noise, dtype: torch.dtype, *scale: float) -> Tensor:
    """Standard normal numbers of the shape of values; with a secret, a function of these."""
    if isinstance(rng, KeyedNoise):
        return rng.normal(clean, dtype, *scale)
    return normal(clean.shape, rng, dtype)

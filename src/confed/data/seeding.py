"""Random generators of data, as functions of a seed and a purpose."""

from zlib import crc32

import numpy as np


def generator(seed: int, *purpose: str) -> np.random.Generator:
    """A stream of its own for (seed, purpose); equal on every platform and in every process."""
    return np.random.default_rng(np.random.SeedSequence([seed, *(crc32(word.encode()) for word in purpose)]))

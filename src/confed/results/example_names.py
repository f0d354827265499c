"""Which test example each row of a run's predictions is: hashes of names, and right answers, in stored order.

``predictions.safetensors`` holds ``names/<place>``, int64 (N,), and of questions with answers ``truth/<place>`` and
``answers/<place>``, int64 (N,), beside the rows of every view. Rows may stand in another order for another seed
(examples that lack modalities are sorted by what they have), so comparisons pair them by these hashes and never by
position.
"""

import hashlib
from collections.abc import Iterable

import numpy as np

__all__ = ["ANSWERS", "NAMES", "TRUTH", "name_hashes"]

NAMES = "names"
TRUTH = "truth"
ANSWERS = "answers"


def name_hashes(names: Iterable[str]) -> np.ndarray:
    """A 64-bit hash of each name, the same on every machine: the first 8 bytes of BLAKE2b, little-endian.

    Args:
        names: N names.

    Returns:
        int64, shape (N,).
    """
    digests = (hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest() for name in names)
    return np.frombuffer(b"".join(digests), dtype="<i8").astype(np.int64)

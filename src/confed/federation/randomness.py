"""Randomness is a function of (seed, round, client, purpose); nothing random is ever stored.

Hence exact resume, the same numbers for any number of workers, and a client's stream that does not depend on
who else takes part.
"""

from collections.abc import Generator
from contextlib import contextmanager
from hashlib import blake2b
from random import Random

import torch

__all__ = ["derive", "generator", "isolated", "sample_cohort"]


def derive(seed: int, round: int, client: str, purpose: str) -> int:
    """A 63-bit seed, equal on every machine and in every process."""
    key = f"{seed}\x1f{round}\x1f{client}\x1f{purpose}".encode()
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "big") >> 1


def generator(seed: int, round: int, client: str, purpose: str) -> torch.Generator:
    """A CPU generator for one purpose of one client in one round."""
    return torch.Generator().manual_seed(derive(seed, round, client, purpose))


@contextmanager
def isolated(seed: int) -> Generator[None]:
    """Runs a block with torch's global generators seeded, and puts the CPU's back afterwards.

    Dropout draws from the global generators; this is the one place where they are touched.
    """
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)


def sample_cohort(population: int, size: int, seed: int, round: int) -> list[int]:
    """``size`` distinct client numbers out of ``range(population)``, ascending, in O(size) time.

    Raises:
        ValueError: the population is empty or the size is not in [1, population].
    """
    if population < 1:
        raise ValueError("a federation needs at least one client, got 0")
    if not 1 <= size <= population:
        raise ValueError(f"the cohort must have between 1 and {population} clients, got {size}")
    if size == population:
        return list(range(population))
    return sorted(Random(derive(seed, round, "", "cohort")).sample(range(population), size))

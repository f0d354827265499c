"""Stateless random generators as functions of seed, round, client and purpose.

Hence exact resume, the same numbers for any number of workers, and a client's stream that does not depend on
who else takes part.
"""

import math
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from random import Random
from typing import Any

import torch
from torch import Tensor


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


@contextmanager
def refuse_random_numbers() -> Generator[None]:
    """Block for several clients at once, of which none has a stream of torch's global generators."""
    before = _global_states()
    yield
    if not all(map(torch.equal, before, _global_states())):
        raise RuntimeError("torch's global generators are drawn from, whose numbers would be others")


def _global_states() -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]


def normal(shape: Sequence[int], rng: torch.Generator | None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers, on the generator's device; without a generator they cannot be reproduced.

    A generator of torch's is seeded by 32 bits on a CPU: who sees what its noise hides can try all of its seeds. Where
    that matters the operating system gives 52 bits for every number, which become normal by the inverse of the normal
    distribution function.
    """
    if rng is not None:
        return torch.randn(tuple(shape), generator=rng, dtype=dtype, device=rng.device)
    return normal_of(os.urandom(8 * math.prod(shape)), shape, dtype)


def normal_of(bits: bytes, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Standard normal numbers made from uniform bits, by the inverse of the normal distribution function."""
    if not bits:
        return torch.zeros(tuple(shape), dtype=dtype)
    drawn = torch.frombuffer(bytearray(bits), dtype=torch.int64)
    # In the open interval: the half keeps both ends out.
    uniform = ((drawn >> 12) & (2**52 - 1)).double().add_(0.5).mul_(2.0**-52)
    special: Any = torch.special  # its functions have no types
    numbers: Tensor = special.ndtri(uniform)
    return numbers.reshape(tuple(shape)).to(dtype)


def sample_cohort(
    population: int, size: int, seed: int, round: int, sizes: Sequence[int] | Tensor | None = None
) -> list[int]:
    """``size`` distinct client numbers out of ``range(population)``, ascending.

    Uniformly in O(size) time; or, where numbers of examples are given, one client after the other with probabilities
    proportional to these among the clients that are left. That is done with exponential keys -log(u) / n of which the
    smallest are taken, in O(population) time (Efraimidis and Spirakis, "Weighted random sampling with a reservoir",
    Information Processing Letters 97, 2006).

    Args:
        population: number of clients.
        size: how many to draw.
        seed: the run's seed.
        round: number of the round.
        sizes: each client's number of examples, shape (population,). Clients without any are never drawn, so that the
            cohort is smaller where fewer than ``size`` have some.

    Raises:
        ValueError: the population is empty, the size is not in [1, population], or ``sizes`` has another length, a
            negative number, or none that is positive.
    """
    if population < 1:
        raise ValueError("a federation needs at least one client, got 0")
    if not 1 <= size <= population:
        raise ValueError(f"the cohort must have between 1 and {population} clients, got {size}")
    if sizes is not None:
        return _sample_by_size(size, generator(seed, round, "", "cohort by size"), torch.as_tensor(sizes), population)
    if size == population:
        return list(range(population))
    return sorted(Random(derive(seed, round, "", "cohort")).sample(range(population), size))


def _sample_by_size(size: int, rng: torch.Generator, sizes: Tensor, population: int) -> list[int]:
    if sizes.shape != (population,) or bool((sizes < 0).any()) or not bool((sizes > 0).any()):
        raise ValueError(
            f"sampling by size needs {population} numbers of examples that are not negative, not all of them 0, got "
            f"the shape {tuple(sizes.shape)} and {sizes[:10]}"
        )
    # Of clients without examples the key is infinite; 1 - u is never 0.
    keys = -torch.log1p(-torch.rand(population, generator=rng, dtype=torch.float64)) / sizes.double()
    chosen = torch.topk(keys.where(sizes > 0, torch.inf), size, largest=False).indices
    return sorted(int(number) for number in chosen[sizes[chosen] > 0])

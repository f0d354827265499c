r"""Privacy accounting: (epsilon, delta) of the composition of clipped and noised rows or updates.

Every release of an example's row is a Gaussian mechanism of :class:`confed.privacy.cut.CutPrivacy`; the rows of one
example are released over and over. T Gaussian mechanisms of multiplier s are together one of s / sqrt(T), also where
each depends on the results before it (Dong, Roth and Su, "Gaussian differential privacy", 2022), whose epsilon the
library dp-accounting computes exactly (Balle and Wang, "Improving the Gaussian mechanism for differential privacy",
ICML 2018). There is no amplification by sampling, because a receiver sees which rows belong to which step.

Updates of clients (:class:`confed.federation.update_privacy.UpdatePrivacy`) are the same mechanism with a client in an
example's place. Only where the cohort of a round is secret, :func:`sampled_epsilon` counts that cohorts are drawn.
"""

import importlib
import importlib.util
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

Adjacency = Literal["replace", "zero-out"]
"""What two neighbouring data sets differ in: one example is another one, or its rows are zeros."""

ORDERS = [*(1 + x / 10 for x in range(1, 20)), *range(3, 33), 40, 48, 56, 64, 96, 128]
"""Orders of Rényi divergences among which the best is taken; each gives a bound, and the library's 156 take four times
as long for the same one."""


LOSS_STEP = 1e-3  # to whose multiples privacy losses are rounded up

ROOT = 1e-12  # to which the library finds the root that is epsilon; added, so that epsilon is never understated


def available() -> bool:
    """Whether dp-accounting is installed."""
    return importlib.util.find_spec("dp_accounting") is not None


def releases_of(epochs: int, kinds: int = 2) -> int:
    """Number of releases of one example's rows: once per epoch and kind of row."""
    return epochs * kinds


def epsilon(noise: float, releases: int, delta: float, adjacency: Adjacency = "replace") -> float:
    """The smallest epsilon for which the releases are (epsilon, delta)-private."""
    if not noise >= 0:
        raise ValueError(f"noise must not be negative, got {noise}")
    _check(releases, delta, adjacency)
    if releases == 0:
        return 0.0
    if noise == 0:
        return math.inf
    if math.isinf(noise):
        return 0.0
    spent = float(_library().get_epsilon_gaussian(noise / _sensitivity(adjacency) / math.sqrt(releases), delta))
    return spent + ROOT * (1 + spent) if spent else 0.0


def sampled_epsilon(noise: float, rounds: Mapping[tuple[int, int], int], delta: float) -> float:
    """Epsilon of a client with amplification by sampling: secret uniform cohorts, drawn without replacement.

    Wang, Balle and Kasiviswanathan, "Subsampled Rényi differential privacy and analytical moments accountant", AISTATS
    2019, theorem 27, for neighbours in which one client is replaced by another (the sensitivity is twice the norm).
    Of cohorts of nearly all clients the bound without sampling, of a client that is in all of them, is the smaller
    one; both hold, and the smaller counts.
    """
    if not noise >= 0:
        raise ValueError(f"noise must not be negative, got {noise}")
    for (cohort, present), count in rounds.items():
        if not 1 <= cohort <= present:
            raise ValueError(f"a cohort must have between 1 and {present} clients, got {cohort}")
        _check(count, delta, "replace")
    if all(cohort == present for cohort, present in rounds):
        return epsilon(noise, sum(rounds.values()), delta)
    if noise == 0:
        return math.inf
    library = _library()
    accountant = library.rdp.RdpAccountant(ORDERS, library.NeighboringRelation.REPLACE_ONE)
    release = library.GaussianDpEvent(noise / _sensitivity("replace"))
    for (cohort, present), count in rounds.items():
        accountant.compose(library.SampledWithoutReplacementDpEvent(present, cohort, release), count)
    return min(float(accountant.get_epsilon(delta)), epsilon(noise, sum(rounds.values()), delta))


@lru_cache(maxsize=4096)
def poisson_epsilon(noise: float, rate: float, steps: int, delta: float) -> float:
    """Epsilon of a record whose client's steps each sample it with a probability, and add noise to clipped gradients.

    Neighbours differ by one record that is added or removed. The library dp-accounting composes distributions of the
    privacy loss (Koskela, Jälkö and Honkela, "Computing tight differential privacy guarantees using FFT", AISTATS
    2020), here rounded up to multiples of 1e-3.
    """
    if not 0 < rate <= 1:
        raise ValueError(f"a sampling rate must lie in (0, 1], got {rate}")
    _check(steps, delta, "zero-out")
    if rate == 1 or steps == 0 or noise == 0:
        return epsilon(noise, steps, delta, "zero-out")
    library = _library()
    accountant = library.pld.PLDAccountant(library.NeighboringRelation.ADD_OR_REMOVE_ONE, LOSS_STEP)
    accountant.compose(library.PoissonSampledDpEvent(rate, library.GaussianDpEvent(noise)), steps)
    return float(accountant.get_epsilon(delta))


def _check(releases: int, delta: float, adjacency: str) -> None:
    if releases < 0:
        raise ValueError(f"releases must not be negative, got {releases}")
    if not 0 < delta < 1:
        raise ValueError(f"delta must lie in (0, 1), got {delta}")
    if adjacency not in ("replace", "zero-out"):
        raise ValueError(f"adjacency must be 'replace' or 'zero-out', got {adjacency!r}")


def _sensitivity(adjacency: Adjacency) -> int:
    """Sensitivity: largest distance of two clipped rows in units of the clipping norm."""
    return 2 if adjacency == "replace" else 1


def _library() -> Any:
    try:
        library = importlib.import_module("dp_accounting")
        importlib.import_module("dp_accounting.rdp")
        importlib.import_module("dp_accounting.pld")
    except ImportError as error:
        raise ValueError(
            "epsilon is computed by the library dp-accounting, which is not installed; "
            "install it with: pip install '.[privacy]' -c constraints.txt"
        ) from error
    return library

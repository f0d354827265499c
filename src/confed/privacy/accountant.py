r"""What clipped and noised rows cost in privacy: (epsilon, delta) of their composition.

Every release of an example's row is a Gaussian mechanism of :class:`confed.privacy.cut.CutPrivacy`; the rows of one
example are released over and over. The arithmetic is the library dp-accounting's: privacy loss distributions (Koskela,
Jälkö and Honkela, 2020; Doroshenko et al., 2022), rounded so that epsilon is never understated, without amplification
by sampling, because a receiver sees which rows belong to which step.
"""

import importlib
import importlib.util
import math
from collections.abc import Callable
from typing import Any, Literal

__all__ = ["Adjacency", "available", "epsilon", "noise_for", "releases_of"]

Adjacency = Literal["replace", "zero-out"]
"""What two neighbouring data sets differ in: one example is another one, or its rows are zeros."""

FINEST = 1e-4
"""Width of the intervals in which the library counts privacy losses; wider ones where epsilon is huge."""


def available() -> bool:
    """Whether dp-accounting is installed."""
    return importlib.util.find_spec("dp_accounting") is not None


def releases_of(epochs: int, kinds: int = 2) -> int:
    """How often rows of one example are released: once per epoch and kind of row.

    Args:
        epochs: passes over the client's examples in the whole run (rounds x local epochs).
        kinds: kinds of rows that cross the cut: 2 for v_MHA and v_APN.
    """
    return epochs * kinds


def epsilon(noise: float, releases: int, delta: float, adjacency: Adjacency = "replace") -> float:
    """The smallest epsilon, up to rounding upwards, for which the releases are (epsilon, delta)-private.

    Args:
        noise: noise multiplier: the standard deviation divided by the clipping norm. 0 gives infinity.
        releases: how many rows of an example are released, all with this multiplier; 0 gives 0.
        delta: in (0, 1); well below one over the number of examples.
        adjacency: "replace" doubles the sensitivity, so that half of ``noise`` counts.

    Raises:
        ValueError: an argument outside its range, or dp-accounting is not installed.
    """
    if not noise >= 0:
        raise ValueError(f"noise must not be negative, got {noise}")
    _check(releases, delta, adjacency)
    if releases == 0:
        return 0.0
    if noise == 0:
        return math.inf
    if math.isinf(noise):
        return 0.0
    library = _library()
    event = library.GaussianDpEvent(noise / _sensitivity(adjacency))
    # The immediate bound says how large the numbers get.
    width = max(FINEST, 1e-5 * _bound(noise, releases, delta, adjacency))
    exact = library.pld.PLDAccountant(value_discretization_interval=width)
    return float(exact.compose(event, releases).get_epsilon(delta))


def noise_for(
    target: float, releases: int, delta: float, adjacency: Adjacency = "replace", tolerance: float = 2e-3
) -> float:
    """The smallest noise multiplier, up to a relative tolerance upwards, whose epsilon is at most ``target``.

    Args:
        target: the epsilon wanted, positive.
        releases: as in :func:`epsilon`; at least 1.
        delta: as in :func:`epsilon`.
        adjacency: as in :func:`epsilon`.
        tolerance: relative.

    Raises:
        ValueError: an argument outside its range, or dp-accounting is not installed.
    """
    if not 0 < target < math.inf:
        raise ValueError(f"target must be positive and finite, got {target}")
    _check(releases, delta, adjacency)
    if releases < 1:
        raise ValueError(f"releases must be at least 1, got {releases}")
    high = 1.0
    while _bound(high, releases, delta, adjacency) > target:
        high *= 2
    # The bound is above epsilon, so the noise that it asks for is enough, and not much too much.
    high = _narrow(lambda noise: _bound(noise, releases, delta, adjacency) <= target, 0.0, high, tolerance)
    low = high / 2
    while epsilon(low, releases, delta, adjacency) <= target:
        low, high = low / 2, low
    return _narrow(lambda noise: epsilon(noise, releases, delta, adjacency) <= target, low, high, tolerance)


def _narrow(enough: Callable[[float], bool], low: float, high: float, tolerance: float) -> float:
    """The least value that is enough, up to a relative tolerance upwards; ``high`` is, ``low`` is not."""
    while high - low > tolerance * high:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _bound(noise: float, releases: int, delta: float, adjacency: Adjacency) -> float:
    """Epsilon by Rényi differential privacy: looser than by privacy loss distributions, and immediate."""
    library = _library()
    event = library.GaussianDpEvent(noise / _sensitivity(adjacency))
    return float(library.rdp.RdpAccountant().compose(event, releases).get_epsilon(delta))


def _check(releases: int, delta: float, adjacency: str) -> None:
    if releases < 0:
        raise ValueError(f"releases must not be negative, got {releases}")
    if not 0 < delta < 1:
        raise ValueError(f"delta must lie in (0, 1), got {delta}")
    if adjacency not in ("replace", "zero-out"):
        raise ValueError(f"adjacency must be 'replace' or 'zero-out', got {adjacency!r}")


def _sensitivity(adjacency: Adjacency) -> int:
    """Largest distance of two clipped rows in units of the clipping norm."""
    return 2 if adjacency == "replace" else 1


def _library() -> Any:
    try:
        library = importlib.import_module("dp_accounting")
        importlib.import_module("dp_accounting.rdp")
        importlib.import_module("dp_accounting.pld")
    except ImportError as error:
        raise ValueError(
            "epsilon is computed by the library dp-accounting, which is not installed; "
            "install it with: pip install 'confed[privacy]'"
        ) from error
    return library

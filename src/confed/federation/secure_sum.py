"""Options of secure aggregation: the server learns the sum of the clients' updates and none of them.

The protocol is in :mod:`confed.privacy.secure_sum`; what it computes is here: with d_k client k's update, w_k its
weight (an integer), and f bits after the binary point,

    mean = w + 2^-f (sum over k of w_k round(2^f d_k)  modulo 2^bits) / (sum over k of w_k).

The sum is exact in these integers. f is as large as the cohort's weights leave room for, so that nothing can overflow:
f = bits - 1 - ceil(log2((reach + 1) * sum over the cohort of w_k)).

**The threshold.** Of one client's two secrets a member gives a share of one, once. A server that tells one half of the
cohort that the client dropped out, and the other half that it did not, collects shares of either; c members that
collude with it give theirs of both, so that n - c honest answers and 2 c others must not be enough for two times t:

    2 t > n + c.
"""

import math
from dataclasses import dataclass
from typing import Literal

COARSEST = 8  # fewest bits after the binary point: with fewer, updates would be lost in rounding
LEAST = 3  # so many clients must send a tensor: of two, each knows the other's from the sum


@dataclass(frozen=True)
class SecureSum:
    """Options of secure aggregation.

    Attributes:
        bits: of the integers that travel; 32 takes FedAvg's bytes, 64 twice as many.
        reach: largest absolute value of an update's coordinate; a client beyond it drops out of the round.
        threshold: how many clients must stay to the end of a round, so that the masks of those that dropped out can
            be taken off; None for the least, which is more than half of the cohort and its colluders together.
        colluders: how many members may work together with the server without that it learns an update of another: a
            cohort of n needs t > (n + colluders) / 2 of them to its end.
    """

    __pydantic_config__ = {"extra": "forbid"}  # a recipe's misspelt key is an error  # noqa: RUF012

    bits: Literal[32, 64] = 64
    reach: float = 64.0
    threshold: int | None = None
    colluders: int = 1

    def __post_init__(self) -> None:
        where = "algorithm.secure_sum"
        if self.bits not in (32, 64):
            raise ValueError(f"{where}.bits must be 32 or 64, got {self.bits}")
        if not 0 < self.reach < math.inf:
            raise ValueError(f"{where}.reach must be positive and finite, got {self.reach}")
        if self.threshold is not None and self.threshold < 2:
            raise ValueError(f"{where}.threshold must be at least 2, got {self.threshold}")
        if self.colluders < 0:
            raise ValueError(f"{where}.colluders must not be negative, got {self.colluders}")

    @property
    def least(self) -> int:
        """How many clients must send a tensor: of two that do not collude, each knows the other's from the sum."""
        return max(LEAST, self.colluders + 2)

    def needed(self, cohort: int) -> int:
        """How many of a cohort must stay."""
        if cohort < self.least:
            raise ValueError(
                f"algorithm.secure_sum with colluders = {self.colluders} needs at least {self.least} clients in a "
                f"cohort, got {cohort}"
            )
        least = (cohort + self.colluders) // 2 + 1
        threshold = least if self.threshold is None else self.threshold
        if not least <= threshold <= cohort:
            raise ValueError(
                f"algorithm.secure_sum.threshold must be from {least} to {cohort} for a cohort of {cohort} with "
                f"{self.colluders} that may collude (2 t > n + c), got {threshold}"
            )
        return threshold

    def fraction(self, weights: int) -> int:
        """f, the number of bits after the binary point."""
        # Rounding moves each value by half a unit at most, hence the 1.
        f = self.bits - 1 - math.ceil(math.log2((self.reach + 1) * weights))
        if f < COARSEST:
            raise ValueError(
                f"algorithm.secure_sum with {self.bits} bits, reach {self.reach} and weights that sum up to {weights} "
                f"leaves {f} bits behind the point, and needs at least {COARSEST}"
            )
        return f

    @property
    def most(self) -> int:
        """The largest sum of weights that leaves enough bits after the binary point."""
        return math.floor(2.0 ** (self.bits - 1 - COARSEST) / (self.reach + 1))

"""Scalars in replies: names, types and ranges that methods and tasks declare.

A server checks replies of other machines against these declarations before anything else reads them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from confed.federation.params import Scalar


class Number(NamedTuple):
    """A number, whole or not, within a range."""

    low: float = -math.inf  # the smallest
    high: float = math.inf  # the largest

    def problem(self, value: Scalar) -> str:
        """What is wrong with a value, as the end of a sentence; "" where nothing is."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return f"must be a number, got {str(value)[:80]!r}"
        if not (math.isfinite(value) and self.low <= value <= self.high):
            return f"must be a number from {self.low:g} to {self.high:g}, got {value:g}"
        return ""


@dataclass(frozen=True, slots=True)
class Flag:
    """True or false."""

    def problem(self, value: Scalar) -> str:
        """What is wrong with a value, as the end of a sentence; "" where nothing is."""
        return "" if isinstance(value, bool) else f"must be true or false, got {str(value)[:80]!r}"


Report = Mapping[str, Number | Flag]  # name of a scalar -> what it must be
LOSS = Number(-1e12, 1e12)
"""A mean loss. Far above what any training reaches, and far enough below infinity for sums over clients."""
SHARE = Number(0.0, 1.0)
"""A share of examples, or a score that is one."""

"""The course of a run's mean training loss, and whether it breaks."""

import math
from collections.abc import Mapping

__all__ = ["LossCourse"]

FACTOR = 10.0
"""How many times the largest of the last losses a loss must be to count as a jump."""

LAST = 5
"""Rounds that a loss is compared with."""


class LossCourse:
    """The mean losses of a run's rounds."""

    def __init__(self) -> None:
        self._last: list[float] = []

    def jump(self, losses: Mapping[str, float]) -> str | None:
        """Notes a round's losses; says in words where they are not finite or rise at a jump.

        Args:
            losses: client -> mean training loss; empty where clients tell none.
        """
        if not losses:
            return None
        mean = sum(losses.values()) / len(losses)
        before = max(self._last, default=math.inf)
        # Losses may be next to nothing: what rises from there by less than 1 is no break.
        if math.isfinite(mean) and mean <= max(FACTOR * before, before + 1):
            self._last = [*self._last, mean][-LAST:]
            return None
        return f"the mean loss rose from {before:.3g} to {mean:.3g}" if self._last else f"the mean loss is {mean:.3g}"

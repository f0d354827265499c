"""Divergence check: jumps and non-finite values of a run's mean training loss."""

import math
from collections.abc import Mapping, Sequence

__all__ = ["LossCourse"]

FACTOR = 10.0
"""How many times the largest of the last losses a loss must be to count as a jump."""

LAST = 5
"""Rounds that a loss is compared with."""


class LossCourse:
    """Mean training losses of a run's rounds.

    Attributes:
        broken: the last loss known was a jump.
        sound: the round to go back to then; None where no checkpoint is left from before the jump.
    """

    def __init__(self) -> None:
        self._last: list[float] = []
        self.broken = False
        self.sound: int | None = None

    def note(self, losses: Mapping[str, float], round: int, kept: Sequence[int]) -> str | None:
        """Record of a round's losses, and at the first of several jumps of the round to go back to.

        Args:
            losses: see :meth:`jump`, which says what is returned.
            round: number of rounds finished with this one.
            kept: rounds of the checkpoints on disk, ascending.
        """
        before, said = self.broken, self.jump(losses)
        if not self.broken:
            self.sound = None
        elif not before:
            # The last model that was trained from without a jump is the one before the round before.
            self.sound = next((there for there in reversed(kept) if there <= round - 2), None)
        return said

    def jump(self, losses: Mapping[str, float]) -> str | None:
        """Record of a round's losses; a text where they are not finite or jump.

        Args:
            losses: client -> mean training loss; empty where clients tell none.
        """
        if not losses:
            return None
        mean = sum(losses.values()) / len(losses)
        before = max(self._last, default=math.inf)
        # Losses may be next to nothing: what rises from there by less than 1 is no break.
        if math.isfinite(mean) and mean <= max(FACTOR * before, before + 1):
            self._last, self.broken = [*self._last, mean][-LAST:], False
            return None
        self.broken = True
        return f"the mean loss rose from {before:.3g} to {mean:.3g}" if self._last else f"the mean loss is {mean:.3g}"

"""Progress events of a run."""

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Progress", "Watch"]


@dataclass(frozen=True)
class Progress:
    """Where a run stands; handed to the caller after every step."""

    round: int
    rounds: int
    text: str


Watch = Callable[[Progress], None]

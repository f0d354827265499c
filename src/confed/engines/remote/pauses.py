"""Pauses between looks at what has arrived."""

import time
from collections.abc import Callable

__all__ = ["Pauses"]

SHORTEST = 0.005
"""Seconds of the first pause: a look costs well under a millisecond where little is on its way."""

SHARE = 0.1
"""Of the time waited so far: what a reply that comes now waits for at most."""


class Pauses:
    """Pauses that grow with the time waited, so that short answers are met soon and long ones seldom looked for.

    Args:
        longest: seconds of a pause, at most.
        wait: waits so many seconds, and less where something arrives, so that pauses need not be short; False, at once,
            where nothing tells what arrives.
    """

    def __init__(self, longest: float, wait: Callable[[float], bool] = lambda _: False) -> None:
        self._longest, self._wait, self._began = longest, wait, time.monotonic()

    def sleep(self) -> None:
        """The next pause."""
        if not self._wait(self._longest):
            time.sleep(min(self._longest, max(SHORTEST, SHARE * (time.monotonic() - self._began))))

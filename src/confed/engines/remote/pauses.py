"""Pauses between looks at what has arrived."""

import time

__all__ = ["Pauses"]

SHORTEST = 0.005
"""Seconds of the first pause: a look costs well under a millisecond where little is on its way."""

SHARE = 0.1
"""Of the time waited so far: what a reply that comes now waits for at most."""


class Pauses:
    """Pauses that grow with the time waited, so that short answers are met soon and long ones seldom looked for.

    Args:
        longest: seconds of a pause, at most.
    """

    def __init__(self, longest: float) -> None:
        self._longest, self._began = longest, time.monotonic()

    def sleep(self) -> None:
        """The next pause."""
        time.sleep(min(self._longest, max(SHORTEST, SHARE * (time.monotonic() - self._began))))

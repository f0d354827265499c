"""File operations that wait while the process has too many files open."""

import errno
import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

WAIT = 0.2
"""Seconds between tries."""


def patiently(act: Callable[[], Result], most: float = 600.0) -> Result:
    """Result of a function that is called again while the process has too many files open.

    Connections come and go, and a file that cannot be opened now can be in a while: no reason to end a run.
    """
    began = time.monotonic()
    while True:
        try:
            return act()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or time.monotonic() - began > most:
                raise
        time.sleep(WAIT)

"""File operations that wait while the process has too many files open."""

import errno
import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["patiently"]

Result = TypeVar("Result")

WAIT = 0.2
"""Seconds between tries."""


def patiently(act: Callable[[], Result], most: float = 600.0) -> Result:
    """Result of a function that is called again while the process has too many files open.

    Connections come and go, and a file that cannot be opened now can be in a while: no reason to end a run.

    Args:
        act: opens and closes files; nothing of it may have happened where it fails.
        most: seconds after which its error is passed on.

    Raises:
        OSError: any other error of the operating system, or too many open files for longer than ``most``.
    """
    began = time.monotonic()
    while True:
        try:
            return act()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or time.monotonic() - began > most:
                raise
        time.sleep(WAIT)

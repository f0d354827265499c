"""Forked children of tests, none of which hides an exception or goes on with the tests of its parent."""

import os
import traceback
import warnings
from collections.abc import Callable

FAILED = 86
"""Exit code of a child in which an exception was raised; its traceback is in what pytest captured."""


def forked(work: Callable[[], object]) -> int:
    """Process number of a child that does some work and ends."""
    with warnings.catch_warnings():  # Python 3.12 warns of threads, which are not there in the child
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        code = FAILED
        try:
            work()
            code = 0
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(code)
    return child


def status_of(child: int) -> int:
    """How a child ended, as ``os.waitpid`` says it; an exception in it is an AssertionError here."""
    status = os.waitpid(child, 0)[1]
    assert not (os.WIFEXITED(status) and os.WEXITSTATUS(status) == FAILED), "the child failed, see its traceback"
    return status

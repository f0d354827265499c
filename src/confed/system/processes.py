"""Processes of the operating system, on Unix and on Windows: whether one exists, and process groups of children."""

import os
import subprocess
import sys

CREATION_FLAGS = subprocess.CREATE_NEW_PROCESS_GROUP if sys.platform == "win32" else 0
"""Argument ``creationflags`` of ``subprocess.Popen`` for a process that Ctrl-C on the terminal does not reach."""

PROCESS_GROUP = None if sys.platform == "win32" else 0
"""Argument ``process_group`` for the same, on other systems than Windows."""


def exists(process: int) -> bool:
    """Whether a process of this machine exists; also one that belongs to another user."""
    if sys.platform == "win32":  # where os.kill(process, 0) is Ctrl-C
        import psutil

        return psutil.pid_exists(process)
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True

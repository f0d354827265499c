"""Processor time and peak memory of a run, its worker processes included."""

import ctypes
import os
import resource
import sys
from collections.abc import Iterable
from pathlib import Path

__all__ = ["cpu_seconds", "keep_freed_memory", "peak_memory", "reset_peak"]


def cpu_seconds() -> float:
    """Processor seconds of this process and of the children that have ended."""
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        total += usage.ru_utime + usage.ru_stime
    return total


def reset_peak() -> None:
    """Starts the peak of :func:`peak_memory` anew, where the system can (Linux)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_memory(processes: Iterable[int] = ()) -> int:
    """Largest resident memory, in bytes, that this process or any of the given ones has reached."""
    peaks = [_peak(pid) for pid in (os.getpid(), *processes)]
    return max(peaks)


def keep_freed_memory() -> None:
    """Asks the C library (glibc) to keep what is freed instead of returning it to the system.

    A server allocates and frees a model's worth of memory every round. Handed back each time, its pages have to be
    found and zeroed again, which takes as long as six averages over them. The process then holds its peak; other
    C libraries are left as they are.
    """
    mmap_threshold, trim_threshold = -3, -1  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of mallopt(3)
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    mallopt(mmap_threshold, 32 * 2**20)
    mallopt(trim_threshold, 2**31 - 1)


def _peak(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    # Without /proc only this process's own peak can be known; macOS gives bytes, others kilobytes.
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale if pid == os.getpid() else 0

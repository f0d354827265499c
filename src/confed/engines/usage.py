"""Processor time and peak memory of a run, its worker processes included."""

import os
import resource
import sys
from collections.abc import Iterable
from pathlib import Path

__all__ = ["cpu_seconds", "peak_memory", "reset_peak"]


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

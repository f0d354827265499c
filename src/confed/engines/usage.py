"""Communication, timeline, processor time and peak memory of a run, its worker processes included.

Unix counts both for a process and for its children that have ended (``resource``). Windows does neither for children:
there :func:`note_children` has to be called before they end, and ``psutil`` reads the figures.
"""

import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from confed.federation.messages import Call, Reply
from confed.federation.wire import size

# Communication of a round: calls and bytes, per client and per action -----------------------------------------


class Traffic(NamedTuple):
    """Calls of one action, and the bytes they took."""

    calls: int = 0
    up: int = 0
    down: int = 0


@dataclass
class Ledger:
    """Bytes per client, counted from the serialised messages; the cost of a client's refused update is not counted."""

    up: dict[str, int] = field(default_factory=dict[str, int])
    down: dict[str, int] = field(default_factory=dict[str, int])

    actions: dict[str, Traffic] = field(default_factory=dict[str, "Traffic"])

    def count(self, call: Call, reply: Reply) -> None:
        name, down = call.client.id, size(call.sent)
        up = 0 if reply.error is not None else reply.wire_bytes or size(reply.message)
        self.down[name] = self.down.get(name, 0) + down
        if reply.error is None:
            self.up[name] = self.up.get(name, 0) + up
        before = self.actions.get(call.action, Traffic())
        self.actions[call.action] = Traffic(before.calls + 1, before.up + up, before.down + down)


# Timeline of a round: which party computed when, for the first calls ------------------------------------------

SPANS = 240  # how many spans a run writes down


@dataclass(frozen=True)
class Span:
    party: str  # a server's name or a client's id
    what: str  # the action that was computed, or whose reply was
    start: float  # seconds since the round began
    end: float  # seconds since the round began


@dataclass
class Timeline:
    """Spans until there are enough of them; all processes of a machine read the same clock."""

    most: int  # spans that are kept
    began: float = field(default_factory=time.perf_counter)  # reading of the clock at the beginning of the round
    spans: list[Span] = field(default_factory=list[Span])  # those kept so far

    @contextmanager
    def span(self, party: str, what: str) -> Generator[None]:
        """Writes down how long the block takes."""
        start = time.perf_counter()
        yield
        self.add(party, what, start, time.perf_counter())

    def add(self, party: str, what: str, start: float, end: float) -> None:
        """Writes down a span in readings of the clock."""
        if len(self.spans) < self.most:
            self.spans.append(Span(party, what, start - self.began, end - self.began))


# Processor time and peak memory of a run, its worker processes included ---------------------------------------

try:
    import resource
except ImportError:  # Windows
    resource = None


_noted = 0.0  # processor seconds of children that have ended, where the system does not keep them


def cpu_seconds() -> float:
    """Processor seconds of this process and of the children that have ended."""
    if resource is None:
        process_times = os.times()
        return process_times.user + process_times.system + _noted
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        total += usage.ru_utime + usage.ru_stime
    return total


def note_children(processes: Iterable[int]) -> None:
    """Addition of children's processor seconds to :func:`cpu_seconds` before they end, where the system does not."""
    global _noted  # noqa: PLW0603 - a total of this process, as the system keeps one elsewhere
    if resource is not None:
        return
    import psutil

    for process in processes:
        with contextlib.suppress(psutil.Error):
            used = psutil.Process(process).cpu_times()
            _noted += used.user + used.system


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
    except (AttributeError, OSError, TypeError):  # a TypeError on Windows, where a library must be named
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
    if resource is not None and pid == os.getpid():
        # macOS gives bytes, others kilobytes.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    import psutil

    try:
        memory = psutil.Process(pid).memory_info()
    except psutil.Error:
        return 0
    # Windows has a peak; of other processes of macOS only what they hold now is known.
    return int(memory._asdict().get("peak_wset", memory.rss))

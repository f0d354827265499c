"""Heartbeat of a lock's file: a small process beside the holder that sets the time of change every few seconds."""

import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from confed.system.processes import CREATION_FLAGS, PROCESS_GROUP

__all__ = ["BEAT", "heartbeat", "silence", "status"]

BEAT = 5.0
"""Seconds between two heartbeats."""

# The process that beats: it ends with its parent, or when the lock is no longer its parent's. Where workers are forked,
# they hold the other end of its standard input, so that only the parent's id tells; Windows never changes that id, but
# standard input ends with the parent. A thread reads it, as Windows cannot wait for pipes with a time limit. Signals
# that batch systems send to every process of a job before its end are the parent's to handle.
_HEART = """
import os, signal, sys, threading, time
for name in ("SIGUSR1", "SIGUSR2", "SIGALRM"):
    if hasattr(signal, name):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
path, token, parent, beat = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
ended = threading.Event()
def read():
    try:
        os.read(0, 1)
    finally:
        ended.set()
threading.Thread(target=read, daemon=True).start()
last = time.monotonic()
while os.getppid() == parent and not ended.wait(min(beat, 1.0)):
    if time.monotonic() - last >= beat:
        try:
            with open(path, encoding="utf-8") as file:
                if token not in file.read():
                    break
            os.utime(path)
        except OSError:
            pass
        last = time.monotonic()
os._exit(0)
"""


@contextlib.contextmanager
def heartbeat(path: Path, token: str) -> Iterator[None]:
    """Heartbeat of a lock from a separate process, not a thread, as workers are forked from this process.

    Args:
        path: the lock's file, whose time of change is set.
        token: what the file has in it as long as the lock is this process's.
    """
    heart = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _HEART, str(path.resolve()), token, str(os.getpid()), str(BEAT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        creationflags=CREATION_FLAGS,  # Ctrl-C on the terminal is not meant for it
        process_group=PROCESS_GROUP,
    )
    process = os.getpid()
    try:
        yield
    finally:
        if os.getpid() == process:
            heart.kill()
            heart.wait()
            if heart.stdin is not None:
                heart.stdin.close()


def silence(path: Path) -> float | None:
    """Seconds since a lock's last heartbeat, by the clock of the file system that it is on; None if it is gone."""
    probe = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        probe.touch()
        now = probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)
    try:
        return max(now - status(path).st_mtime, 0.0)
    except FileNotFoundError:
        return None


def status(path: Path) -> os.stat_result:
    """A file's status at present, also on a network file system."""
    # Opening a file is what makes a network file system ask its server for the file's present times.
    with path.open("rb") as file:
        return os.fstat(file.fileno())

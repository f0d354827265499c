"""Folder locks for runs, studies and servers: one process at a time, also where machines share a file system.

The lock is a lease of the library filelock: a file in the folder names its holder, which touches it every few seconds.
A holder of this machine that has ended is known at once. Any other is watched: who shows a sign of life keeps the
folder, who shows none for :data:`STALE` seconds loses it, so that no clocks are compared.
"""

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

if TYPE_CHECKING:
    from filelock import SoftFileLease

CREATION_FLAGS = subprocess.CREATE_NEW_PROCESS_GROUP if sys.platform == "win32" else 0
"""Argument ``creationflags`` of ``subprocess.Popen`` for a process that Ctrl-C on the terminal does not reach."""

PROCESS_GROUP = None if sys.platform == "win32" else 0
"""Argument ``process_group`` for the same, on other systems than Windows."""

LOCK = "lock.json"  # the lock's file, in the folder that it locks; named as in releases that wrote JSON into it
BEAT = 2.0  # seconds between two signs of life
STALE = 30.0  # seconds without one after which a holder on another machine is taken to be gone
PATIENCE = 2.0  # seconds that one waits for the folder at least: processes whose parent was killed take a moment to end
_leases: dict[Path, "SoftFileLease"] = {}  # folder -> the lease that this process holds on it
P = ParamSpec("P")
First = TypeVar("First")
Result = TypeVar("Result")


class Occupied(ValueError):
    """Error: another process works in a folder; the text says which."""


@dataclass(frozen=True)
class Holder:
    """Process that holds the lock of a folder."""

    who: str  # process and host, in words
    silent: float  # seconds since its last sign of life, by the clock of the file system
    alive: bool  # whether it is taken to be at work: it gave a sign of life, and is not known to have ended


def holder_of(folder: Path) -> Holder | None:
    """Holder of a folder's lock; None if there is no lock. The lock stays as it is."""
    owner = _lease(folder).owner
    silent = _silence(folder / LOCK)
    if silent is None:
        return None
    if owner is None:  # another release's file
        return Holder("another process", silent, silent <= STALE)
    host = owner.hostname.partition("?")[0]  # without the container's number
    ended = host == socket.gethostname() and silent > 2.5 * BEAT and not _runs(owner.pid)
    return Holder(f"process {owner.pid} on {host}", silent, silent <= STALE and not ended)


def check_held(folder: Path) -> None:
    """Check that no other process took the folder over, as happens after this one was suspended for a while."""
    lease = _leases.get(folder.resolve())
    if lease is None or lease.token is None:  # also in a process that was forked meanwhile
        return
    owner = lease.owner
    if owner is None or owner.token != lease.token:
        holder = holder_of(folder)
        raise RuntimeError(
            f"{folder} was taken over by {holder.who if holder is not None else 'another process'}, as this process "
            f"gave no sign of life for more than {STALE:.0f} seconds; it stops, so that only one writes there"
        )


@contextlib.contextmanager
def exclusive(folder: Path, patience: float | None = None) -> Iterator[None]:
    """Lock of a folder against other processes of confed, on any machine, for as long as the ``with`` block lasts.

    The folder is made if it is missing, and taken away again if nothing was put into it.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    lease = _lease(folder)
    try:
        _acquire(lease, folder, PATIENCE if patience is None else patience)
        _leases[folder.resolve()] = lease
        try:
            yield
        finally:
            _leases.pop(folder.resolve(), None)
            lease.release()
    finally:
        for path in made:
            try:
                path.rmdir()
            except OSError:
                break


def alone(work: Callable[Concatenate[First, Path, P], Result]) -> Callable[Concatenate[First, Path, P], Result]:
    """Decorator for a function of something and a folder, which it runs under :func:`exclusive`."""
    from functools import wraps

    @wraps(work)
    def locked(first: First, root: Path, *args: P.args, **kwargs: P.kwargs) -> Result:
        with exclusive(root):
            return work(first, root, *args, **kwargs)

    return locked


def without_lock(folder: Path) -> list[Path]:
    """Content of a folder without its lock and files that are being written."""
    return [path for path in folder.iterdir() if not path.name.startswith(LOCK) and path.suffix != ".tmp"]


def _lease(folder: Path) -> "SoftFileLease":
    from filelock import SoftFileLease

    return SoftFileLease(folder / LOCK, lease_duration=STALE, heartbeat_interval=BEAT, thread_local=False)


def _acquire(lease: "SoftFileLease", folder: Path, patience: float) -> None:
    """Waits for a folder until its holder ends, or is Occupied: it showed a sign of life, or is of this process."""
    from filelock import Timeout

    until, first = time.monotonic() + patience, _sign_of_life(folder)
    while True:
        with contextlib.suppress(Timeout):
            lease.acquire(blocking=False)
            return
        now = _sign_of_life(folder)
        first = now if first is None else first
        if now not in (first, None) and time.monotonic() >= until:
            holder = holder_of(folder)
            who = "" if holder is None else f": {holder.who}, last sign of life {holder.silent:.0f} s ago"
            raise Occupied(f"another process is working in {folder}{who}; wait until it is done")
        time.sleep(0.05)


def _sign_of_life(folder: Path) -> tuple[int, int] | None:
    """What changes when a lock's holder gives a sign of life; None if there is no lock."""
    try:
        status = _status(folder / LOCK)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _silence(path: Path) -> float | None:
    """Seconds since a lock's last sign of life, by the clock of the file system that it is on; None if it is gone."""
    probe = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    now = time.time()  # who may only read has no better clock than this machine's
    with contextlib.suppress(OSError):
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink()
    try:
        return max(now - _status(path).st_mtime, 0.0)
    except FileNotFoundError:
        return None


def _status(path: Path) -> os.stat_result:
    # Opening a file is what makes a network file system ask its server for the file's present times.
    with path.open("rb") as file:
        return os.fstat(file.fileno())


def _runs(process: int) -> bool:
    import psutil

    return psutil.pid_exists(process)

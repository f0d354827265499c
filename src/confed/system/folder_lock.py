"""Folder locks for runs, studies and servers: one process at a time, also where machines share a file system.

The lock is a file ``lock.json`` in the folder that names its holder (machine, process, start). A small process beside
the holder sets the file's time of change every few seconds: a heartbeat, by the clock of the file system, so that the
clocks of machines need not agree. A lock whose heartbeats stopped long ago is taken over. Where the kernel locks files
too (``flock``, which Windows lacks), a dead holder on the same machine is known at once, elsewhere after two missing
heartbeats.
"""

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

CREATION_FLAGS = subprocess.CREATE_NEW_PROCESS_GROUP if sys.platform == "win32" else 0
"""Argument ``creationflags`` of ``subprocess.Popen`` for a process that Ctrl-C on the terminal does not reach."""

PROCESS_GROUP = None if sys.platform == "win32" else 0
"""Argument ``process_group`` for the same, on other systems than Windows."""

# Heartbeat of a lock's file -----------------------------------------------------------------------------------

BEAT = 5.0  # seconds between two heartbeats

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
    """Heartbeat of a lock from a separate process, not a thread, as workers are forked from this process."""
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


# Folder locks for runs, studies and servers: one process at a time --------------------------------------------

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


LOCK = "lock.json"  # the lock's file, in the folder that it locks
STALE = 60.0  # seconds without a heartbeat after which a holder on another machine is taken to be gone
QUIET = 2.5 * BEAT
"""Seconds without a heartbeat before a holder on this machine whose process is not to be seen is taken to be gone."""

PATIENCE = 2.0  # seconds that one waits for the folder: processes whose parent was killed take a moment to end
_handles: set[int] = set()  # open descriptors of locked folders
_tokens: dict[Path, str] = {}  # folder -> what the file of this process's lock has in it
P = ParamSpec("P")
First = TypeVar("First")
Result = TypeVar("Result")


def _close_copies() -> None:
    # a forked worker must not keep its dead parent's lock alive.
    for handle in _handles:
        with contextlib.suppress(OSError):
            os.close(handle)
    _handles.clear()


if hasattr(os, "register_at_fork"):  # as where processes can fork
    os.register_at_fork(after_in_child=_close_copies)


def check_held(folder: Path) -> None:
    """Check that no other process took the folder over, as happens after this one was suspended for minutes."""
    token = _tokens.get(folder.resolve())
    if token is None:
        return
    holder = _read(folder / LOCK)
    if holder.get("token") != token:
        raise RuntimeError(
            f"{folder} was taken over by {_who(holder)}, as this process gave no sign of life for more than "
            f"{STALE:.0f} seconds; it stops, so that only one writes there"
        )


class Occupied(ValueError):
    """Error: another process works in a folder; the text says which."""


@dataclass(frozen=True)
class Holder:
    """Process that holds the lock of a folder."""

    who: str  # process, host and start, in words
    silent: float  # seconds since its last heartbeat, by the clock of the file system
    # whether it is taken to be at work: its heartbeats have not stopped for STALE seconds, and it is not known to
    # have ended
    alive: bool


def holder_of(folder: Path) -> Holder | None:
    """Holder of a folder's lock; None if there is no lock. The lock stays as it is."""
    holder = _read(folder / LOCK)
    try:
        silent = silence(folder / LOCK) if holder else None
    except OSError:  # who may only read has no better clock than this machine's
        silent = max(time.time() - status(folder / LOCK).st_mtime, 0.0)
    if silent is None:
        return None
    here = (holder.get("host"), holder.get("boot")) == _machine()
    ended = here and silent > QUIET and not _runs(holder.get("process"))
    return Holder(_who(holder), silent, silent <= STALE and not ended)


@contextlib.contextmanager
def exclusive(folder: Path, patience: float | None = None, *, outlast: bool = False) -> Iterator[None]:
    """Lock of a folder against other processes of confed, on any machine, for as long as the ``with`` block lasts.

    The folder is made if it is missing, and taken away again if nothing was put into it.
    """
    until, first = time.monotonic() + (PATIENCE if patience is None else patience), _sign_of_life(folder)
    while True:
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(_at_once(folder))
            except _Taken as taken:
                waiting = outlast and first is not None and _sign_of_life(folder) in (first, None)
                if time.monotonic() > until and (taken.alive or not waiting):
                    raise Occupied(str(taken)) from None
                time.sleep(0.05 if time.monotonic() <= until else 1.0)
                continue
            yield
            return


class _Taken(Exception):
    """Another process works in the folder."""

    def __init__(self, text: str, alive: bool = False) -> None:
        super().__init__(text)
        self.alive = alive


def _sign_of_life(folder: Path) -> tuple[object, int] | None:
    """Token of a folder's lock and time of its last heartbeat in nanoseconds; None if there is no lock."""
    token = _read(folder / LOCK).get("token")
    try:
        return token, status(folder / LOCK).st_mtime_ns
    except OSError:
        return None


@contextlib.contextmanager
def _at_once(folder: Path) -> Iterator[None]:
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with (
            _locked_by_the_kernel(folder) as alone_here,
            _locked_by_file(folder, alone_here) as token,
            heartbeat(folder / LOCK, token),
        ):
            _tokens[folder.resolve()] = token
            try:
                yield
            finally:
                _tokens.pop(folder.resolve(), None)
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
    return [path for path in folder.iterdir() if path.name != LOCK and path.suffix != ".tmp"]


@contextlib.contextmanager
def _locked_by_the_kernel(folder: Path) -> Iterator[bool]:
    """Kernel lock against other processes of this machine; yields whether the file system supports such locks."""
    if fcntl is None:
        yield False
        return
    handle = os.open(folder, os.O_RDONLY)
    _handles.add(handle)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            vouched = True
        except BlockingIOError:
            raise _taken(folder, _read(folder / LOCK), "", alive=True) from None
        except OSError:  # a file system without such locks
            vouched = False
        yield vouched
    finally:
        if handle in _handles:
            _handles.discard(handle)
            os.close(handle)


@contextlib.contextmanager
def _locked_by_file(folder: Path, alone_here: bool) -> Iterator[str]:
    """Lock by a file with this process's token, which it yields."""
    path, token = folder / LOCK, secrets.token_hex(8)
    for _ in range(3):
        try:
            _create(path, token)
            break
        except FileExistsError:
            _put_aside(folder, alone_here)
    else:
        raise _taken(folder, _read(path), "")
    process = os.getpid()
    try:
        yield token
    finally:
        if os.getpid() == process and _read(path).get("token") == token:
            path.unlink(missing_ok=True)


def _create(path: Path, token: str) -> None:
    host, boot = _machine()
    holder = {
        "host": host,
        "boot": boot,
        "process": os.getpid(),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "token": token,
    }
    # Linked into place when it is whole, so that no process reads half of it.
    whole = path.with_name(f".{LOCK}.{token}.tmp")
    whole.write_text(json.dumps(holder), encoding="utf-8")
    try:
        os.link(whole, path)
    except FileExistsError:
        # Over a network the answer to the first of two equal requests may have been lost: then the file is this one.
        if whole.stat().st_nlink < 2:
            raise
    except OSError:  # a file system without links
        with path.open("x", encoding="utf-8") as file:
            file.write(json.dumps(holder))
    finally:
        whole.unlink(missing_ok=True)


def _put_aside(folder: Path, alone_here: bool) -> None:
    """Removal of a lock whose holder has ended."""
    path = folder / LOCK
    holder = _read(path)
    silent = silence(path)
    if silent is None:  # it has just been let go
        return
    here = (holder.get("host"), holder.get("boot")) == _machine()
    # Another container's process is not to be seen from here: where the kernel does not vouch, the heart decides.
    gone = here and (alone_here or (silent > QUIET and not _runs(holder.get("process"))))
    if not (silent > STALE or gone):
        wait = max((QUIET if here and not _runs(holder.get("process")) else STALE) - silent, 0.0)
        more = f", last sign of life {silent:.0f} s ago; if it is gone, try again in {wait:.0f} s"
        raise _taken(folder, holder, more)
    aside = path.with_name(f".{LOCK}.{secrets.token_hex(4)}.tmp")
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return
    if _read(aside) != holder:  # another process was quicker, and this is its lock
        with contextlib.suppress(OSError):
            os.link(aside, path)
    aside.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Any]:
    """Content of a lock's file; empty if it is missing or malformed."""
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}  # pyright: ignore[reportUnknownVariableType]


def _machine() -> tuple[str, str]:
    """This machine's name, and an identifier of it since its start."""
    try:
        return socket.gethostname(), Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname(), ""


def _runs(process: object) -> bool:
    if not isinstance(process, int) or process < 1:
        return True  # unknown: the heartbeat of others must decide, and waiting spoils no work
    import psutil

    return psutil.pid_exists(process)


def _who(holder: dict[str, Any]) -> str:
    if not holder:
        return "another process"
    return f"process {holder.get('process')} on {holder.get('host')} since {holder.get('started')}"


def _taken(folder: Path, holder: dict[str, Any], more: str, *, alive: bool = False) -> _Taken:
    who = f": {_who(holder)}{more}" if holder else ""
    return _Taken(f"another process is working in {folder}{who}; wait until it is done", alive)

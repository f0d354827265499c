"""Supervision of FLARE's processes on this machine: started, restarted when they die, and ended with their children."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from confed.deployment.flare.provision import ORGANISATION

SHORT = 30.0
"""Seconds below which a process has hardly lived."""

HARDLY = 5
"""Such lives in a row after which it is not started again."""


def server_command(kit: Path) -> list[str]:
    """Command line of FLARE's server."""
    return _command("server.server_train", kit, "fed_server.json", "secure_train=true")


def client_command(kit: Path, name: str) -> list[str]:
    """Command line of FLARE's client."""
    return _command("client.client_train", kit, "fed_client.json", "secure_train=true", f"uid={name}")


def _command(program: str, kit: Path, config: str, *options: str) -> list[str]:
    given = [*options, f"org={ORGANISATION}", "config_folder=config"]
    module = f"nvflare.private.fed.app.{program}"
    return [sys.executable, "-u", "-m", module, "-m", str(kit.resolve()), "-s", config, "--set", *given]


class SupervisedProcess:
    """A process that is started again when it dies.

    Attributes:
        starts: how often it was started.
    """

    def __init__(self, command: Sequence[str], log: Path, pause: float) -> None:
        self._command, self._log, self._pause = command, log, pause
        self._stop = threading.Event()
        self._failed = False
        self.starts = 0
        self._end_leftover()
        self._process = self._start()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Check that the process does not die as soon as it is started."""
        if self._failed:
            log_end = self._log.read_text(encoding="utf-8", errors="replace")[-1500:]
            raise RuntimeError(f"FLARE's process does not start; the end of {self._log}: {log_end}")

    def jobs(self) -> int:
        """Number of processes that it has started and that still run."""
        with suppress(psutil.NoSuchProcess):
            return len(psutil.Process(self._process.pid).children())
        return 0

    def end(self) -> None:
        """End of the process and of its children."""
        self._stop.set()
        self._thread.join()
        with suppress(psutil.NoSuchProcess):
            _end(psutil.Process(self._process.pid))
        self._process.wait()
        self._note.unlink(missing_ok=True)

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            # In a separate session: Ctrl-C is handled by the process that started it.
            process = subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        self._note.write_text(str(process.pid), encoding="utf-8")
        self.starts += 1
        return process

    @property
    def _note(self) -> Path:
        return self._log.with_suffix(".pid")

    def _end_leftover(self) -> None:
        """Ends the process that a predecessor of this one left when it was killed."""
        with suppress(OSError, ValueError, psutil.Error):
            process = psutil.Process(int(self._note.read_text(encoding="utf-8")))
            if process.cmdline() == list(self._command):
                _end(process)

    def _watch(self) -> None:
        short, began = 0, time.monotonic()
        while not self._stop.wait(0.2):
            if self._process.poll() is None:
                continue
            short = short + 1 if time.monotonic() - began < SHORT else 0
            if short >= HARDLY:
                self._failed = True
                return
            if not self._stop.wait(self._pause):
                began = time.monotonic()
                self._process = self._start()


def _end(process: psutil.Process) -> None:
    """End of a process and of its children."""
    # FLARE's jobs are in separate sessions, so that a signal to ours would miss them.
    with suppress(psutil.NoSuchProcess):
        family = [process, *process.children(recursive=True)]
        for member in family:
            with suppress(psutil.NoSuchProcess):
                member.terminate()
        _, alive = psutil.wait_procs(family, timeout=10)
        for member in alive:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(alive, timeout=10)


@contextmanager
def supervised(command: Sequence[str], log: Path, pause: float = 2.0) -> Iterator[SupervisedProcess]:
    """Supervised process for as long as the ``with`` block lasts; see :class:`SupervisedProcess`."""
    process = SupervisedProcess(command, log, pause)
    try:
        yield process
    finally:
        process.end()

"""Process pool for independent jobs, with progress events and clean interruption.

A job is a mapping of texts and numbers, and a function named as ``"module:function"`` carries it out. Each process
imports its libraries once and takes one job after another. All that crosses between the processes is JSON over a
socket. A process whose parent is gone ends at once, however that came about, so that no process writes into a folder
that the next command works in.
"""

import contextlib
import importlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

from confed.metrics.scores import SCORES, title_of
from confed.results.summary import WORST, Summary
from confed.results.views import View
from confed.system.events import Event, JobEnded, JobProgress, JobStarted, Progress, from_json, of_job, to_json
from confed.system.folder_lock import CREATION_FLAGS, PROCESS_GROUP

# Result of a finished run in one line, for progress displays --------------------------------------------------


def headline(content: Mapping[str, Any]) -> str:
    """A run's results in one line, from the content of its ``summary.json``."""
    summary = Summary(content)
    names = {
        View.PERSONAL.mean: "personal",
        WORST: "worst client",
        View.SEEN.mean: "global on seen",
        View.UNSEEN.mean: "on unseen",
    }
    if summary.without_personal:
        del names[View.PERSONAL.mean]  # it would be the global model's again
    # What is no share, such as CIDEr, is written times 100 as is usual and can exceed 100.
    is_share = summary.metric not in SCORES or SCORES[summary.metric].percent
    sign, before = ("%", "") if is_share else ("", f"{title_of(summary.metric)} ")
    values = {text: summary.cost(name) for name, text in names.items()}
    parts = [f"{before}{text} {100 * value:.1f}{sign}" for text, value in values.items() if value is not None]
    if summary.is_labelled:
        parts = [f"{metric} {summary.label_value(metric) or 0.0:.1%}" for metric in ("C-AP", "O-AP", "O-F1")]
    return ", ".join([*parts, f"{summary.cost('seconds') or 0.0:.0f} s"])


# Process pool for independent jobs ----------------------------------------------------------------------------

PATIENCE = 15.0  # seconds that processes have for stopping in good order

Job = Mapping[str, str | int]
Outcome = Literal["done", "refused", "failed"]


def carry_out(
    function: str,
    jobs: Sequence[Job],
    workers: int,
    progress: Progress,
    wanted: Callable[[int], bool] = lambda _: True,
) -> None:
    """Execution of all jobs, in order as far as there are processes for them; Ctrl-C stops all in order."""
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    if workers == 1:
        _one_by_one(function, jobs, progress, wanted)
    elif jobs:
        with _Crew(function, jobs, min(workers, len(jobs)), progress, wanted) as crew:
            crew.work()


def _one_by_one(function: str, jobs: Sequence[Job], progress: Progress, wanted: Callable[[int], bool]) -> None:
    call = _resolve(function)
    for number, job in enumerate(jobs):
        if wanted(number):
            progress(JobStarted(number))
            outcome, text = attempt(call, job, of_job(progress, number))
            progress(JobEnded(number, 0, outcome, text))


def _resolve(function: str) -> Callable[..., Any]:
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)


def attempt(call: Callable[..., Any], job: Job, progress: Progress) -> tuple[Outcome, str]:
    """Execution of one job; its outcome, and its result or error."""
    began = False

    def report(event: Event) -> None:
        nonlocal began
        began = True
        progress(event)

    try:
        result = call(job, report)
    except Exception as error:
        if isinstance(error, ValueError) and not began:
            return "refused", str(error)
        return "failed", f"{type(error).__name__}: {error}"
    return "done", str(result or "")


class _Crew:
    """The worker processes, seen from their parent; a context manager that ends all of them."""

    def __init__(
        self, function: str, jobs: Sequence[Job], count: int, progress: Progress, wanted: Callable[[int], bool]
    ) -> None:
        self._function, self._jobs, self._progress, self._wanted = function, jobs, progress, wanted
        self._waiting = deque(range(len(jobs)))
        self._members = {number: _Member(function) for number in range(count)}
        self._running: dict[int, int] = {}

    def __enter__(self) -> "_Crew":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        members = list(self._members.values())
        if kind is not None:
            for member in members:
                member.process.terminate()  # each ends its job as Ctrl-C would
        until = time.monotonic() + (PATIENCE if kind is not None else 0.0)
        try:
            for member in members:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    member.process.wait(max(until - time.monotonic(), 0.0))
        finally:
            for member in members:
                member.close()

    def work(self) -> None:
        """Distribution of all jobs to the processes, whose events are passed on."""
        for number in self._members:
            self._feed(number)
        while self._running:
            pipes = {self._members[number].pipe: number for number in self._running}
            for pipe in wait(list(pipes)):
                number = pipes[pipe]  # pyright: ignore[reportArgumentType]
                try:
                    told = json.loads(self._members[number].pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    self._replace(number)
                    continue
                if "broken" in told:
                    raise RuntimeError(f"a process for {self._function} could not start: {told['broken']}")
                if "outcome" not in told:
                    self._progress(JobProgress(self._running[number], number, from_json(told)))
                    continue
                self._progress(JobEnded(self._running.pop(number), number, told["outcome"], told["text"]))
                self._feed(number)

    def _feed(self, number: int) -> None:
        while self._waiting:
            job = self._waiting.popleft()
            if self._wanted(job):
                self._running[number] = job
                self._progress(JobStarted(job, number))
                # Where the process has died, reading its answer finds that out.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    self._members[number].pipe.send_bytes(json.dumps(dict(self._jobs[job])).encode())
                return

    def _replace(self, number: int) -> None:
        """Replacement of a process that died under its job, which has failed."""
        member, job = self._members[number], self._running.pop(number)
        why = member.last_words()
        member.close()
        self._progress(JobEnded(job, number, "failed", f"its process died ({why})"))
        if self._waiting:
            self._members[number] = _Member(self._function)
            self._feed(number)


class _Member:
    """One process, its socket, and what it writes to standard error."""

    def __init__(self, function: str) -> None:
        ours, theirs = socket.socketpair()
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        inherited = sys.platform != "win32"
        handle = str(theirs.fileno()) if inherited else "handed_over()"
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", f"from confed.studies.pool import handed_over, serve; serve({handle})"],
                pass_fds=[theirs.fileno()] if inherited else (),
                stdin=subprocess.DEVNULL if inherited else subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self.errors,
                # Idle threads that spin would take the other processes' cores.
                env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                creationflags=CREATION_FLAGS,  # Ctrl-C on the terminal is the parent's to handle
                process_group=PROCESS_GROUP,
            )
            if sys.platform == "win32" and self.process.stdin is not None:
                with self.process.stdin as pipe:
                    pipe.write(theirs.share(self.process.pid))
        self.pipe = Connection(ours.detach())
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.pipe.send_bytes(json.dumps(function).encode())

    def close(self) -> None:
        """Ends the process if it has not ended, and frees what belongs to it."""
        self.process.kill()
        self.process.wait()
        self.pipe.close()
        self.errors.close()

    def last_words(self) -> str:
        """Reason for the end of a process: its exit code, and the last line it wrote to standard error."""
        code = self.process.wait()
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return f"exit code {code}" + (f": {lines[-1]}" if lines else "")


def handed_over() -> int:
    """Handle of the socket that the parent describes on standard input: on Windows handles are not inherited."""
    if sys.platform != "win32":
        raise OSError("sockets are handed over on Windows only")
    return socket.fromshare(sys.stdin.buffer.read()).detach()


def serve(handle: int) -> None:
    """Loop of a worker process: take a job, carry it out, report its progress."""
    pipe = Connection(handle)
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    telling = threading.Lock()

    def send(content: Mapping[str, Any]) -> None:
        with telling, contextlib.suppress(BrokenPipeError):
            pipe.send_bytes(json.dumps(content).encode())

    def read() -> None:
        # Always reading is what notices at once that the parent is gone.
        while True:
            try:
                inbox.put(json.loads(pipe.recv_bytes()))
            except (EOFError, OSError):
                os._exit(1)

    def stop(signum: int, frame: object) -> None:
        del frame
        signal.signal(signum, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    threading.Thread(target=read, daemon=True).start()
    try:
        try:
            call = _resolve(inbox.get())
        except Exception as error:
            send({"broken": f"{type(error).__name__}: {error}"})
            return
        while True:
            outcome, text = attempt(call, inbox.get(), lambda event: send(to_json(event)))
            send({"outcome": outcome, "text": text})
    except KeyboardInterrupt:
        return

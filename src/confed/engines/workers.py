"""Worker processes that compute clients in parallel; the numbers are those of one process.

A reply that comes early waits on disk. Messages and states cross the pipes as safetensors bytes. Each process builds
its own workspace, on its own GPU where there are several.

Forked workers share the data in memory with their parent and start in milliseconds. Spawned ones are for systems that
cannot fork (Windows) or whose libraries do not bear it (macOS), and for a parent that has used CUDA: they import
everything and read the data anew, in seconds, and hold their own copy.

A forked process has its parent's setup. A spawned one makes its own, from a :class:`SetupSource`.
"""

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import torch

from confed.engines.dispatch import ProcessBatch, ProcessExecutor, answer_bytes, call_head, join, read_answer, split
from confed.engines.executor import WRITTEN_AFTER, added, added_up, counts_of, keep_data, keep_features
from confed.engines.perform import Setup, Workspace
from confed.engines.setup_source import SetupSource
from confed.engines.usage import keep_freed_memory, note_children
from confed.federation.device_tables import DeviceCounts
from confed.federation.frozen_features import FeatureCounts, FrozenFeatures
from confed.federation.messages import Reply
from confed.federation.wire import encode_state


def serve(
    origin: Setup | str, number: int, threads: int, pipe: Connection, parent: Connection | None, count: int
) -> None:
    """Loop of a process: it answers calls with the setup of its parent, or with its own from a source in JSON.

    A setup that it cannot make is its only answer.
    """
    if parent is not None:
        parent.close()
    # Ctrl-C and the end that a batch system asks for are the parent's to handle; closing the pipe ends us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
        if isinstance(origin, str):
            torch.set_num_threads(1)  # as in the parent, while data are read
            keep_freed_memory()
            try:
                origin = SetupSource.from_json(origin).setup()
            except Exception as error:
                for field in (json.dumps({"broken": f"{type(error).__name__}: {error}"}).encode(), b"", b""):
                    pipe.send_bytes(field)
                return
        _answer_calls(origin, number, threads, pipe, count)


def _answer_calls(setup: Setup, number: int, threads: int, pipe: Connection, count: int) -> None:
    torch.set_num_threads(threads)
    device = setup.device
    if device == "cuda":
        device = f"cuda:{number % torch.cuda.device_count()}"
    workspace: Workspace | None = None
    features: FrozenFeatures | FeatureCounts = FeatureCounts()
    while True:
        head, message, state = (pipe.recv_bytes() for _ in range(3))
        if workspace is None:
            workspace = Workspace(setup.model(), device)
            features = keep_features(setup, workspace, count)
            keep_data(setup, workspace, count)
        told, *others = answer_bytes(setup, workspace, head, message, state)
        if isinstance(features, FrozenFeatures):
            features.save(WRITTEN_AFTER)
        counts = features.counts if isinstance(features, FrozenFeatures) else features
        figures = {"features": asdict(counts), "device_data": asdict(counts_of(setup, workspace))}
        pipe.send_bytes(json.dumps({**json.loads(told), "process": os.getpid(), **figures}).encode())
        for part in others:
            pipe.send_bytes(part)


StartMethod = Literal["auto", "fork", "spawn"]
"""How worker processes start; the names are those of the standard library's ``multiprocessing``."""


def free_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def start_method(wanted: StartMethod = "auto") -> Literal["fork", "spawn"]:
    """How worker processes are to start on this system, from this process."""
    possible, cuda = "fork" in multiprocessing.get_all_start_methods(), torch.cuda.is_initialized()
    if wanted == "auto":
        return "fork" if possible and not cuda and sys.platform != "darwin" else "spawn"
    if wanted == "fork" and not possible:
        raise ValueError("run.start_method must be 'spawn' or 'auto' on this system, which cannot fork, got 'fork'")
    if wanted == "fork" and cuda:
        raise ValueError(
            "run.start_method must be 'spawn' or 'auto' after this process has used CUDA, which does not survive a "
            "fork, got 'fork'"
        )
    return wanted


class Workers(ProcessExecutor[bytes]):
    """Answers calls in ``count`` processes; see :class:`confed.engines.executor.Executor`."""

    def __init__(
        self, setup: Setup, count: int, threads: int = 1, start: StartMethod = "auto", source: SetupSource | None = None
    ) -> None:
        if count < 1:
            raise ValueError(f"there must be at least one worker, got {count}")
        self.start = start_method(start)  # how they were started
        if self.start == "spawn" and source is None:
            raise ValueError("worker processes that are spawned need a source from which they can make the setup")
        super().__init__()
        self._setup, self._threads, self._source = setup, threads, source
        self._count, self._counts = count, dict[int, FeatureCounts]()
        self._device_data = dict[int, DeviceCounts]()
        self._spool = tempfile.TemporaryDirectory(prefix="confed-replies-")
        self._workers = [self._start(number) for number in range(count)]
        # A server that computes gradients itself, where there are GPUs, makes this process one that cannot be forked
        # any more. Those who are to take the place of workers that die wait from the beginning; they hold no model yet.
        spares = self.start == "fork" and setup.device.startswith("cuda")
        self._spares = {n: self._start(n) for n in range(count)} if spares else {}

    def processes(self) -> list[int]:
        """The workers' process ids."""
        return [process.pid for process, _ in self._workers if process.pid is not None]

    @property
    def features(self) -> FeatureCounts:
        """What keeping features of frozen layers has saved, in all processes."""
        return added(self._counts.values())

    @property
    def device_data(self) -> DeviceCounts:
        """What of the clients' examples lies on devices, in all processes."""
        return added_up(self._device_data.values())

    def close(self) -> None:
        if not self._closed:
            note_children(self.processes())
        self._closed = True
        # All pipes before any wait: a worker forked later holds copies of the earlier ones' ends.
        everyone = [*self._workers, *self._spares.values()]
        for _, pipe in everyone:
            pipe.close()
        for process, _ in reversed(everyone):
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
        self._spool.cleanup()

    def _sendable(self, message: bytes) -> bytes:
        return message

    def _feed(self, batch: ProcessBatch[bytes]) -> None:
        for number in range(len(self._workers)):
            if not batch.waiting:
                return
            if number in batch.running.values():
                continue
            process, pipe = self._workers[number]
            try:
                position = self._begin(batch, number, range(len(self._workers)))
                if position is None:
                    continue
                call = batch.calls[position]
                state = encode_state(batch.store.load(call.client.id))
                # Where the worker has died, collecting its reply finds that out and says so.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    for field in (call_head(call, batch.round), batch.messages.of(call.sent), state):
                        pipe.send_bytes(field)
            except BaseException:
                # Ctrl-C, or a damaged state: with no call, or half of one, the worker would wait, and we for its reply.
                process.kill()
                raise

    def _collect(self, batch: ProcessBatch[bytes]) -> None:
        ready = wait([self._workers[number][1] for number in batch.running.values()])
        for position, number in list(batch.running.items()):
            if self._workers[number][1] not in ready:
                continue
            try:
                parts = [self._workers[number][1].recv_bytes() for _ in range(3)]
                path = Path(self._spool.name) / f"{position}"
                path.write_bytes(join(parts))
                batch.finish(position, path)
            except (EOFError, ConnectionResetError):
                process, pipe = self._workers[number]
                process.join()
                pipe.close()
                self._homes.leave(number)
                self._workers[number] = self._spares.pop(number, None) or self._start(number)
                batch.finish(position, f"ChildProcessError: the worker died with exit code {process.exitcode}")

    def _read(self, batch: ProcessBatch[bytes], position: int, outcome: Path) -> Reply:
        call, parts = batch.calls[position], split(outcome.read_bytes())
        outcome.unlink()
        head = json.loads(parts[0])
        if not parts[1] and "broken" in head:
            raise RuntimeError(f"a worker process could not prepare the run: {head['broken']}")
        self._counts[head["process"]] = FeatureCounts(**head["features"])
        self._device_data[head["process"]] = DeviceCounts(**head["device_data"])
        self.timeline.add(call.client.id, call.action, *head["span"])
        return read_answer(call, parts, batch.store)

    def _drop(self, batch: ProcessBatch[bytes]) -> None:
        for outcome in batch.done.values():
            if isinstance(outcome, Path):
                outcome.unlink(missing_ok=True)

    def _start(self, number: int) -> tuple[BaseProcess, Connection]:
        here, worker_end = multiprocessing.Pipe()
        source = self._source if self.start == "spawn" else None
        origin, parent = (self._setup, here) if source is None else (source.to_json(), None)
        arguments = (origin, number, self._threads, worker_end, parent, self._count)
        context: Any = multiprocessing.get_context(self.start)
        process = context.Process(target=serve, args=arguments, daemon=True)
        process.start()
        worker_end.close()
        return process, here

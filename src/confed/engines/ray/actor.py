"""Actor processes of a Ray cluster: those that compute clients of a run, and those that carry out whole jobs.

A process that computes clients has one workspace that they take turns in; bytes come and bytes go. Nothing is imported
here that loads PyTorch: the instruction set has to be chosen before.
"""

import importlib
import json
import os
import queue
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from confed.engines.perform import Setup, Workspace


class Starting:
    """What an actor is told when it starts, as JSON."""

    def __init__(self, task: str, folder: str, threads: int, environment: Mapping[str, str]) -> None:
        self.task, self.folder, self.threads, self.environment = task, folder, threads, dict(environment)

    def to_json(self) -> str:
        return json.dumps(vars(self))

    @classmethod
    def from_json(cls, text: str) -> "Starting":
        """The values that :meth:`to_json` wrote."""
        return cls(**json.loads(text))


class NodeProcess(ABC):
    """Process on a node of a cluster, which is compared with the process that asks before it takes work.

    Every method takes and returns bytes and text, and makes errors of texts, so that Ray pickles no object of ours.
    """

    works_on: ClassVar[str]  # what its task is, in messages
    inexact: ClassVar[str]  # what follows from hardware that differs, in messages

    def __init__(self, starting: str) -> None:
        self._starting = Starting.from_json(starting)
        os.environ.update(self._starting.environment)
        if os.path.isdir(self._starting.folder):
            os.chdir(self._starting.folder)

    def fingerprint(self) -> bytes:
        """Host, process and everything that decides the last digits of its numbers, as JSON."""
        try:
            from confed.system.processor import pin

            pin()
            import torch

            from confed.engines.ray.speed import fingerprint
            from confed.engines.usage import keep_freed_memory

            keep_freed_memory()
            torch.set_num_threads(self._starting.threads)
            node_fingerprint = fingerprint(self._starting.threads)
        except Exception as error:
            return json.dumps({"broken": f"{type(error).__name__}: {error}"}).encode()
        return json.dumps(
            {"host": socket.gethostname(), "process": os.getpid(), "fingerprint": node_fingerprint}
        ).encode()

    @abstractmethod
    def prepare(self) -> bytes:
        """Preparation for work; b"" or what went wrong."""


class ClientActor(NodeProcess):
    """Answers calls with a model and data of its own; see :mod:`confed.engines.ray.executor`."""

    works_on = "run"
    inexact = "exact = false in summary.json"

    def __init__(self, starting: str) -> None:
        super().__init__(starting)
        self._setup: Setup | None = None
        self._workspace: Workspace | None = None

    def prepare(self) -> bytes:
        """Reads the data and builds the workspace; b"" or what went wrong."""
        import torch

        from confed.engines.perform import Workspace
        from confed.engines.setup_source import SetupSource

        try:
            torch.set_num_threads(1)  # as everywhere while data are read
            setup = SetupSource.from_json(self._starting.task).setup()
            torch.set_num_threads(self._starting.threads)
            # Ray shows each actor its own GPU only.
            self._setup, self._workspace = setup, Workspace(setup.model(), setup.device)
        except Exception as error:
            return f"{type(error).__name__}: {error}".encode()
        return b""

    def answer(self, head: bytes, message: bytes, state: bytes) -> tuple[bytes, bytes]:
        from confed.engines.dispatch import answer_bytes, join
        from confed.engines.usage import peak_memory

        assert self._setup is not None  # prepare has made them
        assert self._workspace is not None
        began = time.perf_counter()
        body = join(answer_bytes(self._setup, self._workspace, head, message, state))
        told = {"seconds": time.perf_counter() - began, "cpu": time.process_time(), "peak": peak_memory()}
        return json.dumps(told).encode(), body


# Whole jobs, such as the runs of a study ----------------------------------------------------------------------

WAIT = 1.0  # seconds that a question for news waits for some


@dataclass(frozen=True)
class JobSource:
    """Functions that every node can import, and what they are told: what jobs are and where they can be done."""

    # "module:function", called once in every process with arguments; it returns what is in the way of work there, or
    # an empty text
    check: str
    # "module:function", called with a job and a callback that takes news as JSON objects and may raise
    # KeyboardInterrupt; it returns the outcome as a JSON object
    carry_out: str
    arguments: Mapping[str, Any]  # keywords of check; JSON values

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "JobSource":
        """The names that :meth:`to_json` wrote."""
        return cls(**json.loads(text))


class JobActor(NodeProcess):
    """Carries out one job after another; see :mod:`confed.engines.ray.jobs`."""

    works_on = "study"
    inexact = "their numbers need not agree to the last digit"

    def __init__(self, starting: str) -> None:
        super().__init__(starting)
        self._news: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        self._stopping = False

    def prepare(self) -> bytes:
        """Asks whether jobs can be done here; b"" or why not."""
        try:
            source = JobSource.from_json(self._starting.task)
            self._carry_out = _imported(source.carry_out)
            return str(_imported(source.check)(**source.arguments)).encode()
        except Exception as error:
            return f"{type(error).__name__}: {error}".encode()

    def begin(self, job: bytes) -> None:
        """Start of a job, a JSON object, in a thread beside the one that Ray uses."""
        threading.Thread(target=self._work, args=(json.loads(job),), daemon=True).start()

    def news(self, stop: bool) -> bytes:
        """What has happened since the last question, as a JSON list; it waits for a moment for something to happen."""
        self._stopping = stop
        items: list[Mapping[str, Any]] = []
        until = time.monotonic() + WAIT
        while not items or not self._news.empty():
            try:
                items.append(self._news.get(timeout=max(until - time.monotonic(), 0.001)))
            except queue.Empty:
                break
        return json.dumps(items).encode()

    def _work(self, job: Mapping[str, Any]) -> None:
        import torch

        torch.set_num_threads(self._starting.threads)  # OpenMP counts them by calling thread
        try:
            self._news.put({"outcome": self._carry_out(job, self._tell)})
        except KeyboardInterrupt:
            self._news.put({"stopped": True})
        except BaseException as error:
            self._news.put({"outcome": {"outcome": "failed", "text": f"{type(error).__name__}: {error}"}})

    def _tell(self, content: Mapping[str, Any]) -> None:
        if self._stopping:
            raise KeyboardInterrupt
        self._news.put(content)


def _imported(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)

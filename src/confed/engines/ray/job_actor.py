"""Actor process that carries out whole jobs, such as the runs of a study, and tells what happens meanwhile."""

import importlib
import json
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from confed.engines.ray.actor import NodeProcess

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
        """What has happened since this was last asked, as a JSON list; it waits for a moment for something to happen.

        The last of a job is ``{"outcome": ...}``, or ``{"stopped": true}``.
        """
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

"""Checkpoints written by a thread while the next round is computed."""

import queue
import threading
from collections.abc import Callable
from itertools import chain

from confed.federation.checkpoint import Checkpoint, Checkpoints
from confed.federation.directory_store import at_once

SMALL = 32 * 2**20
"""Bytes of servers' tensors up to which a checkpoint is written during the next round: its bytes are held twice."""


class CheckpointWriter:
    """One thread that writes a run's checkpoints, in their order.

    A run killed at any moment goes on from the newest whole checkpoint, as without a thread; that may be one round
    further back. The version of a client's state that a checkpoint needs is removed only when the next one is whole.
    Large checkpoints are written at once.

    Ctrl-C may come at any moment, so what both threads use is :class:`queue.SimpleQueue`: the locks of other queues and
    of semaphores stay taken for good where an interrupt comes just after they were.
    """

    def __init__(self, checkpoints: Checkpoints, waiting: int = 1) -> None:
        self._checkpoints = checkpoints
        self._jobs = queue.SimpleQueue[Checkpoint | Callable[[], None] | None]()
        self._given = self._done = 0  # each is counted by one thread alone
        self._places: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(waiting):
            self._places.put(None)
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def save(self, checkpoint: Checkpoint) -> None:
        """Writes a checkpoint soon; its tensors must not change afterwards."""
        groups = chain.from_iterable((s.params, *s.slots.values()) for s in checkpoint.servers.values())
        tensors = chain.from_iterable(group.values() for group in groups)
        if sum(tensor.nbytes for tensor in tensors) > SMALL:
            self.close()
            self._checkpoints.save(checkpoint)
            return
        self._places.get()
        given = self._given
        try:
            self._raise()
            if self._thread is None:
                self._start()
            self._give(self._checkpoints.expect(checkpoint))
        except BaseException:
            if self._given == given:
                self._places.put(None)
            raise

    def close(self) -> None:
        """Waits until everything is written, and ends the thread; :meth:`save` may follow.

        What went wrong in the thread is raised here, or by the next :meth:`save`.
        """
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None
            self._checkpoints.store.later = at_once
            self._raise()
            self._checkpoints.store.settle()
        self._raise()

    def _start(self) -> None:
        # A queue of its own, and known only once it has started: an interrupted `start` leaves a thread that may or may
        # not run, and cannot be joined.
        jobs = queue.SimpleQueue[Checkpoint | Callable[[], None] | None]()
        thread = threading.Thread(target=self._work, args=(jobs,), name="confed-checkpoints", daemon=True)
        try:
            thread.start()
        except BaseException:
            jobs.put(None)
            raise
        self._jobs, self._thread = jobs, thread
        self._checkpoints.store.later = self._later

    def _give(self, job: Checkpoint | Callable[[], None]) -> None:
        self._given += 1  # first: a job that is not counted would seem to be done
        self._jobs.put(job)

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _later(self, job: Callable[[], None]) -> None:
        """A removal, after the checkpoints that were given before."""
        busy = self._given > self._done  # looked at first: an idle thread meets no errors
        if self._error is not None:
            return  # nothing may be removed that the last whole checkpoint needs
        if busy:
            self._give(job)
        else:
            job()

    def _work(self, jobs: "queue.SimpleQueue[Checkpoint | Callable[[], None] | None]") -> None:
        while (job := jobs.get()) is not None:
            try:
                if self._error is not None:
                    continue
                if isinstance(job, Checkpoint):
                    self._checkpoints.write(job)
                else:
                    job()
            except Exception as error:
                self._error = error
            finally:
                if isinstance(job, Checkpoint):
                    self._places.put(None)
                self._done += 1

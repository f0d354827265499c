"""Clients of a round on a Ray cluster: an actor per core or GPU, each with one workspace.

The store of the asking process is the truth, so that any actor can answer any call, and a call whose actor or node is
lost is asked again elsewhere with the same result. Replies that come early wait in Ray's object store, which spills to
disk.
"""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import ray
import ray.exceptions

from confed.engines.dispatch import ProcessBatch, ProcessExecutor, call_head, read_answer, split
from confed.engines.ray.actor import ClientActor
from confed.engines.ray.crew import TRIES, Crew, connected, reason_of_loss
from confed.engines.ray.placement import Wanted
from confed.engines.ray.speed import better_left
from confed.engines.setup_source import SetupSource
from confed.federation.messages import Message, Reply
from confed.federation.wire import encode_state
from confed.system.events import Caution, Progress, ignore

LARGE = 100 * 1024
"""Bytes of a message from which it is put into Ray's object store, once for all calls; smaller ones go with each."""


@dataclass
class _PendingAnswer:
    head: Any
    body: Any
    began: float


class RayActors(ProcessExecutor[Any]):
    """Answers calls on a Ray cluster; see :class:`confed.engines.executor.Executor`."""

    def __init__(
        self, source: SetupSource, wanted: Wanted, address: str = "", cores: int = 1, progress: Progress = ignore
    ) -> None:
        super().__init__()
        self._progress, self._pending = progress, dict[int, _PendingAnswer]()  # number of an actor -> its answer
        self._open = ExitStack()
        with ExitStack() as opening:
            opening.enter_context(connected(address, cores))
            self.crew = Crew(ClientActor, source.to_json(), wanted, progress)
            self._open = opening.pop_all()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.crew.end()
            self._open.close()

    @property
    def cpu_seconds(self) -> float:
        """Processor seconds of all actors."""
        return sum(actor.cpu for actor in self.crew.all)

    @property
    def peak_memory(self) -> int:
        """Largest memory that an actor has had, bytes."""
        return max((actor.peak for actor in self.crew.all), default=0)

    def described(self) -> dict[str, Any]:
        """Entries of ``summary.json``: whether the numbers are those of one process, the actors by node, and losses."""
        nodes = dict[str, dict[str, Any]]()
        for actor in self.crew.all:
            entry = nodes.setdefault(actor.node.id, {"node": actor.node.name, "actors": 0, **actor.fingerprint})
            entry["actors"] += 1
        differing = self.crew.differences()
        return {
            "engine": "ray",
            "exact": not differing,
            **({"differing": differing} if differing else {}),
            "nodes": list(nodes.values()),
            "actors_lost": self.crew.lost,
        }

    def _sendable(self, message: bytes) -> Any:
        """A message's bytes; in Ray's object store, where they are fetched once per node, if they are many."""
        return ray.put(message) if len(message) >= LARGE else message

    def _feed(self, batch: ProcessBatch[Any]) -> None:
        """Gives calls to the actors that are free, the fastest first."""
        self.crew.look()
        ready, busy = self.crew.ready, set(batch.running.values())
        free = [number for number in ready if number not in busy]
        if 0 < len(batch.waiting) <= len(ready):
            first = batch.calls[batch.waiting[0]]
            free.sort(key=lambda number: self.crew.actors[number].pace.of(first) or 0.0)
        for number in free:
            if not batch.waiting:
                return
            if self._leaves(batch, number, ready):
                continue
            position = self._begin(batch, number, ready)
            if position is not None:
                self._ask(batch, number, position)

    def _leaves(self, batch: ProcessBatch[Any], number: int, ready: Sequence[int]) -> bool:
        """Whether an actor is so slow that the calls that wait are done earlier without it."""
        waiting, actors = [batch.calls[position] for position in batch.waiting], self.crew.actors
        if len(waiting) >= len(ready) or waiting[0].session:
            return False
        now, busy = time.perf_counter(), dict[int, float]()
        for other, pending in self._pending.items():
            needs = actors[other].pace.of(batch.calls[batch.position_of(other)])
            if needs is not None:
                busy[other] = max(pending.began + needs - now, 0.0)
        others = {other: actors[other].pace for other in busy}
        return better_left(actors[number].pace, waiting, others, busy)

    def _ask(self, batch: ProcessBatch[Any], number: int, position: int) -> None:
        call = batch.calls[position]
        state = encode_state(batch.store.load(call.client.id))
        answer = self.crew.actors[number].handle.answer.options(num_returns=2)
        head, body = answer.remote(call_head(call, batch.round), batch.messages.of(call.sent), state)
        self._pending[number] = _PendingAnswer(head, body, time.perf_counter())

    def _collect(self, batch: ProcessBatch[Any]) -> None:
        """Waits for a reply, a loss or an actor that has become ready."""
        numbers = {pending.head: number for number, pending in self._pending.items()}
        goes_on = "`confed resume` goes on from the last checkpoint when there are nodes again"
        for ref in self.crew.wait(list(numbers), goes_on):
            self._take(batch, numbers[ref])

    def _take(self, batch: ProcessBatch[Any], number: int) -> None:
        """Takes what an actor told of its work, or notices that it is gone."""
        pending, actor, position = self._pending.pop(number), self.crew.actors[number], batch.position_of(number)
        try:
            told: Mapping[str, float] = json.loads(ray.get(pending.head))
        except ray.exceptions.RayError as error:
            self._lose(batch, position, number, error)
            return
        actor.cpu, actor.peak = told["cpu"], int(told["peak"])
        call = batch.calls[position]
        actor.pace.note(call, told["seconds"])
        # Clocks of machines differ: the span is by this one's.
        self.timeline.add(call.client.id, call.action, pending.began, time.perf_counter())
        batch.finish(position, pending.body)

    def _lose(self, batch: ProcessBatch[Any], position: int, number: int, error: Exception) -> None:
        """Drops an actor that is gone; its call waits again, or has an error for a reply."""
        actor, call = self.crew.drop(number), batch.calls[position]
        batch.tries[position] += 1
        self._homes.leave(number)
        text = f"an actor on node {actor.node.name} was lost ({reason_of_loss(error)})"
        if call.session:  # its live objects are lost with it
            batch.finish(position, f"ChildProcessError: {text}")
        elif batch.tries[position] >= TRIES:
            batch.finish(position, f"ChildProcessError: {TRIES} actors died of this call; the last: {text}")
        else:
            batch.put_back(position)
        self._progress(Caution(f"{text}; client {call.client.id!r} is asked again elsewhere"))
        self.crew.fill()

    def _read(self, batch: ProcessBatch[Any], position: int, outcome: Any) -> Reply | None:
        call = batch.calls[position]
        try:
            parts = split(ray.get(outcome))
        except ray.exceptions.RayError as error:
            batch.tries[position] += 1
            if call.session or batch.tries[position] >= TRIES:
                return Reply(call.client, Message(), f"ChildProcessError: the reply was lost ({reason_of_loss(error)})")
            batch.put_back(position)
            return None
        return read_answer(call, parts, batch.store)

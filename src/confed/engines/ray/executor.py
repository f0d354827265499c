"""Clients of a round on a Ray cluster: an actor per core or GPU, each with one workspace.

What crosses between processes are the bytes of :mod:`confed.federation.wire`. A call carries its client's state, and
the store of the asking process is the truth, so that any actor can answer any call, and a call whose actor or node is
lost is asked again elsewhere with the same result. Replies are handed on in the order of the calls, so that the numbers
are those of one process on equal hardware. Replies that come early wait in Ray's object store, which spills to disk.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import ray
import ray.exceptions

from confed.engines.call_bytes import CallQueue, Encoded, Homes, call_head, read_answer, split
from confed.engines.ray.actor import ClientActor
from confed.engines.ray.crew import LOOK, PATIENCE, TRIES, Crew, connected, reason_of_loss
from confed.engines.ray.placement import Wanted
from confed.engines.ray.speed import better_left
from confed.engines.setup_source import SetupSource
from confed.engines.timeline import Timeline
from confed.federation.messages import Call, Message, Reply
from confed.federation.state import Store
from confed.federation.wire import encode_state
from confed.system.events import Caution, Progress, ignore

LARGE = 100 * 1024
"""Bytes of a message from which it is put into Ray's object store, once for all calls; smaller ones go with each."""


@dataclass
class _Asked:
    head: Any
    body: Any
    began: float


@dataclass
class _Round:
    """Calls that a flow asked for together."""

    queue: CallQueue
    store: Store
    round: int
    asked: dict[int, _Asked] = field(default_factory=dict[int, _Asked])
    early: dict[int, Any] = field(default_factory=dict[int, Any])
    tries: dict[int, int] = field(default_factory=dict[int, int])
    messages: Encoded[Any] = field(default_factory=lambda: Encoded(_stored))


def _stored(data: bytes) -> Any:
    """A message's bytes; in Ray's object store, where they are fetched once per node, if they are many."""
    return ray.put(data) if len(data) >= LARGE else data


class RayActors:
    """Answers calls on a Ray cluster; see :class:`confed.engines.executor.Executor`."""

    def __init__(
        self, source: SetupSource, wanted: Wanted, address: str = "", cores: int = 1, progress: Progress = ignore
    ) -> None:
        self.timeline = Timeline(0)
        self._progress, self._homes, self._closed = progress, Homes(), False
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

    def __call__(self, calls: Sequence[Call], store: Store, round: int) -> Iterator[Reply]:
        """Replies in the order of the calls; the first are being computed when this returns."""
        replies = self._replies(calls, store, round)
        next(replies)
        return replies  # pyright: ignore[reportReturnType]  # after the first None there are replies only

    def _replies(self, calls: Sequence[Call], store: Store, round: int) -> Iterator[Reply | None]:
        self._homes.begin(round)
        work = _Round(CallQueue(calls, self._homes), store, round)
        try:
            self.crew.look()
            self._feed(work)
            yield None
            for position in range(len(calls)):
                reply = None
                while reply is None:
                    while position not in work.early:
                        self._feed(work)
                        self._collect(work)
                    self._feed(work)
                    reply = self._reply(work, position)
                yield reply
        finally:
            # A flow that stops listening leaves calls behind; the next ones wait until the actors are free.
            while work.asked and not self._closed:
                self._collect(work)

    def _feed(self, work: _Round) -> None:
        """Gives calls to the actors that are free, the fastest first."""
        ready, queue = self.crew.ready, work.queue
        if not queue:
            return
        free = [number for number in ready if number not in queue.running]
        if len(queue) <= len(ready):
            first = queue.first
            free.sort(key=lambda number: self.crew.actors[number].pace.of(first) or 0.0)
        for number in free:
            if not queue:
                return
            if self._leaves(work, number, ready):
                continue
            position = queue.take(number, ready)
            if position is not None:
                self._ask(work, number, position)

    def _leaves(self, work: _Round, number: int, ready: Sequence[int]) -> bool:
        """Whether an actor is so slow that the calls that wait are done earlier without it."""
        queue, actors = work.queue, self.crew.actors
        if len(queue) >= len(ready) or queue.first.session:
            return False
        now, busy = time.perf_counter(), dict[int, float]()
        for other, asked in work.asked.items():
            needs = actors[other].pace.of(queue.calls[queue.running[other]])
            if needs is not None:
                busy[other] = max(asked.began + needs - now, 0.0)
        others = {other: actors[other].pace for other in busy}
        return better_left(actors[number].pace, queue.waiting(), others, busy)

    def _ask(self, work: _Round, number: int, position: int) -> None:
        call = work.queue.calls[position]
        state = encode_state(work.store.load(call.client.id))
        answer = self.crew.actors[number].handle.answer.options(num_returns=2)
        head, body = answer.remote(call_head(call, work.round), work.messages.of(call.message), state)
        work.asked[number] = _Asked(head, body, time.perf_counter())

    def _collect(self, work: _Round) -> None:
        """Waits for a reply, a loss or an actor that has become ready."""
        since = time.monotonic()
        while True:
            numbers, coming = {asked.head: n for n, asked in work.asked.items()}, self.crew.coming()
            if numbers or coming:
                arrived = ray.wait([*numbers, *coming], num_returns=1, timeout=LOOK)[0]
            else:
                time.sleep(1.0)
                arrived = []
            self.crew.look()
            for ref in arrived:
                if ref in coming:
                    self.crew.arrive(coming[ref])
                else:
                    self._take(work, numbers[ref])
            if arrived:
                return
            if not numbers and not coming and time.monotonic() - since > PATIENCE:
                raise RuntimeError(
                    f"no node of the Ray cluster has had room for an actor for {PATIENCE:.0f} s; `confed resume` goes "
                    "on from the last checkpoint when there are nodes again"
                )

    def _take(self, work: _Round, number: int) -> None:
        """Takes what an actor told of its work, or notices that it is gone."""
        asked, actor = work.asked.pop(number), self.crew.actors[number]
        position = work.queue.running[number]
        try:
            told: Mapping[str, float] = json.loads(ray.get(asked.head))
        except ray.exceptions.RayError as error:
            self._lose(work, number, error)
            return
        work.queue.finish(number)
        actor.cpu, actor.peak = told["cpu"], int(told["peak"])
        call = work.queue.calls[position]
        actor.pace.note(call, told["seconds"])
        # Clocks of machines differ: the span is by this one's.
        self.timeline.add(call.client.id, call.action, asked.began, time.perf_counter())
        work.early[position] = asked.body

    def _lose(self, work: _Round, number: int, error: Exception) -> None:
        """Drops an actor that is gone; its call waits again, or has an error for a reply."""
        actor, position = self.crew.drop(number), work.queue.running[number]
        call, why = work.queue.calls[position], reason_of_loss(error)
        work.tries[position] = work.tries.get(position, 0) + 1
        self._homes.leave(number)
        text = f"an actor on node {actor.node.name} was lost ({why})"
        if call.session:  # its live objects are lost with it
            work.queue.finish(number)
            work.early[position] = f"ChildProcessError: {text}"
        elif work.tries[position] >= TRIES:
            work.queue.finish(number)
            work.early[position] = f"ChildProcessError: {TRIES} actors died of this call; the last: {text}"
        else:
            work.queue.put_back(number)
        self._progress(Caution(f"{text}; client {call.client.id!r} is asked again elsewhere"))
        self.crew.fill()

    def _reply(self, work: _Round, position: int) -> Reply | None:
        """The reply at a position; None if it was lost with its node, and the call waits again."""
        call, early_reply = work.queue.calls[position], work.early.pop(position)
        if isinstance(early_reply, str):
            work.queue.done.remove(position)
            return Reply(call.client, Message(), early_reply)
        try:
            parts = split(ray.get(early_reply))
        except ray.exceptions.RayError as error:
            work.queue.done.remove(position)
            work.tries[position] = work.tries.get(position, 0) + 1
            if call.session or work.tries[position] >= TRIES:
                return Reply(call.client, Message(), f"ChildProcessError: the reply was lost ({reason_of_loss(error)})")
            work.queue.wait_again(position)
            return None
        work.queue.done.remove(position)
        return read_answer(call, parts, work.store).reply

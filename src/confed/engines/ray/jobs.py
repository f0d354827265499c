"""Whole jobs on a Ray cluster, such as the runs of a study: each in an actor, again elsewhere when it is lost.

A job must be one that can be begun again after its process was killed, such as a run that goes on from its checkpoint.
"""

import json
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ray
import ray.exceptions

from confed.engines.ray.actor import JobActor, JobSource
from confed.engines.ray.crew import TRIES, Crew, connected, reason_of_loss
from confed.engines.ray.placement import Wanted
from confed.system.events import Caution, JobEnded, JobProgress, JobStarted, Progress, from_json

STOPPING = 15.0  # seconds that jobs have for stopping in good order


@dataclass
class _Working:
    job: int
    news: Any


def carry_out(
    source: JobSource,
    jobs: Sequence[Mapping[str, Any]],
    titles: Sequence[str],
    wanted: Wanted,
    address: str,
    cores: int,
    progress: Progress,
) -> None:
    """Execution of all jobs, in order as far as there are actors for them."""
    if not jobs:
        return
    with connected(address, cores):
        crew = Crew(JobActor, source.to_json(), wanted, progress)
        work = _Work(crew, jobs, titles, progress)
        try:
            work.do()
        except KeyboardInterrupt:
            work.stop()
            raise
        finally:
            crew.end()


class _Work:
    def __init__(
        self, crew: Crew, jobs: Sequence[Mapping[str, Any]], titles: Sequence[str], progress: Progress
    ) -> None:
        self._crew, self._jobs, self._titles, self._progress = crew, jobs, titles, progress
        self._waiting = deque(range(len(jobs)))
        self._working: dict[int, _Working] = {}
        self._tries: dict[int, int] = {}

    def do(self) -> None:
        while self._waiting or self._working:
            self._feed()
            numbers = {working.news: number for number, working in self._working.items()}
            for ref in self._crew.wait(list(numbers), "the same command goes on when there are nodes again"):
                self._take(numbers[ref])

    def stop(self) -> None:
        """Asks jobs to stop in good order, and waits for that for a while."""
        until = time.monotonic() + STOPPING
        for number, working in self._working.items():
            working.news = self._crew.actors[number].handle.news.remote(True)
        while self._working and time.monotonic() < until:
            numbers = {working.news: number for number, working in self._working.items()}
            for ref in ray.wait(list(numbers), num_returns=1, timeout=until - time.monotonic())[0]:
                number = numbers[ref]
                try:
                    ended = any("event" not in told for told in json.loads(ray.get(ref)))
                except ray.exceptions.RayError:
                    ended = True
                if ended:
                    del self._working[number]
                else:
                    self._working[number].news = self._crew.actors[number].handle.news.remote(True)

    def _feed(self) -> None:
        """Gives jobs to the actors that are free; where no job waits, these end."""
        for number in self._crew.ready:
            if self._waiting and number not in self._working:
                job, handle = self._waiting.popleft(), self._crew.actors[number].handle
                handle.begin.remote(json.dumps(self._jobs[job]).encode())
                self._working[number] = _Working(job, handle.news.remote(False))
                self._progress(JobStarted(job, job))

    def _take(self, number: int) -> None:
        """Takes an actor's news, or notices that it is gone."""
        working = self._working[number]
        try:
            news: list[dict[str, Any]] = json.loads(ray.get(working.news))
        except ray.exceptions.RayError as error:
            self._lose(number, error)
            return
        for told in news:
            if "event" in told:
                self._progress(JobProgress(working.job, working.job, from_json(told)))
                continue
            del self._working[number]
            self._end(working.job, told["outcome"]["outcome"], told["outcome"]["text"])
            return
        working.news = self._crew.actors[number].handle.news.remote(False)

    def _lose(self, number: int, error: Exception) -> None:
        """Drops an actor that is gone; its job waits again, or has failed."""
        actor, job = self._crew.drop(number), self._working.pop(number).job
        text = f"an actor on node {actor.node.name} was lost ({reason_of_loss(error)})"
        self._tries[job] = self._tries.get(job, 0) + 1
        if self._tries[job] >= TRIES:
            self._end(job, "failed", f"ChildProcessError: {TRIES} actors died of this job; the last: {text}")
        else:
            self._waiting.appendleft(job)
            self._progress(Caution(f"{text}; {self._titles[job]} goes on elsewhere"))
        self._crew.fill()

    def _end(self, job: int, outcome: Literal["done", "refused", "failed"], text: str) -> None:
        if left := len(self._waiting) + len(self._working):
            self._crew.want(left, self._working)  # a cluster's other users wait for what stands idle
        self._progress(JobEnded(job, job, outcome, text))

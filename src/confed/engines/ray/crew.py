"""Actors on the nodes of a cluster: started where there is room, checked, replaced, told apart by number."""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from confed.engines.ray.actor import NodeProcess, Starting
from confed.engines.ray.placement import Node, Wanted, nodes_of, places, too_small
from confed.engines.ray.speed import Pace, fingerprint, hardware_differences, version_difference
from confed.system.events import Caution, Note, Progress

_PATIENCE = 5.0  # seconds in which the address must take a connection


@contextlib.contextmanager
def connected(address: str, cores: int, gpus: int | None = None) -> Iterator[None]:
    """Connection to a cluster for as long as the ``with`` block lasts; one that this process has already is kept."""
    if ray.is_initialized():
        yield
        return
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}
    if address:
        _check_address(address)
        options |= {"address": address}
    else:
        # No figures about this machine are sent to Ray's makers.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # "local" also where this machine belongs to a cluster.
        options |= {"address": "local", "num_cpus": cores, "num_gpus": gpus, "include_dashboard": False}
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    where = f"no Ray cluster could be joined at run.address = {address!r}" if address else "Ray could not start here"
    with _signals_kept():
        try:
            with contextlib.redirect_stdout(sys.stderr):
                ray.init(**options)
        except (ConnectionError, RuntimeError, ValueError, TimeoutError, ray.exceptions.RayError) as error:
            ray.shutdown()
            raise ValueError(f"{where}: {' '.join(str(error).split())[:400]}") from None
    try:
        yield
    finally:
        with _signals_kept():
            ray.shutdown()


def _check_address(address: str) -> None:
    """Check that something listens at an address, as Ray itself tries for a minute."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        raise ValueError(
            f"run.address must be HOST:PORT of a cluster's head (`ray start --head` prints it), 'auto' or '', got "
            f"{address!r}"
        )
    try:
        socket.create_connection((host, int(port)), timeout=_PATIENCE).close()
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"no Ray cluster at run.address = {address!r}: {error}; `ray start --head` starts one, and `ray status` "
            "shows its nodes"
        ) from None


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Within it Ray may install handlers of signals; afterwards those of before are there again."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


START = 60.0  # seconds in which actors of a cluster with free cores start; those that take longer join later
LATEST = 180.0  # seconds that the first actor may take: on nodes that are very busy a process needs minutes to start
LOOK = 5.0  # seconds between two looks at which nodes there are
PATIENCE = 120.0  # seconds without any actor after which work is given up
TRIES = 3  # actors that may die of one call or job before it is given up
PASSED_ON = ("CONFED_ALLOW_CODE", "CONFED_CPU", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM", "OMP_WAIT_POLICY")
"""Variables of the environment that actors have as this process has them: modules that recipes may name, and others."""


@dataclass
class Actor:
    node: Node
    handle: Any
    coming: Any  # what it is asked before it may take calls; None once it may
    fingerprint: Mapping[str, str] = field(default_factory=dict[str, str])  # of its process; empty until it is known
    pace: Pace = field(default_factory=Pace)  # how fast it is
    cpu: float = 0.0  # processor seconds that it has used
    peak: int = 0  # largest memory that it has had, bytes


class Crew:
    """Actors of one kind, by number."""

    def __init__(self, kind: type[NodeProcess], task: str, wanted: Wanted, progress: Progress) -> None:
        self.actors: dict[int, Actor] = {}  # those there are, also while they prepare
        self.lost, self.past = 0, list[Actor]()  # how many have died, and these, for figures
        self._kind, self._wanted, self._progress = kind, wanted, progress
        environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        self._starting = Starting(task, os.getcwd(), wanted.threads, environment).to_json()
        self._ours = fingerprint(wanted.threads)
        self._number, self._looked = 0, 0.0
        self._idle = 0.0  # since when there has been no actor at all, of the clock monotonic; 0 where there is one
        self._refused = set[str]()
        self._begin()

    @property
    def ready(self) -> list[int]:
        """Numbers of the actors that may take calls."""
        return [number for number, actor in self.actors.items() if actor.coming is None]

    @property
    def all(self) -> list[Actor]:
        """The actors that have worked or may work, those that have died included."""
        return [actor for actor in (*self.past, *self.actors.values()) if actor.coming is None]

    def differences(self) -> dict[str, list[str]]:
        """What differs between this process and the actors in ways that last digits depend on."""
        fingerprints = [self._ours, *(actor.fingerprint for actor in self.all)]
        differing = hardware_differences(fingerprints)
        if self._wanted.gpu:  # the process that asks need not have a GPU
            differing.pop("device", None)
            differing |= {k: v for k, v in hardware_differences(fingerprints[1:]).items() if k == "device"}
        return differing

    def coming(self) -> dict[Any, int]:
        """What is waited for -> the actor's number."""
        return {actor.coming: number for number, actor in self.actors.items() if actor.coming is not None}

    def look(self) -> None:
        """Starts actors on nodes that have come, if it is time to look again."""
        if time.monotonic() - self._looked >= LOOK:
            self.fill()

    def fill(self) -> None:
        """Starts actors wherever there is room for more."""
        self._looked = time.monotonic()
        nodes = {name: node for name, node in nodes_of(ray.nodes()).items() if name not in self._refused}
        actors_on_node = Counter(actor.node.id for actor in self.actors.values())
        for name in places(nodes, self._wanted, actors_on_node):
            self._start(nodes[name])

    def arrive(self, number: int) -> None:
        """Takes what a coming actor has told: its fingerprint, then that it is prepared."""
        if why := self._advance(number):
            node = self.actors[number].node
            self.drop(number)
            if node.id in nodes_of(ray.nodes()):  # else it went as it came
                self._refused.add(node.id)
                self._progress(Caution(f"node {node.name} is left out: it {why}"))
        elif self.actors[number].coming is None:
            self._progress(Note(f"an actor on node {self.actors[number].node.name} has joined"))

    def wait(self, refs: Collection[Any], goes_on: str) -> list[Any]:
        """References whose results have come; none where an actor became ready first, or after a while."""
        coming = self.coming()
        if refs or coming:
            self._idle = 0.0
            arrived = ray.wait([*refs, *coming], num_returns=1, timeout=LOOK)[0]
        else:
            self._idle = self._idle or time.monotonic()
            if time.monotonic() - self._idle > PATIENCE:
                raise RuntimeError(
                    f"no node of the Ray cluster has had room for an actor for {PATIENCE:.0f} s; {goes_on}"
                )
            time.sleep(1.0)
            arrived = []
        self.look()
        for ref in arrived:
            if ref in coming:
                self.arrive(coming[ref])
        return [ref for ref in arrived if ref not in coming]

    def drop(self, number: int) -> Actor:
        actor = self.actors.pop(number)
        if actor.coming is None:
            self.lost += 1
            self.past.append(actor)
        ray.kill(actor.handle)
        return actor

    def want(self, count: int, busy: Collection[int]) -> None:
        """Change of the number of actors; those that have nothing to do and are too many end."""
        self._wanted = replace(self._wanted, count=count)
        for number in [number for number in self.actors if number not in busy][max(count - len(busy), 0) :]:
            actor = self.actors.pop(number)
            if actor.coming is None:
                self.past.append(actor)
            ray.kill(actor.handle)

    def end(self) -> None:
        for actor in self.actors.values():
            ray.kill(actor.handle)

    def _begin(self) -> None:
        """First actors; returns when all that can start soon are prepared."""
        nodes = nodes_of(ray.nodes())
        if self._wanted.gpu is None:
            self._wanted = replace(self._wanted, gpu=any(node.gpus >= 1 for node in nodes.values()))
        small = too_small(nodes, self._wanted)
        self.fill()
        if not self.actors:
            kind = "GPUs" if self._wanted.gpu else f"{self._wanted.threads} free cores"
            raise ValueError("; ".join(small) or f"no node of the Ray cluster has {kind} for an actor")
        for sentence in small:
            self._progress(Caution(f"{sentence}; it is left out"))
        if not self._await_starts():
            free = ray.available_resources().get("GPU" if self._wanted.gpu else "CPU", 0)
            raise ValueError(
                f"no actor could start within {LATEST:.0f} s: of the Ray cluster's "
                f"{'GPUs' if self._wanted.gpu else 'cores'} {free:g} are free; other jobs have the rest, or its nodes "
                "are too busy to start a process in that time"
            )
        while preparing := [ref for ref, n in self.coming().items() if self.actors[n].fingerprint]:
            self._step(preparing, None)
        self._tell()

    def _await_starts(self) -> bool:
        """The wait for actors: START seconds for all of them, LATEST for a first one; whether one has started."""
        began, told = time.monotonic(), False
        while unknown := [ref for ref, n in self.coming().items() if not self.actors[n].fingerprint]:
            started, waited = len(unknown) < len(self.actors), time.monotonic() - began
            if waited >= (START if started else LATEST):
                return started
            if waited >= START and not told:
                told = True
                self._progress(Caution(f"no actor has started in {START:.0f} s; waiting for up to {LATEST:.0f} s"))
            self._step(unknown, (LATEST if told else START) - waited)
        return True

    def _step(self, refs: list[Any], timeout: float | None) -> None:
        numbers = self.coming()
        for ref in ray.wait(refs, num_returns=1, timeout=timeout)[0]:
            node = self.actors[numbers[ref]].node
            if why := self._advance(numbers[ref]):
                raise ValueError(
                    f"node {node.name} of the Ray cluster cannot work on this {self._kind.works_on}: it {why}"
                )

    def _advance(self, number: int) -> str:
        """Takes what a coming actor has told; what is wrong with it, or ""."""
        actor = self.actors[number]
        try:
            told: bytes = ray.get(actor.coming)
        except ray.exceptions.RayError as error:
            return f"could not start an actor: {_last_line(error)}"
        if not actor.fingerprint:
            measured = json.loads(told)
            if "broken" in measured:
                return f"could not start an actor: {measured['broken']}"
            if why := version_difference(self._ours, measured["fingerprint"]):
                return why
            actor.fingerprint, actor.coming = measured["fingerprint"], actor.handle.prepare.remote()
            return ""
        if told:
            return f"could not prepare the {self._kind.works_on}: {told.decode()}"
        actor.coming = None
        return ""

    def _start(self, node: Node) -> None:
        remote: Any = ray.remote(self._kind)
        handle = remote.options(
            num_cpus=self._wanted.threads,
            num_gpus=int(bool(self._wanted.gpu)),
            memory=self._wanted.memory or None,
            max_restarts=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
        ).remote(self._starting)
        self.actors[self._number] = Actor(node, handle, handle.fingerprint.remote())
        self._number += 1

    def _tell(self) -> None:
        counts = Counter(self.actors[number].node.name for number in self.ready)
        each = ", ".join(f"{count} on {name}" for name, count in counts.items())
        count = len(self.ready)
        self._progress(Note(f"Ray: {count} actor{'' if count == 1 else 's'}, {each}"))
        for name, values in self.differences().items():
            some = ", ".join(values[:4]) + (f" and {len(values) - 4} more" if len(values) > 4 else "")
            self._progress(Caution(f"nodes differ in {name}: {some}; {self._kind.inexact}"))


def _last_line(error: Exception) -> str:
    """The last line of an error that says something: Ray's begin with its own account of what happened."""
    lines: Iterator[str] = (line.strip() for line in reversed(str(error).splitlines()))
    return next((line for line in lines if line), type(error).__name__)[:300]


def reason_of_loss(error: Exception) -> str:
    """Why an actor was lost, in a few words: Ray's texts are pages long."""
    reasons: tuple[tuple[type[Exception], str], ...] = (
        (ray.exceptions.OutOfMemoryError, "its node ran out of memory"),
        (ray.exceptions.ActorUnavailableError, "it cannot be reached"),
        (ray.exceptions.NodeDiedError, "its node is gone"),
        (ray.exceptions.ActorDiedError, "its process has ended"),
        (ray.exceptions.ObjectLostError, "gone with its node"),
    )
    return next((words for kind, words in reasons if isinstance(error, kind)), type(error).__name__)

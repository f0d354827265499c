"""Asynchronous rounds across machines: which sites train, with which model, and whose updates have come.

What :class:`confed.engines.buffered.Arrivals` draws in the simulator happens here: M connected sites train at any time,
a site that has answered makes room for another, and a step is made of the first K updates. Sites that are lost on the
way or take too long drop out of the buffer, not out of the run: they begin anew with the current model.
"""

import shutil
import tempfile
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from random import Random

from confed.engines.buffered import Arrival, Buffered, begun_call, without_earlier
from confed.engines.perform import Setup
from confed.engines.remote.server import Remote
from confed.engines.remote.sites import PendingCall, SiteBatch
from confed.federation.messages import Call
from confed.federation.randomness import derive
from confed.federation.state import ServerState

BUSY = "it trains, and asynchronous rounds do not wait for it"  # why a site in training is not evaluated


@dataclass
class _Training:
    number: int
    version: int
    batch: SiteBatch


class SiteArrivals:
    """Updates of sites in the order in which they arrive; see :class:`confed.engines.buffered.UpdateSource`."""

    def __init__(self, remote: Remote, setup: Setup, settings: Buffered, concurrency: int) -> None:
        self.settings, self.concurrency = settings, concurrency
        self._remote, self._setup = remote, setup
        self._names = [setup.population.info(number).id for number in range(len(setup.population))]
        self._random = Random(derive(setup.seed, 0, "", "arrivals"))
        self._spool = tempfile.mkdtemp(prefix="confed-arrivals-", dir=remote.spool)
        weakref.finalize(self, shutil.rmtree, self._spool, ignore_errors=True)
        self._training: dict[str, _Training] = {}
        self._arrived: dict[str, tuple[PendingCall, Path]] = {}
        self._rounds: dict[int, tuple[tuple[Arrival, ...], float]] = {}
        self._round, self._server = 0, ServerState(0, {})
        self._began = time.monotonic()
        remote.fill = self._fill

    def offer(self, round: int, server: ServerState) -> None:
        """The model that sites begin with from now on; the last round's replies are no longer needed."""
        self._round, self._server = round, without_earlier(server)[0]
        for _, path in self._arrived.values():
            shutil.rmtree(path.parent, ignore_errors=True)
        self._arrived.clear()

    def __getitem__(self, round: int) -> tuple[Arrival, ...]:
        """The updates of the step that ends a round, in the order of the clients' numbers; waits for them."""
        if round not in self._rounds:
            arrivals, pauses = list[Arrival](), self._remote.pauses()
            while len(arrivals) < self.settings.size:
                arrivals += self._collect(self.settings.size - len(arrivals))
                if len(arrivals) < self.settings.size:
                    pauses.sleep()
            if round + 1 == self._setup.rounds:  # nobody waits for what is on its way
                for training in self._training.values():
                    self._remote.forget(training.batch)
                self._training.clear()
            self._rounds = {round: (tuple(sorted(arrivals)), time.monotonic() - self._began)}
        return self._rounds[round][0]

    def needed(self, rounds: int) -> frozenset[int]:
        """Versions that sites train with now."""
        return frozenset(training.version for training in self._training.values())

    def clock(self, round: int) -> float:
        """Seconds from the start of the server to the last update of a round."""
        self[round]
        return self._rounds[round][1]

    def _collect(self, most: int) -> list[Arrival]:
        """Updates that have come since the last look, and new work for sites without any."""
        self._remote.sites.look()
        self._begin()
        arrivals: list[Arrival] = []
        for name, training in list(self._training.items()):
            if len(arrivals) == most:
                break
            self._remote.step(training.batch)
            if 0 not in training.batch.done:
                continue
            ask, result = training.batch.done.pop(0)
            del self._training[name]
            if isinstance(result, str):  # lost on the way, or too late
                shutil.rmtree(training.batch.spool, ignore_errors=True)
                continue
            self._arrived[name] = ask, result
            arrivals.append(Arrival(training.number, training.version, time.monotonic() - self._began))
            self._begin()
        return arrivals

    def _begin(self) -> None:
        """Connected sites begin, in random order, as long as fewer than M are training."""
        lines = self._remote.sites.lines
        taken = self._training.keys() | self._arrived.keys()
        free = [n for n, name in enumerate(self._names) if name in lines and name not in taken]
        room = max(self.concurrency - len(self._training), 0)
        for number in self._random.sample(free, min(room, len(free))):
            client = self._setup.population.info(number)
            call = begun_call(self._setup.algorithm, self._server, client)
            spool = Path(tempfile.mkdtemp(dir=self._spool))
            batch = SiteBatch([call], self._round, spool=spool, optional=True)
            self._training[client.id] = _Training(number, self._round, batch)
            self._remote.step(batch)

    def _fill(self, batch: SiteBatch) -> None:
        """What has come already is the outcome of calls for it; sites in training are not asked for anything else."""
        for position in list(batch.waiting):
            call = batch.calls[position]
            if (outcome := self._outcome(call)) is not None:
                batch.waiting.remove(position)
                batch.done[position] = outcome

    def _outcome(self, call: Call) -> tuple[PendingCall, Path | str] | None:
        name = call.client.id
        if name in self._training:
            batch = self._training[name].batch
            pending = batch.running[0] if 0 in batch.running else batch.done[0][0]
            return PendingCall(call, pending.request), BUSY
        if name in self._arrived and self._arrived[name][0].call.action == call.action:
            return self._arrived[name]
        return None

"""Asynchronous rounds across machines: sites of different speed, stale updates, lost sites, bounds, refusals."""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from confed.algorithms.fedavg import FedAvg
from confed.algorithms.scaffold import Scaffold
from confed.engines.buffered import Buffered
from confed.engines.local import InProcess, RoundRecord, Simulation, simulate
from confed.engines.perform import Setup
from confed.engines.remote.arrivals import BUSY, SiteArrivals
from confed.engines.remote.protocol import HELLO
from confed.engines.remote.server import Remote
from confed.engines.remote.sites import Timeouts
from confed.engines.remote.update_bounds import Bounds
from confed.federation.algorithm import Algorithm, action, keeps_protections
from confed.federation.client import Client
from confed.federation.messages import Message, Reply
from confed.federation.state import MemoryStore
from confed.federation.update_privacy import STATISTICS
from confed.testing.toy import toy_clients, toy_setup
from memory_transport import CLIENTS, Letters

PATIENT = Timeouts(deadline=30.0, away=0.01, interval=1e-5)


@dataclass(frozen=True)
class Adds(Algorithm):
    """Every client adds a number of its own to all shared values; equal weights."""

    @keeps_protections("robust")
    def weight(self, reply: Reply) -> float:
        return 1.0

    @action
    def fit(self, client: Client, message: Message) -> Message:
        own = float(int(client.info.id[-1]) + 1)
        tensors = {n: t + own if t.is_floating_point() else t for n, t in message.tensors.items()}
        return Message(tensors, {"loss": own})


class Slow(Letters):
    """A post whose sites take so many looks at the reply to a training call as a test says."""

    def __init__(self, setup: Setup, root: Path, ticks: dict[int, int]) -> None:
        super().__init__(setup, root)
        self.ticks, self.looks = ticks, dict[str, int]()

    def receive(self, sent: str) -> tuple[bytes, bytes] | str | None:
        to, kind, _, _ = self.sent[int(sent)]
        self.looks[sent] = self.looks.get(sent, 0) + 1
        if kind not in (HELLO, "evaluate") and self.looks[sent] < self.ticks.get(to, 1):
            return None
        return super().receive(sent)


Watch = Callable[[Simulation, RoundRecord], None]


def _run(
    algorithm: Algorithm, settings: Buffered, root: Path, ticks: dict[int, int], rounds: int = 8,
    watch: Watch = lambda simulation, record: None, bounds: Bounds | None = None, timeouts: Timeouts = PATIENT,
) -> tuple[list[RoundRecord], Slow, Remote]:  # fmt: skip
    setup = replace(toy_setup(algorithm, clients=toy_clients(sizes=(8, 8, 8))), rounds=rounds)
    letters = Slow(setup, root, ticks)
    remote = Remote(setup, letters, timeouts=timeouts, bounds=bounds)
    remote.sites.gather(CLIENTS, wait=5)
    simulation = Simulation(setup, MemoryStore(), remote, lenient=True, buffered=settings)
    simulation.attempt = remote.attempt
    simulation.arrivals = SiteArrivals(remote, setup, settings, len(CLIENTS))
    records: list[RoundRecord] = []
    for record in simulate(simulation, simulation.start(InProcess(setup).workspace)):
        records.append(record)
        watch(simulation, record)
    return records, letters, remote


def test_a_step_is_the_mean_of_scaled_updates_that_came(tmp_path: Path) -> None:
    settings = Buffered(2, staleness=0.7)
    records, letters, _ = _run(Adds(), settings, tmp_path, {0: 1, 1: 3, 2: 20}, rounds=12)
    value, first = 0.0, records[0].servers["main"].params
    steps: dict[str, int] = {}
    start = 0.0
    for record in records:
        assert len(record.staleness) == 2
        value += sum((int(c[-1]) + 1) * (1 + s) ** -0.7 for c, s in record.staleness.items()) / 2
        start = value if record.round == 1 else start
        for name, tensor in record.servers["main"].params.items():
            if tensor.is_floating_point() and not name.endswith(STATISTICS):
                moved = tensor - first[name]
                assert torch.allclose(moved, torch.full_like(tensor, value - start), atol=1e-4), (record.round, name)
        for client in record.staleness:
            steps[client] = steps.get(client, 0) + 1
    assert steps["client-0"] > steps["client-2"] > 0
    assert max(s for record in records for s in record.staleness.values()) >= 3
    assert all(one.clock < other.clock for one, other in itertools.pairwise(records))  # type: ignore[operator]
    assert not [slot for slot in records[-1].servers["main"].slots if slot.startswith("earlier")]
    assert letters.forgotten  # what was on its way at the end is not waited for


def test_equal_sites_and_a_buffer_of_all_make_synchronous_rounds(tmp_path: Path) -> None:
    setup = replace(toy_setup(FedAvg(), clients=toy_clients(sizes=(8, 8, 8))), rounds=3)
    records, _, _ = _run(FedAvg(), Buffered(3), tmp_path, {}, rounds=3)
    simulation = Simulation(setup, MemoryStore())
    plain = list(simulate(simulation, simulation.start(InProcess(setup).workspace)))
    assert all(set(record.staleness.values()) == {0} for record in records)
    for one, other in zip(records, plain, strict=True):
        for name, tensor in one.servers["main"].params.items():
            assert torch.equal(tensor, other.servers["main"].params[name]), (one.round, name)


def test_sites_in_training_are_not_waited_for_by_evaluations(tmp_path: Path) -> None:
    left: list[dict[str, str]] = []

    def evaluate(simulation: Simulation, record: RoundRecord) -> None:
        found = simulation.evaluate(record.servers, record.round, split="validation")
        assert found["global"].keys() == set(CLIENTS) - simulation.unanswered.keys()
        left.append(dict(simulation.unanswered))

    _run(FedAvg(), Buffered(2), tmp_path, {2: 40}, rounds=3, watch=evaluate)
    assert left[0] == {"client-2": BUSY}
    assert left[-1] == {}  # after the last round nobody trains


def test_a_site_that_was_away_begins_with_the_current_model(tmp_path: Path) -> None:
    def disturb(simulation: Simulation, record: RoundRecord) -> None:
        letters: Slow = simulation.executor.sites.transport  # type: ignore[union-attr]
        if record.round == 2:
            del letters.since[2]  # in the middle of its training
        if record.round in (3, 4):
            time.sleep(3 * PATIENT.away)  # rounds of a fast machine may be over before a site counts as gone
        if record.round == 5:
            letters.since[2], letters.ticks[2] = "2", 1

    records, _, remote = _run(Adds(), Buffered(2), tmp_path, {2: 10**9}, rounds=12, watch=disturb)
    of_last = [(record.round, record.staleness["client-2"]) for record in records if "client-2" in record.staleness]
    assert of_last
    assert of_last[0][0] > 5
    assert of_last[0][1] <= 1  # not what it had begun with in the first round
    assert not any(record.errors for record in records)
    assert remote.sites.status["client-2"].note


def test_a_site_that_is_too_late_begins_anew(tmp_path: Path) -> None:
    patience = replace(PATIENT, deadline=0.2)
    records, letters, _ = _run(Adds(), Buffered(1), tmp_path, {0: 2000, 2: 10**9}, rounds=6, timeouts=patience)
    assert all("client-2" not in record.staleness for record in records)
    assert letters.forgotten


def test_a_server_that_starts_again_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    before, _, _ = _run(Adds(), Buffered(2), tmp_path, {2: 15}, rounds=9)
    kept = before[3].servers  # with the model that client 2 had begun with, which nobody trains with any more
    assert any(slot.startswith("earlier") for slot in kept["main"].slots)
    setup = replace(toy_setup(Adds(), clients=toy_clients(sizes=(8, 8, 8))), rounds=9)
    remote = Remote(setup, Slow(setup, tmp_path, {2: 15}), timeouts=PATIENT)
    remote.sites.gather(CLIENTS, wait=5)
    remote.begin(4, (4,))
    simulation = Simulation(setup, MemoryStore(), remote, lenient=True, buffered=Buffered(2))
    simulation.attempt = remote.attempt
    simulation.arrivals = SiteArrivals(remote, setup, Buffered(2), len(CLIENTS))
    records = list(simulate(simulation, kept, 4))
    assert [record.round for record in records] == [5, 6, 7, 8, 9]
    for record in records:
        assert not record.errors
        assert all(record.round - 1 - staleness >= 4 for staleness in record.staleness.values())


def test_updates_that_go_too_far_are_scaled_down_in_a_buffer(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Greedy(Adds):
        """Client 2 moves a hundred times further."""

        @action
        def fit(self, client: Client, message: Message) -> Message:
            own = 300.0 if client.info.id == "client-2" else 1.0
            tensors = {n: t + own if t.is_floating_point() else t for n, t in message.tensors.items()}
            return Message(tensors, {"loss": 0.0})

    records, _, remote = _run(Greedy(), Buffered(3), tmp_path, {}, rounds=1, bounds=Bounds(update=10.0))
    assert "300" in remote.shortened["client-2"] or "scaled down" in remote.shortened["client-2"]
    assert not records[0].errors


def test_a_site_s_error_takes_a_place_in_the_buffer(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Fails(Adds):
        """Client 1 cannot."""

        @action
        def fit(self, client: Client, message: Message) -> Message:
            if client.info.id == "client-1":
                raise ValueError("no data today")
            return super().fit(client, message)

    records, _, _ = _run(Fails(), Buffered(3), tmp_path, {}, rounds=2)
    assert [list(record.errors) for record in records] == [["client-1"], ["client-1"]]


def test_methods_that_need_synchronous_rounds_are_refused(tmp_path: Path) -> None:
    assert Scaffold().traits.synchronous
    with pytest.raises(ValueError, match=r"run\.async\.buffer must be 0 for SCAFFOLD, got 2: "):
        _run(Scaffold(), Buffered(2), tmp_path, {})

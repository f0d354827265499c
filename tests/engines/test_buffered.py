"""Asynchronous rounds: which updates arrive when, what they become, and what is refused."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from confed.algorithms.central import Central
from confed.algorithms.fedavg import FedAvg
from confed.algorithms.local import LocalOnly
from confed.algorithms.scaffold import Scaffold
from confed.engines.buffered import Arrivals, Buffered, _corrected
from confed.engines.local import InProcess, RoundRecord, Simulation, Workspace, simulate
from confed.engines.participation import Participation
from confed.engines.workers import Workers
from confed.federation.algorithm import Algorithm, action, keeps_protections
from confed.federation.client import Client
from confed.federation.client_info import ClientInfo
from confed.federation.messages import Call, Message, Reply
from confed.federation.secure_sum import SecureSum
from confed.federation.state import MemoryStore, Store
from confed.federation.update_privacy import STATISTICS
from confed.testing.toy import toy_clients, toy_setup


class People:
    """A population without data."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def info(self, number: int) -> ClientInfo:
        return ClientInfo(f"client-{number}", self.sizes[number])

    def data(self, client_id: str) -> None:
        raise AssertionError(client_id)


def test_equal_delays_alternate_between_two_halves() -> None:
    # Two of four clients train at a time, each for one unit, and a step is made of two updates.
    arrivals = Arrivals(Buffered(2, delays="equal"), People(1, 1, 1, 1), 2, seed=0)
    first, second = arrivals[0], arrivals[1]
    assert {a.version for a in first} == {0}
    assert [a.time for a in (*first, *second)] == [1.0, 1.0, 2.0, 2.0]
    # The second pair began when the first client finished, before the first step was made, or right at it.
    assert {a.client for a in second}.isdisjoint(a.client for a in first)
    assert all(a.version == 0 for a in second)
    assert {a.version for a in arrivals[2]} <= {1, 2}


def test_a_client_trains_once_at_a_time_and_is_in_a_buffer_once() -> None:
    arrivals = Arrivals(Buffered(4), People(*[1] * 9), 5, seed=3)
    free_from: Counter[int] = Counter()
    for round in range(60):
        clients = [a.client for a in arrivals[round]]
        assert clients == sorted(set(clients))
        assert len(clients) == 4
        for a in arrivals[round]:
            assert free_from[a.client] <= a.version <= round  # begins after the step that took its last update
            free_from[a.client] = round + 1


def test_versions_in_training_are_needed_later() -> None:
    arrivals = Arrivals(Buffered(2, delays="exponential"), People(*[1] * 12), 6, seed=1)
    rounds = 80
    for finished in range(1, rounds - 40):
        later = {a.version for round in range(finished, rounds) for a in arrivals[round] if a.version < finished}
        assert later <= arrivals.needed(finished)


def test_mean_staleness_is_what_the_concurrency_implies() -> None:
    # Little's law: M clients in training and K of them per step leave after M / K steps on average, the last not whole.
    arrivals = Arrivals(Buffered(5, delays="exponential"), People(*[1] * 2000), 40, seed=5)
    staleness = [round - a.version for round in range(100, 1100) for a in arrivals[round]]
    assert sum(staleness) / len(staleness) == pytest.approx(40 / 5, abs=0.5)


def test_delays_by_examples_follow_the_sizes() -> None:
    arrivals = Arrivals(Buffered(1, delays="examples"), People(10, 1000), 2, seed=0)
    counts = Counter(a.client for round in range(30) for a in arrivals[round])
    assert counts[0] > counts[1]


# What an update becomes -----------------------------------------------------------------------------------------


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
        return Message(tensors, {"loss": 0.0})


def _run(
    algorithm: Algorithm, buffered: Buffered, rounds: int, concurrency: int | None = None, workers: int = 1
) -> list[RoundRecord]:
    setup = replace(toy_setup(algorithm, clients=toy_clients(sizes=(8, 12, 8, 16, 8))), rounds=rounds)
    executor = InProcess(setup) if workers == 1 else Workers(setup, workers)
    with Simulation(setup, MemoryStore(), executor, concurrency, buffered=buffered) as simulation:
        return list(simulate(simulation, simulation.start(Workspace(setup.build()))))


def test_a_step_is_the_mean_of_scaled_updates_of_older_models() -> None:
    rounds, settings = 12, Buffered(2, staleness=0.7)
    records = _run(Adds(), settings, rounds, concurrency=4)
    arrivals = Arrivals(settings, People(8, 12, 8, 16, 8), 4, seed=toy_setup(Adds()).seed)
    value, stale = 0.0, 0
    for round, record in enumerate(records):
        # Independent of the models: an update is the client's number plus 1, whatever it began with.
        value += sum((a.client + 1) * (1 + round - a.version) ** -0.7 for a in arrivals[round]) / 2
        stale += sum(a.version < round for a in arrivals[round])
        start = toy_start(records)
        for name, tensor in record.servers["main"].params.items():
            if tensor.is_floating_point() and not name.endswith(STATISTICS):
                assert torch.allclose(tensor - start[name], torch.full_like(tensor, value), atol=1e-4), (round, name)
    assert stale > 5  # or the test would say nothing
    assert record.clock == arrivals.clock(rounds - 1)
    assert not [slot for slot in records[-1].servers["main"].slots if slot.startswith("earlier")]


def toy_start(records: Sequence[RoundRecord]) -> dict[str, Tensor]:
    """The initial values of the toy model."""
    setup = toy_setup(Adds(), clients=toy_clients(sizes=(8, 12, 8, 16, 8)))
    names = records[0].servers["main"].params
    return {name: tensor for name, tensor in Workspace(setup.build()).initial.items() if name in names}


def test_stale_clients_are_sent_the_model_that_they_began_with() -> None:
    seen: list[tuple[int, str, dict[str, Tensor]]] = []

    class Listening(InProcess):
        def __call__(self, calls: Sequence[Call], store: Store, round: int) -> Iterator[Reply]:
            seen.extend((round, call.client.id, dict(call.message.tensors)) for call in calls)
            return super().__call__(calls, store, round)

    setup = replace(toy_setup(FedAvg(), clients=toy_clients(sizes=(8, 12, 8, 16, 8))), rounds=6)
    with Simulation(setup, MemoryStore(), Listening(setup), 4, buffered=Buffered(1)) as simulation:
        servers = simulation.start(Workspace(setup.build()))
        models = [servers["main"].params]
        staleness: list[dict[str, int]] = []
        for record in simulate(simulation, servers):
            models.append(record.servers["main"].params)
            staleness.append(dict(record.staleness))
    assert any(behind for round in staleness for behind in round.values())
    for round, client, tensors in seen:
        began = models[round - staleness[round][client]]
        assert all(torch.equal(tensor, began[name]) for name, tensor in tensors.items())


def test_worker_processes_give_the_bits_of_asynchronous_rounds() -> None:
    one, two = (_run(FedAvg(), Buffered(2), 4, concurrency=3, workers=workers) for workers in (1, 2))
    assert [r.losses for r in one] == [r.losses for r in two]
    last = one[-1].servers["main"].params
    assert all(torch.equal(last[name], tensor) for name, tensor in two[-1].servers["main"].params.items())


# What is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "why"),
    [
        (Central(), "all data are in one place"),
        (LocalOnly(), "its clients send nothing"),
        (Scaffold(), "its control variates belong to the model"),
        (FedAvg(secure_sum=SecureSum()), "leave algorithm.secure_sum out"),
    ],
)
def test_methods_without_asynchronous_rounds_say_why(algorithm: Algorithm, why: str) -> None:
    with pytest.raises(ValueError, match=rf"run\.async\.buffer must be 0 for .*, got 2: .*{why}"):
        Simulation(toy_setup(algorithm), MemoryStore(), buffered=Buffered(2))


def test_a_buffer_larger_than_the_population_is_refused() -> None:
    with pytest.raises(ValueError, match=r"run\.async\.buffer must be at most the number of clients, 3, .* got 4"):
        Simulation(toy_setup(FedAvg()), MemoryStore(), buffered=Buffered(4))


def test_late_clients_are_refused_in_asynchronous_rounds() -> None:
    late = Participation(joins={"client-1": 2})
    with pytest.raises(ValueError, match=r"run\.async\.buffer must be 0 together with run\.joins"):
        Simulation(toy_setup(FedAvg()), MemoryStore(), participation=late, buffered=Buffered(2))


def test_running_statistics_stay_between_old_and_new_values() -> None:
    scale, reply = 0.5, Message({"norm.running_var": torch.tensor([0.01]), "w": torch.tensor([3.0])})
    began = Message({"norm.running_var": torch.tensor([1.0]), "w": torch.tensor([1.0])})
    now = Message({"norm.running_var": torch.tensor([0.02]), "w": torch.tensor([10.0])})
    found = _corrected(reply, began, now, scale, ())
    assert found["norm.running_var"].item() == pytest.approx(0.015)  # not 0.02 + 0.5 (0.01 - 1)
    assert found["w"].item() == pytest.approx(11.0)


def test_a_state_without_earlier_models_is_refused() -> None:
    setup = replace(toy_setup(FedAvg(), clients=toy_clients(sizes=(8, 12, 8, 16, 8))), rounds=6)
    with Simulation(setup, MemoryStore(), InProcess(setup), 4, buffered=Buffered(1)) as simulation:
        servers = simulation.start(Workspace(setup.build()))
        with pytest.raises(ValueError, match=r"asynchronous round 4: client '.*' began with the model of round"):
            list(simulate(simulation, servers, start=3))

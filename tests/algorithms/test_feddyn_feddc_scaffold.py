"""FedDyn, FedDC and SCAFFOLD: against NumPy on quadratics, where optima are known, and by what must stay true."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from confed.algorithms.fedavg import FedAvg
from confed.algorithms.feddc import FedDC
from confed.algorithms.feddyn import FedDyn
from confed.algorithms.scaffold import Scaffold
from confed.data.examples import TableData
from confed.engines.local import InProcess, Members, RoundRecord, Setup, Simulation, simulate
from confed.federation.algorithm import Algorithm
from confed.federation.client_info import ClientInfo
from confed.federation.local import Local, Schedule
from confed.federation.messages import Call, Message, Reply
from confed.federation.params import Scope
from confed.federation.protocols import Batch, Output
from confed.federation.randomness import sample_cohort
from confed.federation.state import MemoryStore, ServerState
from confed.testing.toy import toy_clients, toy_model, toy_setup
from quadratics import Array, Bowl, Same
from toy_runs import simulated

STEPS, RATE = 5, 0.1
SGD = Local(epochs=STEPS, batch_size=100, lr=RATE, optimizer="sgd", weight_decay=0.0)


class Point(nn.Module):
    """A point in the plane, which is all there is to learn."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.tensor([[2.0, -1.0]]))

    def forward(self, batch: Batch) -> Output:
        here = self.theta.expand(len(batch["a"]), 2)
        return Output(here, here)


A = np.array([[1.0, 3.0], [4.0, 0.5], [2.0, 2.0]])
B = np.array([[0.0, 1.0], [1.0, -2.0], [-1.0, 0.5]])
SIZES = (2, 3, 7)
START = np.array([2.0, -1.0])


def bowls(method: Algorithm, rounds: int, local: Local = SGD, clients: int = 3, equal: bool = False) -> Setup:
    sizes = (4, 4, 4) if equal else SIZES
    members = Members({f"client-{k}": Same(A[k], B[k], sizes[k]) for k in range(clients)})
    return Setup(method.configure(Point(), Bowl()), members, Bowl(), local, Point, rounds)


def path(records: list[RoundRecord]) -> Array:
    return np.array([r.servers["main"].params["theta"][0].numpy() for r in records], dtype=np.float64)


def gradient(k: int, theta: Array) -> Array:
    return A[k] * (theta - B[k])


def shares(cohort: list[int]) -> dict[int, float]:
    """N_k / mean N of the cohort's clients, with the mean over all three, as in the authors' code."""
    return {k: SIZES[k] * 3 / sum(SIZES) for k in cohort}


# Against NumPy --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cohort", [3, 2])
def test_feddyn_step_by_step(cohort: int) -> None:
    alpha, rounds = 0.3, 6
    records, store, _ = simulated(bowls(FedDyn(alpha), rounds), cohort)
    w, h = START, np.zeros((3, 2))
    for number in range(rounds):
        chosen, ends = sample_cohort(3, cohort, 0, number), []
        for k in chosen:
            theta, weight = w, alpha / shares(chosen)[k]
            for _ in range(STEPS):
                # The authors' form: the loss has alpha <theta, h - w>, and weight decay adds alpha theta.
                theta = theta - RATE * (gradient(k, theta) + weight * (h[k] - w) + weight * theta)
            h[k] += theta - w
            ends.append(theta)
        w = np.mean(ends, axis=0) + h.mean(axis=0)
        assert path(records)[number] == pytest.approx(w, abs=1e-5)
    for k in range(3):
        assert store.load(f"client-{k}").tensors["drift"]["theta"][0].numpy() == pytest.approx(h[k], abs=1e-5)


@pytest.mark.parametrize("cohort", [3, 2])
@pytest.mark.parametrize("correction", ["auto", "off"])
def test_feddc_step_by_step(cohort: int, correction: str) -> None:
    alpha, rounds = 0.2, 6
    records, store, _ = simulated(bowls(FedDC(alpha, correction), rounds), cohort)  # pyright: ignore[reportArgumentType]
    w, h, own, cloud = START, np.zeros((3, 2)), np.zeros((3, 2)), np.zeros(2)
    for number in range(rounds):
        chosen, ends, change = sample_cohort(3, cohort, 0, number), [], np.zeros(2)
        for k, share in shares(chosen).items():
            theta, everyone = w, cloud / share
            for _ in range(STEPS):
                slope = gradient(k, theta) + alpha / share * (theta - (w - h[k]))
                if correction == "auto":
                    slope = slope - own[k] + everyone
                theta = theta - RATE * slope
            delta = theta - w
            h[k] += delta
            new = own[k] - everyone - delta / (STEPS * RATE)
            change += (new - own[k]) * share
            own[k] = new
            ends.append(theta)
        assert len(chosen) == cohort
        cloud = cloud + change / 3
        w = np.mean(ends, axis=0) + h.mean(axis=0)
        assert path(records)[number] == pytest.approx(w, rel=1e-4, abs=1e-4)
    if correction == "auto":
        slots = records[-1].servers["main"].slots
        assert slots["gradient"]["theta"][0].numpy() / 3 == pytest.approx(cloud, rel=1e-3, abs=1e-3)
        assert store.load("client-2").tensors["gradient"]["theta"][0].numpy() == pytest.approx(own[2], abs=1e-3)
    else:
        assert "gradient" not in store.load("client-2").tensors


@pytest.mark.parametrize("cohort", [3, 2])
@pytest.mark.parametrize("option", ["auto", "gradient"])
def test_scaffold_step_by_step(cohort: int, option: str) -> None:
    rounds = 6
    records, store, _ = simulated(bowls(Scaffold(option), rounds), cohort)  # pyright: ignore[reportArgumentType]
    w, variate, mean = START, np.zeros((3, 2)), np.zeros(2)
    for number in range(rounds):
        chosen, ends, change = sample_cohort(3, cohort, 0, number), [], []
        for k in chosen:
            theta = w
            for _ in range(STEPS):
                theta = theta - RATE * (gradient(k, theta) - variate[k] + mean)
            new = variate[k] - mean + (w - theta) / (STEPS * RATE) if option == "auto" else gradient(k, w)
            change.append(new - variate[k])
            variate[k] = new
            ends.append(theta)
        w = np.mean(ends, axis=0)
        mean = mean + len(chosen) / 3 * np.mean(change, axis=0)
        assert path(records)[number] == pytest.approx(w, abs=1e-5)
    for k in range(3):
        assert store.load(f"client-{k}").tensors["variate"]["theta"][0].numpy() == pytest.approx(variate[k], abs=1e-4)
    assert records[-1].servers["main"].slots["variate"]["theta"][0].numpy() / 3 == pytest.approx(mean, abs=1e-4)


# Limiting cases -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [FedDyn(1.0), FedDC(0.5)], ids=["feddyn", "feddc"])
def test_a_cohort_of_unequal_clients_reaches_the_optimum(method: Algorithm) -> None:
    """Two of three clients a round: only with shares over all clients is the optimum of sum N_k f_k a fixed point."""

    class Exact(Point):
        def __init__(self) -> None:
            super().__init__()
            self.theta = nn.Parameter(self.theta.detach().double())

    class ExactSame(Same):
        def __init__(self, a: Array, b: Array, size: int) -> None:
            super().__init__(a, b, size)
            self.batch |= {name: torch.tensor(value).expand(size, 2) for name, value in (("a", a), ("b", b))}

    members = Members({f"client-{k}": ExactSame(A[k], B[k], SIZES[k]) for k in range(3)})
    method = replace(method, accumulator="float64").configure(Exact(), Bowl())
    records, _, _ = simulated(Setup(method, members, Bowl(), SGD, Exact, 180), cohort=2)
    weight = np.array(SIZES)[:, None] * A
    optimum = (weight * B).sum(axis=0) / weight.sum(axis=0)
    assert path(records)[-1] == pytest.approx(optimum, abs=1e-10)


def test_feddc_corrects_under_a_schedule() -> None:
    """Equal slopes everywhere: g_k is that slope, whatever the rates of the steps were."""

    class Slope(Bowl):
        def loss(self, output: Output, batch: Batch) -> Tensor:
            return (batch["b"] * output.logits).sum(dim=1).mean()

    local = replace(SGD, schedule=Schedule("cosine", warmup=0.2))
    setup = replace(bowls(FedDC(0.0), 1, local), task=Slope())
    _, store, _ = simulated(setup)
    for k in range(3):
        # After the first round g_k = -Delta / (sum of rates) = b; with S eta it would be a fraction of it.
        assert store.load(f"client-{k}").tensors["gradient"]["theta"][0].numpy() == pytest.approx(B[k], abs=1e-4)
    _, store, _ = simulated(replace(setup, local=replace(local, momentum=0.9)))
    assert "gradient" not in store.load("client-0").tensors


def test_a_missing_scalar_is_an_error_of_the_protocol() -> None:
    for method in (FedDyn(0.1), FedDC(0.1)):
        setup = bowls(method, 1)
        with Simulation(setup, MemoryStore()) as simulation:
            assert isinstance(simulation.executor, InProcess)
            server = simulation.start(simulation.executor.workspace)["main"]
            info = simulation.clients()[0]
            for scalars, problem in (
                ({}, "the message lacks the scalar 'share'; it has none"),
                ({"share": 0.0}, "scalar 'share' must be a positive finite number, got 0.0"),
                ({"share": float("nan")}, "got nan"),
                ({"share": "x"}, "got 'x'"),
            ):
                message = Message(setup.algorithm.broadcast(server, info).tensors, scalars)
                (reply,) = simulation.executor([Call(info, "fit", message)], simulation.store, 0)
                assert problem in str(reply.error)
            with pytest.raises(ValueError, match="needs the numbers of registered clients and of their examples"):
                next(setup.algorithm.round(server, [info]))


def test_a_reply_without_its_rate_counts_as_failed() -> None:
    method = bowls(FedDC(0.1), 1).algorithm
    server = replace(method.init({"theta": torch.zeros(1, 2)}, {"theta": Scope.SHARED})["main"], clients=2, examples=2)
    sound = Reply(ClientInfo("a", 1), Message({"theta": torch.ones(1, 2)}, {"rate": 2.0}))
    expected = method.aggregate(server, [sound, Reply(ClientInfo("b", 1), Message(), "failed")])
    for rate in ({}, {"rate": "x"}, {"rate": -1.0}):
        bad = Reply(ClientInfo("b", 1), Message({"theta": torch.full((1, 2), 9.0)}, rate))
        after = method.aggregate(server, [sound, bad])
        assert torch.equal(after.params["theta"], expected.params["theta"])
        assert torch.equal(after.slots["gradient"]["theta"], expected.slots["gradient"]["theta"])


@pytest.mark.parametrize(
    ("method", "local"),
    [
        (FedDC(0.1), SGD),
        (FedDC(0.1, "off"), SGD),
        (FedDC(0.1), replace(SGD, momentum=0.9)),
        (FedDC(0.1), replace(SGD, optimizer="adamw")),
    ],
)
def test_one_clients_rate_is_bounded_in_feddcs_gradient(method: FedDC, local: Local) -> None:
    method = replace(method, statistics=())
    start = method.init({"theta": torch.zeros(1, 2)}, {"theta": Scope.SHARED})["main"]
    server = replace(start, clients=2, examples=210, rounds=4, local=local)
    ends = torch.ones(1, 2)
    sound = Reply(ClientInfo("a", 105), Message({"theta": ends}, {"rate": 0.0}))
    expected = method.aggregate(server, [sound, Reply(ClientInfo("b", 105), Message(), "failed")])
    honest = 1 / (2 * STEPS * RATE)  # 105 examples are two batches
    corrected = method.correction == "auto" and local is SGD
    for rate, taken in ((honest, corrected), (9.9 * honest, corrected), (10.1 * honest, False), (1e12, False)):
        after = method.aggregate(
            server, [sound, Reply(ClientInfo("b", 105), Message({"theta": 3 * ends}, {"rate": rate}))]
        )
        assert torch.equal(after.params["theta"], expected.params["theta"]) != taken
        assert ("gradient" in after.slots) == taken
    gone = method._rate(server, Reply(ClientInfo("b", 105), Message({"theta": ends}, {"rate": 1e12})))[0]
    assert str(gone.error).startswith("ValueError: the message's scalar 'rate' must be at most ")


@pytest.mark.parametrize("warmup", [0.0, 1.0])
def test_honest_rates_lie_within_feddcs_bound(warmup: float) -> None:
    clients = toy_clients(sizes=(1, 2, 8, 40))  # with fewer examples than a batch, rates differ by more than ten times
    local = replace(SGD, epochs=1, batch_size=8, lr=0.01, schedule=Schedule(warmup=warmup))
    records, _, _ = simulated(toy_setup(FedDC(0.1), clients=clients, local=local, rounds=2))
    assert not any("'rate'" in str(error) for record in records for error in record.errors.values())
    assert "gradient" in records[-1].servers["main"].slots


@dataclass(frozen=True)
class Overflowing(FedAvg):
    """A method whose server's slot is infinite after the second round."""

    def aggregate(self, server: ServerState, replies: Iterable[Reply]) -> ServerState:
        after = super().aggregate(server, replies)
        return replace(after, slots={"g": {"theta": torch.tensor([1e38]) * (1.0 if after.round == 1 else 10.0)}})


def test_a_server_state_that_is_not_finite_is_not_kept() -> None:
    kept: list[int] = []
    with Simulation(bowls(Overflowing(), 4), MemoryStore()) as simulation:
        assert isinstance(simulation.executor, InProcess)
        records = simulate(simulation, simulation.start(simulation.executor.workspace))
        with pytest.raises(
            RuntimeError, match="server 'main': 'theta' of its g holds a NaN or an infinity after round 2"
        ):
            kept.extend(record.round for record in records)
    assert kept == [1]


# What must stay true --------------------------------------------------------------------------------------------


class Failing(TableData):
    """Fails in every second round."""

    calls = 0

    def train(self, batch_size: int, rng: torch.Generator) -> Iterator[dict[str, Tensor]]:
        self.calls += 1
        if self.calls % 2 == 0:
            raise OverflowError("broken on purpose")
        return super().train(batch_size, rng)


@pytest.mark.parametrize(
    ("method", "slot"),
    [(FedDyn(0.1), "drift"), (FedDC(0.1), "drift"), (Scaffold("steps"), "variate"), (Scaffold(), "variate")],
    ids=repr,
)
def test_the_servers_sum_is_that_of_all_clients(method: Algorithm, slot: str) -> None:
    clients = toy_clients(sizes=(12, 20, 16, 9))
    clients["client-1"] = Failing(*clients["client-1"].tables)
    local = Local(epochs=1, batch_size=8, lr=0.02)
    setup = toy_setup(replace(method, accumulator="float64"), clients=clients, local=local, rounds=6)
    records, store, _ = simulated(setup, cohort=3)
    assert any(record.errors for record in records)
    sums = records[-1].servers["main"].slots[slot]
    states = [store.load(name).tensors.get(slot) for name in clients]
    for name, total in sums.items():
        wanted = torch.stack([s[name] for s in states if s is not None]).sum(dim=0)
        assert torch.allclose(total, wanted, atol=1e-5), name
    # Neither BatchNorm's statistics nor frozen tensors drift.
    learned = [n for n, p in toy_model().named_parameters() if p.requires_grad]
    assert sorted(sums) == sorted(learned)
    assert float(records[-1].servers["main"].params["norm.running_var"].min()) > 0


def test_statistics_are_averaged_and_nothing_else() -> None:
    setup = toy_setup(FedDyn(0.1), rounds=1)
    records, store, _ = simulated(setup)
    personal = [store.load(f"client-{k}").tensors["personal"]["norm.running_mean"] for k in range(3)]
    got = records[-1].servers["main"].params["norm.running_mean"]
    assert torch.allclose(got, torch.stack(personal).mean(dim=0), atol=1e-6)


def test_traffic_of_each_method_is_what_its_paper_sends() -> None:
    records = {m: simulated(toy_setup(m, rounds=2))[0][-1] for m in (FedAvg(), FedDyn(), FedDC(), Scaffold())}
    plain, dyn, dc, scaffold = records.values()
    trained = 4 * sum(p.numel() for p in toy_model().parameters() if p.requires_grad)
    for name, up in plain.bytes_up.items():
        assert 0 <= dyn.bytes_up[name] - up < 100
        assert 0 <= dc.bytes_up[name] - up < 100
        assert trained <= scaffold.bytes_up[name] - up < trained + 1000
        assert trained <= scaffold.bytes_down[name] - plain.bytes_down[name] < trained + 1000


def test_a_round_of_rate_zero_leaves_the_variates_alone() -> None:
    local = replace(SGD, epochs=1, schedule=Schedule(warmup=1.0))  # the first of two rounds has rate 0
    records, store, _ = simulated(bowls(Scaffold("steps"), 2, local))
    assert path(records)[0] == pytest.approx(START)
    assert all(torch.isfinite(store.load(f"client-{k}").tensors["variate"]["theta"]).all() for k in range(3))


def test_a_schedule_is_in_scaffolds_step_length() -> None:
    # With rates eta_s the variate of a client whose gradient is constant is that gradient.
    class Slope(Bowl):
        def loss(self, output: Output, batch: Batch) -> Tensor:
            return (batch["b"] * output.logits).sum(dim=1).mean()

    setup = replace(bowls(Scaffold(), 4, replace(SGD, schedule=Schedule("cosine", warmup=0.2))), task=Slope())
    _, store, _ = simulated(setup)
    for k in range(3):
        assert store.load(f"client-{k}").tensors["variate"]["theta"][0].numpy() == pytest.approx(B[k], abs=1e-4)


def test_methods_that_were_not_configured_say_so() -> None:
    for method in (FedDyn(), FedDC(), Scaffold()):
        setup = replace(toy_setup(FedAvg()), algorithm=method)
        with pytest.raises(RuntimeError, match=r"does not know this model's buffers; call configure\(model, task\)"):
            simulated(setup)

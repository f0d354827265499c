"""Ditto, FedPer, FedRep, FedBN and Per-FedAvg: rounds by hand, and what stays private."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from confed.algorithms.ditto import Ditto
from confed.algorithms.fedavg import FedAvg
from confed.algorithms.fedavg_ft import FedAvgFT
from confed.algorithms.fedbn import FedBN
from confed.algorithms.fedper import FedPer
from confed.algorithms.fedrep import FedRep
from confed.algorithms.mmfed import MMFed
from confed.algorithms.per_fedavg import PerFedAvg
from confed.data.examples import TableData
from confed.engines.local import InProcess, Members, Setup, Simulation, simulate
from confed.federation.algorithm import Algorithm
from confed.federation.families.meta import meta_gradient
from confed.federation.local import Local
from confed.federation.params import Params
from confed.federation.protocols import Batch, Output
from confed.testing.toy import ToyModel, ToyTask, toy_clients, toy_model, toy_setup
from quadratics import Array, Bowl, Same
from refusals import refuses
from toy_runs import simulated

RATE = 0.1
FULL = Local(epochs=2, batch_size=100, lr=RATE, optimizer="sgd", weight_decay=0.0)  # one step per epoch
CLIENTS = [f"client-{k}" for k in range(3)]
SIZES = (12, 20, 16)


def batches() -> list[dict[str, Tensor]]:
    return [data.tables[0].batch(torch.arange(len(data))) for data in toy_clients().values()]


def step(model: nn.Module, batch: Mapping[str, Tensor], *parts: str, lam: float = 0.0, to: Params | None = None):
    """One step of gradient descent on the parameters whose names begin with one of ``parts``."""
    loss = functional.cross_entropy(model(batch).logits, batch["label"])
    named = {n: p for n, p in model.named_parameters() if n.startswith(parts)}
    for (name, p), gradient in zip(named.items(), torch.autograd.grad(loss, list(named.values())), strict=True):
        pull = lam * (p.detach() - to[name]) if to is not None else 0.0
        with torch.no_grad():
            p.sub_(RATE * (gradient + pull))


def average(models: list[ToyModel], part: str) -> dict[str, Tensor]:
    states = [m.state_dict() for m in models]
    return {
        n: sum(size / sum(SIZES) * s[n] for size, s in zip(SIZES, states, strict=True))  # type: ignore[misc]
        for n in states[0]
        if n.startswith(part)
    }


def close(got: Params, wanted: Params) -> bool:
    return all(torch.allclose(got[n], wanted[n], atol=2e-6) for n in wanted)


# FedAvg + FT ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epochs", [0, 1, 2, 5])
def test_fine_tuning_takes_as_many_epochs_as_it_says(epochs: int) -> None:
    """One step per epoch with full batches: the personal model is the global one after so many steps."""
    setup = toy_setup(FedAvgFT(finetune_epochs=epochs), local=FULL, rounds=2, noisy=False)
    records, store, _ = simulated(setup)
    shared = records[-1].servers["main"].params
    for name, batch in zip(CLIENTS, batches(), strict=True):
        model = toy_model(noisy=False)
        model.load_state_dict({**model.state_dict(), **shared})
        for _ in range(epochs):
            step(model, batch, "body", "head")
        assert close(store.load(name).tensors["personal"], {n: model.state_dict()[n] for n in shared})
    assert FedAvgFT().finetune_epochs == 2  # of the rows in the tables


# FedPer and FedRep ----------------------------------------------------------------------------------------------


def jointly(model: nn.Module, batch: Mapping[str, Tensor]) -> None:
    step(model, batch, "body", "head")
    step(model, batch, "body", "head")


def in_turn(model: nn.Module, batch: Mapping[str, Tensor]) -> None:
    step(model, batch, "head")
    step(model, batch, "body")


@pytest.mark.parametrize(("method", "train"), [(FedPer(), jointly), (FedRep(), in_turn)], ids=["fedper", "fedrep"])
def test_private_heads_by_hand(method: Algorithm, train: Callable[[nn.Module, Mapping[str, Tensor]], None]) -> None:
    records, store, _ = simulated(toy_setup(method, local=FULL, noisy=False, rounds=2))
    models, heads = [toy_model(noisy=False) for _ in CLIENTS], list[Params]()
    for record in records:
        for model, batch in zip(models, batches(), strict=True):
            train(model, batch)
        body = average(models, "body")
        assert set(record.servers["main"].params) == {"body.weight", "body.bias"}
        assert close(record.servers["main"].params, body)
        heads = [{n: t.clone() for n, t in m.state_dict().items() if n.startswith("head")} for m in models]
        for model in models:
            model.load_state_dict({**model.state_dict(), **body})
    for name, head in zip(CLIENTS, heads, strict=True):
        assert close(store.load(name).tensors["private"], head)
    assert not torch.allclose(heads[0]["head.weight"], heads[1]["head.weight"], atol=1e-3)


def test_a_place_without_a_head_is_not_evaluated() -> None:
    for method in (FedPer(), FedRep(), FedBN()):
        setup = replace(toy_setup(method, rounds=1), observers={"elsewhere": toy_clients(seed=3)["client-0"]})
        records, _, simulation = simulated(setup)
        views = simulation.evaluate(records[-1].servers, 1, split="test")
        assert set(views["personal"]) == set(CLIENTS)
        assert not views["global"]
        assert not views["unseen"]


def test_fedrep_divides_the_epochs() -> None:
    class Counting(TableData):
        epochs = 0

        def train(self, batch_size: int, rng: torch.Generator) -> Iterator[dict[str, Tensor]]:
            Counting.epochs += 1
            return super().train(batch_size, rng)

    clients = {"one": Counting(*toy_clients()["client-0"].tables)}
    for epochs, head_epochs, wanted in [(5, 2, 5), (2, 1, 2), (1, 1, 2), (2, 3, 4)]:
        Counting.epochs = 0
        simulated(toy_setup(FedRep(head_epochs), clients=dict(clients), local=Local(epochs=epochs), rounds=1))
        assert Counting.epochs == wanted


def test_fedrep_leaves_the_workspace_trainable_after_a_failure() -> None:
    class Broken(TableData):
        def train(self, batch_size: int, rng: torch.Generator) -> Iterator[dict[str, Tensor]]:
            raise OverflowError("broken on purpose")

    clients = toy_clients()
    clients["client-0"] = Broken(*clients["client-0"].tables)
    _, store, simulation = simulated(toy_setup(FedRep(), clients=clients))
    assert isinstance(simulation.executor, InProcess)
    assert all(p.requires_grad for n, p in simulation.executor.workspace.model.named_parameters() if n[:4] != "stem")
    assert not store.load("client-0")


@pytest.mark.parametrize("method", [FedPer, FedRep])
def test_heads_that_cannot_be(method: type[FedPer | FedRep]) -> None:
    with pytest.raises(ValueError, match=r"does not say what its head is .*algorithm\.head must name the submodules"):
        method().configure(nn.Sequential(nn.Linear(2, 2)), ToyTask())
    with pytest.raises(
        ValueError, match=r"algorithm\.head must name submodules .*got 'haed'; the model has stem, norm"
    ):
        method(head=("haed",)).configure(toy_model(), ToyTask())
    refuses(r"with trained tensors, got 'stem'", method(head=("stem",)).configure, toy_model(), ToyTask())
    refuses("must leave something to share", method(head=("norm", "body", "head")).configure, toy_model(), ToyTask())
    refuses(r"call configure\(model, task\) before the run", method().rules, toy_setup(FedAvg()).population.info(0))
    assert method(head=("body",)).configure(toy_model(), ToyTask()).head == ("body",)
    once = method().configure(toy_model(), ToyTask())
    assert once.configure(toy_model(), ToyTask()) == once


# FedBN ----------------------------------------------------------------------------------------------------------


def test_fedbn_rounds_equal_a_computation_by_hand() -> None:
    setup = replace(toy_setup(FedBN(), local=FULL, rounds=2), build=_without_dropout)
    records, store, _ = simulated(setup)
    models, norms = [_without_dropout() for _ in CLIENTS], list[Params]()
    for record in records:
        for model, batch in zip(models, batches(), strict=True):
            model.train()
            for _ in range(2):
                step(model, batch, "norm", "body", "head")
        shared = {**average(models, "body"), **average(models, "head")}
        assert set(record.servers["main"].params) == set(shared)
        assert close(record.servers["main"].params, shared)
        norms = [{n: t.clone() for n, t in m.state_dict().items() if n.startswith("norm.")} for m in models]
        for model in models:
            model.load_state_dict({**model.state_dict(), **shared})
    for name, model, norm in zip(CLIENTS, models, norms, strict=True):
        private = store.load(name).tensors["private"]
        assert set(private) == {n for n in model.state_dict() if n.startswith("norm.")}
        assert {"norm.running_mean", "norm.running_var"} < set(private)
        assert close(private, norm)


def _without_dropout() -> ToyModel:
    model = toy_model()
    model.drop.p = 0.0
    return model


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.batch = nn.BatchNorm2d(3)
        self.plain = nn.BatchNorm1d(3, affine=False, track_running_stats=False)  # has no tensors
        self.inner = nn.ModuleDict({"layer": nn.LayerNorm(4), "group": nn.GroupNorm(2, 4)})
        self.linear = nn.Linear(2, 2)

    frozen: tuple[str, ...] = ()


def test_fedbn_finds_the_layers() -> None:
    model = Mixed()
    assert FedBN().configure(model, ToyTask()).norms == ("batch",)
    assert FedBN("all").configure(model, ToyTask()).norms == ("batch", "inner.layer", "inner.group")
    model.frozen = tuple(f"batch.{n}" for n in model.batch.state_dict())
    assert FedBN("all").configure(model, ToyTask()).norms == ("inner.layer", "inner.group")
    with pytest.raises(ValueError, match="FedBN keeps batch-normalisation layers private, and they are all frozen"):
        FedBN().configure(model, ToyTask())
    message = r"batch-normalisation layers private, and this model has none; algorithm\.layers = 'all' takes layer"
    refuses(message, FedBN().configure, toy_model(noisy=False), ToyTask())
    with pytest.raises(ValueError, match=r"keeps normalisation layers private, and this model has none$"):
        FedBN("all").configure(toy_model(noisy=False), ToyTask())
    refuses(r"call configure\(model, task\) before the run", FedBN().rules, toy_setup(FedAvg()).population.info(0))


# Ditto ----------------------------------------------------------------------------------------------------------


def test_ditto_rounds_equal_a_computation_by_hand() -> None:
    lam = 0.7
    setup = toy_setup(Ditto(lam), local=FULL, noisy=False, rounds=3)
    records, store, _ = simulated(replace(setup, keep_personal=False))  # v is kept all the same
    received: Params = {n: p.detach().clone() for n, p in toy_model(noisy=False).named_parameters()}
    own = [toy_model(noisy=False) for _ in CLIENTS]
    for record in records:
        for model, batch in zip(own, batches(), strict=True):
            for _ in range(2):
                step(model, batch, "body", "head", lam=lam, to=received)
        received = record.servers["main"].params
    for name, model in zip(CLIENTS, own, strict=True):
        learned = {n: p.detach() for n, p in model.named_parameters() if n[:4] != "stem"}
        assert close(store.load(name).tensors["personal"], learned)


def test_ditto_goes_fedavgs_way_on_the_server() -> None:
    local = Local(epochs=2, batch_size=4, lr=0.02)
    for keep in (True, False):
        (ditto, *_), (plain, *_) = (
            simulated(replace(toy_setup(m, local=local, noisy=False), keep_personal=keep))
            for m in (Ditto(1.0), FedAvg())
        )
        for one, other in zip(ditto, plain, strict=True):
            assert one.losses == other.losses
            wanted = other.servers["main"].params
            assert all(torch.equal(t, wanted[n]) for n, t in one.servers["main"].params.items())


def test_ditto_shuffles_its_own_training_anew() -> None:
    orders: list[list[int]] = []

    class Watching(TableData):
        def train(self, batch_size: int, rng: torch.Generator) -> Iterator[dict[str, Tensor]]:
            order = torch.randperm(len(self), generator=rng)
            orders.append(order.tolist())
            return self.tables[0].batches(batch_size, order)

    clients = {"one": Watching(*toy_clients()["client-0"].tables)}
    simulated(toy_setup(Ditto(), clients=dict(clients), local=Local(epochs=2), rounds=1))
    assert len(orders) == len({tuple(order) for order in orders}) == 4


def test_a_diverged_personal_model_is_not_kept() -> None:
    # lambda times the rate is far above 2: the personal model explodes, the shared one does not.
    local = replace(FULL, epochs=30)
    setup = toy_setup(Ditto(1e6), local=local, noisy=False, rounds=2)
    with pytest.warns(UserWarning, match=r"'client-\d' diverged in round \d: .* the client has none yet"):
        records, store, _ = simulated(setup)
    plain, _, _ = simulated(toy_setup(FedAvg(), local=local, noisy=False, rounds=2))
    for one, other in zip(records, plain, strict=True):
        assert one.losses == other.losses
        assert not one.errors
        assert all(torch.equal(t, other.servers["main"].params[n]) for n, t in one.servers["main"].params.items())
    assert not any(store.load(name) for name in CLIENTS)


def test_a_diverging_personal_model_keeps_the_one_before() -> None:
    setup = toy_setup(Ditto(0.1), local=replace(FULL, epochs=30), noisy=False, rounds=1)
    _, store, simulation = simulated(setup)
    before = {name: store.load(name).tensors["personal"] for name in CLIENTS}
    worse = Simulation(replace(setup, algorithm=Ditto(1e6), rounds=2), store)
    assert isinstance(simulation.executor, InProcess)
    with pytest.warns(UserWarning, match="keeps the one before"):
        (record, *_) = simulate(worse, worse.start(simulation.executor.workspace), 1)
    assert not record.errors
    for name in CLIENTS:
        after = store.load(name).tensors["personal"]
        assert all(torch.equal(t, after[n]) for n, t in before[name].items())


BETA, ALPHA, EPOCHS = 0.1, 0.2, 3
SGD = Local(epochs=EPOCHS, batch_size=100, lr=BETA, optimizer="sgd", weight_decay=0.0)
A = np.array([[1.0, 3.0], [4.0, 0.5]])
B = np.array([[0.0, 1.0], [1.0, -2.0]])
PAIR_SIZES, START = (2, 6), np.array([2.0, -1.0])


class Point(nn.Module):
    """A point in the plane, and a value that plays no part."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.tensor([[2.0, -1.0]]))
        self.idle = nn.Parameter(torch.ones(2, 2))

    def forward(self, batch: Batch) -> Output:
        here = self.theta.expand(len(batch["a"]), 2)
        return Output(here, here)


def bowls(method: Algorithm, rounds: int = 3, local: Local = SGD) -> Setup:
    members = Members({f"client-{k}": Same(A[k], B[k], PAIR_SIZES[k]) for k in range(2)})
    return Setup(method, members, Bowl(), local, Point, rounds)


def gradient(k: int, theta: Array) -> Array:
    return A[k] * (theta - B[k])


# By hand --------------------------------------------------------------------------------------------------------


def bowl(a: list[float], b: list[float]) -> Batch:
    return {"a": torch.tensor(a).double(), "b": torch.tensor(b).double()}


def loss(values, batch: Batch) -> Tensor:
    return 0.5 * (batch["a"] * (values["theta"] - batch["b"]).square()).sum()


BATCHES = [bowl([2.0, 1.0], [1.0, 0.0]), bowl([1.0, 3.0], [0.0, 2.0]), bowl([4.0, 0.5], [3.0, 3.0])]


def test_meta_gradients_of_quadratics_by_hand() -> None:
    params = {"theta": torch.tensor([3.0, -1.0]).double(), "idle": torch.ones(2).double()}
    # grad f(theta; b1) = (2 (3 - 1), -1) = (4, -1); theta' = (3 - 0.4, -1 + 0.1) with alpha = 0.1.
    after, first = meta_gradient(loss, params, BATCHES[:2], 0.1)
    assert first.keys() == {"theta"}
    assert first["theta"].tolist() == pytest.approx([2.6, 3 * (-0.9 - 2)])
    assert float(after) == pytest.approx(0.5 * (2.6**2 + 3 * 2.9**2))
    # H(theta; b3) is the diagonal (4, 0.5): g - alpha H g = ((1 - 0.4) g_1, (1 - 0.05) g_2).
    _, second = meta_gradient(loss, params, BATCHES, 0.1, 1e-3)
    assert second["theta"].tolist() == pytest.approx([0.6 * 2.6, 0.95 * -8.7], rel=1e-7)
    refuses("2 batches, or 3 with the Hessian, got 1", meta_gradient, loss, params, BATCHES[:1], 0.1)


def test_the_hessian_part_is_that_of_double_backward() -> None:
    def curved(values, batch: Batch) -> Tensor:
        return (values["theta"] * batch["a"]).tanh().square().sum() + values["theta"].prod()

    theta = torch.tensor([0.3, -0.4]).double().requires_grad_()
    alpha, (b1, b2, b3) = 0.05, BATCHES
    (inner,) = torch.autograd.grad(curved({"theta": theta}, b1), theta)
    (g,) = torch.autograd.grad(curved({"theta": theta - alpha * inner.detach()}, b2), theta)
    (slope,) = torch.autograd.grad(curved({"theta": theta}, b3), theta, create_graph=True)
    (curvature,) = torch.autograd.grad(slope, theta, g)
    _, got = meta_gradient(curved, {"theta": theta.detach()}, BATCHES, alpha, 1e-4)
    assert torch.allclose(got["theta"], g - alpha * curvature, atol=1e-6)


# Rounds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["fo", "hf"])
def test_rounds_and_personal_models_against_numpy(variant) -> None:
    method = PerFedAvg(alpha=ALPHA, variant=variant, adapt_steps=2, delta=0.01)
    records, store, _ = simulated(bowls(method))
    w = START
    for number in range(3):
        ends: list[Array] = []
        for k in range(2):
            theta = w
            for _ in range(EPOCHS):
                g = gradient(k, theta - ALPHA * gradient(k, theta))
                theta = theta - BETA * (g - ALPHA * A[k] * g if variant == "hf" else g)
            ends.append(theta)
        w = np.mean(ends, axis=0)  # every client counts the same
        assert records[number].servers["main"].params["theta"][0].numpy() == pytest.approx(w, abs=2e-4)
    assert torch.equal(records[-1].servers["main"].params["idle"], torch.ones(2, 2))
    assert len(records) == 4
    for k in range(2):
        theta = w
        for _ in range(2):
            theta = theta - ALPHA * gradient(k, theta)
        own = store.load(f"client-{k}").tensors["personal"]["theta"][0].numpy()
        assert own == pytest.approx(theta, abs=2e-4)


def test_mmfed_is_first_order_and_weighted_by_size() -> None:
    setups = (bowls(MMFed(ALPHA, 3)), bowls(PerFedAvg(ALPHA, "fo", adapt_steps=3, weighting="examples")))
    (one, mine, _), (other, theirs, _) = map(simulated, setups)
    assert torch.equal(one[2].servers["main"].params["theta"], other[2].servers["main"].params["theta"])
    uniform, _, _ = simulated(bowls(PerFedAvg(ALPHA)))
    assert not torch.equal(one[2].servers["main"].params["theta"], uniform[2].servers["main"].params["theta"])
    for name in ("client-0", "client-1"):
        tensors = [store.load(name).tensors["personal"]["theta"] for store in (mine, theirs)]
        assert torch.equal(*tensors)


def test_a_batch_of_one_example_is_left_out_of_inner_steps_too() -> None:
    # Of five examples in batches of four one is left over, of which BatchNorm has no variance.
    setup = toy_setup(PerFedAvg(variant="hf"), clients=toy_clients(sizes=(5, 2)), rounds=2)
    records, store, _ = simulated(setup)
    assert not any(record.errors for record in records)
    assert all(bool(torch.isfinite(t).all()) for t in store.load("client-1").tensors["personal"].values())


def test_modalities_that_are_not_in_the_batch_are_not_moved() -> None:
    setup = toy_setup(PerFedAvg(alpha=0.1, adapt_steps=3), kind="modalities", rounds=1)
    records, store, _ = simulated(
        replace(setup, local=Local(epochs=1, batch_size=4, lr=0.05))
    )  # AdamW would decay what moves
    start = setup.model().state_dict()
    own = store.load("client-1").tensors["personal"]
    assert not any(".image." in name or ".audio." in name for name in own)
    assert not torch.equal(own["embed.text.shared.weight"], start["embed.text.shared.weight"])
    assert not any(record.errors for record in records)


def test_fine_tuning_is_that_of_fedavg_ft() -> None:
    local = Local(epochs=1, batch_size=8, lr=0.05)
    ours = PerFedAvg(alpha=0.0, finetune_epochs=2, weighting="examples")
    records, store, _ = simulated(toy_setup(ours, local=local, rounds=2))
    others, theirs, _ = simulated(toy_setup(FedAvgFT(finetune_epochs=2), local=local, rounds=2))
    for client in ("client-0", "client-2"):
        mine, other = (each.load(client).tensors["personal"] for each in (store, theirs))
        assert all(torch.equal(mine[name], t) for name, t in other.items())
    server = records[-1].servers["main"].params
    assert not torch.equal(server["head.bias"], store.load("client-0").tensors["personal"]["head.bias"])
    assert len(records) == len(others)

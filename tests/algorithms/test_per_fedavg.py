"""Per-FedAvg and MMFed: meta-gradients by hand on quadratics, rounds against NumPy, and FedAvg where alpha is 0."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from confed.algorithms.fedavg_ft import FedAvgFT
from confed.algorithms.mmfed import MMFed
from confed.algorithms.per_fedavg import PerFedAvg
from confed.engines.local import Members, Setup
from confed.federation.algorithm import Algorithm
from confed.federation.families.meta import meta_gradient
from confed.federation.local import Local
from confed.federation.protocols import Batch, Output
from confed.testing.toy import toy_clients, toy_setup
from quadratics import Array, Bowl, Same
from toy_runs import simulated

BETA, ALPHA, EPOCHS = 0.1, 0.2, 3
SGD = Local(epochs=EPOCHS, batch_size=100, lr=BETA, optimizer="sgd", weight_decay=0.0)
A = np.array([[1.0, 3.0], [4.0, 0.5]])
B = np.array([[0.0, 1.0], [1.0, -2.0]])
SIZES, START = (2, 6), np.array([2.0, -1.0])


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
    members = Members({f"client-{k}": Same(A[k], B[k], SIZES[k]) for k in range(2)})
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
    with pytest.raises(ValueError, match="2 batches, or 3 with the Hessian, got 1"):
        meta_gradient(loss, params, BATCHES[:1], 0.1)


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

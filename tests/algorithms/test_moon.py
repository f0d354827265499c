"""MOON against its formula in NumPy, and against FedAvg where the term is absent."""

import copy
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from confed.algorithms.fedavg import FedAvg
from confed.algorithms.moon import MOON
from confed.data.examples import TableData
from confed.engines.local import Workspace
from confed.engines.perform import perform
from confed.federation.algorithm import Algorithm
from confed.federation.client import Client
from confed.federation.local import Local
from confed.federation.messages import Call, Message
from confed.federation.params import Scope
from confed.federation.randomness import isolated
from confed.federation.state import ClientState
from confed.losses.info_nce import model_contrastive
from confed.testing.toy import ToyTask, toy_clients, toy_setup
from toy_runs import client_in, simulated

Z = [[1.0, 0, 2], [0, 1, 1], [1, 1, 0]]
NEAR = [[1, 0.5, 1], [0, 2, 1], [2, 0, 0.5]]
FAR = [[0.0, 1, 1], [1, 1, 0], [0, 0, 1]]


def _by_hand(z: np.ndarray, near: np.ndarray, far: np.ndarray, tau: float) -> float:
    """The mean of Eq. 3 over the examples, as a loop."""

    def cosine(a: np.ndarray, b: np.ndarray) -> float:
        return float(a @ b / np.sqrt((a @ a) * (b @ b)))

    terms: list[float] = []
    for own, positive, negative in zip(z, near, far, strict=True):
        up, down = np.exp(cosine(own, positive) / tau), np.exp(cosine(own, negative) / tau)
        terms.append(-np.log(up / (up + down)))
    return float(np.mean(terms))


def test_the_term_has_its_golden_value() -> None:
    value = model_contrastive(torch.tensor(Z), torch.tensor(NEAR), torch.tensor(FAR), 0.5)
    assert value.item() == pytest.approx(0.3443472, abs=1e-6)


@pytest.mark.parametrize("tau", [0.07, 0.5, 3.0])
def test_the_term_is_the_formula(tau: float) -> None:
    z, near, far = np.random.default_rng(0).normal(size=(3, 7, 5))
    got = model_contrastive(torch.tensor(z), torch.tensor(near), torch.tensor(far), tau)
    assert got.item() == pytest.approx(_by_hand(z, near, far, tau), rel=1e-9)


def test_the_term_only_moves_the_local_view() -> None:
    z, near, far = (torch.tensor(v, requires_grad=True) for v in (Z, NEAR, FAR))
    model_contrastive(z, near, far).backward()
    assert z.grad is not None
    assert near.grad is None
    assert far.grad is None
    before = torch.cosine_similarity(z, near).mean() - torch.cosine_similarity(z, far).mean()
    moved = z - 0.1 * z.grad
    assert torch.cosine_similarity(moved, near).mean() - torch.cosine_similarity(moved, far).mean() > before


@pytest.mark.usefixtures("faulty_arguments")
def test_the_term_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="one shape"):
        model_contrastive(torch.zeros(2, 3), torch.zeros(2, 4), torch.zeros(2, 3))
    with pytest.raises(ValueError, match="temperature must be positive, got 0"):
        model_contrastive(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 3), 0)


# The method ---------------------------------------------------------------------------------------------------


def _client(method: MOON, previous: Mapping[str, Tensor] | None = None, data: TableData | None = None) -> Client:
    state = ClientState() if previous is None else ClientState({"previous": dict(previous)})
    client = client_in(toy_setup(method), state=state, data=data)
    client.load({n: t for n, t in client.initial.items() if client.scopes[n] is Scope.SHARED})
    return client


def _shifted(client: Client, seed: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {
        n: t + 0.3 * torch.randn(t.shape, generator=rng) if t.is_floating_point() and "running" not in n else t.clone()
        for n, t in client.initial.items()
    }


def _separate(client: Client, values: Mapping[str, Tensor]) -> nn.Module:
    """A network of its own with these values, in evaluation mode."""
    network = copy.deepcopy(client.model)
    network.load_state_dict(values, strict=False)
    return network.eval()


@pytest.mark.parametrize("projection", [True, False])
def test_the_objective_is_the_formula_with_three_networks(projection: bool) -> None:
    method = MOON(mu=0.7, temperature=0.4, projection=projection)
    blank = _client(method)
    previous, received = _shifted(blank, 1), _shifted(blank, 2)
    client = _client(method, previous)
    client.load(received)
    losses = method.objective(client)
    with torch.no_grad():  # the student moves on from what it received
        for name, value in _shifted(blank, 3).items():
            client.tensors[name].copy_(value)
    client.model.eval()  # no dropout, so that the student can be recomputed
    batch = next(iter(client.data.train(8, client.rng("order/0"))))
    (loss,) = losses(client.model, batch)

    def view(network: nn.Module) -> np.ndarray:
        with torch.no_grad():
            features = network(batch).features
            return (network.get_submodule("projection")(features) if projection else features).numpy()

    z, near, far = (view(_separate(client, v)) for v in (_shifted(blank, 3), received, previous))
    assert z.shape == (8, 256 if projection else 8)
    with torch.no_grad():
        task = ToyTask().loss(client.model(batch), batch).item()
    assert loss.item() == pytest.approx(task + 0.7 * _by_hand(z, near, far, 0.4), rel=1e-5)


def test_views_kept_for_a_round_change_nothing() -> None:
    method = MOON(mu=2.0)
    results: list[Message] = []
    for deterministic in (True, False):
        data = toy_clients()["client-1"]
        data.deterministic = deterministic
        client = _client(method, _shifted(_client(method), 1), data)
        with isolated(0):  # the same dropout
            results.append(method.fit(client, Message(_shifted(client, 2))))
    kept, computed = results
    assert all(torch.allclose(t, computed.tensors[n], atol=1e-6) for n, t in kept.tensors.items())


def _after(method: Algorithm, rounds: int) -> Mapping[str, Tensor]:
    return simulated(toy_setup(method, rounds=rounds)).states[-1].params


def test_the_first_round_is_fedavgs() -> None:
    moon, fedavg = _after(MOON(mu=5.0), 1), _after(FedAvg(), 1)
    assert all(torch.equal(moon[name], value) for name, value in fedavg.items())


def test_the_second_round_is_not() -> None:
    moon, fedavg = _after(MOON(mu=5.0), 2), _after(FedAvg(), 2)
    assert not torch.equal(moon["body.weight"], fedavg["body.weight"])
    assert set(moon) - set(fedavg) == {f"projection.{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")}
    assert moon["projection.2.weight"].shape == (256, 8)
    assert not torch.equal(moon["projection.0.weight"], _after(MOON(), 1)["projection.0.weight"])


@pytest.mark.parametrize("keep_personal", [True, False])
def test_the_previous_model_is_what_the_client_last_sent(keep_personal: bool) -> None:
    method = MOON()
    setup = replace(toy_setup(method), keep_personal=keep_personal)
    workspace, info = Workspace(setup.model()), setup.population.info(0)
    shared = dict(workspace.initial)
    reply, state = perform(setup, workspace, Call(info, "fit", Message(shared)), ClientState(), 0)
    assert reply.tensors.keys() == state.tensors["previous"].keys() == shared.keys()
    assert all(torch.equal(state.tensors["previous"][n], t) for n, t in reply.tensors.items())
    assert ("personal" in state.tensors) is keep_personal


def test_no_network_is_added_where_there_is_no_term() -> None:
    for method in (MOON(mu=0), MOON(projection=False)):
        assert set(_after(method, 1)) == set(_after(FedAvg(), 1))


def test_the_projection_starts_from_the_seed_alone() -> None:
    one, other, third = (toy_setup(MOON(), seed=seed).model().state_dict() for seed in (0, 0, 1))
    assert torch.equal(one["projection.0.weight"], other["projection.0.weight"])
    assert not torch.equal(one["projection.0.weight"], third["projection.0.weight"])
    assert one["projection.0.weight"].abs().max() <= 8**-0.5


def test_bf16_training_stays_finite() -> None:
    local = Local(epochs=2, batch_size=4, lr=0.01, precision="bf16")
    setup = toy_setup(MOON(), local=local, rounds=2)
    for record in simulated(setup, sound=True).records:
        assert all(np.isfinite(v) for v in record.losses.values())

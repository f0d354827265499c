"""Families of LoRA methods: Fisher-weighted means of factors, and the tail that pruning shrinks."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from confed.algorithms.feddat import FedDAT
from confed.algorithms.feddpa import FedDPA
from confed.algorithms.fedpeft import FedPEFT
from confed.algorithms.pfedmma import PFedMMA
from confed.engines.local import Simulation
from confed.engines.perform import Workspace
from confed.federation.families.fisher import FISHER, FisherMean, FisherWeighted, informed
from confed.federation.families.lora import tail_product
from confed.federation.local import Local
from confed.federation.robust_mean import RobustMean
from confed.federation.secure_sum import SecureSum
from confed.federation.state import MemoryStore
from confed.federation.update_privacy import UpdatePrivacy
from confed.testing.toy import toy_clients, toy_model, toy_setup
from confed.testing.trial import Outcome, Recording, run
from method_contract import keep_contract, with_and_without_transports

METHODS: tuple[FisherWeighted, ...] = (FedPEFT(), FedDAT(), FedDPA(), PFedMMA())
SGD = Local(epochs=1, batch_size=4, lr=0.05, optimizer="sgd")


def outcome(method: FisherWeighted, **options: Any) -> Outcome:
    return run(toy_setup(method, local=SGD, noisy=False, **options))


def test_the_mean_is_the_quotient_of_the_sums() -> None:
    rng = np.random.default_rng(0)
    values, weights = rng.normal(size=(3, 4, 2)), (1.0, 2.0, 5.0)
    information = rng.uniform(0.1, 3.0, size=(3, 4, 2))
    mean = FisherMean(torch.float64)
    for value, own, weight in zip(values, information, weights, strict=True):
        mean.add({"a": torch.tensor(value)}, {"a": torch.tensor(own)}, weight)
    top = sum(w * f * v for w, f, v in zip(weights, information, values, strict=True))
    bottom = sum(w * f for w, f in zip(weights, information, strict=True))
    found = mean.result({"a": torch.zeros(4, 2, dtype=torch.float64)})["a"]
    np.testing.assert_allclose(found.numpy(), top / bottom, rtol=1e-12)
    assert not np.allclose(found.numpy(), np.average(values, axis=0, weights=weights), atol=0.01)


def test_values_without_information_are_plain_means() -> None:
    mean = FisherMean()
    for value, weight in ((1.0, 1.0), (4.0, 2.0)):
        mean.add({"a": torch.full((2,), value)}, {"a": torch.zeros(2)}, weight)
    assert mean.result({"a": torch.zeros(2)})["a"].tolist() == [3.0, 3.0]
    same, sure = torch.randn(5, generator=torch.Generator().manual_seed(0)), FisherMean()
    for scale in (0.1, 30.0, 7.0):
        sure.add({"a": same}, {"a": scale * torch.rand(5)}, 3.0)
    assert torch.equal(sure.result({"a": same})["a"], same)


def test_information_near_the_largest_float_does_not_overflow() -> None:
    largest = torch.finfo(torch.float32).max
    mean = FisherMean()
    for value, information in ((1.0, largest), (2.0, largest), (6.0, largest / 2)):
        mean.add({"w": torch.tensor([value])}, {"w": torch.tensor([information])}, 40.0)
    found = mean.result({"w": torch.zeros(1)})["w"]
    torch.testing.assert_close(found, torch.tensor([(1.0 + 2.0 + 3.0) / 2.5]))


def test_counters_and_statistics_have_no_information() -> None:
    tensors = {
        "w": torch.zeros(2),
        "n.running_var": torch.ones(2),
        "n.count": torch.tensor(3),
        "x.added": torch.ones(1),
    }
    assert informed(tensors, ("*.added",)) == ["w"]


def test_information_is_the_mean_squared_gradient() -> None:
    method = FedPEFT(aggregation="fisher", fisher_examples=1000)
    setup = toy_setup(method, local=SGD, rounds=1, noisy=False)
    executor = Recording(setup)
    simulation = Simulation(setup, MemoryStore(), executor)
    server = simulation.start(executor.workspace)["main"]
    (client, *_) = simulation.clients()
    call = next(setup.algorithm.round(server, [client]))[0]
    (reply,) = executor([call], simulation.store, 0)
    assert reply.error is None, reply.error
    model = toy_model(False)
    state = model.state_dict() | {n: t for n, t in reply.message.tensors.items() if not n.startswith(FISHER)}
    model.load_state_dict(state | dict(simulation.store.load(client.id).tensors["private"]))
    wanted: dict[str, Tensor] = {}
    batches = list(toy_clients()["client-0"].train(1, torch.Generator()))
    for batch in batches:
        model.zero_grad()
        setup.task.loss(model(batch), batch).backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                wanted[name] = wanted.get(name, torch.zeros_like(p)) + p.grad.square() / len(batches)
    names = [n.removeprefix(FISHER) for n in reply.message.tensors if n.startswith(FISHER)]
    assert sorted(names) == ["body.bias", "body.weight"]
    for name in names:
        torch.testing.assert_close(reply.message.tensors[FISHER + name], wanted[name], rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.title)
def test_servers_take_the_weighted_mean_of_what_was_sent(method: FisherWeighted) -> None:
    setup = toy_setup(replace(method, aggregation="fisher"), local=SGD, rounds=1, noisy=False)
    result = run(setup)
    sent = [reply.message.tensors for _, call, reply in result.replies if call.action == "fit"]
    sizes = [call.client.num_examples for _, call, _ in result.replies if call.action == "fit"]
    weights = sizes if getattr(method, "weighting") == "examples" else [1] * 3  # noqa: B009
    told = {n for n in sent[0] if n.startswith(FISHER)}
    assert told
    assert len(sent) == 3
    for name in told:
        own = name.removeprefix(FISHER)
        f = np.stack([w * np.maximum(t[name].double().numpy(), 1e-12) for w, t in zip(weights, sent, strict=True)])
        x = np.stack([t[own].double().numpy() for t in sent])
        found = result.servers["main"].params[own].double().numpy()
        np.testing.assert_allclose(found, (f * x).sum(0) / f.sum(0), rtol=1e-4, atol=1e-6)
        assert any(t[name].any() for t in sent), f"{own}: nobody has information"
    plain = run(toy_setup(method, local=SGD, rounds=1, noisy=False)).servers["main"].params
    assert any(not torch.allclose(plain[n], t, atol=1e-5) for n, t in result.servers["main"].params.items())


def test_clients_that_know_the_same_give_the_plain_mean() -> None:
    """With the same examples everywhere, information is the same everywhere (and so are the values)."""
    same = {f"client-{number}": toy_clients()["client-1"] for number in range(3)}
    local = Local(epochs=1, batch_size=100, lr=0.05, optimizer="sgd")
    results = []
    for method in (FedPEFT(), FedPEFT(aggregation="fisher", fisher_examples=100)):
        results.append(run(toy_setup(method, clients=same, local=local, noisy=False)).servers["main"].params)
    for name, tensor in results[0].items():
        torch.testing.assert_close(results[1][name], tensor, rtol=1e-5, atol=1e-6)


def test_personal_models_and_evaluation_are_those_of_the_mean() -> None:
    result = outcome(FedPEFT(aggregation="fisher"))
    workspace = Workspace(toy_model(False))
    for state in result.states.values():
        names = {n for group in state.tensors.values() for n in group}
        assert names <= set(workspace.tensors)


@pytest.mark.parametrize(
    ("protection", "reason"),
    [
        ({"update_privacy": UpdatePrivacy(clip=1.0)}, "sends squared gradients beside the update"),
        ({"robust": RobustMean("median")}, "the weight that its client reports"),
        ({"secure_sum": SecureSum()}, "the server must see them"),
    ],
)
def test_protections_that_do_not_apply_are_refused(protection: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=rf"must be left out for FedPEFT: algorithm.aggregation = 'fisher' .*{reason}"):
        toy_setup(FedPEFT(aggregation="fisher", **protection))
    toy_setup(FedPEFT(**protection))


@with_and_without_transports
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.title)
def test_fisher_weighted_means_keep_the_contract(method: FisherWeighted, transports: bool) -> None:
    ran = keep_contract(replace(method, aggregation="fisher", fisher_examples=3), transports)
    assert transports or "resumes exactly" in ran


def test_the_tail_is_a_product_of_norms() -> None:
    rng = torch.Generator().manual_seed(0)
    a = torch.randn(3, 5, generator=rng, dtype=torch.float64, requires_grad=True)
    b = torch.randn(6, 3, generator=rng, dtype=torch.float64)
    found = tail_product(a, b, 1)
    assert float(found.detach()) == pytest.approx(
        float(np.linalg.norm(b[:, 1:].numpy()) * np.linalg.norm(a[1:].detach().numpy()))
    )
    found.backward()  # type: ignore[no-untyped-call]
    assert a.grad is not None
    assert not a.grad[0].any()
    assert a.grad[1:].any()
    zero = torch.zeros(6, 3, dtype=torch.float64, requires_grad=True)
    tail_product(a, zero, 1).backward()  # type: ignore[no-untyped-call]
    assert torch.isfinite(zero.grad).all()  # type: ignore[arg-type]
    assert float(tail_product(a, b, 3).detach()) == 0

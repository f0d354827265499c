"""RELA: weights by hand, what a layer computes, what travels, and what the similarity changes."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from confed.algorithms.fedmosaic import GATE, GRADIENT, FedMosaic, relevance
from confed.engines.local import Simulation
from confed.engines.participation import Members
from confed.engines.perform import Setup
from confed.federation.local import Local
from confed.federation.messages import Message, Reply
from confed.federation.randomness import generator
from confed.federation.state import ServerState
from confed.models.finetuning import Finetuning
from confed.models.vilt import vilt_tiny
from confed.testing.toy import ToyTask, toy_clients
from lora_federation import SCALE, A, B, LoRAToy
from toy_runs import Listener, simulated

G_A, G_B, B_GATE = "body.received_A", "body.received_B", f"body.{GATE}"
QUIET = FedMosaic(noise=0.0)


def run(
    method: FedMosaic = QUIET, *, rounds: int = 3, clients: Any = None, cohort: int | None = None, rank: int = 2
) -> tuple[Simulation, Listener, list[ServerState]]:
    method = method.configure(LoRAToy(False, rank), ToyTask())
    local = Local(epochs=2, batch_size=8, lr=0.05)
    data = toy_clients() if clients is None else clients
    setup = Setup(method, Members(data), ToyTask(), local, lambda: LoRAToy(False, rank), rounds=rounds)
    listener = Listener(setup)
    finished = simulated(setup, cohort, listener, sound=True)
    return finished.simulation, listener, finished.states


def sent(listener: Listener, round: int) -> dict[str, tuple[Mapping[str, Tensor], Mapping[str, Tensor]]]:
    """Client -> what it was sent and what it sent in a round."""
    return {c.client.id: (c.message.tensors, r.message.tensors) for number, c, r in listener.heard if number == round}


def test_weights_are_the_softmax_of_the_cosines() -> None:
    own, others = np.array([1.0, 2.0, 0.0]), np.array([[2.0, 4.0, 0.0], [0.0, 0.0, 3.0], [-1.0, 0.5, 0.0]])
    cosines = [float(own @ row / np.linalg.norm(own) / np.linalg.norm(row)) for row in others]
    for temperature in (0.2, 0.5, 3.0):
        wanted = np.exp(np.array(cosines) / temperature)
        found = relevance(torch.tensor(own), torch.tensor(others), temperature)
        np.testing.assert_allclose(found.numpy(), wanted / wanted.sum(), rtol=1e-12)
    assert relevance(None, torch.tensor(others), 0.5).tolist() == pytest.approx([1 / 3] * 3)
    assert torch.isfinite(relevance(torch.zeros(3), torch.zeros(2, 3), 0.5)).all()


def test_every_client_is_sent_its_own_mean_of_the_others() -> None:
    _, listener, _ = run()
    before, now = sent(listener, 0), sent(listener, 1)
    names = list(now)
    for name in names:
        others = [other for other in names if other != name]
        own = before[name][1][GRADIENT].double().numpy()
        cosines = []
        for other in others:
            g = before[other][1][GRADIENT].double().numpy()
            cosines.append(own @ g / np.linalg.norm(own) / np.linalg.norm(g))
        weights = np.exp(np.array(cosines) / 0.5)
        weights /= weights.sum()
        assert np.abs(weights - 1 / len(others)).max() > 1e-3  # similarity counts
        for received, factor in ((G_A, A), (G_B, B)):
            wanted = sum(
                w * before[other][1][factor].double().numpy() for w, other in zip(weights, others, strict=True)
            )
            np.testing.assert_allclose(now[name][0][received].numpy(), wanted, atol=1e-6)
    assert not torch.allclose(now[names[0]][0][G_A], now[names[1]][0][G_A])


def test_a_layer_blends_its_own_factors_with_those_received() -> None:
    model: Any = LoRAToy(False, 2)
    QUIET.configure(model, ToyTask()).add_modules(model, torch.Generator())
    layer, rng = model.body, torch.Generator().manual_seed(1)
    x = torch.randn(4, 8, generator=rng)
    torch.testing.assert_close(layer(x), layer.base_layer(x))  # both products are 0 at first
    with torch.no_grad():
        for parameter in (layer.lora_B["default"].weight, layer.received_A, layer.received_B, layer.received_gate):
            parameter.normal_(generator=rng)
    share = 1 / (1 + np.exp(-layer.received_gate.item()))
    own = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    weight = layer.base_layer.weight + SCALE * ((1 - share) * own + share * layer.received_B @ layer.received_A)
    torch.testing.assert_close(layer(x), x @ weight.T + layer.base_layer.bias)
    layer(x).square().sum().backward()
    assert layer.received_A.grad is None
    assert layer.received_B.grad is None
    assert layer.received_gate.grad.any()


def test_own_factors_go_on_at_home_and_are_not_sent_down() -> None:
    simulation, listener, states = run()
    for round in (1, 2):
        for name, (down, up) in sent(listener, round).items():
            assert A not in down
            assert B not in down
            assert {A, B, GRADIENT} <= set(up)
            assert not {G_A, G_B, B_GATE} & set(up)
            state = simulation.store.load(name).tensors
            if round == 2:
                assert torch.equal(state["personal"][A], up[A])
                assert torch.equal(state["personal"][G_A], down[G_A])
                assert state["private"][B_GATE] != 0
                assert torch.equal(states[3].slots[f"factors of {name}"][A], up[A])
    gates = [float(simulation.store.load(c.id).tensors["private"][B_GATE]) for c in simulation.clients()]
    assert len(set(gates)) == 3


def test_gradients_are_those_of_the_model_as_the_run_began() -> None:
    """By hand: the mean gradient of B over all examples, at the initial values, whatever was trained since."""
    data = toy_clients()
    big = replace(QUIET, gradient_batches=100, memory=0.0)
    _, listener, _ = run(big, clients=data)
    for round in (0, 2):
        for name, (_, up) in sent(listener, round).items():
            model: Any = LoRAToy(False, 2)
            batches = list(data[name].train(8, torch.Generator()))  # the last one may be smaller
            assert sum(len(b["x"]) for b in batches) == len(data[name])
            whole = {key: torch.cat([b[key] for b in batches]) for key in ("x", "label")}
            ToyTask().loss(model(whole), whole).backward()
            wanted = model.get_parameter(B).grad.flatten()
            order = torch.randperm(len(wanted), generator=generator(0, 0, "", "relevance"))
            cosine = torch.nn.functional.cosine_similarity(up[GRADIENT], wanted[order], dim=0)
            assert cosine > 0.97  # batches are of unequal sizes


def test_gradients_are_smoothed_thinned_and_noised() -> None:
    runs = {
        name: sent(run(method, rounds=2)[1], 1)["client-0"][1][GRADIENT]
        for name, method in {
            "plain": QUIET,
            "new": replace(QUIET, memory=0.0),
            "noisy": replace(QUIET, noise=1.0),
            "few": replace(QUIET, dimensions=5),
        }.items()
    }
    first = sent(run(QUIET, rounds=1)[1], 0)["client-0"][1][GRADIENT]
    torch.testing.assert_close(runs["plain"], (first + runs["new"]) / 2)
    assert runs["few"].shape == (5,)
    assert torch.equal(runs["few"], runs["plain"][:5])
    drawn = replace(QUIET, noise=1.0, repeatable=False)
    noises = [sent(run(drawn, rounds=1)[1], 0)["client-0"][1][GRADIENT] for _ in "ab"]
    assert not torch.equal(*noises)
    gap = float((runs["noisy"] - runs["plain"]).square().mean().sqrt() / runs["plain"].square().mean().sqrt())
    assert 0.4 < gap < 2.0


def test_who_joins_late_gets_the_plain_mean() -> None:
    simulation, listener, states = run(rounds=6, cohort=2)
    seen: set[str] = set()
    for round in range(6):
        here = sent(listener, round)
        for name, (down, _) in here.items():
            others = sorted(seen - {name})
            slots = states[round].slots
            if name not in seen and others:
                wanted = torch.stack([slots[f"factors of {other}"][A] for other in others]).mean(0)
                torch.testing.assert_close(down[G_A], wanted)
            if not others:
                assert not down[G_B].any()
        seen |= set(here)
    assert seen == {client.id for client in simulation.clients()}


def test_the_layers_of_the_library() -> None:
    model = vilt_tiny(3, 20, width=16, layers=2, trainable="lora", peft=Finetuning(rank=2, alpha=6.0))
    method = FedMosaic().configure(model, ToyTask())
    assert method.layer.startswith("vilt.encoder.layer.1.")
    method.add_modules(model, torch.Generator())
    layer: Any = model.get_submodule(method.layer)
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name in ("lora_B.default.weight", "received_A", "received_B"):
            layer.get_parameter(name).normal_(generator=rng)
    x = torch.randn(4, 16, generator=rng)
    own = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    weight = layer.base_layer.weight + 3 * (own + layer.received_B @ layer.received_A) / 2  # alpha / r = 3
    torch.testing.assert_close(layer(x), x @ weight.T + layer.base_layer.bias, rtol=1e-4, atol=1e-4)


def test_a_failed_client_leaves_the_others_means_alone() -> None:
    simulation, _, states = run()
    method: Any = simulation.setup.algorithm
    (client, *_) = simulation.clients()
    after = method.aggregate(states[-1], [Reply(client, Message(), "OSError: away")])
    assert after.round == states[-1].round + 1
    assert after.slots.keys() == states[-1].slots.keys()
    assert set(after.slots[GRADIENT]) == set(states[-1].slots[GRADIENT])

"""Server optimisers: against NumPy, as methods of their own and as an option of others, and through recipes."""

import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from confed.algorithms.fedadam import FedAdam
from confed.algorithms.fedavg import FedAvg
from confed.algorithms.fedavgm import FedAvgM
from confed.algorithms.feddc import FedDC
from confed.algorithms.feddyn import FedDyn
from confed.algorithms.fedper import FedPer
from confed.algorithms.fedprox import FedProx
from confed.algorithms.fedyogi import FedYogi
from confed.algorithms.scaffold import Scaffold
from confed.federation.algorithm import Algorithm
from confed.federation.client_info import ClientInfo
from confed.federation.messages import Message, Reply
from confed.federation.server_optimizer import ServerOptimizer
from confed.federation.state import ServerState
from confed.recipes.recipe import load_recipe
from confed.testing.toy import toy_clients, toy_setup
from toy_runs import simulated

Array = NDArray[np.float64]
START = np.array([0.5, -1.0, 2.0, 0.0])
SIZES = (30, 10)
# Per round what the two clients send: large and small moves, moves to and fro, and a weight that does not move.
SENT = np.array(
    [
        [[0.9, -1.001, 1.0, 0.0], [0.1, -1.002, 1.5, 0.0]],
        [[0.2, -1.001, 2.0, 0.0], [0.4, -1.003, 2.5, 0.0]],
        [[0.7, -1.004, 0.0, 0.0], [0.6, -1.000, 0.1, 0.0]],
    ]
)
LR, BETA1, BETA2, TAU = 0.05, 0.8, 0.95, 0.01


def by_hand(second: Callable[[float, float], float]) -> list[Array]:
    """Algorithm 2 of Reddi et al., one weight at a time."""
    w, m, v, path = START.copy(), np.zeros(4), np.full(4, TAU**2), []
    for one, two in SENT:
        for i in range(4):
            delta = (30 * (one[i] - w[i]) + 10 * (two[i] - w[i])) / 40
            m[i] = BETA1 * m[i] + (1 - BETA1) * delta
            v[i] = second(v[i], delta**2)
            w[i] = w[i] + LR * m[i] / (v[i] ** 0.5 + TAU)
        path.append(w.copy())
    return path


def adam(v: float, square: float) -> float:
    return BETA2 * v + (1 - BETA2) * square


def yogi(v: float, square: float) -> float:
    if v > square:
        return v - (1 - BETA2) * square
    return v + (1 - BETA2) * square if v < square else v


def adagrad(v: float, square: float) -> float:
    return v + square


def momentum(lr: float, beta: float) -> list[Array]:
    w, v, path = START.copy(), np.zeros(4), []
    for one, two in SENT:
        v = beta * v + (0.75 * one + 0.25 * two - w)
        w = w + lr * v
        path.append(w)
    return path


def server(method: Algorithm) -> list[Tensor]:
    """The server's weights after each of the three rounds."""
    state = ServerState(0, {"w": torch.tensor(START, dtype=torch.float32), "steps": torch.tensor(3)})
    path: list[Tensor] = []
    for number, sent in enumerate(SENT):
        replies = [
            Reply(ClientInfo(f"{k}", SIZES[k]), Message({"w": torch.tensor(w).float(), "steps": torch.tensor(7 + k)}))
            for k, w in enumerate(sent)
        ]
        state = method.aggregate(state, [*replies, Reply(ClientInfo("failed", 99), Message(), "error")])
        assert state.round == number + 1
        assert state.params["steps"].item() == 8  # counters: the largest, whatever the optimiser
        assert all("steps" not in moments for moments in state.slots.values())
        path.append(state.params["w"])
    return path


@pytest.mark.parametrize(
    ("methods", "wanted"),
    [
        (
            [FedAdam(LR, (BETA1, BETA2), TAU), FedProx(server=ServerOptimizer("adam", LR, (BETA1, BETA2), TAU))],
            by_hand(adam),
        ),
        (
            [FedYogi(LR, (BETA1, BETA2), TAU), FedPer(server=ServerOptimizer("yogi", LR, (BETA1, BETA2), TAU))],
            by_hand(yogi),
        ),
        ([FedAvg(server=ServerOptimizer("adagrad", LR, (BETA1, BETA2), TAU))], by_hand(adagrad)),
        ([FedAvgM(0.3, 0.7), FedAvg(server=ServerOptimizer("momentum", 0.3, (0.7, 0.5)))], momentum(0.3, 0.7)),
        ([FedAvgM(0.3, 0.0), FedAvg(server=ServerOptimizer(lr=0.3))], momentum(0.3, 0.0)),
    ],
    ids=["adam", "yogi", "adagrad", "momentum", "rate"],
)
def test_three_rounds_by_hand(methods: Sequence[Algorithm], wanted: list[Array]) -> None:
    for method in methods:
        for got, values in zip(server(method), wanted, strict=True):
            assert got.numpy() == pytest.approx(values, rel=1e-5, abs=1e-6)


def test_running_statistics_are_averaged_not_optimised() -> None:
    # The variance falls from 4 to 1: momentum would carry it below zero.
    before = {"bn.running_var": torch.tensor([4.0]), "bn.running_mean": torch.zeros(1), "bn.weight": torch.ones(1)}
    for optimizer in (ServerOptimizer("momentum"), ServerOptimizer("adam", 5.0), ServerOptimizer(lr=2.0)):
        state = ServerState(0, before)
        for value in (2.0, 1.0, 1.0):
            mean = {n: torch.full((1,), value) for n in before}
            state = optimizer.step(state, mean)
            assert state.params["bn.running_var"].item() == value
            assert state.params["bn.running_mean"].item() == value
        assert state.params["bn.weight"].item() != 1.0
        assert all(set(moments) == {"bn.weight"} for moments in state.slots.values())


def test_the_option_is_the_method() -> None:
    pairs = [
        (FedAdam(0.02), FedProx(mu=0.0, server=ServerOptimizer("adam", 0.02))),
        (FedAvgM(0.5, 0.6), FedAvg(server=ServerOptimizer("momentum", 0.5, (0.6, 0.0)))),
    ]
    for one, other in pairs:
        for a, b in zip(simulated(toy_setup(one)).records, simulated(toy_setup(other)).records, strict=True):
            wanted = b.servers["main"].params
            assert all(torch.equal(t, wanted[n]) for n, t in a.servers["main"].params.items())


def test_the_learning_rate_that_is_not_given() -> None:
    for optimizer in ("none", "momentum"):
        assert ServerOptimizer(optimizer) == ServerOptimizer(optimizer, 1.0)
    assert ServerOptimizer().plain
    assert not ServerOptimizer(lr=0.01).plain
    # The first step has the length lr (1 - beta1) / sqrt(1 - beta2); Adagrad's has no root below.
    for optimizer, step in (
        (ServerOptimizer("adam", tau=1e-9), 0.01),
        (ServerOptimizer("yogi", tau=1e-9), 0.01),
        (ServerOptimizer("adagrad", tau=1e-9), 0.001),
    ):
        state = optimizer.step(ServerState(0, {"w": torch.ones(1)}), {"w": torch.zeros(1)})
        assert state.params["w"].item() == pytest.approx(1 - step, abs=1e-6)
    given = ["algorithm.name=fedavg", "algorithm.server.optimizer=yogi"]
    recipe = load_recipe("fedvqa_scenes", given)
    assert tomllib.loads(recipe.to_toml())["algorithm"]["server"]["lr"] == 0.01
    plain = tomllib.loads(load_recipe("fedvqa_scenes", given[:1]).to_toml())["algorithm"]["server"]
    assert plain == {"optimizer": "none", "lr": 1.0, "betas": [0.9, 0.99], "tau": 0.001}  # as in older run folders


def test_recipes_name_the_servers_optimiser(tmp_path: Path) -> None:
    given = ["algorithm.name=fedprox", "algorithm.server.optimizer=adam", "algorithm.server.lr=0.01"]
    recipe = load_recipe("fedvqa_scenes", given)
    assert recipe.construct("algorithm").server == ServerOptimizer("adam", 0.01)
    again = tmp_path / "again.toml"
    again.write_text(recipe.to_toml())
    assert load_recipe(again).construct("algorithm") == recipe.construct("algorithm")
    with pytest.raises(ValueError, match=r"algorithm\.server\.lrr: .*(not permitted|[Uu]nexpected).*"):
        load_recipe("fedvqa_scenes", [*given, "algorithm.server.lrr=1"])
    with pytest.raises(ValueError, match=r"algorithm\.server\.optimizer: .*'momentum'.*got 'sgd'"):
        load_recipe("fedvqa_scenes", [*given, "algorithm.server.optimizer=sgd"])
    flat = load_recipe("fedvqa_scenes", ["algorithm.name=fedyogi", "algorithm.betas=[0.5, 0.9]"])
    assert flat.construct("algorithm") == FedYogi(betas=(0.5, 0.9))


@pytest.mark.parametrize("method", [FedDyn, FedDC, Scaffold, FedAdam, FedYogi, FedAvgM])
def test_methods_with_an_aggregation_of_their_own_refuse_it(method: type[Algorithm]) -> None:
    with pytest.raises(ValueError, match=r"aggregates in its own way, so algorithm\.server\.optimizer must be 'none'"):
        toy_setup(method(server=ServerOptimizer("adam")), clients=toy_clients())

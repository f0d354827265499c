"""Split learning against the whole network in training mode: batch statistics, dropout, schedules, decorrelation."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from confed.algorithms.bicsl import BiCSL
from confed.algorithms.split_learning import SplitLearning
from confed.data.examples import TableData
from confed.data.table import Table
from confed.engines.local import InProcess, Simulation, simulate
from confed.engines.perform import Setup
from confed.federation.algorithm import Algorithm
from confed.federation.families.split import ServerPart
from confed.federation.local import Local, Schedule
from confed.federation.randomness import derive, generator, isolated
from confed.federation.state import MemoryStore
from confed.testing.toy import toy_clients, toy_contrastive_task, toy_setup

CLIENT, ROUNDS = "client-0", 3
LOCAL = Local(epochs=2, batch_size=4, lr=0.05, weight_decay=0.1, schedule=Schedule("cosine", warmup=0.25))


def trained(setup: Setup) -> dict[str, Tensor]:
    """What all servers hold after the last round."""
    with Simulation(setup, MemoryStore()) as simulation:
        assert isinstance(simulation.executor, InProcess)
        records = list(simulate(simulation, simulation.start(simulation.executor.workspace)))
    assert not any(record.errors for record in records)
    return {n: t for server in records[-1].servers.values() for n, t in server.params.items()}


def batches(setup: Setup, round: int) -> Iterator[dict[str, Tensor]]:
    data: Any = setup.population.data(CLIENT)
    for epoch in range(setup.local.epochs):
        yield from data.train(setup.local.batch_size, generator(setup.seed, round, CLIENT, f"order/{epoch}"))


def whole(setup: Setup, loss: Callable[[nn.Module, dict[str, Tensor]], Tensor]) -> dict[str, Tensor]:
    """One network in one place: an optimiser of every round, a warm-up and half a cosine over all steps."""
    model, local = setup.model(), setup.local
    model.train()
    steps = len(list(batches(setup, 0)))
    learned = [p for p in model.parameters() if p.requires_grad]
    for round in range(setup.rounds):
        groups = [
            {"params": [p for p in learned if p.ndim > 1], "weight_decay": local.weight_decay},
            {"params": [p for p in learned if p.ndim == 1], "weight_decay": 0.0},
        ]
        adam = local.optimizer == "adamw"
        optimizer = torch.optim.AdamW(groups, lr=local.lr) if adam else torch.optim.SGD(groups, lr=local.lr)
        for step, batch in enumerate(batches(setup, round)):
            part, rise = (round + step / steps) / setup.rounds, local.schedule.warmup
            falling = 0.5 * (1 + math.cos(math.pi * (part - rise) / (1 - rise))) if rise else 1.0
            for group in optimizer.param_groups:
                group["lr"] = local.lr * (part / rise if part < rise else falling)
            optimizer.zero_grad()
            with isolated(derive(setup.seed, round, CLIENT, f"forward/{step}")):
                loss(model, batch).backward()
            optimizer.step()
    return model.state_dict()


def check(setup: Setup, loss: Callable[[nn.Module, dict[str, Tensor]], Tensor]) -> dict[str, Tensor]:
    got, wanted = trained(setup), whole(setup, loss)
    initial = setup.model().state_dict()
    for name, value in got.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    assert any(not torch.equal(value, initial[name]) for name, value in got.items())
    return got


def test_bicsl_learns_as_the_whole_network() -> None:
    """BatchNorm behind the server's adapter and in the client's backbone, dropout in the backbone, and a cosine.

    By SGD: a bias in front of BatchNorm has no gradient but rounding, which AdamW would blow up to full steps.
    """
    local = replace(LOCAL, optimizer="sgd")
    setup = toy_setup(BiCSL(), clients=toy_clients(sizes=(18,)), local=local, rounds=ROUNDS)
    task = toy_contrastive_task()
    got = check(setup, lambda model, batch: task.loss(model(batch), batch))
    # The server's batch normalisation saw the batches: its statistics are neither 0 and 1 nor the first ones.
    assert float(got["nha.norm.running_mean"].abs().max()) > 1e-3
    assert int(got["nha.norm.num_batches_tracked"]) == ROUNDS * 2 * 5


def test_split_learning_learns_as_the_whole_network() -> None:
    setup = toy_setup(SplitLearning(hidden=5), clients=toy_clients(sizes=(18,)), local=LOCAL, rounds=ROUNDS)
    got = check(setup, lambda model, batch: setup.task.loss(model(batch), batch))
    assert "head.middle.0.weight" in got


def test_a_servers_layers_learn_in_training_mode() -> None:
    """BatchNorm normalises by the batch and dropout is on, whatever mode the given layers were in."""
    given = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)).eval()
    start = {name: value.detach().clone() for name, value in given.state_dict().items()}
    local = Local(lr=0.1, optimizer="sgd", weight_decay=0.0)
    part = ServerPart(given, start, local, round=0, rounds=1, steps=2)
    twin = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)).train()
    twin.load_state_dict(start)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    rng = torch.Generator().manual_seed(3)
    for step in range(2):
        x = torch.randn(6, 3, generator=rng)
        with isolated(step):
            part.learn(part.modules(x).square().sum())
        with isolated(step):
            optimizer.zero_grad()
            twin(x).square().sum().backward()
            optimizer.step()
    for name, value in part.values().items():
        torch.testing.assert_close(value, twin.state_dict()[name])
    assert not given.training
    assert all(torch.equal(value, start[name]) for name, value in given.state_dict().items())


# Decorrelation ----------------------------------------------------------------------------------------------------


def pictured(sizes: tuple[int, ...] = (18,)) -> dict[str, TableData]:
    """Toy clients whose pictures differ, so that inputs and activations can depend on each other."""
    clients: dict[str, TableData] = {}
    for number, (name, data) in enumerate(toy_clients(sizes=sizes).items()):
        table = data.tables[0]
        rng = torch.Generator().manual_seed(number)
        images = torch.randint(0, 256, (sizes[number], 3, 2, 2), generator=rng, dtype=torch.uint8)
        own = Table(images, torch.arange(sizes[number]), table.columns)
        clients[name] = TableData(own, own, own)
    return clients


def dependence(x: Tensor, z: Tensor) -> Tensor:
    """Distance correlation by its definition (Székely et al., 2007), differentiable."""

    def centred(rows: Tensor) -> Tensor:
        d = (rows[:, None] - rows[None]).square().sum(-1)
        d = torch.where(d > 0, d, torch.ones_like(d)).sqrt() * (d > 0)
        return d - d.mean(0, keepdim=True) - d.mean(1, keepdim=True) + d.mean()

    a, b = centred(x.double()), centred(z.double())
    return ((a * b).mean() / ((a * a).mean() * (b * b).mean()).sqrt()).sqrt().float()


@pytest.mark.parametrize("staleness", [0, 1])
def test_the_decorrelation_penalty_reaches_the_clients_part(staleness: int) -> None:
    """The client's layers follow the gradient of loss + weight x dCor(pictures, v_MHA), the server's the loss's."""
    algorithm: Algorithm = BiCSL(decorrelate=2.0, staleness=staleness)  # pyright: ignore[reportArgumentType]
    local = Local(epochs=1, batch_size=18, lr=0.05, optimizer="sgd", weight_decay=0.0)  # one step a round
    setup = toy_setup(algorithm, clients=pictured(), local=local, rounds=ROUNDS)
    task = toy_contrastive_task()

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        v_mha, v_apn = model.cut(batch)
        return task.contrast(*model.project(v_mha, v_apn)) + 2.0 * dependence(batch["image"].flatten(1), v_mha)

    check(setup, loss)
    plain = toy_setup(BiCSL(), clients=pictured(), local=local, rounds=ROUNDS)
    assert not torch.allclose(trained(setup)["mha.body.weight"], trained(plain)["mha.body.weight"], atol=1e-3)

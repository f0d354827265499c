"""Training of several clients at once against one by one: where ``run.batch_clients = "auto"`` stacks, and where not.

For models from 784 x 10 values to the mini ViLT and several batch sizes: the processor time of rounds with clients
stacked over that of the same rounds one by one, in turn in one process, and what a run would choose (the bounds are in
``confed/runs/at_once.py``).

    python benchmarks/at_once.py
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from confed.algorithms.ditto import Ditto
from confed.algorithms.fedavg import FedAvg
from confed.algorithms.feddc import FedDC
from confed.algorithms.feddyn import FedDyn
from confed.algorithms.fedprox import FedProx
from confed.algorithms.scaffold import Scaffold
from confed.data.examples import TableData
from confed.engines.executor import InProcess
from confed.engines.local import Members, Setup, Simulation, Workspace, simulate
from confed.federation.algorithm import Algorithm
from confed.federation.frozen_features import FeatureSettings
from confed.federation.local import Local
from confed.federation.protocols import Batch, Output
from confed.federation.state import MemoryStore
from confed.models import create_model
from confed.recipes.run_section import RunSection
from confed.runs.at_once import clients_at_once
from confed.tasks.vqa import VQA
from federations import ANSWERS, WORDS, Classification, Linear, SharedVectors, vector_tables, vilt_tables
from measure import finish, side_by_side

CLIENTS, STEPS, ROUNDS = 20, 4, 3


class TwoLayers(nn.Module):
    """784 -> hidden -> 10."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(784, hidden), nn.Linear(hidden, 10)

    def forward(self, batch: Batch) -> Output:
        """Scores (B, 10)."""
        features = torch.relu(self.first(batch["x"]))
        return Output(self.second(features), features)


def vectors(build: Callable[[], nn.Module], batch: int, optimizer: str, algorithm: Algorithm | None = None) -> Setup:
    """A federation with vectors of 784 values."""
    local = Local(epochs=1, batch_size=batch, lr=0.01, optimizer=optimizer, weight_decay=0.0)  # type: ignore[arg-type]
    population = SharedVectors(CLIENTS, vector_tables(CLIENTS, STEPS * batch))
    return Setup(algorithm or FedAvg(), population, Classification(), local, build, ROUNDS, keep_personal=False)


def pictures(trainable: str, batch: int) -> Setup:
    """A federation of a mini ViLT with features kept."""
    build = partial(create_model, "vilt_mini", answers=ANSWERS, vocab_size=WORDS, pretrained=False, trainable=trainable)
    tables = vilt_tables(8, STEPS * batch)
    data = Members({f"{i}": TableData(table, table.take(0), table.take(0)) for i, table in enumerate(tables)})
    local = Local(epochs=1, batch_size=batch, lr=1e-3)
    features = FeatureSettings(10**9)
    return Setup(FedAvg(), data, VQA(ANSWERS), local, build, ROUNDS, keep_personal=False, features=features)


def federations() -> Iterator[tuple[str, Setup]]:
    """What is measured."""
    for batch in (10, 60):
        yield f"784 x 10, SGD, batches of {batch}", vectors(Linear, batch, "sgd")
    yield "784 x 10, AdamW, batches of 10", vectors(Linear, 10, "adamw")
    for algorithm in (FedProx(), Scaffold(), FedDyn(), FedDC(), Ditto()):
        yield f"784 x 10, SGD, batches of 10, {algorithm.title}", vectors(Linear, 10, "sgd", algorithm)
    for hidden in (30, 200, 1000):
        yield f"784 x {hidden} x 10, AdamW, batches of 10", vectors(partial(TwoLayers, hidden), 10, "adamw")
    for trainable in ("head", "top", "all"):
        for batch in (8, 32):
            yield f"mini ViLT, {trainable}, AdamW, batches of {batch}", pictures(trainable, batch)


def rounds_of(setup: Setup) -> Callable[[], object]:
    """A function that runs the rounds; the executor lives on as in a run."""
    workspace = Workspace(setup.build())
    simulation = Simulation(setup, MemoryStore(), InProcess(setup, workspace))
    start = simulation.start(workspace)
    return lambda: list(simulate(simulation, start))


def main() -> None:
    """One result per federation."""
    torch.set_num_threads(1)
    for name, setup in federations():
        chosen = clients_at_once(RunSection(), setup, Workspace(setup.build()))
        stacked = replace(setup, batch_clients=min(len(setup.population), 10))
        figures = side_by_side(rounds_of(setup), rounds_of(stacked), repeats=3)
        finish(name, 0.6 if chosen.clients > 1 else float("inf"), **figures, chosen=str(chosen))


if __name__ == "__main__":
    sys.exit(main())

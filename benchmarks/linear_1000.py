"""1,000 clients of a 784 -> 10 linear model, 10 per round, 60 examples each, batch 10, SGD: overhead per client."""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from confed.engines.local import InProcess, Simulation, Workspace, simulate
from confed.federation.checkpoint import Checkpoint, Checkpoints, CheckpointWriter
from confed.federation.randomness import sample_cohort
from confed.federation.state import MemoryStore
from federations import VECTOR_LOCAL, Linear, plain_fedavg, vector_setup, vector_tables
from measure import finish, side_by_side

ROUNDS, CLIENTS, COHORT = 30, 1000, 10


def main() -> None:
    torch.set_num_threads(1)
    tables = vector_tables(CLIENTS)
    model = Linear()
    initial = {n: t.clone() for n, t in model.state_dict().items()}

    def plain() -> None:
        model.load_state_dict(initial)
        for round in range(ROUNDS):
            cohort = sample_cohort(CLIENTS, COHORT, 0, round)
            model.load_state_dict(plain_fedavg(model, tables, 1, VECTOR_LOCAL, cohort))

    setup = vector_setup(CLIENTS, ROUNDS, tables)
    workspace = Workspace(setup.build())
    simulation = Simulation(setup, MemoryStore(), InProcess(setup, workspace), COHORT)
    start = simulation.start(workspace)
    figures = side_by_side(plain, lambda: list(simulate(simulation, start)))
    at_once = replace(setup, batch_clients=COHORT)
    executor = InProcess(at_once, workspace)
    stacked = Simulation(at_once, MemoryStore(), executor, COHORT)
    together = side_by_side(plain, lambda: list(simulate(stacked, start)))
    assert not executor.unbatchable_reason
    finish("linear_1000_at_once", 0.3, **together)
    finish("linear_1000", 1.15, **figures, milliseconds_per_plain_round=1000 * figures["plain_seconds"] / ROUNDS)

    setup = vector_setup(CLIENTS, ROUNDS, tables, keep_personal=True)

    def with_defaults(batch_clients: int = 1) -> None:
        # Personal models kept, a checkpoint after every round.
        with tempfile.TemporaryDirectory() as folder:
            checkpoints = Checkpoints(Path(folder))
            writer = CheckpointWriter(checkpoints)
            own = replace(setup, batch_clients=batch_clients)
            kept = Simulation(own, checkpoints.store, InProcess(own, workspace), COHORT)
            for record in simulate(kept, start):
                writer.save(Checkpoint(record.round, record.servers, 0))
            writer.close()

    figures = side_by_side(plain, with_defaults, repeats=3)
    finish("linear_1000_defaults", float("inf"), **figures)
    figures = side_by_side(plain, lambda: with_defaults(COHORT), repeats=3)
    finish("linear_1000_defaults_at_once", 1.0, **figures)


if __name__ == "__main__":
    sys.exit(main())

"""FedAvg with a mini ViLT, 8 clients x 256 examples, batch 32: confed against a plain loop, one thread."""

import sys
import time

import torch

from confed.engines.local import InProcess, Simulation, Workspace, simulate
from confed.engines.workers import Workers
from confed.federation.state import MemoryStore
from federations import plain_vilt, vilt_setup
from measure import finish, side_by_side

ROUNDS = 1


def main() -> None:
    torch.set_num_threads(1)
    setup = vilt_setup(rounds=ROUNDS)
    workspace = Workspace(setup.build())
    simulation = Simulation(setup, MemoryStore(), InProcess(setup, workspace))
    plain = plain_vilt(ROUNDS)
    start = simulation.start(workspace)
    result = list(simulate(simulation, start))[-1].servers["main"].params
    gap = max(float((result[n].double() - t.double()).abs().max()) for n, t in plain().items())
    figures = side_by_side(plain, lambda: list(simulate(simulation, start)))
    finish("fedavg_vilt", 1.03, **figures, largest_difference=gap)
    with Simulation(setup, MemoryStore(), Workers(setup, 2)) as parallel:
        list(simulate(parallel, start))
        figures = side_by_side(plain, lambda: list(simulate(parallel, start)), clock=time.perf_counter)
    finish("fedavg_vilt_two_workers", 0.6, **figures)


if __name__ == "__main__":
    sys.exit(main())

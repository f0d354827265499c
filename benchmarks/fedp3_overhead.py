"""FedP³'s time per round against FedAvg's: mini ViLT, 8 clients x 256 examples, two epochs, batch 32."""

import sys
from dataclasses import replace

import torch

from confed.algorithms.fedavg import FedAvg
from confed.algorithms.fedp3 import FedP3
from confed.engines.local import InProcess, Simulation, Workspace, simulate
from confed.federation.state import MemoryStore
from federations import VILT_LOCAL, vilt_setup
from measure import finish, side_by_side


def main() -> None:
    torch.set_num_threads(1)
    simulations = []
    for method in (FedAvg(), FedP3(start_round=0)):
        setup = vilt_setup(method, rounds=1, local=replace(VILT_LOCAL, epochs=2))
        workspace = Workspace(setup.build())
        simulation = Simulation(setup, MemoryStore(), InProcess(setup, workspace))
        simulations.append((simulation, simulation.start(workspace)))
    fedavg, fedp3 = (lambda s=s, start=start: list(simulate(s, start)) for s, start in simulations)
    finish("fedp3_overhead", 1.35, **side_by_side(fedavg, fedp3, repeats=3))


if __name__ == "__main__":
    sys.exit(main())

"""Runs of small federations in this process, and a single client in the middle of one."""

from typing import NamedTuple

from confed.data.examples import TableData
from confed.engines.local import InProcess, RoundRecord, Setup, Simulation, simulate
from confed.engines.perform import Workspace
from confed.federation.client import Client
from confed.federation.state import ClientState, MemoryStore


class Finished(NamedTuple):
    """A run that has ended."""

    records: list[RoundRecord]
    store: MemoryStore
    simulation: Simulation


def simulated(setup: Setup, cohort: int | None = None) -> Finished:
    """A run from its start to its end."""
    store = MemoryStore()
    simulation = Simulation(setup, store, cohort=cohort)
    assert isinstance(simulation.executor, InProcess)
    return Finished(list(simulate(simulation, simulation.start(simulation.executor.workspace))), store, simulation)


def client_in(
    setup: Setup, name: str = "client-1", *, round: int = 1, state: ClientState | None = None,
    data: TableData | None = None,
) -> Client:  # fmt: skip
    """A client of a federation in a round, with a workspace of its own that has the model's initial values."""
    workspace = Workspace(setup.model())
    info = next(info for info in map(setup.population.info, range(len(setup.population))) if info.id == name)
    return Client(
        info, data or setup.data(name), workspace.model, workspace.tensors, setup.task, setup.local,
        state or ClientState(), workspace.scopes(setup.algorithm, info), workspace.initial, round, setup.rounds,
        seed=setup.seed,
    )  # fmt: skip

"""Runs of small federations in this process, and a single client in the middle of one."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from confed.data.examples import TableData
from confed.engines.local import InProcess, RoundRecord, Setup, Simulation, simulate
from confed.engines.perform import Workspace
from confed.federation.client import Client
from confed.federation.messages import Call, Reply
from confed.federation.state import ClientState, MemoryStore, ServerState, Store


class Listener(InProcess):
    """Answers calls, and remembers the round, the call and the reply of each."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.heard: list[tuple[int, Call, Reply]] = []

    def __call__(self, calls: Sequence[Call], store: Store, round: int) -> Iterator[Reply]:
        for call, reply in zip(calls, super().__call__(calls, store, round), strict=True):
            self.heard.append((round, call, reply))
            yield reply


class Finished(NamedTuple):
    """A run that has ended."""

    records: list[RoundRecord]
    store: MemoryStore
    simulation: Simulation

    @property
    def states(self) -> list[ServerState]:
        """The main server before and after each round."""
        start = self.simulation.start(self.simulation.executor.workspace)["main"]  # type: ignore[union-attr]
        return [start, *(record.servers["main"] for record in self.records)]

    @property
    def params(self) -> dict[str, Tensor]:
        """What the main server holds at the end."""
        return dict(self.states[-1].params)


def simulated(
    setup: Setup, cohort: int | None = None, executor: InProcess | None = None, *, sound: bool = False
) -> Finished:
    """A run from its start to its end; a ``sound`` one has no failures."""
    executor, store = InProcess(setup) if executor is None else executor, MemoryStore()
    simulation = Simulation(setup, store, executor, cohort)
    records = list(simulate(simulation, simulation.start(executor.workspace)))
    assert not sound or not any(record.errors for record in records)
    return Finished(records, store, simulation)


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

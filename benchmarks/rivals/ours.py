"""confed by its engine: clients one by one, all of a cohort at once, and with what a run does by default.

Ways: ``one``, ``at_once``, ``defaults`` (personal models kept and a checkpoint after every round, from which it goes on
where there is one; how many clients are stacked, or how many processes share them, is what a run decides), and
``workers N``, which keeps the same and trains one by one in N processes.
"""

import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, f"{Path(__file__).parents[1]}")

from classification import Classification
from confed.algorithms.fedavg import FedAvg
from confed.data.examples import TableData
from confed.data.table import Table
from confed.engines.executor import InProcess
from confed.engines.local import Members, Setup, Simulation, Workspace, simulate
from confed.engines.usage import keep_freed_memory
from confed.engines.workers import Workers, free_cores
from confed.federation.checkpoint import Checkpoint, Checkpoints, CheckpointWriter
from confed.federation.frozen_features import FeatureSettings
from confed.federation.local import Local
from confed.federation.protocols import Batch, Output
from confed.federation.stages import Stage, run_stages
from confed.federation.state import MemoryStore
from confed.recipes.run_section import RunSection
from confed.runs.at_once import clients_at_once
from networks import network_of, tensors
from vlm_lora import confed_parts, plain_name
from work import Work, begun


class Network(nn.Module):
    """A network of the work as a model with two stages, of which a frozen one is computed once per example."""

    frozen_features = None
    stage_variant = ""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.network = network_of(work)
        self.frozen = [f"network.{name}" for name in work.initial if not work.learns(name)]
        encoder = {f"network.{name.partition('.')[0]}" for name in work.initial if not name.startswith("head.")}
        self.stages = (
            Stage("encoder", tuple(work.columns), tuple(sorted(encoder)) or ("none",)),
            Stage("head", (), ("",)),
        )

    def forward(self, batch: Batch) -> Output:
        """Scores, and what the head reads."""
        return run_stages(self, batch, 2)

    def forward_stages(self, state: Any, first: int, last: int, batch: Batch) -> Any:
        """The encoder, the head, or both."""
        features = self.network.encode(batch) if first == 0 < last else state
        return Output(self.network.head(features), features) if last == 2 else features


def federation(work: Work, batch_clients: int, personal: bool) -> Setup:
    """The work as confed's users set it up."""
    size = work.size
    local = Local(epochs=1, batch_size=size.batch, lr=size.lr, optimizer=size.optimizer, weight_decay=0.0)
    if size.network == "vlm_lora":
        model, task, tables = confed_parts(work)
    else:
        model, task, columns = Network(work), Classification(), tensors(work.columns)
        rows = torch.arange(size.examples)
        tables = [Table(None, rows, {name: c[i] for name, c in columns.items()}) for i in range(size.clients)]
    data = {f"{i}": TableData(table, table.take(0), table.take(0)) for i, table in enumerate(tables)}
    return Setup(
        FedAvg(), Members(data), task, local, lambda: model, size.rounds, keep_personal=personal,
        features=FeatureSettings(4 * 10**9), batch_clients=batch_clients,
    )  # fmt: skip


def executor_of(work: Work, way: str) -> tuple[Setup, Workspace, InProcess | Workers]:
    """Who computes the clients, in a way."""
    kind, _, number = way.partition(" ")
    lasting = kind in ("defaults", "workers")
    setup = federation(work, work.size.cohort if kind == "at_once" else 1, lasting)
    workspace, workers = Workspace(setup.model()), int(number or 1)
    if kind == "defaults":
        run = RunSection(rounds=work.size.rounds, cohort=work.size.cohort)
        setup = replace(setup, batch_clients=clients_at_once(run, setup, workspace).clients)
        workers = free_cores() if setup.batch_clients == 1 else 1
    return setup, workspace, Workers(setup, workers) if workers > 1 else InProcess(setup, workspace)


def rounds(work: Work, way: str) -> Iterator[Any]:
    """The rounds, each with what is written after it."""
    setup, workspace, executor = executor_of(work, way)
    checkpoints = Checkpoints(work.folder / "checkpoints") if setup.keep_personal else None
    store = MemoryStore() if checkpoints is None else checkpoints.store
    with Simulation(setup, store, executor, work.size.cohort) as simulation:
        if checkpoints is None:
            yield from simulate(simulation, simulation.start(workspace))
            return
        servers, first = simulation.start(workspace), 0
        if checkpoints.rounds():
            newest, _ = checkpoints.latest()
            servers, first = newest.servers, newest.round
        store.rewind(first)
        with closing(CheckpointWriter(checkpoints)) as writer:
            for record in simulate(simulation, servers, first):
                writer.save(Checkpoint(record.round, record.servers, 0))
                yield record


def main() -> None:
    """All rounds."""
    work, way = begun()
    torch.set_num_threads(1)
    keep_freed_memory()
    final: dict[str, Tensor] = {}
    for record in rounds(work, way):
        assert not record.errors, record.errors
        if not final:
            work.began()
        final = dict(record.servers["main"].params)
    work.ended({plain_name(name.removeprefix("network.")): tensor.numpy() for name, tensor in final.items()})


if __name__ == "__main__":
    main()

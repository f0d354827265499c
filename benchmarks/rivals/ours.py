"""confed by its engine: clients one by one, all of a cohort at once, and with what a run does by default.

Ways: ``one``, ``at_once``, ``defaults`` (personal models kept and a checkpoint after every round, from which it goes on
where there is one), and ``workers N``, which is ``defaults`` with N worker processes.
"""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from confed.algorithms.fedavg import FedAvg
from confed.data.examples import TableData
from confed.data.table import Table
from confed.engines.executor import InProcess
from confed.engines.local import Members, Setup, Simulation, Workspace, simulate
from confed.engines.usage import keep_freed_memory
from confed.engines.workers import Workers
from confed.federation.checkpoint import Checkpoint, Checkpoints, CheckpointWriter
from confed.federation.frozen_features import FeatureSettings
from confed.federation.local import Local
from confed.federation.protocols import Batch, Output
from confed.federation.stages import Stage, run_stages
from confed.federation.state import MemoryStore
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


class Classification:
    """Cross-entropy and nothing else."""

    metric = "accuracy"

    def loss(self, output: Output, batch: Batch) -> Tensor:
        """Mean over the batch."""
        return functional.cross_entropy(output.logits, batch["label"])

    def example_losses(self, output: Output, batch: Batch) -> Tensor:
        """Of each example."""
        return functional.cross_entropy(output.logits, batch["label"], reduction="none")


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


def rounds(work: Work, way: str) -> Iterator[Any]:
    """The rounds, each with what is written after it."""
    kind, _, workers = way.partition(" ")
    lasting = kind in ("defaults", "workers")
    setup = federation(work, 1 if kind in ("one", "workers") else work.size.cohort, lasting)
    workspace = Workspace(setup.model())
    executor = Workers(setup, int(workers)) if workers else InProcess(setup, workspace)
    checkpoints = Checkpoints(work.folder / "checkpoints") if lasting else None
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
        final = dict(record.servers["main"].params)
        if record.round == 1:
            work.began()
    work.ended({plain_name(name.removeprefix("network.")): tensor.numpy() for name, tensor in final.items()})


if __name__ == "__main__":
    main()

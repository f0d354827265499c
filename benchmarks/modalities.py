"""What modalities cost: a client with pictures only beside a model of these alone, and mixed batches beside pure ones.

The data are the built-in ones of six clients, the model is the mini Transformer.

- ``client``: a FedAvg round of the client with pictures, whose model also has words and sounds, against the same with a
  model that has pictures only: time of its ``fit``, and bytes both ways. Limit: 1.05 of both.
- ``mixed``: training on all clients' examples together, in an order in which every set of modalities may follow any
  other, against training on the same examples one set after the other. Samples per second must be 0.9 of these, so that
  the limit of the time is 1 / 0.9.
"""

import sys
from collections.abc import Callable

import torch

from confed.data.examples import TableData
from confed.data.table import concatenate_tables
from confed.engines.local import Setup, Simulation, Workspace, perform
from confed.federation.messages import Call, Message
from confed.federation.state import ClientState, MemoryStore
from confed.federation.train import make_optimizer
from confed.federation.wire import size
from confed.recipes.recipe import load_recipe
from confed.runs.build import prepare
from measure import finish, side_by_side

CLIENT = "only_image"
TRAIN = 320
SHOWN = [f"data.train={TRAIN}", "data.validation=1", "data.test=1", "algorithm.name=fedavg"]


def one_round(setup: Setup) -> tuple[Callable[[], object], int]:
    """A function that computes the client's part of a round, and the bytes of its two messages."""
    workspace = Workspace(setup.model())
    infos = map(setup.population.info, range(len(setup.population)))
    info = next(info for info in infos if info.id == CLIENT)
    servers = Simulation(setup, MemoryStore()).start(workspace)
    down = setup.algorithm.broadcast(servers["main"], info)

    def fit() -> Message:
        return perform(setup, workspace, Call(info, "fit", down), ClientState(), 0)[0]

    return fit, size(down) + size(fit())


def client() -> None:
    """The round of a client with pictures only."""
    everything, materials = prepare(load_recipe("modalities", SHOWN))
    others = [name for name in materials.clients if name != CLIENT]
    pictures, _ = prepare(load_recipe("modalities", [*SHOWN, 'model.modalities=["image"]', f"run.without={others}"]))
    (plain, few), (ours, many) = one_round(pictures), one_round(everything)
    times = side_by_side(plain, ours, 9)
    finish("modalities_client", 1.05, **times, plain_bytes=few, ours_bytes=many, bytes_ratio=many / few)


def mixed() -> None:
    """Training on examples of all sets of modalities."""
    setup, materials = prepare(load_recipe("modalities", SHOWN))
    model, local = setup.model(), setup.local
    optimizer = make_optimizer(list(model.parameters()), local)
    tables = [data.tables[0] for data in materials.clients.values()]
    pure = [TableData(table, table, table) for table in tables]
    together = TableData(*[concatenate_tables(tables)] * 3)

    def train(data: TableData) -> None:
        for batch in data.train(local.batch_size, torch.Generator().manual_seed(0)):
            loss = setup.task.loss(model(batch), batch)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()

    def one_after_the_other() -> None:
        for data in pure:
            train(data)

    times = side_by_side(one_after_the_other, lambda: train(together))
    rate = len(together) / times["ours_seconds"]
    finish("modalities_mixed", 1 / 0.9, **times, samples_per_cpu_second=rate)


def main() -> None:
    torch.set_num_threads(1)
    wanted = [name for name in sys.argv[1:] if not name.startswith("-")] or ["client", "mixed"]
    for name in wanted:
        {"client": client, "mixed": mixed}[name]()


if __name__ == "__main__":
    sys.exit(main())

"""Flower's simulation engine: its FedAvg on Ray actors, one core each; the way is their number."""

import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from networks import learned, network_of, tensors, train
from work import Work, begun

client, server = ClientApp(), ServerApp()
FOLDER = "RIVALS_FOLDER"  # variable of the environment, which actors inherit


@cache
def of_process() -> tuple[Work, Any]:
    """Work and network of an actor, which all clients use in turn."""
    work = Work(Path(os.environ[FOLDER]))
    return work, network_of(work)


@client.train()
def fit(message: Message, context: Context) -> Message:
    """A client's epoch."""
    del context
    work, model = of_process()
    call, values = message.content["config"], learned(model)
    with torch.no_grad():
        for name, tensor in message.content["arrays"].to_torch_state_dict().items():
            values[name].copy_(tensor)
    train(model, work.size, map(tensors, work.batches(call["round"], call["place"])))
    arrays = ArrayRecord({name: parameter.detach() for name, parameter in values.items()})
    metrics = MetricRecord({"num-examples": work.size.examples})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


class Cohorts(FedAvg):
    """Flower's mean over the cohorts of the work."""

    def __init__(self, work: Work) -> None:
        super().__init__(fraction_evaluate=0.0)
        self.work = work

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """A message to each client of the round."""
        nodes = sorted(grid.get_node_ids())
        for place, number in enumerate(self.work.cohorts[server_round - 1]):
            call = ConfigRecord({"round": server_round - 1, "place": place})
            content = RecordDict({"arrays": arrays, "config": call})
            yield Message(content, dst_node_id=nodes[number], message_type="train")


@server.main()
def serve(grid: Grid, context: Context) -> None:
    """All rounds."""
    del context
    work = Work(Path(os.environ[FOLDER]))
    initial = {name: torch.from_numpy(array) for name, array in work.initial.items() if work.learns(name)}

    def after(number: int, arrays: ArrayRecord) -> None:
        if number == 1:
            work.began()

    result = Cohorts(work).start(
        grid, ArrayRecord(initial), num_rounds=work.size.rounds, evaluate_fn=after, timeout=600
    )
    work.ended({name: np.asarray(tensor) for name, tensor in result.arrays.to_torch_state_dict().items()})


def main() -> None:
    """The simulation."""
    work, actors = begun()
    os.environ |= {FOLDER: f"{work.folder}", "PYTHONPATH": f"{Path(__file__).parent}"}
    resources = {
        "init_args": {"num_cpus": int(actors), "log_to_driver": False, "include_dashboard": False},
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
    }
    run_simulation(server, client, work.size.clients, backend_config=resources)


if __name__ == "__main__":
    import flower_simulation  # under this name actors find its functions

    flower_simulation.main()

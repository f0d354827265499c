"""PFLlib, which is no package: its FedAvg from a checkout, ``PFLLIB=FOLDER``, for the work that its plain SGD can do.

Its clients are live objects with a network each, to all of which it sends every round's model. What is replaced is what
it leaves to files and chance: examples, their order, and who takes part; it does not evaluate, as nobody here does.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from networks import network_of, tensors
from work import Work, begun


class Scores(nn.Module):
    """The network as PFLlib calls it."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """Scores of a batch."""
        return self.network.head(self.network.encode({"x": x}))


def options(work: Work) -> argparse.Namespace:
    """What PFLlib's command line would give."""
    size = work.size
    never = size.rounds + 1
    return argparse.Namespace(
        device="cpu", dataset="rivals", num_classes=10, global_rounds=size.rounds - 1, local_epochs=1,
        batch_size=size.batch, local_learning_rate=size.lr, model=Scores(network_of(work)), num_clients=size.clients,
        join_ratio=size.cohort / size.clients, random_join_ratio=False, algorithm="FedAvg", time_select=False, goal="",
        time_threthold=1e9, save_folder_name=f"{work.folder}", top_cnt=never, auto_break=False, eval_gap=never,
        client_drop_rate=0.0, train_slow_rate=0.0, send_slow_rate=0.0, dlg_eval=False, dlg_gap=never,
        batch_num_per_client=0, num_new_clients=0, fine_tuning_epoch_new=0, learning_rate_decay=False,
        learning_rate_decay_gamma=1.0,
    )  # fmt: skip


def main() -> None:
    """All rounds."""
    work, _ = begun()
    sys.path.insert(0, os.path.join(os.environ["PFLLIB"], "system"))
    from flcore.clients.clientavg import clientAVG
    from flcore.servers import serverbase
    from flcore.servers.serveravg import FedAvg

    serverbase.read_client_data = lambda *given, **more: range(work.size.examples)
    calls: dict[int, tuple[int, int]] = {}

    def load_train_data(client: Any, batch_size: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in map(tensors, work.batches(*calls[client.id])):
            yield batch["x"], batch["label"]

    class Server(FedAvg):
        round = 0

        def select_clients(self) -> list[Any]:
            if self.round == 1:
                work.began()
            chosen = [int(number) for number in work.cohorts[self.round]]
            calls.update((number, (self.round, place)) for place, number in enumerate(chosen))
            self.round += 1
            return [self.clients[number] for number in chosen]

        def evaluate(self, *given: Any) -> None:
            self.rs_test_acc.append(0.0)

        def save_results(self) -> None: ...

        save_global_model = save_results

    clientAVG.load_train_data = load_train_data
    torch.set_num_threads(1)
    server = Server(options(work), 0)
    server.train()
    work.ended({name: tensor.detach().numpy() for name, tensor in server.global_model.network.named_parameters()})


if __name__ == "__main__":
    main()

"""The two federations that are timed, and the plain PyTorch loops that do the same batches and steps."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from classification import Classification
from confed.algorithms.fedavg import FedAvg
from confed.data.examples import TableData
from confed.data.table import Table
from confed.engines.local import Members, Setup
from confed.federation.algorithm import Algorithm
from confed.federation.client_info import ClientInfo
from confed.federation.local import Local
from confed.federation.protocols import Batch, Output
from confed.federation.randomness import generator
from confed.models import create_model
from confed.tasks.vqa import VQA

ANSWERS, WORDS = 44, 120


def vilt_tables(clients: int = 8, examples: int = 256) -> list[Table]:
    """Random pictures, questions and answers."""
    rng = torch.Generator().manual_seed(0)
    tables = []
    for _ in range(clients):
        columns = {
            "text": torch.randint(5, WORDS, (examples, 16), generator=rng),
            "text_mask": torch.ones(examples, 16, dtype=torch.int64),
            "label": torch.randint(0, ANSWERS, (examples,), generator=rng),
        }
        images = torch.randint(0, 256, (examples, 3, 64, 64), generator=rng).to(torch.uint8)
        tables.append(Table(images, torch.arange(examples), columns))
    return tables


def vilt() -> nn.Module:
    """The mini ViLT with random weights, all of them trained."""
    return create_model("vilt_mini", answers=ANSWERS, vocab_size=WORDS, pretrained=False)


VILT_LOCAL = Local(epochs=1, batch_size=32, lr=1e-3)


def vilt_setup(algorithm: Algorithm | None = None, *, rounds: int, local: Local = VILT_LOCAL) -> Setup:
    """8 clients x 256 examples of the mini ViLT."""
    data = {f"{i}": TableData(t, t.take(0), t.take(0)) for i, t in enumerate(vilt_tables())}
    return Setup(algorithm or FedAvg(), Members(data), VQA(ANSWERS), local, vilt, rounds, keep_personal=False)


def plain_fedavg(
    model: nn.Module,
    tables: list[Table],
    rounds: int,
    local: Local,
    cohort: list[int],
    seed: int = 0,
    after_client: Callable[[int], None] = lambda number: None,
    after_round: Callable[[], object] = lambda: None,
) -> dict[str, Tensor]:
    """What a careful researcher writes by hand: one model, in-place loading, one running sum.

    Tensors that are not trained are left as they are. After each client ``after_client`` is called with its model in
    place, after each round ``after_round`` with the mean.
    """
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    live = dict(model.state_dict(keep_vars=True))
    fixed = {name for name, tensor in model.named_parameters() if not tensor.requires_grad}
    state = {name: tensor for name, tensor in state.items() if name not in fixed}
    live = {name: tensor for name, tensor in live.items() if name not in fixed}
    for round in range(rounds):
        total, weight = {}, 0.0
        for number in cohort:
            table = tables[number]
            with torch.no_grad():
                for name, tensor in state.items():
                    live[name].copy_(tensor)
            model.train()
            optimizer = (
                torch.optim.SGD(model.parameters(), lr=local.lr)
                if local.optimizer == "sgd"
                else torch.optim.AdamW(_groups(model), lr=local.lr, fused=True)
            )
            for epoch in range(local.epochs):
                order = torch.randperm(len(table), generator=generator(seed, round, f"{number}", f"order/{epoch}"))
                for rows in order.split(local.batch_size):
                    batch = {name: column[rows] for name, column in table.columns.items()}
                    if table.images.numel() > 1:
                        batch["image"] = table.images[table.image_index[rows]]
                    loss = functional.cross_entropy(model(batch).logits, batch["label"])
                    optimizer.zero_grad(set_to_none=True)
                    loss.backward()
                    optimizer.step()
            with torch.no_grad():
                for name, tensor in live.items():
                    if name in total:
                        total[name].add_(tensor, alpha=len(table)) if tensor.is_floating_point() else None
                    else:
                        total[name] = tensor.detach() * len(table) if tensor.is_floating_point() else tensor.clone()
            weight += len(table)
            after_client(number)
        state = {name: t / weight if t.is_floating_point() else t for name, t in total.items()}
        with torch.no_grad():
            for name, tensor in state.items():
                live[name].copy_(tensor)
        after_round()
    return state


def _groups(model: nn.Module) -> list[dict[str, object]]:
    # Biases and norms are not decayed, as in the federation that is timed beside this.
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.01},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


class Linear(nn.Module):
    """784 -> 10."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.skip_init(nn.Linear, 784, 10)
        with torch.no_grad():
            self.layer.weight.normal_(0, 0.01, generator=torch.Generator().manual_seed(0))
            self.layer.bias.zero_()

    def forward(self, batch: Batch) -> Output:
        """Scores (B, 10); the input is the feature."""
        return Output(self.layer(batch["x"]), batch["x"])


class VectorData:
    """A client's vectors; the pictures of other federations have no place here."""

    deterministic = True

    def __init__(self, table: Table) -> None:
        self.columns, self.count = table.columns, len(table)

    def __len__(self) -> int:
        return self.count

    def train(self, batch_size: int, rng: torch.Generator):
        """One shuffled epoch."""
        for rows in torch.randperm(self.count, generator=rng).split(batch_size):
            yield {name: column[rows] for name, column in self.columns.items()}

    def validation(self, batch_size: int) -> tuple[()]:
        """None."""
        return ()

    test = validation


def vector_tables(clients: int, examples: int = 60) -> list[Table]:
    """Random vectors and labels."""
    rng = torch.Generator().manual_seed(0)
    none = torch.zeros(1, dtype=torch.uint8)
    return [
        Table(none, torch.arange(examples), {
            "x": torch.randn(examples, 784, generator=rng),
            "label": torch.randint(0, 10, (examples,), generator=rng),
        })
        for _ in range(clients)
    ]  # fmt: skip


class SharedVectors:
    """A population of any size whose clients all hold the same few tables; infos are made on demand."""

    def __init__(self, clients: int, tables: list[Table]) -> None:
        self.clients, self.tables = clients, tables

    def __len__(self) -> int:
        return self.clients

    def info(self, number: int) -> ClientInfo:
        """Client ``number``."""
        return ClientInfo(f"{number}", len(self.tables[number % len(self.tables)]))

    def data(self, client_id: str) -> VectorData:
        """Its examples."""
        return VectorData(self.tables[int(client_id) % len(self.tables)])


VECTOR_LOCAL = Local(epochs=1, batch_size=10, lr=0.1, optimizer="sgd", weight_decay=0.0)


def vector_setup(clients: int, rounds: int, tables: list[Table], keep_personal: bool = False) -> Setup:
    """A 784 -> 10 linear model on ``clients`` clients."""
    return Setup(
        FedAvg(), SharedVectors(clients, tables), Classification(), VECTOR_LOCAL, Linear, rounds,
        keep_personal=keep_personal,
    )  # fmt: skip

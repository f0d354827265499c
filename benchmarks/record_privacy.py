"""Privacy of records: time beside plain steps, accuracy by epsilon, and an audit of one run below the accountant.

    python benchmarks/record_privacy.py

Three tables. (1) Processor time of a step with clipped gradients and noise over a plain one (fused AdamW), for a linear
head and for low-rank factors in four Transformer layers, batches of 32; best of five; where it is installed, a step of
opacus beside them. (2) A linear classifier of 20
classes on Gaussian features at epsilon 1, 8 and without privacy: accuracy on new examples. (3) The lower bound of
epsilon that guesses about 1,000 canaries with random labels show (Steinke et al. 2023) beside the accountant's.
"""

import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from confed.algorithms.fedavg import FedAvg
from confed.data.examples import TableData
from confed.data.table import Table
from confed.engines.local import Members, Setup
from confed.federation.local import Local
from confed.federation.protocols import Batch, Output
from confed.federation.record_gradients import RecordGradients
from confed.federation.record_privacy import RecordPrivacy
from confed.privacy.accountant import poisson_epsilon
from confed.privacy.audit import audited_epsilon
from confed.tasks.vqa import VQA
from confed.testing.trial import run

WIDTH, CLASSES, EXAMPLES, CANARIES, DELTA = 64, 20, 4000, 1000, 1e-5
LOCAL = Local(epochs=10, batch_size=250, lr=0.5, optimizer="sgd", weight_decay=0.0)
GUESSED = 200  # canaries that are guessed to be members, and as many that are not


class Head(nn.Module):
    """A linear classifier."""

    answer_head = None

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, batch: Batch) -> Output:
        return Output(self.head(batch["x"]), batch["x"])


class Factors(nn.Module):
    """Low-rank factors beside four frozen Transformer layers, and a head."""

    answer_head = None

    def __init__(self, width: int = 128, layers: int = 4, rank: int = 8) -> None:
        super().__init__()
        make = partial(nn.TransformerEncoderLayer, width, 4, 4 * width, 0.0, batch_first=True)
        self.layers = nn.ModuleList([make() for _ in range(layers)]).requires_grad_(False)
        self.down = nn.ModuleList([nn.Linear(width, rank, bias=False) for _ in range(layers)])
        self.up = nn.ModuleList([nn.Linear(rank, width, bias=False) for _ in range(layers)])
        self.head = nn.Linear(width, CLASSES)

    def forward(self, batch: Batch) -> Output:
        hidden = batch["x"]
        for layer, down, up in zip(self.layers, self.down, self.up, strict=True):
            hidden = layer(hidden) + up(down(hidden))
        features = hidden.mean(1)
        return Output(self.head(features), features)


def best_time(step: Callable[[], object], repeats: int) -> float:
    """Milliseconds of processor time of a step, the best of five series."""
    step()
    series: list[float] = []
    for _ in range(5):
        began = time.process_time()
        for _ in range(repeats):
            step()
        series.append((time.process_time() - began) / repeats * 1e3)
    return min(series)


class Trainer:
    """A stand-in for a client, for the gradients of one batch."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.task, self.local = model.train(), VQA(CLASSES, objective="ce"), Local(batch_size=32)

    def objective(self, model: nn.Module, batch: Batch) -> Iterator[Tensor]:
        yield self.task.loss(model(batch), batch)


def step_times(model: nn.Module, inputs: Tensor, repeats: int) -> tuple[float, float]:
    """Processor time of a plain step and of one with privacy."""
    client: Any = Trainer(model)
    batch = {"x": inputs, "label": torch.arange(32) % CLASSES}
    learning = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
    optimizer = torch.optim.AdamW(learning.values(), fused=True)
    gradients = RecordGradients(client, client.objective, learning, 1.0)
    noise = torch.Generator().manual_seed(0)

    def plain() -> None:
        for tensor in learning.values():
            tensor.grad = None
        next(client.objective(model, batch)).backward()
        optimizer.step()

    def private() -> None:
        for name, total in gradients.clipped_sum(batch).items():
            drawn = torch.randn(total.shape, generator=noise)
            learning[name].grad = ((total + drawn) / 32).float()
        optimizer.step()

    return best_time(plain, repeats), best_time(private, repeats)


def opacus_time(model: nn.Module, inputs: Tensor, repeats: int) -> float:
    """Processor time of the same private step with opacus; not a number where it is not installed."""
    try:
        from opacus import GradSampleModule
        from opacus.optimizers import DPOptimizer
    except ImportError:
        return math.nan
    wrapped, labels = GradSampleModule(model.train()), torch.arange(32) % CLASSES
    plain = torch.optim.AdamW([tensor for tensor in model.parameters() if tensor.requires_grad], fused=True)
    optimizer = DPOptimizer(plain, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=32)

    def private() -> None:
        optimizer.zero_grad(set_to_none=True)
        functional.cross_entropy(wrapped({"x": inputs}).logits, labels).backward()
        optimizer.step()

    return best_time(private, repeats)


def examples(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Gaussian features around class means, and classes."""
    rng = torch.Generator().manual_seed(seed)
    means = 0.7 * torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(99))
    labels = torch.randint(CLASSES, (count,), generator=rng)
    return means[labels] + torch.randn(count, WIDTH, generator=rng), labels


def trained_head(x: Tensor, labels: Tensor, privacy: RecordPrivacy | None) -> nn.Module:
    """A head that one client trained in two rounds."""
    table = Table(None, torch.arange(len(labels)), {"x": x, "label": labels})
    data = TableData(table, table.take(0), table.take(0))
    setup = Setup(
        FedAvg(record_privacy=privacy), Members({"client": data}, ("image", "text")), VQA(CLASSES, objective="ce"),
        LOCAL, Head, rounds=2,
    )  # fmt: skip
    result = run(setup)
    model = Head()
    model.load_state_dict({name: tensor.clone() for name, tensor in result.servers["main"].params.items()})
    return model


def noise_of(epsilon: float) -> float:
    """The noise multiplier that gives an epsilon, by bisection."""
    steps, rate = 2 * LOCAL.round_steps(math.ceil((EXAMPLES + CANARIES / 2) / LOCAL.batch_size)), 250 / 4500
    low, high = 0.3, 50.0
    for _ in range(30):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if poisson_epsilon(middle, rate, steps, DELTA) < epsilon else (middle, high)
    return high


def main() -> None:
    print("step                     plain ms  private ms  ratio  opacus ms")
    for name, make, inputs, repeats in (
        ("linear head, 1,280", partial(Head, 1280), torch.randn(32, 1280), 300),
        ("factors in 4 layers", Factors, torch.randn(32, 24, 128), 10),
    ):
        plain, private = step_times(make(), inputs, repeats)
        other = opacus_time(make(), inputs, repeats)
        print(f"{name:24} {plain:8.3f}  {private:10.3f}  {private / plain:5.2f}  {other:9.3f}")
    x, labels = examples(EXAMPLES, 1)
    test_x, test_labels = examples(4000, 2)
    rng = torch.Generator().manual_seed(3)
    canary_x = torch.randn(CANARIES, WIDTH, generator=rng) * 3
    canary_labels = torch.randint(CLASSES, (CANARIES,), generator=rng)
    put_in = torch.rand(CANARIES, generator=rng) < 0.5
    both, classes = torch.cat([x, canary_x[put_in]]), torch.cat([labels, canary_labels[put_in]])
    print("\nprivacy        accuracy  epsilon, accountant  at least, audit (95 %)")
    for epsilon in (1.0, 8.0, math.inf):
        privacy = None if epsilon == math.inf else RecordPrivacy(1.0, noise_of(epsilon), DELTA)
        model = trained_head(both, classes, privacy)
        with torch.no_grad():
            accuracy = float((model.head(test_x).argmax(1) == test_labels).double().mean())  # pyright: ignore
            losses = functional.cross_entropy(model.head(canary_x), canary_labels, reduction="none")  # pyright: ignore
        order = losses.argsort()
        correct = int(put_in[order[:GUESSED]].sum()) + int((~put_in[order[-GUESSED:]]).sum())
        shown = audited_epsilon(correct, 2 * GUESSED, CANARIES, DELTA)
        name = "none" if privacy is None else f"noise {privacy.noise:.2f}"
        print(f"{name:13} {accuracy:9.3f}  {epsilon:19.2f}  {shown:.2f}")


if __name__ == "__main__":
    main()

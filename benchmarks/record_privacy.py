"""Privacy of records: time of steps beside plain ones and opacus, and accuracy and an audit of each row of a recipe.

    python benchmarks/record_privacy.py            # steps
    python benchmarks/record_privacy.py head lora  # rows of records_scenes, one seed

Steps: processor time of a step with clipped gradients and noise over a plain one (fused AdamW), for a linear head and
for low-rank factors in four Transformer layers, batches of 32; best of five; where it is installed, a step of opacus
beside them, and the largest difference between both sums of clipped gradients.

Rows: accuracy on the sites' test records (mean over sites); epsilon by the accountant, and what an audit of a training
with canaries shows it to be at least (Steinke et al. 2023); processor time of that training over the one of the row
without noise before it.
"""

import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from confed.analysis.case import Case, Models
from confed.federation.local import Local
from confed.federation.protocols import Batch, Output
from confed.federation.record_gradients import RecordGradients
from confed.recipes.recipe import load_recipe
from confed.release.probes.records import canary_figures
from confed.runs.run import run
from confed.tasks.vqa import VQA

WIDTH, CLASSES = 64, 20


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


def gradients_of(model: nn.Module, learning: Mapping[str, Tensor]) -> tuple[Any, RecordGradients]:
    """A client with a model, and its clipped gradients."""
    client: Any = Trainer(model)
    return client, RecordGradients(client, lambda _: client.objective, learning, 1.0)


def step_times(model: nn.Module, batch: Batch, repeats: int) -> tuple[float, float]:
    """Processor time of a plain step and of one with privacy."""
    learning = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
    client, gradients = gradients_of(model, learning)
    optimizer = torch.optim.AdamW(learning.values(), fused=True)
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


def opacus_step(model: nn.Module, batch: Batch, repeats: int) -> tuple[float, float]:
    """Processor time of the same private step with opacus, and how far its clipped sum is from ours, as a share.

    Not numbers where it is not installed.
    """
    try:
        from opacus import GradSampleModule
        from opacus.optimizers import DPOptimizer
    except ImportError:
        return math.nan, math.nan
    learning = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
    ours = gradients_of(model, learning)[1].clipped_sum(batch)
    wrapped = GradSampleModule(model.train())
    plain = torch.optim.AdamW(learning.values(), fused=True)
    optimizer = DPOptimizer(plain, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=len(batch["label"]))

    def backward() -> None:
        optimizer.zero_grad(set_to_none=True)
        functional.cross_entropy(wrapped(batch).logits, batch["label"]).backward()

    def private() -> None:
        backward()
        optimizer.step()

    backward()
    optimizer.clip_and_accumulate()
    gaps = [float((ours[name] - tensor.summed_grad).norm()) for name, tensor in learning.items()]  # pyright: ignore
    whole = math.sqrt(sum(float(total.square().sum()) for total in ours.values()))
    return best_time(private, repeats), math.hypot(*gaps) / whole


class TimedCase(Case):
    """A run whose trainings are timed, in processor time."""

    training = 0.0

    def trained(self, *arguments: Any, **options: Any) -> Models:
        began = time.process_time()
        models = super().trained(*arguments, **options)
        self.training = time.process_time() - began
        return models


def audited(row: str, folder: Path) -> tuple[float, float, float, float]:
    """Accuracy, epsilon by the accountant and at least, and seconds of training, of one row of the recipe."""
    summary = run(load_recipe("records_scenes").method(row), folder)
    case = TimedCase(folder)
    measures = {measured.name: measured.value for measured in canary_figures(case, "").measures}
    privacy = summary.get("example_privacy", {}).get("epsilon", {})
    epsilon = max((math.inf if value is None else value for value in privacy.values()), default=math.inf)
    return summary["global_seen_mean"], epsilon, measures["canaries_epsilon"], case.training


def print_steps() -> None:
    print("step                     plain ms  private ms  ratio  opacus ms  difference")
    for name, make, inputs, repeats in (
        ("linear head, 1,280", partial(Head, 1280), torch.randn(32, 1280), 300),
        ("factors in 4 layers", Factors, torch.randn(32, 24, 128), 10),
    ):
        batch = {"x": inputs, "label": torch.arange(32) % CLASSES}
        plain, private = step_times(make(), batch, repeats)
        other, difference = opacus_step(make(), batch, repeats)
        print(f"{name:24} {plain:8.3f}  {private:10.3f}  {private / plain:5.2f}  {other:9.3f}  {difference:.1e}")


def print_rows(rows: Sequence[str]) -> None:
    print("row            accuracy  epsilon, accountant  at least, audit  training s  ratio")
    plain = math.nan
    for row in rows:
        with tempfile.TemporaryDirectory() as scratch:
            accuracy, epsilon, shown, seconds = audited(row, Path(scratch) / row)
        plain = seconds if row in ("head", "lora") else plain
        print(
            f"{row:13} {accuracy:9.3f}  {epsilon:19.2f}  {shown:15.2f}  {seconds:10.1f}  {seconds / plain:5.2f}",
            flush=True,
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:]:
        print_rows(sys.argv[1:])
    else:
        print_steps()

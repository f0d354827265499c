"""Settings of runs that take a second, on plain squares, and a method and a model of a notebook's kind."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import toy_federation  # its datasets have names then
from confed.federation.algorithm import Algorithm
from confed.federation.client import Client
from confed.federation.protocols import Batch, Output
from confed.federation.train import Objective
from confed.models.layers import seeded_linear
from confed.models.tokenizer import WordTokenizer
from confed.system.events import Event, RunProgress

assert toy_federation.squares
TINY = {
    "data.name": "squares", "data.train": 6, "data.test": 4, "model.name": "vilt_tiny", "model.width": 16,
    "model.layers": 1, "local.epochs": 1, "run.workers": 1, "run.gallery": 0,
}  # fmt: skip

SQUARES_STUDY = """name = "tiny"
[algorithm]
name = "fedavg"
[model]
name = "vilt_tiny"
width = 16
layers = 1
[task]
name = "vqa"
[data]
name = "toy_federation:squares"
train = 12
test = 4
[local]
epochs = 1
[run]
rounds = 60
gallery = 0
controls = "none"
evaluate_every = 20
[study]
methods = ["local", "fedavg"]
"""
"""A study of two methods on squares."""

CHAT = """
[algorithm]
name = "fedavg"
[model]
name = "hf"
source = "tiny:llava"
peft = {rank = 2}
[task]
name = "chat"
max_new_tokens = 2
[data]
name = "scenes"
train = 4
validation = 1
test = 1
unseen = []
[local]
batch_size = 2
lr = 3e-2
[run]
rounds = 1
gallery = 0
evaluate_every = 0
workers = 1
without = ["home", "commercial", "sports", "natural"]
"""
"""A run of a tiny vision-language model that converses, with two clients."""


def changed(recipe: str, **values: object) -> str:
    """A recipe's text with other values of keys, each of which is there once."""
    for key, value in values.items():
        recipe, count = re.subn(rf"^{key} = .*$", f"{key} = {value}", recipe, flags=re.MULTILINE)
        assert count == 1, key
    return recipe


def stop_in_round(number: int, error: type[BaseException] = KeyboardInterrupt) -> Callable[[Event], None]:
    """A listener that ends a run by an error when this round, or a later one, was trained."""

    def listen(event: Event) -> None:
        if isinstance(event, RunProgress) and event.round >= number and "loss" in event.text:
            raise error

    return listen


@dataclass(frozen=True)
class Halved(Algorithm):
    """FedAvg with a share of the loss.

    Attributes:
        share: of the loss.
    """

    share: float = 0.5

    def objective(self, client: Client) -> Objective:
        def losses(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
            yield self.share * client.task.loss(model(batch), batch)

        return losses


class Linear(nn.Module):
    """Answers from the mean colour."""

    tokenizer = WordTokenizer

    def __init__(self, answers: int, seed: int = 0) -> None:
        super().__init__()
        self.head = seeded_linear(3, answers, 0.1, torch.Generator().manual_seed(seed))

    def forward(self, batch: Batch) -> Output:
        features = batch["image"].float().mean((2, 3)) / 255
        return Output(self.head(features), features)


def linear(answers: tuple[str, ...], vocab_size: int, *, seed: int = 0) -> Linear:
    del vocab_size
    return Linear(len(answers), seed)


linear.tokenizer = WordTokenizer  # type: ignore[attr-defined]

"""The networks of the work in PyTorch, and what libraries leave to their users: a client's steps and the final loss."""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from work import CLASSES, LENGTH, WORDS, Size, Work

Batch = Mapping[str, Tensor]


class Classifier(nn.Module):
    """An encoder and a head; the loss is the mean cross-entropy of a batch."""

    head: nn.Module

    def encode(self, batch: Batch) -> Tensor:
        """What the head reads, (B, D)."""
        raise NotImplementedError

    def loss(self, **batch: Tensor) -> Tensor:
        """A batch's loss."""
        return functional.cross_entropy(self.head(self.encode(batch)), batch["label"])


class Linear(Classifier):
    """784 -> 10."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(784, CLASSES)

    def encode(self, batch: Batch) -> Tensor:
        return batch["x"]


class ConvNet(Classifier):
    """Two convolutions with means over 2 x 2, and a linear layer: smooth, so that rounding stays rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 16, 5), nn.Conv2d(16, 32, 5)
        self.head = nn.Linear(32 * 4 * 4, CLASSES)

    def encode(self, batch: Batch) -> Tensor:
        hidden = batch["x"].view(-1, 1, 28, 28)
        for layer in (self.first, self.second):
            hidden = functional.avg_pool2d(torch.tanh(layer(hidden)), 2)
        return hidden.flatten(1)


class Block(nn.Module):
    """Attention and a perceptron behind layer normalisations."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        shape = (*hidden.shape[:2], 3, self.heads, -1)
        query, key, value = self.qkv(self.before(hidden)).view(shape).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        hidden = hidden + self.out(mixed)
        return hidden + self.down(functional.gelu(self.up(self.between(hidden))))


class MiniVL(Classifier):
    """Words and patches of a picture of 64 x 64 in one Transformer: 4 blocks of width 96."""

    def __init__(self, width: int = 96, blocks: int = 4, heads: int = 4, patch: int = 8) -> None:
        super().__init__()
        self.patch = patch
        self.words, self.patches = nn.Embedding(WORDS, width), nn.Linear(3 * patch * patch, width)
        self.positions = nn.Parameter(torch.zeros(LENGTH + (64 // patch) ** 2, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def encode(self, batch: Batch) -> Tensor:
        picture = functional.unfold(batch["image"].float() / 127.5 - 1, self.patch, stride=self.patch).transpose(1, 2)
        hidden = torch.cat([self.words(batch["text"]), self.patches(picture)], 1) + self.positions
        for block in self.blocks:
            hidden = block(hidden)
        return self.norm(hidden).mean(1)


NETWORKS = {
    "linear": Linear, "cnn": ConvNet, "mini_vl": MiniVL, "base_vl": partial(MiniVL, 768, 12, 12),
    "tiny_vl": partial(MiniVL, 32, 1, 2),
}  # fmt: skip


def create(size: Size, folder: Path) -> Any:
    """The network, of which only what is trained has gradients."""
    if size.network == "vlm_lora":
        from vlm_lora import LoRA

        return LoRA(folder)
    model: nn.Module = NETWORKS[size.network]()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(size.trained in name)
    return model


def examples(size: Size, folder: Path, rng: torch.Generator) -> dict[str, Tensor]:
    """Columns of all clients; labels follow from the inputs, so that there is something to learn."""
    shape = (size.clients, size.examples)
    if size.network == "vlm_lora":
        from vlm_lora import write_examples

        return write_examples(folder, shape, rng)
    if size.network.endswith("_vl"):
        image = torch.randint(0, 256, (*shape, 3, 64, 64), generator=rng, dtype=torch.uint8)
        text = torch.randint(0, WORDS, (*shape, LENGTH), generator=rng)
        return {"image": image, "text": text, "label": (text[..., 0] + image[..., 0, 0, 0]) % CLASSES}
    x = torch.randn(*shape, 784, generator=rng)
    return {"x": x, "label": (x @ torch.randn(784, CLASSES, generator=rng)).argmax(-1)}


# What a user of PyTorch writes ----------------------------------------------------------------------------------


def network_of(work: Work) -> Any:
    """The network with its initial values, in training mode, on one thread."""
    torch.set_num_threads(1)
    model = create(work.size, work.folder)
    model.load_state_dict(tensors(work.initial))
    return model.train()


def tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Arrays as tensors that share their memory."""
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def learned(model: nn.Module) -> dict[str, nn.Parameter]:
    """The tensors that learn."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def make_optimizer(parameters: Iterable[Tensor], size: Size, lr: float | None = None) -> torch.optim.Optimizer:
    """A fresh optimiser; both are fused, which is the fastest that PyTorch has."""
    rate = size.lr if lr is None else lr
    if size.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=rate, fused=True)
    return torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0, fused=True)


def train(model: Any, size: Size, batches: Iterator[Batch]) -> None:
    """A client's epoch."""
    optimizer = make_optimizer(learned(model).values(), size)
    for batch in batches:
        optimizer.zero_grad(set_to_none=True)
        model.loss(**batch).backward()
        optimizer.step()


def final_loss(work: Work, final: Mapping[str, np.ndarray]) -> float:
    """Mean loss of the learned values over the examples of up to 100 clients."""
    model = network_of(work).eval()
    model.load_state_dict(tensors(final), strict=False)
    with torch.no_grad():
        losses = [
            float(model.loss(**tensors({name: column[client] for name, column in work.columns.items()})))
            for client in range(min(work.size.clients, 100))
        ]
    return float(np.mean(losses))

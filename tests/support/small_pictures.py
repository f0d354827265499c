"""Labelled random pictures of 16 x 16 pixels, with four words each where asked for, and a small network for them."""

import torch
from torch import Tensor, nn

from confed.data.table import Table
from confed.federation.protocols import Batch, Output

__all__ = ["Small", "asked_pictures", "labelled_pictures"]


class Small(nn.Module):
    """Two convolutions, one of them frozen, and a layer; counts its passes."""

    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.stem, self.body, self.head = nn.Conv2d(3, 4, 4, 4), nn.Conv2d(4, 6, 2, 2), nn.Linear(24, 4)
        self.stem.requires_grad_(False)
        self.frozen = {"stem.weight", "stem.bias"}
        self.drop, self.norm = nn.Dropout(dropout), nn.BatchNorm2d(6) if norm else nn.Identity()
        self.passes = 0

    def forward(self, batch: Batch) -> Output:
        """Scores (B, 4), and what the layer reads."""
        self.passes += 1
        hidden = self.norm(torch.relu(self.body(torch.relu(self.stem(batch["image"].float() / 255)))))
        features = self.drop(hidden.flatten(1))
        return Output(self.head(features), features)


def labelled_pictures(count: int, rng: torch.Generator, words: bool = False) -> Table:
    """So many pictures with one of four labels."""
    columns = {"label": torch.randint(0, 4, (count,), generator=rng)}
    if words:
        columns["text"] = torch.randint(0, 9, (count, 4), generator=rng)
        columns["text_mask"] = torch.ones(count, 4, dtype=torch.int64)
    pictures = torch.randint(0, 256, (max(count, 1), 3, 16, 16), generator=rng).to(torch.uint8)
    return Table(pictures, torch.arange(count), columns)


def asked_pictures(
    vocabulary: int, size: int = 4, side: int = 64, length: int = 9, first: int = 5, seed: int = 0
) -> dict[str, Tensor]:
    """Random pictures with questions as tokens, of which the first one is shorter."""
    rng = torch.Generator().manual_seed(seed)
    mask = torch.ones(size, length, dtype=torch.int64)
    mask[0, first:] = 0
    return {
        "image": torch.randint(0, 256, (size, 3, side, side), generator=rng, dtype=torch.uint8),
        "text": torch.randint(0, vocabulary, (size, length), generator=rng),
        "text_mask": mask,
    }

"""Datasets whose examples lack modalities, and models that read them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import nn

from confed.data.encode import encode, with_modalities
from confed.data.examples import Examples, FederatedDataset, Split
from confed.data.picture_tables import NoPictures
from confed.data.sounds import Series, Sounds
from confed.data.table import Table
from confed.federation.protocols import Batch, Output
from confed.models.tokenizer import WordTokenizer

OWNED = {"both": ("image", "text"), "ears": ("text", "audio"), "sensor": ("series",)}


ROLES = ("train", "validation", "test")


def examples(place: str, count: int, owned: Sequence[str], first: int = 0) -> Examples:
    """Two classes that pictures, words, tones and values tell apart."""
    label = (np.arange(count) + first) % 2
    lengths = 3 + np.arange(count) % 3
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    loud = np.repeat(label * 9000 + 100, lengths)
    return Examples(
        (label[:, None, None, None] * 100 + np.full((count, 8, 8, 3), 50)).astype(np.uint8)
        if "image" in owned
        else NoPictures(1),
        np.arange(count) if "image" in owned else np.zeros(count, np.int64),
        [("dark", "bright")[i] for i in label] if "text" in owned else [""] * count,
        [("no", "yes")[i] for i in label],
        ["+".join(owned)] * count,
        [f"{place}/{i}" for i in range(count)],
        sounds=Sounds(loud.astype(np.int16), offsets, 8000) if "audio" in owned else None,
        sound_index=np.arange(count) if "audio" in owned else None,
        series=Series(loud[:, None].astype(np.float32), offsets, ("heat",)) if "series" in owned else None,
        series_index=np.arange(count) if "series" in owned else None,
        present={"text": np.full(count, "text" in owned)},
    )


def gaps(size: int = 20) -> FederatedDataset:
    """Three clients with other modalities each, and a place with all of them."""
    clients = {n: Split(*(examples(f"{n}/{role}", size, own) for role in ROLES)) for n, own in OWNED.items()}
    unseen = {"all": examples("all", size, ("image", "text", "audio", "series"))}
    return FederatedDataset("gaps", ("no", "yes"), clients, unseen, ("dark", "bright"), modalities=OWNED)


def plain(size: int = 300) -> FederatedDataset:
    """Pictures with texts, as most datasets have them."""
    whole = ("image", "text")

    def draw(place: str) -> Examples:
        return replace(examples(place, size, whole), present=None, types=["kind"] * size)

    clients = {n: Split(*(draw(f"{n}/{role}") for role in ROLES)) for n in ("one", "two")}
    return FederatedDataset("plain", ("no", "yes"), clients, {"abroad": draw("abroad")}, ("dark", "bright"))


class Sums(nn.Module):
    """A model that reads whatever is there: the mean of each modality times a vector of its own."""

    reads_absent: ClassVar[bool] = True
    KEYS: ClassVar[dict[str, str]] = {"image": "image", "text": "text", "audio": "audio", "series": "series"}

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.ModuleDict({name: nn.Linear(1, 4) for name in self.KEYS})
        self.head = nn.Linear(4, 2)
        with torch.no_grad():
            for number, p in enumerate(self.parameters()):
                p.copy_(torch.linspace(-0.5, 0.7, p.numel()).view(p.shape) + 0.01 * number)

    def forward(self, batch: Batch) -> Output:
        here = [name for name in self.KEYS if name in batch]
        if not here:
            raise ValueError("a batch must have a modality")
        means = {name: batch[name].flatten(1).float().mean(1, keepdim=True) for name in here}
        scale = {"image": 0.01, "text": 0.1, "audio": 10.0, "series": 0.001}
        seen = [self.embed[name](scale[name] * means[name]) for name in here]
        features = torch.relu(torch.stack(seen).mean(0))
        return Output(self.head(features), features)


def sums(answers: Sequence[str], vocab_size: int, *, seed: int = 0) -> Sums:
    """The model for recipes."""
    del answers, vocab_size, seed
    return Sums()


def both(answers: Sequence[str], vocab_size: int, *, seed: int = 0) -> nn.Module:
    """A model that needs picture and text."""
    del answers, vocab_size, seed

    class Both(Sums):
        reads_absent: ClassVar[bool] = False

        def forward(self, batch: Batch) -> Output:
            assert batch["image"].shape[1:] == (3, 8, 8)
            assert "audio" not in batch
            return super().forward({name: batch[name] for name in ("image", "text", "text_mask")})

    return Both()


sums.tokenizer = both.tokenizer = WordTokenizer  # type: ignore[attr-defined]


def table(of: Examples) -> Table:
    pictures = torch.zeros(1, 3, 0, 0, dtype=torch.uint8) if isinstance(of.images, NoPictures) else None
    kinds = sorted(set(of.types))
    return with_modalities(encode(of, WordTokenizer(["dark", "bright"]), ("no", "yes"), kinds, pictures), of)


def recipe_file(folder: Path, model: str, data: str, *more: str) -> Path:
    path = folder / "mine.toml"
    lines = [
        '[algorithm]\nname = "fedavg"',
        f'[model]\nname = "modal_examples:{model}"',
        f'[data]\nname = "modal_examples:{data}"',
        '[task]\nname = "vqa"',
        "[local]\nlr = 1e-2\nbatch_size = 8",
        "[run]\nrounds = 1",
        *more,
    ]
    path.write_text("\n".join(lines))
    return path

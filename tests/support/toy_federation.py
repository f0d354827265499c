"""Plain squares for federations in processes of their own: three clients that know two colours each."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

from confed.data.examples import Examples, FederatedDataset, Split
from confed.data.federate import words
from confed.data.ml_files.records import LabelRecord
from confed.data.ml_files.table import build_table
from confed.data.picture_files import PictureFiles
from confed.federation.protocols import Output
from confed.models.tokenizer import WordTokenizer
from confed.registry import register_dataset

RGB = {"red": (220, 40, 40), "orange": (240, 150, 30), "blue": (40, 60, 220), "cyan": (40, 200, 220)}
CLIENTS = {"warm": ("red", "orange"), "cold": ("blue", "cyan"), "both": ("red", "cyan")}
QUESTION = "which colour is this?"


@register_dataset
def squares(train: int = 24, test: int = 8, *, seed: int = 0) -> FederatedDataset:
    """The dataset.

    Args:
        train: training questions per client.
        test: validation and test questions per client.
        seed: decides the noise in the pictures.
    """
    rng = np.random.default_rng(seed)

    def draw(place: str, shown: tuple[str, ...], count: int) -> Examples:
        answers = [shown[i % len(shown)] for i in range(count)]
        plain = np.array([RGB[answer] for answer in answers]).reshape(-1, 1, 1, 3)
        noisy = plain + rng.normal(0, 40, (count, 64, 64, 3))
        return Examples(
            images=noisy.clip(0, 255).astype(np.uint8),
            image_index=np.arange(count),
            questions=[QUESTION] * count,
            answers=answers,
            types=["colour"] * count,
            names=[f"{place}-{i}" for i in range(count)],
        )

    def client(name: str, *shown: str) -> Split:
        sizes = {"train": train, "validation": test, "test": test}
        return Split(**{role: draw(f"{name}/{role}", shown, count) for role, count in sizes.items()})

    return FederatedDataset(
        name="squares",
        answers=tuple(RGB),
        clients={name: client(name, *shown) for name, shown in CLIENTS.items()},
        unseen={"everything": draw("everything", tuple(RGB), test)},
        words=words([QUESTION]),
    )


def own_squares(only: str = "", train: int = 8, test: int = 4, *, seed: int = 0) -> FederatedDataset:
    """Squares as hospitals have them: with one client's answers and words alone; places nobody trains in are public.

    Args:
        only: the client that is here; empty for all of them.
        train: training questions per client.
        test: validation and test questions per client.
        seed: see :func:`squares`.
    """
    whole = squares(train, test, seed=seed)
    names = [name for name in CLIENTS if only in ("", name)]
    clients = {name: _asking(whole.clients[name], f"what colour has the {name} one?") for name in names}
    asked = [split.train.questions[0] for split in clients.values()]
    known = tuple(dict.fromkeys(colour for name in names for colour in CLIENTS[name]))
    return replace(whole, answers=known, clients=clients, words=words([QUESTION, *asked]), outside=True)


def _asking(split: Split, question: str) -> Split:
    asked = [replace(e, questions=[question] * len(e)) for e in (split.train, split.validation, split.test)]
    return Split(*asked)


def own_shades(only: str = "", train: int = 8, test: int = 4, *, seed: int = 0) -> FederatedDataset:
    """Pictures with any number of colours; a hospital names its own two, and no others.

    Args:
        only: the client that is here; empty for all of them.
        train: training pictures per client.
        test: validation and test pictures per client.
        seed: decides the noise in the pictures.
    """
    names = [name for name in CLIENTS if only in ("", name)]
    labels = tuple(sorted({colour for name in names for colour in CLIENTS[name]}))
    clients: dict[str, Split] = {}
    for name in names:
        rng = np.random.default_rng([seed, list(CLIENTS).index(name)])
        truth = rng.random((train + 2 * test, 2)) < 0.5
        shown = truth @ np.array([RGB[colour] for colour in CLIENTS[name]]) / 2
        pictures = (shown[:, None, None] + rng.integers(0, 30, (len(truth), 8, 8, 3))).astype(np.uint8)
        records = [
            LabelRecord(Path("made up"), i, f"{name}-{i}", tuple(np.array(CLIENTS[name])[row]), picture=f"{i}.png")
            for i, row in enumerate(truth)
        ]
        table, kinds = build_table(records, labels)[""], [name] * len(truth)
        rows = np.split(np.arange(len(truth)), [train, train + test])
        clients[name] = Split(*(Examples.labelled(table, pictures, own.astype(np.int64), kinds) for own in rows))
    return FederatedDataset("shades", labels, clients, {})


class Means(nn.Module):
    """Linear in the mean colours."""

    def __init__(self, answers: int, rng: torch.Generator) -> None:
        super().__init__()
        self.classifier = nn.Linear(3, answers)
        with torch.no_grad():
            self.classifier.weight.copy_(0.1 * torch.randn(answers, 3, generator=rng))
            self.classifier.bias.zero_()

    def forward(self, batch: dict[str, torch.Tensor]) -> Output:
        features = batch["image"].float().mean((2, 3)) / 100
        return Output(self.classifier(features), features)


def means(answers, vocab_size: int = 0, *, seed: int = 0) -> Means:
    """The model."""
    del vocab_size
    return Means(len(answers), torch.Generator().manual_seed(seed))


means.tokenizer = WordTokenizer  # type: ignore[attr-defined]


def squares_of_four(train: int = 8, test: int = 4, *, seed: int = 0) -> FederatedDataset:
    """Squares with a fourth client, "late", which has the pictures of "both"."""
    plain = squares(train, test, seed=seed)
    return replace(plain, clients={**plain.clients, "late": plain.clients["both"]})


def _pictures_of(dataset: FederatedDataset) -> list[Examples]:
    return [part for split in dataset.clients.values() for part in (split.train, split.validation, split.test)]


def write_squares(root: Path, train: int = 8, test: int = 4) -> None:
    """The clients' pictures of :func:`squares` as files for :func:`squares_in_files`."""
    root.mkdir()
    for part in _pictures_of(squares(train, test)):
        for pixels, name in zip(part.images, part.names, strict=True):
            Image.fromarray(pixels).save(root / f"{name.replace('/', '-')}.png")


def squares_in_files(root: str, train: int = 8, test: int = 4) -> FederatedDataset:
    """Squares whose pictures are files.

    Args:
        root: their folder.
        train: training questions per client.
        test: validation and test questions per client.
    """
    whole = squares(train, test)
    files = [Path(root) / f"{name.replace('/', '-')}.png" for part in _pictures_of(whole) for name in part.names]
    table, first = PictureFiles(files, 64, unreadable=0.5), 0
    clients: dict[str, Split] = {}
    for client, split in whole.clients.items():
        parts: list[Examples] = []
        for part in (split.train, split.validation, split.test):
            parts.append(replace(part, images=table, image_index=np.arange(first, first + len(part))))
            first += len(part)
        clients[client] = Split(*parts)
    return replace(whole, clients=clients, unseen={})

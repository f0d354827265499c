"""The work that every participant does: data, order of batches, cohorts and initial values, as arrays in a folder.

``prepare`` draws them once, with PyTorch and as confed draws cohorts and orders; participants only read them, so that
libraries without PyTorch see the same numbers. Each calls :meth:`Work.began` after its first round and
:meth:`Work.ended` with its final values.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Size:
    """One piece of work: a network of ``networks.py`` and a federation of equal clients, one epoch a round."""

    title: str
    network: str
    clients: int
    cohort: int
    examples: int
    batch: int
    rounds: int
    optimizer: str  # "sgd" or "adamw", without weight decay
    lr: float
    trained: str = ""  # how the names of the tensors begin that learn


SIZES = {
    "W1": Size("mini VL transformer, 8 clients, AdamW", "mini_vl", 8, 8, 128, 32, 3, "adamw", 1e-3),
    "W2": Size("784 x 10 linear, 10 of 1,000, SGD", "linear", 1000, 10, 60, 10, 41, "sgd", 0.1),
    "W3": Size("CNN, 50 of 1,000, SGD", "cnn", 1000, 50, 40, 10, 4, "sgd", 0.5),
    "W4": Size("LoRA on a generative VLM, 4 clients, AdamW", "vlm_lora", 4, 4, 16, 4, 4, "adamw", 1e-3, "lora"),
    "W5": Size("frozen encoder with head, 8 clients, AdamW", "mini_vl", 8, 8, 128, 32, 5, "adamw", 1e-3, "head"),
}
CLASSES, WORDS, LENGTH = 10, 120, 16


class Work:
    """Prepared work, and the bookkeeping of the process that does it.

    Attributes:
        columns: name -> (clients, examples, ...).
        cohorts: client numbers, (rounds, cohort).
        orders: order of a cohort's examples, (rounds, cohort, examples).
        initial: name -> values, of all tensors.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, folder.name
        self.size = SIZES[self.name]
        self.columns: Arrays = {path.stem: np.load(path) for path in sorted(folder.glob("columns/*.npy"))}
        self.cohorts: np.ndarray = np.load(folder / "cohorts.npy")
        self.orders: np.ndarray = np.load(folder / "orders.npy")
        with np.load(folder / "initial.npz") as file:
            self.initial: Arrays = dict(file)

    def ordered(self, round: int, place: int) -> Arrays:
        """All examples of a cohort's client, in the order in which it learns from them."""
        rows, client = self.orders[round, place], self.cohorts[round, place]
        return {name: column[client][rows] for name, column in self.columns.items()}

    def batches(self, round: int, place: int) -> Iterator[Arrays]:
        """The batches of a cohort's client, gathered one by one as a training loop does."""
        rows, client = self.orders[round, place], self.cohorts[round, place]
        for start in range(0, len(rows), self.size.batch):
            chosen = rows[start : start + self.size.batch]
            yield {name: column[client][chosen] for name, column in self.columns.items()}

    def learns(self, name: str) -> bool:
        """Whether a tensor is trained."""
        return self.size.trained in name

    def began(self) -> None:
        """The first round is over; what follows is timed once the measuring process has taken its readings."""
        _told("began")

    def ended(self, final: Mapping[str, Any]) -> None:
        """All rounds are over; ``final`` are the values that were learned."""
        _told("ended")
        np.savez(self.folder / "final.npz", **{name: np.asarray(final[name]) for name in sorted(final)})


def _told(what: str) -> None:
    print(f"rivals: {what}", file=sys.__stdout__, flush=True)
    sys.__stdin__.readline()


def begun(arguments: list[str] | None = None) -> tuple[Work, str]:
    """The work in the folder that a participant's process is given, and the way to do it."""
    folder, way = sys.argv[1:3] if arguments is None else arguments
    return Work(Path(folder)), way


# Preparing ------------------------------------------------------------------------------------------------------


def prepare(name: str, folder: Path, seed: int = 0) -> None:
    """Writes the arrays of one piece of work."""
    import torch

    from confed.federation.randomness import generator, sample_cohort
    from networks import create, examples

    size, rng = SIZES[name], torch.Generator().manual_seed(seed)
    (folder / "columns").mkdir(parents=True)
    for column, values in examples(size, folder, rng).items():
        np.save(folder / "columns" / f"{column}.npy", values.numpy())
    cohorts = [sample_cohort(size.clients, size.cohort, 0, round) for round in range(size.rounds)]
    np.save(folder / "cohorts.npy", np.array(cohorts))
    orders = [
        [torch.randperm(size.examples, generator=generator(0, round, f"{client}", "order/0")) for client in cohort]
        for round, cohort in enumerate(cohorts)
    ]
    np.save(folder / "orders.npy", torch.stack([torch.stack(of_round) for of_round in orders]).numpy())
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        values = create(size, folder).state_dict()
    np.savez(folder / "initial.npz", **{name: tensor.numpy() for name, tensor in values.items()})

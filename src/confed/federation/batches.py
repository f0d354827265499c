"""Size and device of a batch.

``local.augment = "flip"`` turns a training picture left to right with probability 1/2, anew in every epoch. The draw
for an example depends on (seed, round, client, epoch, example) and not on the batch it is in, so that a run gives the
same numbers for any number of workers and after a resume. Evaluations see pictures as they are.

What frozen networks make of an example is kept for a round (:func:`confed.federation.teacher.once_per_round`); a batch
says under ``mirrored`` which of its examples are turned, and either side is kept apart.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from confed.federation.protocols import Batch, NoAugmentation, RandomAccess

if TYPE_CHECKING:
    from confed.federation.client import Client

# Data augmentation of training batches: pictures mirrored at random -------------------------------------------

MIRRORED = "mirrored"  # key of a batch: which of its examples are mirrored, bool (B,)
PICTURES = ("image", "image2")  # keys of a batch that hold pictures, (B, 3, H, W); both of a pair are turned alike


def training_batches(client: "Client", purpose: str, at_once: int = 1) -> Iterable[Batch]:
    """One shuffled epoch of a client's training batches, augmented as ``client.local`` says.

    Data stay as they are where another input, such as others' scores, was computed from each example
    (:class:`confed.federation.protocols.NoAugmentation`).

    Mirroring for a model that reads regions, which were made from the pictures as they are, is a ValueError.

    Args:
        client: whose examples.
        purpose: names the random stream of the order; each epoch has its own.
        at_once: how many batches are one.
    """
    batches = client.data.train(at_once * client.local.batch_size, client.rng(purpose))
    if client.local.augment == "none" or (isinstance(client.data, NoAugmentation) and client.data.fixed):
        return batches
    chosen = torch.rand(len(client.data), generator=client.rng(f"{purpose}/flip")) < 0.5
    return _mirrored(batches, chosen)


def sampled_batches(client: "Client", numbers: Tensor, batch_size: int, purpose: str) -> Iterable[Batch]:
    """Training batches of some of a client's examples, augmented as ``client.local`` says."""
    data = client.data
    if not isinstance(data, RandomAccess):
        raise ValueError(f"the training examples of client {client.info.id!r} cannot be sampled one by one")
    batches = data.chosen(numbers, batch_size)
    if client.local.augment == "none" or (isinstance(data, NoAugmentation) and data.fixed):
        return batches
    return _mirrored(batches, torch.rand(len(data), generator=client.rng(f"{purpose}/flip")) < 0.5)


def versions(client: "Client") -> int:
    """Number of versions of a training example in a round."""
    return 2 if client.local.augment == "flip" else 1


def _mirrored(batches: Iterable[Batch], chosen: torch.Tensor) -> Iterator[Batch]:
    for batch in batches:
        if "regions" in batch:
            raise ValueError(
                'local.augment must be "none" for a model that reads regions of pictures: they were made from the '
                'pictures as they are, got "flip"'
            )
        turned = chosen[batch["index"].cpu()]
        pictures = {
            name: torch.where(turned.view(-1, 1, 1, 1).to(batch[name].device), batch[name].flip(-1), batch[name])
            for name in PICTURES
            if name in batch and batch[name].ndim == 4
        }
        yield {**batch, **pictures, MIRRORED: turned} if pictures else batch


# Size and device of a batch -----------------------------------------------------------------------------------


def rows(batch: Batch) -> int:
    """Number of examples of a batch, B."""
    return len(next(iter(batch.values())))


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on that device; itself where it is there already.

    To a GPU it goes through page-locked memory, from where it is copied while the GPU computes.
    """
    if device.type == "cpu":
        return batch
    return {name: _sent(tensor, device) for name, tensor in batch.items()}


def gathered(table: Tensor, numbers: Tensor) -> Tensor:
    """Rows of a table, on its device, by their numbers, which may be on the host."""
    # Square brackets take three times as long.
    return table.index_select(0, numbers if table.device == numbers.device else _sent(numbers, table.device))


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)

"""Pretraining data of ``resnet_multilabel_mini``: public pictures and the names of what stands in them.

The part of ImageNet in FedLGT's tables is played by the public split of the built-in benchmark: randomised styles, no
graph that a client holds. Labels are single words, nouns and colours. Which thing has which colour, and what stands
next to what, is left to the federation. Beside the labels of the whole picture the model says what stands in each of
its 16 cells, which is what makes so small a model learn in minutes; the layer for that is not kept.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from confed.data.seeding import generator
from confed.data.table import Table
from confed.datasets.scenes.graph import COLOURS, GRID, NOUNS, Tags, sample
from confed.datasets.scenes.render import render_public
from confed.metrics.multilabel import class_average_precision
from confed.models.layers import seeded_linear
from confed.models.pretrained import States

LABELS: tuple[str, ...] = (*NOUNS, *COLOURS)


EMPTY = 0.2
"""Weight of empty cells, two in three, which would drown the others."""


class CellNames(nn.Module):
    """Scores of the noun and the colour in each of a picture's 4 x 4 cells, from the model's last plane."""

    def __init__(self, width: int, rng: torch.Generator) -> None:
        super().__init__()
        classes = {"noun": len(NOUNS) + 1, "colour": len(COLOURS) + 1}
        self.layers = nn.ModuleDict({k: seeded_linear(width, n, width**-0.5, rng) for k, n in classes.items()})

    def losses(self, states: States, cells: Mapping[str, Tensor]) -> Tensor:
        """Sum of both mean cross-entropies, a scalar."""
        assert states.late is not None
        side = round(states.late.shape[1] ** 0.5)
        plane = states.late.transpose(1, 2).unflatten(2, (side, side))
        hidden = F.avg_pool2d(plane, side // GRID).flatten(2).transpose(1, 2).flatten(0, 1)
        total = hidden.new_zeros(())
        for name, layer in self.layers.items():
            scores = layer(hidden)
            weight = scores.new_ones(scores.shape[1])
            weight[0] = EMPTY
            total = total + F.cross_entropy(scores, cells[name].flatten(), weight)
        return total


def public_pictures(count: int, seed: int) -> tuple[Table, Tags]:
    """Pictures of 3 to 6 things, ``labels`` (N, 30) in {0, 1} in the order of :data:`LABELS`; and what stands where."""
    uniform = np.full(len(COLOURS), 1 / len(COLOURS))
    graphs = sample("public", NOUNS, uniform, generator(seed, "graphs", "public", "labels"))
    tags = Tags.join([next(graphs) for _ in range(count)])
    pictures = render_public(tags, generator(seed, "pixels", "public", "labels"))
    truth = np.zeros((count, len(LABELS) + 2), dtype=np.float32)  # the first column of each part stands for empty cells
    rows = np.arange(count)[:, None]
    truth[rows, tags.noun] = 1
    truth[rows, len(NOUNS) + 1 + tags.colour] = 1
    truth = np.delete(truth, [0, len(NOUNS) + 1], axis=1)
    images = torch.from_numpy(np.ascontiguousarray(pictures.transpose(0, 3, 1, 2)))
    return Table(images, torch.arange(count), {"labels": torch.from_numpy(truth)}), tags


@torch.inference_mode()
def macro_average_precision(
    model: nn.Module, table: Table, rows: Tensor | None = None, batch_size: int = 256
) -> dict[str, float]:
    """Mean over classes of average precision (C-AP): of nouns, of colours, and ``overall``; {} without rows."""
    rows = torch.arange(len(table)) if rows is None else rows
    if not len(rows):
        return {}
    training = model.training
    model.eval()
    scores = torch.cat([model(batch).logits for batch in table.batches(batch_size, order=rows)])
    model.train(training)
    truth = table.columns["labels"][rows].bool()
    # A class that no picture has counts as 0, which in held-out thousands does not occur.
    precision = np.nan_to_num(class_average_precision(scores.numpy(), truth.numpy()))
    parts = {"nouns": precision[: len(NOUNS)], "colours": precision[len(NOUNS) :], "overall": precision}
    return {name: float(class_precision.mean()) for name, class_precision in parts.items()}

"""Tagging loss: each token of a public question is taught what it stands for.

* After the first visual block every patch scores its noun, its colour, its size and its quadrant;
* after the first and after the second visual block every patch scores the colour of its right neighbour;
* after fusion every noun of the question scores the colour, the size and the quadrant of the thing it names and
  the colour of that thing's right neighbour, and every colour scores the noun of its thing and the number of
  its things.

Scores are dot products with the word embeddings of those very words, so patches and questions speak of the
same vectors. Without the third group the patches are recognised within an epoch or two, but the answers stay
at chance for many more, until words happen to find their patches; with it they bind at once.

The picture encoder ``resnet_multilabel_mini`` has no words: it learns the labels of public pictures (in the place of
FedLGT's ImageNet), and beside them what stands in each cell, by a layer that is not kept.
"""

from collections.abc import Callable, Mapping, Sequence

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


class Tagger(nn.Module):
    """Scores of what each token stands for, as dot products with word embeddings."""

    def __init__(self, width: int, words: Mapping[str, Tensor], rng: torch.Generator) -> None:
        super().__init__()
        self.words = dict(words)
        self.layers = nn.ModuleDict()
        for name in ("patch", "patch_right", "late_right", "word", "word_right"):
            linear = seeded_linear(width, width, width**-0.5, rng)
            self.layers[name] = nn.Sequential(nn.LayerNorm(width), linear)

    def loss(self, layer: str, hidden: Tensor, targets: Mapping[str, Tensor], embeddings: Tensor) -> Tensor:
        """Sum over tags of the mean cross-entropy."""
        hidden, total = self.layers[layer](hidden), hidden.new_zeros(())
        for name, target in targets.items():
            ids = self.words[name]
            vectors = embeddings[ids] if ids.ndim == 1 else embeddings[ids].sum(1)
            weight = hidden.new_ones(len(vectors))
            if name in {"noun", "colour", "size"}:
                weight[0] = 0.2  # two cells in three are empty; at full weight they would drown the others
            scored = target >= 0
            if scored.any():
                total = total + F.cross_entropy(hidden[scored] @ vectors.T, target[scored], weight)
        return total

    def losses(self, states: States, text: Tensor, cells: Mapping[str, Tensor]) -> Tensor:
        """Sum of all tag losses that the model's states allow, a scalar."""
        words = states.words
        assert words is not None
        each = len(text) // len(states.early) if states.early is not None else 1
        shown = {name: value[::each] for name, value in cells.items()}
        right = {"colour": shown["right"]}
        parts: list[Tensor] = []
        if states.early is not None:
            per_patch = {name: shown[name] for name in ("noun", "colour", "size", "quadrant")}
            parts += [self.loss("patch", states.early, per_patch, words)]
            parts += [self.loss("patch_right", states.early, right, words)]
        if states.late is not None:
            parts += [self.loss("late_right", states.late, right, words)]
        if states.asked is not None:
            per_word = word_targets(text, self.words, cells)
            word_right = {"colour": per_word.pop("right")}
            parts += [self.loss("word", states.asked, per_word, words)]
            parts += [self.loss("word_right", states.asked, word_right, words)]
        return sum(parts, words.new_zeros(()))


def word_targets(text: Tensor, words: Mapping[str, Tensor], cells: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the nouns and colours of questions stand for in their pictures."""
    meant: dict[str, tuple[Tensor, Tensor]] = {}
    for kind in ("noun", "colour"):
        matches = text[:, :, None] == words[kind][1:]
        named = torch.where(matches.any(-1), 1 + matches.int().argmax(-1), 0)
        present = (named[:, :, None] == cells[kind][:, None]) & (named > 0)[:, :, None]
        meant[kind] = named > 0, present
    is_noun, things = meant["noun"]
    is_colour, coloured = meant["colour"]
    number = things.sum(-1)
    targets = {
        name: torch.where(is_noun & (number <= 1), (things * cells[name][:, None]).sum(-1), -1)
        for name in ("colour", "size")
    }
    for name in ("quadrant", "right"):
        targets[name] = torch.where(is_noun & (number == 1), (things * cells[name][:, None]).sum(-1), -1)
    number = coloured.sum(-1)
    targets["noun"] = torch.where(is_colour & (number <= 1), (coloured * cells["noun"][:, None]).sum(-1), -1)
    targets["number"] = torch.where(is_colour & (number < len(words["number"])), number, -1)
    return targets


def cell_targets(tags: Tags) -> dict[str, Tensor]:
    """What stands in the 16 cells of M pictures, and where each cell lies, all (M, 16); see :class:`Tagger`."""
    arrays = {"noun": tags.noun, "colour": tags.colour, "size": tags.size}
    targets = {name: torch.from_numpy(values) for name, values in arrays.items()}
    plane = targets["colour"].unflatten(1, (GRID, GRID))
    targets["right"] = F.pad(plane[:, :, 1:], (0, 1)).flatten(1)
    rows, columns = torch.meshgrid(torch.arange(GRID), torch.arange(GRID), indexing="ij")
    quadrant = (2 * (rows >= GRID // 2) + (columns >= GRID // 2)).flatten()
    targets["quadrant"] = quadrant.expand(len(tags), -1)
    return targets


def tag_words(ids: Callable[[Sequence[str]], Tensor], nothing: int) -> dict[str, Tensor]:
    """Token ids of the words that tags are made of; see :class:`Tagger`."""
    from confed.datasets.scenes import COLOURS, NOUNS, SIZES

    empty = torch.tensor([nothing])
    groups = {
        name: torch.cat([empty, ids(words)]) for name, words in (("noun", NOUNS), ("colour", COLOURS), ("size", SIZES))
    }
    rows, columns = ids(("top", "bottom")), ids(("left", "right"))
    corners = torch.stack([rows.repeat_interleave(2), columns.repeat(2)], 1)
    return groups | {"quadrant": corners, "number": ids([str(number) for number in range(6)])}


# Names of what stands in cells --------------------------------------------------------------------------------

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

"""Tagging loss: each token of a public question is taught what it stands for.

* After the first visual block every patch scores its noun, its colour, its size and its quadrant;
* after the first and after the second visual block every patch scores the colour of its right neighbour;
* after fusion every noun of the question scores the colour, the size and the quadrant of the thing it names and
  the colour of that thing's right neighbour, and every colour scores the noun of its thing and the number of
  its things.

Scores are dot products with the word embeddings of those very words, so patches and questions speak of the
same vectors. Without the third group the patches are recognised within an epoch or two, but the answers stay
at chance for many more, until words happen to find their patches; with it they bind at once.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from confed.models.layers import seeded_linear
from confed.models.pretrained import States

if TYPE_CHECKING:
    from confed.datasets.scenes import Tags


GRID = 4


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


def cell_targets(tags: "Tags") -> dict[str, Tensor]:
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

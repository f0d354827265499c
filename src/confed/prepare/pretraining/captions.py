"""Pretraining of a ViLT on captions alone: masked words, picture-text matching and word-patch alignment.

The three losses of ViLT (Kim, Son and Kim, ICML 2021, sections 3.2 and 4.1): nobody asks or answers, so that a
benchmark of questions is new to the backbone, as VQA is to the published ``vilt-b32-mlm``. The alignment of words and
patches, which ViLT infers by optimal transport, is known here, because captions are made from what stands in the cells.

A caption tells of some of a picture's things, in one of the ways of :mod:`confed.datasets.scene_captions`. Most
captions have masked words; of the others half do not belong to their picture: they are another one's, or have the
colour or the noun of one thing changed.
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from confed.data.seeding import generator
from confed.data.table import Table
from confed.federation.protocols import Batch, Output
from confed.models import create_model
from confed.models.layers import seeded_linear
from confed.models.pretrained import States, save
from confed.models.tokenizer import SPECIAL_TOKENS, WordTokenizer

if TYPE_CHECKING:
    from confed.datasets.scenes.graph import Object


ANSWERS = ("another picture", "this picture")
"""What the matching head says of a caption."""
KINDS = ("this picture", "another picture", "one word changed", "masked")
"""Kinds of examples."""
CAPTIONS = 4
"""Captions of a picture."""
SHARES = (0.15, 0.1, 0.05, 0.7)
"""How often each kind is learned from."""
MASKED = 0.4
"""Share of the words with a meaning of their own that are masked, one at least."""
EMPTY = "a an and there is next to with stands at the things one of them"
"""Words without a meaning of their own."""
NO_CELL = -1


def captioned_scenes(count: int, validation: int, seed: int) -> tuple[Table, Tensor, Tensor, WordTokenizer]:
    """Public pictures with captions, some of them masked, some of them wrong."""
    from confed.datasets.scene_captions import WAYS, tell, tell_words
    from confed.datasets.scenes.graph import COLOURS, NOUNS, Tags, objects, sample
    from confed.datasets.scenes.render import render_public

    tokenizer = WordTokenizer(tell_words())
    uniform = np.full(len(COLOURS), 1 / len(COLOURS))
    graphs = sample("public", NOUNS, uniform, generator(seed, "graphs", "public", "masked captions"))
    pictures = -(-count // CAPTIONS)
    tags = Tags.join([next(graphs) for _ in range(pictures)])
    things = [objects(tags, picture) for picture in range(pictures)]
    rng = generator(seed, "masked captions", "public")
    index = np.repeat(np.arange(pictures), CAPTIONS)[:count]
    kinds = rng.choice(4, size=count, p=SHARES)
    held = np.arange(count) >= (count - validation) // CAPTIONS * CAPTIONS
    kinds[held] = rng.choice(3, size=int(held.sum()), p=(0.5, 0.25, 0.25))
    told: list[str] = []
    for picture, kind in zip(index.tolist(), kinds.tolist(), strict=True):
        way = WAYS[int(rng.integers(len(WAYS)))]
        shown = things[picture if KINDS[kind] != "another picture" else int(rng.integers(pictures))]
        told.append(
            mismatched(shown, way, rng) if KINDS[kind] == "one word changed" else tell(_some(shown, way, rng), way)
        )
    text, text_mask = tokenizer(told)
    hidden = masked(text, torch.from_numpy(kinds == KINDS.index("masked")), len(SPECIAL_TOKENS), rng)
    label = torch.from_numpy(np.array([1, 0, 0, -1])[kinds])
    columns = {
        "text": torch.where(hidden >= 0, SPECIAL_TOKENS.index("[MASK]"), text),
        "text_mask": text_mask,
        "label": label,
        "type": torch.from_numpy(kinds),
        "masked": hidden,
        "cell": _cells(told, [things[i] for i in index], label, text),
    }
    drawn = render_public(tags, generator(seed, "pixels", "public", "masked captions"))
    images = torch.from_numpy(np.ascontiguousarray(drawn.transpose(0, 3, 1, 2)))
    sides = torch.from_numpy(held)
    return (
        Table(images, torch.from_numpy(index), columns), (~sides).nonzero()[:, 0], sides.nonzero()[:, 0], tokenizer
    )  # fmt: skip


def mismatched(things: Sequence["Object"], way: str, rng: np.random.Generator) -> str:
    """A caption that is wrong about one thing: no thing of the picture has both this colour and this noun."""
    from confed.datasets.scene_captions import tell
    from confed.datasets.scenes.graph import COLOURS, NOUNS

    pairs = {(thing.colour, thing.noun) for thing in things}
    while True:
        chosen = _some(things, way, rng)
        number = int(rng.integers(len(chosen)))
        field, all_words = (("colour", COLOURS), ("noun", NOUNS))[int(rng.integers(2))]
        near = [getattr(thing, field) for thing in things]
        words = near if rng.random() < 0.5 else all_words
        changed = chosen[number]._replace(**{field: words[int(rng.integers(len(words)))]})
        text = tell([*chosen[:number], changed, *chosen[number + 1 :]], way)
        if (changed.colour, changed.noun) not in pairs and f"{changed.colour} {changed.noun}" in text:
            return text


def masked(text: Tensor, rows: Tensor, special: int, rng: np.random.Generator) -> Tensor:
    """Tokens that are hidden, -1 where none is, of the shape (N, L) of ``text``."""
    from confed.datasets.scene_captions import tell_words

    vocabulary = WordTokenizer(tell_words()).vocabulary
    means = torch.tensor([i >= special and word not in EMPTY.split() for i, word in enumerate(vocabulary)])
    able = means[text]
    luck = torch.from_numpy(rng.random(tuple(text.shape))).masked_fill(~able, 2.0)
    chosen = (luck < MASKED) | (luck == luck.amin(1, keepdim=True))
    return torch.where(chosen & able & rows[:, None], text, -1)


def _some(things: Sequence["Object"], way: str, rng: np.random.Generator) -> list["Object"]:
    """Some of a picture's things; all of them where a caption says how many there are."""
    size = len(things) if way == "count" else int(rng.integers(1, len(things) + 1))
    return [things[i] for i in sorted(rng.choice(len(things), size, replace=False).tolist())]


def _cells(told: Sequence[str], things: Sequence[Sequence["Object"]], label: Tensor, text: Tensor) -> Tensor:
    """Where the thing of each colour and noun stands, if the caption is right and there is one such thing."""
    cells = torch.full_like(text, NO_CELL)
    for row, (caption, row_things) in enumerate(zip(told, things, strict=True)):
        if label[row] == 0:
            continue
        words = caption.split()
        for place, pair in enumerate(itertools.pairwise(words)):
            places = [thing.cell for thing in row_things if (thing.colour, thing.noun) == pair]
            if len(places) == 1:
                cells[row, place + 1 : place + 3] = places[0]  # the first token opens the text
    return cells


class CaptionLearner(nn.Module):
    """The untrained ViLT with what the three losses need."""

    def __init__(self, model: str, tokenizer: WordTokenizer, seed: int) -> None:
        super().__init__()
        self.body: Any = create_model(
            model, answers=ANSWERS, vocab_size=tokenizer.vocab_size, pretrained=False, seed=seed
        )
        width = self.body.vilt.config.hidden_size
        rng = torch.Generator().manual_seed(seed)
        self.words = nn.Sequential(seeded_linear(width, width, width**-0.5, rng), nn.GELU(), nn.LayerNorm(width))
        self.bias = nn.Parameter(torch.zeros(tokenizer.vocab_size))
        self.word = seeded_linear(width, width, width**-0.5, rng)
        self.patch = seeded_linear(width, width, width**-0.5, rng)

    def forward(self, batch: Batch) -> Output:
        """Scores of :data:`ANSWERS`, (B, 2), and the pooled representation."""
        return self.body(batch)

    def pretraining_states(self, batch: Batch) -> States:
        """The sum of the three losses; see :class:`confed.models.pretrained.Pretrainable`."""
        hidden, mask, _ = self.body.embed(batch)
        for block in self.body.vilt.encoder.layer:
            hidden = block(hidden, mask)[0]
        return States(answer_loss=sum(self._losses(hidden, batch).values(), hidden.new_zeros(())))

    def _losses(self, hidden: Tensor, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Loss of masked words, of matching and of alignment; hidden is the last block's output (B, S, d)."""
        length = batch["text"].shape[1]
        body = self.body
        normal = body.vilt.layernorm(hidden)
        words, patches = normal[:, :length], normal[:, -body.grid[0] * body.grid[1] :]
        losses: dict[str, Tensor] = {}
        if (gone := batch["masked"] >= 0).any():
            vectors = body.vilt.embeddings.text_embeddings.word_embeddings.weight
            scores = self.words(words[gone]) @ vectors.T + self.bias
            losses["masked words"] = F.cross_entropy(scores, batch["masked"][gone])
        if (labelled := batch["label"] >= 0).any():
            scores = body.classifier(body.pool(hidden[labelled]))
            losses["matching"] = F.cross_entropy(scores, batch["label"][labelled])
        # A masked word is aligned too: its place follows from the words around it.
        if (aligned := batch["cell"] != NO_CELL).any():
            near = torch.einsum("bld,bpd->blp", self.word(words), self.patch(patches)) * patches.shape[2] ** -0.5
            losses["alignment"] = F.cross_entropy(near[aligned], batch["cell"][aligned])
        return losses

    def save(self, file: Path, facts: Mapping[str, Any]) -> None:
        """Writes the ViLT with its matching head, in the format of the other minis."""
        save(self.body, file, **facts)

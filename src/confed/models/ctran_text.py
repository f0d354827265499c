"""C-Tran network for texts: label tokens that attend to words and to each other.

The model is :class:`confed.models.ctran_module.CTran` with the states of a text's words in the place of a picture's
visual tokens: word and position embeddings, encoder layers of C-Tran's kind that see words only, then the joint layers.
FedLGT names texts as future work; this is the smallest step from its model to them.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from confed.federation.protocols import Batch, Output
from confed.models.ctran_module import EncoderLayer, LabelGraph, LabelReadout, LabelTokens
from confed.models.heads import count
from confed.models.inputs import additive_mask
from confed.models.label_embeddings import constant_tokens
from confed.models.normalisation import constant_names
from confed.models.tokenizer import WordTokenizer
from confed.registry import register_model

__all__ = ["CTranText", "ctran_text_mini"]


class CTranText(nn.Module):
    """Word embeddings, layers in which words look at each other, and layers in which labels look at both.

    Batches have ``text`` and ``text_mask`` (B, L), int64, and may have ``known`` (B, C): -1 unknown, 0 known absent, 1
    known present.

    Args:
        labels: number of labels C.
        vocab_size: number of token ids.
        rng: where all initial values come from.
        width: features of a token, d.
        max_length: tokens of a text, L.
        word_layers: layers that see words only.
        layers: joint layers.
        heads: attention heads; must divide the width.
        dropout: dropout probability of all layers.
        embeddings: constant label embeddings (C, d), or None to learn them.
        states: constant embeddings (2, d) of "known absent" and "known present", or None to learn them.
        graph: add a :class:`confed.models.ctran_module.LabelGraph`.

    Attributes:
        label_graph: name of the submodule that is the label graph; "" without one.

    Raises:
        ValueError: a count is below 1, the heads do not divide the width, or embeddings have another shape.
    """

    reads_states = True
    """Whether ``known`` in a batch makes a difference; see :class:`confed.models.ctran_module.CTran`."""
    answer_head = "classifier"
    """Name of the submodule that scores labels."""

    def __init__(
        self,
        labels: int,
        vocab_size: int,
        rng: torch.Generator,
        *,
        width: int = 64,
        max_length: int = 32,
        word_layers: int = 1,
        layers: int = 2,
        heads: int = 4,
        dropout: float = 0.1,
        embeddings: Tensor | None = None,
        states: Tensor | None = None,
        graph: bool = False,
    ) -> None:
        super().__init__()
        for name, value in (("answers", labels), ("vocab_size", vocab_size), ("model.layers", layers)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if word_layers < 0:
            raise ValueError(f"model.word_layers must not be negative, got {word_layers}")
        if heads < 1 or width % heads:
            raise ValueError(f"model.attention_heads must divide the width {width}, got {heads}")
        self.max_length = max_length
        self.words, self.positions = (_embedding(rows, width, rng) for rows in (vocab_size, max_length))
        self.word_norm = nn.LayerNorm(width)
        self.word_layers = nn.ModuleList(EncoderLayer(width, heads, dropout, rng) for _ in range(word_layers))
        self.tokens = LabelTokens(labels, width, rng, embeddings, states)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(EncoderLayer(width, heads, dropout, rng) for _ in range(layers))
        self.classifier = LabelReadout(labels, width, rng)
        self.graph = LabelGraph(labels) if graph else None
        self.label_graph = "graph" if graph else ""

    @property
    def frozen(self) -> set[str]:
        """Names of what is constant."""
        return constant_names(self)

    def forward(self, batch: Batch) -> Output:
        """Scores of the labels (B, C) before the sigmoid, and the mean of the labels' last states (B, d).

        Raises ``ValueError``: the text is missing, or a tensor has another shape than the model reads.
        """
        x, bias, first = self._before_last(batch)
        states = self.layers[-1](x, bias, first)
        return Output(self.classifier(states), states.mean(1))

    @torch.no_grad()
    def attention(self, batch: Batch) -> Tensor:
        """How much each label looks at each token of the text in the last layer, (B, C, L), mean over heads.

        What is missing in a row to 1 went to label tokens.
        """
        x, bias, first = self._before_last(batch)
        last = self.layers[-1]
        assert isinstance(last, EncoderLayer)
        return last.weights(x, bias, first)[..., :first].mean(1)

    def _before_last(self, batch: Batch) -> tuple[Tensor, Tensor, int]:
        """Input of the last layer (B, L + C, d), what is added to attention scores, and L."""
        for key in ("text", "text_mask"):
            if key not in batch:
                raise ValueError(f"a batch of CTranText needs the key {key!r}, got {', '.join(sorted(batch))}")
        text, mask = batch["text"], batch["text_mask"]
        if text.ndim != 2 or text.shape != mask.shape or text.shape[1] > self.max_length:
            raise ValueError(
                f"text and text_mask must have the same shape (B, L) with L at most {self.max_length}, got "
                f"{tuple(text.shape)} and {tuple(mask.shape)}"
            )
        length, labels = text.shape[1], len(self.tokens.labels)
        x = self.word_norm(self.words(text) + self.positions.weight[:length])
        unread = additive_mask(mask, x.dtype)
        for layer in self.word_layers:
            x = layer(x, unread.expand(-1, -1, length, -1))
        x = self.norm(torch.cat([x, self.tokens(batch).to(x.dtype)], 1))
        # Padding is never looked at; what it itself looks at is of no consequence.
        bias = F.pad(unread, (0, labels)).expand(-1, -1, length + labels, -1)
        if self.graph is not None:
            bias = bias + F.pad(self.graph(), (length, 0, length, 0))
        for layer in self.layers[:-1]:
            x = layer(x, bias)
        return x, bias, length


def _embedding(rows: int, width: int, rng: torch.Generator) -> nn.Embedding:
    """Values from U(-1 / sqrt(d), 1 / sqrt(d)), as C-Tran's label embeddings."""
    bound = 1 / math.sqrt(width)
    return nn.Embedding.from_pretrained(torch.empty(rows, width).uniform_(-bound, bound, generator=rng), freeze=False)


@register_model
def ctran_text_mini(
    answers: Sequence[str] | int,
    vocab_size: int,
    *,
    embeddings: Path | str | None = None,
    learn_labels: bool = False,
    graph: bool = False,
    width: int = 64,
    word_layers: int = 1,
    layers: int = 2,
    attention_heads: int = 4,
    dropout: float = 0.1,
    max_length: int = 32,
    seed: int = 0,
) -> CTranText:
    """A C-Tran for short texts, small enough to learn on one CPU core: 64 features, 0.1 million parameters.

    Raises ``ValueError``: no file at a given path, embeddings that lack a label or have another width, or an option
    that is out of range.

    Args:
        answers: the labels, or how many there are.
        vocab_size: number of token ids.
        embeddings: a file of text embeddings (:mod:`confed.models.label_embeddings`) as wide as the model, or the name
            of one that comes with the package; labels are found in it by name, and its vectors are constant. None:
            label and state embeddings are learned.
        learn_labels: with a file, learn label embeddings nevertheless and take the states alone from it.
        graph: add a prior between label tokens; see :class:`confed.models.ctran_module.LabelGraph`.
        width: features of a token.
        word_layers: layers in which words look at each other.
        layers: joint layers.
        attention_heads: heads of each; must divide the width.
        dropout: dropout probability of all layers.
        max_length: tokens of a text; longer ones lose their end.
        seed: of all fresh values.
    """
    return CTranText(
        count(answers),
        vocab_size,
        torch.Generator().manual_seed(seed),
        width=width,
        max_length=max_length,
        word_layers=word_layers,
        layers=layers,
        heads=attention_heads,
        dropout=dropout,
        graph=graph,
        **constant_tokens(answers, width, embeddings, learn_labels),
    )


ctran_text_mini.tokenizer = WordTokenizer  # pyright: ignore[reportFunctionMemberAccess]

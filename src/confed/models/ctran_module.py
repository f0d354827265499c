"""C-Tran network: label tokens that attend to a picture and to each other.

Lanchantin, Wang, Ordonez and Qi, "General Multi-label Image Classification with Transformers", CVPR 2021; with FedLGT's
fixed text embeddings as label and state tokens. P visual tokens z_p (the last plane of a ResNet) and C label tokens

    l_c = e_c + s(known_c),  s(unknown) = 0,

go together through a layer normalisation and post-norm Transformer encoder layers (feed-forward width d, ReLU, no
positions). Label c is scored by row c: logit_c = <w_c, h_c> + b_c, h_c its last state.

An option, FedLGT's future work: a label graph. Attention scores between label tokens get ``scale * log_odds(i, j)``,
from the shares of examples that carry both labels; ``scale`` is learned and starts at 0, where nothing is added.

The model is :class:`confed.models.ctran_module.CTran` with the states of a text's words in the place of a picture's
visual tokens: word and position embeddings, encoder layers of C-Tran's kind that see words only, then the joint layers.
FedLGT names texts as future work; this is the smallest step from its model to them.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from confed.federation.protocols import Batch, Output
from confed.models.heads import count
from confed.models.inputs import additive_mask
from confed.models.label_embeddings import constant_tokens
from confed.models.layers import Constants, constant_names
from confed.models.resnet import PictureModel, uniform_linear
from confed.models.tokenizer import WordTokenizer
from confed.registry import register_model

if TYPE_CHECKING:
    from transformers import ResNetModel


class LabelTokens(Constants):
    """One token per label and state: ``e_c + s(known_c)``, with s(unknown) = 0.

    What is learned is a parameter, from U(-1 / sqrt(d), 1 / sqrt(d)); what is given is a constant buffer.
    """

    labels: Tensor
    states: Tensor

    def __init__(
        self, count: int, width: int, rng: torch.Generator, labels: Tensor | None = None, states: Tensor | None = None
    ) -> None:
        super().__init__()
        for name, rows, given in (("labels", count, labels), ("states", 2, states)):
            if given is None:
                fresh = torch.empty(rows, width).uniform_(-1 / math.sqrt(width), 1 / math.sqrt(width), generator=rng)
                self.register_parameter(name, nn.Parameter(fresh))
                continue
            if given.shape != (rows, width):
                raise ValueError(f"{name} must have shape {(rows, width)}, got {tuple(given.shape)}")
            self.register_buffer(name, given.detach().float().clone())

    def forward(self, batch: Batch) -> Tensor:
        """The tokens, (B, C, d), of ``known`` (B, C): -1 unknown, 0 absent, 1 present; without it all are unknown."""
        rows, known_labels = len(batch["image" if "image" in batch else "text"]), batch.get("known")
        if known_labels is None:
            return self.labels.expand(rows, -1, -1)
        if known_labels.shape != (rows, len(self.labels)):
            raise ValueError(f"known must have shape {(rows, len(self.labels))}, got {tuple(known_labels.shape)}")
        table = torch.cat([torch.zeros_like(self.states[:1]), self.states])
        return self.labels + F.embedding(known_labels.long() + 1, table)


class EncoderLayer(nn.Module):
    """A post-norm Transformer encoder layer with feed-forward width d and ReLU.

    As released, the joint matrix of queries, keys and values starts from Glorot's uniform distribution with zero
    biases (that of ``torch.nn.MultiheadAttention``), all other matrices and biases from U(-1 / sqrt(d), 1 / sqrt(d)).
    """

    def __init__(self, width: int, heads: int, dropout: float, rng: torch.Generator) -> None:
        super().__init__()
        self.heads = heads
        self.attention = uniform_linear(width, 3 * width, rng)
        nn.init.xavier_uniform_(self.attention.weight, generator=rng)
        nn.init.zeros_(self.attention.bias)
        self.output = uniform_linear(width, width, rng)
        self.norm1 = nn.LayerNorm(width)
        self.linear1 = uniform_linear(width, width, rng)
        self.linear2 = uniform_linear(width, width, rng)
        self.norm2 = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, bias: Tensor | None = None, first: int = 0) -> Tensor:
        """The next states of the tokens from number ``first`` on."""
        query, key, value = self._projected(x, first)
        drop = self.dropout.p if self.training else 0.0
        mask = None if bias is None else bias[..., first:, :].to(query.dtype)
        seen = F.scaled_dot_product_attention(query, key, value, mask, drop).transpose(1, 2).flatten(2)
        x = self.norm1(x[:, first:] + self.dropout(self.output(seen)))
        return self.norm2(x + self.dropout(self.linear2(self.dropout(F.relu(self.linear1(x))))))

    def weights(self, x: Tensor, bias: Tensor | None = None, first: int = 0) -> Tensor:
        """The attention weights of :meth:`forward` without dropout, (B, heads, S - first, S)."""
        query, key, _ = self._projected(x, first)
        scores = query @ key.transpose(2, 3) / math.sqrt(query.shape[-1])
        return (scores if bias is None else scores + bias[..., first:, :]).softmax(-1)

    def _projected(self, x: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, heads, S - first, d / heads), and keys and values of all S tokens."""
        width, weight, bias = x.shape[-1], self.attention.weight, self.attention.bias
        query = F.linear(x[:, first:], weight[:width], bias[:width])
        key, value = F.linear(x, weight[width:], bias[width:]).chunk(2, -1)
        query, key, value = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (query, key, value))
        return query, key, value


class LabelReadout(nn.Module):
    """A row and a bias per label: the diagonal of a linear layer, without what is beside it."""

    def __init__(self, labels: int, width: int, rng: torch.Generator) -> None:
        super().__init__()
        rows = uniform_linear(width, labels, rng)
        self.weight, self.bias = rows.weight, rows.bias

    def forward(self, states: Tensor) -> Tensor:
        """Scores (B, C) of the labels' states (B, C, d)."""
        if states.ndim != 3 or states.shape[1:] != self.weight.shape:
            expected = ", ".join(map(str, self.weight.shape))
            raise ValueError(f"the readout needs one state per label, (B, {expected}), got {tuple(states.shape)}")
        return (states * self.weight).sum(-1) + self.bias


class LabelGraph(nn.Module):
    """What attention between label tokens gets added: ``scale * log_odds(co_occurrence, examples)``.

    The buffer ``co_occurrence`` (C, C) holds shares of examples (:func:`co_occurrence`), so that the mean over clients,
    weighted by their examples, is the matrix of all examples; ``examples`` is their number. It starts without examples,
    where all labels are independent and nothing is added. The model itself never changes it: who fills it in, and
    whether noise is added before, is a method's decision. :mod:`confed.algorithms.fedlgt` does; with a method that does
    not, the graph has no effect.
    """

    co_occurrence: Tensor
    examples: Tensor

    def __init__(self, labels: int) -> None:
        super().__init__()
        self.register_buffer("co_occurrence", torch.full((labels, labels), 0.25) + 0.25 * torch.eye(labels))
        self.register_buffer("examples", torch.zeros(()))
        self.scale = nn.Parameter(torch.zeros(1))

    def forward(self) -> Tensor:
        """The addition, (C, C); symmetric, zero on the diagonal."""
        return self.scale * log_odds(self.co_occurrence, self.examples)


def co_occurrence(labels: Tensor) -> Tensor:
    """Shares of examples that carry both labels, (C, C); on the diagonal those that carry the label."""
    if labels.ndim != 2 or len(labels) == 0:
        raise ValueError(f"labels must have shape (N, C) with N at least 1, got {tuple(labels.shape)}")
    present = labels.float()
    return present.T @ present / len(present)


def log_odds(shares: Tensor, examples: Tensor | float) -> Tensor:
    """The logarithm of the odds ratio of every pair of labels, (C, C); 0 on the diagonal and where independent.

    log (n11 n00) / (n10 n01), where n10 is the number of examples with the first label and without the second. Half an
    example is added to each of the four numbers (Haldane, "The estimation and significance of the logarithm of a ratio
    of frequencies", Annals of Human Genetics 20, 1956): no logarithm is infinite, and the addition does not hide
    labels that are rare among many examples.
    """
    frequencies = shares.diagonal()
    first, second = frequencies[:, None] - shares, frequencies[None, :] - shares
    neither = 1 - frequencies[:, None] - frequencies[None, :] + shares
    half = 0.5 / torch.as_tensor(examples, dtype=shares.dtype, device=shares.device).clamp_min(1)
    both, neither, first, second = ((counts.clamp_min(0) + half).log() for counts in (shares, neither, first, second))
    odds = both + neither - first - second
    return odds - torch.diag(odds.diagonal())


class CTran(PictureModel):
    """A ResNet, label tokens, and encoder layers in which labels look at the picture and at each other.

    Batches have ``image``, uint8 (B, 3, H, W) or floats that are already normalised by ImageNet's mean and deviation,
    and may have ``known`` (B, C): -1 unknown, 0 known absent, 1 known present.
    """

    reads_states = True  # whether known in a batch makes a difference; models that do not say so do not read it
    answer_head = "classifier"  # name of the submodule that scores labels, each from its own state

    def __init__(
        self,
        body: "ResNetModel",
        labels: int,
        rng: torch.Generator,
        *,
        image_size: tuple[int, int] = (256, 256),
        layers: int = 3,
        heads: int = 4,
        dropout: float = 0.1,
        embeddings: Tensor | None = None,
        states: Tensor | None = None,
        graph: bool = False,
    ) -> None:
        super().__init__(body, image_size)
        for name, value in (("answers", labels), ("model.layers", layers), ("model.attention_heads", heads)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.width % heads:
            raise ValueError(f"model.attention_heads must divide the width {self.width}, got {heads}")
        self.tokens = LabelTokens(labels, self.width, rng, embeddings, states)
        self.norm = nn.LayerNorm(self.width)
        self.layers = nn.ModuleList(EncoderLayer(self.width, heads, dropout, rng) for _ in range(layers))
        self.classifier = LabelReadout(labels, self.width, rng)
        self.graph = LabelGraph(labels) if graph else None
        self.label_graph = "graph" if graph else ""  # name of the submodule that is the label graph; "" without one

    def scored(self, plane: Tensor, batch: Batch) -> Output:
        """Scores of the labels (B, C) before the sigmoid, and the mean of the labels' last states (B, d)."""
        x, bias, first = self._before_last(plane, batch)
        states = self.layers[-1](x, bias, first)
        return Output(self.classifier(states), states.mean(1))

    @torch.no_grad()
    def attention(self, batch: Batch) -> Tensor:
        """How much each label looks at each place of the picture in the last layer, (B, C, P), mean over heads.

        Places go row by row over ``grid``. What is missing in a row to 1 went to label tokens.
        """
        x, bias, first = self._before_last(self.plane(batch), batch)
        last = self.layers[-1]
        assert isinstance(last, EncoderLayer)
        return last.weights(x, bias, first)[..., :first].mean(1)

    def _before_last(self, plane: Tensor, batch: Batch) -> tuple[Tensor, Tensor | None, int]:
        """Input of the last layer (B, P + C, d), what is added to attention scores, and P.

        Only label tokens are read out, so the last layer needs no queries of the picture.
        """
        visual = plane.flatten(2).transpose(1, 2)
        x = self.norm(torch.cat([visual, self.tokens(batch).to(visual.dtype)], 1))
        first = visual.shape[1]
        bias = None if self.graph is None else F.pad(self.graph(), (first, 0, first, 0))
        for layer in self.layers[:-1]:
            x = layer(x, bias)
        return x, bias, first


# C-Tran network for texts -------------------------------------------------------------------------------------


class CTranText(nn.Module):
    """Word embeddings, layers in which words look at each other, and layers in which labels look at both.

    Batches have ``text`` and ``text_mask`` (B, L), int64, and may have ``known`` (B, C): -1 unknown, 0 known absent, 1
    known present.
    """

    reads_states = True  # whether known in a batch makes a difference; see CTran
    answer_head = "classifier"  # name of the submodule that scores labels

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
        self.label_graph = "graph" if graph else ""  # name of the submodule that is the label graph; "" without one

    @property
    def frozen(self) -> set[str]:
        return constant_names(self)

    def forward(self, batch: Batch) -> Output:
        """Scores of the labels (B, C) before the sigmoid, and the mean of the labels' last states (B, d)."""
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

"""C-Tran: label tokens that attend to a picture, or to a text, and to each other.

Lanchantin, Wang, Ordonez and Qi, "General Multi-label Image Classification with Transformers", CVPR 2021; with FedLGT's
fixed text embeddings as label and state tokens. P visual tokens z_p (the last plane of a ResNet) and C label tokens

    l_c = e_c + s(known_c),  s(unknown) = 0,

go together through a layer normalisation and post-norm Transformer encoder layers (feed-forward width d, ReLU, no
positions). Label c is scored by row c: logit_c = <w_c, h_c> + b_c, h_c its last state.

An option, FedLGT's future work: a label graph. Attention scores between label tokens get ``scale * log_odds(i, j)``,
from the shares of examples that carry both labels; ``scale`` is learned and starts at 0, where nothing is added.

The model is :class:`confed.models.ctran.CTran` with the states of a text's words in the place of a picture's
visual tokens: word and position embeddings, encoder layers of C-Tran's kind that see words only, then the joint layers.
FedLGT names texts as future work; this is the smallest step from its model to them.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from confed.federation.protocols import Batch, Output
from confed.federation.ranges import NOT_NEGATIVE
from confed.federation.specs import ModelSpec
from confed.models.heads import COUNT, check_divides, count
from confed.models.inputs import additive_mask, check_shape, checked_text
from confed.models.label_embeddings import load_label_embeddings
from confed.models.layers import Constants, Norm, constant_names, uniform_linear
from confed.models.resnet import PictureModel, freeze_body, mini_resnet, picture_options, resnet18
from confed.models.tokenizer import WordTokenizer
from confed.models.variants import variant

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
            self.register_buffer(name, check_shape(given, name, rows, width).detach().float().clone())

    def forward(self, batch: Batch) -> Tensor:
        """The tokens, (B, C, d), of ``known`` (B, C): -1 unknown, 0 absent, 1 present; without it all are unknown."""
        rows, known_labels = len(batch["image" if "image" in batch else "text"]), batch.get("known")
        if known_labels is None:
            return self.labels.expand(rows, -1, -1)
        check_shape(known_labels, "known", rows, len(self.labels))
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
        check_shape(states, "the labels' states", "B", *self.weight.shape)
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


class LabelReader(nn.Module):
    """Mix-in of a network in which label tokens read other tokens and each other.

    Outputs are scores of the labels (B, C) before the sigmoid, and the mean of the labels' last states (B, d).
    """

    reads_states = True  # whether known in a batch makes a difference; models that do not say so do not read it
    answer_head = "classifier"  # name of the submodule that scores labels, each from its own state

    def add_labels(
        self,
        labels: int,
        width: int,
        rng: torch.Generator,
        *,
        layers: int = 3,
        heads: int = 4,
        dropout: float = 0.1,
        embeddings: Tensor | None = None,
        states: Tensor | None = None,
        graph: bool = False,
    ) -> None:
        """Label tokens, joint layers, readout, and a label graph if there is to be one."""
        check_divides(heads, width, "model.attention_heads")
        self.tokens = LabelTokens(labels, width, rng, embeddings, states)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(EncoderLayer(width, heads, dropout, rng) for _ in range(layers))
        self.classifier = LabelReadout(labels, width, rng)
        self.graph = LabelGraph(labels) if graph else None
        self.label_graph = "graph" if graph else ""  # name of the submodule that is the label graph; "" without one

    def read_labels(self, seen: Tensor, batch: Batch, bias: Tensor | None = None) -> Output:
        """Scores and features, of tokens (B, S, d) that labels look at and what is added to attention scores."""
        states = self.layers[-1](*self.before_last(seen, batch, bias), seen.shape[1])
        return Output(self.classifier(states), states.mean(1))

    def last_weights(self, seen: Tensor, batch: Batch, bias: Tensor | None = None) -> Tensor:
        """How much each label looks at each token in the last layer, (B, C, S), mean over heads."""
        last, first = self.layers[-1], seen.shape[1]
        assert isinstance(last, EncoderLayer)
        return last.weights(*self.before_last(seen, batch, bias), first)[..., :first].mean(1)

    def before_last(self, seen: Tensor, batch: Batch, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Input of the last layer (B, S + C, d), and what is added to attention scores."""
        x = self.norm(torch.cat([seen, self.tokens(batch).to(seen.dtype)], 1))
        if self.graph is not None:
            graph = F.pad(self.graph(), (seen.shape[1], 0, seen.shape[1], 0))
            bias = graph if bias is None else bias + graph
        for layer in self.layers[:-1]:
            x = layer(x, bias)
        return x, bias


class CTran(PictureModel, LabelReader):
    """A ResNet, label tokens, and encoder layers in which labels look at the picture and at each other.

    Batches have ``image``, uint8 (B, 3, H, W) or floats that are already normalised by ImageNet's mean and deviation,
    and may have ``known`` (B, C): -1 unknown, 0 known absent, 1 known present.
    """

    def __init__(
        self,
        body: "ResNetModel",
        labels: int,
        rng: torch.Generator,
        *,
        image_size: int | tuple[int, int] = 256,
        **options: Any,
    ) -> None:
        super().__init__(body, image_size)
        self.add_labels(labels, self.width, rng, **options)

    def scored(self, plane: Tensor, batch: Batch) -> Output:
        return self.read_labels(plane.flatten(2).transpose(1, 2), batch)

    @torch.no_grad()
    def attention(self, batch: Batch) -> Tensor:
        """How much each label looks at each place of the picture in the last layer, (B, C, P), mean over heads.

        Places go row by row over ``grid``. What is missing in a row to 1 went to label tokens.
        """
        return self.last_weights(self.plane(batch).flatten(2).transpose(1, 2), batch)


# C-Tran network for texts -------------------------------------------------------------------------------------


class CTranText(LabelReader):
    """Word embeddings, layers in which words look at each other, and layers in which labels look at both.

    Batches have ``text`` and ``text_mask`` (B, L), int64, and may have ``known`` (B, C): -1 unknown, 0 known absent, 1
    known present.
    """

    def __init__(
        self,
        labels: int,
        vocab_size: int,
        rng: torch.Generator,
        *,
        width: int = 64,
        max_length: int = 32,
        word_layers: int = 1,
        heads: int = 4,
        dropout: float = 0.1,
        **options: Any,
    ) -> None:
        super().__init__()
        check_divides(heads, width, "model.attention_heads")
        self.max_length = max_length
        self.words, self.positions = (_embedding(rows, width, rng) for rows in (vocab_size, max_length))
        self.word_norm = nn.LayerNorm(width)
        self.word_layers = nn.ModuleList(EncoderLayer(width, heads, dropout, rng) for _ in range(word_layers))
        self.add_labels(labels, width, rng, heads=heads, dropout=dropout, **options)

    @property
    def frozen(self) -> set[str]:
        return constant_names(self)

    def forward(self, batch: Batch) -> Output:
        """Scores of the labels (B, C) before the sigmoid, and the mean of the labels' last states (B, d)."""
        return self.read_labels(*self._read(batch))

    @torch.no_grad()
    def attention(self, batch: Batch) -> Tensor:
        """How much each label looks at each token of the text in the last layer, (B, C, L), mean over heads.

        What is missing in a row to 1 went to label tokens.
        """
        return self.last_weights(*self._read(batch))

    def _read(self, batch: Batch) -> tuple[Tensor, Batch, Tensor]:
        """States of the words (B, L, d), the batch, and what is added to attention scores."""
        text, mask = checked_text(batch, None, self.max_length, "CTranText")
        length, labels = text.shape[1], len(self.tokens.labels)
        x = self.word_norm(self.words(text) + self.positions.weight[:length])
        unread = additive_mask(mask, x.dtype)
        for layer in self.word_layers:
            x = layer(x, unread.expand(-1, -1, length, -1))
        # Padding is never looked at; what it itself looks at is of no consequence.
        return x, batch, F.pad(unread, (0, labels)).expand(-1, -1, length + labels, -1)


def _embedding(rows: int, width: int, rng: torch.Generator) -> nn.Embedding:
    """Values from U(-1 / sqrt(d), 1 / sqrt(d)), as C-Tran's label embeddings."""
    bound = 1 / math.sqrt(width)
    return nn.Embedding.from_pretrained(torch.empty(rows, width).uniform_(-bound, bound, generator=rng), freeze=False)


def label_parts(
    answers: Sequence[str] | int,
    width: int,
    *,
    embeddings: Path | str | None = None,
    learn_labels: bool = False,
    swap_states: bool = False,
    graph: bool = False,
    layers: COUNT = 2,
    attention_heads: int = 4,
    dropout: float,
) -> dict[str, Any]:
    """Keywords of :meth:`LabelReader.add_labels` by the options of models with label tokens.

    Options:
        answers: the labels, or how many there are.
        embeddings: a file of text embeddings (:mod:`confed.models.label_embeddings`) as wide as the model, or the name
            of one that comes with the package; labels are found in it by name, and its vectors are constant. None:
            label and state embeddings are learned.
        learn_labels: with a file, learn label embeddings nevertheless and take the states alone from it.
        swap_states: with a file, "known absent" gets the vector of "positive" and "known present" that of
            "negative", as in FedLGT's released code.
        graph: add a prior between label tokens; see :class:`confed.models.ctran.LabelGraph`.
        layers: joint layers.
        attention_heads: heads of each; must divide the width.
    """
    parts: dict[str, Any] = {"layers": layers, "heads": attention_heads, "dropout": dropout, "graph": graph}
    if embeddings is None:
        for name, wanted in (("learn_labels", learn_labels), ("swap_states", swap_states)):
            if wanted:
                raise ValueError(f"model.{name} is about a file of text embeddings: it needs model.embeddings")
        return parts
    if isinstance(answers, int):
        raise ValueError(
            f"model.embeddings are found by the labels' names: answers must be the names, got their number {answers}"
        )
    table = load_label_embeddings(embeddings, () if learn_labels else tuple(answers), width)
    states = torch.stack([table.negative, table.positive])  # the rows are "absent" and "present"
    vectors = None if learn_labels else table.vectors
    return parts | {"embeddings": vectors, "states": states.flip(0) if swap_states else states}


def _text_mini(
    answers: Sequence[str] | int,
    vocab_size: int,
    *,
    width: int = 64,
    word_layers: Annotated[int, NOT_NEGATIVE] = 1,
    max_length: int,
    rng: torch.Generator,
    **labels: Any,
) -> CTranText:
    """A C-Tran for texts.

    Options:
        width: features of a token.
        word_layers: layers in which words look at each other.
        dropout: dropout probability of all layers.
        max_length: tokens of a text; longer ones lose their end.
    """
    return CTranText(
        count(answers), vocab_size, rng, width=width, max_length=max_length, word_layers=word_layers,
        **label_parts(answers, width, **labels),
    )  # fmt: skip


ctran_text_mini = variant(
    _text_mini, "ctran_text_mini",
    "A C-Tran for short texts, small enough to learn on one CPU core: 64 features, 0.1 million parameters.\n\n"
    "Raises ``ValueError``: no file at a given path, embeddings that lack a label or have another width, or an option\n"
    "that is out of range.",
    "answers vocab_size embeddings learn_labels graph width word_layers layers attention_heads dropout max_length seed",
    sources=(label_parts,), spec=ModelSpec(tokenizer=WordTokenizer), dropout=0.1, max_length=32,
)  # fmt: skip


# C-Tran for pictures, in two sizes --------------------------------------------------------------------------


def _on_pictures(
    body: "ResNetModel", answers: Sequence[str] | int, size: int | tuple[int, int], norm: Norm, frozen: bool,
    rng: torch.Generator, labels: Mapping[str, Any],
) -> CTran:  # fmt: skip
    config: Any = body.config
    parts = label_parts(answers, config.hidden_sizes[-1], **labels)
    model = CTran(body, count(answers), rng, image_size=size, **parts)
    freeze_body(model, norm, frozen)
    return model


def _full(
    answers: Sequence[str] | int,
    *,
    pretrained: Path | str | None,
    norm: Norm = "batch",
    picture_frozen: bool,
    image_size: int | tuple[int, int],
    seed: int,
    rng: torch.Generator,
    **labels: Any,
) -> CTran:
    """C-Tran on ResNet-18.

    Options:
        pretrained: the ResNet, a folder written by ``save_pretrained`` or a hub name such as
            ``"microsoft/resnet-18"``; its configuration then decides the width. None: random weights.
        embeddings: a file of text embeddings (:mod:`confed.models.label_embeddings`), or the name of one that comes
            with the package; labels are found in it by name, and all its vectors are constant. None: label and state
            embeddings are learned, as in the original C-Tran.
        learn_labels: with a file, learn label embeddings nevertheless and take the states alone from it: FedC-Tran as
            FedLGT's authors released it.
        norm: "batch"; "frozen": batch normalisation whose four tensors are constant; "group": group normalisation.
        picture_frozen: the ResNet does not learn and is run once per picture; not with ``norm`` "batch".
        layers: encoder layers.
        dropout: dropout probability of the encoder layers.
    """
    return _on_pictures(resnet18(pretrained, norm, seed), answers, image_size, norm, picture_frozen, rng, labels)


def _picture_mini(
    answers: Sequence[str] | int,
    *,
    pretrained: bool | Path | str,
    norm: Norm = "batch",
    picture_frozen: bool,
    seed: int,
    rng: torch.Generator,
    **labels: Any,
) -> CTran:
    """C-Tran on a small ResNet.

    Options:
        pretrained: load the body of the packaged weights of ``resnet_multilabel_mini``, or of a file that
            ``confed weights pretrain`` wrote for it; everything else starts fresh.
        dropout: dropout probability of the encoder layers.
    """
    return _on_pictures(mini_resnet(pretrained, norm, seed), answers, 64, norm, picture_frozen, rng, labels)


SOURCES = (label_parts, picture_options)
SPEC = ModelSpec(tokenizer=WordTokenizer)  # what is asked of a dataset's pictures is not read, but batches may have it
SAME = ("embeddings", "learn_labels", "swap_states", "graph", "norm", "picture_frozen")

ctran = variant(
    _full, "ctran",
    "C-Tran as FedLGT has it: ResNet-18, 64 visual tokens of 512 features, 3 encoder layers with 4 heads.\n\n"
    "Raises ``ValueError``: no checkpoint or file at a given path, embeddings that lack a label or have another width, "
    "or\nan option that is out of range.",
    "answers vocab_size pretrained embeddings learn_labels swap_states graph norm picture_frozen image_size layers "
    "attention_heads dropout max_length seed",
    sources=SOURCES, spec=SPEC, vocab_size=0, pretrained=None, image_size=256, layers=3, dropout=0.1,
)  # fmt: skip
ctran_mini = variant(
    _picture_mini, "ctran_mini",
    "A C-Tran for 64 x 64 pictures, small enough to learn on one CPU core: 64 visual tokens of 64 features.",
    "answers vocab_size pretrained embeddings learn_labels swap_states graph norm picture_frozen dropout max_length "
    "seed",
    sources=SOURCES, spec=SPEC, described=dict.fromkeys(SAME, "see :func:`ctran`."), vocab_size=0, pretrained=False,
    layers=3, attention_heads=4,
)  # fmt: skip

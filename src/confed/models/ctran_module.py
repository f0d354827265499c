"""C-Tran network: label tokens that attend to a picture and to each other.

Lanchantin, Wang, Ordonez and Qi, "General Multi-label Image Classification with Transformers", CVPR 2021; with FedLGT's
fixed text embeddings as label and state tokens. P visual tokens z_p (the last plane of a ResNet) and C label tokens

    l_c = e_c + s(known_c),  s(unknown) = 0,

go together through a layer normalisation and post-norm Transformer encoder layers (feed-forward width d, ReLU, no
positions). Label c is scored by row c: logit_c = <w_c, h_c> + b_c, h_c its last state.

An option, FedLGT's future work: a label graph. Attention scores between label tokens get ``scale * log_odds(i, j)``,
from the shares of examples that carry both labels; ``scale`` is learned and starts at 0, where nothing is added.
"""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from confed.federation.protocols import Batch, Output
from confed.models.normalisation import Constants
from confed.models.resnet import PictureModel, uniform_linear

if TYPE_CHECKING:
    from transformers import ResNetModel

__all__ = ["CTran", "EncoderLayer", "LabelGraph", "LabelReadout", "LabelTokens", "co_occurrence", "log_odds"]


class LabelTokens(Constants):
    """One token per label and state: ``e_c + s(known_c)``, with s(unknown) = 0.

    What is learned is a parameter, from U(-1 / sqrt(d), 1 / sqrt(d)); what is given is a constant buffer.

    Args:
        count: number of labels C.
        width: features of a token, d.
        rng: where the initial values of what is learned come from.
        labels: constant label embeddings (C, d), or None to learn them.
        states: constant embeddings (2, d) of "known absent" and "known present", or None to learn them.

    Raises:
        ValueError: given embeddings of another shape.
    """

    labels: Tensor
    states: Tensor

    def __init__(
        self,
        count: int,
        width: int,
        rng: torch.Generator,
        labels: Tensor | None = None,
        states: Tensor | None = None,
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
        """The tokens, (B, C, d), of ``known`` (B, C): -1 unknown, 0 absent, 1 present; without it all are unknown.

        Raises:
            ValueError: ``known`` has another shape.
        """
        rows, known = len(batch["image" if "image" in batch else "text"]), batch.get("known")
        if known is None:
            return self.labels.expand(rows, -1, -1)
        if known.shape != (rows, len(self.labels)):
            raise ValueError(f"known must have shape {(rows, len(self.labels))}, got {tuple(known.shape)}")
        table = torch.cat([torch.zeros_like(self.states[:1]), self.states])
        return self.labels + F.embedding(known.long() + 1, table)


class EncoderLayer(nn.Module):
    """A post-norm Transformer encoder layer with feed-forward width d and ReLU.

    As released, the joint matrix of queries, keys and values starts from Glorot's uniform distribution with zero
    biases (that of ``torch.nn.MultiheadAttention``), all other matrices and biases from U(-1 / sqrt(d), 1 / sqrt(d)).

    Args:
        width: features of a token, d.
        heads: attention heads; must divide the width.
        dropout: probability, of attention weights, inside the feed-forward block and before both residual sums.
        rng: where the initial values come from.
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
        """The next states of the tokens from number ``first`` on.

        Args:
            x: states of S tokens, (B, S, d).
            bias: what is added to attention scores, row by query, (S, S) or (B, 1, S, S).
            first: earlier tokens are looked at and do not look, which saves their queries and feed-forward block.

        Returns:
            (B, S - first, d).
        """
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
    """A row and a bias per label: the diagonal of a linear layer, without what is beside it.

    Args:
        labels: number of labels C.
        width: features of a label's state, d.
        rng: where the initial values come from, U(-1 / sqrt(d), 1 / sqrt(d)).
    """

    def __init__(self, labels: int, width: int, rng: torch.Generator) -> None:
        super().__init__()
        rows = uniform_linear(width, labels, rng)
        self.weight, self.bias = rows.weight, rows.bias

    def forward(self, states: Tensor) -> Tensor:
        """Scores (B, C) of the labels' states (B, C, d).

        Raises:
            ValueError: states of another shape, such as one vector per example.
        """
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

    Args:
        labels: number of labels C.
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
    """Shares of examples that carry both labels, (C, C); on the diagonal those that carry the label.

    Args:
        labels: (N, C) in {0, 1}.

    Raises:
        ValueError: there are no examples.
    """
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

    Args:
        shares: of :func:`co_occurrence`; impossible values, as noise may leave them, count as a share of 0.
        examples: the number of examples they are shares of; below 1 it counts as 1.
    """
    own = shares.diagonal()
    first, second = own[:, None] - shares, own[None, :] - shares
    neither = 1 - own[:, None] - own[None, :] + shares
    half = 0.5 / torch.as_tensor(examples, dtype=shares.dtype, device=shares.device).clamp_min(1)
    both, neither, first, second = ((part.clamp_min(0) + half).log() for part in (shares, neither, first, second))
    odds = both + neither - first - second
    return odds - torch.diag(odds.diagonal())


class CTran(PictureModel):
    """A ResNet, label tokens, and encoder layers in which labels look at the picture and at each other.

    Batches have ``image``, uint8 (B, 3, H, W) or floats that are already normalised by ImageNet's mean and deviation,
    and may have ``known`` (B, C): -1 unknown, 0 known absent, 1 known present.

    Args:
        body: the ``transformers`` ResNet; its last stage's channels are the width d of all tokens.
        labels: number of labels C.
        rng: where all other initial values come from.
        image_size: (H, W) in pixels.
        layers: encoder layers.
        heads: attention heads.
        dropout: dropout probability of the encoder layers.
        embeddings: constant label embeddings (C, d), or None to learn them.
        states: constant embeddings (2, d) of "known absent" and "known present", or None to learn them.
        graph: add a :class:`LabelGraph`.

    Attributes:
        label_graph: name of the submodule that is the label graph; "" without one.

    Raises:
        ValueError: a count is below 1, the heads do not divide the width, or embeddings have another shape.
    """

    reads_states = True
    """Whether ``known`` in a batch makes a difference; models that do not say so do not read it."""

    answer_head = "classifier"
    """Name of the submodule that scores labels, each from its own state."""

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
        self.label_graph = "graph" if graph else ""

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

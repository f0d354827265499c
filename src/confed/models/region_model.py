"""Common base of models that read region features: batches and construction.

Notation: B examples, R regions of W features, L words, d features inside the model. A region whose features are all
zero is padding. The layers are those of the OpenVQA family (MCAN, BUTD, BAN, MFB, MMNasNet).
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from confed.data.glove import MISSING, check_known, load_glove
from confed.federation.protocols import Batch, Output
from confed.federation.specs import ModelSpec
from confed.federation.stages import Stage, run_stages
from confed.models.adapters import AdapterBank, Host
from confed.models.finetuning import Places
from confed.models.heads import check_divides, count
from confed.models.inputs import check_shape, checked_text, needed
from confed.models.passes import SplitChain, Step
from confed.models.pretrained import seeded
from confed.models.tokenizer import WordTokenizer
from confed.models.variants import variant

MASKED = -1e9
"""Score of what must not be attended to. It is finite: where all is masked, the weights are uniform and not NaN."""


class LayerNorm(nn.LayerNorm):
    """``a (x - mean) / (std + eps) + b`` with the unbiased standard deviation, unlike ``torch.nn.LayerNorm``.

    It derives from that one so that methods which look for normalisation layers find it.
    """

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__(width, eps)

    def forward(self, input: Tensor) -> Tensor:
        """The normalised features, same shape as ``input`` (..., d)."""
        centred = input - input.mean(-1, keepdim=True)
        # The gradient of this norm is 0 at 0; that of a root would be infinite.
        std = torch.linalg.vector_norm(centred, dim=-1, keepdim=True) * (input.shape[-1] - 1) ** -0.5
        return torch.addcmul(self.bias, centred / (std + self.eps), self.weight)


class FullyConnected(nn.Module):
    """Linear, ReLU, dropout."""

    def __init__(self, inputs: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) to (..., outputs)."""
        return self.dropout(torch.relu(self.linear(x)))


class MLP(nn.Module):
    """A fully connected layer and a linear one."""

    def __init__(self, inputs: int, hidden: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.hidden = FullyConnected(inputs, hidden, dropout)
        self.output = nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) to (..., outputs)."""
        return self.output(self.hidden(x))


class WeightNormLinear(nn.Module):
    """A linear layer whose weight is ``g V / ||V||``, with one length g for the whole matrix.

    Salimans and Kingma, "Weight Normalization", NeurIPS 2016, with the norm over all entries. The layer starts as an
    ordinary one: g is the norm of V's initial values.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        start = nn.Linear(inputs, outputs)
        self.weight_g = nn.Parameter(start.weight.detach().square().sum().sqrt())
        self.weight_v = start.weight
        self.bias = start.bias

    @property
    def scale(self) -> Tensor:
        """``g / ||V||``."""
        return self.weight_g / self.weight_v.square().sum().sqrt()

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) to (..., outputs)."""
        return nn.functional.linear(x, self.weight_v * self.scale, self.bias)


class MultiHeadAttention(nn.Module):
    """Scaled dot-product attention with h heads, dropout on the weights, and four linear layers."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        check_divides(heads, width, "the attention heads")
        self.heads = heads
        self.query, self.key, self.value, self.merge = (nn.Linear(width, width) for _ in range(4))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, context: Tensor, present: Tensor, bias: Tensor | None = None) -> Tensor:
        """What the positions of ``x`` read in ``context``."""
        query, key, value = (
            layer(states).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, states in ((self.query, x), (self.key, context), (self.value, context))
        )
        mask = torch.zeros_like(present, dtype=query.dtype).masked_fill(~present, MASKED)[:, None, None, :]
        seen = nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask if bias is None else mask + bias,
            dropout_p=self.dropout.p if self.training else 0.0,
        )
        return self.merge(seen.transpose(1, 2).flatten(2))


class AttFlat(nn.Module):
    """A sequence as one vector: an MLP scores the positions, and a linear layer reads their weighted sum."""

    def __init__(self, width: int, hidden: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.mlp = MLP(width, hidden, 1, dropout)
        self.merge = nn.Linear(width, outputs)

    def forward(self, x: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
        """The vectors (B, D) of the sequences (B, N, d), and the weights of their positions (B, N), of sum 1."""
        weights = masked_softmax(self.mlp(x).squeeze(-1), present)
        return self.merge((weights.unsqueeze(1) @ x).squeeze(1)), weights


def masked_softmax(scores: Tensor, present: Tensor) -> Tensor:
    """Softmax over the last dimension of ``scores`` where ``present`` holds; both (..., N)."""
    return scores.masked_fill(~present, MASKED).softmax(-1)


def box_geometry(boxes: Tensor, pixel: float = 0.0) -> Tensor:
    """How regions lie to each other: logarithms of distances and of sizes, relative to their own size.

    With centre (x, y), width w and height h of regions m and n: ``log(|x_m - x_n| / w_m)``,
    ``log(|y_m - y_n| / h_m)``, both ratios at least 1e-3, ``log(w_m / w_n)``, ``log(h_m / h_n)`` (Hu et al., "Relation
    Networks for Object Detection", CVPR 2018, Eq. 5, as MMNasNet uses them).

    Returns:
        Shape (B, R, R, 4).
    """
    low, high = boxes[..., :2], boxes[..., 2:]
    centre, size = (low + high) / 2, high - low
    size = size + pixel if pixel else size.clamp_min(1e-3)
    distance = (centre.unsqueeze(2) - centre.unsqueeze(1)).abs() / size.unsqueeze(2)
    ratio = size.unsqueeze(2) / size.unsqueeze(1)
    return torch.cat([distance.clamp_min(1e-3), ratio], -1).log()


class Sizes(NamedTuple):
    """Sizes that every model of the family has."""

    answers: int  # C
    vocab_size: int  # number of token ids
    embedding: int  # features of a word's embedding
    region_width: int  # features of a region, W
    max_length: int = 14  # the most tokens


class State(NamedTuple):
    """A batch after the part of the model that reads words."""

    words: Tensor  # states of the question's words, (B, L, d)
    is_word: Tensor  # which of them are no padding, bool, (B, L)
    regions: Tensor  # features as they came, (B, R, W)
    present: Tensor  # which regions are no padding, bool, (B, R)
    boxes: Tensor | None  # (B, R, 4), or none came


class RegionModel(SplitChain):
    """Base of the family: words through an embedding and a recurrent network, then what :meth:`look` does.

    Batches have ``regions``, float (B, R, W), ``text`` and ``text_mask``, int64 (B, L), and for models that read
    them ``boxes``, float (B, R, 4). Outputs are scores of the answers (B, C), and the features below the answer head
    (B, D); states are (B, L, d), then (B, D), then an ``Output``.
    """

    answer_head = "classifier"
    """Name of the submodule that scores answers: what methods with a head of each client's own keep private."""

    needs_boxes = False

    classifier: nn.Module

    def __init__(self, sizes: Sizes, hidden: int, recurrent: type[nn.LSTM] | type[nn.GRU] = nn.LSTM) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocab_size, sizes.embedding)
        self.recurrent = recurrent(sizes.embedding, hidden, batch_first=True)
        self.region_width, self.max_length = sizes.region_width, sizes.max_length
        self.prompts = nn.ModuleDict()
        self.adapters = AdapterBank((), 1)

    @abstractmethod
    def look(self, state: State) -> tuple[Tensor, Tensor]:
        """The features (B, D) that the answer head reads, and how much each region counted (B, R), of sum 1."""

    @abstractmethod
    def places(self) -> Places:
        """What can be finetuned; see :class:`confed.models.finetuning.Places`."""

    def steps(self) -> Sequence[Step]:
        """Words, what is made of words and regions, head."""
        regions = ("regions", "boxes") if self.needs_boxes else ("regions",)
        fusion = Stage("words and regions", regions, ("",), without=(self.answer_head,))
        return (
            (Stage("words", ("text", "text_mask"), ("embedding.", "recurrent.")), lambda _, batch: self._words(batch)),
            (fusion, lambda words, batch: self.look(self._state(words, batch))[0]),
            (Stage("head", (), ("",)), lambda features, _: Output(self.classifier(features), features)),
        )

    def _words(self, batch: Batch) -> Tensor:
        text, _ = checked_text(batch, None, self.max_length, type(self).__name__)
        return self.recurrent(self.embed(text))[0].contiguous()

    def attention(self, batch: Batch) -> Tensor:
        """What the model looked at: the weight of each region where they are summed, of glimpses the sum.

        Returns:
            Shape (B, R); each row's largest value is 1, padding has 0 in models that mask it.
        """
        weights = self.look(self.read(batch))[1].detach().float()
        return weights / weights.amax(1, keepdim=True)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embedding

    def embed(self, text: Tensor) -> Tensor:
        """What the recurrent network reads of token ids (B, L), (B, L, features of an embedding)."""
        return self.embedding(text)

    def read(self, batch: Batch) -> State:
        """A batch with the states of its words."""
        return self._state(run_stages(self, batch, 1), batch)

    def _state(self, words: Tensor, batch: Batch) -> State:
        self._check(batch, len(words))
        regions, boxes = batch["regions"], batch["boxes"] if self.needs_boxes else None
        return State(words, batch["text_mask"] != 0, regions, (regions != 0).any(-1), boxes)

    def _check(self, batch: Batch, rows: int) -> None:
        needed(batch, type(self).__name__, "regions", *(("boxes",) if self.needs_boxes else ()))
        regions = batch["regions"]
        check_shape(regions, "regions", "B", "R", self.region_width)
        if len(regions) != rows:
            checked_text(batch, len(regions), self.max_length, type(self).__name__)
        if self.needs_boxes:
            check_shape(batch["boxes"], "boxes", *regions.shape[:2], 4)


class FlatRegionModel(RegionModel):
    """An encoder of the words x and a decoder of the regions y, read out as ``f = LN(AttFlat(x) + AttFlat(y))``."""

    hidden: int  # features inside, d

    def add_readout(self, sizes: Sizes, hidden: int, flat_hidden: int, features: int, dropout: float) -> None:
        """What reads the last words and regions; to be called when encoder and decoder are there."""
        self.flat_text = AttFlat(hidden, flat_hidden, features, dropout)
        self.flat_regions = AttFlat(hidden, flat_hidden, features, dropout)
        self.norm = LayerNorm(features)
        self.classifier = nn.Linear(features, sizes.answers)
        self.hidden = hidden

    def read_out(self, x: Tensor, y: Tensor, state: State) -> tuple[Tensor, Tensor]:
        """The features (B, D), and AttFlat's weights of the regions (B, R)."""
        text, _ = self.flat_text(x, state.is_word)
        seen, weights = self.flat_regions(y, state.present)
        return self.norm(text + seen), weights

    def flat_places(self, top: Sequence[str], norms: Sequence[nn.Module]) -> Places:
        """What can be finetuned; adapters sit in front of the layer normalisations."""
        return Places(
            heads=(self.answer_head,),
            top=(*top, "flat_text.", "flat_regions.", "norm."),
            hosts=[Host(norm, self.hidden, after_norm=True) for norm in norms],
            lora=("query", "value"),
            ia3=("key", "value"),
            ia3_inputs=("feed_forward.output",),
        )


def question_tokenizer(words: Sequence[str], max_length: int = 14) -> WordTokenizer:
    """The tokenizer of the family: the dataset's words, 14 tokens, of which the first and the last mark the ends."""
    return WordTokenizer(words, max_length)


Region = TypeVar("Region", bound=RegionModel)


def assemble(
    kind: Callable[..., Region],
    answers: Sequence[str] | int,
    vocab_size: int,
    *,
    region_width: int = 2048,
    words: tuple[str, ...] = (),
    glove: Path | None = None,
    glove_missing: float = MISSING,
    max_length: int = 14,
    seed: int,
    embedding: int,
    **options: Any,
) -> Region:
    """A model with its initial values: PyTorch's defaults, and where a GloVe file is given its word vectors.

    Raises ``ValueError``: a GloVe file is given and no words, or more words than there are token ids, or the file lacks
    more of them than it may.

    Options:
        region_width: features of a region, W.
        words: the tokenizer's words in the order of their ids, for ``glove``.
        glove: a text file of word vectors with which the embeddings start. Words that it lacks start as zeros, special
            tokens at random.
        glove_missing: share of the words that the file may lack.
        max_length: the most tokens.
        dropout: dropout probability.
        trainable: which parameters learn beside the head.
        seed: of all initial values.
    """
    vectors = None if glove is None else _vectors(Path(glove), words, vocab_size, glove_missing)
    width = embedding if vectors is None else vectors.shape[1]
    sizes = Sizes(count(answers), vocab_size, width, region_width, max_length)
    model = seeded(seed, lambda: kind(sizes, **options))
    if vectors is not None:
        with torch.no_grad():
            model.embedding.weight[vocab_size - len(words) :] = vectors
    return model


def region_variant(
    kind: type[Region], name: str, summary: str, *, options: Sequence[str] = (), **values: Any
) -> Callable[..., Region]:
    """A registered function that builds a model which reads regions in one size; see :func:`variant`.

    Its arguments are those of :func:`assemble` and the options of this variant, which the class describes.
    """

    def build(**given: Any) -> Region:
        return assemble(kind, **given)

    build.__annotations__["return"], build.__module__ = kind, kind.__module__
    names = ["answers", "vocab_size", "region_width", "words", "glove", "glove_missing", "max_length", "dropout"]
    names += [*options, "trainable", "peft", "seed"]
    spec = ModelSpec(tokenizer=question_tokenizer, reads="regions")
    return variant(build, name, summary, names, spec=spec, sources=(kind, assemble), **values)


def _vectors(path: Path, words: Sequence[str], vocab_size: int, missing: float) -> Tensor:
    if not 0 < len(words) <= vocab_size:
        raise ValueError(f"model.glove needs the words of the {vocab_size} token ids, got {len(words)} words")
    vectors = load_glove(path, words)
    check_known(path, words, vectors, missing)
    return vectors

"""MMNasNet: blocks of attention in an order that was searched, with a relation between boxes.

Yu, Cui, Yu, Wang, Tao and Tian, "Deep Multimodal Neural Architecture Search", ACM MM 2020. With x the states of the
words (LSTM) and y the regions (a linear layer), every operation is ``y = LN(y + dropout(op(y)))``:

- SA attends to the sequence itself, GA to the encoded words, FFN is a feed-forward block of 4 d
- RSA is SA whose scores have ``log(max(ReLU(W r), 1e-6))`` added, one value per head, with
  ``r = ReLU(W_0 geometry)`` of each pair of boxes (:func:`confed.models.region_model.box_geometry`)

in the orders :data:`ENCODER` (on x) and :data:`DECODER` (on y). Then, as in MCAN, ``f = LN(AttFlat(x) + AttFlat(y))``,
which the linear answer head reads. Padding is masked everywhere.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from confed.models.adapters import Host
from confed.models.finetuning import Places
from confed.models.region_model import MLP, AttFlat, LayerNorm, MultiHeadAttention, RegionModel, State, box_geometry
from confed.models.variants import region_variant

ENCODER = ("SA",) * 4 + ("FFN",) * 4 + ("SA",) + ("FFN",) * 3  # operations on the words
DECODER = (
    "GA", "GA", "FFN", "FFN", "GA", "FFN", "RSA", "GA", "FFN", "GA", "RSA", "FFN", "RSA", "SA", "FFN", "RSA", "GA",
    "FFN",
)  # fmt: skip
"""Operations on the regions."""

SMALL_ENCODER = ("SA", "FFN", "SA", "FFN")
SMALL_DECODER = ("GA", "FFN", "RSA", "GA", "FFN", "RSA", "SA", "FFN")
"""Operations of the small models: each kind of the searched ones, in their order."""

PUBLISHED: dict[str, Any] = {
    "options": ("head_width", "flat_hidden", "picture_side"), "picture_side": 640,  # the longer side of COCO's pictures
    "relation": 64, "encoder": ENCODER, "decoder": DECODER,
}  # fmt: skip
MINI: dict[str, Any] = {
    "region_width": 64, "head_width": 16, "relation": 16, "encoder": SMALL_ENCODER, "decoder": SMALL_DECODER,
}  # fmt: skip


class MMNasNet(RegionModel):
    """MMNasNet; see :class:`confed.models.region_model.RegionModel` for its batches, which need ``boxes``.

    Args:
        answers: number of answers C.
        vocab_size: number of token ids.
        embedding: features of a word's embedding.
        region_width: features of a region, W.
        hidden: features inside, d.
        head_width: features of an attention head.
        relation: features of a pair of boxes.
        encoder: operations on the words, of SA and FFN.
        decoder: operations on the regions, of SA, RSA, GA and FFN.
        flat_hidden: width of the MLP of AttFlat.
        features: what the answer head reads, D.
        dropout: dropout probability.
        max_length: the most tokens.
        picture_side: pixels along a picture's sides, of which the released code adds one to every box's width and
            height; files of regions keep no sizes of pictures. 0 adds nothing.
    """

    needs_boxes = True

    def __init__(
        self,
        answers: int,
        vocab_size: int,
        embedding: int,
        *,
        region_width: int,
        hidden: int,
        head_width: int,
        relation: int,
        encoder: Sequence[str],
        decoder: Sequence[str],
        flat_hidden: int,
        features: int,
        dropout: float,
        max_length: int,
        picture_side: int = 0,
    ) -> None:
        super().__init__(answers, vocab_size, embedding, hidden, region_width, nn.LSTM, max_length)
        if head_width < 1 or hidden % head_width:
            raise ValueError(f"model.head_width must divide the width {hidden}, got {head_width}")
        if picture_side < 0:
            raise ValueError(f"model.picture_side must not be negative, got {picture_side}")
        heads = hidden // head_width
        self.regions = nn.Linear(region_width, hidden)
        self.relation = nn.Linear(4, relation)
        self.encoder = nn.ModuleList([_Operation(kind, hidden, heads, relation, dropout) for kind in encoder])
        self.decoder = nn.ModuleList([_Operation(kind, hidden, heads, relation, dropout) for kind in decoder])
        self.flat_text = AttFlat(hidden, flat_hidden, features, dropout)
        self.flat_regions = AttFlat(hidden, flat_hidden, features, dropout)
        self.norm = LayerNorm(features)
        self.classifier = nn.Linear(features, answers)
        self.hidden = hidden
        self.pixel = 1 / picture_side if picture_side else 0.0

    def look(self, state: State) -> tuple[Tensor, Tensor]:
        """The features (B, D), and AttFlat's weights of the regions (B, R)."""
        assert state.boxes is not None
        related = torch.relu(self.relation(box_geometry(state.boxes, self.pixel)))
        x, y = state.words, self.regions(state.regions)
        for operation in self.encoder:
            x = operation(x, state.asked, x, state.asked, related)
        for operation in self.decoder:
            y = operation(y, state.present, x, state.asked, related)
        text, _ = self.flat_text(x, state.asked)
        seen, weights = self.flat_regions(y, state.present)
        return self.norm(text + seen), weights

    def places(self) -> Places:
        """What can be finetuned; adapters sit in front of the layer normalisation of every feed-forward block.

        With "top", the operations learn from the last attention on.
        """
        parts = {"encoder": self.encoder, "decoder": self.decoder}
        kinds: dict[str, list[str]] = {}
        for name, operations in parts.items():
            kinds[name] = [cast(_Operation, one).kind for one in operations]
        last: dict[str, int] = {}
        for name, operation_kinds in kinds.items():
            last[name] = max(i for i, kind in enumerate(operation_kinds) if kind != "FFN")
        top: list[str] = []
        for name, operation_kinds in kinds.items():
            for i in range(last[name], len(operation_kinds)):
                top.append(f"{name}.{i}.")
        norms: list[nn.Module] = []
        for operations in parts.values():
            for one in operations:
                if cast(_Operation, one).kind == "FFN":
                    norms.append(one)
        return Places(
            heads=(self.answer_head,),
            top=(*top, "flat_text.", "flat_regions.", "norm."),
            hosts=[Host(cast(_Operation, one).norm, self.hidden, after_norm=True) for one in norms],
            lora=("query", "value"),
            ia3=("key", "value"),
            ia3_inputs=("feed_forward.output",),
        )


class _Operation(nn.Module):
    """SA, RSA, GA or FFN with its residual sum and layer normalisation."""

    def __init__(self, kind: str, width: int, heads: int, relation: int, dropout: float) -> None:
        super().__init__()
        self.kind = kind
        if kind == "FFN":
            self.feed_forward = MLP(width, 4 * width, width, dropout)
        else:
            self.attention = MultiHeadAttention(width, heads, dropout)
        if kind == "RSA":
            self.relation = nn.Linear(relation, heads)
        self.dropout = nn.Dropout(dropout)
        self.norm = LayerNorm(width)

    def forward(self, y: Tensor, present: Tensor, words: Tensor, asked: Tensor, related: Tensor) -> Tensor:
        if self.kind == "FFN":
            change = self.feed_forward(y)
        elif self.kind == "GA":
            change = self.attention(y, words, asked)
        else:
            change = self.attention(y, y, present, self._bias(related) if self.kind == "RSA" else None)
        return self.norm(y + self.dropout(change))

    def _bias(self, related: Tensor) -> Tensor:
        """What a relation of boxes (B, R, R, .) adds to the scores, (B, heads, R, R)."""
        return torch.relu(self.relation(related)).clamp_min(1e-6).log().permute(0, 3, 1, 2)


mmnas_small = region_variant(
    MMNasNet, "mmnas_small", "MMNasNet-small as published: d = 512, 8 heads, D = 1024, word embeddings of 300.",
    **PUBLISHED, dropout=0.1, embedding=300, hidden=512, head_width=64, flat_hidden=512, features=1024,
)  # fmt: skip
# Source: configs/vqa/mmnasnet_large.yml of openvqa (MULTI_HEAD 8, REL_HBASE 128, FLAT_MLP_SIZE 1024).
mmnas_large = region_variant(
    MMNasNet, "mmnas_large",
    "MMNasNet-large as published: d = 1024, 8 heads of 128, AttFlat of 1024, D = 2048, else as :func:`mmnas_small`.",
    **PUBLISHED, dropout=0.1, embedding=300, hidden=1024, head_width=128, flat_hidden=1024, features=2048,
)  # fmt: skip
mmnas_s_mini = region_variant(
    MMNasNet, "mmnas_s_mini", "A small MMNasNet for the built-in pictures: d = 64, 4 + 8 operations, D = 128.",
    **MINI, embedding=64, hidden=64, flat_hidden=64, features=128,
)  # fmt: skip
mmnas_l_mini = region_variant(
    MMNasNet, "mmnas_l_mini",
    "A small MMNasNet for the built-in pictures: d = 96, D = 192, otherwise as :func:`mmnas_s_mini`.",
    **MINI, embedding=64, hidden=96, flat_hidden=96, features=192,
)  # fmt: skip

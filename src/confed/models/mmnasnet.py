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
from typing import Annotated, Any, cast

import torch
from torch import Tensor, nn

from confed.federation.ranges import NOT_NEGATIVE, check_value
from confed.models.finetuning import Places
from confed.models.heads import check_divides
from confed.models.region_model import (
    MLP,
    FlatRegionModel,
    LayerNorm,
    MultiHeadAttention,
    Sizes,
    State,
    box_geometry,
    region_variant,
)

ENCODER = ("SA",) * 4 + ("FFN",) * 4 + ("SA",) + ("FFN",) * 3  # operations on the words
DECODER = (
    "GA", "GA", "FFN", "FFN", "GA", "FFN", "RSA", "GA", "FFN", "GA", "RSA", "FFN", "RSA", "SA", "FFN", "RSA", "GA",
    "FFN",
)  # fmt: skip
"""Operations on the regions."""

SMALL_ENCODER = ("SA", "FFN", "SA", "FFN")
SMALL_DECODER = ("GA", "FFN", "RSA", "GA", "FFN", "RSA", "SA", "FFN")
"""Operations of the small models: each kind of the searched ones, in their order."""

PIXELS = Annotated[int, NOT_NEGATIVE]
PUBLISHED: dict[str, Any] = {
    "options": ("head_width", "flat_hidden", "picture_side"), "picture_side": 640,  # the longer side of COCO's pictures
    "relation": 64, "encoder": ENCODER, "decoder": DECODER,
}  # fmt: skip
MINI: dict[str, Any] = {
    "region_width": 64, "head_width": 16, "relation": 16, "encoder": SMALL_ENCODER, "decoder": SMALL_DECODER,
}  # fmt: skip


class MMNasNet(FlatRegionModel):
    """MMNasNet; see :class:`confed.models.region_model.RegionModel` for its batches, which need ``boxes``.

    Args:
        sizes: those that every model of the family has.
        hidden: features inside, d.
        head_width: features of an attention head.
        relation: features of a pair of boxes.
        encoder: operations on the words, of SA and FFN.
        decoder: operations on the regions, of SA, RSA, GA and FFN.
        flat_hidden: width of the MLP of AttFlat.
        features: what the answer head reads, D.
        dropout: dropout probability.
        picture_side: pixels along a picture's sides, of which the released code adds one to every box's width and
            height; files of regions keep no sizes of pictures. 0 adds nothing.
    """

    needs_boxes = True

    def __init__(
        self,
        sizes: Sizes,
        *,
        hidden: int,
        head_width: int,
        relation: int,
        encoder: Sequence[str],
        decoder: Sequence[str],
        flat_hidden: int,
        features: int,
        dropout: float,
        picture_side: int = 0,
    ) -> None:
        super().__init__(sizes, hidden, nn.LSTM)
        check_divides(head_width, hidden, "model.head_width")
        check_value(picture_side, PIXELS, "model.picture_side")
        heads = hidden // head_width
        self.regions = nn.Linear(sizes.region_width, hidden)
        self.relation = nn.Linear(4, relation)
        self.encoder = nn.ModuleList([_Operation(kind, hidden, heads, relation, dropout) for kind in encoder])
        self.decoder = nn.ModuleList([_Operation(kind, hidden, heads, relation, dropout) for kind in decoder])
        self.add_readout(sizes, hidden, flat_hidden, features, dropout)
        self.pixel = 1 / picture_side if picture_side else 0.0

    def look(self, state: State) -> tuple[Tensor, Tensor]:
        """The features (B, D), and AttFlat's weights of the regions (B, R)."""
        assert state.boxes is not None
        related = torch.relu(self.relation(box_geometry(state.boxes, self.pixel)))
        x, y = state.words, self.regions(state.regions)
        for operation in self.encoder:
            x = operation(x, state.is_word, x, state.is_word, related)
        for operation in self.decoder:
            y = operation(y, state.present, x, state.is_word, related)
        return self.read_out(x, y, state)

    def places(self) -> Places:
        """What can be finetuned; adapters sit in front of the layer normalisation of every feed-forward block.

        With "top", the operations learn from the last attention on.
        """
        top: list[str] = []
        norms: list[nn.Module] = []
        for name, operations in (("encoder", self.encoder), ("decoder", self.decoder)):
            kinds = [cast(_Operation, operation).kind for operation in operations]
            last = max(i for i, kind in enumerate(kinds) if kind != "FFN")
            top += [f"{name}.{i}." for i in range(last, len(kinds))]
            norms += [cast(_Operation, operations[i]).norm for i, kind in enumerate(kinds) if kind == "FFN"]
        return self.flat_places(top, norms)


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

    def forward(self, y: Tensor, present: Tensor, words: Tensor, seen: Tensor, related: Tensor) -> Tensor:
        if self.kind == "FFN":
            change = self.feed_forward(y)
        elif self.kind == "GA":
            change = self.attention(y, words, seen)
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

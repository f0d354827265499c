"""MCAN: words attend to words, then regions to regions and to the words, in a deep encoder and decoder.

Yu, Yu, Cui, Tao and Tian, "Deep Modular Co-Attention Networks for Visual Question Answering", CVPR 2019. With x the
states of the words (LSTM) and y the regions (a linear layer), N times each:

- SA, on the words: ``x = LN(x + MHA(x, x))``, ``x = LN(x + FFN(x))``
- SGA, on the regions, with the last x: ``y = LN(y + MHA(y, y))``, ``y = LN(y + MHA(y, x))``, ``y = LN(y + FFN(y))``

and ``f = LN(AttFlat(x) + AttFlat(y))``, which the linear answer head reads. The layer normalisation is that of
:class:`confed.models.region_model.LayerNorm`; padding is masked everywhere.
"""

from typing import cast

from torch import Tensor, nn

from confed.models.finetuning import Places
from confed.models.region_model import MLP, FlatRegionModel, LayerNorm, MultiHeadAttention, Sizes, State, region_variant


class MCAN(FlatRegionModel):
    """MCAN; see :class:`confed.models.region_model.RegionModel` for its batches.

    Args:
        sizes: those that every model of the family has.
        hidden: features inside, d; feed-forward blocks have 4 d.
        layers: blocks of each kind, N.
        heads: of every attention.
        flat_hidden: width of the MLP of AttFlat.
        features: what the answer head reads, D.
        dropout: dropout probability.
    """

    def __init__(
        self,
        sizes: Sizes,
        *,
        hidden: int,
        layers: int,
        heads: int,
        flat_hidden: int,
        features: int,
        dropout: float,
    ) -> None:
        super().__init__(sizes, hidden, nn.LSTM)
        self.regions = nn.Linear(sizes.region_width, hidden)
        self.encoder = nn.ModuleList([_Block(hidden, heads, dropout, guided=False) for _ in range(layers)])
        self.decoder = nn.ModuleList([_Block(hidden, heads, dropout, guided=True) for _ in range(layers)])
        self.add_readout(sizes, hidden, flat_hidden, features, dropout)

    def look(self, state: State) -> tuple[Tensor, Tensor]:
        """The features (B, D), and AttFlat's weights of the regions (B, R)."""
        x, y = state.words, self.regions(state.regions)
        for block in self.encoder:
            x = block(x, state.is_word)
        for block in self.decoder:
            y = block(y, state.present, x, state.is_word)
        return self.read_out(x, y, state)

    def places(self) -> Places:
        """What can be finetuned; adapters sit in front of the last layer normalisation of every block."""
        norms: list[nn.Module] = []
        for stack in (self.encoder, self.decoder):
            norms += [cast(_Block, block).norm_forward for block in stack]
        last = len(self.encoder) - 1
        return self.flat_places((f"encoder.{last}.", f"decoder.{last}."), norms)


class _Block(nn.Module):
    """SA, or with ``guided`` SGA."""

    def __init__(self, width: int, heads: int, dropout: float, guided: bool) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(width, heads, dropout)
        self.norm = LayerNorm(width)
        self.guided = MultiHeadAttention(width, heads, dropout) if guided else None
        self.norm_guided = LayerNorm(width) if guided else None
        self.feed_forward = MLP(width, 4 * width, width, dropout)
        self.norm_forward = LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, present: Tensor, words: Tensor | None = None, seen: Tensor | None = None) -> Tensor:
        x = self.norm(x + self.dropout(self.attention(x, x, present)))
        if self.guided is not None and self.norm_guided is not None:
            x = self.norm_guided(x + self.dropout(self.guided(x, words, seen)))
        return self.norm_forward(x + self.dropout(self.feed_forward(x)))


mcan_small = region_variant(
    MCAN, "mcan_small", "MCAN-small as published: d = 512, 6 + 6 blocks, 8 heads, D = 1024, word embeddings of 300.",
    dropout=0.1, embedding=300, hidden=512, layers=6, heads=8, flat_hidden=512, features=1024,
)  # fmt: skip
mcan_large = region_variant(
    MCAN, "mcan_large", "MCAN-large as published: d = 1024, D = 2048, otherwise as :func:`mcan_small`.",
    dropout=0.1, embedding=300, hidden=1024, layers=6, heads=8, flat_hidden=512, features=2048,
)  # fmt: skip
mcan_s_mini = region_variant(
    MCAN, "mcan_s_mini", "A small MCAN for the built-in pictures: d = 64, 2 + 2 blocks, 4 heads, D = 128.",
    region_width=64, embedding=64, hidden=64, layers=2, heads=4, flat_hidden=64, features=128,
)  # fmt: skip
mcan_l_mini = region_variant(
    MCAN, "mcan_l_mini",
    "A small MCAN for the built-in pictures: d = 96, 2 + 2 blocks, D = 192; arguments as :func:`mcan_small`.",
    region_width=64, embedding=64, hidden=96, layers=2, heads=4, flat_hidden=96, features=192,
)  # fmt: skip

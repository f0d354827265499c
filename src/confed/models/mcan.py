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

from confed.models.adapters import Host
from confed.models.finetuning import Places
from confed.models.region_model import MLP, AttFlat, LayerNorm, MultiHeadAttention, RegionModel, State
from confed.models.variants import region_variant


class MCAN(RegionModel):
    """MCAN; see :class:`confed.models.region_model.RegionModel` for its batches.

    Args:
        answers: number of answers C.
        vocab_size: number of token ids.
        embedding: features of a word's embedding.
        region_width: features of a region, W.
        hidden: features inside, d; feed-forward blocks have 4 d.
        layers: blocks of each kind, N.
        heads: of every attention.
        flat_hidden: width of the MLP of AttFlat.
        features: what the answer head reads, D.
        dropout: dropout probability.
        max_length: the most tokens.
    """

    def __init__(
        self,
        answers: int,
        vocab_size: int,
        embedding: int,
        *,
        region_width: int,
        hidden: int,
        layers: int,
        heads: int,
        flat_hidden: int,
        features: int,
        dropout: float,
        max_length: int,
    ) -> None:
        super().__init__(answers, vocab_size, embedding, hidden, region_width, nn.LSTM, max_length)
        self.regions = nn.Linear(region_width, hidden)
        self.encoder = nn.ModuleList([_Block(hidden, heads, dropout, guided=False) for _ in range(layers)])
        self.decoder = nn.ModuleList([_Block(hidden, heads, dropout, guided=True) for _ in range(layers)])
        self.flat_text = AttFlat(hidden, flat_hidden, features, dropout)
        self.flat_regions = AttFlat(hidden, flat_hidden, features, dropout)
        self.norm = LayerNorm(features)
        self.classifier = nn.Linear(features, answers)
        self.hidden, self.layers = hidden, layers

    def look(self, state: State) -> tuple[Tensor, Tensor]:
        """The features (B, D), and AttFlat's weights of the regions (B, R)."""
        x, y = state.words, self.regions(state.regions)
        for block in self.encoder:
            x = block(x, state.asked)
        for block in self.decoder:
            y = block(y, state.present, x, state.asked)
        text, _ = self.flat_text(x, state.asked)
        seen, weights = self.flat_regions(y, state.present)
        return self.norm(text + seen), weights

    def places(self) -> Places:
        """What can be finetuned; adapters sit in front of the last layer normalisation of every block."""
        blocks: list[_Block] = []
        for stack in (self.encoder, self.decoder):
            for block in stack:
                blocks.append(cast(_Block, block))
        last = self.layers - 1
        return Places(
            heads=(self.answer_head,),
            top=(f"encoder.{last}.", f"decoder.{last}.", "flat_text.", "flat_regions.", "norm."),
            hosts=[Host(block.norm_forward, self.hidden, after_norm=True) for block in blocks],
            lora=("query", "value"),
            ia3=("key", "value"),
            ia3_inputs=("feed_forward.output",),
        )


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

    def forward(self, x: Tensor, present: Tensor, words: Tensor | None = None, asked: Tensor | None = None) -> Tensor:
        x = self.norm(x + self.dropout(self.attention(x, x, present)))
        if self.guided is not None and self.norm_guided is not None:
            x = self.norm_guided(x + self.dropout(self.guided(x, words, asked)))
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

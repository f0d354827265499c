"""The network of MMFed (re-implementation from abstract): an encoder per modality, co-attention, late fusion.

Xiong, Yang, Qi and Xu, "A unified framework for multi-modal federated learning", Neurocomputing 480, 2022. Only the
abstract was at hand, which has encoders per modality and a co-attention that fuses complementary modalities. All else
is a resolution of ours: segments as in :mod:`confed.models.modal_segments`, pre-norm Transformer encoders, one
cross-attention layer each way (a modality's states look at those of all others; Lu et al., "ViLBERT", NeurIPS 2019),
the mean over a modality's states, all means side by side, and a linear classifier.

A sample that lacks a modality has zeros in the place of its mean, and one that has a single modality no co-attention.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from confed.federation.protocols import Batch, Output
from confed.federation.specs import ModelSpec
from confed.models.heads import COUNT, count
from confed.models.modal_segments import checked_modalities
from confed.models.modal_transformer import (
    Encoder,
    EncoderLayer,
    ModalEmbedding,
    ModalNetwork,
    Tokens,
    caption_tokenizer,
    joined,
    modal_options,
    pool,
    read,
    segmenter,
)
from confed.models.pretrained import seeded
from confed.models.variants import variant


class ModalEncoder(nn.Module):
    """Part of one modality: tokens, a Transformer, and attention to the other modalities."""

    def __init__(self, tokens: ModalEmbedding, body: Encoder, look: EncoderLayer) -> None:
        super().__init__()
        self.tokens, self.body, self.look = tokens, body, look

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """States (B, n, d) of a batch that has this modality, and which are no padding, bool (B, n) or None."""
        x, present = self.tokens(batch)
        return self.body(x, present), present


class CoAttentionNetwork(ModalNetwork):
    """Encoders per modality, one cross-attention layer each way, and a classifier of all means side by side.

    Every batch has one set of modalities, which may differ from batch to batch; only these are computed.
    """

    answer_head = "head"
    """Name of the submodule that scores answers: what methods with a head of each client's own keep private."""

    def __init__(self, embed: Mapping[str, ModalEncoder], width: int, answers: int) -> None:
        super().__init__(embed)
        self.head = nn.Linear(len(embed) * width, answers)

    def forward(self, batch: Batch) -> Output:
        """Scores of the answers (B, C), and the modalities' means side by side (B, M d), zeros for absent ones."""
        encoded = read(self.embed, batch)
        means = {name: self._mean(name, encoded) for name in encoded}
        nothing = torch.zeros_like(next(iter(means.values())))
        features = torch.cat([means.get(name, nothing) for name in self.embed], 1)
        return Output(self.head(features), features)

    def _mean(self, name: str, encoded: Mapping[str, tuple[Tensor, Tensor | None]]) -> Tensor:
        """The mean (B, d) of a modality's states after they have looked at those of the others."""
        states, present = encoded[name]
        others = [given for other, given in encoded.items() if other != name]
        if others:
            context, seen = joined(others)
            mask = None if seen is None else seen[:, None, None, :]
            module = self.embed[name]
            assert isinstance(module, ModalEncoder)
            states = module.look(states, context, mask)
        return pool(Tokens(states, present, {name: slice(None)}))


def assemble(
    answers: Sequence[str] | int,
    vocab_size: int,
    *,
    modalities: tuple[str, ...] = ("image", "text", "audio"),
    width: COUNT = 48,
    layers: COUNT = 1,
    attention_heads: int = 4,
    hidden: COUNT = 96,
    dropout: float,
    seed: int,
    **cuts: Any,
) -> CoAttentionNetwork:
    """A network with its initial values.

    Options:
        width: features of a token, d.
        layers: of each modality's encoder.
        dropout: dropout probability.
        seed: of the initial values.
    """
    names = checked_modalities(modalities)

    def encoder(name: str) -> ModalEncoder:
        tokens = ModalEmbedding(name, segmenter(name, vocab_size, **cuts), width, 0)
        body = Encoder(width, layers, attention_heads, hidden, dropout, block="prenorm")
        look = EncoderLayer(width, attention_heads, hidden, dropout, sub_norm=False)
        look.reset_parameters(1.0)
        return ModalEncoder(tokens, body, look)

    return seeded(seed, lambda: CoAttentionNetwork({name: encoder(name) for name in names}, width, count(answers)))


mmfed_tiny = variant(
    assemble, "mmfed_tiny",
    "MMFed's network with a few thousand parameters, for tests: one layer per modality, 16 features.",
    "answers vocab_size modalities picture_size sample_rate series_channels max_length dropout seed",
    sources=(modal_options, segmenter), spec=ModelSpec(tokenizer=caption_tokenizer),
    word_width=16, mels=8, width=16, layers=1, attention_heads=2, hidden=32,
)  # fmt: skip
mmfed_mini = variant(
    assemble, "mmfed_mini",
    "MMFed's network in about the size of :func:`confed.models.modal_transformer.modal_transformer_mini`.",
    "answers vocab_size modalities picture_size sample_rate series_channels patch word_width max_length sound "
    "audio_seconds mels stack series_steps window width layers attention_heads hidden dropout seed",
    sources=(modal_options, segmenter), spec=ModelSpec(tokenizer=caption_tokenizer),
)  # fmt: skip

"""Late fusion: a Transformer with an answer head for every modality, whose answers are averaged.

With p_m the probabilities that modality m's network gives the answers, a sample with the modalities S is answered by

    log p = mean over m in S of log p_m,

the product of experts up to a constant. Every tensor belongs to one modality, so that a federation averages each
network over the owners of its modality (:mod:`confed.federation.ownership`).
"""

from collections.abc import Sequence
from typing import Any, cast

import torch

from confed.federation.protocols import Batch, Output
from confed.federation.specs import ModelSpec
from confed.models.heads import COUNT, count
from confed.models.modal_segments import checked_modalities
from confed.models.modal_transformer import (
    Encoder,
    ModalEmbedding,
    ModalNetwork,
    ModalTransformer,
    caption_tokenizer,
    modal_options,
    read,
    segmenter,
)
from confed.models.pretrained import seeded
from confed.models.variants import variant


class LateFusion(ModalNetwork):
    """A network per modality and the mean of their log-probabilities."""

    @property
    def frozen(self) -> set[str]:
        """Names of the parameters that do not learn, such as fixed word vectors."""
        result: set[str] = set()
        for name, module in self.embed.items():
            result |= {f"embed.{name}.{tensor}" for tensor in cast(ModalTransformer, module).frozen}
        return result

    def forward(self, batch: Batch) -> Output:
        """Log-probabilities of the answers (B, C), and the mean of the networks' features (B, d_model)."""
        embedded = {name: module(batch) for name, module in self.embed.items() if name in batch}
        if not embedded:
            read(self.embed, batch)  # raises, and says what came
        scores = torch.stack([output.logits.log_softmax(-1) for output in embedded.values()]).mean(0)
        return Output(scores, torch.stack([output.features for output in embedded.values()]).mean(0))


def assemble(
    answers: Sequence[str] | int,
    vocab_size: int,
    *,
    modalities: tuple[str, ...] = ("image", "text", "audio"),
    width: COUNT = 64,
    layers: COUNT = 2,
    attention_heads: int = 4,
    hidden: COUNT = 128,
    dropout: float,
    seed: int,
    **cuts: Any,
) -> LateFusion:
    """Late fusion of Transformers.

    Options:
        word_width: features of a word vector.
        sound: "log_mel" or "waveform".
        layers: of each Transformer.
        dropout: dropout probability.
        seed: of the initial values.
    """

    def network(name: str) -> ModalTransformer:
        tokens = ModalEmbedding(name, segmenter(name, vocab_size, **cuts), width, 0)
        body = Encoder(width, layers, attention_heads, hidden, dropout)
        return ModalTransformer({name: tokens}, body, count(answers))

    return seeded(seed, lambda: LateFusion({name: network(name) for name in checked_modalities(modalities)}))


late_fusion_mini = variant(
    assemble, "late_fusion_mini",
    "Late fusion of Transformers that are each as "
    ":func:`confed.models.modal_transformer.modal_transformer_mini`.\n\n"
    "Raises ``ValueError``: unknown modalities, or an option that is out of range.",
    "answers vocab_size modalities picture_size sample_rate series_channels patch word_width word_vectors max_length "
    "sound audio_seconds mels stack series_steps window width layers attention_heads hidden dropout seed",
    sources=(modal_options, segmenter), spec=ModelSpec(tokenizer=caption_tokenizer),
)  # fmt: skip

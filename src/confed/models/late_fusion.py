"""Late fusion: a Transformer with an answer head for every modality, whose answers are averaged.

With p_m the probabilities that modality m's network gives the answers, a sample with the modalities S is answered by

    log p = mean over m in S of log p_m,

the product of experts up to a constant. Every tensor belongs to one modality, so that a federation averages each
network over the owners of its modality (:mod:`confed.federation.ownership`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from confed.federation.ownership import MODALITIES
from confed.federation.protocols import Batch, Output
from confed.models.heads import count
from confed.models.modal_module import Encoder, ModalEmbedding, ModalTransformer, read
from confed.models.modal_segments import checked_modalities
from confed.models.modal_transformer import Sound, WordVectors, caption_tokenizer, segmenter
from confed.models.pretrained import seeded
from confed.registry import register_model


class LateFusion(nn.Module):
    """A network per modality and the mean of their log-probabilities."""

    reads_absent: ClassVar[bool] = True  # whether batches may lack some of the modalities; see ModalTransformer

    def __init__(self, embed: Mapping[str, ModalTransformer]) -> None:
        super().__init__()
        if not embed:
            raise ValueError(f"a model needs at least one modality of {', '.join(MODALITIES)}")
        self.embed = nn.ModuleDict({name: embed[name] for name in MODALITIES if name in embed})

    @property
    def modalities(self) -> tuple[str, ...]:
        """What the model reads, in the order of :data:`confed.federation.ownership.MODALITIES`."""
        return tuple(self.embed)

    @property
    def frozen(self) -> set[str]:
        """Names of the parameters that do not learn, such as fixed word vectors."""
        parts = {name: module for name, module in self.embed.items() if isinstance(module, ModalTransformer)}
        result: set[str] = set()
        for name, module in parts.items():
            for still in module.frozen:
                result.add(f"embed.{name}.{still}")
        return result

    def forward(self, batch: Batch) -> Output:
        """Log-probabilities of the answers (B, C), and the mean of the networks' features (B, d_model)."""
        embedded = {name: module(batch) for name, module in self.embed.items() if name in batch}
        if not embedded:
            read(self.embed, batch)  # raises, and says what came
        scores = torch.stack([output.logits.log_softmax(-1) for output in embedded.values()]).mean(0)
        return Output(scores, torch.stack([output.features for output in embedded.values()]).mean(0))


@register_model
def late_fusion_mini(
    answers: Sequence[str] | int,
    vocab_size: int,
    *,
    modalities: tuple[str, ...] = ("image", "text", "audio"),
    picture_size: tuple[int, int] = (28, 28),
    sample_rate: int = 8000,
    series_channels: int = 0,
    patch: int | None = None,
    word_width: int = 64,
    word_vectors: WordVectors = "learned",
    max_length: int = 16,
    sound: Sound = "log_mel",
    audio_seconds: float = 2.0,
    mels: int = 32,
    stack: int = 4,
    series_steps: int = 256,
    window: int = 8,
    width: int = 64,
    layers: int = 2,
    attention_heads: int = 4,
    hidden: int = 128,
    dropout: float = 0.0,
    seed: int = 0,
) -> LateFusion:
    """Late fusion of Transformers that are each as :func:`confed.models.modal_transformer.modal_transformer_mini`.

    Raises ``ValueError``: unknown modalities, or an option that is out of range.

    Args:
        answers: the answers, or how many there are.
        vocab_size: number of token ids.
        modalities: what it reads, of "image", "text", "audio", "series".
        picture_size: (H, W) in pixels; a run takes it from the data.
        sample_rate: of sounds; a run takes it from the data.
        series_channels: values of a series per step; a run takes it from the data.
        patch: pixels per side of a patch; None for the largest that gives 16 patches or more.
        word_width: features of a word vector.
        word_vectors: "learned", or "frozen" random ones.
        max_length: the most tokens of a text; longer ones lose their end.
        sound: "log_mel" or "waveform".
        audio_seconds: the longest sound.
        mels: bands of the spectrogram.
        stack: its frames per segment, each 16 ms after the last; a piece of the waveform is as long.
        series_steps: the longest series.
        window: steps of its segments.
        width: features of a token.
        layers: of each Transformer.
        attention_heads: of each layer; must divide the width.
        hidden: width of the feed-forward blocks.
        dropout: dropout probability.
        seed: of the initial values.
    """
    cuts: dict[str, Any] = {
        "picture_size": picture_size,
        "patch": patch,
        "word_width": word_width,
        "word_vectors": word_vectors,
        "max_length": max_length,
        "sample_rate": sample_rate,
        "sound": sound,
        "audio_seconds": audio_seconds,
        "mels": mels,
        "stack": stack,
        "series_channels": series_channels,
        "series_steps": series_steps,
        "window": window,
    }
    names = checked_modalities(modalities)

    def network(name: str) -> ModalTransformer:
        tokens = ModalEmbedding(name, segmenter(name, vocab_size, **cuts), width, 0)
        return ModalTransformer(
            {name: tokens}, Encoder(width, layers, attention_heads, hidden, dropout), count(answers)
        )

    return seeded(seed, lambda: LateFusion({name: network(name) for name in names}))


late_fusion_mini.tokenizer = caption_tokenizer  # pyright: ignore[reportFunctionMemberAccess]

"""Small convolutional network for pictures and averaged word vectors, for answers to questions.

The plainest model of visual question answering, after iBOWIMG (Zhou et al., "Simple Baseline for Visual Question
Answering", arXiv 1512.02167, 2015): a bag of words beside one vector of the picture. Departures: the convolutions are
trained from random values with the rest, their normalisation is over groups of channels, so that nothing is averaged
over batches or clients, and the product of both vectors is read beside them.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import gcd
from typing import Literal

import torch
from torch import Tensor, nn

from confed.federation.protocols import Batch, Output
from confed.federation.specs import ModelSpec
from confed.federation.stages import Stage
from confed.models.finetuning import Places
from confed.models.heads import answer_head, count
from confed.models.inputs import checked_image, needed
from confed.models.layers import seeded_linear
from confed.models.passes import Chain, Step
from confed.models.tokenizer import WordTokenizer
from confed.models.variants import variant


class CnnWords(Chain, nn.Module):
    """Convolutions and a bag of words with an answer head.

    Batches have ``image``, uint8 (B, 3, S, S) or floats in [-1, 1], and ``text`` and ``text_mask``, int64 (B, L).
    """

    answer_head = "classifier"
    """Name of the submodule that scores answers: what methods with a head of each client's own keep private."""

    def __init__(
        self,
        answers: int,
        vocab_size: int,
        width: int,
        channels: Sequence[int],
        image_size: int,
        dropout: float,
        rng: torch.Generator,
    ) -> None:
        super().__init__()
        if not channels:
            raise ValueError("channels must name at least one convolution, got none")
        if image_size % 2 ** len(channels):
            sides = f"{2 ** len(channels)} with {len(channels)} convolutions"
            raise ValueError(f"image_size must be a multiple of {sides}, got {image_size}")
        self.image_size = (image_size, image_size)
        sizes = (3, *channels)
        self.picture = nn.Sequential(*(_block(*pair, rng) for pair in pairwise(sizes)))
        self.project = seeded_linear(channels[-1] * (image_size // 2 ** len(channels)) ** 2, width, 0.02, rng)
        self.words = nn.Embedding.from_pretrained(torch.randn(vocab_size, width, generator=rng), freeze=False)
        self.dropout = nn.Dropout(dropout)
        self.classifier = answer_head(3 * width, answers, rng)

    @property
    def frozen(self) -> set[str]:
        """Names of the parameters that do not learn."""
        return {name for name, parameter in self.named_parameters() if not parameter.requires_grad}

    def places(self) -> Places:
        """What can be finetuned: the answer head always learns."""
        return Places(heads=("classifier",))

    def steps(self) -> Sequence[Step]:
        """Fused features (B, 3 d): picture, words, and their product; and scores of the answers (B, C)."""
        inputs, body = ("image", "text", "text_mask"), ("picture.", "project.", "words.")
        return (
            (Stage("features", inputs, body), lambda _, batch: self._features(batch)),
            (Stage("head", (), ("",)), lambda features, _: Output(self.classifier(features), features)),
        )

    def _features(self, batch: Batch) -> Tensor:
        image = checked_image(batch, self.image_size, "CnnWords")
        text, mask = needed(batch, "CnnWords", "text", "text_mask")
        if not image.is_floating_point():
            image = image.to(self.project.weight.dtype) / 127.5 - 1.0
        picture = torch.tanh(self.project(self.picture(image).flatten(1)))
        seen = mask.unsqueeze(-1).to(self.words.weight.dtype)
        words = torch.tanh((self.words(text) * seen).sum(1) / seen.sum(1).clamp_min(1.0))
        return self.dropout(torch.cat([picture, words, picture * words], 1))


def _block(inputs: int, outputs: int, rng: torch.Generator) -> nn.Sequential:
    # Without bias: the normalisation has one. Convolutions in steps of two pixels cost a third of this, and see less:
    # on easy-VQA, pooled, 85.6 % in place of 88.0 %.
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False, device="meta").to_empty(device="cpu")
    nn.init.normal_(convolution.weight, 0.0, (2 / (9 * inputs)) ** 0.5, generator=rng)
    return nn.Sequential(convolution, nn.GroupNorm(gcd(8, outputs), outputs), nn.ReLU(), nn.MaxPool2d(2))


def _small(
    answers: Sequence[str] | int,
    vocab_size: int,
    *,
    width: int = 64,
    channels: tuple[int, ...] = (16, 32, 64, 64),
    image_size: int = 64,
    dropout: float,
    rng: torch.Generator,
) -> CnnWords:
    """A small network.

    Options:
        width: features per modality.
        channels: of the convolutions, each of which halves the sides of the picture.
        image_size: pixels per side.
        dropout: dropout probability of the fused features.
        seed: of the initial values.
    """
    return CnnWords(count(answers), vocab_size, width, channels, image_size, dropout, rng)


def what_learns(*, trainable: Literal["all", "head"] = "all") -> None:
    """Options of what learns.

    Options:
        trainable: what learns: everything, or the answer head alone.
    """


cnn_words = variant(
    _small, "cnn_words",
    "Small convolutional network with averaged words, 0.1 to 0.2 million parameters, trained from random values.\n\n"
    "Raises ``ValueError``: fewer than one answer, no convolution, or a size that they cannot halve often enough.",
    "answers vocab_size width channels image_size dropout trainable seed", sources=(what_learns,),
    spec=ModelSpec(tokenizer=WordTokenizer),
)  # fmt: skip

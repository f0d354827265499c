"""Tokenisation of modalities into segments: picture patches, word vectors, pieces of sounds and series.

Cao, Sun and Yu, "Multimodal personalized federated learning based on Transformer", 2025, Eq. 6: a sample of modality m
becomes X = [x_1, ..., x_n] with x_i of length L_m, cut along what the modality is made of. n differs from sample to
sample; what is behind a batch's longest one is cut off before anything is computed.

CLIP image encoder as a picture tokenizer, of which only the last block is trained.

Cao, Sun and Yu (2025) read pictures with CLIP ViT-L/14 (Radford et al., "Learning Transferable Visual Models From
Natural Language Supervision", ICML 2021) and freeze all but its last layer. Any other picture encoder of
``transformers`` is read as :mod:`confed.models.encoders` reads it, and frozen as a whole.
"""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from confed.federation.ownership import MODALITIES
from confed.federation.protocols import Batch
from confed.federation.ranges import check_value
from confed.federation.stages import Stage
from confed.models.encoders import PictureTower, load_tower, normalised
from confed.models.grid_features import colours_of
from confed.models.heads import COUNT
from confed.models.inputs import check_shape, checked_image, cropped_middle, needed, patches
from confed.models.passes import Chain, Step
from confed.models.pretrained import published, seeded

FLOOR = 1e-10  # mel energies are at least this large before their logarithm is taken
DECADES = 8.0  # what is quieter than the loudest place of a sound by more powers of ten is silence


class Segments(NamedTuple):
    x: Tensor
    present: Tensor | None = None  # which are no padding, bool (B, n); None where none is


class Segmenter(nn.Module, ABC):
    """Cuts samples of one modality into segments."""

    def __init__(self, width: int, limit: int) -> None:
        super().__init__()
        self.width, self.limit = width, limit

    @abstractmethod
    def forward(self, batch: Batch) -> Segments:
        """The segments of a batch that has this modality."""


class Patches(Segmenter):
    """Squares of a picture, row by row; grey pictures come with three equal channels.

    uint8 colours become [-1, 1]; floats are taken as they are.
    """

    def __init__(self, size: tuple[int, int], patch: int) -> None:
        if patch < 1 or min(size) < 1 or size[0] % patch or size[1] % patch:
            raise ValueError(f"model.patch must divide the pictures' sides {size[0]} x {size[1]}, got {patch}")
        super().__init__(3 * patch * patch, (size[0] // patch) * (size[1] // patch))
        self.size, self.patch = size, patch

    def forward(self, batch: Batch) -> Segments:
        """The patches of ``image``; see :class:`Segmenter`."""
        image = checked_image(batch, self.size, "a model of pictures")
        if not image.is_floating_point():
            image = image.to(torch.get_default_dtype()).mul_(1 / 127.5).sub_(1.0)
        return Segments(patches(image, self.patch))


class Words(Segmenter):
    """The vectors of a text's tokens, from a table that all clients with texts share.

    The paper takes word embeddings as given and maps them linearly. Where do they come from? A learned table (default)
    fits the words of any dataset and needs no file; it belongs to the client's copy of the modality, like everything
    under its name, and the personal map works on top of it. A frozen table of random vectors leaves the map as the only
    thing that learns about single words, as in the paper's formulas; it is never sent.
    """

    def __init__(self, vocab_size: int, width: int, max_length: int, learn: bool = True) -> None:
        super().__init__(width, max_length)
        self.words = nn.Embedding(vocab_size, width)
        self.words.weight.requires_grad_(learn)

    def forward(self, batch: Batch) -> Segments:
        """The vectors of ``text``, as ``text_mask`` says; see :class:`Segmenter`."""
        text, mask = (_tensor(batch, key, "text", "BL") for key in ("text", "text_mask"))
        check_shape(mask, "text_mask", *text.shape)
        if text.shape[1] > self.limit:
            raise ValueError(f"a text must have at most {self.limit} tokens (model.max_length), got {text.shape[1]}")
        counts = (mask != 0).sum(1)
        _refuse_empty(counts, "text", "token")
        used = int((mask != 0).any(0).nonzero().max()) + 1
        present = mask[:, :used] != 0
        return Segments(self.words(text[:, :used]), None if int(counts.min()) == used else present)


class _Sequences(Segmenter):
    """What segments of sounds and of series have in common: ``step`` values each of the longest one's."""

    key: ClassVar[str] = "audio"  # of a batch
    letters: ClassVar[str] = "BT"  # of its shape
    unit: ClassVar[str] = "sample"
    option: ClassVar[str] = "model.audio_seconds"  # that says how long the longest one is

    def __init__(self, width: int, step: int, longest: int) -> None:
        if longest < 1:
            raise ValueError(f"the longest sound (model.audio_seconds) must have a sample at least, got {longest}")
        super().__init__(width, math.ceil(longest / step))
        self.step, self.longest = step, longest

    def clips(self, batch: Batch, behind: int = 0) -> tuple[Tensor, Tensor, Tensor | None]:
        """Sequences cut or padded to whole segments of the longest one, their lengths, which segments are there."""
        key = self.key
        values, length = _tensor(batch, key, key, self.letters), _tensor(batch, f"{key}_length", key, "B")
        _check_lengths(length, values, key, self.unit, self.longest, self.option)
        counts = -(length // -self.step)
        n = int(counts.max())
        total = n * self.step + behind
        # What lies behind a sequence is silence, so that its segments do not depend on the batch it is in.
        missing = (0,) * 2 * (values.ndim - 2) + (0, max(0, total - values.shape[1]))
        values = F.pad(values[:, :total], missing)
        present = None if int(counts.min()) == n else torch.arange(n, device=values.device) < counts.unsqueeze(1)
        return values, length, present


class WaveFrames(_Sequences):
    """Pieces of the waveform, in sequence; each sound has mean 0 and variance 1.

    The scaling is that of wav2vec 2.0 (Baevski et al., NeurIPS 2020): recordings differ in how loud they are.
    """

    def __init__(self, frame: int, longest: int) -> None:
        if frame < 1:
            raise ValueError(f"a frame must have a sample at least, got {frame}")
        super().__init__(frame, frame, longest)

    def forward(self, batch: Batch) -> Segments:
        """The pieces of ``audio``; see :class:`Segmenter`."""
        audio, length, present = self.clips(batch)
        inside = torch.arange(audio.shape[1], device=audio.device) < length.unsqueeze(1)
        count = length.unsqueeze(1).to(audio.dtype)
        centred = (audio - (audio * inside).sum(1, keepdim=True) / count) * inside
        scaled = centred * (centred.square().sum(1, keepdim=True) / count + 1e-7).rsqrt()
        return Segments(scaled.unflatten(1, (-1, self.width)), present)


class LogMelFrames(_Sequences):
    """Pieces of the log-mel spectrogram: ``stack`` frames of ``mels`` bands each, in sequence.

    As Whisper has it (Radford et al., ICML 2023): the power of a short-time Fourier transform with Hann's window, mel
    bands, log10, at most 8 decades below the sound's loudest place, then (x + 4) / 4; here with the loudest place of
    every sound at 0, so that values lie in [-1, 1] however loud the recording is.
    """

    window: Tensor
    filters: Tensor

    def __init__(self, sample_rate: int, mels: int, window: int, stack: int, longest: int) -> None:
        from transformers.audio_utils import mel_filter_bank

        if window < 2:
            raise ValueError(f"a window must have two samples at least, got {window}")
        self.hop, self.stack = window // 2, stack
        super().__init__(stack * mels, stack * self.hop, longest)
        with warnings.catch_warnings():  # the error below says it with the names of our options
            warnings.simplefilter("ignore")
            filters = mel_filter_bank(1 + window // 2, mels, 0, sample_rate / 2, sample_rate, "slaney", "slaney")
        if not filters.any(0).all():
            raise ValueError(
                f"model.mels must be fewer for windows of {window} samples at {sample_rate} per second: of {mels} "
                f"bands {int((~filters.any(0)).sum())} hold no frequency"
            )
        # They follow from the options, so that they are no part of the model's tensors.
        self.register_buffer("window", torch.hann_window(window), persistent=False)
        self.register_buffer("filters", torch.tensor(filters, dtype=torch.float32), persistent=False)

    def forward(self, batch: Batch) -> Segments:
        """The pieces of the spectrograms of ``audio``; see :class:`Segmenter`."""
        size = len(self.window)
        audio, _, present = self.clips(batch, size - self.hop)
        # Eight decades do not fit into half precision.
        with torch.autocast(audio.device.type, enabled=False):
            spectrum = torch.stft(
                audio.float(), size, self.hop, window=self.window, center=False, return_complex=True
            )  # (B, bins, frames)
            power = torch.view_as_real(spectrum).square().sum(-1).transpose(1, 2)
            bands = (power @ self.filters).clamp_min(FLOOR).log10()
            loudest = bands.amax((1, 2), keepdim=True)
            x = ((bands - loudest).clamp_min(-DECADES) + DECADES / 2) / (DECADES / 2)
        return Segments(x.unflatten(1, (-1, self.stack)).flatten(2), present)


class SeriesWindows(_Sequences):
    """Pieces of a time series of several channels, in sequence."""

    key, letters, unit, option = "series", "BSK", "step", "model.series_steps"

    def __init__(self, channels: int, window: int, longest: int) -> None:
        check_value(channels, COUNT, "the series' channels")
        super().__init__(channels * window, window, longest)
        self.channels = channels

    def forward(self, batch: Batch) -> Segments:
        """The pieces of ``series``; see :class:`Segmenter`."""
        channels = _tensor(batch, "series", "series", self.letters).shape[2]
        if channels != self.channels:
            raise ValueError(f"a series must have {self.channels} channels, got {channels}")
        series, _, present = self.clips(batch)
        return Segments(series.reshape(len(series), -1, self.width), present)


def checked_modalities(modalities: tuple[str, ...]) -> tuple[str, ...]:
    """The modalities in the order of :data:`confed.federation.ownership.MODALITIES`."""
    unknown = [name for name in modalities if name not in MODALITIES]
    if unknown or not modalities or len(set(modalities)) < len(modalities):
        raise ValueError(
            f"model.modalities must name some of {', '.join(MODALITIES)}, each once; got "
            f"{', '.join(map(repr, modalities)) or 'none'}"
        )
    return tuple(name for name in MODALITIES if name in modalities)


def patch_side(size: tuple[int, int], least: int = 16, most: int = 256) -> int:
    """The largest patch that cuts a picture into at least ``least`` squares: 7 pixels of 28 x 28, 16 of 64 x 64."""
    common = math.gcd(*size)
    for patch in range(common, 0, -1):
        if common % patch == 0 and least <= (size[0] // patch) * (size[1] // patch) <= most:
            return patch
    raise ValueError(
        f"pictures of {size[0]} x {size[1]} pixels cannot be cut into {least} to {most} equal squares: give "
        "model.patch, or pictures of another size"
    )


def _tensor(batch: Batch, key: str, modality: str, letters: str) -> Tensor:
    (value,) = needed(batch, f"a model of {modality}", key)
    return check_shape(value, key, *letters)


def _check_lengths(length: Tensor, values: Tensor, key: str, unit: str, longest: int, option: str) -> None:
    check_shape(length, f"{key}_length", len(values))
    _refuse_empty(length, key, unit)
    most = int(length.max())
    if most > values.shape[1]:
        raise ValueError(f"{key}_length must be at most {values.shape[1]}, what {key} holds, got {most}")
    if most > longest:
        raise ValueError(f"{key} must have at most {longest} {unit}s ({option}), got {most}")


def _refuse_empty(counts: Tensor, key: str, unit: str) -> None:
    if len(counts) == 0:
        raise ValueError(f"a batch with {key} must have an example at least")
    if int(counts.min()) < 1:
        row = int(counts.argmin())
        raise ValueError(
            f"every example with {key} must have a {unit} at least, row {row} of the batch has none; an absent "
            "modality is an absent key"
        )


if TYPE_CHECKING:
    from transformers import CLIPVisionModel


CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


class ClipPatches(Chain, Segmenter):
    """The states of all patches, 256 of 1,024 features in ViT-L/14, without class token.

    "Features of width 1,024" are the states after the last block, not CLIP's joint space (768); they go through the
    encoder's last normalisation. All is frozen but the last block and that normalisation. uint8 pictures of any size
    are resized (bicubic) and normalised as CLIP's; floats must have its size and are taken as they are.
    """

    def __init__(self, encoder: "CLIPVisionModel") -> None:
        config: Any = encoder.config
        self.size: int = config.image_size
        super().__init__(config.hidden_size, (config.image_size // config.patch_size) ** 2)
        self.clip: Any = getattr(encoder, "vision_model", encoder).train()
        for name, parameter in self.clip.named_parameters():
            last = f"encoder.layers.{config.num_hidden_layers - 1}."
            parameter.requires_grad_(name.startswith((last, "post_layernorm.")))

    def steps(self) -> Sequence[Step]:
        """CLIP below its last block, (B, 1 + P, d), and the last block."""
        below = tuple(f"clip.encoder.layers.{i}." for i in range(len(self.clip.encoder.layers) - 1))
        first = Stage("CLIP below its last block", ("image",), ("clip.embeddings.", "clip.pre_layrnorm.", *below))
        return (first, lambda _, batch: self._below(batch)), (Stage("last block", (), ("",)), self._last)

    @torch.no_grad()
    def _below(self, batch: Batch) -> Tensor:
        state = self.clip.pre_layrnorm(self.clip.embeddings(self.pixels(batch)))
        for block in self.clip.encoder.layers[:-1]:
            state = block(state, None)
        return state

    def _last(self, state: Tensor, batch: Batch) -> Segments:
        return Segments(self.clip.post_layernorm(self.clip.encoder.layers[-1](state, None)[:, 1:]))

    def pixels(self, batch: Batch) -> Tensor:
        """What CLIP reads of ``image``, float (B, 3, S, S)."""
        image = batch["image"] if "image" in batch else torch.empty(0)
        prepared = image.is_floating_point()
        check_shape(image, "image", "B", 3, *((self.size, self.size) if prepared else "HW"))
        if image.is_floating_point():
            return image
        x = image.float() / 255
        if set(image.shape[2:]) != {self.size}:
            x = F.interpolate(x, (self.size, self.size), mode="bicubic", antialias=True).clamp(0, 1)
        mean, std = (x.new_tensor(values)[:, None, None] for values in (CLIP_MEAN, CLIP_STD))
        return (x - mean) / std


def clip_encoder(pretrained: Path | str | None, seed: int) -> "CLIPVisionModel":
    """A CLIP image encoder."""
    from transformers import CLIPVisionConfig, CLIPVisionModel

    if pretrained is not None:
        return published(CLIPVisionModel, pretrained, seed)
    large = CLIPVisionConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16, image_size=224,
        patch_size=14, projection_dim=768,
    )  # fmt: skip
    return seeded(seed, lambda: CLIPVisionModel(large))


class EncoderCells(Segmenter):
    """The cells of pictures in the last states of a frozen picture encoder, each of zero mean and unit variance."""

    def __init__(self, name: str) -> None:
        encoder = load_tower(name, "pictures", 0).requires_grad_(False)
        tower = PictureTower(encoder, colours_of(name), cropped_middle({"source": name}), "cells")
        cropped = tower.middle[1]
        sides = (cropped, cropped) if cropped else tower.sides
        with torch.inference_mode():
            cells = tower({"image": torch.zeros(1, 3, *sides, dtype=torch.uint8)}).shape[1]
        super().__init__(tower.width, cells)
        self.tower = tower

    def train(self, mode: bool = True) -> "EncoderCells":
        """Frozen encoders stay in evaluation mode."""
        return super().train(False)

    def forward(self, batch: Batch) -> Segments:
        """The cells of ``image``; see :class:`Segmenter`."""
        return Segments(normalised(self.tower(batch)))

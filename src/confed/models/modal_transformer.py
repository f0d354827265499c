"""Multimodal personalised Transformer in three sizes.

The model itself is :class:`confed.models.modal_module.ModalTransformer`, its Transformer
:class:`confed.models.modal_module.Encoder`; how samples are cut is in :mod:`confed.models.modal_segments`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from confed.federation.specs import ModelSpec
from confed.models.heads import count
from confed.models.modal_module import Block, Encoder, MagnetoInit, ModalEmbedding, ModalTransformer, Vector
from confed.models.modal_segments import (
    ClipPatches,
    LogMelFrames,
    Patches,
    Segmenter,
    SeriesWindows,
    WaveFrames,
    Words,
    checked_modalities,
    clip_encoder,
    patch_side,
)
from confed.models.pretrained import seeded
from confed.models.tokenizer import BertTokenizer, WordTokenizer, bert_tokenizer
from confed.models.variants import variant

Sound = Literal["log_mel", "waveform"]
"""What a segment of a sound is: frames of its log-mel spectrogram, or a piece of the waveform, as the paper has it."""
WordVectors = Literal["learned", "frozen"]  # a table of word vectors that learns, or one of fixed random vectors
WINDOW = 0.032  # seconds of a frame of the spectrogram


def segmenter(
    modality: str,
    vocab_size: int,
    *,
    picture_size: tuple[int, int] = (28, 28),
    patch: int | None = None,
    word_width: int = 64,
    word_vectors: WordVectors = "learned",
    max_length: int = 16,
    sample_rate: int = 8000,
    sound: Sound = "log_mel",
    audio_seconds: float = 2.0,
    mels: int = 32,
    stack: int = 4,
    series_channels: int = 0,
    series_steps: int = 256,
    window: int = 8,
) -> Segmenter:
    """What cuts samples of one modality.

    Options:
        picture_size: (H, W) in pixels; a run takes it from the data.
        patch: pixels per side of a patch; None for the largest that gives 16 patches or more.
        word_width: features of a word vector; the paper does not say how many.
        word_vectors: "learned", or "frozen" random ones.
        max_length: the most tokens of a text; longer ones lose their end.
        sample_rate: of sounds; a run takes it from the data.
        sound: "log_mel", or "waveform" as in the paper.
        audio_seconds: the longest sound.
        mels: bands of the spectrogram.
        stack: its frames per segment, each 16 ms after the last; a piece of the waveform is as long.
        series_channels: values of a series per step; a run takes it from the data.
        series_steps: the longest series.
        window: steps of its segments.
    """
    if modality == "image":
        return Patches(picture_size, patch_side(picture_size) if patch is None else patch)
    if modality == "text":
        return Words(vocab_size, word_width, max_length, word_vectors == "learned")
    if modality == "series":
        return SeriesWindows(series_channels, window, series_steps)
    longest, frame = round(audio_seconds * sample_rate), 2 * round(WINDOW * sample_rate / 2)
    if sound == "waveform":
        return WaveFrames(stack * frame // 2, longest)
    return LogMelFrames(sample_rate, mels, frame, stack, longest)


def modal_parts(
    names: Sequence[str],
    vocab_size: int,
    pictures: Segmenter | None = None,
    *,
    width: int = 64,
    vector_width: int = 8,
    vector: Vector = "learned",
    positions: bool = True,
    layers: int = 2,
    attention_heads: int = 4,
    hidden: int = 128,
    block: Block = "magneto",
    magneto_init: MagnetoInit = "torchscale",
    dropout: float = 0.0,
    **cuts: Any,
) -> tuple[dict[str, ModalEmbedding], Encoder]:
    """Embeddings of each modality, and the Transformer over all of them.

    Options:
        width: features of a token, d_model.
        vector_width: of which the modality vector has d_v, and a mapped segment the rest.
        vector: learned modality vectors, or fixed ones with a 1 at the modality's place.
        positions: learned positions are added to mapped segments.
        layers: of the Transformer.
        block: "magneto", or "prenorm" for ordinary layers.
        magneto_init: initial values of Magneto as released or as in its paper.
    """
    body = Encoder(width, layers, attention_heads, hidden, dropout, block=block, magneto_init=magneto_init)

    def embed(name: str) -> ModalEmbedding:
        cut = pictures if pictures is not None and name == "image" else segmenter(name, vocab_size, **cuts)
        return ModalEmbedding(name, cut, width - vector_width, vector_width, vector=vector, positions=positions)

    return {name: embed(name) for name in names}, body


def modal_options() -> None:
    """Options of models of several modalities.

    Options:
        modalities: what it reads, of "image", "text", "audio", "series".
        width: features of a token.
        attention_heads: of each layer; must divide the width.
        hidden: width of the feed-forward blocks.
        dropout: dropout probability.
        pretrained: CLIP's image encoder, a folder written by ``save_pretrained`` or a hub name such as
            ``"openai/clip-vit-large-patch14"``; its configuration then decides its sizes. None: random weights.
        seed: of the initial values.
    """


def picture_tokens(modalities: Sequence[str], clip: bool, pretrained: Path | str | None, seed: int) -> Segmenter | None:
    """What cuts pictures in place of patches: CLIP ViT-L/14, where that is wanted and there are pictures."""
    return ClipPatches(clip_encoder(pretrained, seed)) if clip and "image" in modalities else None


def assemble(
    answers: Sequence[str] | int,
    vocab_size: int,
    *,
    modalities: tuple[str, ...] = ("image", "text", "audio"),
    clip: bool = False,
    pretrained: Path | str | None = None,
    vocabulary: Path | str | None = None,
    seed: int = 0,
    **parts: Any,
) -> ModalTransformer:
    """A model with its initial values.

    Options:
        vocabulary: BERT's ``vocab.txt``, a folder, or a hub name, for the tokenizer; None: the dataset's words.
        trainable: what of the Transformer learns beside the head and everything of each modality, which always do.
        peft: how, where a few parameters are added.
    """
    del vocabulary  # the tokenizer's
    names = checked_modalities(modalities)
    pictures = picture_tokens(modalities, clip, pretrained, seed)
    return seeded(seed, lambda: ModalTransformer(*modal_parts(names, vocab_size, pictures, **parts), count(answers)))


def _tokenizer(
    words: Sequence[str], vocabulary: Path | str | None = None, max_length: int = 64
) -> BertTokenizer | WordTokenizer:
    """BERT's tokenizer where there is a vocabulary, else one of the dataset's words."""
    return caption_tokenizer(words, max_length) if vocabulary is None else bert_tokenizer(vocabulary, max_length)


def caption_tokenizer(words: Sequence[str], max_length: int = 16) -> WordTokenizer:
    """A tokenizer of the dataset's words; of any, where there is nothing to read."""
    return WordTokenizer(words or ("nothing",), max_length)


SOURCES = (modal_parts, segmenter, modal_options)

modal_transformer_tiny = variant(
    assemble, "modal_transformer_tiny",
    "A multimodal Transformer of a few thousand parameters, for tests: one layer, d_model = 16 of which d_v = 4.",
    "answers vocab_size modalities picture_size sample_rate series_channels max_length vector block dropout trainable "
    "peft seed",
    sources=SOURCES, spec=ModelSpec(tokenizer=caption_tokenizer),
    word_width=16, mels=8, layers=1, attention_heads=2, hidden=32, width=16, vector_width=4,
)  # fmt: skip
modal_transformer_mini = variant(
    assemble, "modal_transformer_mini",
    "A multimodal Transformer for small pictures, short sounds and short texts, made for one CPU core.",
    "answers vocab_size modalities picture_size sample_rate series_channels patch word_width word_vectors max_length "
    "sound audio_seconds mels stack series_steps window width vector_width vector positions layers attention_heads "
    "hidden block magneto_init dropout trainable peft seed",
    sources=SOURCES, spec=ModelSpec(tokenizer=caption_tokenizer),
)  # fmt: skip
modal_transformer = variant(
    assemble, "modal_transformer",
    "The paper's size: 12 Magneto layers, d_model = 2,048, 16 heads, feed-forward 4,096, pictures by CLIP ViT-L/14.\n\n"
    "The paper has pictures and texts; its texts are cut by SentencePiece.",
    "answers vocab_size pretrained modalities sample_rate series_channels vocabulary word_width word_vectors "
    "max_length sound audio_seconds mels stack series_steps window vector_width vector positions block magneto_init "
    "dropout trainable peft seed",
    sources=SOURCES, spec=ModelSpec(tokenizer=_tokenizer), clip=True, modalities=("image", "text"), sample_rate=16000,
    word_width=1024, max_length=64, sound="waveform", audio_seconds=10.0, mels=80, series_steps=1024, window=16,
    width=2048, vector_width=64, layers=12, attention_heads=16, hidden=4096, dropout=0.1,
)  # fmt: skip

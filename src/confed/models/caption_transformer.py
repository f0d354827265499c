"""Multimodal Transformers for captioning, in three sizes.

The model is :class:`confed.models.caption_writer.CaptionWriter`, how samples are cut in
:mod:`confed.models.modal_segments`, and how texts are in :mod:`confed.models.caption_tokenizer`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from confed.federation.specs import ModelSpec
from confed.models.caption_tokenizer import caption_tokenizer
from confed.models.caption_writer import CaptionWriter
from confed.models.modal_segments import checked_modalities
from confed.models.modal_transformer import modal_options, modal_parts, picture_tokens, segmenter
from confed.models.pretrained import seeded
from confed.models.variants import variant


def assemble(
    answers: Sequence[str] | int,
    vocab_size: int,
    *,
    modalities: tuple[str, ...] = ("image", "text"),
    max_length: int = 24,
    clip: bool = False,
    pretrained: Path | str | None = None,
    pieces: Path | str | None = None,
    seed: int = 0,
    **parts: Any,
) -> CaptionWriter:
    """A model with its initial values.

    Options:
        modalities: what it reads: "text", and "image" or none beside it.
        max_length: the most tokens of a text; a longer one is an error.
        pieces: a SentencePiece model file for the tokenizer, as in the paper; None: the dataset's words.
    """
    names = checked_modalities(modalities)
    if "text" not in names or not {*names} <= {"image", "text"}:
        raise ValueError(f"model.modalities of a model that writes are text and image, or text, got {list(modalities)}")
    pictures = picture_tokens(modalities, clip, pretrained, seed)

    def build() -> CaptionWriter:
        embed, body = modal_parts(names, vocab_size, pictures, max_length=max_length, **parts)
        return CaptionWriter(embed, body, vocab_size, max_length)

    return seeded(seed, build)


def _tokenizer_of_the_paper(words: Sequence[str], max_length: int = 64, pieces: Path | str | None = None) -> Any:
    """As :func:`confed.models.caption_tokenizer.caption_tokenizer`, of the paper's size."""
    return caption_tokenizer(words, max_length, pieces)


SOURCES = (modal_parts, segmenter, modal_options)

caption_transformer_tiny = variant(
    assemble, "caption_transformer_tiny",
    "A Transformer that writes, of a few thousand parameters, for tests: one layer, d_model = 16 of which d_v = 4.",
    "answers vocab_size modalities picture_size max_length pieces seed",
    sources=SOURCES, spec=ModelSpec(tokenizer=caption_tokenizer), picture_size=(64, 64),
    word_width=16, layers=1, attention_heads=2, hidden=32, width=16, vector_width=4,
)  # fmt: skip
caption_transformer_mini = variant(
    assemble, "caption_transformer_mini",
    "A Transformer that writes short texts about small pictures, made for one CPU core.",
    "answers vocab_size modalities picture_size patch pieces word_width word_vectors max_length width vector_width "
    "vector positions layers attention_heads hidden block magneto_init dropout seed",
    sources=SOURCES, spec=ModelSpec(tokenizer=caption_tokenizer), picture_size=(64, 64), width=96, hidden=192,
)  # fmt: skip
caption_transformer = variant(
    assemble, "caption_transformer",
    "The paper's size: 12 Magneto layers, d_model = 2,048, 16 heads, feed-forward 4,096, pictures by CLIP ViT-L/14.",
    "answers vocab_size pretrained modalities pieces word_width word_vectors max_length vector_width vector positions "
    "block magneto_init dropout seed",
    sources=SOURCES, spec=ModelSpec(tokenizer=_tokenizer_of_the_paper), clip=True, word_width=1024, max_length=64,
    width=2048, vector_width=64, layers=12, attention_heads=16, hidden=4096, dropout=0.1,
)  # fmt: skip

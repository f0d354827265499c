"""Multimodal Transformers for captioning, in three sizes.

The model is :class:`confed.models.caption_writer.CaptionWriter`, how samples are cut in
:mod:`confed.models.modal_segments`, and how texts are in :mod:`confed.models.caption_tokenizer`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from confed.models.caption_tokenizer import caption_tokenizer
from confed.models.caption_writer import CaptionWriter
from confed.models.magneto import Block, Encoder, MagnetoInit
from confed.models.modal_clip import ClipPatches, clip_encoder
from confed.models.modal_module import ModalEmbedding, Vector
from confed.models.modal_segments import Segmenter, checked_modalities
from confed.models.modal_transformer import WordVectors, segmenter
from confed.models.published import seeded
from confed.registry import register_model

__all__ = ["caption_transformer", "caption_transformer_mini", "caption_transformer_tiny"]


@register_model
def caption_transformer_tiny(
    answers: Sequence[str] | int,
    vocab_size: int,
    *,
    modalities: tuple[str, ...] = ("image", "text"),
    picture_size: tuple[int, int] = (64, 64),
    max_length: int = 24,
    pieces: Path | str | None = None,
    seed: int = 0,
) -> CaptionWriter:
    """A Transformer that writes, of a few thousand parameters, for tests: one layer, d_model = 16 of which d_v = 4.

    Raises ``ValueError``: unknown modalities, or an option that is out of range.

    Args:
        answers: not used; texts are written of tokens.
        vocab_size: number of token ids.
        modalities: what it reads: "text", and "image" or none beside it.
        picture_size: (H, W) in pixels; a run takes it from the data.
        max_length: the most tokens of a text.
        pieces: a SentencePiece model file for the tokenizer; None: the dataset's words.
        seed: of the initial values.
    """
    del answers, pieces
    cuts = {"picture_size": picture_size, "max_length": max_length, "word_width": 16}
    return _assemble(vocab_size, modalities, cuts, {"layers": 1, "heads": 2, "hidden": 32}, 16, 4, seed)


@register_model
def caption_transformer_mini(
    answers: Sequence[str] | int,
    vocab_size: int,
    *,
    modalities: tuple[str, ...] = ("image", "text"),
    picture_size: tuple[int, int] = (64, 64),
    patch: int | None = None,
    pieces: Path | str | None = None,
    word_width: int = 64,
    word_vectors: WordVectors = "learned",
    max_length: int = 24,
    width: int = 96,
    vector_width: int = 8,
    vector: Vector = "learned",
    positions: bool = True,
    layers: int = 2,
    attention_heads: int = 4,
    hidden: int = 192,
    block: Block = "magneto",
    magneto_init: MagnetoInit = "torchscale",
    dropout: float = 0.0,
    seed: int = 0,
) -> CaptionWriter:
    """A Transformer that writes short texts about small pictures, made for one CPU core.

    Raises ``ValueError``: unknown modalities, or an option that is out of range.

    Args:
        answers: not used; texts are written of tokens.
        vocab_size: number of token ids.
        modalities: what it reads: "text", and "image" or none beside it.
        picture_size: (H, W) in pixels; a run takes it from the data.
        patch: pixels per side of a patch; None for the largest that gives 16 patches or more.
        pieces: a SentencePiece model file for the tokenizer; None: the dataset's words.
        word_width: features of a word vector.
        word_vectors: "learned", or "frozen" random ones.
        max_length: the most tokens of a text; a longer one is an error.
        width: features of a token, d_model.
        vector_width: of which the modality vector has d_v, and a mapped segment the rest.
        vector: learned modality vectors, or fixed ones with a 1 at the modality's place.
        positions: learned positions are added to mapped segments.
        layers: of the Transformer.
        attention_heads: of each layer; must divide the width.
        hidden: width of the feed-forward blocks.
        block: "magneto", or "prenorm" for ordinary layers.
        magneto_init: initial values of Magneto as released or as in its paper.
        dropout: dropout probability.
        seed: of the initial values.
    """
    del answers, pieces
    cuts: dict[str, Any] = {"picture_size": picture_size, "patch": patch, "max_length": max_length}
    cuts |= {"word_width": word_width, "word_vectors": word_vectors}
    body: dict[str, Any] = {"layers": layers, "heads": attention_heads, "hidden": hidden, "dropout": dropout}
    body |= {"block": block, "magneto_init": magneto_init}
    options: dict[str, Any] = {"vector": vector, "positions": positions}
    return _assemble(vocab_size, modalities, cuts, body, width, vector_width, seed, **options)


@register_model
def caption_transformer(
    answers: Sequence[str] | int,
    vocab_size: int,
    *,
    pretrained: Path | str | None = None,
    modalities: tuple[str, ...] = ("image", "text"),
    pieces: Path | str | None = None,
    word_width: int = 1024,
    word_vectors: WordVectors = "learned",
    max_length: int = 64,
    vector_width: int = 64,
    vector: Vector = "learned",
    positions: bool = True,
    block: Block = "magneto",
    magneto_init: MagnetoInit = "torchscale",
    dropout: float = 0.1,
    seed: int = 0,
) -> CaptionWriter:
    """The paper's size: 12 Magneto layers, d_model = 2,048, 16 heads, feed-forward 4,096, pictures by CLIP ViT-L/14.

    Raises ``ValueError``: no checkpoint at a given path, unknown modalities, or an option that is out of range.

    Args:
        answers: not used; texts are written of tokens.
        vocab_size: number of token ids.
        pretrained: CLIP's image encoder, a folder written by ``save_pretrained`` or a hub name such as
            ``"openai/clip-vit-large-patch14"``; its configuration then decides its sizes. None: random weights.
        modalities: what it reads: "text", and "image" or none beside it.
        pieces: a SentencePiece model file for the tokenizer, as in the paper; None: the dataset's words.
        word_width: features of a word vector; the paper does not say how many.
        word_vectors: "learned", or "frozen" random ones.
        max_length: the most tokens of a text; a longer one is an error.
        vector_width: features of the modality vector, d_v; the paper does not say how many.
        vector: learned modality vectors, or fixed ones with a 1 at the modality's place.
        positions: learned positions are added to mapped segments.
        block: "magneto", or "prenorm" for ordinary layers.
        magneto_init: initial values of Magneto as released or as in its paper.
        dropout: dropout probability.
        seed: of the initial values.
    """
    del answers, pieces
    cuts: dict[str, Any] = {"word_width": word_width, "word_vectors": word_vectors, "max_length": max_length}
    body: dict[str, Any] = {"layers": 12, "heads": 16, "hidden": 4096, "dropout": dropout}
    body |= {"block": block, "magneto_init": magneto_init}
    pictures = ClipPatches(clip_encoder(pretrained, seed)) if "image" in modalities else None
    options: dict[str, Any] = {"vector": vector, "positions": positions}
    return _assemble(vocab_size, modalities, cuts, body, 2048, vector_width, seed, pictures, **options)


def _assemble(
    vocab_size: int,
    modalities: tuple[str, ...],
    cuts: Mapping[str, Any],
    body: Mapping[str, Any],
    width: int,
    vector_width: int,
    seed: int,
    pictures: Segmenter | None = None,
    **embedding: Any,
) -> CaptionWriter:
    """A model with its initial values; arguments as of :mod:`confed.models.modal_transformer`.

    Raises:
        ValueError: other modalities than pictures and texts, or no text among them.
    """
    names = checked_modalities(modalities)
    if "text" not in names or not {*names} <= {"image", "text"}:
        raise ValueError(f"model.modalities of a model that writes are text and image, or text, got {list(modalities)}")

    def embed(name: str) -> ModalEmbedding:
        cut = pictures if pictures is not None and name == "image" else segmenter(name, vocab_size, **cuts)
        return ModalEmbedding(name, cut, width - vector_width, vector_width, **embedding)

    def build() -> CaptionWriter:
        whole = Encoder(width, **body)
        return CaptionWriter({name: embed(name) for name in names}, whole, vocab_size, cuts["max_length"])

    return seeded(seed, build)


def _tokenizer_of_the_paper(words: Sequence[str], max_length: int = 64, pieces: Path | str | None = None) -> Any:
    """As :func:`confed.models.caption_tokenizer.caption_tokenizer`, of the paper's size."""
    return caption_tokenizer(words, max_length, pieces)


caption_transformer_tiny.tokenizer = caption_tokenizer  # pyright: ignore[reportFunctionMemberAccess]
caption_transformer_mini.tokenizer = caption_tokenizer  # pyright: ignore[reportFunctionMemberAccess]
caption_transformer.tokenizer = _tokenizer_of_the_paper  # pyright: ignore[reportFunctionMemberAccess]

"""ViLT in five variants, each with weights, tokenizer and finetuning options.

The model itself is :class:`confed.models.vilt_module.Vilt`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from confed.federation.specs import ModelSpec
from confed.models.finetuning import USUAL, Finetuning, Trainable, finetune
from confed.models.heads import count
from confed.models.pretrained import load_into, mini_words, weights_file
from confed.models.published import published, seeded
from confed.models.tokenizer import BertTokenizer, WordTokenizer, bert_tokenizer
from confed.models.variants import variant
from confed.models.vilt_module import Vilt
from confed.registry import register_model

if TYPE_CHECKING:
    from transformers import ViltModel

__all__ = [
    "Vilt",
    "b32_tokenizer",
    "mini_tokenizer",
    "mlm_tokenizer",
    "vilt_b32",
    "vilt_mini",
    "vilt_mlm_mini",
    "vilt_tiny",
]


def mini_tokenizer(words: Sequence[str], max_length: int = 16) -> WordTokenizer:
    """The tokenizer of :func:`vilt_mini`: its pre-training's words, then the unseen ones of ``words``.

    So a dataset's known words keep their trained embeddings, and its other words get rows of their own.
    """
    return WordTokenizer((*mini_words(), *words), max_length)


def mlm_tokenizer(words: Sequence[str], max_length: int = 16) -> WordTokenizer:
    """The tokenizer of :func:`vilt_mlm_mini`: the words of its captions, then the unseen ones of ``words``.

    A dataset's words that captions have not, such as "what", get rows of their own, which are not trained yet.
    """
    return WordTokenizer((*mini_words("vilt_mlm_mini"), *words), max_length)


def b32_tokenizer(
    words: Sequence[str], path: Path | str = "dandelin/vilt-b32-mlm", max_length: int = 40
) -> BertTokenizer:
    """The tokenizer of :func:`vilt_b32`, BERT's; its vocabulary is fixed, so the dataset's words do not matter."""
    del words
    return bert_tokenizer(path, max_length)


def small(
    answers: Sequence[str] | int,
    vocab_size: int,
    *,
    width: int = 32,
    layers: int = 2,
    attention_heads: int = 4,
    image_size: int = 64,
    patch: int = 16,
    max_length: int = 16,
    pretrained: bool | Path | str = False,
    dropout: float = 0.0,
    trainable: Trainable = "all",
    peft: Finetuning = USUAL,
    heads: tuple[str, ...] = (),
    weights: str = "vilt_mini",
    seed: int = 0,
) -> Vilt:
    """A ViLT of any size for small pictures.

    Raises ``ValueError``: the vocabulary is smaller than the pre-trained one, or the weights file is missing.

    Args:
        answers: the answers, or how many there are. A pre-trained head is loaded when they are given as strings and
            equal the pre-trained ones in order; otherwise the head starts fresh.
        vocab_size: number of token ids.
        width: features per token, d; the feed-forward blocks have 4 d.
        layers: Transformer blocks.
        attention_heads: must divide the width.
        image_size: pixels per side.
        patch: pixels per side of a patch.
        max_length: text positions.
        pretrained: load the packaged weights, or those of a file that ``pretrain`` wrote.
        dropout: dropout probability of every block.
        trainable: which parameters learn beside the heads.
        peft: options of that finetuning.
        heads: heads of further tasks: "nlvr2", "entailment", "choice".
        weights: whose packaged weights they are.
        seed: of all fresh values.
    """
    body = _body(
        seed, vocab_size=vocab_size, max_position_embeddings=max_length, hidden_size=width, num_hidden_layers=layers,
        num_attention_heads=attention_heads, intermediate_size=4 * width, image_size=image_size, patch_size=patch,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    rng = torch.Generator().manual_seed(seed)
    model = Vilt(body, count(answers), rng)
    if pretrained:
        file = weights_file(weights, pretrained)
        load_into(model, file, answers=None if isinstance(answers, int) else tuple(answers))
    model.add_heads(heads, rng)
    finetune(model, trainable, peft, model.places(8), rng)
    return model


vilt_tiny = variant(
    small, "vilt_tiny", "A ViLT of a few thousand parameters, for tests.",
    "answers vocab_size width layers attention_heads image_size patch max_length dropout trainable peft heads seed",
    spec=ModelSpec(tokenizer=WordTokenizer),
)  # fmt: skip
vilt_mini = variant(
    small, "vilt_mini",
    "A ViLT for 64 x 64 pictures with 0.2 million parameters, small enough to learn on one CPU core.\n\n"
    "3 blocks, d = 64, 4 heads, feed-forward 256, patches of 16. The weights that come with the package were made\n"
    "from nothing by :func:`confed.prepare.pretraining.pretrain`. Token ids must come from :func:`mini_tokenizer`,\n"
    "which puts the pre-trained words first; embeddings of further words and text positions start fresh.",
    "answers vocab_size max_length pretrained dropout trainable peft heads seed",
    spec=ModelSpec(tokenizer=mini_tokenizer), width=64, layers=3, pretrained=True,
)  # fmt: skip
vilt_mlm_mini = variant(
    small, "vilt_mlm_mini",
    "The ViLT of :func:`vilt_mini`, pretrained on captions alone: it has read no question and no answer.\n\n"
    "Its weights were made by masked words, picture-text matching and word-patch alignment\n"
    "(:mod:`confed.prepare.pretraining.captions`). Token ids must come from :func:`mlm_tokenizer`.",
    "answers vocab_size max_length pretrained dropout trainable peft heads seed",
    spec=ModelSpec(tokenizer=mlm_tokenizer), width=64, layers=3, pretrained=True, weights="vilt_mlm_mini",
)  # fmt: skip
vilt_mlm_middle = variant(
    small, "vilt_mlm_middle",
    "The ViLT of :func:`vilt_mlm_mini` with four blocks, d = 128 and 0.8 million parameters.\n\n"
    "It comes without weights: ``confed pretrain vilt_mlm_middle --out FILE`` makes them, for ``pretrained``.",
    "answers vocab_size max_length pretrained dropout trainable peft heads seed",
    spec=ModelSpec(tokenizer=mlm_tokenizer), width=128, layers=4, pretrained=False, weights="vilt_mlm_middle",
)  # fmt: skip


@register_model(spec=ModelSpec(tokenizer=b32_tokenizer))
def vilt_b32(
    answers: Sequence[str] | int,
    vocab_size: int = 30522,
    *,
    pretrained: Path | str | None = None,
    image_size: int | tuple[int, int] | None = None,
    max_length: int = 40,
    dropout: float = 0.0,
    trainable: Trainable = "all",
    peft: Finetuning = USUAL,
    heads: tuple[str, ...] = (),
    seed: int = 0,
) -> Vilt:
    """ViLT-B/32 as published: 12 blocks, d = 768, 384 x 384 pixels, 40 BERT tokens.

    Args:
        answers: the answers, or how many there are.
        vocab_size: number of token ids.
        pretrained: a folder written by ``save_pretrained`` or a hub name such as ``"dandelin/vilt-b32-mlm"``;
            its configuration then decides all sizes. None: random weights.
        image_size: pixels per side or (H, W), multiples of 32; position embeddings are interpolated. Default:
            the configuration's.
        max_length: text positions of a model with random weights.
        dropout: dropout probability of every block.
        trainable: which parameters learn beside the heads.
        peft: options of that finetuning.
        heads: heads of further tasks: "nlvr2", "entailment", "choice".
        seed: of all fresh values.

    Raises:
        ValueError: no checkpoint at the given path, one of another model, or its vocabulary has another size.
    """
    from transformers import ViltModel

    rng = torch.Generator().manual_seed(seed)
    options = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    if pretrained is None:
        body = _body(seed, vocab_size=vocab_size, max_position_embeddings=max_length, **options)
    else:
        body = published(ViltModel, pretrained, seed, **options)
        if body.config.vocab_size != vocab_size:
            raise ValueError(
                f"the checkpoint {str(pretrained)!r} has {body.config.vocab_size} tokens, got {vocab_size}"
            )
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    model = Vilt(body, count(answers), rng, size)
    model.add_heads(heads, rng)
    finetune(model, trainable, peft, model.places(16), rng)
    return model


def _body(seed: int, **sizes: Any) -> "ViltModel":
    from transformers import ViltConfig, ViltModel

    return seeded(seed, lambda: ViltModel(ViltConfig(**sizes)))

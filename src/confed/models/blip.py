"""BLIP for visual question answering, as ``transformers`` has it, in two sizes.

Li et al., "BLIP: Bootstrapping Language-Image Pre-training for Unified Vision-Language Understanding and Generation",
ICML 2022. A picture encoder, a question encoder whose every layer looks at the picture, and a decoder; answers are
ranked as ALBEF ranks them. Modules and weights are those of ``BlipForQuestionAnswering``; the layers are called one
after the other here, with a mask for the question's padding, which the library's decoder does not apply.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from confed.federation.specs import ModelSpec
from confed.models.albef import DESCRIBED, mini_answer_tokenizer
from confed.models.answer_ranking import GenerativeAnswerer
from confed.models.caption_tokenizer import AnswerTokenizer
from confed.models.pretrained import published, seeded
from confed.models.tokenizer import bert_tokenizer
from confed.models.variants import variant

if TYPE_CHECKING:
    from transformers import BlipForQuestionAnswering


MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)


class Blip(GenerativeAnswerer):
    """BLIP; see :class:`confed.models.answer_ranking.GenerativeAnswerer`.

    LoRA changes queries and values of the texts' self-attention, and the picture encoder's fused queries, keys and
    values; IA3 the keys and values of the texts' self-attention alone.
    """

    embedding_names = ("vision_model.embeddings.",)
    blocks_name, norm_name = "vision_model.encoder.layers", "vision_model.post_layernorm"
    lora = ("self_attn.qkv", "attention.self.query", "attention.self.value")
    ia3 = ("attention.self.key", "attention.self.value")

    def __init__(
        self,
        body: "BlipForQuestionAnswering",
        k: int = 128,
        start: int | None = None,
        mean: tuple[float, float, float] = MEAN,
        std: tuple[float, float, float] = STD,
    ) -> None:
        config: Any = body.config
        super().__init__(config.vision_config.image_size, mean, std, k, start)
        self.config = config
        self.vision_model = body.vision_model
        self.text_encoder, self.text_decoder = body.text_encoder, body.text_decoder
        # Its matrix and bias are other modules' as well; under two names they would be sent and stored twice.
        del self.text_decoder.cls.predictions.decoder
        self.train()


def _bert(
    words: Sequence[str],
    answers: Sequence[str] = (),
    path: Path | str = "Salesforce/blip-vqa-base",
    max_length: int = 40,
) -> AnswerTokenizer:
    """BERT's tokenizer; its vocabulary is fixed, so the dataset's words do not matter."""
    return AnswerTokenizer(bert_tokenizer(path, max_length))


def _mini_tokenizer(words: Sequence[str], answers: Sequence[str] = (), max_length: int = 16) -> AnswerTokenizer:
    return mini_answer_tokenizer(words, answers, max_length, model="blip_mini")


def _mini(vocab_size: int, *, max_length: int, k: int = 128, dropout: float, seed: int) -> Blip:
    size = {
        "hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2,
        "initializer_range": 0.02 * math.sqrt(768 / 64),  # see Albef
    }  # fmt: skip
    text = {
        **size, "vocab_size": vocab_size, "max_position_embeddings": max_length, "encoder_hidden_size": 64,
        "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout, "bos_token_id": None,
        "eos_token_id": None, "sep_token_id": None,
    }  # fmt: skip
    vision = {**size, "image_size": 64, "patch_size": 16, "attention_dropout": dropout}
    return Blip(_fresh(text, vision, seed), k, mean=HALF, std=HALF)


def _full(
    vocab_size: int,
    *,
    pretrained: Path | str | None,
    image_size: int | None,
    k: int = 128,
    dropout: float,
    seed: int,
) -> Blip:
    """BLIP of the published size.

    Options:
        vocab_size: number of token ids; a published checkpoint has BERT's and two more, which must not be fewer.
        pretrained: a folder written by ``save_pretrained`` or a hub name such as ``"Salesforce/blip-vqa-base"``; its
            configuration decides all sizes. None: random weights.
        image_size: pixels per side of a model with random weights; default: 384.
        max_length: text positions of a question; read by the tokenizer.
    """
    drop = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    if pretrained is None:
        text = {"vocab_size": max(vocab_size, 30524), "encoder_hidden_size": 768, "bos_token_id": 30522, **drop}
        body = _fresh(text, {"image_size": image_size or 384, "attention_dropout": dropout}, seed)
    else:
        body = _published(pretrained, dropout, seed)
    config: Any = body.config
    tokens, side = config.text_config.vocab_size, config.vision_config.image_size
    if tokens < vocab_size:
        raise ValueError(f"the checkpoint {str(pretrained)!r} has {tokens} tokens, got {vocab_size}")
    if image_size not in (None, side):
        raise ValueError(f"image_size must be the checkpoint's, {side}, or not be given; got {image_size}")
    return Blip(body, k, start=config.text_config.bos_token_id)


blip_mini = variant(
    _mini, "blip_mini",
    "A BLIP for 64 x 64 pictures with half a million parameters, small enough to learn on one CPU core.\n\n"
    "d = 64, 4 heads, patches of 16; 2 visual blocks, 2 for the question, 2 in the decoder. Token ids must come from "
    "its\ntokenizer. Needs ``task.name = \"generation\"``.\n\n"
    "Raises ``ValueError``: the vocabulary is smaller than the pre-trained one, or the weights file is missing.",
    "answers vocab_size max_length pretrained k dropout trainable peft seed",
    spec=ModelSpec(tokenizer=_mini_tokenizer), described=DESCRIBED, reduction=8,
)  # fmt: skip
blip = variant(
    _full, "blip",
    "BLIP as published: ViT-B/16, 12 question layers, 12 decoder layers. Needs ``task.name = \"generation\"``.",
    "answers vocab_size pretrained image_size max_length k dropout trainable peft seed",
    spec=ModelSpec(tokenizer=_bert), described=DESCRIBED, vocab_size=30524, pretrained=None, max_length=40,
)  # fmt: skip


def _fresh(text: dict[str, Any], vision: dict[str, Any], seed: int) -> "BlipForQuestionAnswering":
    from transformers import BlipConfig, BlipForQuestionAnswering

    config: BlipConfig = BlipConfig(text_config=text, vision_config=vision)
    return seeded(seed, lambda: BlipForQuestionAnswering(config))


def _published(source: Path | str, dropout: float, seed: int) -> "BlipForQuestionAnswering":
    from transformers import BlipForQuestionAnswering

    body = published(BlipForQuestionAnswering, source, seed)
    for module in body.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
    return body

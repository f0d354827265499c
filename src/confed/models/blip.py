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

import torch
from torch import Tensor, nn

from confed.models.adapters import Host
from confed.models.albef import mini_answer_tokenizer
from confed.models.answer_ranking import GenerativeAnswerer
from confed.models.caption_tokenizer import AnswerTokenizer
from confed.models.finetuning import USUAL, Finetuning, Places, Trainable, finetune
from confed.models.pretrained import load_into, published, seeded, weights_file
from confed.models.tokenizer import bert_tokenizer
from confed.registry import register_model

if TYPE_CHECKING:
    from transformers import BlipForQuestionAnswering


MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)


class Blip(GenerativeAnswerer):
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
        self.vision_model, self.text_encoder, self.text_decoder = (
            body.vision_model,
            body.text_encoder,
            body.text_decoder,
        )
        # Its matrix and bias are other modules' as well; under two names they would be sent and stored twice.
        del self.text_decoder.cls.predictions.decoder
        self.train()

    def visual_embedding(self, pixels: Tensor) -> Tensor:
        return self.vision_model.embeddings(pixels)

    @property
    def visual_blocks(self) -> Any:
        return self.vision_model.encoder.layers

    @property
    def visual_norm(self) -> nn.Module:
        return self.vision_model.post_layernorm

    @property
    def question_encoder(self) -> Any:
        return self.text_encoder

    @property
    def prefix_names(self) -> tuple[str, ...]:
        return ("vision_model.embeddings.", *(("vision_model.encoder.layers.0.",) if self.adapters.names else ()))

    def places(self, reduction: int = 16) -> Places:
        """What can be finetuned: adapters and prompts as in ALBEF.

        LoRA changes queries and values of the texts' self-attention, and the picture encoder's fused queries, keys and
        values. IA3 scales keys and values of the texts' self-attention, and every second feed-forward layer's input.
        """
        stacks: list[tuple[str, Any]] = [
            ("text_encoder.encoder.layer", self.text_encoder.encoder.layer),
            ("text_decoder.bert.encoder.layer", self.text_decoder.bert.encoder.layer),
        ]
        width, visual = self.config.text_config.hidden_size, self.config.vision_config.hidden_size
        norms, ends = list[Any](), list[str]()
        for name, layers in stacks:
            norms += [layer.output.LayerNorm for layer in layers]
            ends += [f"{name}.{i}.output.dense" for i in range(len(layers))]
        return Places(
            heads=(self.answer_head,),
            top=(f"text_decoder.bert.encoder.layer.{len(stacks[1][1]) - 1}.",),
            hosts=[
                *(Host(block, visual) for block in self.visual_blocks),
                *(Host(norm, width, after_norm=True) for norm in norms),
            ],
            reduction=reduction,
            lora=("self_attn.qkv", "attention.self.query", "attention.self.value"),
            ia3=("attention.self.key", "attention.self.value"),
            ia3_inputs=("mlp.fc2", *ends),
            prompts={"visual": visual},
            prefix="its attention takes no keys and values from outside; 'prompt' does work",
        )


def _bert(
    words: Sequence[str],
    answers: Sequence[str] = (),
    path: Path | str = "Salesforce/blip-vqa-base",
    max_length: int = 40,
) -> AnswerTokenizer:
    """BERT's tokenizer; its vocabulary is fixed, so the dataset's words do not matter."""
    return AnswerTokenizer(bert_tokenizer(path, max_length))


def _mini(words: Sequence[str], answers: Sequence[str] = (), max_length: int = 16) -> AnswerTokenizer:
    return mini_answer_tokenizer(words, answers, max_length, model="blip_mini")


@register_model
def blip_mini(
    answers: Sequence[str] | int,
    vocab_size: int,
    *,
    max_length: int = 16,
    pretrained: bool | Path | str = True,
    k: int = 128,
    dropout: float = 0.0,
    trainable: Trainable = "all",
    peft: Finetuning = USUAL,
    seed: int = 0,
) -> Blip:
    """A BLIP for 64 x 64 pictures with half a million parameters, small enough to learn on one CPU core.

    d = 64, 4 heads, patches of 16; 2 visual blocks, 2 for the question, 2 in the decoder. Token ids must come from its
    tokenizer. Needs ``task.name = "generation"``.

    Raises ``ValueError``: the vocabulary is smaller than the pre-trained one, or the weights file is missing.

    Args:
        answers: not used: answers are texts, the task says which there are.
        vocab_size: number of token ids.
        max_length: text positions.
        pretrained: load the packaged weights, or those of a file that ``confed pretrain`` wrote.
        k: candidate answers that are compared by their whole text; the others are left out after the first token.
        dropout: dropout probability of every block.
        trainable: which parameters learn beside the language-model head.
        peft: options of that finetuning.
        seed: of all fresh values.
    """
    size = {
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "initializer_range": 0.02 * math.sqrt(768 / 64),  # see Albef
    }
    text = {
        **size,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_length,
        "encoder_hidden_size": 64,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
        "bos_token_id": None,
        "eos_token_id": None,
        "sep_token_id": None,
    }
    vision = {**size, "image_size": 64, "patch_size": 16, "attention_dropout": dropout}
    model = Blip(_fresh(text, vision, seed), k, mean=HALF, std=HALF)
    if pretrained:
        file = weights_file("blip_mini", pretrained)
        load_into(model, file, None, head=None, growing=("cls.predictions.bias",))
    finetune(model, trainable, peft, model.places(8), torch.Generator().manual_seed(seed))
    return model


@register_model
def blip(
    answers: Sequence[str] | int,
    vocab_size: int = 30524,
    *,
    pretrained: Path | str | None = None,
    image_size: int | None = None,
    max_length: int = 40,
    k: int = 128,
    dropout: float = 0.0,
    trainable: Trainable = "all",
    peft: Finetuning = USUAL,
    seed: int = 0,
) -> Blip:
    """BLIP as published: ViT-B/16, 12 question layers, 12 decoder layers. Needs ``task.name = "generation"``.

    Args:
        answers: not used: answers are texts, the task says which there are.
        vocab_size: number of token ids; a published checkpoint has BERT's and two more, which must not be fewer.
        pretrained: a folder written by ``save_pretrained`` or a hub name such as ``"Salesforce/blip-vqa-base"``; its
            configuration decides all sizes. None: random weights.
        image_size: pixels per side of a model with random weights; default: 384.
        max_length: text positions of a question; read by the tokenizer.
        k: candidate answers that are compared by their whole text; the others are left out after the first token.
        dropout: dropout probability of every block.
        trainable: which parameters learn beside the language-model head.
        peft: options of that finetuning.
        seed: of all fresh values.

    Raises:
        ValueError: no checkpoint at the given path, one of another model, its vocabulary is too small, or its pictures
            have another size.
    """
    drop = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    if pretrained is None:
        text = {"vocab_size": max(vocab_size, 30524), "encoder_hidden_size": 768, "bos_token_id": 30522, **drop}
        body = _fresh(text, {"image_size": image_size or 384, "attention_dropout": dropout}, seed)
    else:
        body = _published(pretrained, dropout, seed)
    config: Any = body.config
    if config.text_config.vocab_size < vocab_size:
        raise ValueError(
            f"the checkpoint {str(pretrained)!r} has {config.text_config.vocab_size} tokens, got {vocab_size}"
        )
    if image_size not in (None, config.vision_config.image_size):
        raise ValueError(
            f"image_size must be the checkpoint's, {config.vision_config.image_size}, or not be given; got {image_size}"
        )
    model = Blip(body, k, start=config.text_config.bos_token_id)
    finetune(model, trainable, peft, model.places(16), torch.Generator().manual_seed(seed))
    return model


blip_mini.tokenizer = _mini  # pyright: ignore[reportFunctionMemberAccess]
blip.tokenizer = _bert  # pyright: ignore[reportFunctionMemberAccess]


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

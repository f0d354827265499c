"""Small dual encoders of five ``transformers`` families, with random weights and processors.

For trials and tests without a download: ``model.source = "tiny:siglip"``. Two layers of width 32 in either tower,
pictures of 32 x 32 pixels, byte-level tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from confed.models.pretrained import seeded

PIXELS, PATCH = 32, 8
LENGTH = 64
SPECIAL = ("<pad>", "<unk>", "<bos>", "<eos>")
VOCABULARY = 256 + len(SPECIAL)
COMMON: Mapping[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
TEXT: Mapping[str, Any] = {
    **COMMON, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "pad_token_id": 0, "bos_token_id": 2,
    "eos_token_id": 3,
}  # fmt: skip
VISION: Mapping[str, Any] = {**COMMON, "image_size": PIXELS, "patch_size": PATCH}


@dataclass(frozen=True)
class Family:
    """What a family's small model has beyond the common sizes."""

    pictures: Callable[[], Any]  # builds the processor of its pictures
    begins: bool = True  # whether texts begin with a token of their own
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])  # keywords of its configuration
    text: Mapping[str, Any] = field(default_factory=dict[str, Any])  # keywords of the text tower's
    vision: Mapping[str, Any] = field(default_factory=dict[str, Any])  # keywords of the picture tower's


class Processor:
    """Pictures and texts of a small model, under the names that processors of ``transformers`` have for them."""

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        self.image_processor, self.tokenizer = image_processor, tokenizer


def tiny(family: str, seed: int = 0) -> tuple[nn.Module, Processor]:
    """A family's small model with random weights, and its processor."""
    from transformers import AutoConfig, AutoModel

    if family not in FAMILIES:
        raise ValueError(f"model.source = 'tiny:{family}': there are {', '.join(f'tiny:{name}' for name in FAMILIES)}")
    made = FAMILIES[family]
    config = AutoConfig.for_model(
        family, text_config={**TEXT, **made.text}, vision_config={**VISION, **made.vision}, **made.config
    )
    return seeded(seed, lambda: AutoModel.from_config(config)), Processor(made.pictures(), _tokenizer(made.begins))


def _tokenizer(begins: bool) -> Any:
    """Bytes as tokens behind the special ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *alphabet))}
    made: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    made.decoder = decoders.ByteLevel()
    ends = [(name, SPECIAL.index(name)) for name in ("<bos>", "<eos>")]
    form = "<bos> $A <eos>" if begins else "$A <eos>"
    made.post_processor = processors.TemplateProcessing(single=form, special_tokens=ends)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", unk_token="<unk>", bos_token="<bos>" if begins else None,
        eos_token="<eos>", padding_side="right", model_max_length=LENGTH,
    )  # fmt: skip


def _clip() -> Any:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    side = {"height": PIXELS, "width": PIXELS}
    return CLIPImageProcessorPil(size={"shortest_edge": PIXELS}, crop_size=side)


def _siglip() -> Any:
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    return SiglipImageProcessorPil(size={"height": PIXELS, "width": PIXELS})


def _siglip2() -> Any:
    from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

    return Siglip2ImageProcessorPil(patch_size=PATCH, max_num_patches=(PIXELS // PATCH) ** 2)


_SIGLIP_TEXT = {"bos_token_id": 1, "projection_size": 32}
FAMILIES: Mapping[str, Family] = {
    "clip": Family(_clip, config={"projection_dim": 24}),
    "siglip": Family(_siglip, begins=False, text=_SIGLIP_TEXT),
    "siglip2": Family(
        _siglip2, begins=False, text=_SIGLIP_TEXT, vision={"num_patches": (PIXELS // PATCH) ** 2},
    ),
    "metaclip_2": Family(_clip, config={"projection_dim": 24}),
    "altclip": Family(
        _clip, config={"projection_dim": 24},
        text={"project_dim": 32, "max_position_embeddings": LENGTH + 2},
    ),
}  # fmt: skip
"""Family (``model_type`` of ``transformers``) -> what its small model needs."""

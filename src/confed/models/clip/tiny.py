"""Small dual encoders of five ``transformers`` families, with random weights and processors.

For trials and tests without a download: ``model.source = "tiny:siglip"``. Two layers of width 32 in either tower,
pictures of 32 x 32 pixels, byte-level tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from confed.models.hf.tiny import CLIP_IMAGES, PATCH, PIXELS, SIGLIP_IMAGES, SQUARE, byte_tokens, images_of
from confed.models.pretrained import seeded

CLIP_OPTIONS = {"size": {"shortest_edge": PIXELS}, "crop_size": SQUARE}
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

    images: str = CLIP_IMAGES  # module and class of what prepares its pictures, within ``transformers.models``
    image_options: Mapping[str, Any] = field(default_factory=lambda: CLIP_OPTIONS)  # keywords of that
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
    processor = Processor(images_of(made.images, made.image_options), _tokenizer(made.begins))
    return seeded(seed, lambda: AutoModel.from_config(config)), processor


def _tokenizer(begins: bool) -> Any:
    """Bytes as tokens behind the special ones."""
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    made = byte_tokens(SPECIAL, prefix_space=True)
    ends = [(name, SPECIAL.index(name)) for name in ("<bos>", "<eos>")]
    form = "<bos> $A <eos>" if begins else "$A <eos>"
    made.post_processor = processors.TemplateProcessing(single=form, special_tokens=ends)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", unk_token="<unk>", bos_token="<bos>" if begins else None,
        eos_token="<eos>", padding_side="right", model_max_length=LENGTH,
    )  # fmt: skip


_SIGLIP_TEXT = {"bos_token_id": 1, "projection_size": 32}
FAMILIES: Mapping[str, Family] = {
    "clip": Family(config={"projection_dim": 24}),
    "siglip": Family(SIGLIP_IMAGES, {"size": SQUARE}, begins=False, text=_SIGLIP_TEXT),
    "siglip2": Family(
        "siglip2.image_processing_pil_siglip2.Siglip2ImageProcessorPil",
        {"patch_size": PATCH, "max_num_patches": (PIXELS // PATCH) ** 2},
        begins=False, text=_SIGLIP_TEXT, vision={"num_patches": (PIXELS // PATCH) ** 2},
    ),
    "metaclip_2": Family(config={"projection_dim": 24}),
    "altclip": Family(
        config={"projection_dim": 24}, text={"project_dim": 32, "max_position_embeddings": LENGTH + 2},
    ),
}  # fmt: skip
"""Family (``model_type`` of ``transformers``) -> what its small model needs."""

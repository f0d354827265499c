"""Small vision-language models of several ``transformers`` families, with random weights and processors.

For trials and tests without a download: ``model.source = "tiny:idefics3"``. Two decoder layers of width 64, pictures of
32 x 32 pixels, byte-level tokens. What a family needs beyond the common sizes stands in
:mod:`confed.models.hf.tiny`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from confed.models.hf.prompts import missing, without_videos
from confed.models.pretrained import seeded

# Configurations of small models of transformers families, as tiny builds them ---------------------------------

SPECIAL = ("<pad>", "<unk>", "<bos>", "<eos>", "<image>", "<fake_token_around_image>", "<global-img>",
           "<end_of_utterance>", "<start_of_image>", "<end_of_image>", "<image_soft_token>")  # fmt: skip
VOCABULARY = 288  # 256 bytes, the special tokens, and room for the tokens that a processor may add
PIXELS, PATCH = 32, 8
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}:{% for c in m['content'] %}{% if c['type'] == 'image' %}PICTURE"
    "{% else %}{{ c['text'] }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
TEXT: Mapping[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 512, "pad_token_id": 0,
    "bos_token_id": 2, "eos_token_id": 7,
}  # fmt: skip
VISION: Mapping[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": PIXELS, "patch_size": PATCH,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """What a family's small model has beyond the common sizes."""

    processor: Callable[[Any], Any]  # builds its processor from a tokenizer
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])  # keywords of its configuration
    text: Mapping[str, Any] = field(default_factory=dict[str, Any])  # keywords of the language part's
    # keywords of the vision part's; those of other names than usual replace the usual ones
    vision: Mapping[str, Any] = field(default_factory=lambda: VISION)
    # special tokens that its processor asks its tokenizer for, by their names there
    tokens: Mapping[str, str] = field(default_factory=dict[str, str])


def _idefics3(tokenizer: Any) -> Any:
    from transformers import Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    side = {"longest_edge": PIXELS}
    images = Idefics3ImageProcessorPil(size=side, max_image_size=side, do_image_splitting=False)
    return Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=TEMPLATE.replace("PICTURE", "<image>"))


def _gemma3(tokenizer: Any) -> Any:
    from transformers import Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    images = Gemma3ImageProcessorPil(size={"height": PIXELS, "width": PIXELS})
    template = TEMPLATE.replace("PICTURE", "<start_of_image>")
    return Gemma3Processor(images, tokenizer, image_seq_length=4, chat_template=template)


def _llava(tokenizer: Any) -> Any:
    from transformers import LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    side = {"height": PIXELS, "width": PIXELS}
    images = CLIPImageProcessorPil(size=side, crop_size=side, do_center_crop=False)
    return LlavaProcessor(
        images, tokenizer, patch_size=PATCH, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        chat_template=TEMPLATE.replace("PICTURE", "<image>"),
    )  # fmt: skip


def _smolvlm(tokenizer: Any) -> Any:
    from transformers import SmolVLMProcessor
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    side = {"longest_edge": PIXELS}
    images = SmolVLMImageProcessorPil(size=side, max_image_size=side, do_image_splitting=False)
    template = TEMPLATE.replace("PICTURE", "<image>")
    return without_videos(SmolVLMProcessor)(images, tokenizer, None, image_seq_len=4, chat_template=template)


def _qwen(name: str) -> Callable[[Any], Any]:
    def made(tokenizer: Any) -> Any:
        import transformers
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        area = {"shortest_edge": PATCH * PATCH * 4, "longest_edge": PIXELS * PIXELS}
        images = Qwen2VLImageProcessorPil(size=area, patch_size=PATCH, merge_size=2, temporal_patch_size=2)
        template = TEMPLATE.replace("PICTURE", "<|vision_start|><|image_pad|><|vision_end|>")
        kind = without_videos(getattr(transformers, name))
        return kind(images, tokenizer, None, chat_template=template)

    return made


def _paligemma(tokenizer: Any) -> Any:
    from transformers import PaliGemmaProcessor
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    images = SiglipImageProcessorPil(size={"height": PIXELS, "width": PIXELS})
    images.image_seq_length = 16  # pyright: ignore[reportAttributeAccessIssue]
    return PaliGemmaProcessor(images, tokenizer)


def _llava_onevision(tokenizer: Any) -> Any:
    from transformers import LlavaOnevisionProcessor
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

    side = {"height": PIXELS, "width": PIXELS}
    images = LlavaOnevisionImageProcessorPil(size=side, image_grid_pinpoints=_PINPOINTS)
    return without_videos(LlavaOnevisionProcessor)(
        images, tokenizer, None, num_image_tokens=16, vision_feature_select_strategy="full",
        chat_template=TEMPLATE.replace("PICTURE", "<image>"),
    )  # fmt: skip


def _internvl(tokenizer: Any) -> Any:
    from transformers import InternVLProcessor
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    images = GotOcr2ImageProcessorPil(size={"height": PIXELS, "width": PIXELS}, max_patches=4)
    template = TEMPLATE.replace("PICTURE", "<IMG_CONTEXT>")
    return without_videos(InternVLProcessor)(images, tokenizer, None, image_seq_length=4, chat_template=template)


def _lfm2_vl(tokenizer: Any) -> Any:
    from transformers import Lfm2VlImageProcessor, Lfm2VlProcessor

    images = Lfm2VlImageProcessor(
        downsample_factor=2, do_image_splitting=False, min_image_tokens=1, max_image_tokens=4, encoder_patch_size=PATCH,
        tile_size=PIXELS,
    )  # fmt: skip
    return Lfm2VlProcessor(images, tokenizer, chat_template=TEMPLATE.replace("PICTURE", "<image>"))


_PINPOINTS = [[PIXELS, PIXELS], [PIXELS, 2 * PIXELS], [2 * PIXELS, PIXELS]]
"""Heights and widths in pixels that pictures of LLaVA-OneVision are brought to."""

_FIRST = 256 + len(SPECIAL)  # id of the first special token of a family's own
_QWEN_TOKENS = {
    "image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}  # fmt: skip
_QWEN_IDS = {
    "image_token_id": _FIRST, "video_token_id": _FIRST + 1, "vision_start_token_id": _FIRST + 2,
    "vision_end_token_id": _FIRST + 3,
}  # fmt: skip
_QWEN_VISION = {
    "depth": 2, "num_heads": 4, "patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2,
    "in_channels": 3,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_QWEN3_VISION = {
    **_QWEN_VISION, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64, "num_position_embeddings": 16,
}  # fmt: skip

FAMILIES: Mapping[str, Family] = {
    "idefics3": Family(_idefics3, {"image_token_id": 4, "scale_factor": 2}, {"model_type": "llama"}),
    "gemma3": Family(
        _gemma3,
        {"image_token_index": 4, "image_token_id": 4, "boi_token_index": 8, "eoi_token_index": 9,
         "mm_tokens_per_image": 4},
        {"head_dim": 16},
    ),
    "llava": Family(
        _llava, {"image_token_index": 4, "image_token_id": 4, "vision_feature_select_strategy": "default"},
        {"model_type": "llama"}, {**VISION, "model_type": "clip_vision_model"},
    ),
    "smolvlm": Family(_smolvlm, {"image_token_id": 4, "scale_factor": 2}, {"model_type": "llama"}),
    "qwen2_vl": Family(
        _qwen("Qwen2VLProcessor"), _QWEN_IDS, {"rope_parameters": _ROPE},
        {**_QWEN_VISION, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}, _QWEN_TOKENS,
    ),
    "qwen2_5_vl": Family(
        _qwen("Qwen2_5_VLProcessor"), _QWEN_IDS, {"rope_parameters": _ROPE},
        {**_QWEN_VISION, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64, "window_size": 32,
         "fullatt_block_indexes": [1]}, _QWEN_TOKENS,
    ),
    "qwen3_vl": Family(
        _qwen("Qwen3VLProcessor"), _QWEN_IDS, {"rope_parameters": _ROPE, "head_dim": 16},
        {**_QWEN3_VISION, "deepstack_visual_indexes": [0]}, _QWEN_TOKENS,
    ),
    "qwen3_5": Family(
        _qwen("Qwen3VLProcessor"), _QWEN_IDS,
        {"rope_parameters": {**_ROPE, "partial_rotary_factor": 1.0}, "head_dim": 16,
         "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 16, "linear_value_head_dim": 16,
         "linear_num_key_heads": 4, "linear_num_value_heads": 4},
        _QWEN3_VISION, _QWEN_TOKENS,
    ),
    "paligemma": Family(
        _paligemma, {"image_token_index": 4, "image_token_id": 4, "projection_dim": 64, "hidden_size": 64},
        {"model_type": "gemma2", "head_dim": 16, "vocab_size": VOCABULARY + 1152},
        {**VISION, "projection_dim": 64},
    ),
    "llava_onevision": Family(
        _llava_onevision,
        {"image_token_index": 4, "image_token_id": 4, "video_token_index": _FIRST, "image_grid_pinpoints": _PINPOINTS},
        {"model_type": "qwen2"}, {**VISION, "model_type": "siglip_vision_model", "vision_use_head": False},
        {"video_token": "<video>"},
    ),
    "internvl": Family(
        _internvl, {"image_token_id": _FIRST, "image_seq_length": 4}, {"model_type": "qwen2"},
        {**VISION, "image_size": [PIXELS, PIXELS], "patch_size": [PATCH, PATCH]},
        {"context_image_token": "<IMG_CONTEXT>", "start_image_token": "<img>", "end_image_token": "</img>",
         "video_token": "<video>"},
    ),
    "lfm2_vl": Family(
        _lfm2_vl, {"image_token_id": 4, "projector_hidden_size": 64, "downsample_factor": 2},
        {"layer_types": ["conv", "full_attention"], "block_ff_dim": 128, "block_multiple_of": 8},
        {**VISION, "model_type": "siglip2_vision_model", "num_patches": 16, "vision_use_head": False},
        {"image_token": "<image>", "image_start_token": "<|image_start|>", "image_end_token": "<|image_end|>",
         "image_thumbnail_token": "<|img_thumbnail|>"},
    ),
}  # fmt: skip
"""Family (``model_type`` of ``transformers``) -> what its small model needs."""


# Small vision-language models of several transformers families ------------------------------------------------


def tiny(family: str, seed: int = 0) -> tuple[nn.Module, Any]:
    """A family's small model with random weights, and its processor."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    if family not in FAMILIES:
        raise ValueError(f"model.source = 'tiny:{family}': there are {', '.join(f'tiny:{name}' for name in FAMILIES)}")
    made = FAMILIES[family]
    options: dict[str, Any] = {"text_config": {**TEXT, **made.text}, "vision_config": dict(made.vision), **made.config}
    config = AutoConfig.for_model(family, **options)

    def make() -> nn.Module:
        model = AutoModelForImageTextToText.from_config(config)
        for value in model.parameters():
            if value.ndim > 1 and not value.any():  # a connector that starts at zero would hide every picture
                nn.init.normal_(value, std=0.02)
        return model

    model = seeded(seed, make)
    return model, _processor(family, made)


def _processor(family: str, made: Family) -> Any:
    try:
        return made.processor(tiny_tokenizer(made))
    except ImportError as error:
        raise ValueError(missing(f"tiny:{family}", error)) from error


def tiny_tokenizer(family: Family | None = None) -> Any:
    """A tokenizer with bytes as tokens behind special ones, and a family's own special ones behind these."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    named = {} if family is None else family.tokens
    added_tokens = [token for token in named.values() if token not in SPECIAL]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *alphabet, *added_tokens))}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    made.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    made.add_special_tokens([*SPECIAL, *added_tokens])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", unk_token="<unk>", bos_token="<bos>", eos_token="<end_of_utterance>",
        padding_side="left",
        extra_special_tokens={
            "image_token": "<image>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", **named,
        },
    )  # fmt: skip

"""Small vision-language models of several ``transformers`` families, with random weights and processors.

For trials and tests without a download: ``model.source = "tiny:idefics3"``. Two decoder layers of width 64, pictures of
32 x 32 pixels, byte-level tokens. What a family needs beyond the common sizes stands in
:mod:`confed.models.hf.tiny`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
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

    processor: str  # class of its processor
    images: str  # module and class of what prepares its pictures, within ``transformers.models``
    image_options: Mapping[str, Any]  # keywords of that
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])  # keywords of its processor
    picture: str = "<image>"  # what the chat template writes for a picture; nothing: there is no template
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])  # keywords of its configuration
    text: Mapping[str, Any] = field(default_factory=dict[str, Any])  # keywords of the language part's
    # keywords of the vision part's; those of other names than usual replace the usual ones
    vision: Mapping[str, Any] = field(default_factory=lambda: VISION)
    # special tokens that its processor asks its tokenizer for, by their names there
    tokens: Mapping[str, str] = field(default_factory=dict[str, str])


SQUARE = {"height": PIXELS, "width": PIXELS}
_LONGEST = {"longest_edge": PIXELS}
_UNSPLIT = {"size": _LONGEST, "max_image_size": _LONGEST, "do_image_splitting": False}
_FOUR = {"image_seq_len": 4}
_QWEN_PICTURES = {
    "size": {"shortest_edge": PATCH * PATCH * 4, "longest_edge": PIXELS * PIXELS}, "patch_size": PATCH, "merge_size": 2,
    "temporal_patch_size": 2,
}  # fmt: skip
_QWEN_PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
_QWEN_IMAGES = "qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil"
CLIP_IMAGES = "clip.image_processing_pil_clip.CLIPImageProcessorPil"
SIGLIP_IMAGES = "siglip.image_processing_pil_siglip.SiglipImageProcessorPil"
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
    "idefics3": Family(
        "Idefics3Processor", "idefics3.image_processing_pil_idefics3.Idefics3ImageProcessorPil", _UNSPLIT, _FOUR,
        config={"image_token_id": 4, "scale_factor": 2}, text={"model_type": "llama"},
    ),
    "gemma3": Family(
        "Gemma3Processor", "gemma3.image_processing_pil_gemma3.Gemma3ImageProcessorPil", {"size": SQUARE},
        {"image_seq_length": 4}, "<start_of_image>",
        config={"image_token_index": 4, "image_token_id": 4, "boi_token_index": 8, "eoi_token_index": 9,
                "mm_tokens_per_image": 4},
        text={"head_dim": 16},
    ),
    "llava": Family(
        "LlavaProcessor", CLIP_IMAGES, {"size": SQUARE, "crop_size": SQUARE, "do_center_crop": False},
        {"patch_size": PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        config={"image_token_index": 4, "image_token_id": 4, "vision_feature_select_strategy": "default"},
        text={"model_type": "llama"}, vision={**VISION, "model_type": "clip_vision_model"},
    ),
    "smolvlm": Family(
        "SmolVLMProcessor", "smolvlm.image_processing_pil_smolvlm.SmolVLMImageProcessorPil", _UNSPLIT, _FOUR,
        config={"image_token_id": 4, "scale_factor": 2}, text={"model_type": "llama"},
    ),
    "qwen2_vl": Family(
        "Qwen2VLProcessor", _QWEN_IMAGES, _QWEN_PICTURES, {}, _QWEN_PICTURE, _QWEN_IDS, {"rope_parameters": _ROPE},
        {**_QWEN_VISION, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}, _QWEN_TOKENS,
    ),
    "qwen2_5_vl": Family(
        "Qwen2_5_VLProcessor", _QWEN_IMAGES, _QWEN_PICTURES, {}, _QWEN_PICTURE, _QWEN_IDS, {"rope_parameters": _ROPE},
        {**_QWEN_VISION, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64, "window_size": 32,
         "fullatt_block_indexes": [1]}, _QWEN_TOKENS,
    ),
    "qwen3_vl": Family(
        "Qwen3VLProcessor", _QWEN_IMAGES, _QWEN_PICTURES, {}, _QWEN_PICTURE, _QWEN_IDS,
        {"rope_parameters": _ROPE, "head_dim": 16}, {**_QWEN3_VISION, "deepstack_visual_indexes": [0]}, _QWEN_TOKENS,
    ),
    "qwen3_5": Family(
        "Qwen3VLProcessor", _QWEN_IMAGES, _QWEN_PICTURES, {}, _QWEN_PICTURE, _QWEN_IDS,
        {"rope_parameters": {**_ROPE, "partial_rotary_factor": 1.0}, "head_dim": 16,
         "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 16, "linear_value_head_dim": 16,
         "linear_num_key_heads": 4, "linear_num_value_heads": 4},
        _QWEN3_VISION, _QWEN_TOKENS,
    ),
    "paligemma": Family(
        "PaliGemmaProcessor", SIGLIP_IMAGES, {"size": SQUARE}, picture="",
        config={"image_token_index": 4, "image_token_id": 4, "projection_dim": 64, "hidden_size": 64},
        text={"model_type": "gemma2", "head_dim": 16, "vocab_size": VOCABULARY + 1152},
        vision={**VISION, "projection_dim": 64},
    ),
    "llava_onevision": Family(
        "LlavaOnevisionProcessor",
        "llava_onevision.image_processing_pil_llava_onevision.LlavaOnevisionImageProcessorPil",
        {"size": SQUARE, "image_grid_pinpoints": _PINPOINTS},
        {"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
        config={"image_token_index": 4, "image_token_id": 4, "video_token_index": _FIRST,
                "image_grid_pinpoints": _PINPOINTS},
        text={"model_type": "qwen2"},
        vision={**VISION, "model_type": "siglip_vision_model", "vision_use_head": False},
        tokens={"video_token": "<video>"},
    ),
    "internvl": Family(
        "InternVLProcessor", "got_ocr2.image_processing_pil_got_ocr2.GotOcr2ImageProcessorPil",
        {"size": SQUARE, "max_patches": 4}, {"image_seq_length": 4}, "<IMG_CONTEXT>",
        {"image_token_id": _FIRST, "image_seq_length": 4}, {"model_type": "qwen2"},
        {**VISION, "image_size": [PIXELS, PIXELS], "patch_size": [PATCH, PATCH]},
        {"context_image_token": "<IMG_CONTEXT>", "start_image_token": "<img>", "end_image_token": "</img>",
         "video_token": "<video>"},
    ),
    "lfm2_vl": Family(
        "Lfm2VlProcessor", "lfm2_vl.image_processing_lfm2_vl.Lfm2VlImageProcessor",
        {"downsample_factor": 2, "do_image_splitting": False, "min_image_tokens": 1, "max_image_tokens": 4,
         "encoder_patch_size": PATCH, "tile_size": PIXELS},
        config={"image_token_id": 4, "projector_hidden_size": 64, "downsample_factor": 2},
        text={"layer_types": ["conv", "full_attention"], "block_ff_dim": 128, "block_multiple_of": 8},
        vision={**VISION, "model_type": "siglip2_vision_model", "num_patches": 16, "vision_use_head": False},
        tokens={"image_token": "<image>", "image_start_token": "<|image_start|>", "image_end_token": "<|image_end|>",
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


def images_of(path: str, options: Mapping[str, Any]) -> Any:
    """What prepares pictures, by its module and class within ``transformers.models``."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(f"transformers.models.{module}"), name)(**options)


def _processor(name: str, family: Family) -> Any:
    try:
        import transformers

        kind = getattr(transformers, family.processor)
        parts = {"video_processor": None} if "video_processor" in kind.get_attributes() else {}
        images = images_of(family.images, family.image_options)
        if family.picture:
            options = {**family.options, "chat_template": TEMPLATE.replace("PICTURE", family.picture)}
        else:  # PaliGemma's, which asks its part for pictures how many tokens they are
            images.image_seq_length, options = 16, family.options
        tokenizer = tiny_tokenizer(family)
        return without_videos(kind)(image_processor=images, tokenizer=tokenizer, **parts, **options)
    except ImportError as error:
        raise ValueError(missing(f"tiny:{name}", error)) from error


def byte_tokens(special: Sequence[str], behind: Sequence[str] = (), *, prefix_space: bool) -> Any:
    """A tokenizer of the library with special tokens, all bytes, and further special tokens as its vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate((*special, *alphabet, *behind))}
    made: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    made.decoder = decoders.ByteLevel()
    return made


def tiny_tokenizer(family: Family | None = None) -> Any:
    """A tokenizer with bytes as tokens behind special ones, and a family's own special ones behind these."""
    from transformers import PreTrainedTokenizerFast

    named = {} if family is None else family.tokens
    tokens = (*SPECIAL, *(token for token in named.values() if token not in SPECIAL))
    made = byte_tokens(SPECIAL, tokens[len(SPECIAL) :], prefix_space=False)
    made.add_special_tokens(list(tokens))
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", unk_token="<unk>", bos_token="<bos>", eos_token="<end_of_utterance>",
        padding_side="left",
        extra_special_tokens={
            "image_token": "<image>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", **named,
        },
    )  # fmt: skip

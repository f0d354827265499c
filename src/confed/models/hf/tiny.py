"""Small vision-language models of several ``transformers`` families, with random weights and processors.

For trials and tests without a download: ``model.source = "tiny:idefics3"``. Two decoder layers of width 64, pictures of
32 x 32 pixels, byte-level tokens. What a family needs beyond the common sizes stands in
:mod:`confed.models.hf.families`.
"""

from typing import Any

from torch import nn

from confed.models.hf.families import FAMILIES, SPECIAL, TEXT, Family
from confed.models.hf.processors import missing
from confed.models.published import seeded

__all__ = ["tiny", "tiny_tokenizer"]


def tiny(family: str, seed: int = 0) -> tuple[nn.Module, Any]:
    """A family's small model with random weights, and its processor.

    Args:
        family: a key of :data:`FAMILIES`.
        seed: of the weights.

    Raises:
        ValueError: no family of that name, or a library that its processor needs is missing.
    """
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
    """A family's processor."""
    try:
        return made.processor(tiny_tokenizer(made))
    except ImportError as error:
        raise ValueError(missing(f"tiny:{family}", error)) from error


def tiny_tokenizer(family: Family | None = None) -> Any:
    """A tokenizer with bytes as tokens behind special ones, and a family's own special ones behind these.

    Args:
        family: whose.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    named = {} if family is None else family.tokens
    own = [token for token in named.values() if token not in SPECIAL]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *alphabet, *own))}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    made.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    made.add_special_tokens([*SPECIAL, *own])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", unk_token="<unk>", bos_token="<bos>", eos_token="<end_of_utterance>",
        padding_side="left",
        extra_special_tokens={
            "image_token": "<image>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", **named,
        },
    )  # fmt: skip

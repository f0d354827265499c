"""Families of vision-language models: which can be built here, and which read one question about one picture only."""

import importlib.util
from typing import Any

import torch
from torch import Tensor

from confed.models import create_model
from confed.models.hf.tiny import FAMILIES

NEEDS = {"smolvlm": "num2words", "lfm2_vl": "torchvision"}
"""Libraries that processors need."""
HERE = [family for family in FAMILIES if family not in NEEDS or importlib.util.find_spec(NEEDS[family])]
ONE_QUESTION = {
    "paligemma": "the processor PaliGemmaProcessor has no chat template and reads one question about one picture",
    "llava_onevision": "the prompts of LlavaOnevisionProcessor cannot be split into text and picture",
}
"""Families whose prompts are one question about one picture, and what is said of others."""


def tiny_vlm(family: str, **options: Any) -> Any:
    """The small model of a family, as a recipe builds it."""
    return create_model("hf", answers=3, vocab_size=0, source=f"tiny:{family}", **options)


def vlm_batch(model: Any) -> dict[str, Tensor]:
    """Two questions about two pictures, and their answers."""
    pictures = torch.randint(0, 256, (2, 3, 48, 40), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    text, mask = model.tokenizer(["what colour is it?", "red?"])
    return {"image": pictures, "text": text, "text_mask": mask, "answer_tokens": model.tokenizer.answers(["red", "no"])}

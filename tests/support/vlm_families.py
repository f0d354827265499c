"""Families of vision-language models: which can be built here, and which read one question about one picture only."""

import importlib.util

from confed.models.hf.tiny import FAMILIES

NEEDS = {"smolvlm": "num2words", "lfm2_vl": "torchvision"}
"""Libraries that processors need."""
HERE = [family for family in FAMILIES if family not in NEEDS or importlib.util.find_spec(NEEDS[family])]
ONE_QUESTION = {
    "paligemma": "the processor PaliGemmaProcessor has no chat template and reads one question about one picture",
    "llava_onevision": "the prompts of LlavaOnevisionProcessor cannot be split into text and picture",
}
"""Families whose prompts are one question about one picture, and what is said of others."""

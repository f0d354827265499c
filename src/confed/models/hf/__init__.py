"""Generative vision-language models of Hugging Face: from the hub, a folder, or small random ones.

Nothing of ``transformers`` is imported before a model is made.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal, get_args

import torch

from confed.federation.specs import ModelSpec
from confed.models.finetuning import USUAL, Finetuning, Trainable
from confed.models.hf.model import HuggingFaceVLM, Part, Quantised, quantise
from confed.models.hf.prompts import ChatTokenizer, check_torchvision, read_processor
from confed.models.hub_names import hub_name
from confed.models.inputs import picture_fit, picture_side
from confed.models.pretrained import WEIGHTS, place_of, read_whole
from confed.models.variants import variant

__all__ = ["WEIGHTS", "hub_name"]

Base = Literal["fp32", "bf16", Quantised]  # number format of what does not learn
TINY = "tiny:"
SOURCES = "a hub name owner/name, a folder, smolvlm_mini, or tiny:FAMILY"


def _hf(
    *,
    source: str,
    revision: str = "",
    base: Base = "fp32",
    parts: tuple[Part, ...] = ("language",),
    trainable: Trainable = "lora",
    peft: Finetuning = USUAL,
    checkpointing: bool = False,
    device_map: Literal["one", "auto"] = "one",
    attention: Literal["exact", "fast"] = "exact",
    max_length: int = 256,
    seed: int = 0,
) -> HuggingFaceVLM:
    """A vision-language model.

    Options:
        answers: not used: answers are texts, the task says which there are.
        vocab_size: not used: the vocabulary is the model's.
        source: a hub name ("HuggingFaceTB/SmolVLM-256M-Instruct"), a folder written by ``save_pretrained`` with its
            processor, "smolvlm_mini", which is in the package, or "tiny:FAMILY" for a small one with random weights,
            such as "tiny:idefics3".
        revision: commit, tag or branch of the hub name.
        base: number format of what does not learn; "int8" and "nf4" quantise the linear layers of the language part,
            beside which everything else is bf16. What learns is fp32.
        parts: what ``trainable`` applies to: "language" (default), "connector", "vision".
        trainable: "lora" (default), "ia3", "adapters", "prompt", "bias", "top" or "all".
        peft: options of that finetuning; LoRA's layers are by default all linear layers of ``parts``.
        checkpointing: recompute activations in the backward pass, which saves memory and costs a third more time.
        device_map: "auto" spreads what does not learn over all GPUs of the machine, for bases that are too large for
            one; with "lora", whose factors stay on one of them.
        attention: "fast" takes PyTorch's fastest kernels on GPUs, with which numbers differ from run to run;
            ``summary.json`` then has ``exact = false``. "exact" (default) takes those that repeat to the bit.
        max_length: most tokens of a prompt, without its picture's.
    """
    unknown = [part_name for part_name in parts if part_name not in get_args(Part)]
    if unknown or not parts:
        raise ValueError(f"model.parts must be of {', '.join(get_args(Part))}, got {', '.join(unknown) or 'none'}")
    _check_what_learns(base, device_map, trainable, peft)
    body = base_model(source, revision, seed, torch.float32 if base == "fp32" else torch.bfloat16)
    if base in ("int8", "nf4"):
        quantise(body, body.get_decoder(), base)
    model = HuggingFaceVLM(body, _tokenizer((), (), source, revision, max_length), checkpointing, parts)
    model.device_map, model.exact = device_map, attention == "exact"
    model.mixed = base != "fp32"
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = base == "nf4", base == "int8"
    return model


def _check_what_learns(base: Base, device_map: str, trainable: str, peft: Finetuning) -> None:
    if base in get_args(Quantised) and (trainable in ("all", "top") or peft.reset_base):
        raise ValueError(
            f"model.base = {base!r} holds weights that cannot learn; set model.trainable to 'lora', 'ia3', "
            f"'adapters' or 'bias' without model.peft.reset_base, got {trainable!r}"
        )
    if device_map == "auto" and base in get_args(Quantised):
        raise ValueError(f"model.device_map = 'auto' needs model.base 'bf16' or 'fp32', got {base!r}")
    if device_map == "auto" and (trainable != "lora" or peft.reset_base):
        raise ValueError(
            "model.device_map = 'auto' spreads a base that is frozen: model.trainable must be 'lora', without "
            f"model.peft.reset_base, got {trainable!r}"
        )


def _tokenizer(
    words: Sequence[str], answers: Sequence[str] = (), source: str = "", revision: str = "", max_length: int = 256
) -> ChatTokenizer:
    """Prompts of the model's processor; its vocabulary is fixed, so the dataset's words do not matter."""
    return ChatTokenizer(_processor(source, revision), max_length)


hf = variant(
    _hf, "hf",
    "Any image-text-to-text model of ``transformers`` with a chat template, such as the packaged ``smolvlm_mini``.\n\n"
    "The task is ``chat`` or ``generation``.",
    "answers vocab_size source revision base parts trainable peft checkpointing device_map attention max_length seed",
    spec=ModelSpec(tokenizer=_tokenizer, picture_side=picture_side, picture_fit=picture_fit),
)  # fmt: skip


@lru_cache(maxsize=2)
def _processor(source: str, revision: str) -> Any:
    check_torchvision()
    if source.startswith(TINY):
        from confed.models.hf.tiny import tiny

        return tiny(source.removeprefix(TINY))[1]
    return read_processor(place_of(source, SOURCES), source, revision)


def base_model(source: str, revision: str, seed: int, dtype: torch.dtype) -> Any:
    """The library's model with values of ``dtype``; what cannot be read or adapted is a ``ValueError``."""
    check_torchvision()
    if source.startswith(TINY):
        from confed.models.hf.tiny import tiny

        body = tiny(source.removeprefix(TINY), seed)[0]
        for parameter in body.parameters():  # buffers, such as frequencies of positions, keep their precision
            parameter.data = parameter.data.to(dtype)
        return body
    from transformers import AutoModelForImageTextToText

    options: dict[str, Any] = {"dtype": dtype, **({"revision": revision} if revision else {})}
    body = read_whole(AutoModelForImageTextToText, source, SOURCES, "image-text-to-text model", **options)
    if body.config.is_encoder_decoder:
        raise ValueError(
            f"{source!r} ({body.config.model_type}) reads prompts in an encoder and writes in a decoder behind it; the "
            "model 'hf' continues prompts: take a model with a decoder alone"
        )
    text = body.config.get_text_config()
    if getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None):
        raise ValueError(
            f"{source!r} is a mixture of experts, whose experts are no linear layers that adapters could be put on"
        )
    return body

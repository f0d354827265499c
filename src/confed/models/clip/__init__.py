"""Dual encoders of Hugging Face as classifiers over class names: from the hub, a folder, or small random ones.

Nothing of ``transformers`` is imported before a model is made.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, get_args

import torch

from confed.models.clip.dual_encoder import DualEncoder, Head, plain_names
from confed.models.finetuning import USUAL, Finetuning, Trainable, finetune
from confed.models.hub_names import hub_name
from confed.models.inputs import picture_fit, picture_side
from confed.models.pretrained import WEIGHTS, place_of, unread_because, without_progress_bars
from confed.models.tokenizer import WordTokenizer
from confed.registry import register_model

__all__ = ["WEIGHTS", "hub_name"]

TINY = "tiny:"
SOURCES = "a hub name owner/name, a folder, clip_mini, or tiny:FAMILY"
FAMILIES = ("clip", "siglip", "siglip2", "metaclip_2", "altclip")


@register_model
def clip(
    answers: Sequence[str] | int,
    vocab_size: int = 0,
    *,
    source: str = "clip_mini",
    revision: str = "",
    template: str = "a photo of a {}.",
    templates: tuple[str, ...] = (),
    context: str | int = "a photo of a",
    head: Head = "text",
    trainable: Trainable = "prompt",
    peft: Finetuning = USUAL,
    max_length: int = 16,
    seed: int = 0,
) -> DualEncoder:
    """CLIP, SigLIP, SigLIP 2, MetaCLIP 2 or AltCLIP of ``transformers``; the classes are the answers of the data.

    Args:
        answers: the class names.
        vocab_size: not used: the vocabulary is the model's.
        source: a hub name ("openai/clip-vit-base-patch16"), a folder written by ``save_pretrained`` with its processor,
            "clip_mini", which is in the package, or "tiny:FAMILY" for a small one with random weights, such as
            "tiny:siglip".
        revision: commit, tag or branch of the hub name.
        template: handwritten prompt, ``{}`` for the class name.
        templates: several of them, whose features are averaged, in place of ``template``.
        context: with ``trainable = "prompt"``: the words that learned vectors start from, or how many random ones.
        head: "text" scores classes by their prompts, "linear" by a linear layer on the picture's features; "attention"
            (FedCLIP) and "adapter" (CLIP-Adapter) put layers on the picture's features, which texts then score. Layers
            always learn.
        trainable: "prompt" learns context vectors and nothing else (CoOp); "head" nothing but the head's layers, if
            there are any; "lora", "ia3", "adapters", "bias", "top" and "all" a part of the towers, under handwritten
            prompts.
        peft: options of that finetuning.
        max_length: of the questions, which are ignored.
        seed: of all fresh values.

    Raises:
        ValueError: no such model or none of these families, class names that are missing, double or too long, learned
            context beside a linear head, or a kind of finetuning that the model cannot do.
    """
    if head not in get_args(Head):
        raise ValueError(f"model.head must be one of {', '.join(get_args(Head))}, got {head!r}")
    learned = trainable == "prompt"
    if learned and head != "text":
        raise ValueError(f"model.trainable = 'prompt' has no effect with model.head = {head!r}: set it to 'head'")
    body, processor = _body(source, revision, seed), _processor(source, revision)
    rng = torch.Generator().manual_seed(seed)
    model = DualEncoder(
        body, processor, plain_names(answers), templates=templates or (template,),
        context=context if learned else None, head=head, rng=rng,
    )  # fmt: skip
    finetune(model, "head" if learned else trainable, peft, model.places(), rng)
    return model


# What is asked of a dataset's pictures is not read, but batches have it.
clip.picture_side = picture_side  # pyright: ignore[reportFunctionMemberAccess]
clip.picture_fit = picture_fit  # pyright: ignore[reportFunctionMemberAccess]
clip.tokenizer = WordTokenizer  # pyright: ignore[reportFunctionMemberAccess]


@lru_cache(maxsize=2)
def _processor(source: str, revision: str) -> Any:
    if source.startswith(TINY):
        from confed.models.clip.tiny import tiny

        return tiny(source.removeprefix(TINY))[1]
    from transformers import AutoProcessor

    try:
        options = {"revision": revision} if revision else {}
        processor = AutoProcessor.from_pretrained(place_of(source, SOURCES), trust_remote_code=False, **options)
    except ImportError as error:
        raise ValueError(
            f"the processor of {source!r} needs a library that is not installed: {_line(error)}"
        ) from error
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"no processor could be read from {source!r}: {unread_because(error)}") from error
    if not {"image_processor", "tokenizer"} <= set(vars(processor)):
        raise ValueError(f"{source!r} has no processor of pictures and texts, only a {type(processor).__name__}")
    return processor


def _body(source: str, revision: str, seed: int) -> Any:
    """The library's model in fp32."""
    if source.startswith(TINY):
        from confed.models.clip.tiny import tiny

        return tiny(source.removeprefix(TINY), seed)[0]
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModel

    options: dict[str, Any] = {"revision": revision} if revision else {}
    try:
        kind = AutoConfig.from_pretrained(place_of(source, SOURCES), trust_remote_code=False, **options).model_type
        if kind not in FAMILIES:
            raise ValueError(f"it is of the kind {kind!r}, and dual encoders are {', '.join(FAMILIES)}")
        options |= {"output_loading_info": True, "dtype": torch.float32}
        with without_progress_bars():
            read: Any = AutoModel.from_pretrained(
                place_of(source, SOURCES), trust_remote_code=False, use_safetensors=True, **options
            )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"no dual encoder could be read from {source!r}: {unread_because(error)}") from error
    body, info = read
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"the weights of {source!r} lack {missing[0]}{more}; nothing is made up in their place")
    return body


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]

"""Dual encoders of Hugging Face as classifiers over class names: from the hub, a folder, or small random ones.

Nothing of ``transformers`` is imported before a model is made.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from confed.federation.specs import ModelSpec
from confed.models.clip.dual_encoder import DualEncoder, Head, plain_names
from confed.models.clip.tiny import FAMILIES
from confed.models.clip.tiny import tiny as tiny_encoder
from confed.models.finetuning import USUAL, Finetuning, Trainable, finetune
from confed.models.hf.prompts import read_processor
from confed.models.hub_names import hub_name
from confed.models.inputs import picture_fit, picture_side
from confed.models.pretrained import WEIGHTS, place_of, read_whole, reading
from confed.models.tokenizer import WordTokenizer
from confed.models.variants import variant

__all__ = ["WEIGHTS", "hub_name"]

TINY = "tiny:"
SOURCES = "a hub name owner/name, a folder, clip_mini, or tiny:FAMILY"


def _clip(
    answers: Sequence[str] | int,
    *,
    source: str = "clip_mini",
    revision: str = "",
    template: str = "a photo of a {}.",
    templates: tuple[str, ...] = (),
    context: str | int = "a photo of a",
    head: Head = "text",
    trainable: Trainable = "prompt",
    peft: Finetuning = USUAL,
    seed: int,
    rng: torch.Generator,
) -> DualEncoder:
    """A dual encoder.

    Options:
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
        max_length: of the questions, which are ignored.
    """
    learned = trainable == "prompt"
    if learned and head != "text":
        raise ValueError(f"model.trainable = 'prompt' has no effect with model.head = {head!r}: set it to 'head'")
    model = DualEncoder(
        _body(source, revision, seed), _processor(source, revision), plain_names(answers),
        templates=templates or (template,), context=context if learned else None, head=head, rng=rng,
    )  # fmt: skip
    finetune(model, "head" if learned else trainable, peft, model.places(), rng)
    return model


# What is asked of a dataset's pictures is not read, but batches have it.
clip = variant(
    _clip, "clip",
    "CLIP, SigLIP, SigLIP 2, MetaCLIP 2 or AltCLIP of ``transformers``; the classes are the answers of the data.",
    "answers vocab_size source revision template templates context head trainable peft max_length seed",
    spec=ModelSpec(tokenizer=WordTokenizer, picture_side=picture_side, picture_fit=picture_fit), vocab_size=0,
)  # fmt: skip


@lru_cache(maxsize=2)
def _processor(source: str, revision: str) -> Any:
    if source.startswith(TINY):
        return tiny_encoder(source.removeprefix(TINY))[1]
    return read_processor(place_of(source, SOURCES), source, revision)


def _body(source: str, revision: str, seed: int) -> Any:
    """The library's model in fp32."""
    if source.startswith(TINY):
        return tiny_encoder(source.removeprefix(TINY), seed)[0]
    from transformers import AutoConfig, AutoModel

    options: dict[str, Any] = {"revision": revision} if revision else {}
    with reading(source, "dual encoder"):
        kind = AutoConfig.from_pretrained(place_of(source, SOURCES), trust_remote_code=False, **options).model_type
        if kind not in FAMILIES:
            raise ValueError(f"it is of the kind {kind!r}, and dual encoders are {', '.join(FAMILIES)}")
    return read_whole(AutoModel, source, SOURCES, "dual encoder", dtype=torch.float32, **options)

"""Initial values from the packaged ``vilt_mini`` where a mini has the same parts.

A backbone rarely starts from nothing: VAuLT takes a ViLT and a BERT, ALBEF and BLIP a picture Transformer and a BERT
that were trained before. Here all of them take over what ``vilt_mini`` has: the picture embedding and blocks, and the
word embeddings.
"""

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from confed.models.pretrained import MINI_WEIGHTS

__all__ = ["ALBEF", "BLIP", "VAULT", "Start", "copy"]

Start = Sequence[tuple[str, str]]
"""Pairs of a pattern that matches whole names of the new model, and the name in ``vilt_mini``, in which ``\\1`` and so
on stand for the pattern's groups; several names joined by ``+`` are stacked."""

_BLOCK = r"vilt.encoder.layer.\1."
_WORDS = (
    r"text_(?:encoder|decoder\.bert)\.embeddings\.((?:word_embeddings|position_embeddings|LayerNorm)\.\w+)",
    r"vilt.embeddings.text_embeddings.\1",
)

VAULT: Start = (
    (r"(vilt\..*)", r"\1"),
    (r"(classifier\..*)", r"\1"),
    # Not BERT's first normalisation: ViLT's own one follows behind BERT, so that fresh blocks change little.
    (r"language\.embeddings\.((?:word|position)_embeddings\.weight)", r"vilt.embeddings.text_embeddings.\1"),
)

ALBEF: Start = (
    (r"visual_encoder\.embeddings\.(.*)", r"vilt.embeddings.\1"),
    (r"visual_encoder\.layers\.(\d)\.attention\.q_proj\.(\w+)", _BLOCK + r"attention.attention.query.\2"),
    (r"visual_encoder\.layers\.(\d)\.attention\.k_proj\.(\w+)", _BLOCK + r"attention.attention.key.\2"),
    (r"visual_encoder\.layers\.(\d)\.attention\.v_proj\.(\w+)", _BLOCK + r"attention.attention.value.\2"),
    (r"visual_encoder\.layers\.(\d)\.attention\.o_proj\.(\w+)", _BLOCK + r"attention.output.dense.\2"),
    (r"visual_encoder\.layers\.(\d)\.mlp\.fc1\.(\w+)", _BLOCK + r"intermediate.dense.\2"),
    (r"visual_encoder\.layers\.(\d)\.mlp\.fc2\.(\w+)", _BLOCK + r"output.dense.\2"),
    (r"visual_encoder\.layers\.(\d)\.(layernorm_\w+\.\w+)", _BLOCK + r"\2"),
    _WORDS,
)

BLIP: Start = (
    (r"vision_model\.embeddings\.class_embedding", "vilt.embeddings.cls_token"),
    (r"vision_model\.embeddings\.position_embedding", "vilt.embeddings.position_embeddings"),
    (r"vision_model\.embeddings\.patch_embedding\.(\w+)", r"vilt.embeddings.patch_embeddings.projection.\1"),
    (
        r"vision_model\.encoder\.layers\.(\d)\.self_attn\.qkv\.(\w+)",
        "+".join(_BLOCK + rf"attention.attention.{part}.\2" for part in ("query", "key", "value")),
    ),
    (r"vision_model\.encoder\.layers\.(\d)\.self_attn\.projection\.(\w+)", _BLOCK + r"attention.output.dense.\2"),
    (r"vision_model\.encoder\.layers\.(\d)\.mlp\.fc1\.(\w+)", _BLOCK + r"intermediate.dense.\2"),
    (r"vision_model\.encoder\.layers\.(\d)\.mlp\.fc2\.(\w+)", _BLOCK + r"output.dense.\2"),
    (r"vision_model\.encoder\.layers\.(\d)\.layer_norm1\.(\w+)", _BLOCK + r"layernorm_before.\2"),
    (r"vision_model\.encoder\.layers\.(\d)\.layer_norm2\.(\w+)", _BLOCK + r"layernorm_after.\2"),
    _WORDS,
)


def copy(model: nn.Module, start: Start) -> None:
    """Copy the values of the packaged ``vilt_mini`` into a model where ``start`` says so.

    Raises:
        ValueError: a pattern matches none of the model's names, or those weights lack the tensor or its shape.
    """
    from safetensors.torch import load_file

    source: Mapping[str, Tensor] = load_file(MINI_WEIGHTS)
    state = model.state_dict()
    for pattern, there in start:
        found = {name: match.expand(there).split("+") for name in state if (match := re.fullmatch(pattern, name))}
        if not found:
            raise ValueError(f"the model has no tensor like {pattern!r} to start from {MINI_WEIGHTS.name}")
        for name, theirs in found.items():
            if missing := [other for other in theirs if other not in source]:
                raise ValueError(f"{MINI_WEIGHTS.name} has no tensor {missing[0]!r}, which {name!r} is to start from")
            value = torch.cat([source[other] for other in theirs])
            if value.shape != state[name].shape:
                raise ValueError(
                    f"{name} must have the shape of {there!r}, {tuple(value.shape)}, got {tuple(state[name].shape)}"
                )
            with torch.no_grad():
                state[name].copy_(value)

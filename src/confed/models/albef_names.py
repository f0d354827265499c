"""From the tensor names of ALBEF's published checkpoints to ours.

The published ones are those of its code: a ViT in the style of ``timm`` (``visual_encoder``), and BERT with
cross-attention (``text_encoder``, in a visual question answering checkpoint also ``text_decoder``). A pre-training
checkpoint has no decoder: ALBEF starts it from the question encoder's layers that look at the picture, its embeddings
and its language-model head, and so does :func:`rename_albef`.
"""

import math
import re
from collections.abc import Mapping

from torch import Tensor

from confed.models.albef_module import AlbefConfig

__all__ = ["rename_albef", "sizes_of"]

_UNUSED = re.compile(
    r"(visual_encoder|text_encoder|text_decoder|vision_proj|text_proj)_m\..*"  # momentum copies
    r"|(vision_proj|text_proj|itm_head|combined_proj)\..*|temp|(image|text|idx)_queue|queue_ptr"  # pre-training's heads
    r"|.*\.position_ids"
)
_VISUAL = (
    (r"cls_token", r"embeddings.cls_token"),
    (r"pos_embed", r"embeddings.position_embeddings"),
    (r"patch_embed\.proj\.(weight|bias)", r"embeddings.patch_embeddings.projection.\1"),
    (r"norm\.(weight|bias)", r"layernorm.\1"),
    (r"blocks\.(\d+)\.norm1\.(weight|bias)", r"layers.\1.layernorm_before.\2"),
    (r"blocks\.(\d+)\.norm2\.(weight|bias)", r"layers.\1.layernorm_after.\2"),
    (r"blocks\.(\d+)\.attn\.proj\.(weight|bias)", r"layers.\1.attention.o_proj.\2"),
    (r"blocks\.(\d+)\.mlp\.(fc[12])\.(weight|bias)", r"layers.\1.mlp.\2.\3"),
)
_QKV = re.compile(r"blocks\.(\d+)\.attn\.qkv\.(weight|bias)")
_HEAD = re.compile(r"cls\.predictions\.(transform\..*|bias)")
_TIED = re.compile(r"cls\.predictions\.decoder\.(weight|bias)")
_LAYER = re.compile(r"encoder\.layer\.(\d+)\.(.*)")


def rename_albef(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A published checkpoint's tensors under our names; momentum copies and pre-training's other heads are left out.

    Raises:
        ValueError: a name that ALBEF does not have, or parts are missing (names the first few).
    """
    renamed: dict[str, Tensor] = {}
    unknown: list[str] = []
    for full, tensor in state.items():
        name = full.removeprefix("module.")
        if _UNUSED.fullmatch(name):
            continue
        part, _, rest = name.partition(".")
        if part == "visual_encoder":
            found = _visual(rest, tensor)
        elif part in ("text_encoder", "text_decoder"):
            found = _text(part, rest.removeprefix("bert."), tensor)
        else:
            found = None
        if found is None:
            unknown.append(full)
        else:
            renamed |= found
    if unknown:
        more = f" (and {len(unknown) - 3} more)" if len(unknown) > 3 else ""
        raise ValueError(f"no ALBEF has tensors called {', '.join(unknown[:3])}{more}")
    if not any(name.startswith("text_decoder.bert.") for name in renamed):
        renamed |= _decoder_of(renamed)
    return renamed


def sizes_of(tensors: Mapping[str, Tensor], heads: int | None = None) -> AlbefConfig:
    """The sizes that renamed tensors have.

    Args:
        tensors: under our names.
        heads: attention heads, which shapes do not show; default: one per 64 features, as published.

    Raises:
        ValueError: a tensor that shows a size is missing.
    """
    embeddings = "visual_encoder.embeddings"
    needed = (
        f"{embeddings}.patch_embeddings.projection.weight",
        f"{embeddings}.position_embeddings",
        "text_encoder.embeddings.word_embeddings.weight",
        "text_encoder.embeddings.position_embeddings.weight",
    )
    for name in needed:
        if name not in tensors:
            raise ValueError(f"the checkpoint has no tensor for {name}")
    patches, positions, words, places = (tensors[name] for name in needed)
    width, patch = patches.shape[0], patches.shape[-1]
    layers = {
        part: _count(tensors, f"{part}.")
        for part in ("visual_encoder.layers", "text_encoder.encoder.layer", "text_decoder.bert.encoder.layer")
    }
    return AlbefConfig(
        vocab_size=words.shape[0],
        width=width,
        heads=heads or max(1, width // 64),
        image_size=math.isqrt(positions.shape[1] - 1) * patch,
        patch=patch,
        visual_layers=layers["visual_encoder.layers"],
        text_layers=layers["text_encoder.encoder.layer"],
        fusion=_fusion(tensors),
        decoder_layers=layers["text_decoder.bert.encoder.layer"],
        positions=places.shape[0],
    )


def _visual(name: str, tensor: Tensor) -> dict[str, Tensor] | None:
    fused = _QKV.fullmatch(name)
    if fused is not None:
        layer, kind = fused.groups()
        parts = zip("qkv", tensor.chunk(3), strict=True)
        return {f"visual_encoder.layers.{layer}.attention.{p}_proj.{kind}": value for p, value in parts}
    for pattern, replacement in _VISUAL:
        if re.fullmatch(pattern, name):
            return {f"visual_encoder.{re.sub(pattern, replacement, name)}": tensor}
    return None


def _text(part: str, name: str, tensor: Tensor) -> dict[str, Tensor] | None:
    if _TIED.fullmatch(name) or name.startswith("pooler."):
        return {}  # the embeddings' own matrix, the head's own bias; nothing reads a pooler
    if _HEAD.fullmatch(name):
        return {f"text_decoder.{name}": tensor}
    if not name.startswith(("embeddings.", "encoder.layer.")):
        return None
    return {f"{part}.{name}" if part == "text_encoder" else f"{part}.bert.{name}": tensor}


def _decoder_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The decoder that ALBEF starts from its question encoder."""
    fusion, decoder = _fusion(tensors), dict[str, Tensor]()
    for full, tensor in tensors.items():
        part, _, name = full.partition(".")
        layer = _LAYER.fullmatch(name)
        if part != "text_encoder" or (layer is not None and int(layer[1]) < fusion):
            continue
        decoder["text_decoder.bert." + (f"encoder.layer.{int(layer[1]) - fusion}.{layer[2]}" if layer else name)] = (
            tensor
        )
    return decoder


def _fusion(tensors: Mapping[str, Tensor]) -> int:
    looking = [m[1] for n in tensors if (m := re.match(r"text_encoder\.encoder\.layer\.(\d+)\.crossattention\.", n))]
    if not looking:
        raise ValueError("the checkpoint's text_encoder has no layer with cross-attention; it is no ALBEF")
    return min(map(int, looking))


def _count(tensors: Mapping[str, Tensor], prefix: str) -> int:
    """Layers whose names begin so; 0 if none does."""
    return 1 + max((int(n[len(prefix) :].partition(".")[0]) for n in tensors if n.startswith(prefix)), default=-1)

"""Parts of a vision-language model of ``transformers``, and what of them can be finetuned."""

from typing import Any

from torch import nn

from confed.models.adapters import Host
from confed.models.finetuning import Places

__all__ = ["part_name", "places_of"]


def part_name(model: nn.Module, body: Any, part: str) -> str:
    """Name of the submodule of the language part or of the picture encoder.

    Args:
        model: whose submodules are named.
        body: the library's model in it.
        part: "language" or "vision".
    """
    wanted = body.get_decoder() if part == "language" else body.get_encoder("image")
    return next(own for own, module in model.named_modules() if module is wanted)


def places_of(model: nn.Module, body: Any, parts: tuple[str, ...], reduction: int) -> Places:
    """What can be finetuned: linear layers, the decoder's blocks as places of adapters, tokens before prompts.

    Args:
        model: whose submodules are named.
        body: the library's model in it.
        parts: of "language", "connector" and "vision".
        reduction: usual reduction of the adapters.
    """
    language, vision = (part_name(model, body, part) for part in ("language", "vision"))
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    head = body.get_output_embeddings()
    own = {
        "language": [n for n in names if n.startswith(f"{language}.")],
        "vision": [n for n in names if n.startswith(f"{vision}.")],
    }
    rest = [n for n in names if not n.startswith((f"{language}.", f"{vision}."))]
    own["connector"] = [n for n in rest if model.get_submodule(n) is not head]
    layers = body.get_decoder().layers
    width = body.get_decoder().config.hidden_size
    return Places(
        heads=(),
        top=(f"{language}.layers.{len(layers) - 1}.",),
        hosts=[Host(layer, width) for layer in layers] if "language" in parts else [],
        reduction=reduction,
        lora=tuple(name for part in parts for name in own[part]),
        ia3=tuple(n for n in own["language"] if n.endswith((".k_proj", ".v_proj"))),
        ia3_inputs=tuple(n for n in own["language"] if n.endswith((".down_proj", ".fc2"))),
        prompts={"text": width} if "language" in parts else {},
    )

"""Description of a vision-language model before a run: its parts, what will learn, bytes per round, memory."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from confed.federation.params import matches_any
from confed.models.finetuning import USUAL, Finetuning, Trainable
from confed.models.hf import Base, Part, hf
from confed.models.hf.model import HuggingFaceVLM
from confed.models.hub_names import hub_name

QUESTION, ANSWER, SIDE = "What is in the picture?", "yes", 224
"""Of the example that memory is measured with: a question, an answer, and a grey picture's side in pixels."""
OPTIONAL = {
    "bases of 8 and 4 bits, adamw8bit": ("bitsandbytes", "quantised"),
    "bases spread over GPUs": ("accelerate", "vlm"),
}
"""What a run of this model may ask for -> the library behind it and the extra that brings it."""


def describe(
    source: str, revision: str = "", base: Base = "fp32", parts: tuple[Part, ...] = ("language",),
    trainable: Trainable = "lora", peft: Finetuning = USUAL, checkpointing: bool = False,
) -> dict[str, dict[str, str]]:  # fmt: skip
    """What a user should know of a model before a run with it."""
    model = hf(
        0, 0, source=source, revision=revision, base=base, parts=parts, trainable=trainable, peft=peft,
        checkpointing=checkpointing,
    )  # fmt: skip
    learning = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    values = sum(value.numel() for _, value in learning)
    sent = sum(value.nbytes for _, value in learning)
    whole = sum(value.nbytes for value in (*model.parameters(), *model.buffers()))
    names = [name.removeprefix(model.published_prefix) for name, _ in learning]
    layers = sorted({name.rpartition(".lora_")[0] or name for name in names})
    tokens, saved = _dry_step(model)
    return {
        "model": {
            "source": source + (f" at {revision}" if revision else ""),
            "family": str(model.body.config.model_type),
            "class": type(model.body).__name__,
            "values": f"{sum(value.numel() for value in model.parameters()) - _added(model):,}",
            "licence": _licence(source, revision),
        },
        "parts": {
            name: f"{_size(model, model.part(name)):,} values, {model.part(name).removeprefix(model.published_prefix)}"
            for name in ("language", "vision")
        }
        | {"connector": f"{_connector(model):,} values"},
        "learning": {
            "kind": f"{trainable} in {', '.join(parts)}",
            "values": f"{values:,}",
            "layers": f"{len(layers)}: {', '.join(layers[:3])}{', …' if len(layers) > 3 else ''}",
            "sent per round and client": f"{_bytes(sent)} up and as many down",
        },
        "memory": {
            "weights": f"{_bytes(whole)} in {base}, once per process however many clients there are",
            "gradients and Adam's moments": _bytes(3 * sent),
            "activations of one example": f"{_bytes(saved)} ({tokens} tokens, a picture of {SIDE} x {SIDE} pixels)",
        },
        "libraries": {
            what: "installed" if find_spec(name) else f"{name} is missing: install confed with the extra {extra!r}"
            for what, (name, extra) in OPTIONAL.items()
        },
    }  # fmt: skip


def _dry_step(model: HuggingFaceVLM) -> tuple[int, int]:
    """Tokens of one example, and bytes that the forward pass keeps for the backward pass beside weights."""
    text, mask = model.tokenizer([QUESTION])
    answers = model.tokenizer.answers([ANSWER])
    picture = torch.full((1, 3, SIDE, SIDE), 128, dtype=torch.uint8)
    weights = {value.untyped_storage().data_ptr() for value in (*model.parameters(), *model.buffers())}
    bytes_of: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage()
        if place.data_ptr() not in weights:
            bytes_of[place.data_ptr()] = place.nbytes()
        return tensor

    state = model.prefix({"image": picture, "text": text, "text_mask": mask, "answer_tokens": answers})
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = model.suffix(state).logits.float()
        loss = functional.cross_entropy(logits.transpose(1, 2), answers[:, 1:], ignore_index=0)
    loss.backward()
    model.zero_grad(set_to_none=True)
    return state.ids.shape[1] + answers.shape[1] - 1, sum(bytes_of.values())


def _size(model: HuggingFaceVLM, part: str) -> int:
    added = _added(model, part)
    return sum(value.numel() for value in model.get_submodule(part).parameters()) - added


def _connector(model: HuggingFaceVLM) -> int:
    """Values between picture encoder and language part, an output layer of its own left out."""
    others = tuple(f"{model.part(name)}." for name in ("language", "vision"))
    return sum(
        value.numel()
        for name, value in model.named_parameters()
        if not name.startswith((*others, "prompts.")) and not model.is_head(name) and ".lora_" not in name
    )


def _licence(source: str, revision: str) -> str:
    """The licence that the model's card names."""
    if (folder := Path(source).expanduser()).is_dir():
        file = folder / "README.md"
    elif (name := hub_name(source)) is not None:
        from transformers.utils.hub import cached_file

        options: dict[str, Any] = {"revision": revision} if revision else {}
        file = Path(cached_file(name, "README.md", _raise_exceptions_for_missing_entries=False, **options) or "")
    else:
        return "that of confed"
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    match = re.search(r"^license:\s*(.+?)\s*$", text.partition("\n---")[0], re.MULTILINE)
    return match[1] if match else "not stated in its files: see where the model comes from"


def _added(model: Any, part: str = "") -> int:
    added = ("prompts.*", "*.lora_*", "*.ia3_l*", *(f"*.{name}.*" for name in model.adapters.names))
    parameters = [
        value for name, value in model.named_parameters() if name.startswith(part) and matches_any(name, added)
    ]
    return sum(value.numel() for value in parameters)


def _bytes(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"

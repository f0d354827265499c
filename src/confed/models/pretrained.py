"""Weights with the words and answers that they were trained with, in one safetensors file."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = ["MINI_WEIGHTS", "describe", "load_into", "mini_words", "save"]

MINI_WEIGHTS = Path(__file__).parent / "weights" / "vilt_mini.safetensors"
_GROWING = ("word_embeddings.weight", "text_embeddings.position_embeddings.weight")


def save(model: nn.Module, file: Path, *, words: Sequence[str], answers: Sequence[str], **facts: Any) -> None:
    """Writes a model's tensors and, as metadata, its words, its answers and further JSON facts.

    The file appears under its name only when it is complete.
    """
    from safetensors.torch import save_file

    metadata = {"words": list(words), "answers": list(answers), **facts}
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(file.name + ".part")
    tensors = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, unfinished, {key: json.dumps(value) for key, value in metadata.items()})
    unfinished.chmod(0o644)  # the library creates files for their owner alone
    unfinished.replace(file)


def describe(file: Path = MINI_WEIGHTS) -> dict[str, Any]:
    """The metadata of a file that :func:`save` wrote: ``words``, ``answers`` and what pre-training noted.

    Raises:
        ValueError: the file is missing.
    """
    from safetensors import safe_open

    if not file.is_file():
        raise ValueError(f"expected a weights file at {file}, found none")
    with safe_open(file, framework="pt") as content:
        return {key: json.loads(value) for key, value in (content.metadata() or {}).items()}


def mini_words() -> tuple[str, ...]:
    """The words that the packaged mini model was pre-trained with; empty if the package has no weights."""
    return tuple(describe()["words"]) if MINI_WEIGHTS.is_file() else ()


def load_into(model: nn.Module, file: Path, answers: Sequence[str] | None) -> None:
    """Copies saved values into a model.

    Word and text-position embeddings may have more rows than the file: the additional rows keep their fresh
    values. The head is copied only if ``answers`` equals the saved answers, in order.

    Raises:
        ValueError: the file is missing, or a tensor does not fit (names it, with both shapes).
    """
    from safetensors.torch import load_file

    with_head = answers is not None and list(answers) == describe(file)["answers"]
    saved: Mapping[str, torch.Tensor] = load_file(file)
    state = model.state_dict()
    with torch.no_grad():
        for name, value in saved.items():
            if name.startswith("classifier.") and not with_head:
                continue
            target = state.get(name)
            if target is None:
                raise ValueError(f"the weights {file.name} have a tensor {name!r} that the model lacks")
            if name.endswith(_GROWING) and target.ndim == value.ndim:
                rows = min(len(value), len(target)) if "position" in name else len(value)
                if len(target) < rows:
                    raise ValueError(
                        f"vocab_size must be at least {rows} for the weights {file.name}, got {len(target)}"
                    )
                target[:rows].copy_(value[:rows])
                continue
            if target.shape != value.shape:
                raise ValueError(
                    f"{name} must have the shape {tuple(value.shape)}, the model's is {tuple(target.shape)}"
                )
            target.copy_(value)

"""Pretrained weights with their words and answers, in one safetensors file or in a folder of ``transformers``.

Also what a backbone tells :mod:`confed.prepare.pretraining` about its inside, so that one engine makes every mini
model.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from confed.federation.protocols import Batch

__all__ = [
    "FACTS",
    "MINI_WEIGHTS",
    "Pretrainable",
    "States",
    "describe",
    "load_into",
    "mini_words",
    "packaged",
    "save",
    "weights_file",
]

WEIGHTS = Path(__file__).parent / "weights"
MINI_WEIGHTS = WEIGHTS / "vilt_mini.safetensors"
FACTS = "pretraining.json"
"""File of a folder of weights that says how they were made."""
_GROWING = ("word_embeddings.weight", "position_embeddings.weight")
"""Endings of the names of tensors with one row per token id or text position; pictures' positions are no layers."""


class States(NamedTuple):
    """What a model says about a batch in pre-training; what it does not have is None.

    Attributes:
        loss_logits: scores of the answers or classes, shape (B, C), for a cross-entropy with ``label``.
        answer_loss: of a generative model instead, the loss of the right answer's tokens, a scalar.
        early: patches after the first visual block, row by row and without class token, shape (B, P, d).
        late: patches after the second visual block, shape (B, P, d).
        asked: the question's tokens after they have seen the picture, shape (B, L, d).
        words: the word embeddings, shape (vocabulary, d).
    """

    loss_logits: Tensor | None = None
    answer_loss: Tensor | None = None
    early: Tensor | None = None
    late: Tensor | None = None
    asked: Tensor | None = None
    words: Tensor | None = None


@runtime_checkable
class Pretrainable(Protocol):
    """A backbone that :func:`confed.prepare.pretraining.pretrain` can make from nothing."""

    def pretraining_states(self, batch: Batch) -> States:
        """The model's inside on a batch, in training mode."""
        ...


def packaged(model: str) -> bool:
    """Whether the package has weights of this mini model."""
    return (WEIGHTS / f"{model}.safetensors").is_file() or (WEIGHTS / model / FACTS).is_file()


def weights_file(model: str, pretrained: bool | Path | str = True) -> Path:
    """Where a model's weights lie: the packaged file or folder for True, else the given one.

    Raises:
        ValueError: the package has no weights of this model.
    """
    if not isinstance(pretrained, bool):
        return Path(pretrained)
    if not packaged(model):
        raise ValueError(
            f"{model} comes without weights: make them with `confed pretrain {model} --out FILE` and give "
            "pretrained=FILE, or give pretrained=false"
        )
    folder = WEIGHTS / model
    return folder if folder.is_dir() else WEIGHTS / f"{model}.safetensors"


def save(model: nn.Module, file: Path, *, words: Sequence[str], answers: Sequence[str], **facts: Any) -> None:
    """Writes a model's tensors and, as metadata, its words, its answers and further JSON facts.

    The file appears under its name only when it is complete.
    """
    from safetensors.torch import save_file

    metadata = {"words": list(words), "answers": list(answers), **facts}
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(file.name + ".part")
    # Copies, because the format refuses tensors that share memory, as tied embeddings do.
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, unfinished, {key: json.dumps(value) for key, value in metadata.items()})
    unfinished.chmod(0o644)  # the library creates files for their owner alone
    unfinished.replace(file)


def describe(file: Path = MINI_WEIGHTS) -> dict[str, Any]:
    """The metadata of a file that :func:`save` wrote: ``words``, ``answers`` and what pre-training noted.

    Of a folder the same from its file :data:`FACTS`.

    Raises:
        ValueError: the file is missing.
    """
    from safetensors import SafetensorError, safe_open

    if (file / FACTS).is_file():
        return json.loads((file / FACTS).read_text(encoding="utf-8"))
    if not file.is_file():
        raise ValueError(f"expected a weights file at {file}, found none")
    try:
        with safe_open(file, framework="pt") as content:
            found = {key: json.loads(value) for key, value in (content.metadata() or {}).items()}
    except (SafetensorError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no weights file that `confed pretrain` wrote: {error}") from error
    if not {"words", "answers"} <= found.keys():
        raise ValueError(f"{file} is no weights file that `confed pretrain` wrote: it lacks its words and answers")
    return found


def mini_words(model: str = "vilt_mini") -> tuple[str, ...]:
    """The words that a packaged mini model was pre-trained with; empty if the package has no weights of it.

    Args:
        model: its name; most minis start from ``vilt_mini`` and share its words.
    """
    return tuple(describe(weights_file(model))["words"]) if packaged(model) else ()


def load_into(
    model: nn.Module,
    file: Path,
    answers: Sequence[str] | None,
    *,
    head: str | None = "classifier.",
    growing: Sequence[str] = (),
) -> None:
    """Copies saved values into a model.

    Tensors with one row per token or text position may have more rows than the file: the additional rows keep
    their fresh values. The head is copied only if ``answers`` equals the saved answers, in order.

    Args:
        model: what to fill; it may have tensors that the file lacks.
        file: written by :func:`save`.
        answers: the model's answers, None if only their number is known.
        head: beginning of the names of the head's tensors; None if it scores tokens, whatever the answers.
        growing: further endings of names of tensors with one row per token.

    Raises:
        ValueError: the file is missing, or tensors do not fit (names the first few, with both shapes); then nothing was
            copied.
    """
    from safetensors.torch import load_file

    noted = describe(file)["answers"]
    with_head = answers is not None and list(answers) == noted
    saved: Mapping[str, torch.Tensor] = load_file(file)
    state = model.state_dict()
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    faults: list[str] = []
    for name, value in saved.items():
        if head is not None and name.startswith(head) and not with_head:
            continue
        target = state.get(name)
        if target is None:
            raise ValueError(f"the weights {file.name} have a tensor {name!r} that the model lacks")
        if name.endswith((*_GROWING, *growing)) and target.ndim == value.ndim:
            rows = min(len(value), len(target)) if "position" in name else len(value)
            if len(target) < rows:
                raise ValueError(f"vocab_size must be at least {rows} for the weights {file.name}, got {len(target)}")
            copies.append((target[:rows], value[:rows]))
        elif target.shape != value.shape:
            faults.append(f"{name} must have the shape {tuple(value.shape)}, the model's is {tuple(target.shape)}")
        else:
            copies.append((target, value))
    if faults:
        more = f" (and {len(faults) - 3} more)" if len(faults) > 3 else ""
        raise ValueError(f"the weights {file.name} do not fit: {'; '.join(faults[:3])}{more}")
    with torch.no_grad():
        for target, value in copies:
            target.copy_(value)

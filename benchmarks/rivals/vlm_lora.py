"""W4: LoRA of a generative vision-language model with small random weights, in plain ``transformers`` and ``peft``.

Inputs are made beforehand, when the work is prepared; confed makes its own from the same pictures and texts.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, f"{Path(__file__).parents[1]}")

SIZE, RANK = "256m_tiny", 8


class LoRA(nn.Module):
    """The model in a folder with fresh adapters; the loss is that of ``transformers``."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForImageTextToText

        layers = json.loads((folder / "layers.json").read_text(encoding="utf-8"))
        body: Any = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32)
        body.config.use_cache = False
        self.network = get_peft_model(body, LoraConfig(r=RANK, lora_alpha=1, target_modules=layers))

    def loss(self, **batch: Tensor) -> Tensor:
        """A batch's loss."""
        return self.network(**batch).loss


def confed_name(name: str) -> str:
    """Name of an adapter's tensor in confed's model."""
    return name.replace("network.base_model.model.", "body.", 1)


def plain_name(name: str) -> str:
    """Name of an adapter's tensor here."""
    return name.replace("body.", "network.base_model.model.", 1)


def _model_and_table(folder: Path, count: int) -> tuple[Any, Any]:
    from vlm import SIZES, build, examples

    model = build(folder / "model", "fp32")
    return model, examples(model, SIZES[SIZE], count)


def write_examples(folder: Path, shape: tuple[int, int], rng: torch.Generator) -> dict[str, Tensor]:
    """Writes the model, and makes the inputs of all examples, (clients, examples, ...)."""
    from vlm import SIZES, adapted_layers, inputs, write_model

    del rng  # pictures are drawn with a seed of their own
    write_model(folder / "model", SIZES[SIZE])
    model, table = _model_and_table(folder, shape[0] * shape[1])
    (folder / "layers.json").write_text(json.dumps(adapted_layers(model)), encoding="utf-8")
    made = inputs(model, table.batch(torch.arange(len(table))))
    return {name: values.reshape(*shape, *values.shape[1:]) for name, values in made.items()}


def confed_parts(work: Any) -> tuple[Any, Any, list[Any]]:
    """Model with the work's initial adapters, task and tables of confed."""
    from confed.tasks.generation import Generation
    from networks import tensors
    from vlm import ANSWERS

    size = work.size
    model, table = _model_and_table(work.folder, size.clients * size.examples)
    adapters = {confed_name(name): values for name, values in tensors(work.initial).items() if work.learns(name)}
    assert not model.load_state_dict(adapters, strict=False).unexpected_keys
    task = Generation(20).choosing(model.tokenizer.answers(ANSWERS))
    return model, task, [table.take(rows) for rows in torch.arange(len(table)).split(size.examples)]

"""Export of models by name with their LoRA or IA3 merged into the weights: folders that plain ``transformers`` reads.

Hu et al., "LoRA: Low-rank adaptation of large language models", ICLR 2022, section 4.1: W_0 + s B A, s = alpha / r, has
the shape of W_0, so that a merged model costs nothing more at inference. Where rounds of FLoRA or FedEx-LoRA added a
matrix D beside the factors, what is merged is W_0 + s (D + B A), computed in fp32 and rounded once to the type of W_0.
"""

import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from confed.federation.families.lora import added_weight
from confed.federation.file_names import file_name
from confed.inference.export import chat_code, model_options
from confed.inference.finished_run import FinishedRun
from confed.models.hf.model import HuggingFaceVLM
from confed.models.pretrained import without_progress_bars
from confed.results.folder import RunFolder

_ROUNDINGS = 3
"""How many other roundings of the merged weights say how far rounding alone moves scores."""

_FACTOR = 4.0
"""Largest difference of the scores by merging, in units of the largest one that other roundings make."""


def export_merged(folder: Path, target: Path, client: str | None = None) -> dict[str, str]:
    """Writes a finished run's model by name as one folder of ``transformers``, with its processor and a model card.

    What was written is read again by ``transformers`` alone, and its scores of an example must be those of the trained
    model, but for rounding: how much that is, other roundings of the merged weights to the same type show. A base of
    ``bf16`` is written in bf16.
    """
    run = FinishedRun(folder)
    if target.exists():
        raise ValueError(f"{target} exists already; name a folder that does not")
    run.check(client)
    run.load()
    trained = run.model(client)
    model = _mergeable(trained.model, folder)
    expected = _scores(model)
    body = _merged(model)
    unfinished = target.with_name(target.name + ".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    body.config.use_cache = True  # off while training, where nothing is written
    with without_progress_bars():
        body.save_pretrained(unfinished)
    model.tokenizer.save(unfinished)
    (unfinished / "README.md").write_text(_card(run, client, trained.image_size), encoding="utf-8")
    (unfinished / "recipe.toml").write_bytes(RunFolder(folder).recipe.read_bytes())
    _check(unfinished, model, expected)
    unfinished.replace(target)
    return {"global" if client is None else f"clients/{file_name(client)}": str(target)}


def _mergeable(model: nn.Module, folder: Path) -> HuggingFaceVLM:
    if not isinstance(model, HuggingFaceVLM):
        raise ValueError(f"{folder}: only models by name (model.name = 'hf') can be merged; export without --merged")
    if model.is_loaded_in_4bit or model.is_loaded_in_8bit:
        base = "nf4" if model.is_loaded_in_4bit else "int8"
        raise ValueError(
            f"{folder}: a quantised base (model.base = {base!r}) would round what is merged into it; export without "
            "--merged, and merge the adapter into the base in bf16 with peft"
        )
    if model.adapters.names:
        raise ValueError(
            f"{folder}: adapters behind blocks (model.trainable = 'adapters') are layers of their own, which no "
            "weights of the model can hold; export without --merged"
        )
    if model.learned_tokens is not None:
        raise ValueError(
            f"{folder}: learned tokens before prompts (model.trainable = 'prompt') are no weights of the model; export "
            "without --merged"
        )
    return model


def _merged(model: HuggingFaceVLM, rng: torch.Generator | None = None) -> Any:
    """A copy of the library's model with merged weights, rounded to the nearest value or, by ``rng``, to a near one."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    body = deepcopy(model.body)
    layers = [(name, layer) for name, layer in body.named_modules() if isinstance(layer, BaseTunerLayer)]
    for name, layer in layers:
        parent, _, child = name.rpartition(".")
        merging: Any = layer
        base = merging.get_base_layer()
        dtype = base.weight.dtype
        merging.float().merge(safe_merge=True)
        if (added := added_weight(merging)) is not None:
            base.weight.data += added
        if rng is not None:
            noise = torch.rand(base.weight.shape, generator=rng, dtype=torch.float64).to(base.weight.device) - 0.5
            base.weight.data = base.weight.double() * (1 + torch.finfo(dtype).eps * noise)
        setattr(body.get_submodule(parent), child, base.to(dtype))
    return body


def _scores(model: HuggingFaceVLM) -> Tensor:
    """Scores of an answer's tokens."""
    text, mask = model.tokenizer(["What is in the picture?"])
    picture = torch.arange(3 * 64 * 64).remainder(251).to(torch.uint8).view(1, 3, 64, 64)
    batch = {
        "image": picture, "text": text, "text_mask": mask, "answer_tokens": model.tokenizer.answers(["yes"]),
    }  # fmt: skip
    device = next(model.parameters()).device
    with torch.no_grad():
        return model.eval()({key: value.to(device) for key, value in batch.items()}).logits.float().cpu()


def _check(folder: Path, model: HuggingFaceVLM, expected: Tensor) -> None:
    """Check that what was written gives the trained model's scores, as far as rounding lets it."""
    from transformers import AutoModelForImageTextToText

    with without_progress_bars():
        body = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=model.body.dtype, trust_remote_code=False, use_safetensors=True
        )
    written = _plain_scores(body, model)
    gap = (written - expected).abs().max().item()
    rounding = expected.abs().max().item() * torch.finfo(model.body.dtype).eps / 2  # of the scores themselves
    for seed in range(_ROUNDINGS):
        other = _plain_scores(_merged(model, torch.Generator().manual_seed(seed)), model)
        rounding = max(rounding, (other - written).abs().max().item())
    if not gap <= _FACTOR * rounding:
        shutil.rmtree(folder)
        raise ValueError(
            f"the merged model gives other scores than the trained one: they differ by up to {gap:.2g}, and rounding "
            f"its weights otherwise by {rounding:.2g}; the method has parts beside the model's weights: export without "
            "--merged"
        )


def _plain_scores(body: Any, model: HuggingFaceVLM) -> Tensor:
    """Scores of the library's model alone."""
    plain = HuggingFaceVLM(body, model.tokenizer)
    plain.mixed = model.mixed
    return _scores(plain)


def _card(run: FinishedRun, client: str | None, size: int) -> str:
    """The model card."""
    summary, section = run.summary, run.recipe.sections["model"]
    source, revision = str(section.get("source", "")), str(section.get("revision", "") or "")
    who = "What the clients share" if client is None else f"The model of the client {client!r}"
    options = model_options({"base": section.get("base", "fp32")})
    load = f'model = AutoModelForImageTextToText.from_pretrained("DIR"{options})'
    code = chat_code(run, load, "DIR", size)
    head = f"---\nlibrary_name: transformers\npipeline_tag: image-text-to-text\nbase_model: {source}\n---\n\n"
    return (
        f"{head}# {who}: a {summary.label} run\n\n"
        f"Recipe {summary.recipe}, seed {summary.seed}, {summary.rounds} rounds of federated learning on "
        f"`{source}`{f', revision `{revision}`' if revision else ''}, whose licence holds for these weights too. "
        f"What was trained (model.trainable = {section.get('trainable', 'lora')!r}) is merged into the weights.\n\n"
        f"{code}"
    )

"""Quantised bases of vision-language models: what is quantised, how well, learning, resuming, exporting, faults."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from confed.engines.perform import Workspace
from confed.federation.params import named_tensors
from confed.inference.export import export
from confed.models import create_model
from confed.recipes.recipe import load_recipe
from confed.results.folder import RunFolder
from confed.runs.run import run
from confed.system.events import RunProgress
from refusals import refuses
from vlm_families import HERE, tiny_vlm, vlm_batch

bitsandbytes: Any = pytest.importorskip("bitsandbytes")

LEVELS = torch.tensor(
    [
        -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0, 0.0795803, 0.1609302,
        0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
    ]
)  # fmt: skip
"""The 16 values of 4-bit NormalFloat (QLoRA, appendix E)."""


def quantised_layers(model: nn.Module) -> list[str]:
    kinds = (bitsandbytes.nn.Linear4bit, bitsandbytes.nn.Linear8bitLt)
    return [name for name, module in model.named_modules() if isinstance(module, kinds)]


@pytest.mark.parametrize("base", ["int8", "nf4"])
@pytest.mark.parametrize("family", HERE)
def test_linear_layers_of_the_language_part_only_are_quantised(family: str, base: str) -> None:
    plain, model = tiny_vlm(family, base="bf16", trainable="ia3"), tiny_vlm(family, base=base, trainable="ia3")
    language = f"{plain.part('language')}."
    wanted = [name for name, module in plain.named_modules() if type(module) is nn.Linear and name.startswith(language)]
    assert wanted
    assert sorted(quantised_layers(model)) == sorted(wanted)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    batch = vlm_batch(model)
    first, again, exact = (network(batch).logits.float() for network in (model, model, plain))
    assert torch.equal(first, again)
    error = (first - exact).norm() / exact.norm()
    assert 0 < error < {"int8": 0.05, "nf4": 0.4}[base]


def test_four_bit_weights_are_the_nearest_levels_of_each_block() -> None:
    plain, model = tiny_vlm("llava", base="fp32"), tiny_vlm("llava", base="nf4")
    name = quantised_layers(model)[0]
    weight = plain.get_submodule(name).weight.detach().to(torch.bfloat16).float().flatten()  # type: ignore[union-attr]
    layer: Any = model.get_submodule(name).weight
    found = bitsandbytes.functional.dequantize_4bit(layer.data, layer.quant_state).float().flatten()
    blocks = weight.split(64)
    scales = torch.stack([block.abs().max() for block in blocks])
    nearest = [
        LEVELS[(block[:, None] / scale - LEVELS).abs().argmin(1)] * scale
        for block, scale in zip(blocks, scales, strict=True)
    ]
    # Scales are quantised to 8 bits themselves, and weights come out in bf16.
    torch.testing.assert_close(found, torch.cat(nearest), rtol=0.02, atol=0.02 * float(scales.max()))


@pytest.mark.parametrize("base", ["int8", "nf4"])
@pytest.mark.parametrize("trainable", ["lora", "ia3", "adapters"])
def test_what_learns_gets_gradients_and_moves_the_loss(base: str, trainable: str) -> None:
    model = tiny_vlm("idefics3", base=base, trainable=trainable)
    batch = vlm_batch(model)
    learning = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.AdamW(learning, lr=5e-2), []
    for _ in range(12):
        scores = model(batch).logits.float()
        loss = nn.functional.cross_entropy(scores.transpose(1, 2), batch["answer_tokens"][:, 1:], ignore_index=0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(p.grad is not None for p in learning)
    assert losses[-1] < losses[0] - 0.02


@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_scales_are_frozen_tensors_that_parties_compare(base: str) -> None:
    model = tiny_vlm("gemma3", base=base)
    scales = {name for name in named_tensors(model) if name.endswith(("absmax", "SCB"))}
    assert scales
    assert scales <= model.frozen
    workspace = Workspace(model)
    assert scales <= workspace.tensors.keys()
    assert not scales & workspace.initial.keys()
    assert all(".lora_" in name for name in workspace.initial)


def test_a_second_workspace_shares_four_bit_weights() -> None:
    workspace = Workspace(tiny_vlm("llava", base="nf4"))
    twin = workspace.session("a", 0)
    name = quantised_layers(workspace.model)[0]
    one, other = (space.model.get_submodule(name).weight for space in (workspace, twin))
    assert one is other


SMALL = [
    "model.name=hf", "model.source=tiny:llava", "model.base=nf4", "model.trainable=lora", "task.name=generation",
    "run.rounds=2", "run.workers=1",
    "local.epochs=1", "local.lr=1e-2", "data.train=8", "data.validation=1", "data.test=1", "run.gallery=0",
    "run.evaluate_every=0", "data.preset=quantity", "data.clients=2", "data.unseen=[]",
]  # fmt: skip


def test_a_run_resumes_to_the_bit_and_exports_adapters(tmp_path: Path) -> None:
    recipe = load_recipe("fedvqa_scenes", SMALL).method("fedavg")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(recipe, whole)

    def stop(event: object) -> None:
        if isinstance(event, RunProgress) and event.round == 1 and "loss" in event.text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(recipe, parts, progress=stop)
    run(recipe, parts, resume=True)
    for file in ("metrics", "predictions"):
        one, other = (getattr(RunFolder(folder), file).read_bytes() for folder in (whole, parts))
        assert one == other
    assert "global" in export(whole, tmp_path / "out")


FAULTS = {
    "all": ({"base": "nf4", "trainable": "all"}, "model.base = 'nf4' holds weights that cannot learn; set"),
    "top": ({"base": "int8", "trainable": "top"}, "model.base = 'int8' holds weights that cannot learn; set"),
    "bias": (
        {"base": "nf4", "trainable": "bias"},
        "model.trainable finds nothing to learn in model.parts = ['language']",
    ),
}


@pytest.mark.parametrize(("options", "message"), FAULTS.values(), ids=FAULTS)
def test_options_that_cannot_be_quantised_are_named(options: dict[str, Any], message: str) -> None:
    refuses(re.escape(message), create_model, "hf", answers=3, vocab_size=0, source="tiny:idefics3", **options)


def test_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    refuses("extra 'quantised'", tiny_vlm, "llava", base="nf4")

"""Bases over several devices: the numbers of one device, where everything is, and what is refused."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from confed.engines.perform import Workspace
from confed.models.hf import model as hf_model
from confed.models.hf.model import HuggingFaceVLM, gpus, spread
from confed.recipes.recipe import load_recipe
from confed.runs.build import check_device
from refusals import refuses
from vlm_families import HERE, tiny_vlm, vlm_batch

pytest.importorskip("accelerate")

CPUS = (torch.device("cpu"), torch.device("cpu", 0))
"""Two names of one device, which the library takes for two."""


def built(family: str = "idefics3", **options: Any) -> HuggingFaceVLM:
    model = tiny_vlm(family, **options)
    for name, parameter in model.named_parameters():  # B of LoRA begins at 0
        if parameter.requires_grad:
            generator = torch.Generator().manual_seed(len(name))
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def room(model: HuggingFaceVLM, devices: Sequence[torch.device], share: float = 1.0) -> list[tuple[torch.device, int]]:
    """Devices with room for a share of the base; of the first the library leaves as much free as a block takes."""
    size = sum(tensor.nbytes for tensor in model.body.state_dict().values())
    return [(device, int(share * size)) for device in devices]


def passes(model: HuggingFaceVLM, device: torch.device) -> dict[str, Tensor]:
    """Scores and gradients of a training batch, and likelihoods of candidates."""
    batch = {name: tensor.to(device) for name, tensor in vlm_batch(model).items()}
    output = model(batch)
    output.logits.float().square().mean().backward()
    found = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    found |= {"scores": output.logits.detach().cpu(), "features": output.features.detach().cpu()}
    del batch["answer_tokens"]
    model.eval()
    model._candidates = model.tokenizer.answers(["red", "no", "dark red"])
    with torch.no_grad():
        return found | {"ranked": model(batch).logits.cpu()}


def _noted(to: Callable[..., Tensor], went: list[torch.device]) -> Callable[..., Tensor]:
    def noting(tensor: Tensor, *where: Any, **named: Any) -> Tensor:
        went.extend(device for device in (*where, *named.values()) if isinstance(device, torch.device))
        return to(tensor, *where, **named)

    return noting


@pytest.mark.parametrize("family", HERE)
def test_a_spread_base_has_the_numbers_of_one_device(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = built(family), built(family, device_map="auto")
    monkeypatch.setattr(hf_model, "gpus", lambda device: room(model, CPUS))
    workspace = Workspace(model, "cuda")
    went: list[torch.device] = []
    monkeypatch.setattr(torch.Tensor, "to", _noted(torch.Tensor.to, went))
    several = passes(model, CPUS[0])
    assert set(went) >= set(CPUS)
    monkeypatch.undo()
    one = passes(plain, CPUS[0])
    assert len(one) > 4
    assert one.keys() == several.keys()
    for name in ("scores", "features", "ranked"):
        assert torch.equal(one[name], several[name]), name
    for name, value in one.items():  # gradients of one input of several layers are added in another order
        torch.testing.assert_close(value, several[name], rtol=1e-4, atol=1e-9)
    assert workspace.frozen == Workspace(plain).frozen


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", HERE)
def test_layers_on_a_gpu_and_on_the_cpu_work_together(family: str) -> None:
    devices = torch.device("cpu"), torch.device("cuda", 0)
    plain, model = built(family), built(family, device_map="auto")
    main = model._main = spread(model, model.body, room(model, devices))
    assert {p.device for p in model.body.parameters()} == set(devices)
    assert {p.device for p in model.parameters() if p.requires_grad} == {main}
    one, several = passes(plain, devices[0]), passes(model, devices[0])
    for name, value in one.items():
        torch.testing.assert_close(value, several[name], rtol=2e-3, atol=2e-4)


def test_factors_of_lora_go_to_where_their_input_is() -> None:
    model = built()
    spread(model, model.body, room(model, CPUS))
    factor: Any = next(module for name, module in model.named_modules() if name.endswith("lora_A.default"))
    given = torch.zeros(1, factor.in_features)
    factor.weight = nn.Parameter(factor.weight.detach().to("meta"))
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):  # it is asked to move
        factor(given)


def test_a_base_that_does_not_fit_is_refused() -> None:
    model = built()
    refuses(r"the base has .* GiB and does not fit on 2 devices", spread, model, model.body, room(model, CPUS, 0.2))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"device_map": "balanced"}, "must be one of one, auto"),
        ({"device_map": "auto", "base": "nf4"}, "needs model.base 'bf16' or 'fp32', got 'nf4'"),
        ({"device_map": "auto", "trainable": "all"}, "model.trainable must be 'lora'"),
    ],
)
def test_a_base_that_cannot_be_spread_is_refused(options: dict[str, Any], why: str) -> None:
    refuses(why, built, **options)


def test_a_method_that_adds_parameters_to_the_base_is_refused() -> None:
    from confed.federation.families.lora import add_matrices

    model = built(device_map="auto")
    Workspace(model)
    add_matrices(model)
    refuses(r"'.*lora_added' is none of them in this HuggingFaceVLM; set", Workspace, model)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (("run.workers=1",), r"needs run.device = 'cuda' and at least two of them, got run.device = 'cpu' and 0"),
        (("run.workers=2", "run.device=auto"), r"needs run.engine = 'local' and run.workers = 1, got .*= 2"),
        (("run.engine=ray", "run.workers=1"), r"got run.engine = 'ray', run.workers = 1"),
    ],
)
def test_a_run_without_several_gpus_is_refused(settings: tuple[str, ...], why: str) -> None:
    model = ("model.name=hf", "model.source=tiny:idefics3", "model.device_map=auto", "task.name=generation")
    refuses(why, check_device, load_recipe("fedvqa_scenes", ["study.methods=[]", *model, *settings]))


def test_a_single_device_has_no_others() -> None:
    assert gpus("cpu") == gpus("cuda:1") == []

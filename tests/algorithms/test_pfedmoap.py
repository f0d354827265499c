"""pFedMoAP: the gate against torch's attention, which prompts clients are sent, what stays, refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from confed.algorithms.pfedmoap import POOL, THERE, VECTORS, Gate, PFedMoAP
from confed.algorithms.promptfl import PromptFL
from confed.federation.families.prompts import CONTEXT
from confed.federation.update_privacy import UpdatePrivacy
from confed.recipes.recipe import load_recipe
from confed.runs.run import run as run_recipe
from confed.testing.toy import toy_setup
from confed.testing.trial import run

RNG = torch.Generator().manual_seed(4)
X = torch.randn(4, 6, generator=RNG)


def test_the_gate_is_attention_of_the_library() -> None:
    """With its usual scaling; keys and values are the experts of one class, the query is the picture."""
    gate: Any = Gate(12, 8, 4, 2**-0.5, RNG)  # every feature is read: 12 // 8 is 1
    library = nn.MultiheadAttention(12, 4, batch_first=True)
    library.load_state_dict(
        {
            "in_proj_weight": torch.cat([gate.query.weight, gate.key.weight, gate.value.weight]),
            "in_proj_bias": torch.cat([gate.query.bias, gate.key.bias, gate.value.bias]),
            "out_proj.weight": gate.output.weight,
            "out_proj.bias": gate.output.bias,
        }
    )
    gate._scaling = 3**-0.5
    pictures, experts = torch.randn(5, 12, generator=RNG), torch.randn(7, 3, 12, generator=RNG)
    found = gate(pictures, experts)
    for c in range(7):
        each = experts[c].expand(5, -1, -1)
        mixed = library(pictures.unsqueeze(1), each, each)[0].squeeze(1)
        torch.testing.assert_close(found[:, c], (pictures * mixed).sum(1), rtol=1e-4, atol=1e-5)


def test_wide_features_are_read_by_a_stride() -> None:
    gate: Any = Gate(12, 4, 8, 10.0, RNG)
    assert gate.query.weight.shape == (4, 4)
    pictures, experts = torch.randn(2, 12, generator=RNG), torch.randn(3, 2, 12, generator=RNG)
    before = gate(pictures, experts)
    pictures[:, 1::3], experts[..., 2::3] = 9.0, -9.0
    assert torch.equal(gate(pictures, experts), before)


def mixture(lam: float = 0.5) -> tuple[Any, Any]:
    setup = toy_setup(PFedMoAP(experts=3, lam=lam))
    model: Any = setup.model().eval()
    return model, setup.algorithm.deployed_model(model)


def test_scores_are_those_of_both_parts() -> None:
    model, deployed = mixture(lam=0.3)
    classes = torch.arange(3)
    with torch.no_grad():
        model.experts.vectors[:2] = torch.randn(2, 2, 5, generator=RNG)
        model.experts.there.fill_(2.0)
        image = model.image_features({"x": X})
        texts = [model.class_features(p, classes) for p in (model.context.vectors, *model.experts.vectors[:2])]
        wanted = 0.3 * image @ texts[0].T + model.gate(image, torch.stack(texts, 1))
        torch.testing.assert_close(deployed({"x": X}).logits, model.similarity_scores(wanted))
        offered = torch.tensor([[True, False, True]] * 4)
        some = deployed({"x": X, "offered": offered}).logits
    torch.testing.assert_close(some[:, [0, 2]], model.similarity_scores(wanted)[:, [0, 2]])


def test_without_experts_the_scores_are_those_of_the_own_prompt() -> None:
    model, deployed = mixture()
    with torch.no_grad():
        torch.testing.assert_close(deployed({"x": X}).logits, model({"x": X}).logits)


def test_texts_of_experts_are_read_once() -> None:
    model, deployed = mixture()
    model.experts.there.data.fill_(3)
    passes: list[Tensor] = []
    plain = model.class_features
    model.class_features = lambda context, classes: passes.append(context) or plain(context, classes)
    for _ in range(4):
        deployed({"x": X})
    assert len(passes) == 3 + 4


def test_clients_are_sent_the_nearest_prompts_of_others() -> None:
    outcome = run(toy_setup(PFedMoAP(experts=9), rounds=2))
    fits = [(call, reply) for _, call, reply in outcome.replies if call.action == "fit"]
    assert not any(call.message.tensors[THERE].any() for call, _ in fits[:3])
    first = {reply.client.id: reply.message.tensors[CONTEXT] for _, reply in fits[:3]}
    for call, _ in fits[3:]:
        told = call.message.tensors
        others = [prompt for name, prompt in first.items() if name != call.client.id]
        assert int(told[THERE]) == len(others) == 2
        gaps = [float((prompt - first[call.client.id]).norm()) for prompt in told[VECTORS][:2]]
        assert gaps == sorted(gaps)
        assert {p.sum().item() for p in told[VECTORS][:2]} == {p.sum().item() for p in others}
        assert not told[VECTORS][2:].any()
    assert set(outcome.servers["main"].slots[POOL]) == {"client-0", "client-1", "client-2"}


def test_the_first_round_is_promptfl_and_the_second_is_not() -> None:
    def context(method: Any, rounds: int) -> Tensor:
        return run(toy_setup(method, rounds=rounds)).servers["main"].params[CONTEXT]

    torch.testing.assert_close(context(PFedMoAP(), 1), context(PromptFL(), 1))
    assert (context(PFedMoAP(), 2) - context(PromptFL(), 2)).abs().max() > 1e-3


def test_a_dual_encoder_of_the_library_mixes_prompts(tmp_path: Path) -> None:
    told = (
        "algorithm.name=pfedmoap", "study.methods=[]", "~study.lr", "model.source=tiny:clip", "model.context=2",
        "data.shots=1", "data.classes=4", "data.test_per_class=1", "data.validation_shots=1", "run.rounds=2",
        "local.epochs=1", "run.gallery=0",
    )  # fmt: skip
    summary = run_recipe(load_recipe("prompts_scenes", told), tmp_path / "run")
    assert not summary["errors"]
    first, second = (sum(summary["bytes_down"][number].values()) for number in ("1", "2"))
    assert first == second  # zeros have the place of prompts that are not there
    assert summary["parameters"]["sent"] == 2 * 32


def test_prompts_that_others_are_sent_are_noised() -> None:
    pytest.importorskip("dp_accounting")
    noisy = PFedMoAP(update_privacy=UpdatePrivacy(clip=1e-6, noise=1.0))
    outcome = run(toy_setup(noisy, rounds=1))
    start = toy_setup(PFedMoAP()).model().get_parameter(CONTEXT).detach()
    for prompt in outcome.servers["main"].slots[POOL].values():
        assert 0 < float((prompt - start).abs().max()) < 1e-5

"""Settings, models and protections that methods refuse before anything runs, each in a line that names the fault."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

import pytest
import torch
from torch import nn

from confed.algorithms.afl import AFL
from confed.algorithms.bicsl import BiCSL
from confed.algorithms.crd import CRD
from confed.algorithms.creamfl import CreamFL
from confed.algorithms.dkd import DKD
from confed.algorithms.dpfpl import DPFPL
from confed.algorithms.fedavg import FedAvg
from confed.algorithms.feddat import FedDAT
from confed.algorithms.feddpa import FedDPA
from confed.algorithms.fedlora import FedLoRA
from confed.algorithms.fedmd import FedMD
from confed.algorithms.fedmosaic import FedMosaic
from confed.algorithms.fedp3 import FedP3
from confed.algorithms.late_fusion import LateFusionFedAvg
from confed.algorithms.modality_dropout import ModalityDropout
from confed.algorithms.modality_fill import ModalityFill
from confed.algorithms.modality_transformer import ModalityTransformer
from confed.algorithms.moon import MOON
from confed.algorithms.pfedmma import PFedMMA
from confed.algorithms.pfedmoap import PFedMoAP
from confed.algorithms.pmcmfl import PmcmFL
from confed.algorithms.promptfl import PromptFL
from confed.algorithms.sp import SP
from confed.algorithms.split_learning import SplitLearning
from confed.algorithms.tip_adapter import TipAdapter
from confed.federation.algorithm import Algorithm, Protection
from confed.federation.robust_mean import RobustMean
from confed.federation.secure_sum import SecureSum
from confed.federation.server_optimizer import ServerOptimizer
from confed.federation.update_privacy import UpdatePrivacy
from confed.models.caption_transformer import caption_transformer_tiny
from confed.privacy.cut import CutPrivacy
from confed.tasks.vqa import VQA
from confed.testing.toy import (
    ToyModalModel,
    ToyModel,
    ToyPromptModel,
    ToyTask,
    toy_contrastive_model,
    toy_contrastive_task,
    toy_model,
    toy_setup,
)
from lora_federation import LoRAToy
from refusals import refuses


def named(value: object) -> str:
    """A method's name; of everything else nothing."""
    return type(value).__name__ if isinstance(value, Algorithm) else getattr(value, "__qualname__", "")[:20]


Method = Callable[..., Algorithm]
RANKS = {"client-0": 1}
SETTINGS: list[tuple[Method, Mapping[str, Any], str]] = [
    (BiCSL, {"privacy": CutPrivacy(gradient_clip=1.0)}, r"algorithm.privacy.gradient_clip must be left out"),
    (FedDAT, {"teacher": "frozen", "head_steps": "shared"}, r"head_steps must be each or teacher where algorithm\.te"),
    (FedDAT, {"teacher": "frozen", "inference": "local"}, "algorithm.inference must be shared where"),
    (FedLoRA, {"preset": "fedex_lora", "ranks": RANKS}, r"algorithm.ranks needs one of the aggregations"),
    (FedLoRA, {"preset": "flora", "aggregation": "svd"}, r"aggregation is 'stack' in the preset 'flora', got 'svd'"),
    (FedLoRA, {"preset": "lora_fair", "ranks": RANKS}, r"algorithm.ranks needs one of .*'norm', got 'corrected'"),
    (FedLoRA, {"preset": "rolora", "share": "B"}, r"share is 'both' in the preset 'rolora'"),
    (FedLoRA, {"ranks": {"client-0": 0}}, r"algorithm.ranks.client-0 must be at least 1, got 0"),
    (FedLoRA, {"share": "A", "aggregation": "stack"}, r"algorithm.share must be 'both', got 'A'"),
    (FedLoRA, {"train": "B", "share": "A"}, r"algorithm.share must not be 'A'"),
    (FedLoRA, {"train": "alternate", "aggregation": "svd"}, r"must be 'mean' \(which is exact then\) or 'fisher'"),
    (FedLoRA, {"train": "alternate", "share": "B"}, r"with 'alternate' not 'B'"),
    (FedP3, {"pairs": "sampled", "samples": 0}, "samples must be at least 1, got 0"),
    (FedP3, {"pairs": "sorted", "space": "logit", "g": "erf"}, r'"sorted" needs .* got space "logit" and g "erf"'),
    (FedP3, {"top_n": 1}, "top_n must be at least 2"),
]
"""Values outside the range or choice that a field declares: tests/federation/test_ranges.py."""


@pytest.mark.parametrize(("method", "settings", "message"), SETTINGS, ids=named)
def test_settings_that_cannot_be_are_refused(method: Method, settings: Mapping[str, Any], message: str) -> None:
    refuses(message, method, **settings)


def _rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _prompt_model() -> nn.Module:
    return ToyPromptModel(_rng())


def _captioner() -> nn.Module:
    return caption_transformer_tiny(1, 20)


@dataclass(frozen=True)
class SoftTask(ToyTask):
    """Several answers may be right."""

    single_label: bool = False


class Headless(nn.Module):
    """A model that does not name its answer head."""


def _without_weights() -> nn.Module:
    model = toy_model()
    model.head = nn.Identity()  # type: ignore[assignment]
    return model


MODELS: list[tuple[Algorithm, Callable[[], nn.Module], Any, str]] = [
    (BiCSL(), toy_model, ToyTask(), r"BiCSL needs task.name = 'contrastive', got 'ToyTask'"),
    (CreamFL(), toy_model, ToyTask(), r"ToyModel has none of texts: set model.name to 'clip'"),
    (CreamFL(server=ServerOptimizer("momentum", lr=0.5)), _prompt_model, ToyTask(), "averages no updates"),
    (CRD(), toy_model, SoftTask(), r'negatives_from = "other_classes".* exactly one right answer.*; got SoftTask'),
    (CRD(), Headless, ToyTask(), r"'answer_head' must name the submodule.*got None in Headless"),
    (DKD(), toy_model, SoftTask(), r"DKD treats .* exactly one right answer each .*; got SoftTask"),
    (MOON(), Headless, ToyTask(), "answer_head"),
    (MOON(), _without_weights, ToyTask(), "weight matrix"),
    (DPFPL(), _prompt_model, toy_contrastive_task(), "this task's loss compares examples"),
    (DPFPL(), toy_model, ToyTask(), "learns prompts of class names"),
    (FedDAT(), toy_model, ToyTask(), r"FedDAT trains adapters, and ToyModel has none: set model\.trainable"),
    (FedDAT(adapter="other"), lambda: toy_model(adapters=True), ToyTask(), "must be one of adapter, got 'other'"),
    (FedDAT(head=("none",), head_steps="shared"), lambda: toy_model(adapters=True), ToyTask(),
     "head_steps must be each where the model has no head of its own"),
    (FedDPA(), toy_model, ToyTask(), r"FedDPA trains adapters, and ToyModel has none: set model\.trainable"),
    (FedLoRA(), lambda: ToyModel(False, _rng()), ToyTask(), r"ToyModel trains none: set model.trainable to 'lora'"),
    (FedLoRA(preset="flexlora"), lambda: LoRAToy(False, 9), ToyTask(), r"at most 8 for the aggregation 'svd'.* got 9"),
    (FedLoRA(ranks={"client-0": 3}), lambda: LoRAToy(False, 2), ToyTask(), "at most 2, which is the rank of body, got"),
    (FedMosaic(), lambda: ToyModel(False, _rng()), ToyTask(), r"ToyModel trains none: set model.trainable to 'lora'"),
    (FedMosaic(layer="stem"), lambda: LoRAToy(False, 2), ToyTask(), "a layer with LoRA, such as 'body', got 'stem'"),
    (LateFusionFedAvg(), toy_model, ToyTask(), "ToyModel"),
    (ModalityDropout(), toy_model, ToyTask(), "ToyModel"),
    (ModalityFill(), _captioner, ToyTask(), "a model that writes reads none"),
    (ModalityFill(), toy_model, ToyTask(), "ToyModel needs all of them"),
    (ModalityTransformer(), toy_model, ToyTask(), "ToyModel"),
    (PFedMMA(), lambda: ToyModel(False, _rng()), ToyTask(), r"pFedMMA trains adapters, and ToyModel has none"),
    (PmcmFL(), lambda: ToyModalModel(True, _rng()), VQA(3, objective="bce"), "exactly one right answer"),
    (PmcmFL(), toy_model, ToyTask(), "ToyModel needs all of them"),
    (PromptFL(), toy_model, ToyTask(), "learns prompts of class names, and ToyModel reads none"),
    (SplitLearning(), toy_contrastive_model, ToyTask(), "split learning needs a model with one answer head"),
    (TipAdapter(), lambda: ToyModel(False, _rng()), ToyTask(), r"ToyModel reads none: set model\.name to"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "model", "task", "message"), MODELS, ids=named)
def test_models_and_tasks_that_do_not_fit_are_refused(
    method: Algorithm, model: Callable[[], nn.Module], task: Any, message: str
) -> None:
    refuses(message, method.configure, model(), task)


@pytest.mark.parametrize(
    ("method", "model", "task"),
    [(CRD(negatives_from="others"), toy_model, SoftTask()), (SP(), toy_model, SoftTask()),
     (MOON(projection=False), Headless, ToyTask())],
    ids=named,
)  # fmt: skip
def test_other_choices_of_these_methods_fit(method: Algorithm, model: Callable[[], nn.Module], task: Any) -> None:
    assert method.configure(model(), task) == method


NOISE, MEDIAN, SUM = UpdatePrivacy(clip=1.0), RobustMean("median"), SecureSum()
WHOLE = {"update_privacy": NOISE, "robust": MEDIAN, "secure_sum": SUM}
PROTECTIONS: list[tuple[Algorithm, Mapping[str, Any], str]] = [
    (AFL(), {"robust": MEDIAN}, r"algorithm.robust must be left out for AFL"),
    (CreamFL(), {"secure_sum": SUM}, r"weighs every client's representations.*must see each alone"),
    *((FedMosaic(), {name: WHOLE[name]}, "every client is sent a mean of its own") for name in WHOLE),
    *((FedLoRA(preset="lora_fair"), {name: WHOLE[name]}, "algorithm.aggregation = .* puts the cl") for name in WHOLE),
    *((FedLoRA(preset="flora_na"), {name: WHOLE[name]}, "algorithm.aggregation = .* puts the cl") for name in WHOLE),
    *((FedLoRA(preset="hetlora"), {name: WHOLE[name]}, "algorithm.aggregation = .* puts the cl") for name in WHOLE),
    (PFedMoAP(), {"robust": MEDIAN}, "robust must be left out for pFedMoAP"),
    (PFedMoAP(), {"secure_sum": SUM}, "secure_sum must be left out for pFedMoAP: the server compares single prompts"),
    (PFedMoAP(), {"update_privacy": replace(NOISE, at="server")}, "pFedMoAP: clients are sent single"),
]


@pytest.mark.parametrize(("method", "protection", "message"), PROTECTIONS, ids=named)
def test_protections_that_cannot_hold_are_refused(
    method: Algorithm, protection: Mapping[str, Any], message: str
) -> None:
    refuses(message, toy_setup, replace(method, **protection))


@pytest.mark.parametrize("method", [FedMD(), PmcmFL(), ModalityFill("mean"), ModalityFill("token")], ids=named)
def test_methods_that_average_no_updates_have_no_protection(method: Algorithm) -> None:
    assert all(method.unsupported_reason(protection) for protection in get_args(Protection))
    sums: tuple[Protection, ...] = ("update_privacy", "robust", "secure_sum")
    assert not any(ModalityFill().unsupported_reason(protection) for protection in sums)
    assert not any(FedAvg().unsupported_reason(protection) for protection in get_args(Protection))

"""Methods of finetuning on the packaged ViLT and on a generative model of transformers, through recipes."""

from collections.abc import Sequence

import pytest
import torch

from confed.engines.local import InProcess, Simulation, simulate
from confed.federation.state import MemoryStore, ServerState
from confed.recipes.recipe import load_recipe
from confed.runs.build import prepare

SMALL = ("data.train=6", "data.validation=4", "data.test=4", "local.epochs=1", "local.batch_size=3", "run.rounds=2")
VILT = ("model.name=vilt_mini",)
HF = ("model.name=hf", "model.source=tiny:idefics3", "task.name=generation")
FEW = ("data.train=3", "data.validation=1", "data.test=1", "run.rounds=1")
ADAPTERS, LORA = "model.trainable=adapters", "model.trainable=lora"
METHODS = {
    "fisher": (LORA, "algorithm.name=fedpeft", "algorithm.aggregation=fisher", "algorithm.fisher_examples=3"),
    "feddat": (ADAPTERS, "algorithm.name=feddat", "algorithm.aggregation=fisher", "algorithm.fisher_examples=3"),
    "rolora": (LORA, "algorithm.name=fedlora", "algorithm.preset=rolora"),
    "lora_fair": (LORA, "algorithm.name=fedlora", "algorithm.preset=lora_fair"),
    "flora_na": (LORA, "algorithm.name=fedlora", "algorithm.preset=flora_na"),
    "hetlora": (LORA, "algorithm.name=fedlora", "algorithm.preset=hetlora", "algorithm.ranks={sports=2}"),
    "flexlora": (LORA, "algorithm.name=fedlora", "algorithm.preset=flexlora"),
    "fedmosaic": (LORA, "algorithm.name=fedmosaic", "algorithm.gradient_batches=1"),
    "feddpa": (ADAPTERS, "algorithm.name=feddpa"),
    "pfedmma": (ADAPTERS, "algorithm.name=pfedmma"),
}


def ran(settings: Sequence[str]) -> tuple[ServerState, ServerState]:
    """The server before and after rounds in which nobody failed."""
    setup, _ = prepare(load_recipe("fedvqa_scenes", [*SMALL, *settings]))
    executor = InProcess(setup)
    simulation = Simulation(setup, MemoryStore(), executor)
    start = servers = simulation.start(executor.workspace)
    for record in simulate(simulation, servers):
        servers = dict(record.servers)
        assert not record.errors
    views = simulation.evaluate(servers, setup.rounds, split="validation")
    assert len(views["personal"]) == 4
    return start["main"], servers["main"]


@pytest.mark.parametrize("method", METHODS)
def test_each_method_changes_what_is_finetuned(method: str) -> None:
    changes_what_is_finetuned([*VILT, *METHODS[method]])


@pytest.mark.slow  # test_chat_methods.py has two of them on a model that writes
@pytest.mark.parametrize("method", METHODS)
def test_each_method_changes_what_is_finetuned_of_a_chat_model(method: str) -> None:
    changes_what_is_finetuned([*HF, *FEW, *METHODS[method]])


def changes_what_is_finetuned(settings: list[str]) -> None:
    before, after = ran(settings)
    assert any(not torch.equal(tensor, after.params[name]) for name, tensor in before.params.items())


@pytest.mark.parametrize("name", ["fedper", "fedrep"])
def test_methods_about_the_head_refuse_models_without_one(name: str) -> None:
    with pytest.raises(ValueError, match="keeps the answer head private, and this model does not say what its head is"):
        ran([*HF, LORA, f"algorithm.name={name}"])

"""The global model of methods on a vision-language model: the same scores in every view, file and export."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from confed.federation.algorithm import Algorithm
from confed.federation.client_info import ClientInfo
from confed.federation.params import Scope
from confed.federation.traits import GlobalModel
from confed.inference.export import export, export_merged
from confed.inference.finished_run import FinishedRun
from confed.inference.load import load_exported
from confed.recipes.recipe import Recipe, load_recipe
from confed.registry import algorithms
from confed.results.folder import RunFolder
from confed.runs.run import prepare, run
from confed.testing.steadiness import check_global_model
from confed.testing.trial import run as run_in_memory

SMALL = (
    "model.name=hf", "model.source=tiny:llava", "task.name=chat", "task.metric=choice", "study.methods=[]",
    "data.train=4", "data.validation=1", "data.test=3", "data.unseen=['transport']", "run.rounds=2", "run.workers=1",
    "run.without=['home', 'commercial', 'natural', 'educational']", "local.epochs=1", "local.batch_size=2",
    "local.lr=0.05", "run.gallery=0", "run.evaluate_every=0", "run.controls=none",
)  # fmt: skip
LORA, ADAPTERS = ("model.trainable=lora", "model.peft={rank=2}"), ("model.trainable=adapters",)
PRESETS = ("lora", "ffa_lora", "flora", "fedex_lora", "flexlora", "rolora", "lora_fair", "flora_na", "hetlora")
"""Those that share both factors, or the one that is trained."""

METHODS: dict[str, tuple[GlobalModel, tuple[str, ...]]] = {
    **{preset: ("alone", (*LORA, "algorithm.name=fedlora", f"algorithm.preset={preset}")) for preset in PRESETS},
    "fedsa_lora": ("with own parts", (*LORA, "algorithm.name=fedlora", "algorithm.preset=fedsa_lora")),
    "share_b": ("with own parts", (*LORA, "algorithm.name=fedlora", "algorithm.preset=share_b")),
    "fedavg": ("alone", (*LORA, "algorithm.name=fedavg")),
    "ditto": ("alone", (*LORA, "algorithm.name=ditto")),
    "fedkd": ("alone", (*LORA, "algorithm.name=fedkd")),
    "fedpeft": ("alone", (*ADAPTERS, "algorithm.name=fedpeft")),
    "feddat": ("alone", (*ADAPTERS, "algorithm.name=feddat")),
    "feddat, both": ("with own parts", (*ADAPTERS, "algorithm.name=feddat", "algorithm.inference=both")),
    "feddpa": ("alone", (*ADAPTERS, "algorithm.name=feddpa")),
    "pfedmma": ("with own parts", (*ADAPTERS, "algorithm.name=pfedmma")),
}
ALWAYS = ("fedex_lora", "fedsa_lora", "feddpa")


def recipe(*settings: str) -> Recipe:
    return load_recipe("fedvqa_scenes", [*SMALL, *settings])


def keeps_the_contract(name: str) -> None:
    says, settings = METHODS[name]
    setup = prepare(recipe(*settings))[0]
    assert setup.algorithm.global_model == says
    outcome = run_in_memory(setup)
    assert not any(outcome.errors)
    check_global_model(setup, outcome.servers, outcome.states, tolerance=1e-4)


@pytest.mark.parametrize("name", ALWAYS)
def test_scores_are_those_that_the_method_says(name: str) -> None:
    keeps_the_contract(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(METHODS) - set(ALWAYS)))
def test_other_scores_are_those_that_the_method_says(name: str) -> None:
    keeps_the_contract(name)


def scores(network: Any, tokenizer: Any) -> torch.Tensor:
    picture = torch.randint(0, 256, (1, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(4))
    text, mask = tokenizer(["red?"])
    batch = {"image": picture, "text": text, "text_mask": mask, "answer_tokens": tokenizer.answers(["yes"])}
    with torch.no_grad():
        return network.eval()(batch).logits[0]


def shares_one_model(name: str, folder: Path) -> None:
    """The run's views, its file, its export and the merged export have the same scores."""
    says, settings = METHODS[name]
    summary = run(recipe(*settings), folder / "run")
    assert summary["global_model"] == says == "alone"
    assert set(summary["global_unseen"]) == {"transport"}
    finished = FinishedRun(folder / "run")
    finished.check(None)
    finished.load()
    trained: Any = finished.model(None)
    finished.workspace.set_task(finished.setup.task)
    batch = finished.batch("transport", "test", 3)
    with torch.no_grad():
        right = finished.setup.task.predictions(trained.model(batch), batch)
    kept = load_file(RunFolder(folder / "run").predictions)
    assert right.tolist() == kept["unseen/transport/correct"][:3].tolist()
    for client in summary["clients"]:
        with torch.no_grad():
            output = trained.model(finished.batch(client, "test", 3)).logits
        assert output.argmax(-1).tolist() == kept[f"global/{client}/prediction"].tolist()
    expected = scores(trained.model, trained.tokenizer)
    written = export(folder / "run", folder / "out", personal=False)
    assert set(written) == {"global"}
    read = load_exported(folder / "out")
    torch.testing.assert_close(scores(read.model, read.tokenizer), expected, rtol=1e-5, atol=1e-5)
    if "model.trainable=lora" not in settings:
        return
    from transformers import AutoModelForImageTextToText

    export_merged(folder / "run", folder / "merged")
    trained.model.body = AutoModelForImageTextToText.from_pretrained(folder / "merged")
    torch.testing.assert_close(scores(trained.model, trained.tokenizer), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["feddpa"])
def test_views_and_exports_are_one_model(name: str, tmp_path: Path) -> None:
    shares_one_model(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n for n, (says, _) in METHODS.items() if says == "alone" and n not in ("feddpa", "fedkd")]
)
def test_views_and_exports_are_one_model_of_others(name: str, tmp_path: Path) -> None:
    shares_one_model(name, tmp_path)


@pytest.mark.parametrize("preset", ["fedsa_lora", "share_b"])
def test_factor_at_home_is_no_global_model_without_a_head(preset: str) -> None:
    method = algorithms["fedlora"](preset=preset, head=("none",))
    assert method.global_model == "with own parts"
    assert replace(method, preset="", share="both").global_model == "alone"
    # A that stays as it was is the same for all: nothing is at home.
    assert algorithms["fedlora"](train="B", share="B", head=("none",)).global_model == "alone"


def test_methods_on_classifiers_need_the_clients_heads() -> None:
    for name in ("fedlora", "fedpeft", "feddat", "feddpa"):
        options = {} if name in ("fedlora", "fedpeft") else {"adapter": "adapter"}
        method: Algorithm = algorithms[name](head=("classifier",), **options)
        assert method.global_model == "with own parts"
    assert algorithms["feddat"](adapter="a", head=("none",)).global_model == "alone"
    assert algorithms["feddat"](adapter="a", head=("none",), inference="both").global_model == "with own parts"
    assert algorithms["pfedmma"]().global_model == "with own parts"
    assert algorithms["fedper"](head=("classifier",)).global_model == "none"


def test_parts_beside_a_model_do_not_keep_it_from_answering() -> None:
    """All of these keep tensors private; the contract checks that their global models do without."""
    for name in ("fedpgp", "fedkd", "fedotp", "pfedmoap", "crd", "modality_transformer"):
        method: Algorithm = algorithms[name]()
        assert Scope.PRIVATE in method.rules(ClientInfo("a", 1)).values()
        assert method.global_model == "alone"

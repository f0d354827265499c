"""Recipes made of Python objects, and overrides as mappings."""

import numpy as np
import pytest
import torch
from torch import nn

import confed
from command_line import refused
from confed.algorithms.fedp3 import FedP3
from confed.federation.local import Local
from confed.federation.server_optimizer import ServerOptimizer
from confed.recipes.objects import digest_of, overrides_of
from confed.recipes.recipe import load_recipe, parse_recipe
from confed.registry import SESSION, models
from confed.runs.build import prepare
from confed.tasks.multilabel import Multilabel
from refusals import refuses
from tiny_runs import Halved, Linear, linear
from toy_federation import squares

TEXT = ["algorithm.name=fedp3", "algorithm.lam=0.1", "local.lr=0.01", "~run.cohort", 'study.methods=["fedavg"]']


def test_objects_are_written_as_files_have_them() -> None:
    given = confed.Recipe(
        algorithm=FedP3(lam=0.1, server=ServerOptimizer(optimizer="adam")),
        model={"name": "vilt_tiny", "width": 16},
        data={"name": squares, "train": 5},
        local=Local(lr=0.5),
        run={"rounds": 3, "joins": {"warm": 2}},
        name="mine",
    )
    again = parse_recipe(given.to_toml())
    assert again == given
    assert given.name == "mine"
    assert given.session_only == ()
    assert given.construct("algorithm") == FedP3(lam=0.1, server=ServerOptimizer(optimizer="adam"))
    assert (given.sections["data"]["name"], given.local.lr, given.run.joins) == ("squares", 0.5, {"warm": 2})


def test_classes_and_functions_are_named_by_their_modules() -> None:
    recipe = confed.Recipe(algorithm=Halved(share=0.25), model=linear, data=squares, task="vqa")
    assert recipe.sections["algorithm"]["name"] == "tiny_runs:Halved"
    assert recipe.sections["model"]["name"] == "tiny_runs:linear"
    assert recipe.construct("algorithm") == Halved(share=0.25)
    assert confed.Recipe(algorithm=Halved, model=linear, data=squares).construct("algorithm") == Halved()


def test_objects_without_a_name_are_told_apart_by_their_values() -> None:
    data, model = squares(4, 2), Linear(4)
    recipe = confed.Recipe(model=model, data=data)
    assert recipe.session_only == tuple(recipe.sections[s]["name"] for s in ("model", "data"))
    assert all(name.startswith(SESSION) for name in recipe.session_only)
    assert confed.Recipe(model=Linear(4), data=squares(4, 2)).sections == recipe.sections
    assert (
        confed.Recipe(model=Linear(4, seed=1), data=squares(4, 2, seed=1)).sections["model"] != recipe.sections["model"]
    )
    setup, run_data = prepare(recipe)
    assert run_data.dataset.name == "squares"
    built = setup.model()
    assert built is not model  # which the run must not change
    assert torch.equal(built.head.weight, model.head.weight)
    assert parse_recipe(recipe.to_toml()).sections == recipe.sections


def test_a_name_of_another_session_is_an_error_that_says_so() -> None:
    text = confed.Recipe(model=Linear(4), data=squares(4, 2)).to_toml().replace("session:Linear", "session:Gone")
    refuses(r"the model 'session:Gone@\w+' is an object of the Python session that wrote", parse_recipe, text)
    assert not any(name.startswith(SESSION) for name in models.names())


def test_the_task_follows_the_data() -> None:
    from coloured_labels import colours, colours_dataset

    assert confed.Recipe(model=colours, data=colours_dataset()).sections["task"]["name"] == "multilabel"
    assert confed.Recipe(model=colours, data=colours_dataset, task=Multilabel).sections["task"]["name"] == "multilabel"
    assert confed.Recipe(model=linear, data=squares).sections["task"]["name"] == "vqa"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"model": 3}, "model must be a name, a mapping .* or a torch.nn.Module; got int"),
        ({"algorithm": nn.Linear}, "algorithm must be a name, .* or an Algorithm; got type"),
        ({"data": np.zeros(3)}, "data must be .* a FederatedDataset, DataFrame or Dataset; got ndarray"),
        ({"run": 3}, r"run must be a mapping of its keys \(rounds, cohort"),
        ({"run": {"ruonds": 3}}, "unknown key run.ruonds=3; did you mean 'rounds'"),
        ({"model": {"name": "vilt_tiny", "width": np.zeros(3)}}, "model.width must be a number, a text"),
    ],
)
def test_other_objects_are_refused(given: dict[str, object], text: str) -> None:
    with refused(text):
        confed.Recipe(**{"model": "vilt_tiny", "data": "squares", **given})  # type: ignore[arg-type]


def test_overrides_as_a_mapping_are_those_of_the_command_line() -> None:
    mapping = {
        "algorithm.name": "fedp3", "algorithm.lam": 0.1, "local.lr": 0.01, "study.methods": ["fedavg"],
    }  # fmt: skip
    text = [entry for entry in TEXT if not entry.startswith("~")]
    assert load_recipe("fedvqa_scenes", mapping) == load_recipe("fedvqa_scenes", text)
    assert load_recipe("fedvqa_scenes", {"local.lr": None}).local.lr == Local().lr
    assert load_recipe("fedvqa_scenes").changed({"run.seed": 3}).run.seed == 3
    refuses(r"the key of an override must be 'section\.key', got 'lr'", load_recipe, "fedvqa_scenes", {"lr": 1})
    refuses(r"'~local\.clip': the recipe does not give that key", load_recipe, "fedvqa_scenes", {"local.clip": None})


def test_settings_name_sections_and_keys_of_run() -> None:
    found = overrides_of({"algorithm": FedP3(lam=0.3), "local": {"lr": 1.0}, "rounds": 2, "data.train": 4})
    assert found["algorithm.name"] == "fedp3"
    assert found["algorithm.lam"] == 0.3
    assert (found["local.lr"], found["run.rounds"], found["data.train"]) == (1.0, 2, 4)
    refuses("unknown setting 'ruonds'; did you mean 'rounds'", overrides_of, {"ruonds": 2})


def test_the_digest_is_of_values() -> None:
    first, again, other = ({"a": [torch.arange(3), "x"], "b": np.eye(2)} for _ in range(3))
    other["b"][0, 1] = 1.0  # type: ignore[index]
    assert digest_of(first) == digest_of(again) != digest_of(other)
    assert digest_of(torch.ones(2, dtype=torch.bfloat16)) != digest_of(torch.zeros(2, dtype=torch.bfloat16))

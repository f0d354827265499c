"""``run.batch_clients = "auto"``: a number that follows from the recipe and that the run keeps."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import toy_federation
from confed.algorithms.fedavg import FedAvg
from confed.data.examples import FederatedDataset
from confed.federation.equivalence import unbatchable_training
from confed.federation.local import Schedule
from confed.federation.protocols import Batch, Output
from confed.models.tokenizer import WordTokenizer
from confed.recipes.recipe import Recipe, load_recipe
from confed.registry import algorithms, register_dataset, register_model
from confed.runs import at_once
from confed.runs.at_once import begin, clients_at_once
from confed.runs.plan import plan_run
from confed.runs.run import run
from confed.studies.published import read_published
from confed.system.events import Event, Note, RunProgress
from confed.testing.toy import toy_clients, toy_setup
from confed.testing.trial import clients_of


@register_dataset
def many_squares(clients: int = 6, train: int = 6, *, seed: int = 0) -> FederatedDataset:
    """Squares of clients with all colours.

    Args:
        clients: how many.
        train: training questions of each.
        seed: of the noise.
    """
    whole = toy_federation.squares(train, 2, seed=seed)
    names = list(whole.clients)
    return replace(whole, clients={f"c{i}": whole.clients[names[i % len(names)]] for i in range(clients)}, unseen={})


class Colours(nn.Module):
    """Mean colours to answers, in linear layers, or with a convolution in front."""

    def __init__(self, answers: int, width: int, dropout: float, kernel: bool) -> None:
        super().__init__()
        self.kernel = nn.Conv2d(3, 3, 1) if kernel else None
        self.hidden, self.head, self.dropout = nn.Linear(3, width), nn.Linear(width, answers), nn.Dropout(dropout)

    def forward(self, batch: Batch) -> Output:
        image = batch["image"].float() / 255
        colours = (image if self.kernel is None else self.kernel(image)).mean((2, 3))
        features = self.dropout(self.hidden(colours).tanh())
        return Output(self.head(features), features)


@register_model
def colours(
    answers: Any, vocab_size: int, width: int = 8, dropout: float = 0.0, kernel: bool = False, *, seed: int = 0
) -> nn.Module:
    """A model that is no work.

    Args:
        answers: all.
        vocab_size: not used.
        width: of the hidden layer.
        dropout: of its features.
        kernel: whether a convolution learns.
        seed: of values.
    """
    torch.manual_seed(seed)
    return Colours(answers if isinstance(answers, int) else len(answers), width, dropout, kernel)


colours.tokenizer = WordTokenizer  # pyright: ignore[reportFunctionMemberAccess]
SMALL = (
    "data.name=many_squares", "algorithm.name=fedavg", "model.name=colours", "run.rounds=3", "local.epochs=1",
    "local.batch_size=4", "run.gallery=0", "run.controls=none", "run.evaluate_every=0", "run.cohort=5",
)  # fmt: skip


def recipe_with(*more: str) -> Recipe:
    return load_recipe("fedvqa_scenes", ["study.methods=[]", *SMALL, *more])


def models_of(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {str(file.relative_to(folder)): t for file in sorted((folder / "models").rglob("*.safetensors"))
            for t in [torch.cat([v.flatten() for _, v in sorted(load_file(file).items())])]}  # fmt: skip


def stop_after_round_two(event: Event) -> None:
    if isinstance(event, RunProgress) and event.round == 2 and "loss" in event.text:
        raise KeyboardInterrupt


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    run(recipe_with(), folder)
    return folder


def test_the_number_is_told_and_written_into_the_run(tmp_path: Path):
    told: list[Event] = []
    summary = run(recipe_with("run.rounds=1"), tmp_path / "run", progress=told.append)
    (note,) = [event.text for event in told if isinstance(event, Note)]
    assert note.startswith("run.batch_clients = 5: 68 values learn in linear layers")
    for file in ("recipe.toml", "begun.toml"):
        assert "batch_clients = 5\n" in (tmp_path / "run" / file).read_text()
    assert summary["resolved"]["run"]["batch_clients"] == 5
    assert not any("batch_clients" in note for note in summary["notes"])


def test_results_are_those_of_one_by_one_but_for_rounding(whole: Path, tmp_path: Path):
    summary = run(recipe_with("run.batch_clients=1", "run.workers=1"), tmp_path / "run")
    assert summary["resolved"]["run"]["batch_clients"] == 1
    alone, together = models_of(tmp_path / "run"), models_of(whole)
    assert alone.keys() == together.keys()
    apart = max(float((tensor - together[name]).abs().max()) for name, tensor in alone.items())
    assert 0 < apart < 1e-5


def test_a_resumed_run_has_its_number_whatever_is_chosen_now(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(KeyboardInterrupt):
        run(recipe_with(), tmp_path / "run", progress=stop_after_round_two)
    monkeypatch.setattr(at_once, "WORK", 0)
    assert begin(recipe_with())[-1].clients == 1
    run(recipe_with(), tmp_path / "run", resume=True)
    resumed = models_of(tmp_path / "run")
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in models_of(whole).items())


def test_a_folder_from_before_goes_on_one_by_one(tmp_path: Path):
    folder = tmp_path / "run"
    run(recipe_with("run.batch_clients=1", "run.workers=1"), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(recipe_with("run.batch_clients=1", "run.workers=1"), folder, progress=stop_after_round_two)
    for file in (folder / "recipe.toml", folder / "begun.toml"):
        file.write_text(re.sub(r"batch_clients = 1\n", "", file.read_text()))
    summary = run(load_recipe(folder / "recipe.toml"), folder, resume=True)
    assert summary["resolved"]["run"]["batch_clients"] == 1
    resumed = models_of(folder)
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in models_of(tmp_path / "whole").items())


def test_a_repeated_run_has_the_number_of_the_published_one(whole: Path, tmp_path: Path):
    assert read_published(str(whole)).recipe(0, []).run.batch_clients == 5
    summary = json.loads((whole / "summary.json").read_text())
    del summary["resolved"]["run"]["batch_clients"]
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert read_published(str(tmp_path / "summary.json")).recipe(0, []).run.batch_clients == 1


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["run.workers=2"], "several processes share the clients"),
        (["run.async.buffer=2"], "asynchronous rounds ask one client after the other"),
        (["run.device=auto"], "it was not measured on a GPU"),
        (["algorithm.name=fedp3"], "the method does not say that its objective is one loss per batch"),
        (["local.accumulate=2"], "local.accumulate is 2, stacked are 1"),
        (["run.uplink.bits=8"], "run.uplink is set"),
        (["model.dropout=0.5"], "the model has dropout"),
        (["model.kernel=true"], "other than linear and normalising layers learn"),
        (["model.width=5000"], "each client learns 40,004 values, more than 32,768"),
        (["model.width=2000", "local.batch_size=64"], "a batch is multiplied with 1,024,256 values, more than 524,288"),
        (["run.cohort=3"], "a round has 3, fewer than the 4 that make it faster"),
    ],
)
def test_clients_stay_alone_where_stacking_does_not_pay(more: Sequence[str], reason: str):
    chosen = begin(recipe_with(*more))[-1]
    assert chosen.clients == 1
    assert chosen.reason.startswith(reason)


@pytest.mark.parametrize("method", ["ditto", "feddc", "feddyn", "fedprox", "scaffold"])
def test_methods_with_terms_and_second_trainings_are_stacked(method: str):
    assert begin(recipe_with(f"algorithm.name={method}"))[-1].clients == 5


def test_a_schedule_is_followed_where_steps_are_equally_many():
    cosine = "local.schedule.kind=cosine"
    assert begin(recipe_with(cosine))[-1].clients == 5
    unequal = replace(toy_setup(FedAvg(), clients=toy_clients(sizes=(5, 9, 5, 5)), noisy=False), rounds=3)
    given = replace(unequal, local=replace(unequal.local, schedule=Schedule("cosine")))
    chosen = clients_at_once(recipe_with("run.cohort=0").run, given, at_once.Workspace(given.model()))
    assert chosen.reason == "rates follow a schedule, and clients have different numbers of steps"


def test_memory_bounds_the_number(monkeypatch: pytest.MonkeyPatch):
    given = recipe_with("run.cohort=0", "data.clients=40")
    assert begin(given)[-1].clients == at_once.MOST
    batch_bytes = 4 * (3 * 64 * 64 + 3 * 8)  # pictures, and the label, the picture's number and the words as they are
    monkeypatch.setattr(at_once, "BYTES", 10 * (4 * 68 * 4 + batch_bytes))
    assert 4 <= begin(given)[-1].clients <= 10
    monkeypatch.setattr(at_once, "BYTES", 2 * batch_bytes)
    assert begin(given)[-1].reason == "1 fit into 0 MiB, fewer than the 4 that make it faster"


def test_the_plan_says_how_many_and_why():
    assert plan_run(recipe_with("run.rounds=1")).at_once.startswith("run.batch_clients = 5: 68 values learn")
    assert plan_run(recipe_with("run.batch_clients=2")).at_once == "run.batch_clients = 2: so the recipe says"


@pytest.mark.parametrize("name", algorithms.names())
def test_no_method_is_stacked_that_the_contract_does_not_try(name: str):
    algorithm = algorithms[name]()
    noisy = bool(unbatchable_training(algorithm))  # FedBN is for models that normalise
    setup = toy_setup(algorithm, clients=clients_of(algorithm), rounds=1, noisy=noisy)
    chosen = clients_at_once(recipe_with("run.cohort=0").run, setup, at_once.Workspace(setup.model()))
    assert chosen.clients == 1 or not unbatchable_training(algorithm)

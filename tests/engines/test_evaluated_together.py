"""Own models of several clients evaluated at once: what one after the other gives, in fewer passes."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from confed.algorithms.fedavg import FedAvg
from confed.algorithms.fedper import FedPer
from confed.algorithms.scaffold import Scaffold
from confed.data.examples import TableData
from confed.data.table import Table
from confed.engines.executor import InProcess
from confed.engines.local import Members, Setup, Simulation, simulate
from confed.federation.algorithm import Algorithm
from confed.federation.frozen_features import FeatureSettings
from confed.federation.local import Local
from confed.federation.state import MemoryStore
from confed.models.vilt import vilt_tiny
from confed.tasks.multilabel import Multilabel
from confed.tasks.vqa import VQA
from small_pictures import Small, labelled_pictures

SIZES = (5, 13, 8, 0, 13)
LOCAL = Local(epochs=1, batch_size=4, eval_batch_size=4, lr=0.05, optimizer="sgd")


def members(words: bool) -> Members:
    """Clients with 6 training examples, and as many for validation as SIZES says."""
    rng = torch.Generator().manual_seed(3)
    made = [tuple(labelled_pictures(size, rng, words) for size in (6, count, 2)) for count in SIZES]
    return Members({f"c{number}": TableData(*parts) for number, parts in enumerate(made)})


def dropping() -> Small:
    return Small(dropout=0.5)


class Head(Small):
    """Only the layer learns, so that rows of clients are told apart without ``vmap``."""

    def __init__(self) -> None:
        super().__init__(dropout=0.5)
        self.body.requires_grad_(False)
        self.frozen |= {"body.weight", "body.bias"}


def vilt() -> nn.Module:
    return vilt_tiny(
        4, 9, width=8, layers=2, attention_heads=2, image_size=16, patch=8, max_length=4, trainable="top"
    )  # fmt: skip


def setup(algorithm: Algorithm, build: Callable[[], nn.Module], **options: Any) -> Setup:
    options = {"local": LOCAL, **options}
    return Setup(algorithm, members(build is vilt), options.pop("task", VQA(4)), build=build, rounds=1, **options)


def evaluated(setup: Setup, at_once: int, limit: int = 0) -> tuple[dict[str, Any], dict[str, Tensor], int, int]:
    """Trained one by one and evaluated; results, counts, passes of the evaluation, and clients evaluated at once."""
    store = MemoryStore()
    trained = InProcess(setup)
    simulation = Simulation(setup, store, trained)
    last = list(simulate(simulation, simulation.start(trained.workspace)))[-1]
    executor = InProcess(replace(setup, batch_clients=at_once))
    judge = Simulation(replace(setup, batch_clients=at_once), store, executor)
    model, counts, together = executor.workspace.model, dict[str, Tensor](), [0]
    before = model.passes if isinstance(model, Small) else 0

    def counted(view: str, place: str, of_place: Mapping[str, Tensor]) -> None:
        counts.update({f"{view}/{place}/{name}": tensor for name, tensor in of_place.items()})

    def stacked(values: Any, *rest: Any) -> Any:
        together[0] += len(values)
        return real(values, *rest)

    from confed.engines import executor as module

    real = module.evaluate_stacked
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "evaluate_stacked", stacked)
        found = judge.evaluate(last.servers, 1, split="validation", limit=limit, counted=counted)
    passes = model.passes - before if isinstance(model, Small) else 0
    return found, counts, passes, together[0]


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    assert one.keys() == other.keys()
    for view, places in one.items():
        assert places.keys() == other[view].keys()
        for place, tallies in places.items():
            for metric, (total, weight) in tallies.items():
                assert other[view][place][metric] == (pytest.approx(total, rel=1e-4, abs=1e-4), weight)


@pytest.mark.parametrize("build", [dropping, Head, vilt], ids=["vmap", "joint", "vilt"])
@pytest.mark.parametrize("at_once", [2, 5])
@pytest.mark.parametrize("limit", [0, 6])
def test_models_at_once_score_what_they_score_alone(build: Callable[[], nn.Module], at_once: int, limit: int):
    alone = evaluated(setup(FedAvg(), build), 1, limit)
    at = evaluated(setup(FedAvg(), build), at_once, limit)
    assert alone[3] == 0
    assert at[3] == (5 if at_once == 5 else 4)  # the fifth has no partner
    same(alone[0], at[0])
    assert set(alone[0]["personal"]) == {"c0", "c1", "c2", "c4"}  # c3 has no validation examples
    weights = {place: next(iter(t.values()))[1] for place, t in at[0]["personal"].items()}
    assert weights == {"c0": 5, "c1": 8 if limit else 13, "c2": 8, "c4": 8 if limit else 13}


def test_with_cohorts_a_resumed_run_has_the_same_numbers():
    # Which own models were evaluated before is known to the process that did so only, so that none are stacked.
    whole = replace(setup(FedAvg(), Head), batch_clients=5)
    executor = InProcess(whole)
    simulation = Simulation(whole, MemoryStore(), executor, cohort=2)
    last = list(simulate(simulation, simulation.start(executor.workspace)))[-1]
    asked = []
    answered = executor.__class__.__call__

    def spy(self: Any, calls: Any, store: Any, round: int) -> Any:
        asked.extend(call.message.scalars.get("at_once", False) for call in calls)
        return answered(self, calls, store, round)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InProcess, "__call__", spy)
        simulation.evaluate(last.servers, 1, split="validation")
    assert asked
    assert not any(asked)


def test_own_models_differ_and_are_each_clients_own():
    found = evaluated(setup(FedAvg(), Head), 5)[0]
    assert found["personal"]["c1"] != found["global"]["c1"]


def test_it_takes_fewer_passes():
    alone, at_once = (evaluated(setup(FedAvg(), Head), k)[2] for k in (1, 5))
    # The global model 12 batches, and own models 2, 4, 2 and 4 one by one. At once four steps, the second of two
    # shapes, and before them the trial of the first step: a pass for each of its four clients and one for all.
    assert alone == 12 + 12
    assert at_once == 12 + 5 + 5


def test_methods_that_train_one_by_one_are_evaluated_at_once():
    alone, at_once = (evaluated(setup(Scaffold(), Head), k) for k in (1, 5))
    assert at_once[3] == 5
    same(alone[0], at_once[0])


def test_private_tensors_belong_to_their_client():
    alone, at_once = (evaluated(setup(FedPer(head=("head",)), dropping), k) for k in (1, 5))
    assert at_once[3] == 5
    same(alone[0], at_once[0])


def test_counts_of_labels_are_each_clients():
    task = Multilabel(4)
    data = {}
    rng = torch.Generator().manual_seed(3)
    for number, count in enumerate((5, 9, 9)):
        parts = []
        for size in (6, count, 2):
            targets = torch.randint(0, 2, (size, 4), generator=rng).float()
            pictures = torch.randint(0, 256, (size, 3, 16, 16), generator=rng).to(torch.uint8)
            parts.append(Table(pictures, torch.arange(size), {"labels": targets}))
        data[f"c{number}"] = TableData(*parts)
    whole = Setup(FedAvg(), Members(data), task, LOCAL, Head, rounds=1)
    alone, at_once = (evaluated(whole, k) for k in (1, 3))
    assert at_once[3] == 3
    assert alone[1].keys() == at_once[1].keys()
    for name, tensor in alone[1].items():
        torch.testing.assert_close(at_once[1][name], tensor, rtol=1e-4, atol=1e-4)


def test_kept_features_serve_evaluations_at_once():
    features = FeatureSettings(1 << 24)
    alone = evaluated(setup(FedAvg(), vilt), 1)
    kept = evaluated(setup(FedAvg(), vilt, features=features), 5)
    assert kept[3] == 5
    same(alone[0], kept[0])


@pytest.mark.parametrize("change", ["bf16", "own evaluation"])
def test_what_cannot_be_stacked_is_evaluated_one_by_one(change: str):
    class Other(FedAvg):
        def evaluate(self, client: Any, message: Any) -> Any:
            return super().evaluate(client, message)

    Other.evaluate.__dict__.update(FedAvg.evaluate.__dict__)  # an action
    local = replace(LOCAL, precision="bf16") if change == "bf16" else LOCAL
    method = Other() if change == "own evaluation" else FedAvg()
    alone, at_once = (evaluated(setup(method, Head, local=local), k) for k in (1, 5))
    assert at_once[3] == 0
    same(alone[0], at_once[0])


def test_what_torch_cannot_map_is_noted(monkeypatch: pytest.MonkeyPatch):
    from confed.engines import executor as module

    def broken(*arguments: Any) -> Any:
        raise RuntimeError("no rule for this layer")

    alone = evaluated(setup(FedAvg(), Head), 1)
    monkeypatch.setattr(module, "evaluate_stacked", broken)
    whole = replace(setup(FedAvg(), Head), batch_clients=5)
    store, executor = MemoryStore(), InProcess(whole)
    simulation = Simulation(whole, store, executor)
    last = list(simulate(simulation, simulation.start(executor.workspace)))[-1]
    same(alone[0], simulation.evaluate(last.servers, 1, split="validation"))
    assert executor.notes[1:] == [
        "run.batch_clients: own models were evaluated one by one: RuntimeError: no rule for this layer"
    ]


def test_one_clients_failure_is_found_one_by_one():
    class Broken(TableData):
        def validation(self, batch_size: int) -> Any:
            raise ValueError("a torn picture")

    rng = torch.Generator().manual_seed(3)
    data = {f"c{i}": TableData(*(labelled_pictures(6, rng) for _ in range(3))) for i in range(3)}
    data["c2"] = Broken(*data["c2"].tables)
    whole = replace(setup(FedAvg(), Head), population=Members(data))
    with pytest.raises(RuntimeError, match="evaluation on 'c2' failed: ValueError: a torn picture"):
        evaluated(whole, 5)

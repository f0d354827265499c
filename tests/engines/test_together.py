from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from confed.algorithms.fedavg import FedAvg
from confed.algorithms.fedprox import FedProx
from confed.algorithms.local import LocalOnly
from confed.algorithms.scaffold import Scaffold
from confed.data.examples import TableData
from confed.engines.executor import InProcess
from confed.engines.local import Members, Setup, Simulation, simulate
from confed.federation import stacked_passes
from confed.federation.algorithm import Algorithm
from confed.federation.frozen_features import FeatureSettings, FrozenFeatures
from confed.federation.local import Local
from confed.federation.protocols import Batch, Output
from confed.federation.state import MemoryStore
from confed.federation.update_privacy import UpdatePrivacy
from confed.models.finetuning import Finetuning
from confed.models.vilt import vilt_tiny
from confed.tasks.multilabel import Multilabel
from confed.tasks.vqa import VQA
from small_pictures import Small, labelled_pictures

SIZES = (5, 13, 8, 13, 1)


def tables(words: bool = False) -> dict[str, TableData]:
    rng, found = torch.Generator().manual_seed(3), {}
    for number, count in enumerate(SIZES):
        table = labelled_pictures(count, rng, words)
        found[f"c{number}"] = TableData(table, table.take(0), table.take(0))
    return found


def vilt() -> nn.Module:
    return vilt_tiny(4, 9, width=8, layers=1, attention_heads=2, image_size=16, patch=8, max_length=4)


SGD = Local(epochs=2, batch_size=4, lr=0.05, optimizer="sgd", momentum=0.9, weight_decay=0.01, clip=0.5)
ADAMW = Local(epochs=2, batch_size=4, lr=3e-3)


def setup(algorithm: Algorithm, build: Callable[[], nn.Module] = Small, local: Local = SGD, **options: Any) -> Setup:
    data = options.pop("data", None) or tables(build is vilt)
    return Setup(algorithm, Members(data), VQA(4), local, build, rounds=3, **options)


def run(setup: Setup) -> tuple[dict[str, Tensor], list[dict[str, float]], list[dict[str, str]], str]:
    executor, store = InProcess(setup), MemoryStore()
    simulation = Simulation(setup, store, executor)
    records = list(simulate(simulation, simulation.start(executor.workspace)))
    tensors = {f"server/{n}": t for n, t in records[-1].servers["main"].params.items()}
    for client in simulation.clients():
        for group, own in store.load(client.id).tensors.items():
            tensors |= {f"{client.id}/{group}/{name}": tensor for name, tensor in own.items()}
    return tensors, [dict(r.losses) for r in records], [dict(r.errors) for r in records], executor.unbatchable_reason


def compare(alone: Setup, at_once: int, tolerance: float = 1e-5) -> None:
    expected, losses, errors, _ = run(alone)
    got, other_losses, other_errors, why = run(replace(alone, batch_clients=at_once))
    assert (why, other_errors) == ("", errors)
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=tolerance, atol=tolerance, msg=name)
    for mine, theirs in zip(losses, other_losses, strict=True):
        assert list(theirs) == list(mine)
        assert theirs == pytest.approx(mine, rel=1e-4)


@pytest.mark.parametrize("algorithm", [FedAvg(), FedProx(mu=0.5), LocalOnly()], ids=lambda a: a.title)
@pytest.mark.parametrize("local", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("at_once", [2, 5, 9])
def test_clients_of_different_sizes_get_what_they_get_alone(algorithm: Algorithm, local: Local, at_once: int):
    # Two at a time the last client has no partner and is trained as without.
    compare(setup(algorithm, local=local), at_once)


@pytest.mark.parametrize("local", [SGD, replace(ADAMW, optimizer="adam")], ids=["sgd", "adam"])
def test_a_transformer_of_pictures_and_words(local: Local):
    compare(setup(FedAvg(), vilt, local), 5, tolerance=1e-4 if local.optimizer == "adam" else 1e-5)


def test_the_proximal_term_takes_part():
    near, far = (run(setup(FedProx(mu=mu), batch_clients=5))[0] for mu in (0.0, 0.5))
    assert any(not torch.allclose(near[name], far[name], atol=1e-4) for name in near)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"algorithm": Scaffold()}, "does not say that its objective is one loss per batch"),
        ({"build": lambda: Small(dropout=0.1)}, "dropout"),
        ({"build": lambda: Small(norm=True), "data": {"a": tables()["c1"], "b": tables()["c3"]}}, "normalises"),
        ({"local": replace(SGD, schedule="cosine")}, "schedule"),
        ({"local": replace(SGD, accumulate=2)}, "accumulate"),
        ({"local": replace(SGD, optimizer="adamax")}, "adamax"),
        ({"algorithm": FedAvg(update_privacy=UpdatePrivacy(clip=1.0, noise=0.1))}, "protected"),
    ],
    ids=["method", "dropout", "batch norm", "schedule", "accumulate", "optimizer", "protection"],
)
def test_what_cannot_be_stacked_is_trained_one_by_one_and_says_why(options: dict[str, Any], reason: str):
    alone = setup(**{"algorithm": FedAvg(), **options})
    expected, *_ = run(alone)
    got, _, _, why = run(replace(alone, batch_clients=5))
    assert reason in why
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


def test_frozen_layers_that_draw_random_numbers_are_not_shared(monkeypatch: pytest.MonkeyPatch):
    state = FrozenFeatures.state

    def drawn(self: FrozenFeatures, model: Any, batch: Any) -> Any:
        torch.rand(1)
        return state(self, model, batch)

    monkeypatch.setattr(FrozenFeatures, "state", drawn)

    def build() -> nn.Module:
        sizes = {"width": 8, "layers": 2, "attention_heads": 2, "image_size": 16, "patch": 8, "max_length": 4}
        return vilt_tiny(4, 9, trainable="head", **sizes)

    kept = replace(setup(FedAvg(), build, data=tables(words=True)), features=FeatureSettings(10**6), batch_clients=5)
    executor = InProcess(kept)
    list(simulate(s := Simulation(kept, MemoryStore(), executor), s.start(executor.workspace)))
    assert "the frozen layers draw random numbers" in executor.unbatchable_reason


@pytest.mark.parametrize("kind", ["top", "head", "adapters", "lora"])
def test_clients_at_once_read_kept_features_and_share_what_is_frozen(kind: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(FrozenFeatures, "_weigh", lambda self: None)

    def build() -> nn.Module:
        small = Finetuning(rank=2, reduction=4)
        return vilt_tiny(
            4, 9, width=8, layers=2, attention_heads=2, image_size=16, patch=8, max_length=4, trainable=kind, peft=small
        )

    alone = setup(FedAvg(), build, data=tables(words=True))
    compare(alone, 5)
    kept = replace(alone, features=FeatureSettings(10**6), batch_clients=5)
    executor = InProcess(kept)
    records = list(simulate(s := Simulation(kept, MemoryStore(), executor), s.start(executor.workspace)))
    assert (executor.unbatchable_reason, executor.features.exact) == ("", True)
    assert executor.features.reused > 60  # of 40 examples, each in two epochs of three rounds
    expected = run(replace(alone, batch_clients=5))[0]
    for name, tensor in records[-1].servers["main"].params.items():
        torch.testing.assert_close(tensor, expected[f"server/{name}"], rtol=1e-5, atol=1e-5)


def test_a_client_without_examples_fails_alone():
    data = tables()
    empty = data["c2"].tables[0].take(0)
    data["c2"] = TableData(empty, empty, empty)
    expected, _, errors, _ = run(setup(FedAvg(), data=data))
    got, _, other_errors, why = run(setup(FedAvg(), data=data, batch_clients=5))
    assert other_errors == errors
    assert "no training examples" in errors[0]["c2"]
    assert "no training examples" in why
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


def test_a_client_that_diverges_fails_alone():
    data = tables()
    local = Local(epochs=1, batch_size=4, lr=0.05, optimizer="sgd")

    class Exploding(Small):
        def forward(self, batch: Batch) -> Output:
            output = super().forward(batch)
            scale = torch.where((batch["label"] == 3).any(), torch.inf, 1.0)
            return output._replace(logits=output.logits * scale)

    for number, client in enumerate(data.values()):
        client.tables[0].columns["label"][:] = 3 if number == 2 else 1
    _, _, errors, _ = run(setup(FedAvg(), Exploding, local, data=data))
    _, _, other_errors, why = run(setup(FedAvg(), Exploding, local, data=data, batch_clients=5))
    assert list(errors[0]) == list(other_errors[0]) == ["c2"]
    assert why == ""


class Layers(nn.Module):
    """A frozen and two trained layers with a normalisation; options break what a common batch needs."""

    def __init__(self, mixing: bool = False, elsewhere: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(6)
            self.stem, self.norm = nn.Linear(768, 12), nn.LayerNorm(12)
            self.body, self.head = nn.Linear(12, 8, bias=False), nn.Linear(8, 4)
        self.stem.requires_grad_(False)
        self.frozen = {"stem.weight", "stem.bias"}
        self.mixing, self.elsewhere = mixing, elsewhere

    def forward(self, batch: Batch) -> Output:
        hidden = self.norm(torch.relu(self.stem(batch["image"].flatten(1).float() / 255)))
        hidden = hidden - 0.1 * hidden.mean(0) if self.mixing else hidden
        features = torch.tanh(hidden @ self.body.weight.T if self.elsewhere else self.body(hidden))
        return Output(self.head(features), features)


@pytest.mark.parametrize("local", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("algorithm", [FedAvg(), FedProx(mu=0.5)], ids=lambda a: a.title)
def test_layers_tell_the_rows_of_a_common_batch_apart(
    algorithm: Algorithm, local: Local, monkeypatch: pytest.MonkeyPatch
):
    def refused(*given: Any, **options: Any) -> Any:
        raise AssertionError("a model of linear layers needs no vmap")

    monkeypatch.setattr(stacked_passes, "vmap", refused)
    compare(setup(algorithm, Layers, local), 5)


@pytest.mark.parametrize(
    "options", [{"mixing": True}, {"elsewhere": True}], ids=["examples mixed", "weights elsewhere"]
)
def test_models_that_need_each_clients_own_batch_are_mapped(options: dict[str, bool], monkeypatch: pytest.MonkeyPatch):
    calls = list[int]()
    vmap = stacked_passes.vmap
    monkeypatch.setattr(stacked_passes, "vmap", lambda *a, **o: (calls.append(1), vmap(*a, **o))[1])
    compare(setup(FedAvg(), lambda: Layers(**options)), 5)
    assert calls


class Doubled(VQA):
    """A task that replaces the loss and not the losses of examples."""

    def loss(self, output: Output, batch: Batch) -> Tensor:
        return 2 * super().loss(output, batch)


def test_a_task_with_another_loss_is_trained_on_it():
    compare(replace(setup(FedAvg(), Layers), task=Doubled(4)), 5)


@pytest.mark.parametrize("objective", ["ce", "bce", "kl"])
def test_losses_of_examples_have_the_loss_as_mean(objective: Any):
    rng = torch.Generator().manual_seed(0)
    output = Output(torch.randn(6, 4, generator=rng), torch.zeros(6, 1))
    batch = {"label": torch.randint(0, 4, (6,), generator=rng), "target": torch.rand(6, 4, generator=rng)}
    task = VQA(4, objective=objective)
    losses = task.example_losses(output, batch)
    assert losses is not None
    assert losses.shape == (6,)
    torch.testing.assert_close(losses.mean(), task.loss(output, batch))
    assert replace(task, reduction="sum").example_losses(output, batch) is None
    if objective == "ce":
        with pytest.raises(ValueError, match="label"):
            task.example_losses(output, {"label": torch.tensor([0, 1, 2, 3, 4, 0])})


def test_losses_of_labels_have_the_loss_as_mean():
    rng = torch.Generator().manual_seed(0)
    output = Output(torch.randn(6, 4, generator=rng), torch.zeros(6, 1))
    labels, known = torch.randint(0, 2, (6, 4), generator=rng), torch.randint(-1, 2, (6, 4), generator=rng)
    batch, task = {"labels": labels, "known": known.to(torch.int8)}, Multilabel(4, reduction="mean")
    losses = task.example_losses(output, batch)
    assert losses is not None
    torch.testing.assert_close(losses.mean(), task.loss(output, batch))
    assert Multilabel(4).example_losses(output, batch) is None

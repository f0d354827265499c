from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import matrix_cases
from confed.algorithms.ditto import Ditto
from confed.algorithms.fedavg import FedAvg
from confed.algorithms.feddc import FedDC
from confed.algorithms.feddyn import FedDyn
from confed.algorithms.fedper import FedPer
from confed.algorithms.fedprox import FedProx
from confed.algorithms.fedrep import FedRep
from confed.algorithms.local import LocalOnly
from confed.algorithms.moon import MOON
from confed.algorithms.scaffold import Scaffold
from confed.data.examples import TableData
from confed.data.table import Table
from confed.engines.executor import InProcess
from confed.engines.local import Members, Setup, Simulation, simulate
from confed.federation import stacked_passes
from confed.federation.algorithm import Algorithm
from confed.federation.client import Client
from confed.federation.frozen_features import FeatureSettings, FrozenFeatures
from confed.federation.local import Local
from confed.federation.messages import Message
from confed.federation.protocols import Batch, Output
from confed.federation.state import MemoryStore
from confed.federation.teacher import global_logits
from confed.federation.train import Objective
from confed.federation.update_privacy import UpdatePrivacy
from confed.models.finetuning import Finetuning
from confed.models.vilt import vilt_tiny
from confed.tasks.multilabel import Multilabel
from confed.tasks.vqa import VQA
from matrix_cases import SGD as PLAIN_SGD
from matrix_cases import Chain, Outcome, Plain, apart, outcome, setup_of
from refusals import refuses
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
@pytest.mark.parametrize(
    ("local", "at_once"),
    [(SGD, 2), (ADAMW, 5), *[pytest.param(*case, marks=pytest.mark.slow) for case in ((SGD, 5), (SGD, 9), (ADAMW, 2))]],
    ids=["sgd-2", "adamw-5", "sgd-5", "sgd-9", "adamw-2"],
)
def test_clients_of_different_sizes_get_what_they_get_alone(algorithm: Algorithm, local: Local, at_once: int):
    # Two at a time the last client has no partner and is trained as without.
    compare(setup(algorithm, local=local), at_once)


@pytest.mark.parametrize("local", [SGD, replace(ADAMW, optimizer="adam")], ids=["sgd", "adam"])
def test_a_transformer_of_pictures_and_words(local: Local):
    compare(setup(FedAvg(), vilt, local), 5, tolerance=1e-4 if local.optimizer == "adam" else 1e-5)


@pytest.mark.parametrize(
    "algorithm",
    [Scaffold(), FedDyn(alpha=0.5), FedDC(alpha=0.5), Ditto(lam=2.0), FedRep(head=("head",))],
    ids=lambda a: a.title,
)
def test_terms_and_second_trainings_are_each_clients_own(algorithm: Algorithm):
    compare(setup(algorithm.configure(Small(), VQA(4)), local=replace(SGD, momentum=0.0)), 5)


def test_the_proximal_term_takes_part():
    near, far = (run(setup(FedProx(mu=mu), batch_clients=5))[0] for mu in (0.0, 0.5))
    assert any(not torch.allclose(near[name], far[name], atol=1e-4) for name in near)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"algorithm": MOON(projection=False)}, "does not say that its objective is one loss per batch"),
        ({"build": lambda: Small(dropout=0.1)}, "dropout"),
        ({"build": lambda: Small(norm=True), "data": {"a": tables()["c1"], "b": tables()["c3"]}}, "normalises"),
        ({"local": replace(SGD, accumulate=2)}, "accumulate"),
        ({"local": replace(SGD, optimizer="adamax")}, "adamax"),
        ({"algorithm": FedAvg(update_privacy=UpdatePrivacy(clip=1.0, noise=0.1))}, "protected"),
    ],
    ids=["method", "dropout", "batch norm", "accumulate", "optimizer", "protection"],
)
def test_what_cannot_be_stacked_is_trained_one_by_one(options: dict[str, Any], reason: str):
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


@pytest.mark.parametrize(
    "kind", ["head", "adapters", *[pytest.param(k, marks=pytest.mark.slow) for k in ("top", "lora")]]
)
def test_clients_at_once_read_kept_features(kind: Any, monkeypatch: pytest.MonkeyPatch):
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
        refuses("label", task.example_losses, output, {"label": torch.tensor([0, 1, 2, 3, 4, 0])})


def test_losses_of_labels_have_the_loss_as_mean():
    rng = torch.Generator().manual_seed(0)
    output = Output(torch.randn(6, 4, generator=rng), torch.zeros(6, 1))
    labels, known = torch.randint(0, 2, (6, 4), generator=rng), torch.randint(-1, 2, (6, 4), generator=rng)
    batch, task = {"labels": labels, "known": known.to(torch.int8)}, Multilabel(4, reduction="mean")
    losses = task.example_losses(output, batch)
    assert losses is not None
    torch.testing.assert_close(losses.mean(), task.loss(output, batch))
    assert Multilabel(4).example_losses(output, batch) is None


# Own models evaluated at once -------------------------------------------------------------------------------------

TEST_SIZES = (5, 13, 8, 0, 13)
LOCAL = Local(epochs=1, batch_size=4, eval_batch_size=4, lr=0.05, optimizer="sgd")


def members(words: bool) -> Members:
    """Clients with 6 training examples, and as many for validation as SIZES says."""
    rng = torch.Generator().manual_seed(3)
    made = [tuple(labelled_pictures(size, rng, words) for size in (6, count, 2)) for count in TEST_SIZES]
    return Members({f"c{number}": TableData(*parts) for number, parts in enumerate(made)})


def dropping() -> Small:
    return Small(dropout=0.5)


class Head(Small):
    """Only the layer learns, so that rows of clients are told apart without ``vmap``."""

    def __init__(self) -> None:
        super().__init__(dropout=0.5)
        self.body.requires_grad_(False)
        self.frozen |= {"body.weight", "body.bias"}


def small_vilt() -> nn.Module:
    return vilt_tiny(
        4, 9, width=8, layers=2, attention_heads=2, image_size=16, patch=8, max_length=4, trainable="top"
    )  # fmt: skip


def evaluated_setup(algorithm: Algorithm, build: Callable[[], nn.Module], **options: Any) -> Setup:
    options = {"local": LOCAL, **options}
    return Setup(algorithm, members(build is small_vilt), options.pop("task", VQA(4)), build=build, rounds=1, **options)


def evaluated(
    evaluated_setup: Setup, at_once: int, limit: int = 0
) -> tuple[dict[str, Any], dict[str, Tensor], int, int]:
    """Trained one by one and evaluated; results, counts, passes of the evaluation, and clients evaluated at once."""
    store = MemoryStore()
    trained = InProcess(evaluated_setup)
    simulation = Simulation(evaluated_setup, store, trained)
    last = list(simulate(simulation, simulation.start(trained.workspace)))[-1]
    executor = InProcess(replace(evaluated_setup, batch_clients=at_once))
    judge = Simulation(replace(evaluated_setup, batch_clients=at_once), store, executor)
    model, counts, together = executor.workspace.model, dict[str, Tensor](), [0]
    before = model.passes if isinstance(model, Small) else 0

    def counted(view: str, place: str, of_place: Mapping[str, Tensor]) -> None:
        counts.update({f"{view}/{place}/{name}": tensor for name, tensor in of_place.items()})

    def stacked(values: Any, *rest: Any) -> Any:
        together[0] += len(next(iter(values.values())))
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


@pytest.mark.parametrize("build", [dropping, Head, small_vilt], ids=["vmap", "joint", "vilt"])
@pytest.mark.parametrize("at_once", [2, 5])
@pytest.mark.parametrize("limit", [0, 6])
def test_models_at_once_score_what_they_score_alone(build: Callable[[], nn.Module], at_once: int, limit: int):
    alone = evaluated(evaluated_setup(FedAvg(), build), 1, limit)
    at = evaluated(evaluated_setup(FedAvg(), build), at_once, limit)
    assert alone[3] == 0
    assert at[3] == (5 if at_once == 5 else 4)  # the fifth has no partner
    same(alone[0], at[0])
    assert set(alone[0]["personal"]) == {"c0", "c1", "c2", "c4"}  # c3 has no validation examples
    weights = {place: next(iter(t.values()))[1] for place, t in at[0]["personal"].items()}
    assert weights == {"c0": 5, "c1": 8 if limit else 13, "c2": 8, "c4": 8 if limit else 13}


def test_with_cohorts_a_resumed_run_has_the_same_numbers():
    # Which own models were evaluated before is known to the process that did so only, so that none are stacked.
    whole = replace(evaluated_setup(FedAvg(), Head), batch_clients=5)
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
    found = evaluated(evaluated_setup(FedAvg(), Head), 5)[0]
    assert found["personal"]["c1"] != found["global"]["c1"]


def test_it_takes_fewer_passes():
    alone, at_once = (evaluated(evaluated_setup(FedAvg(), Head), k)[2] for k in (1, 5))
    # The global model 12 batches, and own models 2, 4, 2 and 4 one by one. At once four steps, the second of two
    # shapes, and before them the trial of the first step: a pass for each of its four clients and one for all.
    assert alone == 12 + 12
    assert at_once == 12 + 5 + 5


def test_methods_that_train_one_by_one_are_evaluated_at_once():
    alone, at_once = (evaluated(evaluated_setup(MOON(projection=False), Head), k) for k in (1, 5))
    assert at_once[3] == 5
    same(alone[0], at_once[0])


def test_private_tensors_belong_to_their_client():
    alone, at_once = (evaluated(evaluated_setup(FedPer(head=("head",)), dropping), k) for k in (1, 5))
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
    alone = evaluated(evaluated_setup(FedAvg(), small_vilt), 1)
    kept = evaluated(evaluated_setup(FedAvg(), small_vilt, features=features), 5)
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
    alone, at_once = (evaluated(evaluated_setup(method, Head, local=local), k) for k in (1, 5))
    assert at_once[3] == 0
    same(alone[0], at_once[0])


def test_what_torch_cannot_map_is_noted(monkeypatch: pytest.MonkeyPatch):
    from confed.engines import executor as module

    def broken(*arguments: Any) -> Any:
        raise RuntimeError("no rule for this layer")

    alone = evaluated(evaluated_setup(FedAvg(), Head), 1)
    monkeypatch.setattr(module, "evaluate_stacked", broken)
    whole = replace(evaluated_setup(FedAvg(), Head), batch_clients=5)
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
    whole = replace(evaluated_setup(FedAvg(), Head), population=Members(data))
    with pytest.raises(RuntimeError, match="evaluation on 'c2' failed: ValueError: a torn picture"):
        evaluated(whole, 5)


# Promises of methods that are trained at once ---------------------------------------------------------------------


def same_bits(given: Setup, reason: str) -> None:
    """Trained one by one, for a reason, with the bits of the reference."""
    expected, found = outcome(given), matrix_cases.stacked(given)
    assert reason in found.executor.unbatchable_reason
    assert all(torch.equal(t, found.tensors[n]) for n, t in expected.tensors.items() if n.startswith("main"))


def close(given: Setup) -> None:
    """Trained at once, as one by one."""
    expected, found = outcome(given), matrix_cases.stacked(given)
    assert found.executor.unbatchable_reason == ""
    assert apart(expected, found) < 1e-5


class Within(Plain):
    """A proximal term that is read from the tensors while the loss is computed."""

    def objective(self, client: Client) -> Objective:
        def losses(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
            loss = client.task.loss(model(batch), batch)
            yield loss + sum(client.tensors[name].square().sum() for name in client.incoming)

        return losses


class Before(Plain):
    """The same, with tensors that are read when the objective is made."""

    def objective(self, client: Client) -> Objective:
        learning = [client.tensors[name] for name in client.incoming]

        def losses(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
            loss = client.task.loss(model(batch), batch)
            yield loss + sum(tensor.square().sum() for tensor in learning)

        return losses


class After(Plain):
    """A loss that is scaled by what the last step made of a tensor."""

    def objective(self, client: Client) -> Objective:
        scale = [1.0]

        def losses(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
            yield scale[0] * client.task.loss(model(batch), batch)
            scale[0] = 1 + float(client.tensors["head.bias"].detach().square().sum())

        return losses


class Teaching(Plain):
    """Distillation from the model that was received."""

    def objective(self, client: Client) -> Objective:
        logits = global_logits(client)

        def losses(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
            output = model(batch)
            yield client.task.loss(output, batch) + (output.logits - logits(batch)).square().mean()

        return losses


class Peeking(Plain):
    """A penalty on weights that are read from the model itself."""

    def objective(self, client: Client) -> Objective:
        def losses(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
            yield client.task.loss(model(batch), batch) + client.model.get_parameter("head.weight").square().sum()

        return losses


class Drawing(Plain):
    """A loss with random weights."""

    def objective(self, client: Client) -> Objective:
        def losses(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
            yield torch.rand(()) * client.task.loss(model(batch), batch)

        return losses


class Faster(Plain):
    """Two rates."""

    def lr_factor(self, name: str) -> float:
        return 3.0 if name.startswith("head") else 0.5


PLAIN_ADAMW = replace(PLAIN_SGD, optimizer="adamw", lr=3e-3, weight_decay=0.1)


@pytest.mark.parametrize("algorithm", [Within(), Before(), After()], ids=["within", "before", "after"])
def test_values_read_around_the_loss_of_a_batch(algorithm: Algorithm):
    close(setup_of(algorithm, PLAIN_SGD))
    assert apart(outcome(setup_of(algorithm, PLAIN_SGD)), outcome(setup_of(Plain(), PLAIN_SGD))) > 1e-3


@pytest.mark.parametrize(
    ("algorithm", "reason"),
    [
        (Teaching(), "reads 'parameters' of the client's model"),
        (Peeking(), "reads 'get_parameter' of the client's model"),
        (Drawing(), "torch's global generators are drawn from"),
    ],
    ids=lambda given: type(given).__name__ if isinstance(given, Algorithm) else "",
)
def test_a_broken_promise_is_trained_one_by_one(algorithm: Algorithm, reason: str):
    same_bits(setup_of(algorithm, PLAIN_SGD), reason)


@pytest.mark.parametrize(
    "local",
    [
        PLAIN_ADAMW,
        replace(PLAIN_ADAMW, clip=0.1, iterations=7),
        replace(PLAIN_SGD, momentum=0.9, weight_decay=0.3, iterations=5),
        replace(PLAIN_SGD, iterations=1),
    ],
    ids=["adamw", "adamw, clip, iterations", "sgd with all", "one step"],
)
def test_rates_by_tensor_and_numbers_of_steps(local: Local):
    # With 7 steps each of 4 clients is in another epoch, and last batches have other sizes.
    close(setup_of(Faster(), local))
    assert apart(outcome(setup_of(Faster(), local)), outcome(setup_of(Plain(), local))) > 1e-3


class Counting(Chain):
    """A model whose running mean of what it sees is a shared buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))

    def forward_stages(self, state: Any, first: int, last: int, batch: Batch) -> Any:
        output = super().forward_stages(state, first, last, batch)
        if self.training and last == 2:
            self.get_buffer("seen").mul_(0.9).add_(output.features.detach().mean(0), alpha=0.1)
        return output


def test_a_buffer_that_passes_change_is_every_clients_own():
    given = replace(setup_of(Plain(), PLAIN_SGD), build=Counting)
    expected, found = outcome(given), matrix_cases.stacked(given)
    assert float(expected.tensors["main/params/seen"].abs().max()) > 1e-3
    assert found.executor.unbatchable_reason == ""
    assert apart(expected, found) < 1e-5


class Noisy(Chain):
    """A model that is evaluated with noise."""

    def forward_stages(self, state: Any, first: int, last: int, batch: Batch) -> Any:
        output = super().forward_stages(state, first, last, batch)
        if self.training or last < 2:
            return output
        return output._replace(logits=output.logits + torch.rand_like(output.logits))


def test_models_with_noise_are_evaluated_one_by_one():
    given = replace(setup_of(Plain(), PLAIN_SGD), build=Noisy)
    expected, found = outcome(given), matrix_cases.stacked(given)
    assert found.executor.unbatchable_reason == ""
    assert found.executor.unbatchable_evaluation_reason
    assert {n: v for n, v in found.numbers.items() if "global" in n} == pytest.approx(
        {n: v for n, v in expected.numbers.items() if "global" in n}, abs=1e-5
    )


class Shifting(Plain):
    """Own models are shown what the server sent, by an action that takes the place of the plain one."""

    def actions(self) -> Any:
        def shown(client: Client, message: Message) -> Message:
            reply = Algorithm.evaluate(self, client, message)
            total = float(sum(tensor.double().sum() for tensor in message.tensors.values()))
            own = {"personal:loss:sum": total, "personal:loss:weight": 1.0}
            return replace(reply, scalars={**reply.scalars, **own})

        return {**super().actions(), "evaluate": shown}


def test_own_ways_of_evaluation_are_asked_each_time():
    # Scores of own models whose clients were asked for nothing since are known otherwise.
    given = setup_of(Shifting(), PLAIN_SGD)
    executor = InProcess(given)
    with Simulation(given, MemoryStore(), executor) as simulation:
        servers = simulation.start(executor.workspace)
        (server,) = servers.values()
        halved = {"main": replace(server, params={n: t / 2 for n, t in server.params.items()})}
        first, second = (
            simulation.evaluate(each, 0, split="validation")["personal"]["c0"]["loss"][0] for each in (servers, halved)
        )
    assert second == pytest.approx(first / 2)


def _scaled_stem(self: Algorithm, model: nn.Module, rng: torch.Generator) -> None:
    model.register_parameter("gain", nn.Parameter(torch.ones(())))
    model.get_submodule("stem").register_forward_hook(
        lambda module, given, output: output * model.get_parameter("gain")
    )


@dataclass(frozen=True)
class Gained(Plain):
    """A trained scale that a hook puts into a frozen layer."""

    add_modules = _scaled_stem


def kept_of(given: Setup) -> tuple[Outcome, Mapping[str, Any]]:
    found = outcome(replace(given, features=FeatureSettings(10**7)))
    return found, vars(found.executor.features)


def test_a_frozen_layer_in_which_something_learns_is_not_kept():
    given = setup_of(Gained(), PLAIN_SGD)
    found, counts = kept_of(given)
    assert counts["reason"] == "what the frozen layers give depends on a tensor that is trained"
    assert apart(outcome(given), found) == 0.0
    assert not torch.equal(found.tensors["main/params/gain"], torch.ones(()))

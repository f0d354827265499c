"""Local training: optimisers, schedules, augmentation, and classes that are not offered."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from confed.algorithms.fedavg import FedAvg
from confed.algorithms.feddc import FedDC
from confed.algorithms.scaffold import Scaffold
from confed.data.examples import TableData
from confed.data.table import Table
from confed.engines.local import Simulation, Workspace
from confed.federation.actions import among_offered
from confed.federation.batches import MIRRORED, training_batches
from confed.federation.client import Client
from confed.federation.evaluate import Tally, evaluate
from confed.federation.families.split import _batches
from confed.federation.local import Local, Schedule, make_optimizer
from confed.federation.params import Scope
from confed.federation.protocols import Batch, Output
from confed.federation.randomness import derive, generator, isolated, sample_cohort
from confed.federation.state import ClientState, MemoryStore
from confed.federation.teacher import global_logits, once_per_round, teacher
from confed.federation.train import Objective, epoch_steps, train
from confed.recipes.recipe import load_recipe
from confed.tasks.vqa import VQA
from confed.testing.toy import ToyTask, toy_clients, toy_model, toy_setup
from refusals import refuses
from toy_runs import client_in, simulated


def _client(local: Local, noisy: bool = False, round: int = 0, rounds: int = 1) -> Client:
    client = client_in(toy_setup(FedAvg(), local=local, noisy=noisy, rounds=rounds), round=round)
    client.load(client.initial)
    return client


def _objective(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
    yield ToyTask().loss(model(batch), batch)


def test_training_equals_a_plain_loop() -> None:
    local = Local(epochs=2, batch_size=6, lr=0.02, weight_decay=0.1, clip=0.5)
    client = _client(local)
    mean_loss = train(client, _objective)
    model = toy_model(noisy=False)
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
                                  lr=0.02)  # fmt: skip
    losses = []
    for epoch in range(2):
        order = torch.randperm(20, generator=generator(0, 0, "client-1", f"order/{epoch}"))
        for rows in order.split(6):
            batch = client.data.tables[0].batch(rows)
            loss = ToyTask().loss(model(batch), batch)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(matrices + vectors, 0.5)
            optimizer.step()
            losses.append(float(loss.detach()))
    assert mean_loss == pytest.approx(sum(losses) / len(losses), abs=1e-6)
    for name, value in model.state_dict().items():
        assert torch.allclose(client.tensors[name], value, atol=1e-6), name


def test_two_losses_are_two_successive_steps() -> None:
    client = _client(Local(epochs=1, batch_size=20, lr=0.1, optimizer="sgd", weight_decay=0.0))
    seen: list[Tensor] = []

    def objective(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
        for _ in range(2):
            seen.append(client.tensors["head.bias"].detach().clone())
            yield ToyTask().loss(model(batch), batch)

    train(client, objective)
    assert not torch.equal(seen[0], seen[1])


def _two_steps(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
    for _ in range(2):
        yield ToyTask().loss(model(batch), batch)


@pytest.mark.parametrize("objective", [_objective, _two_steps])
def test_accumulated_gradients_are_those_of_larger_batches(objective: Objective) -> None:
    # 20 examples: steps of 6, 6, 6 and 2 of them in both cases.
    common = {"epochs": 2, "lr": 0.02, "clip": 0.5, "schedule": Schedule("linear", warmup=0.2)}
    small = _client(Local(batch_size=2, accumulate=3, **common))  # type: ignore[arg-type]
    large = _client(Local(batch_size=6, **common))  # type: ignore[arg-type]
    assert epoch_steps(small) == epoch_steps(large) == 4
    assert train(small, objective) == pytest.approx(train(large, objective), abs=1e-6)
    for name, value in large.tensors.items():
        torch.testing.assert_close(small.tensors[name], value, atol=1e-6, rtol=1e-5)
    plain = _client(Local(batch_size=2, **common))  # type: ignore[arg-type]
    train(plain, objective)
    assert not torch.allclose(plain.tensors["head.bias"], large.tensors["head.bias"], atol=1e-4)


def test_adamw_with_moments_of_8_bits_steps_nearly_like_adamw() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    weights = [torch.randn(64, 128, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2)]
    local = Local(lr=0.01, weight_decay=0.1)
    optimizers = [
        make_optimizer([w], replace(local, optimizer=o)) for w, o in zip(weights, ("adamw", "adamw8bit"), strict=True)
    ]
    assert isinstance(optimizers[1], bitsandbytes.optim.AdamW8bit)
    start = weights[0].detach().clone()
    for _ in range(20):
        for weight, optimizer in zip(weights, optimizers, strict=True):
            optimizer.zero_grad()
            (weight - 1).square().sum().backward()
            optimizer.step()
    assert optimizers[1].state[weights[1]]["state1"].dtype == torch.uint8
    moved = [(weight.detach() - start).norm() for weight in weights]
    assert moved[0] > 1
    assert (weights[0] - weights[1]).norm() < 0.05 * moved[0]


class Still(nn.BatchNorm1d):
    def train(self, mode: bool = True) -> nn.BatchNorm1d:
        return super().train(False)


def test_batch_normalisation_leaves_out_a_last_batch_of_one() -> None:
    seen: list[int] = []

    def objective(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
        seen.append(len(batch["index"]))
        yield ToyTask().loss(model(batch), batch)

    for size, noisy, wanted in [(19, True, [19]), (19, False, [19, 1]), (18, True, [18, 2]), (20, True, [20])]:
        client = _client(Local(epochs=2, batch_size=size), noisy=noisy)  # 20 examples
        seen.clear()
        train(client, objective)
        assert seen == 2 * wanted
        assert epoch_steps(client) == len(wanted)
    # Layers whose statistics stand still need no second example.
    client = _client(Local(epochs=1, batch_size=19), noisy=True)
    client.model.add_module("norm", Still(8))
    seen.clear()
    train(client, objective)
    assert seen == [19, 1]


def test_batch_normalisation_needs_two_examples() -> None:
    with pytest.raises(ValueError, match=r"at least two examples per batch.*'client-1' has 20 .*batch_size is 1"):
        train(_client(Local(batch_size=1), noisy=True), _objective)
    client = _client(Local(batch_size=4), noisy=True)
    client.data = toy_clients(sizes=(1, 1))["client-1"]
    refuses("has 1 training examples", train, client, _objective)
    for method in (FedAvg(), FedDC(correction="on"), Scaffold("steps")):
        setup = toy_setup(method, clients=toy_clients(sizes=(13, 5, 8)), rounds=2)
        assert not any(record.errors for record in simulated(setup).records)


@pytest.mark.parametrize(
    ("schedule", "wanted"),
    [
        (Schedule("constant"), {0.0: 1, 0.5: 1, 1.0: 1}),
        (Schedule("linear"), {0.0: 1, 0.25: 0.75, 1.0: 0}),
        (Schedule("cosine"), {0.0: 1, 0.5: 0.5, 1.0: 0}),
        (Schedule("linear", warmup=0.1), {0.0: 0, 0.05: 0.5, 0.1: 1, 0.55: 0.5}),
    ],
)
def test_a_schedule_has_its_factor_at_each_share_of_the_steps(schedule: Schedule, wanted: dict[float, float]) -> None:
    assert {p: schedule.factor(p) for p in wanted} == pytest.approx(wanted, abs=1e-9)


def test_the_teacher_is_the_received_model_and_copies_nothing() -> None:
    client = _client(Local(), noisy=True)
    batch = next(iter(client.data.test(50)))
    predict = teacher(client.model, client.incoming)
    client.model.eval()
    wanted = client.model(batch).logits.detach().clone()
    client.model.train()
    with torch.no_grad():
        for name in client.names(Scope.SHARED):
            if client.tensors[name].is_floating_point():
                client.tensors[name].add_(1.0)
    moved = {n: t.detach().clone() for n, t in client.tensors.items()}
    got = predict(batch)
    assert torch.equal(got.logits, wanted)
    assert not got.logits.requires_grad
    assert client.model.training
    assert all(torch.equal(moved[n], t) for n, t in client.tensors.items())


def test_global_logits_are_computed_once_per_example_and_round(monkeypatch: pytest.MonkeyPatch) -> None:
    client = _client(Local(epochs=3, batch_size=7))
    calls: list[int] = []
    original = type(client.model).forward
    monkeypatch.setattr(
        type(client.model), "forward", lambda self, b: (calls.append(len(b["x"])), original(self, b))[1]
    )
    lookup = global_logits(client)
    first = {}
    for epoch in range(3):
        for batch in client.data.train(7, client.rng(f"order/{epoch}")):
            for row, logits in zip(batch["index"].tolist(), lookup(batch), strict=True):
                assert torch.allclose(first.setdefault(row, logits), logits)
    assert sum(calls) == len(client.data)
    client.data.deterministic = False
    calls.clear()
    lookup = global_logits(client)
    for _ in range(2):
        lookup(next(iter(client.data.test(50))))
    assert len(calls) == 2


def test_bf16_trains_and_keeps_fp32_weights() -> None:
    client = _client(Local(epochs=3, batch_size=10, lr=0.05, precision="bf16"))
    before = train(client, _objective)
    after = train(client, _objective)
    assert after < before
    assert all(t.dtype == torch.float32 for t in client.model.parameters())


def test_derived_seeds_differ_by_every_part() -> None:
    assert derive(0, 1, "ann", "order") == derive(0, 1, "ann", "order")
    others = {derive(s, r, c, p) for s in (0, 1) for r in (0, 1) for c in ("ann", "bob") for p in ("a", "b")}
    assert len(others) == 16
    state = torch.get_rng_state()
    with isolated(3):
        one = torch.rand(4)
    with isolated(3):
        assert torch.equal(one, torch.rand(4))
    assert torch.equal(state, torch.get_rng_state())


def test_cohorts_are_sorted_without_repeats_and_fair() -> None:
    assert sample_cohort(5, 5, 0, 0) == [0, 1, 2, 3, 4]
    assert sample_cohort(10**9, 3, 0, 0) != sample_cohort(10**9, 3, 1, 0)
    counts = [0] * 10
    for round in range(500):
        cohort = sample_cohort(10, 3, 0, round)
        assert cohort == sorted(set(cohort))
        for number in cohort:
            counts[number] += 1
    assert all(100 < count < 200 for count in counts)
    refuses("at least one client", sample_cohort, 0, 1, 0, 0)
    refuses("between 1 and 5 clients, got 6", sample_cohort, 5, 6, 0, 0)


def test_clients_with_few_or_no_examples() -> None:
    clients = toy_clients(sizes=(12, 1, 0))
    setup = toy_setup(FedAvg(), clients=clients, noisy=False, rounds=2)
    records = simulated(setup).records
    assert [set(r.losses) for r in records] == [{"client-0", "client-1"}] * 2
    assert "has no training examples" in records[0].errors["client-2"]


def test_when_everybody_fails_the_run_says_why() -> None:
    setup = toy_setup(FedAvg(), clients=toy_clients(sizes=(0, 0)))
    with pytest.raises(RuntimeError, match=r"every client failed in round 1; client-0: .*no training examples"):
        simulated(setup)


def test_a_federation_without_clients_is_refused() -> None:
    refuses("at least one client, got 0", Simulation, toy_setup(FedAvg(), clients={}), MemoryStore())


def test_what_came_is_in_the_order_of_the_model() -> None:
    client = _client(Local())
    names = client.names(Scope.SHARED)
    client.load({n: client.incoming[n] for n in reversed(names)})
    assert list(client.incoming) == names


def _bias(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
    """A loss of slope 1 in every value of the bias, so that plain SGD moves it by the sum of the rates."""
    yield model.get_parameter("head.bias").sum()


def _bias_twice(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
    for _ in range(2):
        yield model.get_parameter("head.bias").sum()


def _moved(client: Client, objective: Objective) -> float:
    before = client.tensors["head.bias"].detach().clone()
    train(client, objective)
    return float((before - client.tensors["head.bias"].detach()).mean())


PLAIN = Local(epochs=1, batch_size=6, lr=0.1, optimizer="sgd", weight_decay=0.0)  # 20 examples: 4 steps per epoch


def test_iterations_may_stop_in_the_middle_of_an_epoch() -> None:
    def indices(local: Local) -> list[list[int]]:
        seen: list[list[int]] = []

        def objective(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
            seen.append(batch["index"].tolist())
            yield from _objective(model, batch)

        train(_client(local), objective)
        return seen

    two_epochs = indices(replace(PLAIN, epochs=2))
    assert indices(replace(PLAIN, iterations=6)) == two_epochs[:6]
    assert indices(replace(PLAIN, iterations=3)) == two_epochs[:3]
    assert len(indices(replace(PLAIN, iterations=9, accumulate=2))) == 18  # 2 + 2 steps of an epoch: 3, 3, 1 batches


def test_the_schedule_over_the_run_ends_with_the_iterations() -> None:
    local = replace(PLAIN, iterations=6, schedule=Schedule("linear"))
    moved = [_moved(_client(local, round=r, rounds=2), _bias) for r in (0, 1)]
    assert moved == pytest.approx([0.1 * sum(1 - (6 * r + k) / 12 for k in range(6)) for r in (0, 1)], abs=1e-6)


@pytest.mark.parametrize("round", [0, 3])
def test_a_schedule_with_a_horizon_begins_anew(round: int) -> None:
    # Warm-up over half of 5 epochs of 4 steps: update k has the factor k / 10.
    local = replace(PLAIN, schedule=Schedule("linear", warmup=0.5, horizon=5))
    assert _moved(_client(local, round=round, rounds=4), _bias) == pytest.approx(0.1 * 0.6, abs=1e-6)
    assert _moved(_client(local, round=round, rounds=4), _bias_twice) == pytest.approx(0.1 * 2.8, abs=1e-6)
    plain = replace(local, schedule=replace(local.schedule, horizon=0))
    over_the_run = _moved(_client(plain, round=round, rounds=4), _bias)
    assert over_the_run != pytest.approx(0.1 * 0.6, abs=1e-3)


def test_feddats_released_schedule_has_its_mean_factors() -> None:
    # 1,250 batches per epoch, 15 epochs; Adapter steps once per batch, FedDAT twice.
    local = Local(schedule=Schedule("linear", warmup=0.1, horizon=15))
    factors = [local.schedule.factor(local.progress(0, 20, 1250, k)) for k in range(2500)]
    assert sum(factors[:1250]) / 1250 == pytest.approx(0.333, abs=0.001)
    assert max(factors[:1250]) == pytest.approx(0.666, abs=0.001)
    assert sum(factors) / 2500 == pytest.approx(0.620, abs=0.001)


def test_a_methods_rates_scale_single_tensors() -> None:
    client = _client(PLAIN)
    client.lr_factor = lambda name: 0.25 if name == "head.bias" else 1.0
    assert _moved(client, _bias) == pytest.approx(0.25 * 0.4, abs=1e-6)
    scheduled = _client(replace(PLAIN, schedule=Schedule("linear")), rounds=1)
    scheduled.lr_factor = client.lr_factor
    assert _moved(scheduled, _bias) == pytest.approx(0.25 * 0.1 * (1 + 0.75 + 0.5 + 0.25), abs=1e-6)


def test_a_horizon_needs_a_schedule_and_epochs() -> None:
    refuses("must be 0 with it, got 3", Local, schedule=Schedule("linear", horizon=2), iterations=3)
    refuses("horizon needs a", Schedule, horizon=2)


N = 40


def pictures() -> TableData:
    """Every picture has its number in its left column and zeros elsewhere."""
    images = torch.zeros(N, 3, 2, 4, dtype=torch.uint8)
    images[:, :, :, 0] = torch.arange(1, N + 1, dtype=torch.uint8).view(-1, 1, 1)
    old = toy_clients(sizes=(N,))["client-0"].tables[0]
    table = Table(images, torch.arange(N), old.columns)
    return TableData(table, table, table)


def client(data: object, round: int = 0, name: str = "client-1", seed: int = 0, **local: object) -> Client:
    settings = Local(**{"epochs": 2, "batch_size": 7, "augment": "flip", **local})  # pyright: ignore
    setup = toy_setup(FedAvg(), local=settings)
    workspace = Workspace(setup.build())
    info = replace(setup.population.info(1), id=name)
    made = Client(
        info, data, workspace.model, workspace.tensors, ToyTask(), settings, ClientState(),  # pyright: ignore
        workspace.scopes(FedAvg(), info), workspace.initial, round, 3, seed=seed,
    )  # fmt: skip
    made.load({name: value.clone() for name, value in workspace.initial.items()})
    return made


def turned(who: Client, purpose: str = "order/0") -> Tensor:
    """Which examples are mirrored in an epoch, in the examples' order, as their pixels say."""
    found = torch.zeros(N, dtype=torch.bool)
    for batch in training_batches(who, purpose):
        left, right = batch["image"][:, 0, 0, 0], batch["image"][:, 0, 0, 3]
        assert torch.equal((left + right).long(), batch["index"] + 1)  # either way it is the example's picture
        assert torch.equal(batch[MIRRORED], left == 0)
        found[batch["index"]] = left == 0
    return found


def test_a_draw_is_a_function_of_its_seed_and_example() -> None:
    data = pictures()
    first = turned(client(data))
    assert 0.25 < first.float().mean() < 0.75
    assert torch.equal(first, turned(client(data)))
    assert torch.equal(first, turned(client(data, batch_size=N)))  # whatever the batches are
    others = [client(data, round=1), client(data, name="client-2"), client(data, seed=1)]
    assert all(not torch.equal(first, turned(other)) for other in others)
    assert not torch.equal(first, turned(client(data), "order/1"))


def test_off_by_default_and_never_in_evaluations() -> None:
    data = pictures()
    assert Local().augment == "none"
    for batch in training_batches(client(data, augment="none"), "order/0"):
        assert MIRRORED not in batch
        assert (batch["image"][:, 0, 0, 0] > 0).all()
    for batch in (*data.validation(7), *data.test(7)):
        assert (batch["image"][:, 0, 0, 0] > 0).all()


def test_training_and_split_learning_see_the_same_pictures() -> None:
    seen: list[Batch] = []

    def objective(model: torch.nn.Module, batch: Batch) -> Iterator[Tensor]:
        seen.append(batch)
        yield model(batch).logits.square().mean()

    who = client(pictures())
    train(who, objective)
    assert torch.equal(torch.cat([b[MIRRORED] for b in seen[: len(seen) // 2]]).sum(), turned(who).sum())
    for whole, split in zip(seen, _batches(who, 0), strict=True):
        assert torch.equal(whole["image"], split["image"])


def test_what_a_teacher_keeps_is_of_the_side_that_is_seen() -> None:
    who, calls = client(pictures(), epochs=6), list[int]()

    def compute(batch: Batch) -> Tensor:
        calls.append(len(batch["index"]))
        return batch["image"][:, 0, 0].float()

    kept = once_per_round(who, compute)
    for epoch in range(6):
        for batch in training_batches(who, f"order/{epoch}"):
            assert torch.equal(kept(batch), batch["image"][:, 0, 0].float())
    assert sum(calls) < 6 * N  # something was looked up
    plain = once_per_round(client(pictures(), augment="none"), compute)
    calls.clear()
    for epoch in range(6):
        for batch in training_batches(client(pictures(), augment="none"), f"order/{epoch}"):
            plain(batch)
    assert sum(calls) == N


def test_pictures_with_computed_columns_stay_as_they_are() -> None:
    data = pictures()
    data.fixed = True  # pyright: ignore[reportAttributeAccessIssue]
    assert all(MIRRORED not in batch for batch in training_batches(client(data), "order/0"))


def test_regions_are_not_mirrored() -> None:
    class WithRegions(TableData):
        def train(self, batch_size: int, rng: torch.Generator) -> Iterator[dict[str, Tensor]]:
            return ({**batch, "regions": torch.zeros(len(batch["index"]), 1, 1)} for batch in super().train(7, rng))

    with pytest.raises(ValueError, match=r'local\.augment must be "none" for a model that reads regions'):
        next(iter(training_batches(client(WithRegions(*pictures().tables)), "order/0")))


@pytest.mark.parametrize("name", ["fedlgt_flair", "fedlgt_flair_fine", "fedlgt_coco", "fedlgt_voc"])
def test_recipes_of_the_released_code_mirror(name: str) -> None:
    recipe = load_recipe(name, ["data.root=somewhere"])
    assert {recipe.method(row).local.augment for row in recipe.table or recipe.methods} == {"flip"}
    refuses(r"local\.augment", load_recipe, name, ["data.root=somewhere", "local.augment=rotate"])


LOGITS = torch.tensor([[3.0, 1.0, 2.0], [0.0, 5.0, 1.0]])
BATCH = {"label": torch.tensor([2, 2]), "offered": torch.tensor([[False, True, True], [True, False, True]])}


class Fixed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(LOGITS)

    def forward(self, batch: object) -> Output:
        return Output(self.logits, self.logits)


def test_loss_and_accuracy_are_those_among_offered_classes() -> None:
    task = VQA(3)
    wanted = -torch.stack([LOGITS[0, 1:].log_softmax(0)[1], LOGITS[1, [0, 2]].log_softmax(0)[1]]).mean()
    torch.testing.assert_close(task.loss(Output(LOGITS, LOGITS), BATCH), wanted)
    assert task.predictions(Output(LOGITS, LOGITS), BATCH).tolist() == [1, 1]
    assert task.predictions(Output(LOGITS, LOGITS), {"label": BATCH["label"]}).tolist() == [0, 0]


def test_recorded_answers_are_offered_ones() -> None:
    tally = evaluate(Fixed(), Tally(VQA(3), each=True), [BATCH])
    assert tally.scores[0][1].tolist() == [2, 2]


def test_batches_without_the_column_are_unchanged() -> None:
    assert among_offered(LOGITS, {}) is LOGITS

"""DP-SGD: clipped gradients of single records, Poisson samples, noise, the ledger, and what is refused."""

import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from scipy.stats import beta
from torch import Tensor, nn
from torch.nn import functional

from confed.algorithms.fedavg import FedAvg
from confed.data.examples import TableData
from confed.engines.local import Workspace
from confed.engines.perform import client_of
from confed.federation import record_gradients
from confed.federation.client import Client
from confed.federation.local import Local
from confed.federation.messages import Call, Message
from confed.federation.protocols import Batch, Output, Task
from confed.federation.record_gradients import RecordGradients, sampling_rate, unprotected_reason
from confed.federation.record_privacy import RecordPrivacy
from confed.federation.state import ClientState
from confed.federation.train import Objective, train, trained, with_task
from confed.privacy.accountant import LOSS_STEP, poisson_epsilon
from confed.privacy.audit import audited_epsilon
from confed.recipes.recipe import load_recipe
from confed.results.folder import RunFolder, read_jsonl
from confed.runs.run import prepare, run
from confed.tasks.vqa import VQA
from confed.testing.toy import CLASSES, toy_clients, toy_model, toy_setup
from refusals import refuses

CLIP = 0.3


class TwoLayers(nn.Module):
    """Linear layers before and behind a normalisation, over three positions of an example."""

    answer_head = None

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3, bias=False)

    def forward(self, batch: Batch) -> Output:
        hidden = self.norm(torch.tanh(self.first(batch["x"])))
        features = hidden.mean(dim=1)
        return Output(self.last(features), features)


def client_with(model: nn.Module, task: Task) -> Client:
    setup = toy_setup(FedAvg(record_privacy=RecordPrivacy(CLIP)), noisy=False)
    workspace = Workspace(setup.model())
    info = setup.population.info(0)
    client = client_of(setup, workspace, Call(info, "fit", Message()), ClientState(), 0)
    return replace(client, model=model, tensors=dict(model.named_parameters()), task=task)


def plain(client: Client) -> Objective:
    def losses(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
        yield client.task.loss(model(batch), batch)

    return losses


def clipped_by_hand(model: nn.Module, batch: Batch, clip: float) -> dict[str, Tensor]:
    """Sums of clipped gradients, each by its own pass and formula."""
    sums = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for row in range(len(batch["label"])):
        model.zero_grad()
        example = {name: column[row : row + 1] for name, column in batch.items()}
        functional.cross_entropy(model(example).logits, example["label"]).backward()
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None))
        for name, p in model.named_parameters():
            if p.grad is not None:
                sums[name] += p.grad * min(1.0, clip / norm)
    model.zero_grad()
    return sums


def test_one_pass_gives_the_sums_of_single_passes() -> None:
    model = TwoLayers()
    batch = {"x": torch.randn(7, 3, 4), "label": torch.tensor([0, 1, 2, 0, 1, 2, 1])}
    client = client_with(model, VQA(3, objective="ce"))
    wanted = clipped_by_hand(model, batch, CLIP)
    for objective in (plain(client), FedAvg().objective(client)):
        gradients = RecordGradients(client, partial(with_task, objective), dict(model.named_parameters()), CLIP)
        assert gradients._layers is not None
        passes = [gradients.in_one_pass(batch, gradients._layers), gradients.example_by_example(batch)]
        for sums in (*passes, gradients.clipped_sum(batch)):
            for name, total in wanted.items():
                assert torch.allclose(sums[name].float(), total, atol=1e-4 * CLIP), name
        assert gradients._layers is not None, "the passes agree"


def test_a_mean_that_clips_like_a_sum_is_not_taken_for_one() -> None:
    model = TwoLayers()
    client, few = client_with(model, VQA(3, objective="ce")), {"x": torch.randn(2, 3, 4), "label": torch.tensor([0, 1])}

    def mean(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
        yield functional.cross_entropy(model(batch).logits, batch["label"])

    gradients = RecordGradients(client, partial(with_task, mean), dict(model.named_parameters()), 1e-3)
    gradients.clipped_sum(few)
    assert gradients._layers is None


def test_samples_come_in_few_sizes_and_fillers_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    local = Local(epochs=4, batch_size=16, lr=0.1, optimizer="sgd")
    setup = toy_setup(FedAvg(record_privacy=RecordPrivacy(CLIP)), noisy=False, local=local,
                      clients=toy_clients(0, (64, 64)))  # fmt: skip
    ends, sizes = list[Tensor](), set[int]()
    for parts in (8, 10**6):  # with fillers and without
        monkeypatch.setattr(record_gradients, "SIZES", parts)
        call = Call(setup.population.info(0), "fit", Message())
        client = client_of(setup, Workspace(setup.model()), call, ClientState(), 0)

        def losses(model: nn.Module, batch: Batch, client: Client = client, parts: int = parts) -> Iterator[Tensor]:
            sizes.update([len(batch["index"])] if parts == 8 and len(batch["index"]) > 1 else [])
            yield client.task.loss(model(batch), batch)

        train(client, losses)
        ends.append(torch.cat([tensor.detach().flatten() for tensor in trained(client).values()]))
    assert all(size % 2 == 0 for size in sizes), sizes
    assert torch.allclose(ends[0], ends[1], atol=1e-6)


@pytest.mark.parametrize("twice", ["layer", "weight"])
def test_tied_tensors_have_the_sums_of_single_passes(twice: str) -> None:
    class Tied(nn.Module):
        answer_head = None

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(4)
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
            if twice == "weight":
                self.last.weight = self.first.weight

        def forward(self, batch: Batch) -> Output:
            second = self.first if twice == "layer" else self.last
            features = second(torch.tanh(self.first(batch["x"])))
            return Output(features, features)

    model = Tied()
    batch = {"x": torch.randn(5, 4), "label": torch.tensor([0, 1, 2, 3, 1])}
    learning = {name: tensor for name, tensor in model.named_parameters() if twice == "weight" or "first" in name}
    client = client_with(model, VQA(4, objective="ce"))
    gradients = RecordGradients(client, partial(with_task, plain(client)), learning, CLIP)
    sums, wanted = gradients.clipped_sum(batch), clipped_by_hand(model, batch, CLIP)
    assert gradients._layers is None, "one pass does not see the second use"
    for name in learning:
        assert torch.allclose(sums[name].float(), wanted[name], atol=1e-5 * CLIP), name


def test_accumulated_batches_are_one_sample() -> None:
    setup = toy_setup(FedAvg(record_privacy=RecordPrivacy(CLIP)), noisy=False, clients=toy_clients(0, (32, 32)),
                      local=Local(batch_size=4, accumulate=3))  # fmt: skip
    call = Call(setup.population.info(0), "fit", Message())
    client = client_of(setup, Workspace(setup.model()), call, ClientState(), 0)
    assert sampling_rate(client) == 12 / 32


def test_a_loss_over_the_batch_is_taken_example_by_example() -> None:
    model = TwoLayers()
    client = client_with(model, VQA(3, objective="ce"))

    def penalised(network: nn.Module, batch: Batch) -> Iterator[Tensor]:
        yield client.task.loss(network(batch), batch) + sum(p.square().sum() for p in model.parameters())

    gradients = RecordGradients(client, partial(with_task, penalised), dict(model.named_parameters()), 1e3)
    gradients.clipped_sum({"x": torch.randn(4, 3, 4), "label": torch.tensor([0, 1, 2, 0])})
    assert gradients._layers is None, "layers do not see a term that reads the weights"


def test_a_step_is_the_noised_mean_of_clipped_gradients() -> None:
    local = Local(epochs=1, batch_size=100, lr=1.0, optimizer="sgd", weight_decay=0.0)
    setups = {noise: toy_setup(FedAvg(record_privacy=RecordPrivacy(CLIP, noise)), noisy=False, local=local)
              for noise in (0.0, 2.0)}  # fmt: skip
    moved: dict[float, Tensor] = {}
    for noise, setup in setups.items():
        workspace = Workspace(setup.model())
        client = client_of(setup, workspace, Call(setup.population.info(0), "fit", Message()), ClientState(), 0)
        learning = trained(client)
        before = {name: tensor.detach().clone() for name, tensor in learning.items()}
        batch = next(iter(cast(TableData, client.data).chosen(torch.arange(len(client.data)), 100)))
        assert train(client, plain(client)) == 0.0, "no loss is told"
        steps = {name: before[name] - tensor.detach() for name, tensor in learning.items()}
        moved[noise] = torch.cat([step.flatten() for step in steps.values()])
        if noise == 0:
            model = toy_model(noisy=False)
            wanted = clipped_by_hand(model, {**batch, "label": batch["label"]}, CLIP)
            for name, step in steps.items():
                assert torch.allclose(step, wanted[name] / len(client.data), atol=1e-5), name
    spread = float((moved[2.0] - moved[0.0]).std()) * len(toy_clients()["client-0"])
    assert spread == pytest.approx(2.0 * CLIP, rel=0.2)


def test_a_second_training_of_a_round_has_noise_of_its_own() -> None:
    local = Local(epochs=1, batch_size=100, lr=1.0, optimizer="sgd", weight_decay=0.0)
    setup = toy_setup(FedAvg(record_privacy=RecordPrivacy(1e-9, 1e9)), noisy=False, local=local)
    ends: dict[str, Tensor] = {}
    for order in ("order", "personal"):
        call = Call(setup.population.info(0), "fit", Message())
        client = client_of(setup, Workspace(setup.model()), call, ClientState(), 0)
        train(client, plain(client), order=order)
        ends[order] = torch.cat([tensor.detach().flatten() for tensor in trained(client).values()])
    assert not torch.allclose(ends["order"], ends["personal"])


def test_samples_are_poisson() -> None:
    sizes: list[int] = []
    local = Local(epochs=300, batch_size=4, lr=1e-9, optimizer="sgd")
    setup = toy_setup(FedAvg(record_privacy=RecordPrivacy(CLIP)), noisy=False, local=local,
                      clients=toy_clients(0, (16, 16)))  # fmt: skip
    call = Call(setup.population.info(0), "fit", Message())
    client = client_of(setup, Workspace(setup.model()), call, ClientState(), 0)

    data: Any = client.data
    seen = data.chosen

    def chosen(numbers: Tensor, batch_size: int) -> Iterator[Batch]:
        sizes.append(len(numbers))
        return seen(numbers, batch_size)

    data.chosen = chosen
    train(client, plain(client))
    assert len(sizes) == 1200, "as many steps as without privacy"
    drawn = torch.tensor(sizes, dtype=torch.float64)
    assert float(drawn.mean()) == pytest.approx(4.0, abs=0.2)
    assert float(drawn.var()) == pytest.approx(16 * 0.25 * 0.75, rel=0.15)
    assert 0 in sizes, "a sample may be empty"


@pytest.mark.parametrize(
    ("noise", "rate", "steps", "published"),
    # Abadi et al. 2016, sections 3.2 and 5.2: sigma 4, q 0.01, 10,000 steps, delta 1e-5 "epsilon 1.26" by moments;
    # privacy loss distributions are tighter. Full batches: the Gaussian mechanism itself.
    [(4.0, 0.01, 10_000, 1.26), (1.0, 1.0, 1, 4.3767)],
)
def test_epsilon_is_not_above_published(noise: float, rate: float, steps: int, published: float) -> None:
    pytest.importorskip("dp_accounting")
    value = poisson_epsilon(noise, rate, steps, 1e-5)
    assert 0.7 * published < value <= published * 1.001


def test_epsilon_agrees_with_renyi_divergences() -> None:
    library = pytest.importorskip("dp_accounting")
    rdp = pytest.importorskip("dp_accounting.rdp")
    accountant = rdp.RdpAccountant(neighboring_relation=library.NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(library.PoissonSampledDpEvent(0.05, library.GaussianDpEvent(1.5)), 400)
    upper, value = accountant.get_epsilon(1e-5), poisson_epsilon(1.5, 0.05, 400, 1e-5)
    assert 0.85 * upper < value <= upper


@pytest.mark.parametrize(("noise", "rate", "steps"), [(1.45, 256 / 704, 30), (7.7, 256 / 704, 30), (1.5, 0.05, 400)])
def test_ten_times_finer_losses_confirm_epsilon(noise: float, rate: float, steps: int) -> None:
    library = pytest.importorskip("dp_accounting")
    pld = pytest.importorskip("dp_accounting.pld")
    accountant = pld.PLDAccountant(library.NeighboringRelation.ADD_OR_REMOVE_ONE, LOSS_STEP / 10)
    accountant.compose(library.PoissonSampledDpEvent(rate, library.GaussianDpEvent(noise)), steps)
    finer = accountant.get_epsilon(1e-5)
    assert finer <= poisson_epsilon(noise, rate, steps, 1e-5) <= finer + 1e-3


@pytest.mark.parametrize(
    ("model", "message"),
    [(nn.Sequential(nn.BatchNorm1d(2)), "normalises over the examples of a batch"), (nn.Linear(2, 2), "")],
)
def test_what_cannot_be_protected_is_said(model: nn.Module, message: str) -> None:
    data = toy_clients(0, (4,))["client-0"]
    reason = unprotected_reason(model, VQA(CLASSES), data)
    assert message in reason
    assert bool(reason) == bool(message)


def test_frozen_batch_normalisation_is_allowed() -> None:
    class Frozen(nn.BatchNorm1d):
        def train(self, mode: bool = True) -> "Frozen":
            return super().train(False)

    assert unprotected_reason(nn.Sequential(Frozen(2)), VQA(2), toy_clients(0, (4,))["client-0"]) == ""


def test_data_without_random_access_are_refused() -> None:
    assert "cannot be sampled" in unprotected_reason(nn.Linear(1, 1), VQA(2), object())


@pytest.mark.parametrize("value", [{"clip": 0.0}, {"clip": 1.0, "noise": -1.0}, {"clip": 1.0, "delta": 1.0}])
def test_ranges_of_options(value: dict[str, Any]) -> None:
    refuses(r"algorithm\.record_privacy", RecordPrivacy, **value)


TINY = (
    "study.methods=[]", "model.name=vilt_tiny", "model.width=16", "model.layers=1", "data.train=40",
    "data.validation=4", "data.test=8", "data.unseen=[]", "run.without=['home', 'commercial']", "local.epochs=1",
    "local.batch_size=8", "run.rounds=3", "run.workers=1", "run.gallery=0", "run.evaluate_every=0",
    "algorithm.record_privacy={clip=1.0, noise=2.0}",
)  # fmt: skip


def test_a_run_has_a_ledger_and_resumes_with_equal_bits(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    folder = RunFolder(tmp_path / "run")
    summary = run(load_recipe("fedvqa_scenes", ["algorithm.name=fedprox", *TINY]), folder.root)
    history = folder.metrics.read_bytes()
    assert not any(line["loss"] for line in read_jsonl(folder.metrics)), "no loss leaves a client"
    spent = summary["example_privacy"]
    assert set(spent["steps"].values()) == {15}
    assert spent["epsilon"] == {name: poisson_epsilon(2.0, 8 / 40, 15, 1e-5) for name in spent["steps"]}
    digests = summary["digests"]
    shutil.rmtree(folder.checkpoint / "round-000003")
    folder.summary.unlink()
    again = run(load_recipe(folder.recipe), folder.root, resume=True)
    assert folder.metrics.read_bytes() == history
    assert again["digests"] == digests


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.name=moon"], "MOON has its own fit and objective, which may go round it"),
        (["algorithm.name=fedpeft", "algorithm.aggregation=fisher"], "sends squared gradients"),
        (
            ["algorithm.name=scaffold", "local.optimizer=sgd"],
            "Scaffold has its own local_training, which may go round it",
        ),
    ],
)
def test_methods_without_it_are_refused_before_round_1(overrides: list[str], message: str) -> None:
    refuses(message, prepare, load_recipe("fedvqa_scenes", [*overrides, *TINY]))


# The audit of one run --------------------------------------------------------------------------------------------


def test_a_perfect_guesser_shows_an_epsilon_and_a_blind_one_none() -> None:
    assert audited_epsilon(1000, 1000, 1000, 0.0) > 5
    assert audited_epsilon(520, 1000, 1000, 0.0) == pytest.approx(0.0, abs=0.05)
    assert audited_epsilon(0, 0, 1000, 1e-5) == 0.0


def test_without_delta_the_bound_is_that_of_randomised_response() -> None:
    # v of r right: epsilon is the logit of the Clopper-Pearson lower bound of the share of right guesses.
    correct, guesses = 80, 100
    lower = float(beta.ppf(0.05, correct, guesses - correct + 1))
    assert audited_epsilon(correct, guesses, 200, 0.0) == pytest.approx(math.log(lower / (1 - lower)), abs=1e-3)


def test_delta_weakens_the_bound() -> None:
    bounds = [audited_epsilon(95, 100, 1000, delta) for delta in (0.0, 1e-5, 1e-3)]
    assert bounds[0] > bounds[1] > bounds[2]


def test_an_audit_holds_its_level() -> None:
    """Guesses of a mechanism that is exactly epsilon-private show more than epsilon in at most 5 % of trials."""
    epsilon, rng = 1.0, np.random.default_rng(0)
    right = rng.binomial(200, 1 / (1 + math.exp(-epsilon)), 400)
    above = [audited_epsilon(int(correct), 200, 200, 0.0) > epsilon for correct in right]
    assert np.mean(above) <= 0.08

"""Forgetting a client: the bytes of a run that never had it, and what the approximation does."""

import json
import math
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy.stats import mannwhitneyu

from command_line import confed as command
from confed.algorithms.fedavg import FedAvg
from confed.federation.checkpoint import Checkpoints
from confed.federation.client import Client
from confed.federation.protocols import Output
from confed.privacy.membership import attack_auc, example_losses
from confed.recipes.recipe import Recipe, load_recipe
from confed.results.folder import RunFolder, read_jsonl
from confed.runs.run import run
from confed.tasks.vqa import VQA
from confed.testing.toy import ToyTask, toy_clients, toy_setup
from confed.unlearning.exact import Approximation, ascend, folder_without, forget
from refusals import refuses
from tiny_runs import stop_in_round
from toy_runs import client_in

TINY = (
    "study.methods=[]", "algorithm.name=fedavg_ft", "model.name=vilt_tiny", "model.width=16", "model.layers=1",
    "data.train=24", "data.validation=8", "data.test=16", "data.unseen=[]",
    "run.without=['home', 'commercial', 'educational']", "local.epochs=1", "run.rounds=4", "run.workers=1",
    "run.gallery=1", "run.evaluate_examples=8", "run.cohort=0.67", "run.keep_checkpoints=joins",
    "run.joins.natural=3",
)  # fmt: skip
APPROXIMATE = ("algorithm.name=fedavg", "run.rounds=1", "run.joins={}", "run.cohort=0", "run.keep_checkpoints=2")


def _tiny(*more: str) -> Recipe:
    return load_recipe("fedvqa_scenes", [*TINY, *more])


def _bytes(root: Path) -> dict[str, bytes]:
    files = [RunFolder(root).metrics, RunFolder(root).predictions, RunFolder(root).gallery]
    return {str(p.relative_to(root)): p.read_bytes() for p in [*files, *sorted(root.glob("models/**/*.safetensors"))]}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forget") / "whole"
    run(_tiny(), folder)
    return folder


@pytest.fixture(scope="module")
def forgotten(whole: Path) -> Path:
    forget(whole, "natural", whole.with_name("forgotten"))
    return whole.with_name("forgotten")


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forget") / "single"
    run(_tiny(*APPROXIMATE), folder)
    return folder


# Exact -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("client", "start"), [("natural", 2), ("sports", 0)])
def test_the_result_is_a_run_that_never_had_the_client(whole: Path, tmp_path: Path, client: str, start: int) -> None:
    before = _bytes(whole)
    result = forget(whole, client, tmp_path / "forgotten")
    never = [f"run.without=['home', 'commercial', 'educational', '{client}']"] + (
        ["run.joins={}"] if client == "natural" else []
    )
    run(_tiny(*never), tmp_path / "never")
    assert result["from_round"] == start
    assert result["problems"] == []
    assert _bytes(tmp_path / "forgotten") == _bytes(tmp_path / "never")
    assert len(_bytes(tmp_path / "never")) == 3 + 1 + 2
    assert _bytes(whole) == before
    for path in tmp_path.glob("forgotten/**/*"):
        assert client not in path.name
    for name in ("metrics.jsonl", "timings.jsonl", "gallery.json"):
        assert client not in (tmp_path / "forgotten" / name).read_text()
    assert 0 <= result["original"]["auc"] <= 1
    assert client not in json.loads((tmp_path / "forgotten/summary.json").read_text())["personal"]


def test_a_damaged_checkpoint_costs_time_only(whole: Path, forgotten: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in whole.rglob("*"):
        target = copy / path.relative_to(whole)
        target.mkdir() if path.is_dir() else target.write_bytes(path.read_bytes())
    victim = next((copy / "checkpoint/round-000002").glob("*.safetensors"))
    victim.write_bytes(victim.read_bytes()[:-1] + b"\x7f")
    result = forget(copy, "natural", tmp_path / "forgotten")
    assert result["from_round"] == 0
    assert "SHA-256" in result["problems"][0]
    assert _bytes(tmp_path / "forgotten") == _bytes(forgotten)


def test_interrupted_forgetting_is_continued_by_the_same_call(whole: Path, forgotten: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        forget(whole, "natural", tmp_path / "forgotten", progress=stop_in_round(3))
    result = forget(whole, "natural", tmp_path / "forgotten")
    assert forget(whole, "natural", tmp_path / "forgotten") == result
    assert _bytes(tmp_path / "forgotten") == _bytes(forgotten)
    refuses("exists already and is not the same request", forget, whole, "sports", tmp_path / "forgotten")


def test_an_unfinished_run_can_be_forgotten_exactly_only(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(_tiny(), tmp_path / "half", progress=stop_in_round(3))
    refuses("is not finished", forget, tmp_path / "half", "natural", approximate=Approximation())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["half"]
    result = forget(tmp_path / "half", "natural")
    assert result["original"]["auc"] is None
    assert result["result"]["auc"] is not None
    assert (tmp_path / "half-without-natural/summary.json").exists()


def test_what_cannot_be_forgotten(whole: Path, tmp_path: Path) -> None:
    refuses("no client is called 'nobody'; there are transport", forget, whole, "nobody", tmp_path / "out")
    refuses("not a run folder", forget, tmp_path, "sports", tmp_path / "out")
    pooled, one, study = (tmp_path / name for name in ("pooled", "one", "study"))
    for folder, change in (
        (pooled, "algorithm.name=central"),
        (one, "run.without=['transport','natural','home','commercial','educational']"),
    ):
        folder.mkdir()
        (folder / "recipe.toml").write_text(_tiny("run.joins={}", change).to_toml())
    study.mkdir()
    (study / "summary.json").write_text('{"runs": []}')
    refuses("pooled run", forget, pooled, "sports")
    refuses("'sports' is the only client", forget, one, "sports")
    refuses("is a study", forget, study, "sports")
    for change in ({"rounds": 0}, {"radius": 0.0}, {"lr": -1.0}):
        refuses(next(iter(change)), Approximation, **change)
    assert not (tmp_path / "out").exists()


# Approximate -----------------------------------------------------------------------------------------------


def test_the_reference_is_the_mean_of_the_others_updates(single: Path, tmp_path: Path) -> None:
    # With steps of no length the start of the new run is the reference itself.
    still = Approximation(rounds=1, epochs=1, lr=1e-12)
    result = forget(single, "sports", tmp_path / "out", approximate=still)
    assert result["ascent"]["reference"] == "mean of the others' updates"
    start = load_file(next((tmp_path / "out/checkpoint/round-000001").glob("*.safetensors")))
    names = ("transport", "natural")
    updates = [load_file(single / f"models/personal/{name}/trained.safetensors") for name in names]
    for name, value in start.items():
        by_hand = np.mean([update[name].double().numpy() for update in updates], axis=0)
        np.testing.assert_allclose(value.numpy(), by_hand, rtol=1e-4, atol=1e-6)


def test_the_reference_may_be_the_final_model(tmp_path: Path) -> None:
    # What Ditto keeps is v; what it sent cannot be taken out of the mean.
    run(_tiny(*APPROXIMATE, "algorithm.name=ditto"), tmp_path / "ditto")
    still = Approximation(rounds=1, epochs=1, lr=1e-12)
    result = forget(tmp_path / "ditto", "sports", tmp_path / "out", approximate=still)
    assert result["ascent"]["reference"] == "final model"
    start = load_file(next((tmp_path / "out/checkpoint/round-000001").glob("*.safetensors")))
    final = load_file(tmp_path / "ditto/models/global/trained.safetensors")
    for name, value in final.items():
        torch.testing.assert_close(start[name], value)


def test_a_client_that_never_took_part_has_no_state(tmp_path: Path) -> None:
    run(_tiny(*APPROXIMATE, "run.cohort=1"), tmp_path / "one")
    (asked,) = (set(line["loss"]) for line in read_jsonl(tmp_path / "one/metrics.jsonl") if line["event"] == "round")
    clients = {"transport", "sports", "natural"}
    assert {path.name for path in (tmp_path / "one/models/personal").iterdir()} == clients  # two of them stand-ins
    forgotten = min(clients - asked)
    forget(tmp_path / "one", forgotten, tmp_path / "out", approximate=Approximation(rounds=1, epochs=1))
    store = Checkpoints(tmp_path / "out/checkpoint").store
    store.begin(1)
    assert {name for name in clients if store.load(name)} == asked


def test_the_approximation_is_deterministic(single: Path, tmp_path: Path) -> None:
    how = Approximation(rounds=1, epochs=2)
    first = forget(single, "sports", tmp_path / "a", approximate=how)
    second = forget(single, "sports", tmp_path / "b", approximate=how)
    assert first == second
    assert _bytes(tmp_path / "a") == _bytes(tmp_path / "b")
    assert first["ascent"]["distance"] <= first["ascent"]["radius"] * (1 + 1e-6)
    recipe = load_recipe(tmp_path / "a/recipe.toml")
    assert recipe.run.without == ("home", "commercial", "educational", "sports")
    assert recipe.run.rounds == 2
    assert "sports" not in (tmp_path / "a/metrics.jsonl").read_text()
    assert not list((tmp_path / "a").rglob("*sports*"))


def _client() -> tuple[Client, dict[str, torch.Tensor]]:
    setup = toy_setup(FedAvg(), noisy=False)
    client = client_in(setup, "client-0", round=3)
    rng = torch.Generator().manual_seed(1)
    reference = {n: t + 0.3 * torch.randn(t.shape, generator=rng) for n, t in client.initial.items()}
    return client, reference


def test_ascent_climbs_within_the_ball() -> None:
    client, reference = _client()
    start = math.sqrt(sum(float((t - client.initial[n]).square().sum()) for n, t in reference.items()))
    for lr, epochs in ((1e-3, 1), (1.0, 4)):
        how = Approximation(lr=lr, epochs=epochs, batch_size=4, loss=1e9)
        moved, facts = ascend(client, reference, how)
        away = math.sqrt(sum(float((t - reference[n]).square().sum()) for n, t in moved.items()))
        assert facts["radius"] == pytest.approx(start / 3)
        assert facts["distance"] == pytest.approx(away, rel=1e-4)
        assert away <= start / 3 * (1 + 1e-5)
        assert facts["steps"] == 3 * epochs
        batch = next(iter(client.data.validation(100)))
        losses = []
        for params in (reference, moved):
            client.load(params)
            losses.append(client.task.loss(client.model(batch), batch).item())
        assert losses[1] > losses[0]
    assert away == pytest.approx(start / 3, rel=1e-3)  # long steps end on the surface


def test_one_step_of_ascent_by_hand_and_the_limit_on_the_loss() -> None:
    client, reference = _client()
    batch = next(iter(client.data.validation(100)))
    client.load(reference)
    client.task.loss(client.model(batch), batch).backward()
    gradients = {n: p.grad.clone() for n, p in client.model.named_parameters() if p.grad is not None}
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
    how = Approximation(lr=1e-2, epochs=3, batch_size=100, clip=norm / 2, loss=0.0)
    moved, facts = ascend(client, reference, how)
    assert facts["steps"] == 1  # the first epoch's loss is above the limit already
    for name, gradient in gradients.items():
        torch.testing.assert_close(moved[name], reference[name] + 1e-2 / 2 * gradient)


@pytest.mark.parametrize(
    ("objective", "limit"), [("ce", math.log(3)), ("bce", 3 * math.log(2))]
)  # of a model that knows nothing
def test_ascent_stops_at_the_loss_of_zero_logits(objective: Literal["ce", "bce"], limit: float) -> None:
    client, reference = _client()
    client.task = VQA(3, objective)
    batch = next(iter(client.data.validation(100)))
    stopped = set[bool]()
    for scale in (0.0, 0.3, 1.0, 3.0, 10.0):
        params = {n: t * scale if n.startswith("head") else t for n, t in reference.items()}
        client.load(params)
        logits = client.model(batch).logits.detach().double().numpy()
        truth = np.eye(3)[batch["label"].numpy()]
        if objective == "ce":
            loss = (np.log(np.exp(logits).sum(1)) - (logits * truth).sum(1)).mean()
        else:
            loss = (np.log1p(np.exp(logits)) - logits * truth).sum(1).mean()
        _, facts = ascend(client, params, Approximation(lr=1e-12, epochs=2, batch_size=100))
        assert facts["loss"] == pytest.approx(loss, rel=1e-5)
        if scale:
            assert facts["steps"] == (1 if loss >= limit else 2)
            stopped.add(facts["steps"] == 1)
        else:
            assert loss == pytest.approx(limit)
    assert stopped == {True, False}


# The attack ------------------------------------------------------------------------------------------------


def test_auc_counts_pairs() -> None:
    assert attack_auc(torch.tensor([0.1, 0.2]), torch.tensor([0.3, 0.4, 0.5])) == 1.0
    assert attack_auc(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 0.5])) == (1 + 0 + 0.5 + 0) / 4
    rng = np.random.default_rng(0)
    members, others = rng.integers(0, 9, 37).astype(float), rng.integers(2, 11, 53).astype(float)
    statistic = mannwhitneyu(others, members).statistic
    assert attack_auc(torch.tensor(members), torch.tensor(others)) == pytest.approx(statistic / (37 * 53), abs=1e-15)
    same = torch.ones(4)
    assert attack_auc(same, same) == 0.5
    refuses("members must be losses", attack_auc, torch.zeros(0), same)
    refuses("others must be finite, got nan", attack_auc, same, torch.tensor([math.nan]))


def test_losses_are_each_examples_own() -> None:
    table = toy_clients()["client-0"].tables[0]
    weights = torch.randn(6, 3, generator=torch.Generator().manual_seed(2))

    def predict(batch) -> Output:
        return Output(batch["x"] @ weights, batch["x"])

    losses = example_losses(predict, ToyTask(), table.batches(5))
    x, labels = table.columns["x"].double().numpy(), table.columns["label"].numpy()
    logits = x @ weights.double().numpy()
    by_hand = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(x)), labels]
    np.testing.assert_allclose(losses.numpy(), by_hand, rtol=1e-5)
    assert losses.dtype == torch.float64
    assert len(example_losses(predict, ToyTask(), [])) == 0


def test_the_attack_finds_what_a_model_has_learnt_by_heart() -> None:
    rng = torch.Generator().manual_seed(3)
    inside, outside = torch.randn(40, 60, generator=rng), torch.randn(40, 60, generator=rng)
    labels, others = (torch.randint(0, 20, (40,), generator=rng) for _ in range(2))  # nothing to be learnt
    weights = torch.linalg.lstsq(inside, torch.nn.functional.one_hot(labels, 20).float() * 9).solution

    def losses(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        batch = {"x": x, "label": y}
        return example_losses(lambda b: Output(b["x"] @ weights, b["x"]), ToyTask(), [batch])

    assert attack_auc(losses(inside, labels), losses(outside, others)) > 0.9


def test_a_run_is_named_from_within_too(
    single: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    made: list[Path] = []

    def note(root, client, out, **more):
        made.append(out)
        raise ValueError("enough")

    monkeypatch.chdir(single)
    assert folder_without(Path("."), "sports") == single.resolve().with_name("single-without-sports")
    monkeypatch.setattr("confed.unlearning.exact.forget", note)
    command("forget", ".", "--client", "sports")
    assert "enough" in capfd.readouterr().err
    assert made == [single.resolve().with_name("single-without-sports")]


# The command -----------------------------------------------------------------------------------------------


def test_the_command_forgets_a_client_of_a_run(single: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert command("forget", single, "--client", "sports", "--out", tmp_path / "exact") == 0
    shown = capfd.readouterr().out
    assert "exact: run again from the start" in shown
    assert "membership attack on sports" in shown
    approximate = ("--approximate", "--rounds", "1", "--out", tmp_path / "approximate", "--json")
    assert command("forget", single, "--client", "sports", *approximate) == 0
    result = json.loads(capfd.readouterr().out)
    assert result["approximate"]["rounds"] == 1
    assert json.loads((tmp_path / "approximate/forget.json").read_text())["result"] == result["result"]
    for client in ("nobody", "a/b", ""):
        assert command("forget", single, "--client", client) == 2
        assert f"no client is called {client!r}" in capfd.readouterr().err
    assert command("forget", single, "--client", "nobody") == 2
    assert "no client is called 'nobody'" in capfd.readouterr().err

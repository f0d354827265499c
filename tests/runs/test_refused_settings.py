"""Settings of a run that a method cannot work with, and clients whose turn never came."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from confed.algorithms.bicsl import BiCSL
from confed.algorithms.fedavg import FedAvg
from confed.algorithms.fedrep import FedRep
from confed.algorithms.split_learning import SplitLearning
from confed.federation.algorithm import Algorithm
from confed.federation.checkpoint import Checkpoints
from confed.federation.evaluate import evaluate
from confed.federation.local import Local, Schedule
from confed.recipes.recipe import Recipe, load_recipe
from confed.results.folder import read_jsonl
from confed.runs.checks import check_local
from confed.runs.run import load_run, prepare, run
from confed.runs.samples import fill
from confed.tasks.vqa import summarise

TINY = (
    "study.methods=[]", "model.name=vilt_tiny", "model.width=16", "model.layers=1", "data.train=24",
    "data.validation=8", "data.test=16", "data.unseen=[]", "run.without=['home', 'commercial']", "local.epochs=1",
    "run.rounds=2", "run.workers=1", "run.gallery=1", "run.evaluate_examples=8",
)  # fmt: skip
CLIENTS = {"transport", "sports", "educational", "natural"}


def _tiny(method: str, *more: str) -> Recipe:
    return load_recipe("fedvqa_scenes", [f"algorithm.name={method}", *TINY, *more])


@pytest.mark.parametrize(("method", "name"), [("feddc", "FedDC"), ("feddyn", "FedDyn"), ("scaffold", "SCAFFOLD")])
def test_methods_that_sum_over_clients_refuse_that_they_leave(tmp_path: Path, method: str, name: str) -> None:
    leaves = "run.leaves.sports=2"
    with pytest.raises(ValueError, match=rf"run\.leaves must be empty for {name}, got sports: the server's sums"):
        run(_tiny(method, leaves), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    prepare(_tiny(method, "run.joins.sports=2"))
    prepare(_tiny(method, leaves, "run.without=['home', 'commercial', 'sports']"))  # was never there
    prepare(_tiny("fedavg", leaves))


@pytest.mark.parametrize(
    ("method", "name"), [("fedper", "FedPer"), ("fedrep", "FedRep"), ("fedbn", "FedBN"), ("local", "Local only")]
)
def test_methods_without_a_global_model_need_personal_ones(method: str, name: str) -> None:
    more = ["algorithm.layers=all"] if method == "fedbn" else []
    with pytest.raises(ValueError, match=rf"run\.keep_personal must be true for {name}, got false: it has no global"):
        prepare(_tiny(method, *more, "run.keep_personal=false"))
    prepare(_tiny(method, *more))
    prepare(_tiny("fedavg", "run.keep_personal=false"))


@pytest.mark.parametrize(
    ("method", "local", "message"),
    [
        (FedRep(), Local(iterations=5), "iterations must be 0 for FedRep, got 5: its rounds are made of epochs"),
        (BiCSL(), Local(iterations=5), "iterations must be 0 for BiCSL, got 5: its rounds are made of epochs"),
        (
            BiCSL(),
            Local(schedule=Schedule("linear", horizon=5)),
            "horizon must be 0 for BiCSL, got 5",
        ),
        (
            SplitLearning(),
            Local(accumulate=4),
            "accumulate must be 1 for Split learning, got 4: client and",
        ),
    ],
)
def test_settings_of_local_training_that_a_method_cannot_have(method: Algorithm, local: Local, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^local\.(schedule\.)?{message}"):
        check_local(method, local)
    check_local(FedAvg(), local)  # others may have each of them


def test_optimizer_whose_library_is_missing_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("confed.runs.checks.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs the library bitsandbytes: install confed with the extra 'quantised'"):
        prepare(_tiny("fedavg", "local.optimizer=adamw8bit"))


@pytest.mark.parametrize("method", ["fedper", "local"])
def test_where_there_is_no_global_model_the_shared_part_stands_in_for_who_never_took_part(
    tmp_path: Path, method: str
) -> None:
    summary = run(_tiny(method, "run.cohort=1"), tmp_path)
    asked = {name for line in read_jsonl(tmp_path / "metrics.jsonl") for name in line.get("loss", ())}
    absent = CLIENTS - asked
    assert absent
    assert set(summary["personal"]) == CLIENTS
    assert summary["personal_mean"] == pytest.approx(sum(summary["personal"].values()) / 4)
    note = f"{len(absent)} clients never took part; the shared part with untrained private values stands in"
    assert any(note in line for line in summary["notes"])
    _, setup, run_data, workspace = load_run(tmp_path)
    checkpoint, _ = Checkpoints(tmp_path / "checkpoint").latest()
    held = checkpoint.servers["main"].params
    assert bool(held) == (method == "fedper")
    for name in absent:
        fill(workspace, held)
        own = load_file(tmp_path / f"models/personal/{name}/trained.safetensors")
        assert all(torch.equal(workspace.tensors[n], t) for n, t in own.items())
        tally = evaluate(workspace.model, setup.task, run_data.clients[name].test(50))
        assert summary["personal"][name] == pytest.approx(summarise(tally)["accuracy"])

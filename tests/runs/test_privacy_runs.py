"""Noise on updates in whole runs: the ledger in the history, in the summary and in the report, also after a resume."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from confed.privacy.accountant import epsilon, sampled_epsilon
from confed.recipes.recipe import Recipe, load_recipe
from confed.report.report import write_report
from confed.results.folder import RunFolder, read_jsonl
from confed.runs.run import prepare, run

pytest.importorskip("dp_accounting")

TINY = (
    "study.methods=[]", "algorithm.name=fedprox", "model.name=vilt_tiny", "model.width=16", "model.layers=1",
    "data.train=8", "data.validation=4", "data.test=8", "data.unseen=[]", "run.without=['home', 'commercial']",
    "local.epochs=1", "run.rounds=3", "run.workers=1", "run.gallery=0", "run.evaluate_every=0",
    "algorithm.update_privacy.clip=1.0", "algorithm.update_privacy.noise=4.0",
)  # fmt: skip
CLIENTS = {"transport", "sports", "educational", "natural"}


def _tiny(*more: str) -> Recipe:
    return load_recipe("fedvqa_scenes", [*TINY, *more])


def test_the_ledger_is_in_all_results_and_survives_a_resume(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    summary = run(_tiny("run.cohort=2"), folder.root)
    history = folder.metrics.read_bytes()
    asked: dict[str, int] = dict.fromkeys(CLIENTS, 0)
    for line in read_jsonl(folder.metrics):
        spent: dict[str, Any] = line["update_privacy"]
        assert not line["loss"]
        assert spent["present"] == 4
        assert set(spent["asked"]) == set(line["bytes_up"])
        for client in spent["asked"]:
            asked[client] += 1
            assert spent["epsilon"][client] == epsilon(4.0, asked[client], 1e-5)
    found = summary["update_privacy"]
    assert found["rounds"] == asked
    assert found["epsilon"] == {client: epsilon(4.0, count, 1e-5) for client, count in asked.items()}
    assert found["after"] == [1, 2, 3]
    assert not found["amplified"]
    assert "holds towards the server and everybody else" in found["guarantee"]
    html = write_report(folder.root).read_text()
    assert "Privacy of clients" in html
    assert f"{max(found['epsilon'].values()):.3g}" in html
    # As if killed in round 3.
    shutil.rmtree(folder.checkpoint / "round-000003")
    folder.summary.unlink()
    again = run(load_recipe(folder.recipe), folder.root, resume=True)
    assert folder.metrics.read_bytes() == history
    assert json.loads(json.dumps(again["update_privacy"])) == json.loads(json.dumps(found))


def test_at_the_server_uniform_cohorts_are_counted(tmp_path: Path) -> None:
    more = ("algorithm.update_privacy.at=server", "run.cohort=2", "run.rounds=2", "run.checkpoint_every=0")
    found = run(_tiny(*more), tmp_path / "run")["update_privacy"]
    assert found["amplified"]
    assert set(found["epsilon"].values()) == {sampled_epsilon(4.0, {(2, 4): 2}, 1e-5)}
    assert "the server is trusted. It counts that cohorts were drawn uniformly" in found["guarantee"]


def test_what_cannot_be_protected_never_starts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"algorithm\.update_privacy must be left out for Local only: nothing is sent"):
        run(_tiny("algorithm.name=local"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    prepare(_tiny("algorithm.update_privacy.noise=0"))


@pytest.mark.parametrize("protection", ["algorithm.secure_sum={}", "algorithm.robust.rule=median"])
def test_runs_with_the_other_protections_come_to_their_end(tmp_path: Path, protection: str) -> None:
    plain = [key for key in TINY if "privacy" not in key]
    recipe = load_recipe("fedvqa_scenes", [*plain, "run.rounds=1", "run.checkpoint_every=0", protection])
    summary = run(recipe, tmp_path / "run")
    assert not summary["errors"]
    assert "update_privacy" not in summary
    assert protection.split(".")[1].split("=", maxsplit=1)[0] in (tmp_path / "run" / "recipe.toml").read_text()

"""Execution of studies, those of version 0.1 among them, whose indexes stand here as they were written then."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import toy_federation  # its datasets have names then
from command_line import Patch
from confed.recipes.recipe import Recipe, load_recipe
from confed.results.runs import load
from confed.runs.run import run
from confed.studies import runner
from confed.studies.runner import resume, run_study
from confed.studies.study import open_study, read_study
from confed.system.events import Event, JobsPlanned
from confed.system.folder_lock import exclusive

assert toy_federation.squares

RECIPE = """name = "old"
[algorithm]
name = "fedavg"
[model]
name = "vilt_tiny"
width = 16
layers = 1
[task]
name = "vqa"
[data]
name = "squares"
train = 6
test = 2
[local]
epochs = 1
[run]
rounds = 1
workers = 2
gallery = 0
evaluate_every = 0
[study]
methods = ["local", "fedavg"]
"""

PLAIN = """{
 "recipe": "old",
 "methods": ["local", "fedavg"],
 "labels": {"local": "Local only", "fedavg": "FedAvg"},
 "seeds": [0],
 "deploys": {},
 "runs": [
  {"method": "local", "seed": 0, "folder": "local/seed-0"},
  {"method": "fedavg", "seed": 0, "folder": "fedavg/seed-0"}
 ]
}"""

MORE = {
    "errors": {"fedavg/seed-0": "RuntimeError: killed"}, "tuned": {"fedavg": {"local.lr": 0.003}},
    "judged": {"references": ["local"], "margin": 0.02, "relative": ""}, "refused": [],
}  # fmt: skip
GROWING = json.dumps({**json.loads(PLAIN), **MORE})


def written(root: Path, index: str, done: Sequence[str] = ()) -> Recipe:
    """A study folder of version 0.1 with some of its runs."""
    root.mkdir()
    (root / "recipe.toml").write_text(RECIPE)
    (root / "summary.json").write_text(index)
    recipe = load_recipe(root / "recipe.toml")
    for method in done:
        run(recipe.method(method).with_run(workers=1), root / method / "seed-0")
    return recipe


def test_a_study_of_version_0_1_goes_on(tmp_path: Path) -> None:
    root = tmp_path / "study"
    written(root, PLAIN, ["local"])
    before = (root / "local/seed-0/summary.json").read_bytes()
    events: list[Event] = []
    summaries = resume(root, events.append)
    assert events[0] == JobsPlanned(["FedAvg, seed 0"], 1)
    assert [(s["algorithm"], s["label"]) for s in summaries] == [("local", "Local only"), ("fedavg", "FedAvg")]
    assert (root / "local/seed-0/summary.json").read_bytes() == before
    assert load_recipe(root / "fedavg/seed-0/recipe.toml").run.workers == 2  # as its recipe says
    index = json.loads((root / "summary.json").read_text())
    assert index == {**json.loads(PLAIN), "side_by_side": False, "errors": {}, "refused": []}
    assert load(root).methods == ("local", "fedavg")


def test_a_growing_study_of_version_0_1_goes_on_and_grows(tmp_path: Path) -> None:
    root = tmp_path / "grid"
    recipe = written(root, GROWING, ["local"])
    assert load(root).failures == {"fedavg/seed-0": "RuntimeError: killed"}
    outcome = run_study(root)
    assert outcome.errors == {}
    assert outcome.tuned == {"fedavg": {"local.lr": 0.003}}
    assert load_recipe(root / "fedavg/seed-0/recipe.toml").run.workers == 1  # its processes are the runs
    index = json.loads((root / "summary.json").read_text())
    assert index == {**json.loads(GROWING), "side_by_side": True, "errors": {}}
    open_study(recipe.with_rows(["local"]), root, [0, 1], judged={"references": []})
    index = json.loads((root / "summary.json").read_text())
    assert [job.cell for job in read_study(root).jobs] == ["local/seed-0", "fedavg/seed-0", "local/seed-1"]
    assert index["tuned"] == {"fedavg": {"local.lr": 0.003}}
    assert index["judged"] == {"references": []}


def test_a_run_that_breaks_is_marked_and_the_others_go_on(tmp_path: Path, monkeypatch: Patch) -> None:
    root = tmp_path / "study"
    recipe = written(tmp_path / "source", PLAIN)
    open_study(recipe, root, [0], side_by_side=False)
    made = runner.run_locked

    def broken(recipe: Recipe, *arguments: Any, **more: Any) -> dict[str, Any]:
        if recipe.sections["algorithm"]["name"] == "local":
            raise ZeroDivisionError("by design")
        return made(recipe, *arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr("confed.studies.runner.run_locked", broken)
        outcome = run_study(root)
    assert outcome.errors == {"local/seed-0": "ZeroDivisionError: by design"}
    assert outcome.failed == {"local/seed-0"}
    assert [summary["algorithm"] for summary in outcome.summaries] == ["fedavg"]
    assert "by design" in (root / "local/seed-0/error.txt").read_text()
    assert json.loads((root / "summary.json").read_text())["errors"] == outcome.errors
    assert len(run_study(root).summaries) == 2
    assert not (root / "local/seed-0/error.txt").exists()


def test_a_run_that_another_process_makes_is_no_fault_of_its_row(tmp_path: Path, monkeypatch: Patch) -> None:
    """As when an array task works on one cell of a study, and `confed resume` on the others."""
    monkeypatch.setattr("confed.system.folder_lock.PATIENCE", 0.0)
    root = tmp_path / "grid"
    recipe = written(root, GROWING)
    open_study(recipe.with_rows(["local"]), root, [0, 1])
    with exclusive(root / "local/seed-0"):
        outcome = run_study(root)
        assert not (root / "local/seed-0/error.txt").exists()
    assert outcome.errors.keys() == outcome.failed == {"local/seed-0"}
    assert "another process is working in" in outcome.errors["local/seed-0"]
    assert len(outcome.summaries) == 2
    assert run_study(root).errors == {}

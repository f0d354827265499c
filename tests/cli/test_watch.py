"""State of runs from their files, quiet commands, and completion of names."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from command_line import Capture, Patch, confed, refusal, refused
from confed.cli import completion
from confed.results.watching import states_of
from confed.system.folder_lock import exclusive

TINY = [
    "fedvqa_scenes", "model.name=vilt_tiny", "data.train=20", "data.validation=10", "data.test=20", "data.unseen=[]",
    "run.workers=1", "run.gallery=0", "run.controls=none", "local.epochs=1", "run.rounds=2",
    'study.methods=["local", "fedavg"]',
]  # fmt: skip


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "study"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        assert confed("run", *TINY, "--out", folder, "--quiet") == 0
    return folder


def test_quiet_prints_results_alone(tmp_path: Path, capfd: Capture) -> None:
    few = (*TINY, "run.rounds=1", 'study.methods=["fedavg"]')
    assert confed("run", *few, "--out", tmp_path / "study", "-q") == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert "FedAvg" in out
    assert confed("run", *few, "--out", tmp_path / "second") == 0
    assert "round 1/1" in capfd.readouterr().err  # the next command speaks again


def test_states_of_finished_runs_have_rounds_and_results(study: Path) -> None:
    states = states_of(study)
    assert [(state.name, state.state, state.round, state.rounds) for state in states] == [
        ("local/seed-0", "finished", 2, 2),
        ("fedavg/seed-0", "finished", 2, 2),
    ]
    summary = json.loads((study / "fedavg/seed-0/summary.json").read_text(encoding="utf-8"))
    assert states[1].value == pytest.approx(summary["personal_mean"])
    assert states[1].left is None


def test_runs_under_way(study: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(study, tmp_path / "study")
    place = copy / "fedavg/seed-0"
    lines = (place / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    for name in ("summary.json", "predictions.safetensors"):
        (place / name).unlink()
    shutil.rmtree(place / "records")
    (place / "metrics.jsonl").write_text("".join(line for line in lines if '"round": 2' not in line), encoding="utf-8")
    cut = states_of(copy)[1]
    assert (cut.state, cut.round, cut.rounds) == ("stopped", 1, 2)
    loss = next(json.loads(line)["loss"] for line in lines if '"event": "round"' in line)
    assert cut.loss == pytest.approx(sum(loss.values()) / len(loss))
    evaluated = [json.loads(line) for line in lines if '"event": "evaluation"' in line][1]
    values = [metrics["accuracy"] for metrics in evaluated["personal"].values()]
    assert cut.value == pytest.approx(sum(values) / len(values))
    assert cut.left is not None
    with exclusive(copy):
        assert states_of(copy)[1].state == "running"
    (place / "error.txt").write_text("the disk is full\nTraceback", encoding="utf-8")
    assert (states_of(copy)[1].state, states_of(copy)[1].text) == ("failed", "the disk is full")
    shutil.rmtree(place)
    assert states_of(copy)[1].state == "waiting"
    with refused("neither a run, a study nor a sweep"):
        states_of(tmp_path)


def test_watch_ends_where_nothing_is_under_way(study: Path, monkeypatch: Patch, capfd: Capture) -> None:
    assert confed("watch", study) == 0
    assert "fedavg/seed-0: finished, round 2/2, loss " in capfd.readouterr().out
    assert confed("watch", study, "--json") == 0
    assert len(json.loads(capfd.readouterr().out)["runs"]) == 2
    monkeypatch.chdir(study.parent)
    assert "no run under ./runs" in refusal(capfd, "watch")
    monkeypatch.setenv("COLUMNS", "80")
    assert confed("watch", study, "--once") == 0
    lines = capfd.readouterr().out.splitlines()
    assert "2 of 2 finished" in lines[0]
    assert max(map(len, lines)) <= max(80, len(lines[0]))


def test_names_are_completed(study: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert completion.complete_anything("fedp3") == ["fedp3"]
    assert completion.complete_recipe("fedvqa_sc")[0] == "fedvqa_scenes"
    assert completion.complete_method("fedavg,fedpr") == ["fedavg,fedprox"]
    assert "local.lr=" in completion.complete_key("local.l")
    assert completion.complete_key("model.name=vilt_mi") == ["model.name=vilt_mini"]
    assert completion.complete_folder(f"{study.parent}/") == [str(study)]
    assert "recipes" in completion.complete_kind("")
    assert (tmp_path / "confed/names.json").is_file()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_are_answered_without_torch(shell: str, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    completion.complete_anything("")  # fills the cache
    asked = {
        "bash": {"COMP_WORDS": "confed show fedprox", "COMP_CWORD": "2"},
        "zsh": {"_TYPER_COMPLETE_ARGS": "confed show fedprox"},
        "fish": {"_TYPER_COMPLETE_ARGS": "confed show fedprox", "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    code = (
        "import sys, atexit; atexit.register(lambda: print('torch' in sys.modules)); import confed.cli as c; c.main()"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, **asked, "_CONFED_COMPLETE": f"complete_{shell}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "fedprox" in done.stdout
    assert done.stdout.strip().endswith("False")

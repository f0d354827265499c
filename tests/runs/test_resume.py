"""A run killed at any moment goes on to the same bytes, with the recipe that it began with or not at all."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

import toy_federation  # its datasets have names then
from children import forked, status_of
from command_line import confed
from confed.recipes.recipe import Recipe, load_recipe
from confed.report.comparison import compare_runs
from confed.results.folder import RunFolder
from confed.results.runs import load
from confed.runs.run import run
from confed.runs.same_recipe import differing_settings
from confed.studies.runner import run_study
from confed.studies.study import open_study
from confed.system.events import JobStarted
from confed.system.processor import CHOICES, check_pinned, machine_differences, pin
from refusals import refuses
from tiny_runs import stop_in_round

TINY = (
    "algorithm.name=fedp3", "model.name=vilt_tiny", "model.width=16", "model.layers=1", "data.train=8",
    "data.validation=4", "data.test=4", "local.batch_size=4", "local.epochs=1", "run.rounds=4", "run.workers=1",
    "run.gallery=0", "run.controls=none", "run.evaluate_examples=4", "run.without=['natural', 'educational']",
)  # fmt: skip


def _tiny(*more: str) -> Recipe:
    recipe = load_recipe("fedvqa_scenes", [*TINY, *more])
    return recipe.method("fedp3")


def _recipe_file(folder: Path) -> Path:
    path = folder / "tiny.toml"
    path.write_text(_tiny().to_toml())
    return path


def _bytes(folder: Path) -> dict[str, bytes]:
    files = [
        RunFolder(folder).metrics,
        RunFolder(folder).predictions,
        *sorted(folder.glob("models/**/*.safetensors")),
        *sorted(folder.glob("records/*.safetensors")),
    ]
    assert len(files) == 2 + 1 + 2 + 4
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("reference") / "run"
    run(_tiny(), folder)
    return _bytes(folder)


def test_interrupted_after_every_round(tmp_path: Path, reference: dict[str, bytes]) -> None:
    folder = tmp_path / "run"
    for stop in (1, 3):
        with pytest.raises(KeyboardInterrupt):
            run(_tiny(), folder, resume=folder.exists(), progress=stop_in_round(stop))
        # What a killed process leaves: a torn line, and a client state newer than the checkpoint.
        with RunFolder(folder).metrics.open("ab") as file:
            file.write(b'{"event": "rou')
        begun = folder / "checkpoint" / ".round-000004.0.tmp"
        begun.mkdir()
        (begun / ".main-0.safetensors.0.tmp").write_bytes(b"half")
    run(_tiny(), folder, resume=True)
    assert _bytes(folder) == reference
    assert not [*folder.rglob(".*.tmp")]


def test_checkpoints_every_other_round_and_none_resume_too(tmp_path: Path, reference: dict[str, bytes]) -> None:
    for number, every in enumerate((2, 0)):
        folder = tmp_path / str(number)
        recipe = _tiny(f"run.checkpoint_every={every}")
        with pytest.raises(RuntimeError):
            run(recipe, folder, progress=stop_in_round(3, RuntimeError))
        run(recipe, folder, resume=True)
        assert _bytes(folder) == reference


def test_interrupted_within_a_round_and_within_an_evaluation(
    tmp_path: Path, reference: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = (("confed.engines.perform.perform", 14), ("confed.runs.run.summarise", 20))
    for number, (target, count) in enumerate(moments):
        folder, calls = tmp_path / str(number), []
        module, _, name = target.rpartition(".")
        original = getattr(sys.modules[module], name)

        def interrupting(*arguments, original=original, calls=calls, count=count, **keywords):
            calls.append(1)
            if len(calls) == count:
                raise KeyboardInterrupt
            return original(*arguments, **keywords)

        with monkeypatch.context() as patch:
            patch.setattr(target, interrupting)
            with pytest.raises(KeyboardInterrupt):
                run(_tiny("run.checkpoint_every=3"), folder)
        run(_tiny("run.checkpoint_every=3"), folder, resume=True)
        assert _bytes(folder) == reference


def test_two_workers_give_the_same_files(tmp_path: Path, reference: dict[str, bytes]) -> None:
    folder = tmp_path / "run"
    run(_tiny("run.workers=2"), folder)
    assert _bytes(folder) == reference


def _succeeds(*command: object) -> None:
    assert confed(*command) == 0


def _kill_and_resume(folder: Path, recipe: Path, kills: int, rng: random.Random) -> int:
    """Starts the command, kills it with SIGKILL at random moments, resumes until done; returns the kills made."""
    done = 0
    while True:
        begun = (folder / "recipe.toml").exists()
        command = ["resume", folder, "--json"] if begun else ["run", recipe, "--out", folder, "--json"]
        child = forked(partial(_succeeds, *command))
        if done < kills:
            # Random moments of the run itself: the folder tells when it begins.
            until = time.monotonic() + 120
            while not folder.exists() and time.monotonic() < until:
                time.sleep(0.01)
            time.sleep(rng.uniform(0.0, 1.5))
            os.kill(child, signal.SIGKILL)  # of a child that has ended, too, as nobody has waited for it yet
        code = os.waitstatus_to_exitcode(status_of(child))
        if code == 0:
            return done
        assert code == -signal.SIGKILL
        done += 1


def test_killed_at_random_moments(tmp_path: Path, reference: dict[str, bytes]) -> None:
    folder = tmp_path / "run"
    kills = _kill_and_resume(folder, _recipe_file(tmp_path), 1, random.Random(os.getpid()))
    assert _bytes(folder) == reference
    print(f"{kills} kills")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_many_times(tmp_path: Path, reference: dict[str, bytes]) -> None:
    rng, total = random.Random(0), 0
    for number in range(10):
        folder = tmp_path / str(number) / "run"
        folder.parent.mkdir()
        total += _kill_and_resume(folder, _recipe_file(folder.parent), 4, rng)
        assert _bytes(folder) == reference
    print(f"{total} kills")


assert toy_federation.squares
SQUARES = (
    "data.name=squares", "data.train=6", "data.test=2", "algorithm.name=fedprox", "model.name=vilt_tiny",
    "model.width=16", "model.layers=1", "run.rounds=2", "local.epochs=1", "run.workers=1", "run.gallery=0",
    "run.evaluate_every=0",
)  # fmt: skip


def _recipe(*more: str) -> Recipe:
    return load_recipe("fedvqa_scenes", ["study.methods=[]", *SQUARES, *more])


def _halfway(folder: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(_recipe(), folder, progress=stop_in_round(2))


@pytest.fixture(scope="module")
def halfway(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    _halfway(folder)
    return folder


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["local.lr=0.5"], r"local\.lr=0\.003, now 0\.5"),
        (["run.seed=7"], "run.seed=0, now 7"),
        (["data.train=7"], "data.train=6, now 7"),
        (["run.rounds=5"], "run.rounds=2, now 5"),
        (["algorithm.name=fedavg"], "algorithm.name=fedprox, now fedavg"),
        (["model.width=32"], "model.width=16, now 32"),
        (["run.seed=1", "local.epochs=2"], "run.seed=0, now 1|local.epochs=1, now 2"),
    ],
)
def test_a_changed_recipe_is_refused_by_key(halfway: Path, more: Sequence[str], named: str) -> None:
    before = {path: path.read_bytes() for path in halfway.rglob("*") if path.is_file()}
    refuses(f"the run began with .*({named})", run, _recipe(*more), halfway, resume=True)
    assert {path: path.read_bytes() for path in halfway.rglob("*") if path.is_file()} == before


def test_how_it_is_computed_and_shown_may_change(tmp_path: Path) -> None:
    _halfway(tmp_path / "run")
    other = _recipe("run.threads=2", "run.checkpoint_seconds=1.0", "run.keep_checkpoints=3", "run.gallery=1")
    assert differing_settings(_recipe(), other) == {}
    assert run(other, tmp_path / "run", resume=True)["notes"][-1].startswith("resumed")


def test_a_run_that_came_to_nothing_begins_anew_with_any_recipe(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    RunFolder.create(folder, _recipe().to_toml())
    RunFolder(folder).begun.write_text(_recipe("run.seed=5").to_toml())
    assert run(_recipe("run.rounds=1"), folder, resume=True)["rounds"] == 1
    assert load_recipe(folder / "begun.toml").run.rounds == 1


def test_a_study_is_not_finished_with_another_recipe(tmp_path: Path) -> None:
    root = tmp_path / "study"
    open_study(_recipe("study.methods=['fedprox','local']", "run.rounds=1"), root, [0])

    def stop(event: object) -> None:
        if event == JobStarted(1):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_study(root, stop)
    recipe = root / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("lr = 0.003", "lr = 0.5"))
    refuses(r"local.seed-0: the run began with local\.lr=0\.003, now 0\.5", run_study, root)
    assert not (root / "fedprox").exists()


def test_another_machine_is_said_on_resume_and_in_comparisons(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    _halfway(folder)
    began = json.loads((folder / "begun.json").read_text())
    assert {"processor", "instructions", "system"} <= began["machine"].keys()
    began["machine"]["instructions"], began["versions"]["torch"] = "ABACUS", "0.1"
    (folder / "begun.json").write_text(json.dumps(began))
    with pytest.warns(UserWarning, match=r"instructions .*, not ABACUS, torch .*, not 0\.1 as it began"):
        summary = run(_recipe(), folder, resume=True)
    assert any("not ABACUS" in note for note in summary["notes"])
    assert summary["machine"].keys() == {"processor", "instructions", "system"}
    # Beside a run of another machine in one comparison.
    other = tmp_path / "other"
    run(_recipe("algorithm.name=fedavg"), other)
    changed = json.loads((other / "summary.json").read_text())
    changed["machine"]["instructions"] = "ABACUS"
    (other / "summary.json").write_text(json.dumps(changed))
    found = compare_runs([*load(other).runs, *load(folder).runs], ["fedavg"])
    assert any("instructions (" in line and "ABACUS" in line for line in found.warnings)


def test_differences_of_machines_need_both_sides() -> None:
    mine = {"machine": {"instructions": "AVX2", "processor": "x"}, "versions": {"torch": "2"}}
    assert machine_differences(mine, {}) == {}
    assert machine_differences(mine, mine | {"machine": {"instructions": "AVX2", "processor": "y"}}) == {}
    assert machine_differences(mine, mine | {"machine": {"instructions": "AVX512"}}) == {
        "instructions": "AVX2, not AVX512"
    }


def test_the_variable_pins_the_instructions_of_all_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, values in CHOICES.items():
        environment = {"CONFED_CPU": name}
        pin(environment)
        assert environment == {"CONFED_CPU": name, **values}
    environment = {"CONFED_CPU": "avx2", "ATEN_CPU_CAPABILITY": "default"}
    pin(environment)
    assert environment["ATEN_CPU_CAPABILITY"] == "default"
    code = "import confed, torch; print(torch.backends.cpu.get_cpu_capability())"
    used = subprocess.run(
        [sys.executable, "-c", code], env={"CONFED_CPU": "default", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert used.stdout.strip() == "DEFAULT"
    monkeypatch.setenv("CONFED_CPU", "abacus")
    refuses("CONFED_CPU must be one of default, avx2, avx512, got 'abacus'", check_pinned)
    monkeypatch.setenv("CONFED_CPU", "avx2")
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX512")
    refuses("CONFED_CPU=avx2, and PyTorch uses AVX512", check_pinned)

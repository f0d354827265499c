"""A run killed at any moment and resumed ends with the same bytes."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from confed.recipes.recipe import Recipe, load_recipe
from confed.results.folder import RunFolder
from confed.runs.run import run

TINY = (
    "algorithm.name=fedp3", "model.name=vilt_tiny", "model.width=16", "model.layers=1", "data.train=16",
    "data.validation=8", "data.test=8", "local.batch_size=8", "local.epochs=2", "run.rounds=4", "run.workers=1",
    "run.gallery=1", "run.evaluate_examples=8",
)  # fmt: skip
CHILD = "import sys; from confed.cli import main; sys.argv = ['confed', *sys.argv[1:]]; main()"


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
    assert len(files) == 2 + 1 + 4 + 4
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("reference") / "run"
    run(_tiny(), folder)
    return _bytes(folder)


def test_interrupted_after_every_round(tmp_path: Path, reference: dict[str, bytes]) -> None:
    folder = tmp_path / "run"
    for stop in (1, 3):

        def interrupt(progress, stop=stop) -> None:
            if progress.round >= stop and "loss" in progress.text:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run(_tiny(), folder, resume=folder.exists(), progress=interrupt)
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

        def interrupt(progress) -> None:
            if progress.round >= 3 and "loss" in progress.text:
                raise RuntimeError("stopped hard")

        with pytest.raises(RuntimeError, match="stopped hard"):
            run(recipe, folder, progress=interrupt)
        run(recipe, folder, resume=True)
        assert _bytes(folder) == reference


def test_interrupted_in_the_middle_of_a_round_and_of_an_evaluation(
    tmp_path: Path, reference: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = (("confed.engines.perform.perform", 22), ("confed.runs.run.summarise", 30))
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


def _kill_and_resume(folder: Path, recipe: Path, kills: int, rng: random.Random) -> int:
    """Starts the command, kills it with SIGKILL at random moments, resumes until done; returns the kills made."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = 0
    command = ["run", str(recipe), "--out", str(folder), "--json"]
    while True:
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD, *command],
            env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        if done < kills:
            until = time.monotonic() + 120
            # Random moments of the run itself, not of the imports before it: the folder tells when it begins.
            while process.poll() is None and not folder.exists() and time.monotonic() < until:
                time.sleep(0.01)
            try:
                process.wait(timeout=rng.uniform(0.0, 2.5))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                done += 1
        _, errors = process.communicate()
        if process.returncode == 0:
            return done
        assert process.returncode == -signal.SIGKILL, errors.decode()
        command = (
            ["resume", str(folder), "--json"]
            if (folder / "recipe.toml").exists()
            else ["run", str(recipe), "--out", str(folder), "--json"]
        )


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

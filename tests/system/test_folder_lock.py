"""One process at a time in a folder: who holds it is said, who is gone is taken over."""

import json
import os
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

import toy_federation  # its datasets have names then
from children import forked
from command import exit_code
from confed.recipes.recipe import Recipe, load_recipe
from confed.runs.run import run
from confed.studies.runner import resume, run_study
from confed.studies.study import create_study
from confed.system import folder_lock
from confed.system.folder_lock import LOCK, STALE, Occupied, check_held, exclusive, holder_of

TINY = (
    "algorithm.name=fedavg", "model.name=vilt_tiny", "model.width=16", "model.layers=1", "data.name=squares",
    "data.train=8", "data.test=4", "local.epochs=1", "run.rounds=2", "run.workers=1", "run.gallery=0",
    "run.evaluate_every=0",
)  # fmt: skip
assert toy_federation.squares
HOLDER = """
import sys, time
from pathlib import Path
from confed.system.folder_lock import exclusive
with exclusive(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "PATIENCE", 0.0)


def _recipe(*more: str) -> Recipe:
    return load_recipe("fedvqa_scenes", ["study.methods=[]", *TINY, *more])


@pytest.fixture
def holder(tmp_path: Path):
    """Another process that works in ``tmp_path / "run"``."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_the_second_process_is_told_who_is_there(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    who = f"another process is working in .*run: process {holder.pid} on {socket.gethostname()} since 20"
    with pytest.raises(ValueError, match=who), exclusive(tmp_path / "run"):
        pass


def test_a_run_and_a_study_that_are_under_way_are_left_alone(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    folder = tmp_path / "run"
    with pytest.raises(ValueError, match=f"process {holder.pid} on"):
        run(_recipe(), folder)
    (folder / "recipe.toml").write_text(_recipe().to_toml())
    with pytest.raises(ValueError, match=f"process {holder.pid} on"):
        resume(folder)
    (folder / "recipe.toml").unlink()
    with pytest.raises(ValueError, match=f"process {holder.pid} on"):
        create_study(_recipe("study.methods=['fedavg']"), folder)
    (folder / "summary.json").write_text(json.dumps({"runs": []}))
    with pytest.raises(ValueError, match=f"process {holder.pid} on"):
        run_study(folder)
    assert {path.name for path in folder.iterdir()} == {LOCK, "summary.json"}


def test_the_command_says_it_in_one_line(
    tmp_path: Path, holder: subprocess.Popen[str], capfd: pytest.CaptureFixture[str]
) -> None:

    (tmp_path / "run" / "recipe.toml").write_text(_recipe().to_toml())
    assert exit_code(["resume", str(tmp_path / "run")]) == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "error" in line]
    assert f"process {holder.pid} on" in line


def test_a_killed_holder_is_taken_over_at_once(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.wait()
    assert (tmp_path / "run" / LOCK).is_file()
    with exclusive(tmp_path / "run"):
        assert json.loads((tmp_path / "run" / LOCK).read_text())["process"] == os.getpid()
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())


def _elsewhere(folder: Path, silent: float, **more: object) -> None:
    """A lock of another machine, whose last heartbeat was so many seconds ago."""
    folder.mkdir(exist_ok=True)
    (folder / LOCK).write_text(
        json.dumps({"host": "elsewhere", "boot": "x", "process": 1, "started": "2026-01-01", "token": "t", **more})
    )
    then = time.time() - silent
    os.utime(folder / LOCK, (then, then))


def test_a_holder_elsewhere_counts_while_its_heart_beats(tmp_path: Path) -> None:
    _elsewhere(tmp_path, STALE / 2)
    expected = r"process 1 on elsewhere since 2026-01-01, last sign of life 30 s ago; if"
    with pytest.raises(ValueError, match=expected), exclusive(tmp_path):
        pass
    assert json.loads((tmp_path / LOCK).read_text())["host"] == "elsewhere"
    _elsewhere(tmp_path, STALE + 5)
    with exclusive(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["process"] == os.getpid()
    assert not (tmp_path / LOCK).exists()
    assert not [path for path in tmp_path.iterdir() if path.name != "run"]


def test_without_kernel_locks_file_and_process_decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(handle: int, how: int) -> None:
        raise OSError("not supported")

    monkeypatch.setattr("confed.system.folder_lock.fcntl.flock", none)
    host, boot = folder_lock._machine()
    _elsewhere(tmp_path, 0, host=host, boot=boot, process=os.getppid())
    with pytest.raises(ValueError, match=f"process {os.getppid()} on"), exclusive(tmp_path):
        pass
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    # In another container it may be at work, unseen: its heart tells.
    _elsewhere(tmp_path, 2 * folder_lock.BEAT, host=host, boot=boot, process=gone.pid)
    expected = r"sign of life 10 s ago; if it is gone, try again in [23] s"
    with pytest.raises(ValueError, match=expected), exclusive(tmp_path):
        pass
    _elsewhere(tmp_path, 2.5 * folder_lock.BEAT + 1, host=host, boot=boot, process=gone.pid)
    with exclusive(tmp_path), pytest.raises(ValueError, match=f"process {os.getpid()} on"), exclusive(tmp_path):
        pass


def test_a_silent_lock_is_outlasted_and_a_living_one_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that was queued again waits for what is left of its first attempt, never for another task."""
    _elsewhere(tmp_path, STALE - 1.5)
    began = time.monotonic()
    with exclusive(tmp_path, outlast=True):
        assert time.monotonic() - began > 1
        assert json.loads((tmp_path / LOCK).read_text())["process"] == os.getpid()
    _elsewhere(tmp_path, 3)
    found = holder_of(tmp_path)
    assert found is not None
    assert (found.alive, round(found.silent), found.who) == (True, 3, "process 1 on elsewhere since 2026-01-01")
    monkeypatch.setattr(folder_lock.time, "sleep", lambda seconds: os.utime(tmp_path / LOCK))
    with pytest.raises(Occupied, match="process 1 on elsewhere"), exclusive(tmp_path, outlast=True):
        pass
    _elsewhere(tmp_path, STALE + 1)
    found = holder_of(tmp_path)
    assert found is not None
    assert not found.alive
    assert holder_of(tmp_path / "nowhere") is None


def test_a_lock_whose_link_was_reported_as_failed_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As over NFS, where the answer to the first of two equal requests may be lost."""
    made = os.link

    def twice(source: Path, target: Path) -> None:
        made(source, target)
        made(source, target)

    monkeypatch.setattr("confed.system.folder_lock.os.link", twice)
    with exclusive(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["process"] == os.getpid()


def test_a_file_system_without_links_is_locked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*arguments: object) -> None:
        raise OSError("not supported")

    monkeypatch.setattr("confed.system.folder_lock.fcntl.flock", none)
    monkeypatch.setattr("confed.system.folder_lock.os.link", none)
    with exclusive(tmp_path), pytest.raises(Occupied, match=f"process {os.getpid()} on"), exclusive(tmp_path):
        pass
    assert not (tmp_path / LOCK).exists()


def test_the_heart_beats_and_ends_with_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("confed.system.folder_lock.BEAT", 0.1)
    with exclusive(tmp_path):
        os.utime(tmp_path / LOCK, (0, 0))
        until = time.monotonic() + 10
        while (tmp_path / LOCK).stat().st_mtime == 0:
            assert time.monotonic() < until
            time.sleep(0.05)


def test_a_process_whose_folder_was_taken_over_stops(tmp_path: Path) -> None:
    with exclusive(tmp_path):
        check_held(tmp_path)
        _elsewhere(tmp_path, 0)
        with pytest.raises(RuntimeError, match="taken over by process 1 on elsewhere"):
            check_held(tmp_path)
    assert json.loads((tmp_path / LOCK).read_text())["host"] == "elsewhere"  # theirs stays
    check_held(tmp_path)


def test_a_run_whose_folder_was_taken_over_stops(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def taken(progress: object) -> None:
        if folder.exists():
            _elsewhere(folder, 0)

    with pytest.raises(RuntimeError, match="taken over by process 1 on elsewhere"):
        run(_recipe(), folder, progress=taken)
    assert not (folder / "metrics.jsonl").read_bytes()


def test_a_folder_that_nothing_was_put_into_is_taken_away_again(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), exclusive(tmp_path / "a" / "b"):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with exclusive(tmp_path / "a" / "b"):
        (tmp_path / "a" / "b" / "file").touch()
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["file"]


def test_workers_do_not_outlive_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("confed.system.folder_lock.PATIENCE", 15.0)  # the child closes its copies when it first runs
    with exclusive(tmp_path):
        child = forked(partial(time.sleep, 20))
    try:
        with exclusive(tmp_path):  # while the child still sleeps
            pass
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_without_kernel_locks_the_heart_keeps_others_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holder: subprocess.Popen[str]
) -> None:
    monkeypatch.setattr(folder_lock, "fcntl", None)
    with pytest.raises(ValueError, match=f"process {holder.pid} on"), exclusive(tmp_path / "run"):
        pass
    holder.kill()
    holder.wait()
    # The kernel does not say that the holder is dead: two heartbeats must be missing.
    with pytest.raises(ValueError, match="last sign of life"), exclusive(tmp_path / "run"):
        pass
    silent = time.time() - folder_lock.QUIET - 1
    os.utime(tmp_path / "run" / LOCK, (silent, silent))
    twice = pytest.raises(ValueError, match=f"process {os.getpid()}")
    with exclusive(tmp_path / "run"), twice, exclusive(tmp_path / "run"):
        pass
    assert not (tmp_path / "run" / LOCK).exists()

"""One process at a time in a folder: who holds it is said, who is gone is taken over."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

import toy_federation  # its datasets have names then
from children import forked
from command_line import confed
from confed.recipes.recipe import Recipe, load_recipe
from confed.runs.run import run
from confed.studies.runner import resume, run_study
from confed.studies.study import open_study
from confed.system import folder_lock
from confed.system.folder_lock import LOCK, STALE, Occupied, check_held, exclusive, holder_of
from refusals import refuses

TINY = (
    "algorithm.name=fedavg", "model.name=vilt_tiny", "model.width=16", "model.layers=1", "data.name=squares",
    "data.train=8", "data.test=4", "local.epochs=1", "run.rounds=2", "run.workers=1", "run.gallery=0",
    "run.evaluate_every=0",
)  # fmt: skip
assert toy_federation.squares
HOLDER = """
import sys, time
from pathlib import Path
from confed.system import folder_lock
folder_lock.BEAT = 0.1
with folder_lock.exclusive(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "PATIENCE", 0.0)
    monkeypatch.setattr(folder_lock, "BEAT", 0.1)


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
    who = f"another process is working in .*run: process {holder.pid} on {socket.gethostname()}"
    with pytest.raises(ValueError, match=who), exclusive(tmp_path / "run"):
        pass


def test_a_run_and_a_study_that_are_under_way_are_left_alone(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    folder = tmp_path / "run"
    refuses(f"process {holder.pid} on", run, _recipe(), folder)
    (folder / "recipe.toml").write_text(_recipe().to_toml())
    refuses(f"process {holder.pid} on", resume, folder)
    (folder / "recipe.toml").unlink()
    refuses(f"process {holder.pid} on", open_study, _recipe("study.methods=['fedavg']"), folder, [0])
    (folder / "summary.json").write_text(json.dumps({"runs": []}))
    refuses(f"process {holder.pid} on", run_study, folder)
    assert {path.name for path in folder.iterdir()} == {LOCK, "summary.json"}


def test_the_command_says_it_in_one_line(
    tmp_path: Path, holder: subprocess.Popen[str], capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run" / "recipe.toml").write_text(_recipe().to_toml())
    assert confed("resume", str(tmp_path / "run")) == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "error" in line]
    assert f"process {holder.pid} on" in line


def test_a_killed_holder_is_taken_over_at_once(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.wait()
    assert (tmp_path / "run" / LOCK).is_file()
    began = time.monotonic()
    with exclusive(tmp_path / "run"):
        assert time.monotonic() - began < 1
        assert f"pid={os.getpid()}\n" in (tmp_path / "run" / LOCK).read_text()
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())


def _elsewhere(folder: Path, silent: float) -> None:
    """A lock of another machine, whose last sign of life was so many seconds ago."""
    folder.mkdir(exist_ok=True)
    lines = ["filelock/2", "pid=1", "host=elsewhere", "mode=lease", "token=t", f"duration={folder_lock.STALE!r}"]
    (folder / LOCK).unlink(missing_ok=True)
    (folder / LOCK).write_text("".join(f"{line}\n" for line in lines))
    then = time.time() - silent
    os.utime(folder / LOCK, (then, then))


def test_a_silent_holder_elsewhere_is_outlasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "STALE", 1.0)
    _elsewhere(tmp_path, 1000)  # its clock may be wrong: only what is seen from here counts
    began = time.monotonic()
    with exclusive(tmp_path):
        assert 1 <= time.monotonic() - began < 5
        assert f"pid={os.getpid()}\n" in (tmp_path / LOCK).read_text()
    assert list(tmp_path.iterdir()) == []
    _elsewhere(tmp_path, 3)
    monkeypatch.setattr(folder_lock.time, "sleep", lambda seconds: os.utime(tmp_path / LOCK))
    with pytest.raises(Occupied, match="process 1 on elsewhere, last sign of life 0 s ago"), exclusive(tmp_path):
        pass
    assert "host=elsewhere" in (tmp_path / LOCK).read_text()


def test_a_suspended_holder_loses_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holder: subprocess.Popen[str]
) -> None:
    monkeypatch.setattr(folder_lock, "STALE", 1.0)
    holder.send_signal(signal.SIGSTOP)
    lock = tmp_path / "run" / LOCK
    lock.write_text(lock.read_text().replace("duration=30.0", "duration=1.0"))
    with exclusive(tmp_path / "run"):
        assert f"pid={os.getpid()}\n" in lock.read_text()


def test_who_holds_a_folder_can_be_read(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    assert holder_of(tmp_path / "nowhere") is None
    assert holder_of(tmp_path) is None
    for silent, alive in ((3, True), (STALE + 1, False)):
        _elsewhere(tmp_path, silent)
        told = holder_of(tmp_path)
        assert told is not None
        assert (told.alive, round(told.silent), told.who) == (alive, silent, "process 1 on elsewhere")
    told = holder_of(tmp_path / "run")
    assert told is not None
    assert (told.alive, told.who) == (True, f"process {holder.pid} on {socket.gethostname()}")
    holder.kill()
    holder.wait()
    os.utime(tmp_path / "run" / LOCK, (time.time() - 3,) * 2)
    told = holder_of(tmp_path / "run")
    assert told is not None
    assert not told.alive
    (tmp_path / LOCK).write_text('{"host": "elsewhere", "process": 1}')  # as releases before wrote it
    told = holder_of(tmp_path)
    assert told is not None
    assert (told.alive, told.who) == (True, "another process")


def test_a_lock_that_an_earlier_release_left_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text('{"host": "elsewhere", "process": 1}')
    with exclusive(tmp_path):
        assert f"pid={os.getpid()}\n" in (tmp_path / LOCK).read_text()


def test_a_file_system_without_links_is_locked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*arguments: object) -> None:
        raise OSError("not supported")

    monkeypatch.setattr("os.link", none)
    with exclusive(tmp_path), pytest.raises(Occupied, match=f"process {os.getpid()} on"), exclusive(tmp_path):
        pass
    assert not (tmp_path / LOCK).exists()


def test_a_holder_gives_signs_of_life(tmp_path: Path) -> None:
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
    assert "host=elsewhere" in (tmp_path / LOCK).read_text()  # theirs stays
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

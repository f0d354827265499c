"""Processes of a pool: jobs are done side by side, and stop with their parent."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from command_line import Patch, refused
from confed.studies.pool import carry_out
from confed.system.events import Event, JobProgress, RunProgress

WORK = """
import os, pathlib, time

from confed.system.events import RunProgress

def work(job, progress):
    if job["do"] == "refuse":
        raise ValueError("cannot")
    progress(RunProgress(1, 2, "training", "half"))
    if job["do"] == "fail":
        raise ValueError("broke")
    if job["do"] == "die":
        os._exit(7)
    path = pathlib.Path(job["path"])
    path.write_text(str(os.getpid()))
    try:
        while job["do"] == "wait":
            time.sleep(0.01)
    except KeyboardInterrupt:
        path.write_text("in good order")
        raise
    return f"wrote {path.name}"
"""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: Patch) -> Path:
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "toy_work.py").write_text(WORK)
    monkeypatch.syspath_prepend(folder)
    return folder


@pytest.mark.parametrize("workers", [1, 3])
def test_jobs_are_done_refused_or_failed_and_the_others_go_on(worker: Path, tmp_path: Path, workers: int) -> None:
    does = ["write", "refuse", "fail", "write", "skip", "write"] + ["die", "write"] * (workers > 1)
    jobs = [{"do": do, "path": str(tmp_path / f"{number}")} for number, do in enumerate(does)]
    events: list[Event] = []
    carry_out("toy_work:work", jobs, workers, events.append, lambda number: does[number] != "skip")
    last = {event.job: event for event in events}
    kinds = {"write": "done", "refuse": "refused", "fail": "failed", "die": "failed"}
    assert {number: event.outcome for number, event in last.items()} == {
        number: kinds[do] for number, do in enumerate(does) if do != "skip"
    }
    assert last[0].text == "wrote 0"
    assert last[1].text == "cannot"
    assert last[2].text == "ValueError: broke"
    assert any(e == JobProgress(0, e.worker, RunProgress(1, 2, "training", "half")) for e in events)
    if workers > 1:
        assert last[6].text == "its process died (exit code 7)"
        assert len({(tmp_path / str(n)).read_text() for n in (0, 3, 5, 7)}) <= 4
    with refused("workers must be at least 1, got 0"):
        carry_out("toy_work:work", jobs, 0, events.append)


def test_a_process_that_cannot_start_says_why(worker: Path) -> None:
    with pytest.raises(RuntimeError, match=r"could not start: ModuleNotFoundError: .*nowhere"):
        carry_out("nowhere:work", [{}, {}], 2, lambda event: None)


@pytest.mark.parametrize("kill", [signal.SIGINT, signal.SIGKILL])
def test_processes_stop_with_their_parent(worker: Path, tmp_path: Path, kill: signal.Signals) -> None:
    jobs = [{"do": "wait", "path": str(tmp_path / f"{number}")} for number in range(2)]
    code = (
        f"import sys; sys.path.insert(0, {str(worker)!r}); from confed.studies.pool import carry_out\n"
        f"try: carry_out('toy_work:work', {jobs!r}, 2, lambda event: None)\n"
        "except KeyboardInterrupt: sys.exit(130)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE)
    try:
        until = time.monotonic() + 120
        files = [tmp_path / "0", tmp_path / "1"]
        while process.poll() is None and time.monotonic() < until:
            if all(file.exists() and file.read_text() for file in files):
                break
            time.sleep(0.01)
        children = [int(file.read_text()) for file in files]
        process.send_signal(kill)
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert errors == b""
    until = time.monotonic() + 60  # of its own, as the start takes long on a busy machine
    assert process.returncode == (130 if kill == signal.SIGINT else -signal.SIGKILL)
    while time.monotonic() < until and any(map(_alive, children)):
        time.sleep(0.01)
    assert not any(map(_alive, children))
    if kill == signal.SIGINT:
        assert [file.read_text() for file in files] == ["in good order"] * 2


def _alive(pid: int) -> bool:
    try:
        return b"serve" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False

"""SIGTERM and Ctrl-C end commands in good order, with exit codes that say which it was."""

import gc
import os
import signal
import subprocess
import sys
import threading
from multiprocessing import Pipe
from pathlib import Path

import pytest
import typer

from command_line import Capture, Patch
from confed.algorithms.fedavg import FedAvg
from confed.cli import federation as federating
from confed.cli.app import INTERRUPTED, TERMINATED, main
from confed.engines.local import InProcess, Simulation
from confed.engines.workers import Workers, serve
from confed.federation.state import MemoryStore
from confed.testing.toy import toy_setup
from repository import SUPPORT

SMALL = (
    "study.methods=[]", "algorithm.name=fedavg", "data.name=toy_federation:squares", "data.train=8", "data.test=4",
    "model.name=vilt_tiny", "model.width=16", "model.layers=1", "local.epochs=1", "run.rounds=200", "run.gallery=0",
    "run.evaluate_every=0",
)  # fmt: skip


def test_a_run_that_is_asked_to_end_says_how_to_go_on(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "confed.cli", "run", "fedvqa_scenes", *SMALL, "run.workers=2"]
    paths = os.pathsep.join([str(SUPPORT), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*command, "--out", str(tmp_path / "run")],
        stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        for line in process.stderr:
            if "round 2/200" in line:
                os.killpg(process.pid, signal.SIGTERM)  # workers get it too, as from a batch system
                break
        rest = process.stderr.read()
        assert process.wait(60) == 143
    assert f"confed resume {tmp_path / 'run'}" in rest
    assert "Traceback" not in rest
    assert not (tmp_path / "run" / "lock.json").exists()
    assert list((tmp_path / "run" / "checkpoint").glob("round-*"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, TERMINATED), (signal.SIGINT, INTERRUPTED)])
def test_all_verbs_have_the_same_codes(number: signal.Signals, code: int, monkeypatch: Patch, capfd: Capture) -> None:
    def asked(**_: object) -> None:
        signal.raise_signal(number)

    monkeypatch.setattr("confed.cli.list.diagnose", asked)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    assert ended.value.code == code
    assert signal.getsignal(signal.SIGTERM) is before
    # Ctrl-C is acknowledged at once, past any display.
    assert ("stopping at the end of what is under way" in capfd.readouterr().err) == (number == signal.SIGINT)
    stop = threading.Event()
    with pytest.raises(typer.Exit) as left, federating._stopping(stop):
        signal.raise_signal(number)
    assert stop.is_set()
    assert left.value.exit_code == code


def test_an_evaluation_that_is_interrupted_leaves_no_traceback(monkeypatch: Patch) -> None:
    """Ctrl-C while replies are read: the frames that hold the generator live on until the workers are closed."""
    said: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", said.append)
    setup = toy_setup(FedAvg(), rounds=1)
    with Simulation(setup, MemoryStore(), Workers(setup, 2)) as simulation:
        shared = simulation.start(InProcess(setup).workspace)["main"].params
        jobs = [(client.id, shared, {}) for client in simulation.clients()] * 4
        replies = simulation.examine(jobs, 1)
        handlers = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            next(replies)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        finally:
            signal.signal(signal.SIGINT, handlers)
    del replies
    gc.collect()
    assert not said


def test_a_worker_whose_parent_is_gone_ends_quietly(monkeypatch: Patch) -> None:
    handlers: dict[int, object] = {}
    monkeypatch.setattr("confed.engines.workers.signal.signal", handlers.__setitem__)
    for parts in ([], [b"{}"], [b"{}", b"half"]):
        here, there = Pipe()
        spare, _ = Pipe()
        for part in parts:
            here.send_bytes(part)
        here.close()

        class Setup:
            device = "cpu"

        serve(Setup(), 0, 1, there, spare, 1)  # pyright: ignore[reportArgumentType]
        there.close()
    assert handlers == {signal.SIGINT: signal.SIG_IGN, signal.SIGTERM: signal.SIG_IGN}

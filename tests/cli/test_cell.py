"""Cells of studies as jobs of their own, watching them, and ending them."""

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from multiprocessing import Pipe
from pathlib import Path

import pytest
import typer

from children import status_of
from command_line import Capture, Patch, confed, refusal, started_command
from confed.algorithms.fedavg import FedAvg
from confed.cli import completion
from confed.cli import federation as federating
from confed.cli.app import INTERRUPTED, TERMINATED, main
from confed.engines.local import InProcess, Simulation
from confed.engines.workers import Workers, serve
from confed.federation.state import MemoryStore
from confed.results.runs import load
from confed.results.watching import states_of
from confed.studies.cells import requeue
from confed.system.folder_lock import exclusive
from confed.testing.toy import toy_setup
from real_processes import until
from refusals import refuses
from repository import ROOT, SUPPORT
from tiny_runs import SQUARES_STUDY

# Runs the tasks of the script's array two at a time; kills one and warns another in the middle, and starts both again.
SBATCH = """#!{python}
import json, os, re, signal, subprocess, sys, threading, time
script = sys.argv[-1]
text = open(script).read()
assert "--parsable" in sys.argv and "#SBATCH --requeue" in text and "#SBATCH --signal=B:USR1@120" in text
first, last = map(int, re.search(r"^#SBATCH --array=(\\d+)-(\\d+)%2$", text, re.M).groups())
study = os.path.dirname(script)
listed = json.load(open(os.path.join(study, "cells.json")))["cells"]
log, turn = open(os.path.join({here!r}, "log"), "a"), threading.Semaphore(2)

def rounds(number):
    cell = listed[number - 1]
    path = os.path.join(study, cell["study"], cell["method"], "seed-%d" % cell["seed"], "metrics.jsonl")
    return open(path).read().count('"event": "round"') if os.path.exists(path) else 0

def task(number):
    with turn:
        for attempt, sign in enumerate(({{2: signal.SIGKILL, 3: signal.SIGUSR1}}.get(number), None)):
            environment = dict(os.environ, SLURM_ARRAY_JOB_ID="77", SLURM_ARRAY_TASK_ID=str(number))
            process = subprocess.Popen(["bash", script], env=environment)
            while sign and rounds(number) < 3 and process.poll() is None:
                time.sleep(0.005)
            if sign:
                process.send_signal(sign)
            code = process.wait()
            print(number, attempt, code, rounds(number), file=log, flush=True)
            if code == 0:
                return

threads = [threading.Thread(target=task, args=(number,)) for number in range(first, last + 1)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print("77;cluster")
"""
SCONTROL = """#!{python}
import os, sys
print(*sys.argv[1:], file=open(os.path.join({here!r}, "requeued"), "a"))
"""


def _environment(folder: Path) -> dict[str, str]:
    """Of commands: the package and the tests' modules, and the stand-ins before everything else."""
    paths = os.pathsep.join([str(ROOT / "src"), str(SUPPORT), *filter(None, sys.path)])
    own = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    return {**os.environ, **own}


def _stand_ins(folder: Path) -> None:
    for name, text in {"sbatch": SBATCH, "scontrol": SCONTROL}.items():
        (folder / name).write_text(text.format(python=sys.executable, here=str(folder)))
        (folder / name).chmod(0o755)


def _confed(folder: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "confed.cli", *arguments]
    environment = {**_environment(folder), **more}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def _bytes(root: Path) -> dict[str, bytes]:
    """What must not depend on where cells were computed: metrics, predictions, models, tables, without times."""
    kept = [
        path
        for name in ("metrics.jsonl", "predictions.safetensors", "trained.safetensors")
        for path in root.rglob(name)
    ]
    tables = [path for end in ("md", "csv", "tex") for path in root.glob(f"*.{end}")]
    return {str(path.relative_to(root)): path.read_bytes() for path in (*kept, *tables, root / "summary.json")}


def _recipe(folder: Path, *changes: tuple[str, str]) -> Path:
    text = SQUARES_STUDY
    for old, new in changes:
        text = text.replace(old, new)
    (folder / "tiny.toml").write_text(text)
    return folder / "tiny.toml"


@pytest.mark.timeout(1200)  # of many processes, on a machine that may be busy
@pytest.mark.slow
def test_an_array_with_killed_tasks_has_the_bytes_of_one_machine(tmp_path: Path) -> None:
    _recipe(tmp_path)
    _stand_ins(tmp_path)
    asked = ["compare", "tiny.toml", "--seeds", "2"]
    sent = _confed(tmp_path, *asked, "--out", "array", "--on", "slurm", "--slurm", "array=%2,mem=4G", "--submit")
    assert sent.returncode == 0, sent.stderr
    assert "submitted as job 77" in sent.stderr
    log = [list(map(int, line.split())) for line in (tmp_path / "log").read_text().splitlines()]
    first = {number: (code, rounds) for number, attempt, code, rounds in log if attempt == 0}
    assert first[2][0] == -signal.SIGKILL
    assert first[3][0] == 75
    assert all(3 <= first[number][1] < 60 for number in (2, 3))  # both were in the middle
    assert {number: code for number, attempt, code, _ in log if attempt == 1} == {2: 0, 3: 0}
    assert (tmp_path / "requeued").read_text() == "requeue 77_3\n"

    gathered = _confed(tmp_path, "compare", "array")
    assert gathered.returncode == 0, gathered.stderr
    assert "4 cells: 4 done" in gathered.stderr
    alone = _confed(tmp_path, *asked, "--out", "one", "--workers", "1")
    assert alone.returncode == 0, alone.stderr
    assert _bytes(tmp_path / "array") == _bytes(tmp_path / "one")
    assert gathered.stdout.replace("array", "one") == alone.stdout


@pytest.mark.slow
def test_cells_that_the_setting_does_not_concern_are_run_once(tmp_path: Path) -> None:
    """Over FedProx's mu, local training is one cell, and the table is that of one machine."""
    few = ("rounds = 60", "rounds = 2"), ('["local", "fedavg"]', '["local", "fedprox"]')
    recipe, asked = _recipe(tmp_path, *few), ["algorithm.mu=0.1,0.2", "--methods", "local,fedprox"]
    sweep = ["compare", str(recipe), "algorithm.name=fedprox", *asked]
    written = _confed(tmp_path, *sweep, "--out", "array", "--on", "script")
    assert written.returncode == 0, written.stderr
    assert "qsub -J 1-3 -r y array/cells.sh" in written.stderr
    for number in (1, 2, 3):
        assert (
            _confed(tmp_path, "resume", "array", "--cell", "array", JOB_COMPLETION_INDEX=str(number - 1)).returncode
            == 0
        )
        if number == 1:  # tables of the first gathering are written anew by the second
            assert _confed(tmp_path, "compare", "array").returncode == 0
    assert _confed(tmp_path, "compare", "array").returncode == 0
    assert _confed(tmp_path, *sweep, "--out", "one", "--workers", "1").returncode == 0
    for point in ("mu-0.1", "mu-0.2"):
        assert _bytes(tmp_path / "array" / point) == _bytes(tmp_path / "one" / point)
        tables = [(tmp_path / where / point / "table.md").read_text() for where in ("array", "one")]
        assert "FedProx" in tables[0]
        assert tables[0].splitlines()[0] == tables[1].splitlines()[0]
    assert (tmp_path / "array/results.json").read_bytes() == (tmp_path / "one/results.json").read_bytes()


@pytest.fixture
def array(tmp_path: Path, monkeypatch: Patch, capfd: Capture) -> Path:
    """A study of two cells with a job script; one of its rows cannot be run."""
    monkeypatch.chdir(tmp_path)
    recipe = _recipe(tmp_path, ("rounds = 60", "rounds = 3"), ("evaluate_every = 20", "evaluate_every = 0"))
    rows = ("--methods", "fedavg,fedlgt,local")
    assert confed("compare", recipe, *rows, "--out", "study", "--on", "slurm") == 0
    said = capfd.readouterr().err
    assert "without: fedlgt/seed-0: " in said
    assert "study/cells.sh: all 2 cells" in said
    assert "submit it with: sbatch study/cells.sh" in " ".join(said.split())
    return tmp_path / "study"


def test_a_task_learns_its_cell_from_its_scheduler(array: Path, monkeypatch: Patch, capfd: Capture) -> None:
    assert "give the number of a cell: confed resume" in refusal(capfd, "resume", array, "--cell", "array")
    monkeypatch.setenv("LSB_JOBINDEX", "2")
    assert confed("resume", array, "--cell", "array") == 0
    assert (array / "local/seed-0/summary.json").is_file()
    assert confed("resume", array, "--cell", "array") == 0
    assert "cell 2 is there already" in capfd.readouterr().err
    assert "study has cells 1 to 2, got 3" in refusal(capfd, "resume", array, "--cell", "3")
    assert confed("compare", array, "--json") == 0
    shown = json.loads(capfd.readouterr().out)
    assert [cell["state"] for cell in shown["cells"]] == ["waiting", "done"]
    assert "fedlgt/seed-0" in shown["errors"]
    assert load(array).failures.keys() == {"fedlgt/seed-0"}


def test_a_cell_stops_for_the_time_limit_and_goes_on(array: Path, monkeypatch: Patch, capfd: Capture) -> None:
    from confed.runs.run import Runner

    before, asked = Runner._after, list[int]()

    def warned(runner: Runner, simulation: object, record: object) -> None:
        before(runner, simulation, record)  # pyright: ignore[reportArgumentType]
        if not asked:
            asked.append(signal.raise_signal(signal.SIGUSR1) or 1)

    monkeypatch.setattr(Runner, "_after", warned)
    assert confed("resume", array, "--cell", "1") == 75
    assert "stopped after round 1 for the time limit; cell 1 goes on there" in capfd.readouterr().err
    assert [path.name for path in (array / "fedavg/seed-0/checkpoint").glob("round-*")] == ["round-000001"]
    assert confed("compare", array) == 0
    out = capfd.readouterr()
    assert "2 cells: 1 stopped, 1 waiting" in out.err
    assert "goes on when its task runs again" in out.out
    assert confed("resume", array, "--cell", "1") == 0
    rounds = [json.loads(line)["round"] for line in (array / "fedavg/seed-0/metrics.jsonl").read_text().splitlines()]
    assert rounds == [1, 2, 3]


def test_a_cell_that_finishes_no_round_is_not_requeued(array: Path, monkeypatch: Patch, capfd: Capture) -> None:
    from confed.engines.local import InProcess

    def slow(*_: object) -> None:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)  # the second one: at once

    monkeypatch.setattr(InProcess, "__call__", slow)
    assert confed("resume", array, "--cell", "1") == 1
    assert "could not finish one round, or the final evaluation, in its time" in capfd.readouterr().err
    assert "could not finish one round" in next(array.glob("*/seed-0/error.txt")).read_text()


def test_two_tasks_on_one_cell_are_told_apart_by_the_lease(array: Path, monkeypatch: Patch, capfd: Capture) -> None:
    from confed.system import folder_lock
    from confed.system.folder_lock import exclusive

    monkeypatch.setattr(folder_lock, "PATIENCE", 0.0)
    with exclusive(array / "fedavg/seed-0"):
        assert f"process {os.getpid()} on" in refusal(capfd, "resume", array, "--cell", "1")
        assert confed("compare", array) == 0
        shown = capfd.readouterr()
        assert "1 running" in shown.err
        assert f"process {os.getpid()} on" in shown.out
    assert confed("resume", array, "--cell", "1") == 0


def test_a_damaged_checkpoint_is_said_in_one_line(array: Path, capfd: Capture) -> None:
    place = array / "local/seed-0"
    (place / "checkpoint/round-000001").mkdir(parents=True)
    (place / "recipe.toml").write_text((array / "recipe.toml").read_text())
    assert confed("resume", array, "--cell", "2") == 2
    said = " ".join(capfd.readouterr().err.split())
    assert "error: no sound checkpoint in" in said
    assert (place / "error.txt").read_text().startswith("CorruptCheckpoint: no sound checkpoint in")


def test_cells_of_another_version_or_recipe_are_refused(array: Path, capfd: Capture) -> None:
    before = (array / "cells.json").read_text()

    def change(entry: Mapping[str, object]) -> None:
        (array / "cells.json").write_text(json.dumps({**json.loads(before), **entry}))

    change({"versions": {"confed": "0.0.1"}})
    assert "was written by confed 0.0.1, and this is confed" in refusal(capfd, "resume", array, "--cell", "1")
    change({"cells": [{"number": 1}]})
    assert "cells.json must be a list of cells" in refusal(capfd, "resume", array, "--cell", "1")
    change({})
    recipe = array / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("rounds = 3", "rounds = 4"))
    assert confed("resume", array, "--cell", "1") == 2
    assert "cell 1 of" in (said := capfd.readouterr().err)
    assert "has another recipe than when cells.json was written" in said
    (array / "cells.json").unlink()
    assert "has no cells.json; write it with" in refusal(capfd, "resume", array, "--cell", "1")


def test_a_study_that_grows_keeps_the_numbers_of_its_cells(array: Path, capfd: Capture) -> None:
    recipe = str(array.parent / "tiny.toml")
    assert confed("compare", recipe, "--methods", "fedprox,fedavg", "--seeds", "2", "--out", str(array),
                 "--on", "slurm", "--json") == 0  # fmt: skip
    found = json.loads(capfd.readouterr().out)
    assert (found["cells"], found["missing"], found["job"]) == (5, [1, 2, 3, 4, 5], None)
    cells = json.loads((array / "cells.json").read_text())["cells"]
    assert [(cell["method"], cell["seed"]) for cell in cells[:2]] == [("fedavg", 0), ("local", 0)]
    assert {(cell["method"], cell["seed"]) for cell in cells[2:]} == {("fedprox", 0), ("fedprox", 1), ("fedavg", 1)}


def test_faulty_options_of_a_cluster_are_named(tmp_path: Path, monkeypatch: Patch, capfd: Capture) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ["compare", str(_recipe(tmp_path))]
    for options, expected in (
        (["--on", "cloud"], "--on must be slurm, script or ray, got 'cloud'"),
        (["--submit"], "need --on slurm"),
        (["--on", "script", "--slurm", "mem=1G"], "--slurm and --submit need --on slurm"),
        (["--on", "slurm", "--slurm", "array=1-3"], "array must be %N"),
    ):
        assert expected in refusal(capfd, *asked, *options)
        assert not (tmp_path / "runs").exists()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "--submit needs sbatch, which is not on this machine's PATH" in refusal(
        capfd, *asked, "--on", "slurm", "--submit"
    )
    assert "--on goes with a recipe" in refusal(capfd, "compare", "runs/tiny-compare", "--on", "slurm")


def test_only_an_array_task_of_slurm_is_requeued(tmp_path: Path) -> None:
    _stand_ins(tmp_path)
    assert not requeue({"PATH": str(tmp_path)})
    assert not requeue({"PATH": "", "SLURM_JOB_ID": "5"})
    assert requeue({"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_ID": "5"})
    assert (tmp_path / "requeued").read_text() == "requeue 5\n"


TINY = [
    "fedvqa_scenes", "data.name=toy_federation:squares", "data.train=8", "data.test=4", "model.name=vilt_tiny",
    "model.width=16", "model.layers=1", "run.workers=1", "run.gallery=0", "run.controls=none", "local.epochs=1",
    "run.rounds=2", 'study.methods=["local", "fedavg"]',
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
    refuses("neither a run, a study nor a sweep", states_of, tmp_path)


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


SMALL = (
    "study.methods=[]", "algorithm.name=fedavg", "data.name=toy_federation:squares", "data.train=8", "data.test=4",
    "model.name=vilt_tiny", "model.width=16", "model.layers=1", "local.epochs=1", "run.rounds=200", "run.gallery=0",
    "run.evaluate_every=0",
)  # fmt: skip


def test_a_run_that_is_asked_to_end_says_how_to_go_on(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = started_command(log, "run", "fedvqa_scenes", *SMALL, "run.workers=2", "--out", tmp_path / "run")
    until(log, "round 2/200")
    os.killpg(child, signal.SIGTERM)  # workers get it too, as from a batch system
    assert os.waitstatus_to_exitcode(status_of(child)) == 143
    assert f"confed resume {tmp_path / 'run'}" in " ".join(log.read_text().split())
    assert "Traceback" not in log.read_text()
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

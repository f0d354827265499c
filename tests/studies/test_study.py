"""Studies that grow: what is missing is run, what is there is reused, what fails is marked; pools, arrays and gates."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import toy_federation  # its datasets have names then
from command_line import Capture, Patch, confed, refusal, refused
from confed.federation.algorithm import Algorithm
from confed.federation.checkpoint import write_atomically
from confed.recipes.recipe import Recipe, load_recipe, parse_recipe
from confed.registry import algorithms
from confed.results.folder import kind_of
from confed.results.runs import load
from confed.runs.run import run
from confed.studies import runner
from confed.studies.cells import BatchOptions, array_index, parse_options, parse_time, ranges, script_of, write_script
from confed.studies.gates import Rows, rows_for_gates, with_references
from confed.studies.pool import carry_out
from confed.studies.runner import resume, run_study
from confed.studies.study import grid_of, load_rows, open_study, read_study, rows_of
from confed.system.events import Event, JobProgress, JobsPlanned, RunProgress
from confed.system.folder_lock import exclusive
from refusals import refuses
from tiny_runs import SQUARES_STUDY, changed

TINY = [
    "model.name=vilt_tiny", "model.width=16", "model.layers=1", "data.train=16", "data.validation=8", "data.test=8",
    "data.unseen=[]", "data.preset=quantity", "data.clients=2", "local.epochs=1", "run.rounds=1", "run.gallery=0",
    "run.controls=none",
]  # fmt: skip

BREAKS = '''
from dataclasses import dataclass
from confed.federation.algorithm import Algorithm

@dataclass(frozen=True)
class Breaks(Algorithm):
    """FedAvg whose server breaks."""

    def aggregate(self, server, replies):
        raise ZeroDivisionError("by design")

@dataclass(frozen=True)
class Unsuited(Algorithm):
    """FedAvg with a mistake in its code."""

    def configure(self, model, task):
        return model.nothing

@dataclass(frozen=True)
class Late(Algorithm):
    """FedAvg that raises a ValueError only when the first round is over."""

    def aggregate(self, server, replies):
        raise ValueError("too late for a refusal")
'''


def tiny(rows: str, *more: str) -> Recipe:
    recipe = load_recipe("fedvqa_scenes", [*TINY, *more])
    return recipe.with_rows(rows.split(","))


@pytest.fixture
def breaking(tmp_path: Path, monkeypatch: Patch) -> Path:
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "breaking.py").write_text(BREAKS)
    monkeypatch.syspath_prepend(folder)
    return folder


@pytest.fixture
def plain(monkeypatch: Patch) -> None:
    """Neither report nor figures, which take a while."""
    monkeypatch.setattr("confed.report.report.write_report", lambda folder: folder / "report.html")
    monkeypatch.setattr("confed.report.report.save_figures", lambda folder: [])


# Rows ----------------------------------------------------------------------------------------------------------


def test_all_means_the_table_or_the_rows_or_every_method(tmp_path: Path) -> None:
    recipe = load_recipe("fedvqa_scenes")
    assert rows_of(recipe, "all") == recipe.table == rows_of(recipe, None)
    assert len(recipe.table) == 15
    assert recipe.with_rows(recipe.table).methods == recipe.table  # every row is sound
    bare = load_recipe("fedvqa_scenes", ["study.table=[]"])
    assert rows_of(bare, "all") == bare.methods
    assert rows_of(replace(bare, methods=()), "all") == tuple(algorithms.names())
    assert rows_of(bare, None) == ("local", "fedavg", "fedprox", "fedp3", "central")
    assert rows_of(bare, "fedavg, local,fedavg") == ("fedavg", "local")
    refuses("at least one method, got ' ,'", rows_of, bare, " ,")
    refuses("no algorithm is called 'fedavgg'", recipe.with_rows, ["fedavgg"])
    assert load_rows("fedvqa_scenes", [], "all").methods == recipe.table  # as `confed run --methods all` asks
    other = load_rows("fedvqa_scenes", ["methods.weak.name=fedprox", "methods.weak.mu=0.5"], "local,weak,local")
    assert other.methods == ("local", "weak")
    assert other.method("weak").construct("algorithm").mu == 0.5
    path = tmp_path / "mine.toml"
    path.write_text(recipe.to_toml())
    assert load_recipe(path).table == recipe.table
    refuses(r"unknown key methods\.ditto\.nu=1", load_recipe, "fedvqa_scenes", ["methods.ditto.nu=1"])


# Grids ---------------------------------------------------------------------------------------------------------


def test_a_grid_grows_and_never_passes_off_other_settings(tmp_path: Path, monkeypatch: Patch) -> None:
    root = tmp_path / "grid"
    open_study(tiny("fedavg"), root, [0])
    assert len(run_study(root).summaries) == 1
    before = (root / "fedavg/seed-0/summary.json").stat().st_mtime_ns
    chosen = root / "fedavg/seed-0/recipe.toml"
    chosen.write_text(re.sub("batch_clients = .*", "batch_clients = 4", chosen.read_text()))  # as "auto" may choose
    open_study(tiny("fedavg,local"), root, [0, 1])
    assert load_recipe(root / "recipe.toml").run.batch_clients == "auto"
    titles: list[str] = []

    def note(event: Event) -> None:
        if isinstance(event, JobsPlanned):
            titles.extend(event.titles)
            assert event.finished == 1

    grid = run_study(root, note)
    assert titles == ["Local only, seed 0", "Local only, seed 1", "FedAvg, seed 1"]  # by seed, in the table's order
    assert [(s["algorithm"], s["seed"]) for s in grid.summaries] == [
        ("local", 0), ("fedavg", 0), ("local", 1), ("fedavg", 1),
    ]  # fmt: skip
    assert (root / "fedavg/seed-0/summary.json").stat().st_mtime_ns == before
    index = json.loads((root / "summary.json").read_text())
    assert index["methods"] == ["local", "fedavg"]
    assert index["seeds"] == [0, 1]
    for more, row, key in (
        (["local.lr=0.5"], "local", r"local\.lr=0\.003, not 0\.5"),
        (["run.rounds=2"], "fedprox", r"run\.rounds=1, not 2"),
    ):
        refuses(rf"seed-0 was run with {key} \(and 3 more cells differ\)", open_study, tiny(row, *more), root, [0])
    open_study(tiny("local", "run.workers=2", "run.gallery=3"), root, [0])  # these change no figure
    changed = load_recipe("fedvqa_scenes", [*TINY, 'methods.slow.name="local"', "methods.slow.local.lr=1e-4",
                                            'study.methods=["slow"]', "study.table=[]"])  # fmt: skip
    open_study(changed, root, [0])
    assert json.loads((root / "summary.json").read_text())["methods"] == ["local", "fedavg", "slow"]
    monkeypatch.setattr("confed.system.folder_lock.PATIENCE", 0.0)
    with exclusive(root), refused("another process is working in"):
        open_study(changed, root, [0])
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").write_text("")
    refuses("other exists already and is no study; give", open_study, tiny("local"), tmp_path / "other", [0])


def test_the_command_marks_what_fails_and_finishes_the_others(
    breaking: Path, tmp_path: Path, capfd: Capture, monkeypatch: Patch
) -> None:
    root = tmp_path / "grid"
    command = ["compare", "fedvqa_scenes", *TINY, "--out", root, "--workers", "1"]
    assert confed(*command, "--methods", "fedavg,fedbn,local", "--seeds", "2") == 0
    out, err = capfd.readouterr()
    assert "[4/4] Local only, seed 1: personal" in err
    assert "without fedbn/seed-0, fedbn/seed-1: FedBN" in out
    assert {f"compare.{ending}" for ending in ("md", "csv", "tex")} | {"report.html", "figures"} <= {
        path.name for path in root.iterdir()
    }
    assert not (root / "fedbn").exists()
    assert "FedBN, seeds 0, 1, cannot run here: FedBN" in (root / "table.md").read_text(encoding="utf-8")
    monkeypatch.setattr("confed.report.report.write_report", lambda folder: folder / "report.html")  # it takes a while
    monkeypatch.setattr("confed.report.report.save_figures", lambda folder: [])
    assert confed(*command, "--methods", "breaking:Breaks,fedbn", "--json") == 1
    found = json.loads(capfd.readouterr().out)
    assert found["errors"]["breaking:Breaks/seed-0"] == "ZeroDivisionError: by design"
    assert set(found["errors"]) == {"fedbn/seed-0", "fedbn/seed-1", "breaking:Breaks/seed-0"}
    assert len(found["runs"]) == 4
    assert "by design" in (root / "breaking%3ABreaks/seed-0/error.txt").read_text()
    # Both are tried again the next time, also by `resume`.
    monkeypatch.setattr("breaking.Breaks.aggregate", Algorithm.aggregate)
    monkeypatch.setattr("confed.cli.grids.default_workers", lambda recipe: 1)
    assert confed("resume", root, "--json") == 0
    assert set(json.loads(capfd.readouterr().out)["errors"]) == {"fedbn/seed-0", "fedbn/seed-1"}
    assert not (root / "breaking%3ABreaks/seed-0/error.txt").exists()
    assert "error: no run could be made: FedBN" in refusal(
        capfd, *command[:-4], "--out", tmp_path / "none", "--methods", "fedbn"
    )
    assert "--methods goes with a recipe" in refusal(capfd, "compare", root, "--methods", "all")


@pytest.mark.usefixtures("breaking", "plain")
def test_a_mistake_in_a_method_fails_its_cells_only(tmp_path: Path, capfd: Capture) -> None:
    root = tmp_path / "grid"
    command = ["compare", "fedvqa_scenes", *TINY, "--out", root, "--workers", "1", "--methods"]
    assert confed(*command, "breaking:Unsuited") == 1
    assert "failed: no run could be made: AttributeError: " in capfd.readouterr().err
    assert confed(*command, "local,breaking:Late", "--seeds", "1") == 1
    out = capfd.readouterr().out
    assert "without breaking:Unsuited/seed-0: AttributeError: " in out
    assert "without breaking:Late/seed-0: ValueError: too late for a refusal" in out
    place = root / "breaking%3ALate/seed-0/error.txt"
    assert f"what went wrong in breaking:Late/seed-0: {place}" in out
    for row in ("Unsuited", "Late"):
        assert "Traceback" in (root / f"breaking%3A{row}/seed-0/error.txt").read_text()
    assert f"{root}/table as .md, .csv and .tex" in out  # one method came to its end: nothing to compare


@pytest.mark.usefixtures("plain")
def test_one_method_has_a_table_and_nothing_to_compare(tmp_path: Path, capfd: Capture) -> None:
    root = tmp_path / "grid"
    command = ["compare", "fedvqa_scenes", *TINY, "--out", root, "--workers", "1", "--methods", "local"]
    assert confed(*command) == 0
    assert f"{root}/table as .md, .csv and .tex" in capfd.readouterr().out
    assert not (root / "compare.md").exists()


def test_a_faulty_margin_is_found_before_anything_is_run(tmp_path: Path, capfd: Capture) -> None:
    for margin in ("0", "100", "nan"):
        assert f"--margin must lie between 0 and 100 points, got {margin}" in refusal(
            capfd, "compare", "fedvqa_scenes", *TINY, "--out", tmp_path / "g", "--margin", margin
        )
    assert not (tmp_path / "g").exists()


def test_an_index_cannot_point_out_of_its_folder(tmp_path: Path) -> None:
    root, victim = tmp_path / "grid", tmp_path / "victim"
    open_study(tiny("local"), root, [0])
    (victim / "seed-0").mkdir(parents=True)
    (victim / "seed-0/file").write_text("mine")
    index = json.loads((root / "summary.json").read_text())
    for method, seed, folder in (
        ("local", 0, str(victim)), ("local", 0, "../victim"), ("../victim", 0, "../victim/seed-0"),
        ("local", "0/../../../victim", "local/seed-0/../../../victim"), ("fedavg", 0, "fedavg/seed-0"),
    ):  # fmt: skip
        runs = [{"method": method, "seed": seed, "folder": folder}]
        (root / "summary.json").write_text(json.dumps({**index, "runs": runs}))
        refuses(r"a run must lie in ROW/seed-N with a row of local, got", run_study, root)
    (root / "summary.json").write_text(json.dumps(index))
    (root / "local").symlink_to(victim)
    assert "leads out of" in run_study(root).errors["local/seed-0"]
    assert (victim / "seed-0/file").read_text() == "mine"


def test_two_commands_cannot_make_one_grid_at_the_same_time(tmp_path: Path, monkeypatch: Patch) -> None:
    root = tmp_path / "grid"
    root.mkdir()
    monkeypatch.setattr("confed.system.folder_lock.PATIENCE", 0.0)
    with exclusive(root), refused("another process is working in"):
        open_study(tiny("local"), root, [0])
    assert not list(root.iterdir())
    refuses(r"data|clients", open_study, tiny("local", "data.clients=0"), tmp_path / "faulty", [0])
    assert not (tmp_path / "faulty").exists()


def test_a_folder_that_was_cut_short_is_made_by_the_same_command(tmp_path: Path, monkeypatch: Patch) -> None:
    root, written = tmp_path / "study", list[str]()

    def full(path: Path, data: bytes) -> None:
        if written:
            raise OSError(28, "No space left on device")
        written.append(path.name)
        write_atomically(path, data)

    def make(rows: str) -> None:
        open_study(tiny(rows), root, [0])

    with monkeypatch.context() as patch:
        patch.setattr("confed.studies.study.write_atomically", full)
        with pytest.raises(OSError, match="No space"):
            make("local")
        refuses(r"no recipe\.toml: making it was interrupted", resume, root)
        assert kind_of(root) != "run"
    make("local")
    assert read_study(root).index["methods"] == ["local"]
    written.clear()
    with monkeypatch.context() as patch:
        patch.setattr("confed.studies.study.write_atomically", full)
        with pytest.raises(OSError, match="No space"):
            make("fedavg")
    assert read_study(root).index["methods"] == ["local"]
    make("fedavg")
    assert read_study(root).index["methods"] == ["local", "fedavg"]


@pytest.mark.usefixtures("plain")
def test_tuned_values_are_used_and_give_way_to_the_command_line(tmp_path: Path, capfd: Capture) -> None:
    tuned = tmp_path / "tuned.toml"
    tuned.write_text("[tuning]\nseed = 100\n[methods.fedavg.local]\nlr = 0.5\n[methods.fedprox]\nmu = 0.25\n")
    command = ["compare", "fedvqa_scenes", *TINY, "--workers", "1", "--tuned", tuned]
    arguments = ["--out", tmp_path / "a", "--methods", "fedavg,fedprox", "methods.fedprox.mu=0.75"]
    assert confed(*command, *arguments) == 0
    assert "Tuned values: fedavg local.lr=0.5\n" in capfd.readouterr().out
    assert load_recipe(tmp_path / "a/fedavg/seed-0/recipe.toml").local.lr == 0.5
    assert load_recipe(tmp_path / "a/fedprox/seed-0/recipe.toml").sections["algorithm"]["mu"] == 0.75
    # Without them the cells that are there are other runs.
    assert "local.lr=0.5, not 0.003" in refusal(capfd, *command[:-2], "--out", tmp_path / "a", "--methods", "fedavg")
    assert "seed 100 chose the values" in refusal(
        capfd, *command, "--out", tmp_path / "b", "--methods", "fedavg", "run.seed=99", "--seeds", "2"
    )
    assert not (tmp_path / "b").exists()


def _bytes(root: Path) -> dict[str, bytes]:
    files = [*root.glob("*/seed-*/metrics.jsonl"), *root.glob("*/seed-*/predictions.safetensors")]
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


@pytest.mark.slow
def test_killed_in_the_middle_it_ends_with_the_same_bytes(tmp_path: Path) -> None:
    open_study(tiny("local,fedavg", "run.rounds=3"), tmp_path / "whole", [0, 1])
    run_study(tmp_path / "whole")
    root = tmp_path / "cut"
    command = ["compare", "fedvqa_scenes", *TINY, "run.rounds=3", "--methods", "local,fedavg"]
    code = "from confed.cli import main; main()"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with subprocess.Popen(
        [sys.executable, "-c", code, *command, "--seeds", "2", "--out", str(root), "--workers", "2"],
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment,
    ) as process:  # fmt: skip
        until = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < until and not list(root.glob("*/*/summary.json")):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert 1 <= len(list(root.glob("*/*/summary.json"))) < 4
    run_study(root)
    assert _bytes(root) == _bytes(tmp_path / "whole")
    assert len(_bytes(root)) == 8


assert toy_federation.squares

RECIPE = changed(
    SQUARES_STUDY.replace('"tiny"', '"old"').replace('controls = "none"', "workers = 2"),
    train=6, test=2, rounds=1, evaluate_every=0,
)  # fmt: skip

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


@pytest.mark.parametrize("workers", [1, 2])
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
        assert len({(tmp_path / str(n)).read_text() for n in (0, 3, 5, 7)}) <= 3
    with refused("workers must be at least 1, got 0"):
        carry_out("toy_work:work", jobs, 0, events.append)


def test_a_process_that_cannot_start_says_why(worker: Path) -> None:
    with pytest.raises(RuntimeError, match=r"could not start: ModuleNotFoundError: .*nowhere"):
        carry_out("nowhere:work", [{}], 2, lambda event: None)


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


def test_options_of_slurm_are_passed_on() -> None:
    found = parse_options(
        ['partition=gpu,gres=gpu:1,exclusive,nodelist="a,b"', "time=1-02,array=%5,signal=B:USR1@60", "p=x"]
    )
    assert found.lines == (
        "--partition=gpu", "--gres=gpu:1", "--exclusive", "--nodelist=a,b", "--time=1-02", "-p x",
    )  # fmt: skip
    assert (found.throttle, found.lead, found.seconds, found.grace) == ("%5", 60, 26 * 3600, 45)
    assert parse_options([]) == BatchOptions()
    assert parse_options(['comment="a b",partition=gpu']).lines == ('--comment="a b"', "--partition=gpu")  # quoted


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400), ("90:30", 5430), ("4:00:00", 14400), ("1-2", 93600), ("1-2:3", 93780), ("2-0:0:1", 172801),
        ("0", None),
    ],
)  # fmt: skip
def test_time_limits_are_read_as_slurm_does(text: str, seconds: float | None) -> None:
    assert parse_time(text) == seconds


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("time=soon", "--slurm time must be MINUTES"), ("time=1", "longer than the 120 s"),
        ("partition=", "takes options of sbatch"), ("a b=1", "takes options of sbatch"),
        ("comment=x\n#SBATCH --uid=0", "takes options of sbatch"), ("array=3", "array must be %N"),
        ("signal=TERM", "signal must be B:USR1@SECONDS"), ("wrap=ls", "wrap does not go"), ('name="x', "quote without"),
        ("comment='a\"b'", "takes options of sbatch"),
    ],
)  # fmt: skip
def test_faulty_options_are_named(text: str, expected: str) -> None:
    refuses(expected, parse_options, [text])


def test_each_schedulers_variable_gives_the_cells_number() -> None:
    for name in ("SLURM_ARRAY_TASK_ID", "PBS_ARRAY_INDEX", "PBS_ARRAYID", "LSB_JOBINDEX", "SGE_TASK_ID"):
        assert array_index({name: "7"}) == 7
    assert array_index({"JOB_COMPLETION_INDEX": "0"}) == 1
    assert array_index({"LSB_JOBINDEX": "0", "SGE_TASK_ID": "undefined"}) is None
    refuses("PBS_ARRAY_INDEX must be the number of an array task, got 'x'", array_index, {"PBS_ARRAY_INDEX": "x"})


def test_numbers_are_written_as_ranges() -> None:
    assert ranges([10, 1, 2, 3, 7, 9]) == "1-3,7,9-10"
    assert ranges([4]) == "4"


def test_the_script_runs_the_command_on_folders_with_any_name(tmp_path: Path, monkeypatch: Patch) -> None:
    place, here = tmp_path / "a study's $HOME", tmp_path / "here it's"
    place.mkdir()
    here.mkdir()
    monkeypatch.chdir(here)
    show = tmp_path / "show"
    show.write_text('#!/bin/sh\nprintf "%s|" "$PWD" "$X" "$@"\n')
    show.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(show))
    text = script_of(place, [1, 2], parse_options(["job-name=mine"]), ["export X=1"], ["my.code"])
    assert "#SBATCH --array=1-2\n" in text
    assert [line for line in text.splitlines() if "job-name" in line] == ["#SBATCH --job-name=mine"]
    script = write_script(place, text)
    said = subprocess.run(["bash", str(script), "2"], capture_output=True, text=True, check=True).stdout
    given = ["resume", str(place), "--cell", "2", "--grace", "90", "--allow-code", "my.code", ""]
    assert said.split("|") == [str(here), "1", "-m", "confed.cli", *given]
    other = {"CONFED": f"{show} x", "CONFED_STUDY": "/runs/it", "PATH": "/usr/bin:/bin"}
    said = subprocess.run([str(script)], capture_output=True, text=True, check=True, env=other).stdout
    assert said.split("|") == [str(here), "1", "x", "resume", "/runs/it", "--cell", "array", *given[4:]]


SMALL = ["data.train=16", "data.validation=4", "data.test=8", "run.rounds=1", "model.layers=1", "model.width=16"]
SMALL += ["run.controls=all", "run.modality_matrix=false"]


def test_feddats_references_are_told_by_what_they_train() -> None:
    recipe = load_recipe("feddat_domain")
    rows = rows_for_gates(with_references(recipe.with_rows(recipe.table)))
    assert rows == Rows("central", "adapter_local", ("clf_local", "adapter_local"), ("full", "adapter"))


def test_missing_references_are_added() -> None:
    recipe = load_recipe("modalities").with_rows(["fedavg"])
    assert with_references(recipe).methods == ("fedavg", "local", "central")
    assert rows_for_gates(with_references(recipe)) == Rows("central", "local")
    assert with_references(load_recipe("modalities")).methods == load_recipe("modalities").methods


def test_one_and_a_half_times_the_rounds_are_rounded_up() -> None:
    grid = grid_of("modalities", ["run.rounds=5"], gates=True)
    assert [recipe.run.rounds for recipe, _ in grid.recipes.values()] == [5, 8]
    assert list(grid.recipes) == ["rounds-5", "rounds-8"]


def test_gates_of_a_recipe_and_of_its_study(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "gates"
    command = ["compare", "modalities", "--gates", *SMALL, "--methods", "fedavg", "--workers", "1", "--out", out]
    assert confed(*command) == 0
    capsys.readouterr()
    content = json.loads((out / "gates.json").read_text())
    found = {gate["key"]: gate for gate in content["gates"]}
    assert content["rounds"] == 1
    assert found["d"]["values"]["ceiling"] == pytest.approx(78.99, abs=0.01)
    assert found["b"]["values"].keys() == {"FedAvg", "Local only", "Centralised"}
    assert found["a"]["passed"] is not None
    assert found["e"]["passed"] is not None
    assert found["c"]["passed"] is None
    # Nothing is run for a finished study, and without longer runs nobody knows whether its rows have converged.
    assert confed("compare", out / "rounds-1", "--gates", "--json") == 0
    again = {gate["key"]: gate for gate in json.loads(capsys.readouterr().out)["gates"]}
    assert again["b"]["passed"] is None
    assert again["a"] == found["a"]
    assert confed("compare", out / "rounds-1", out / "rounds-2", "--gates", "--json") == 0
    assert json.loads(capsys.readouterr().out)["gates"] == content["gates"]
    (out / "sweep.json").unlink()  # as an earlier version left such a folder
    assert confed(*command, "--json") == 0
    assert json.loads(capsys.readouterr().out)["gates"] == content["gates"]
    assert confed("resume", out, "--json") == 0
    assert json.loads(capsys.readouterr().out)["gates"] == content["gates"]


def test_a_study_that_differs_in_more_than_rounds_is_refused(tmp_path: Path, capsys: Capture) -> None:
    from confed.studies.runner import run_study
    from confed.studies.study import open_study

    recipe = load_recipe("modalities", [*SMALL, "run.evaluate_every=0"]).with_rows(["local"])
    open_study(recipe, tmp_path / "study", [0, 1])
    run_study(tmp_path / "study")
    assert confed("compare", tmp_path / "study", tmp_path / "study", "--gates") != 0
    assert "1.5 times the rounds" in capsys.readouterr().err
    plain = "rounds = 1\n"
    for changes, message in [
        ({0: [(plain, "rounds = 2\n")], 1: []}, "first study, 1, got 1 in local/seed-1"),
        ({0: [(plain, "rounds = 2\n"), ("train = 16", "train = 48")]}, "data.train of local/seed-0 is 48 here, 16 in"),
        ({seed: [(plain, "rounds = 2\n"), ("memory = 1.0", "memory = 2.0")] for seed in (0, 1)}, ""),
    ]:
        longer = shutil.copytree(tmp_path / "study", tmp_path / "longer", dirs_exist_ok=True)
        for seed, texts in changes.items():
            file = longer / f"local/seed-{seed}/recipe.toml"
            text = file.read_text()
            for old, new in texts:
                assert old in text
                text = text.replace(old, new)
            file.write_text(text)
        assert (confed("compare", tmp_path / "study", longer, "--gates") == 0) is not bool(message)
        assert message in " ".join(capsys.readouterr().err.split())


def test_gates_of_multi_label_data_compare_average_precision(tmp_path: Path) -> None:
    small = ["data.clients=2", "data.train=4", "data.validation=2", "data.test=6", "data.unseen=2", "run.cohort=2"]
    arguments = [*small, "run.rounds=1", "local.epochs=1", "--methods", "local", "--workers", "1"]
    assert confed("compare", "fedlgt_scenes", "--gates", *arguments, "--out", tmp_path) == 0
    found = {gate["key"]: gate for gate in json.loads((tmp_path / "gates.json").read_text())["gates"]}
    [summary] = (tmp_path / "rounds-1/central").rglob("summary.json")
    values = json.loads(summary.read_text())["multilabel"]["global"]
    assert found["a"]["values"]["central"] == pytest.approx(100 * values["C-AP"])
    assert {key for key, gate in found.items() if gate["passed"] is None} == {"c", "d", "e"}


def test_a_row_named_as_a_reference_is_not_replaced() -> None:
    text = '[algorithm]\nname = "fedavg"\n[model]\nname = "modal_transformer_mini"\n[task]\nname = "vqa"\n'
    text += '[data]\nname = "modalities"\n[study]\nmethods = ["local"]\n[methods.local]\nname = "fedavg"\n'
    assert with_references(parse_recipe(text)).methods == ("local", "central")

"""Studies that grow: what is missing is run, what is there is reused, what fails is marked."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from command_line import Capture, Patch, confed, refusal, refused
from confed.federation.algorithm import Algorithm
from confed.federation.checkpoint import write_atomically
from confed.recipes.recipe import Recipe, load_recipe
from confed.registry import algorithms
from confed.results.folder import kind_of
from confed.studies.runner import resume, run_study
from confed.studies.study import open_study, read_study, rows_of
from confed.system.events import Event, JobsPlanned
from confed.system.folder_lock import exclusive
from refusals import refuses

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
    monkeypatch.setattr("confed.report.figures.save.save_figures", lambda folder: [])


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
    open_study(tiny("fedavg,local"), root, [0, 1])
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
    monkeypatch.setattr("confed.report.figures.save.save_figures", lambda folder: [])
    assert confed(*command, "--methods", "breaking:Breaks,fedbn", "--json") == 1
    found = json.loads(capfd.readouterr().out)
    assert found["errors"]["breaking:Breaks/seed-0"] == "ZeroDivisionError: by design"
    assert set(found["errors"]) == {"fedbn/seed-0", "fedbn/seed-1", "breaking:Breaks/seed-0"}
    assert len(found["runs"]) == 4
    assert "by design" in (root / "breaking%3ABreaks/seed-0/error.txt").read_text()
    # Both are tried again the next time, also by `resume`.
    monkeypatch.setattr("breaking.Breaks.aggregate", Algorithm.aggregate)
    monkeypatch.setattr("confed.cli.study.default_workers", lambda recipe: 1)
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

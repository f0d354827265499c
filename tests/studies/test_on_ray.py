"""Studies on Ray: the bytes of one machine although a node is killed, and what is refused."""

from pathlib import Path

import pytest

from command_line import Capture, Patch, confed

pytest.importorskip("ray")

from confed.cli.grids import with_address
from confed.studies import cells
from confed.studies.cells import run_cell_on_ray, shares_folder
from ray_scenarios import STUDY, scenario


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_study_with_a_killed_node_has_the_bytes_of_one_machine() -> None:
    found = scenario("study", 900)
    assert found["killed"]["rounds"] >= 3
    assert (found["code"], found["shown"], found["alone"]) == (0, 0, 0)
    assert found["compared"] > 20
    assert found["differing"] == []
    assert found["left"] == []


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--on", "ray", "run.address=127.0.0.1:1"], "no Ray cluster at run.address = '127.0.0.1:1'"),
        (["--on", "ray", "--slurm", "mem=4G"], "--slurm, --submit and --before need --on slurm"),
        (["--on", "dask"], "--on must be slurm, script or ray, got 'dask'"),
    ],
)
def test_a_study_that_cannot_be_on_ray_is_refused_in_one_line(
    options: list[str], why: str, tmp_path: Path, capfd: Capture, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(STUDY)
    assert confed("compare", "tiny.toml", "--out", "study", *options) == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert why in line


def test_the_address_is_the_command_s_and_the_runs_are_local(tmp_path: Path) -> None:
    recipe = str(tmp_path / "tiny.toml")
    Path(recipe).write_text(STUDY)
    local = ["run.engine=local", 'run.address=""']
    assert with_address("ray", recipe, []) == ("auto", local)
    given = ["run.address=10.0.0.1:6379", "run.rounds=3", "run.engine=ray"]
    assert with_address("ray", recipe, given) == ("10.0.0.1:6379", ["run.rounds=3", *local])
    assert with_address("ray", "fedvqa_scenes", [])[0] == ""
    assert with_address("slurm", recipe, given) == ("", given)


def test_a_node_that_does_not_see_the_folder_as_it_is_says_so(tmp_path: Path, monkeypatch: Patch) -> None:
    assert "must be on a file system that all nodes share" in shares_folder(str(tmp_path / "study"), "")
    (tmp_path / "cells.json").write_text("{}")
    assert shares_folder(str(tmp_path), cells._digest_of_list(tmp_path)) == ""
    monkeypatch.setattr(cells, "SEEN", 0.0)
    assert "does not see" in shares_folder(str(tmp_path), "another one")


def test_a_cell_that_goes_wrong_is_an_outcome(tmp_path: Path) -> None:
    outcome = run_cell_on_ray({"root": str(tmp_path), "number": 1}, lambda event: None)
    assert outcome["outcome"] == "refused"
    assert "has no cells.json" in outcome["text"]

"""What recipes, folders and files of others call things is never a path, a command or a line of its own."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from command_line import Capture, Patch, confed, refused
from confed.deployment.provision import Federation
from confed.models.hub_names import hub_name
from confed.recipes.recipe import Recipe, load_recipe, parse_recipe
from confed.results.sweep import read_sweep
from confed.studies.cells import BatchOptions, script_of
from confed.studies.study import free_folder, open_study, parse_axis, points_of, read_study
from refusals import refuses
from tiny_runs import TINY

HOSTILE = ["/abs", "../../x", "a\nrm -rf ~\n", "-rf", ".x", "a\u202eb", "nul", "", "a" * 101]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_of_a_recipe_is_refused_in_one_line(name: str, tmp_path: Path, capfd: Capture):
    file = tmp_path / "recipe.toml"
    file.write_text(f"name = {json.dumps(name)}\n" + load_recipe("fedvqa_scenes").single.to_toml().partition("\n")[2])
    before = sorted(tmp_path.iterdir())
    assert confed("run", file, "run.rounds=1") == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: a recipe's name must ")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["[1]", "1", "{a = 1}", "true"])
def test_a_name_that_is_no_text_is_refused(name: str) -> None:
    refuses("a recipe's name must be a text", parse_recipe, f"name = {name}\n")


def test_a_name_given_in_python_and_by_an_index_is_checked(tmp_path: Path) -> None:
    recipe = load_recipe("fedvqa_scenes", TINY).with_rows(["fedavg"])
    refuses("a recipe's name", replace, recipe, name="../x")
    refuses("a recipe's name", Recipe, model="vilt_tiny", data="scenes", name="../x")
    open_study(recipe, tmp_path / "study", [0])
    index = tmp_path / "study" / "summary.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "recipe": "../x"}))
    refuses("a recipe's name", read_study, tmp_path / "study")


@pytest.mark.parametrize("row", ["-rf", ".x", "nul", "a" * 101, "a\nb", "a/b"])
def test_a_hostile_row_of_a_study_is_refused(row: str) -> None:
    refuses(r"study\.methods: a row", load_recipe("fedvqa_scenes", TINY).with_rows, [row], {row: {"name": "fedavg"}})
    refuses(r"study\.models: a model's row", load_recipe("fedvqa_scenes", TINY).with_model, row)


@pytest.mark.parametrize("label", ["a\nb", "a\u202eb", "", "a" * 101, "\x1b[2J"])
def test_a_label_that_is_no_title_is_refused(label: str) -> None:
    recipe = load_recipe("fedvqa_scenes", TINY)
    refuses(r"methods\.fedavg\.label must", recipe.with_rows, ["fedavg"], {"fedavg": {"label": label}})
    with refused(r"models\.vilt_tiny\.label must"):
        replace(recipe, variants={"vilt_tiny": {"label": label}}).with_model("vilt_tiny")


def test_values_and_folders_of_a_sweep_are_single_names(tmp_path: Path) -> None:
    points = points_of(parse_axis(f'data.unseen=["{"../" * 60}x"],["/etc"]'))
    assert all(len(point.folder) < 100 and "/" not in point.folder for point in points)
    entry = {"settings": {"a.b": "1"}, "folder": "-rf"}
    content = {"recipe": "x", "over": "a.b", "points": [entry], "references": [], "margin": 0.01}
    (tmp_path / "sweep.json").write_text(json.dumps(content))
    refuses("a study's folder must begin with neither", read_sweep, tmp_path)


@pytest.mark.parametrize("site", ["nul", "CON", "com1"])
def test_a_site_is_no_device_of_windows(site: str) -> None:
    refuses("a site's name must be no device", Federation, (site,), "localhost", 8443, "")


def test_a_job_script_has_no_line_of_a_folders_name(tmp_path: Path, monkeypatch: Patch) -> None:
    for name in ("a\ntouch stolen\n", 'a" --wrap="touch stolen'):
        refuses("a job script needs folders without", script_of, tmp_path / name, [1], BatchOptions())
    strange = tmp_path / "my run; touch $(stolen) `x`:1"
    strange.mkdir()
    monkeypatch.chdir(strange)
    script = script_of(strange, [1], BatchOptions())
    assert 'job-name="confed-my run_ touch __stolen_ _x__1"' in script
    done = subprocess.run(["bash", "-c", script], env={**os.environ, "CONFED": "echo"}, capture_output=True, check=True)
    assert str(strange) in done.stdout.decode()
    assert not (strange / "stolen").exists()


def test_a_folder_of_runs_is_one_part_whatever_the_name(tmp_path: Path) -> None:
    assert free_folder("a/../../b", tmp_path).parent == tmp_path


@pytest.mark.parametrize("text", ["hub:../../x", "hub:/etc", "hub:a/b/c", "hub:", "hub:a/../b", "hub:a b/c"])
def test_a_prefix_makes_no_path_a_name_of_the_hub(text: str) -> None:
    assert hub_name(text) is None
    assert hub_name("hub:owner/name") == "owner/name"

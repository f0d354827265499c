"""What an export tells of the machine that made it, and whom its README asks for."""

import json
import re
import shutil
import tomllib
from pathlib import Path

import pytest

import confed
from command_line import confed as command
from confed.federation.file_names import file_name
from confed.inference.export import export as write_export
from confed.inference.export import readme
from confed.inference.finished_run import FinishedRun
from confed.inference.hub import HubName, publish
from confed.inference.load import load_exported
from confed.models.pretrained import weights_file
from confed.results.summary import Summary
from hub_server import Hub
from tiny_runs import TINY

SHORT = {"study.methods": [], "algorithm.name": "fedavg", "run.rounds": 1, "run.controls": "none"}
NAME = 'the "ward" 1/2'


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> confed.Run:
    folder = tmp_path_factory.mktemp("home") / "run"
    return confed.run("fedvqa_scenes", {**TINY, **SHORT}, folder=folder, progress=False)


def test_no_path_of_this_machine_goes_to_the_hub(hub: Hub, tmp_path: Path) -> None:
    weights = tmp_path / "ann.smith" / "clinic" / "weights.safetensors"
    weights.parent.mkdir(parents=True)
    shutil.copyfile(weights_file("vilt_mini", True), weights)
    small = {key: value for key, value in TINY.items() if not key.startswith("model.")}
    own = {"model.name": "vilt_mini", "model.pretrained": str(weights)}
    run = confed.run("fedvqa_scenes", {**small, **SHORT, **own}, folder=tmp_path / "run", progress=False)
    assert command("export", run.folder, tmp_path / "out", "--hub", "me/paths") == 0
    repository = hub.repositories["me/paths"]
    files = repository.commits[repository.head]
    assert tomllib.loads(files["recipe.toml"].decode())["model"]["pretrained"] == "weights.safetensors"
    assert [name for name, content in files.items() if b"ann.smith" in content or b"clinic" in content] == []
    assert load_exported(tmp_path / "out").answers


def asked(text: str) -> str:
    (line,) = re.findall(r'load_exported\("DIR", (".*")\)', text)
    return json.loads(line)


def test_a_readme_names_a_client_that_loads(run: confed.Run, tmp_path: Path) -> None:
    export = tmp_path / "export"
    confed.load_run(run.folder).export(export)
    assert asked((export / "clients" / "warm" / "README.md").read_text()) == "warm"
    finished = FinishedRun(run.folder)
    finished.load()
    trained = finished.model("warm")
    finished.summary = Summary({**finished.summary.content, "personal": {NAME: 0.625}})
    text = readme(f"clients/{file_name(NAME)}", trained, finished, {}, (None, None))
    assert asked(text) == NAME
    assert "62.5%" in text


def test_a_recipe_of_the_hub_reads_no_files_here(
    run: confed.Run, hub: Hub, tmp_path: Path, picture: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    export = tmp_path / "export"
    write_export(run.folder, export, personal=False)
    (export / "README.md").write_text("x")
    other = confed.load_recipe(
        "fedvqa_scenes", {"model.name": "ban_mini", "model.glove": str(tmp_path / "vectors.txt")}
    )
    (export / "recipe.toml").write_text(other.single.to_toml())
    publish(export, HubName("me/asks"))
    words = ("predict", "hf:me/asks", "--image", picture, "--question", "what?")
    assert command(*words) == 2
    assert "hf:me/asks came from elsewhere and asks for disk (model.glove" in capfd.readouterr().err

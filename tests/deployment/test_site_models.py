"""What a site has when a federation is over: the simulator's personal model and the global one, asked and exported."""

import json
from pathlib import Path

import pytest

pytest.importorskip("flwr")

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

from confed.cli import main
from confed.deployment.flower_app import apps
from confed.deployment.server import run_server
from confed.deployment.site import site_of, write_site_run
from confed.engines.flower.loopback import LoopbackGrid
from confed.engines.flower.transport import FlowerTransport
from confed.engines.remote.sites import Timeouts
from confed.inference.ask import ask
from confed.inference.load import load_exported
from confed.recipes.recipe import load_recipe
from confed.runs.run import run

SMALL = [
    "study.methods=[]", "data.name=toy_federation:squares", "data.train=8", "data.test=4", "model.name=vilt_tiny",
    "model.width=16", "model.layers=1", "local.epochs=1", "run.rounds=2", "run.workers=1", "run.gallery=0",
    "local.lr=0.02",
]  # fmt: skip
SITES = ("warm", "cold", "both")
PERSONAL = Path("models/personal")
GLOBAL = Path("models/global/trained.safetensors")


def federated(root: Path, method: str, *more: str, policy: str | None = None) -> None:
    """Leads a federation whose sites keep their files in ``root/NAME``, and simulates the same run."""
    recipe = load_recipe("fedvqa_scenes", [f"algorithm.name={method}", *SMALL, *more])
    root.mkdir(exist_ok=True)
    (root / "recipe.toml").write_text(recipe.to_toml())
    _, client = apps(root / "recipe.toml")
    own = {} if policy is None else {"evaluations": policy}
    configs = {number: {"site": name, "private": str(root / name), **own} for number, name in enumerate(SITES)}
    grid = LoopbackGrid(dict.fromkeys(configs, client), configs)
    run_server(recipe, root / "state", FlowerTransport(grid), timeouts=Timeouts(minimum=3))
    run(recipe, root / "simulated")


def same(one: Path, other: Path) -> None:
    first, second = load_file(one), load_file(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    Image.fromarray(np.full((64, 64, 3), 90, dtype=np.uint8)).save(tmp_path / "x.png")
    return tmp_path / "x.png"


@pytest.mark.parametrize("method", ["fedavg", "fedper", "local"])
def test_every_site_has_the_simulator_s_models(
    method: str, tmp_path: Path, picture: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    federated(tmp_path, method)
    for name in SITES:
        own = tmp_path / name / "run"
        same(
            own / PERSONAL / name / "trained.safetensors",
            tmp_path / "simulated" / PERSONAL / name / "trained.safetensors",
        )
        assert site_of(tmp_path / name) == (own, name)
        assert [path.name for path in (own / PERSONAL).iterdir()] == [name]  # and nobody else's
        if (tmp_path / "simulated" / GLOBAL).is_file():
            same(own / GLOBAL, tmp_path / "simulated" / GLOBAL)
        else:
            assert not (own / GLOBAL).exists()
    question = "which colour is this?"
    expected = ask(tmp_path / "simulated", picture, question, "cold")
    asked = ["predict", str(tmp_path / "cold"), "--image", str(picture), "--question", question, "--json"]
    with pytest.raises(SystemExit) as ended:
        main(asked)
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out) == expected
    with pytest.raises(SystemExit) as ended:
        main(["export", str(tmp_path / "cold"), str(tmp_path / "exported"), "--json"])
    assert ended.value.code == 0
    assert load_exported(tmp_path / "exported", "cold").ask(picture, question)["answers"] == expected["answers"]


def test_a_site_that_answers_no_evaluations_keeps_its_models_all_the_same(tmp_path: Path) -> None:
    federated(tmp_path, "fedper", policy="off")
    for name in SITES:
        file = PERSONAL / name / "trained.safetensors"
        same(tmp_path / name / "run" / file, tmp_path / "simulated" / file)


def test_a_folder_without_final_models_says_so_and_earlier_ones_are_set_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], picture: Path
) -> None:
    private = tmp_path / "private"
    (private / "state").mkdir(parents=True)
    (private / "audit.jsonl").touch()
    with pytest.raises(SystemExit) as ended:
        main(["predict", str(private), "--image", str(picture), "--question", "what?"])
    assert ended.value.code == 2
    assert "is a site's folder without final models yet" in " ".join(capsys.readouterr().err.split())

    from confed.federation.state import ClientState
    from confed.runs.build import prepare

    for rounds in (1, 1, 3):
        recipe = load_recipe("fedvqa_scenes", ["algorithm.name=fedavg", *SMALL, f"run.rounds={rounds}"])
        setup, _ = prepare(recipe)
        info = setup.population.info(0)
        names = {name: tensor for name, tensor in setup.model().state_dict().items() if name.startswith("classifier")}
        write_site_run(private, recipe, setup, info, names, ClientState())
    assert sorted(path.name for path in private.glob("run*")) == ["run", "run-2"]
    assert load_recipe(private / "run" / "recipe.toml").run.rounds == 3
    assert load_recipe(private / "run-2" / "recipe.toml").run.rounds == 1

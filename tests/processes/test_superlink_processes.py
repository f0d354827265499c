"""The Flower app on a SuperLink and SuperNodes of Flower's own, in processes of their own: the simulator's numbers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from confed.deployment.demo import free_port, started
from confed.deployment.provision import Federation, provision
from real_processes import SITES, recipe_of, same_as_simulated, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.parametrize(
    "recipe",
    [recipe_of("fedavg", "run.rounds=2", "run.evaluate_every=2"),
     recipe_of("feddat", "model.trainable=adapters", "run.rounds=2", "run.evaluate_every=2")],
    ids=lambda recipe: recipe.sections["algorithm"]["name"],
)  # fmt: skip
def test_flwr_run_gives_the_simulators_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe) -> None:
    provision(tmp_path, Federation(SITES, "localhost", free_port(), recipe.to_toml()))
    home = tmp_path / "flwr"
    home.mkdir()
    monkeypatch.setenv("FLWR_HOME", str(home))
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "0")
    port = free_port()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    programs = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")  # a SuperLink starts its own by name
    place = tmp_path / "superlink"
    place.mkdir()
    link = [str(programs / "flower-superlink"), "--insecure", "--host", "127.0.0.1", "--port", str(port),
            "--disable-runtime-dependency-installation"]  # fmt: skip
    commands = {"superlink": (link, place)}
    for name in SITES:
        folder = tmp_path / "nodes" / name
        folder.mkdir(parents=True)
        node = [str(programs / "flower-supernode"), "--insecure", "--superlink", f"127.0.0.1:{port}", "--port",
                str(free_port()), "--node-config", f'site="{name}" private="{folder / "private"}"']  # fmt: skip
        commands[name] = (node, folder)
    state = tmp_path / "server" / "state"
    with started({"superlink": commands["superlink"]}):
        until(place / "log.txt", "running on", 60)
        with started({name: commands[name] for name in SITES}):
            config = f'state="{state}" wait=300.0'
            run = [str(programs / "flwr"), "run", str(tmp_path / "flower"), "here", "--stream", "--run-config", config]
            done = subprocess.run(run, capture_output=True, text=True, timeout=900, check=False)
    assert (state / "summary.json").is_file(), done.stdout[-3000:] + done.stderr[-2000:]
    same_as_simulated(recipe, tmp_path)
    for name in SITES:
        assert (tmp_path / "nodes" / name / "private" / "audit.jsonl").is_file()

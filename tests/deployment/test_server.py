"""A recipe led through Flower's two applications gives the run folder of ``confed run``; and the verbs' errors."""

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from command_line import confed
from confed.deployment.flower_app import apps
from confed.deployment.provision import SITES, read_sites
from confed.deployment.server import MEMBERS, run_server
from confed.engines.flower.loopback import LoopbackGrid
from confed.engines.flower.transport import FlowerTransport
from confed.engines.remote.sites import Timeouts
from confed.recipes.recipe import Recipe, load_recipe
from confed.report.report import write_report
from confed.runs.run import run
from confed.system import folder_lock
from confed.system.events import Event, RunProgress
from hostile_reply import COLD, Tamper, harmful, lead, lines_of, with_scalars
from led_recipe import SITES_OF, grid_of, recipe_of
from refusals import refuses
from repository import SUPPORT
from toy_federation import write_squares


def test_the_apps_leave_the_run_folder_of_the_simulator(tmp_path: Path) -> None:
    recipe = recipe_of("fedavg")
    file = tmp_path / "recipe.toml"
    file.write_text(recipe.to_toml())
    state = tmp_path / "state"
    server, _ = apps(file)
    config = {"state": str(state), "sites": 3, "wait": 60.0, "deadline": 60.0}
    server(grid_of(file, tmp_path), Context(1, 1, {}, RecordDict(), config))
    simulated = run(recipe, tmp_path / "simulated")
    assert (state / "metrics.jsonl").read_bytes() == (tmp_path / "simulated" / "metrics.jsonl").read_bytes()
    model = Path("models/global/trained.safetensors")
    assert (state / model).read_bytes() == (tmp_path / "simulated" / model).read_bytes()
    summary = json.loads((state / "summary.json").read_text())
    for key in ("personal", "global_seen", "global_unseen", "bytes_up", "bytes_down", "errors", "parameters"):
        assert summary[key] == simulated[key], key
    assert summary["federation"]["warm"]["up"] > sum(line["warm"] for line in summary["bytes_up"].values())
    assert not (state / "models" / "personal").exists()
    assert state.stat().st_mode & 0o777 == 0o700
    assert [member["num_examples"] for member in json.loads((state / MEMBERS).read_text())] == [8, 8, 8]
    assert (tmp_path / "warm" / "audit.jsonl").is_file()
    assert "personal models" in write_report(state).read_text()
    # Led again, a finished run asks for its last evaluation only; another recipe does not go on there.
    run_server(recipe, state, FlowerTransport(grid_of(file, tmp_path)), timeouts=Timeouts(minimum=3))
    assert (state / "metrics.jsonl").read_bytes() == (tmp_path / "simulated" / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match="a run of another recipe"):
        run_server(recipe_of("fedavg", "run.seed=1"), state, FlowerTransport(grid_of(file, tmp_path)))


@pytest.mark.parametrize("silent", [("cold",), SITES_OF], ids=["one", "all"])
def test_results_of_silent_sites_are_missing_with_the_reason(tmp_path: Path, silent: tuple[str, ...]) -> None:
    recipe, file, state = recipe_of("fedavg", "run.rounds=1"), tmp_path / "recipe.toml", tmp_path / "state"
    file.write_text(recipe.to_toml())
    grid = grid_of(file, tmp_path, **dict.fromkeys(silent, "off"))
    summary = run_server(recipe, state, FlowerTransport(grid), timeouts=Timeouts(minimum=3))
    lines = [json.loads(line) for line in (state / "metrics.jsonl").read_text().splitlines()]
    reason = "ValueError: this site answers no evaluations"
    for line in (line for line in lines if line["event"] == "evaluation"):
        assert line["unanswered"] == dict.fromkeys(silent, reason)
        assert set(line["global"]) == set(SITES_OF).difference(silent)
    for name in silent:
        assert f"{name} was not evaluated: {reason}" in summary["notes"]
    assert set(summary["global_seen"]) == set(SITES_OF).difference(silent)
    assert "<html" in write_report(state).read_text()


def test_asynchronous_rounds_end_with_an_evaluation_everywhere(tmp_path: Path) -> None:
    summary = lead(recipe_of("fedavg", "run.rounds=4", "run.async.buffer=2"), tmp_path, minimum=1)
    rounds = lines_of(tmp_path, "round")
    assert [len(line["staleness"]) for line in rounds] == [2, 2, 2, 2]
    assert all(line["clock"] > 0 for line in rounds)
    assert set(summary["global_seen"]) == set(SITES_OF)
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".replies")]


def test_what_cannot_be_led_is_refused(tmp_path: Path) -> None:
    post = FlowerTransport(LoopbackGrid({}))
    refuses("needs all data in one place", run_server, recipe_of("central"), tmp_path / "a", post)
    refuses("no client 'nobody'", run_server, recipe_of("fedavg"), tmp_path / "b", post, names=["warm", "nobody"])
    with pytest.raises(ValueError, match=r"run\.async\.buffer must be 0 for SCAFFOLD, got 2: "):
        run_server(recipe_of("scaffold", "run.async.buffer=2"), tmp_path / "c", post)


def test_noise_at_the_server_is_no_function_of_the_seed(tmp_path: Path) -> None:
    noisy = (
        "algorithm.update_privacy.clip=1.0", "algorithm.update_privacy.noise=0.5", "algorithm.update_privacy.at=server",
        "run.rounds=1", "run.evaluate_every=0", "run.checkpoint_seconds=1000.0",
    )  # fmt: skip
    recipe, file = recipe_of("fedavg", *noisy), tmp_path / "recipe.toml"
    file.write_text(recipe.to_toml())
    models: list[bytes] = []
    for name in ("one", "other"):
        transport = FlowerTransport(grid_of(file, tmp_path / f"{name}-sites"))
        run_server(recipe, tmp_path / name, transport, timeouts=Timeouts(minimum=3))
        models.append((tmp_path / name / "models/global/trained.safetensors").read_bytes())
        assert load_recipe(tmp_path / name / "recipe.toml").run.checkpoint_seconds == 0
    assert models[0] != models[1]
    assert "seed" not in json.loads((tmp_path / "one" / "summary.json").read_text())["update_privacy"]["guarantee"]


def failed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert confed(*arguments) == 2
    return " ".join(capsys.readouterr().err.split())


def test_a_federation_is_founded_with_a_folder_for_everyone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "made"
    data = ["data.name=toy_federation:squares", "data.train=8", "data.test=4"]
    arguments = [
        "federation",
        "new",
        str(root),
        "--sites",
        "warm, cold",
        "--host",
        "h.org",
        "--json",
        "run.rounds=7",
        *data,
    ]
    assert confed(*arguments) == 0
    assert json.loads(capsys.readouterr().out)["sites"] == ["warm", "cold"]
    assert load_recipe(root / "sites" / "cold" / "recipe.toml").run.rounds == 7
    assert set(read_sites(root / "server" / SITES)) == {"warm", "cold"}
    readme = (root / "sites" / "cold" / "README.md").read_text()
    assert "--site cold --server h.org:8443" in readme
    assert "$" not in readme
    assert 'serverapp = "federation_app.app:server"' in (root / "flower" / "pyproject.toml").read_text()
    assert not list((root / "flower").rglob("*key*"))


def test_the_simulator_does_not_go_on_with_a_federation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / MEMBERS).write_text("[]")
    assert "go on with the same `confed server`" in failed(["resume", str(tmp_path)], capsys)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["server", "fedvqa_scenes"], "give either --tls DIR, or --insecure"),
        (["server", "fedvqa_scenes", "--insecure"], "--sites must name the list"),
        (["server", "fedvqa_scenes", "--tls", "nowhere"], "sites' names and public keys"),
        (["client", "fedvqa_scenes", "--site", "a"], "give either --ca FILE, or --insecure"),
        (["client", "fedvqa_scenes", "--insecure"], "--site must name"),
        (["client", "fedvqa_scenes", "--insecure", "--site", "a", "--key", "nowhere"], "is no private key"),
        (["client", "fedvqa_scenes", "--insecure", "--site", "a", "--method", "x"], "--method must be one of"),
        (["federation", "new", "x", "--sites", " "], "sites must be different names"),
        (["federation", "new", "x", "--sites", "a,server"], "no site can be called 'server'"),
    ],
)  # fmt: skip
def test_faulty_arguments_are_named(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert says in failed(arguments, capsys)


# A server that was restarted --------------------------------------------------------------------------------------


class Led:
    """Runs of one server on one folder."""

    def __init__(self, root: Path, *more: str) -> None:
        self.root, self.told = root, list[str]()
        self.recipe: Recipe = recipe_of("fedavg", "run.evaluate_every=0", *more)

    def __call__(self, tampers: dict[str, list[Tamper]], stop: int = 0) -> dict[str, Any]:
        """Rounds up to the one whose progress is told, or all."""

        def note(event: Event) -> None:
            self.told.append(event.text if isinstance(event, RunProgress) else str(event))
            if isinstance(event, RunProgress) and stop and event.round == stop:
                raise KeyboardInterrupt

        return lead(self.recipe, self.root, tampers, progress=note)


def test_a_jump_of_the_loss_right_after_a_restart_is_told(tmp_path: Path) -> None:
    led = Led(tmp_path, "run.rounds=4")
    with pytest.raises(KeyboardInterrupt):
        led({}, stop=4)
    assert not any("the mean loss" in text for text in led.told)
    summary = led({"fit": [with_scalars(loss=1e5)]})
    assert summary["personal"] is not None
    (said,) = [text for text in led.told if "the mean loss rose from" in text]
    assert "the checkpoint of round 2 is kept" in said
    assert (tmp_path / "state" / "checkpoint" / "round-000002").is_dir()


def test_what_was_bounded_before_a_restart_is_in_the_summary(tmp_path: Path) -> None:
    led = Led(tmp_path, "run.rounds=3")
    with pytest.raises(KeyboardInterrupt):
        led({"fit": [harmful]}, stop=2)
    assert any("bounded: cold: its update had the norm" in str(note) for note in led({})["notes"])


@pytest.mark.usefixtures("own_cache")
def test_examples_that_a_site_leaves_out_are_in_the_summary(tmp_path: Path) -> None:
    for place in ("here", "cold"):
        write_squares(tmp_path / place)
    for name in ("cold-train-0", "cold-train-3", "cold-test-1", "warm-train-1"):  # the last is another client's
        (tmp_path / "cold" / f"{name}.png").write_bytes(b"no picture")
    recipe = recipe_of(
        "fedavg", "run.rounds=1", "run.evaluate_every=0", "data.name=toy_federation:squares_in_files",
        f'data.root="{tmp_path / "here"}"',
    )  # fmt: skip
    (tmp_path / "recipe.toml").write_text(recipe.to_toml())
    _, client = apps(tmp_path / "recipe.toml")
    configs: dict[int, dict[str, bool | float | int | str]] = {
        number: {"site": name, "private": str(tmp_path / f"{name}-private")} for number, name in enumerate(SITES_OF)
    }
    configs[COLD]["data-root"] = str(tmp_path / "cold")
    grid = LoopbackGrid(dict.fromkeys(configs, client), configs)
    with pytest.warns(UserWarning, match="are left out with 4 examples"):
        run_server(recipe, tmp_path / "state", FlowerTransport(grid), timeouts=Timeouts(minimum=3, interval=0.01))
    expected = {"cold": {"train": 2, "test": 1}}
    state = tmp_path / "state"
    assert json.loads((state / "summary.json").read_text())["left_out"] == expected
    assert "‡ Without examples whose pictures cannot be read: cold 2 train, 1 test." in write_report(state).read_text()
    audited = (state / "audit.jsonl").read_text() + (state / "metrics.jsonl").read_text()
    assert "cold-train" not in audited + (state / "summary.json").read_text()
    # A server that is started again while that site is away has it from the list of members.
    del grid.since[COLD]
    run_server(recipe, state, FlowerTransport(grid), timeouts=Timeouts(minimum=2, interval=0.01, away=0.0))
    assert json.loads((state / "summary.json").read_text())["left_out"] == expected


@pytest.mark.parametrize("count", [-1, True, "3", 1.5, 2**48])
def test_a_number_of_left_out_examples_that_is_none_is_refused(tmp_path: Path, count: object) -> None:
    told: list[str] = []
    recipe, wrong = recipe_of("fedavg", "run.rounds=1", "run.evaluate_every=0"), {"left out/train": count}
    summary = lead(
        recipe, tmp_path, {"hello": [with_scalars(**wrong)]}, 2, wait=0.3, progress=lambda e: told.append(str(e))
    )
    assert set(summary["global_seen"]) == {"warm", "both"}
    assert any("the number of train examples that it leaves out must be a whole one" in text for text in told)


# Folders that are in use ------------------------------------------------------------------------------------------

HOLD = """
import sys
from pathlib import Path
from confed.system.folder_lock import exclusive
with exclusive(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SUPPORT))
    monkeypatch.setattr(folder_lock, "PATIENCE", 0.0)


@contextmanager
def held(folder: Path) -> Iterator[str]:
    """A folder that another process holds; what the refusal says of it."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], text=True, **pipes) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        try:
            yield f"another process is working in {folder}: process {holder.pid} on "
        finally:
            holder.communicate()


def test_a_supernode_on_a_folder_in_use_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from confed.engines.flower.transport import BUSY

    recipe, told = recipe_of("fedavg", "run.rounds=1", "run.evaluate_every=0"), list[str]()
    with held(tmp_path / "warm") as said, caplog.at_level(logging.ERROR, "confed"):
        summary = lead(recipe, tmp_path, minimum=2, wait=0.5, progress=lambda event: told.append(str(event)))
    assert set(summary["global_seen"]) == {"cold", "both"}
    assert caplog.messages[0].startswith(said)
    assert len(caplog.messages[0].splitlines()) == 1
    assert any(BUSY in text for text in told)
    assert not any(str(tmp_path) in text for text in told)


@pytest.mark.parametrize("folder", ["run", "private"])
def test_a_second_client_on_a_flare_kit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    from confed.deployment.flare import server
    from confed.deployment.flare.provision import provision_flare
    from confed.deployment.provision import Federation
    from confed.deployment.transports import Joining
    from confed.system.events import ignore

    monkeypatch.setattr(server, "ENDING", 0.0)
    monkeypatch.setattr(server, "supervised", lambda *_: pytest.fail("FLARE was started"))
    provision_flare(tmp_path / "fed", Federation(("a",), "localhost", 8443, "x = 1\n"))
    kit = tmp_path / "fed" / "sites" / "a"
    with held(kit / folder) as said, pytest.raises(ValueError, match="another process") as refused:
        server.TRANSPORT.join(
            recipe_of("fedavg"), Joining("a", kit / "private", kit=kit), None, threading.Event(), ignore
        )
    assert str(refused.value).startswith(said)


def test_a_flare_job_on_a_folder_in_use_does_not_open_its_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from confed.deployment.flare import job
    from confed.deployment.flare.job import FlareSite, SiteSettings, write_settings

    (tmp_path / "local").mkdir()
    (tmp_path / "recipe.toml").write_text(recipe_of("fedavg").to_toml())
    write_settings(SiteSettings(site="warm"), tmp_path)
    place = SimpleNamespace(get_root_dir=lambda: str(tmp_path))
    monkeypatch.setattr(job, "collab", SimpleNamespace(workspace=place, site_name="warm"))
    monkeypatch.setattr(job, "ENDING", 0.0)
    endpoint = FlareSite()
    with held(tmp_path / "private") as said, pytest.raises(ValueError, match="another process") as refused:
        endpoint._open()  # pyright: ignore[reportPrivateUsage]
    assert str(refused.value).startswith(said)
    assert endpoint._open().client.id == "warm"  # pyright: ignore[reportPrivateUsage]
    # It holds the folder until its process ends.
    code = "import sys; from pathlib import Path; from confed.system import folder_lock as f; f.PATIENCE = 0.0\n"
    code += "with f.exclusive(Path(sys.argv[1])): pass"
    second = subprocess.run([sys.executable, "-c", code, str(tmp_path / "private")], capture_output=True, check=False)
    assert b"another process is working in" in second.stderr

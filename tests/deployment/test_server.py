"""A recipe led through Flower's two applications gives the run folder of ``confed run``; and the verbs' errors."""

import json
from pathlib import Path

import pytest

from repository import SUPPORT

pytest.importorskip("flwr")

from flwr.app import Context, RecordDict

from confed.cli import main
from confed.deployment.flower_app import apps
from confed.deployment.provision import SITES, read_sites
from confed.deployment.server import MEMBERS, run_server
from confed.engines.flower.loopback import LoopbackGrid
from confed.engines.flower.transport import FlowerTransport
from confed.engines.remote.sites import Timeouts
from confed.recipes.recipe import load_recipe
from confed.report.report import write_report
from confed.runs.run import run
from led_recipe import SITES_OF, grid_of, recipe_of


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SUPPORT))


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
def test_cells_of_sites_that_answer_no_evaluations_are_missing_with_the_reason(
    tmp_path: Path, silent: tuple[str, ...]
) -> None:
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


def test_asynchronous_rounds_are_led_until_the_last_model_is_evaluated_everywhere(tmp_path: Path) -> None:
    recipe, file = recipe_of("fedavg", "run.rounds=4", "run.buffer=2"), tmp_path / "recipe.toml"
    file.write_text(recipe.to_toml())
    summary = run_server(recipe, tmp_path / "state", FlowerTransport(grid_of(file, tmp_path)))
    lines = [json.loads(line) for line in (tmp_path / "state/metrics.jsonl").read_text().splitlines()]
    rounds = [line for line in lines if line["event"] == "round"]
    assert [len(line["staleness"]) for line in rounds] == [2, 2, 2, 2]
    assert all(line["clock"] > 0 for line in rounds)
    assert set(summary["global_seen"]) == set(SITES_OF)
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".replies")]


def test_what_cannot_be_led_is_refused(tmp_path: Path) -> None:
    post = FlowerTransport(LoopbackGrid({}))
    with pytest.raises(ValueError, match="needs all data in one place"):
        run_server(recipe_of("central"), tmp_path / "a", post)
    with pytest.raises(ValueError, match="no client 'nobody'"):
        run_server(recipe_of("fedavg"), tmp_path / "b", post, names=["warm", "nobody"])
    with pytest.raises(ValueError, match=r"run\.buffer must be 0 for SCAFFOLD, got 2: "):
        run_server(recipe_of("scaffold", "run.buffer=2"), tmp_path / "c", post)


def test_noise_at_the_server_is_no_function_of_the_seed_and_no_round_is_shown_twice(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
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
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    return " ".join(capsys.readouterr().err.split())


def test_a_federation_is_founded_with_a_folder_for_everyone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "made"
    data = ["data.name=toy_federation:squares", "data.train=8", "data.test=4"]
    with pytest.raises(SystemExit) as ended:
        main(
            [
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
        )
    assert ended.value.code == 0
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

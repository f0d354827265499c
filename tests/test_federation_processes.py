"""Real processes, TLS, keys and sockets: the simulator's numbers, and what survives being killed."""

import json
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from confed.deployment.data_card import card_of_recipe, merge_cards, write_card
from confed.deployment.demo import demonstrate, free_port, parties, started
from confed.deployment.provision import Federation, make_key, provision, read_sites, sign_again, write_sites
from confed.recipes.recipe import Recipe, load_recipe
from confed.results.folder import read_jsonl
from confed.runs.run import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SITES = ("warm", "cold", "both")
SMALL = (
    "data.name=toy_federation:squares", "model.name=vilt_tiny", "model.width=16", "model.layers=1", "local.epochs=1",
    "run.rounds=3", "run.workers=1", "run.gallery=0", "study.methods=[]", "study.table=[]",
)  # fmt: skip
BICSL = """
[model]
name = "vilt_tiny"
width = 16
layers = 1

[data]
name = "scenes"
preset = "random"
types = "answers"
clients = 2
train = 64
validation = 16
test = 32

[task]
name = "contrastive"
width = 16
hidden = 32
embedding = 16

[algorithm]
name = "bicsl"

[local]
epochs = 1
batch_size = 16
lr = 1e-3

[run]
rounds = 2
gallery = 0
"""


Commands = dict[str, tuple[Sequence[str], Path]]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    here = str(Path(__file__).parent)
    monkeypatch.syspath_prepend(here)
    monkeypatch.setenv("PYTHONPATH", here)


def recipe_of(method: str, *more: str) -> Recipe:
    return load_recipe("fedvqa_scenes", [f"algorithm.name={method}", *SMALL, *more])


def made(root: Path, recipe: Recipe, *options: str, sites: Sequence[str] = SITES) -> Commands:
    port = free_port()
    provision(root, Federation(tuple(sites), "localhost", port, recipe.to_toml()))
    commands = parties(root, port)
    lead, where = commands["server"]
    commands["server"] = ([*lead, *options], where)
    return commands


def until(log: Path, text: str, seconds: float = 240) -> None:
    began = time.monotonic()
    while not log.is_file() or text not in log.read_text(errors="replace"):
        assert time.monotonic() - began < seconds, f"{text!r} not in {log.read_text() if log.is_file() else log}"
        time.sleep(0.02)


def ended(process: Any, log: Path, seconds: float = 600) -> None:
    assert process.wait(timeout=seconds) == 0, log.read_text()[-2000:]


OWN = ("data.name=toy_federation:own_squares", "data.train=8", "data.test=4")


def on_cards(commands: Commands, folder: Path) -> Path:
    """Has the server run on a card and every site put its own data in its terms; returns the card."""
    folder.mkdir()
    for name in SITES:
        write_card(card_of_recipe(recipe_of("fedavg", *OWN, f"data.only={name}")), folder / f"{name}.json")
    card = folder / "all.json"
    write_card(merge_cards([folder / f"{name}.json" for name in SITES]), card)
    server = commands["server"][1]
    key = server / "ca.key"
    sign_again(server, key if key.is_file() else server.parent / "provision" / "cert.json", card)
    for name, (command, where) in commands.items():
        own = [] if name == "server" else ["--data", f"only={name}"]
        commands[name] = ([*command, "--card", str(card), *own], where)
    return card


def led_as_simulated(recipe: Recipe, card: Path, root: Path) -> None:
    """The model of a server without data is the simulator's, to the bit."""
    run(recipe_of("fedavg", *OWN, f"data.card={card}"), root / "simulated")
    model, state = Path("models/global/trained.safetensors"), root / "server" / "state"
    assert (state / model).read_bytes() == (root / "simulated" / model).read_bytes()
    assert recipe.sections["data"]["name"] not in (state / "recipe.toml").read_text()
    assert json.loads((state / "summary.json").read_text())["scenes"] == []


def same_as_simulated(recipe: Recipe, root: Path) -> Mapping[str, Any]:
    """The run folder's history has the simulator's bytes, and its results the simulator's numbers."""
    simulated = run(recipe, root / "simulated")
    state = root / "server" / "state"
    assert (state / "metrics.jsonl").read_bytes() == (root / "simulated" / "metrics.jsonl").read_bytes()
    summary = json.loads((state / "summary.json").read_text())
    for key in ("personal", "global_seen", "global_unseen", "bytes_up", "bytes_down", "errors"):
        assert summary[key] == simulated[key], key
    for model in (root / "simulated" / "models" / "global").glob("*.safetensors"):
        assert (state / "models" / "global" / model.name).read_bytes() == model.read_bytes()
    assert (state / "report.html").is_file()
    return summary


def bicsl_as_simulated(recipe: Recipe, root: Path) -> None:
    """Several servers' parts in one run folder: the simulator's history, results and bytes."""
    simulated = run(recipe, root / "simulated")
    state = root / "server" / "state"
    assert (state / "metrics.jsonl").read_bytes() == (root / "simulated" / "metrics.jsonl").read_bytes()
    summary = json.loads((state / "summary.json").read_text())
    for key in ("global_seen", "bytes_up", "bytes_down", "errors"):
        assert summary[key] == simulated[key], key


@pytest.mark.parametrize(
    "recipe",
    [
        recipe_of("fedavg"),
        recipe_of("fedper"),
        recipe_of("feddat", "model.trainable=adapters"),
    ],
    ids=lambda recipe: recipe.sections["algorithm"]["name"],
)  # fmt: skip
def test_a_federation_gives_the_simulators_results(tmp_path: Path, recipe: Recipe) -> None:
    root = tmp_path / "demo"
    said: list[str] = []
    demonstrate(recipe, root, len(SITES), said.append)
    assert any("all processes have ended" in text for text in said)
    same_as_simulated(recipe, root)
    assert not (root / "server" / "state" / "models" / "personal").exists()
    for name in SITES:
        lines = read_jsonl(root / "sites" / name / "private" / "audit.jsonl")
        assert {line["action"] for line in lines if line["way"] == "in"} >= {"hello", "fit", "evaluate"}
        secret = (root / "sites" / name / "key").read_text().splitlines()[1]
        assert secret not in (root / "server" / "log.txt").read_text()


def test_bicsl_gives_the_simulators_results(tmp_path: Path) -> None:
    (tmp_path / "bicsl.toml").write_text(BICSL)
    recipe = load_recipe(tmp_path / "bicsl.toml")
    root = tmp_path / "fed"
    commands = made(root, recipe, "--minimum", "2", "--whole", sites=("client-01", "client-02"))
    with started(commands) as running:
        ended(running["server"], root / "server" / "log.txt")
    bicsl_as_simulated(recipe, root)


def test_a_server_without_examples_gives_the_simulators_model(tmp_path: Path) -> None:
    recipe = recipe_of("fedavg", *OWN, "data.only=nobody")
    commands = made(tmp_path / "fed", recipe, "--minimum", "3")
    card = on_cards(commands, tmp_path / "cards")
    with started(commands) as running:
        ended(running["server"], tmp_path / "fed" / "server" / "log.txt")
    led_as_simulated(recipe, card, tmp_path / "fed")


def test_a_server_killed_in_a_round_and_started_again_resumes_it(tmp_path: Path) -> None:
    recipe = recipe_of("fedper", "run.rounds=4", "local.epochs=4")
    commands = made(tmp_path, recipe, "--minimum", "3")
    log = tmp_path / "server" / "log.txt"
    with started(commands) as running:
        until(log, "round 2/4: loss")
        running["server"].send_signal(signal.SIGKILL)
        running["server"].wait()
        with started({"server": commands["server"]}) as again:
            ended(again["server"], log)
    summary = same_as_simulated(recipe, tmp_path)
    assert any("resumed" in note for note in summary["notes"])


def test_a_site_killed_in_a_round_and_started_again_rejoins_with_what_it_kept(tmp_path: Path) -> None:
    recipe = recipe_of("fedper", "run.rounds=4", "local.epochs=4")
    commands = made(tmp_path, recipe, "--minimum", "3")
    log = tmp_path / "server" / "log.txt"
    with started(commands) as running:
        until(log, "round 1/4: loss")
        running["cold"].send_signal(signal.SIGKILL)
        running["cold"].wait()
        with started({"cold": commands["cold"]}):
            ended(running["server"], log)
    same_as_simulated(recipe, tmp_path)


def test_a_site_that_is_away_for_rounds_catches_up(tmp_path: Path) -> None:
    recipe = recipe_of("fedper", "run.rounds=40", "run.evaluate_every=0")
    commands = made(tmp_path, recipe, "--minimum", "2", "--away", "0")
    log = tmp_path / "server" / "log.txt"
    with started(commands) as running:
        until(log, "round 2/40: loss")
        running["cold"].terminate()
        running["cold"].wait()
        until(log, "'cold' left out")
        with started({"cold": commands["cold"]}):
            ended(running["server"], log)
    rounds = [line for line in read_jsonl(tmp_path / "server" / "state" / "metrics.jsonl") if line["event"] == "round"]
    away = ["cold" in line["errors"] for line in rounds]
    assert any(away)
    assert not away[0]
    assert not away[-1]


def test_a_stranger_is_turned_away(tmp_path: Path) -> None:
    recipe = recipe_of("fedavg", "run.rounds=1")
    commands = made(tmp_path, recipe, "--minimum", "2", "--wait", "5")
    folder = tmp_path / "sites" / "cold"
    (folder / "key").unlink()
    make_key(folder / "key")  # not on the server's list
    site, where = commands["cold"]
    commands["cold"] = ([*site, "--unsigned"], where)  # else it sees for itself that nobody signed its key
    with started(commands) as running:
        ended(running["server"], tmp_path / "server" / "log.txt")
        assert "not on the server's list" in (folder / "log.txt").read_text()
    summary = json.loads((tmp_path / "server" / "state" / "summary.json").read_text())
    assert set(summary["federation"]) == {"warm", "both"}


def test_a_server_that_nobody_vouches_for_is_not_talked_to(tmp_path: Path) -> None:
    recipe = recipe_of("fedavg", "run.rounds=1")
    commands = made(tmp_path / "one", recipe)
    made(tmp_path / "other", recipe)
    folder = tmp_path / "one" / "sites" / "warm"
    (folder / "ca.crt").write_bytes((tmp_path / "other" / "server" / "ca.crt").read_bytes())
    site, where = commands["warm"]
    commands["warm"] = ([*site, "--unsigned"], where)  # else it sees that this authority signed nothing here
    with started({name: commands[name] for name in ("server", "warm")}):
        until(folder / "log.txt", "CERTIFICATE_VERIFY_FAILED")


def test_a_list_with_an_unknown_name_is_refused(tmp_path: Path) -> None:
    commands = made(tmp_path, recipe_of("fedavg"))
    sites = tmp_path / "server" / "sites.json"
    write_sites(sites, {**read_sites(sites), "nobody": make_key(tmp_path / "another")})
    with started({"server": commands["server"]}) as running:
        assert running["server"].wait(timeout=240) == 2
    assert "no client 'nobody'" in (tmp_path / "server" / "log.txt").read_text()

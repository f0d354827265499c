"""A server and sites in processes of their own, and the simulator's run beside them."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from confed.deployment.provision import card_of_recipe, merge_cards, sign_again, write_card
from confed.recipes.recipe import Recipe, load_recipe
from confed.runs.run import run

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


def recipe_of(method: str, *more: str) -> Recipe:
    return load_recipe("fedvqa_scenes", [f"algorithm.name={method}", *SMALL, *more])


def until(log: Path, text: str, seconds: float = 240, since: int = 0) -> None:
    """Waits until a log has a text, behind its first so many bytes."""
    began = time.monotonic()
    while not log.is_file() or text not in log.read_bytes()[since:].decode(errors="replace"):
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
    key = server.parent / "authority" / "ca.key"
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

"""Real processes, TLS, keys and sockets: the simulator's numbers, and what survives being killed."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import Popen

import pytest

from confed.deployment.demo import demonstrate, free_port, parties, started
from confed.deployment.provision import Federation, make_key, provision, read_sites, write_sites
from confed.deployment.roles import Role
from confed.deployment.roster import add_officer
from confed.federation.wire import decode_state
from confed.recipes.recipe import Recipe, load_recipe
from confed.results.folder import read_jsonl
from confed.runs.run import run
from confed.system.release import PROTOCOL, VERSION
from real_processes import (
    BICSL,
    OWN,
    SITES,
    Commands,
    bicsl_as_simulated,
    ended,
    led_as_simulated,
    on_cards,
    recipe_of,
    same_as_simulated,
    until,
)
from repository import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def made(root: Path, recipe: Recipe, *options: str, sites: Sequence[str] = SITES) -> Commands:
    port = free_port()
    provision(root, Federation(tuple(sites), "localhost", port, recipe.to_toml()))
    commands = parties(root, port)
    lead, where = commands["server"]
    commands["server"] = ([*lead, *options], where)
    return commands


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
    demonstrate(recipe, root, len(SITES), lambda event: said.append(getattr(event, "text", "")))
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


def test_a_site_killed_between_two_steps_goes_on(tmp_path: Path) -> None:
    (tmp_path / "bicsl.toml").write_text(BICSL.replace("train = 64", "train = 1024"))
    recipe = load_recipe(tmp_path / "bicsl.toml")
    root, names = tmp_path / "fed", ("client-01", "client-02")
    commands = made(root, recipe, "--minimum", "2", "--whole", sites=names)
    site = root / "sites" / "client-01"
    with started(commands) as running:
        until(site / "private" / "audit.jsonl", '"action": "step"')
        running["client-01"].send_signal(signal.SIGKILL)
        running["client-01"].wait()
        with started({"client-01": commands["client-01"]}):
            ended(running["server"], root / "server" / "log.txt")
    assert "calls of the round were done again" in (site / "log.txt").read_text()
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


def test_a_site_killed_in_a_round_rejoins(tmp_path: Path) -> None:
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


def test_a_site_killed_in_the_middle_of_a_fit_loses_few_steps(tmp_path: Path) -> None:
    """What its training writes down every four steps is never further back than where it was killed."""
    recipe = recipe_of("fedper", "run.rounds=2", "local.epochs=80", "local.batch_size=4")
    commands = made(tmp_path, recipe, "--minimum", "3")
    site = tmp_path / "sites" / "cold"
    command, where = commands["cold"]
    commands["cold"] = ([*command, "--checkpoint", "4 steps"], where)

    def step() -> int:
        """The step of the newest checkpoint; 0 where there is none."""
        for path in (site / "private" / "steps").glob("*/1"):
            with suppress(OSError):
                return int(decode_state(path.read_bytes()).scalars["step"])
        return 0

    with started(commands) as running:
        steps_until(step, 40, running["server"])
        running["cold"].send_signal(signal.SIGKILL)
        running["cold"].wait()
        killed_at = step()
        with started({"cold": commands["cold"]}):
            first_steps = steps_until(step, killed_at + 1, running["server"])
            ended(running["server"], tmp_path / "server" / "log.txt")
    assert min(first_steps) == killed_at >= 40  # what was done before is not done again
    same_as_simulated(recipe, tmp_path)


def steps_until(step: Callable[[], int], least: int, server: Popen[bytes]) -> set[int]:
    """The steps of a site's checkpoints, up to the first that is not below another."""
    seen = set[int]()
    while max(seen, default=0) < least:
        assert server.poll() is None
        if (number := step()) > 0:
            seen.add(number)
        time.sleep(0.001)
    return seen


def test_a_site_that_is_away_for_rounds_catches_up(tmp_path: Path) -> None:
    recipe = recipe_of("fedper", "run.rounds=200", "run.evaluate_every=0")
    commands = made(tmp_path, recipe, "--minimum", "2", "--away", "0")
    log = tmp_path / "server" / "log.txt"
    with started(commands) as running:
        until(log, "round 2/200: loss")
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


def another_version(folder: Path, protocol: int) -> str:
    """A copy of confed that speaks another protocol and knows a setting more; its folder, for PYTHONPATH."""
    shutil.copytree(ROOT / "src" / "confed", folder / "confed", ignore=shutil.ignore_patterns("__pycache__"))
    for file, before, after in (
        ("system/release.py", f"PROTOCOL = {PROTOCOL}\n", f"PROTOCOL = {protocol}\n"),
        ("system/release.py", f'VERSION = "{VERSION}"', 'VERSION = "9.9"'),
        (
            "federation/algorithm.py",
            "    traits: ClassVar[Traits]",
            "    later: float = field(default=0.5, kw_only=True)\n\n    traits: ClassVar[Traits]",
        ),
    ):
        path = folder / "confed" / file
        text = path.read_text()
        assert before in text
        path.write_text(text.replace(before, after, 1))
    return str(folder)


LANDED = "dd6910a4"  # a commit of protocol 1; one of protocol n takes its place when this tree speaks n + 1
BEHIND = {"sites of before": SITES, "one site of before": ("cold",), "a server of before": ("server",)}


def landed_version(folder: Path) -> str:
    """The package of a commit that has landed; its folder, for PYTHONPATH."""
    archive = subprocess.run(["git", "archive", LANDED, "src/confed"], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        pytest.skip(f"there is no commit {LANDED} here: {archive.stderr.decode().strip()[:100]}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    assert f"PROTOCOL = {PROTOCOL}\n" in (folder / "src/confed/system/release.py").read_text()
    return str(folder / "src")


@pytest.mark.parametrize("parties_before", BEHIND.values(), ids=BEHIND)
def test_the_commit_before_goes_with_this_one(parties_before: Sequence[str], tmp_path: Path) -> None:
    recipe, root = recipe_of("fedper", "run.rounds=2"), tmp_path / "fed"
    commands = made(root, recipe, "--minimum", "3")
    add_officer(root / "server", "bea", Role.auditor, "", None)  # which no party of before knows
    path = os.pathsep.join([landed_version(tmp_path / "landed"), os.environ.get("PYTHONPATH", "")])
    where = ["env", f"PYTHONPATH={path}", sys.executable, "-c", "import confed; print(confed.__file__)"]
    assert subprocess.run(where, capture_output=True, text=True, check=True).stdout.startswith(str(tmp_path))
    for party in parties_before:
        command, folder = commands[party]
        commands[party] = (["env", f"PYTHONPATH={path}", *command], folder)
    with started(commands) as running:
        ended(running["server"], root / "server" / "log.txt")
    run(recipe, root / "simulated")
    led, simulated = (losses_in(root / folder) for folder in ("server/state", "simulated"))
    assert len(led) == 2
    assert led == simulated


def losses_in(folder: Path) -> list[dict[str, float]]:
    return [line["loss"] for line in read_jsonl(folder / "metrics.jsonl") if line["event"] == "round"]


def test_the_next_version_takes_part_and_a_later_one_is_told(tmp_path: Path) -> None:
    recipe = recipe_of("fedavg")
    root = tmp_path / "fed"
    commands = made(root, recipe, "--minimum", "2", "--wait", "60")
    for site, steps in (("warm", 1), ("cold", 2)):
        command, folder = commands[site]
        paths = [another_version(tmp_path / site, PROTOCOL + steps), os.environ.get("PYTHONPATH", "")]
        commands[site] = (["env", f"PYTHONPATH={os.pathsep.join(paths)}", *command], folder)
    with started(commands) as running:
        assert running["cold"].wait(timeout=600) == 1
        ended(running["server"], root / "server" / "log.txt")
    told = (root / "sites" / "cold" / "log.txt").read_text()
    assert f"this site has {PROTOCOL + 2} (confed 9.9), the server has {PROTOCOL} (confed {VERSION})" in told
    assert "Traceback" not in told
    lines = read_jsonl(root / "server" / "state" / "metrics.jsonl")
    assert [sorted(line["loss"]) for line in lines if line["event"] == "round"] == [["both", "warm"]] * 3

"""FLARE with real processes, certificates and sockets: the simulator's numbers, and what survives being killed."""

import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from confed.deployment.demo import demonstrate, free_port, started
from confed.deployment.flare.provision import provision_flare
from confed.deployment.provision import Federation
from confed.recipes.recipe import Recipe, load_recipe
from real_processes import (
    BICSL,
    OWN,
    bicsl_as_simulated,
    ended,
    led_as_simulated,
    on_cards,
    recipe_of,
    same_as_simulated,
    until,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SITES = ("warm", "cold")
Commands = dict[str, tuple[Sequence[str], Path]]


def made(root: Path, recipe: Recipe, sites: Sequence[str], *options: str) -> Commands:
    provision_flare(root, Federation(tuple(sites), "localhost", free_port(), recipe.to_toml()))
    confed = [sys.executable, "-m", "confed.cli"]
    lead = ["server", "recipe.toml", "--engine", "flare", "--state", "state", "--tls", ".", *options]
    commands: Commands = {"server": ([*confed, *lead], root / "server")}
    for name in sites:
        commands[name] = ([*confed, "client", "recipe.toml", "--engine", "flare"], root / "sites" / name)
    return commands


def of_jobs(kit: Path) -> list[psutil.Process]:
    """The processes that FLARE started for a party's job."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if str(kit.resolve()) in words and any(word.endswith(("worker_process", "runner_process")) for word in words):
            found.append(process)
    return found


def test_a_run_survives_a_killed_job_site_and_server(tmp_path: Path) -> None:
    recipe = recipe_of("fedper", "run.rounds=8", "local.epochs=4", 'run.without=["both"]')
    root = tmp_path / "fed"
    commands = made(root, recipe, SITES, "--minimum", "2")
    commands["warm"] = ([*commands["warm"][0], "--once"], commands["warm"][1])
    log, cold = root / "server" / "log.txt", {"cold": commands["cold"]}
    with started(commands) as running:
        until(log, "round 2/8: loss", 600)
        [job] = of_jobs(root / "sites" / "cold")
        job.kill()
        until(log, "going on from the last checkpoint", 600)
        until(log, "round 4/8: loss", 600)
        for process in [*psutil.Process(running["cold"].pid).children(recursive=True), running["cold"]]:
            process.kill()
        running["cold"].wait()
        with started(cold):
            until(log, "round 6/8: loss", 600)
            running["server"].kill()
            running["server"].wait()
            with started({"server": commands["server"]}) as again:
                ended(again["server"], log)
                ended(running["warm"], root / "sites" / "warm" / "log.txt", 120)
    assert "the run is over" in (root / "sites" / "warm" / "log.txt").read_text()
    summary = same_as_simulated(recipe, root)
    assert any("resumed" in note for note in summary["notes"])
    assert not (root / "server" / "state" / "models" / "personal").exists()
    assert not of_jobs(root / "server")


def test_the_demo_gives_the_simulators_results(tmp_path: Path) -> None:
    recipe, said = recipe_of("fedavg", 'run.without=["both"]'), list[str]()
    demonstrate(recipe, tmp_path / "demo", 2, lambda event: said.append(getattr(event, "text", "")), "flare")
    assert any("all processes have ended" in text for text in said)
    assert any("handed in job" in line for line in said)
    same_as_simulated(recipe, tmp_path / "demo")
    assert not of_jobs(tmp_path / "demo" / "server")


def test_a_server_without_examples_gives_the_simulators_model(tmp_path: Path) -> None:
    recipe = recipe_of("fedavg", *OWN, "data.only=nobody")
    commands = made(tmp_path / "fed", recipe, ("warm", "cold", "both"), "--minimum", "3")
    card = on_cards(commands, tmp_path / "cards")
    with started(commands) as running:
        ended(running["server"], tmp_path / "fed" / "server" / "log.txt")
    led_as_simulated(recipe, card, tmp_path / "fed")


def test_bicsl_gives_the_simulators_results(tmp_path: Path) -> None:
    (tmp_path / "bicsl.toml").write_text(BICSL)
    recipe = load_recipe(tmp_path / "bicsl.toml")
    root = tmp_path / "fed"
    commands = made(root, recipe, ("client-01", "client-02"), "--minimum", "2", "--whole")
    with started(commands) as running:
        ended(running["server"], root / "server" / "log.txt")
    bicsl_as_simulated(recipe, root)

"""The commands of the three pages on federations, run as a script: three sites, policy, page, renewal."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from confed.deployment.demo import free_port, started
from confed.deployment.manifest import verified
from confed.results.folder import read_jsonl
from real_processes import until
from repository import ROOT

SITES = ("transport", "sports", "natural")
SMALL = "run.rounds=4 data.train=24 data.validation=8 data.test=8 local.epochs=1 local.batch_size=8"
WALL = 1200  # seconds that all of it may take


def blocks(page: str) -> Iterator[list[list[str]]]:
    """The commands of each block of a page."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    for block in re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield [shlex.split(line) for line in block.splitlines() if not line.startswith("pip ")]


def test_pages_have_commands() -> None:
    words = [command for page in ("federation", "federation_setup", "operating") for block in blocks(page)
             for command in block]  # fmt: skip
    verbs = {command[2] if command[1] == "federation" else command[1] for command in words if command[0] == "confed"}
    assert verbs == {
        "demo", "ca", "new", "card", "consent", "sign", "server", "doctor", "client", "quarantine", "add", "revoke",
        "renew", "audit", "retain", "erase", "pass",
    }  # fmt: skip


class Script:
    """The pages' commands with addresses of this machine and small data."""

    def __init__(self, root: Path, running: ExitStack) -> None:
        self.root, self.running = root, running
        self.ports = {"8443": free_port(), "9000": free_port(), "9001": free_port()}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def here(self, words: list[str]) -> list[str]:
        text = shlex.join(words).replace("server.example.org", "localhost").replace("0.0.0.0", "127.0.0.1")
        for told, free in self.ports.items():
            text = text.replace(told, str(free))
        return shlex.split(text.replace("run.rounds=20", SMALL))

    def block(self, commands: list[list[str]]) -> None:
        folder = self.root
        for words in map(self.here, commands):
            if words[0] == "cd":
                folder = folder / words[1]
                continue
            assert words[0] == "confed"
            command = [sys.executable, "-m", "confed.cli", *words[1:]]
            if words[1] == "server":
                self.start("server", command, folder)
            elif words[1] == "client":
                self.sites(command)
            else:
                done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=WALL, check=False)
                assert done.returncode == 0, (words, done.stdout[-2000:], done.stderr[-2000:])

    def start(self, name: str, command: list[str], folder: Path) -> None:
        self.processes |= self.running.enter_context(started({name: (command, folder)}))

    def sites(self, command: list[str]) -> None:
        """The page's site, and the others by the same command."""
        for name in SITES:
            own = [name if word == "sports" else word for word in command]
            self.start(
                name, own if name == "sports" else own[: own.index("--page")], self.root / "clinics/sites" / name
            )

    def all_sites(self, number: signal.Signals) -> None:
        for name in SITES:
            os.kill(self.processes[name].pid, number)


@pytest.mark.slow
@pytest.mark.timeout(2 * WALL)
def test_the_three_pages_run_as_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONFED_PASSPHRASE", "correct horse")
    began = time.monotonic()
    setup, months = list(blocks("federation_setup")), list(blocks("operating"))
    clinics = tmp_path / "clinics"
    server, log = clinics / "server", clinics / "server" / "log.txt"
    with ExitStack() as running:
        script = Script(tmp_path, running)
        (demo,) = blocks("federation")
        assert demo == [["confed", "federation", "demo", "--sites", "3"]]  # which other tests run
        for block in setup:
            if block[0] == ["cd", "clinics/sites/sports"] and block[1][1] == "doctor":
                until(log, "listening on")
            script.block(block)
        until(log, "round 1/4", WALL)
        script.all_sites(signal.SIGSTOP)  # the run waits, and the coordinator has the time of a person
        before = (server / "server.crt").read_bytes()
        for block in months[:2]:
            script.block(block)
        assert (server / "server.crt").read_bytes() != before
        address = re.findall(r"page: (\S+)", log.read_text())[0]
        shown = json.loads(urllib.request.urlopen(address.replace("/?", "/status.json?"), timeout=30).read())
        assert set(shown["sites"]) == set(SITES)
        script.all_sites(signal.SIGCONT)
        health = f"http://127.0.0.1:{script.ports['9001']}/healthz"
        assert urllib.request.urlopen(health, timeout=60).read() == b"ok\n"
        assert script.processes["server"].wait(timeout=WALL) == 0, log.read_text()[-3000:]
        for name in SITES:
            until(clinics / "sites" / name / "log.txt", "the run is over")
    for block in months[2:]:
        script.block(block)
    trusted = (server / "ca.crt").read_bytes()
    assert trusted.count(b"BEGIN CERTIFICATE") == 2
    assert set(verified(server, trusted).sites) == set(SITES)
    rounds = [line for line in read_jsonl(server / "state" / "metrics.jsonl") if line["event"] == "round"]
    assert len(rounds) == 4
    members = json.loads((server / "state" / "members.json").read_text())
    assert {member["id"] for member in members} == {"transport", "sports"}  # natural was erased
    consent = json.loads((server / "card.json").read_text())["clients"]["sports"]["consent"]
    assert consent["by"] == "A. Weber, data protection officer"
    assert time.monotonic() - began < WALL

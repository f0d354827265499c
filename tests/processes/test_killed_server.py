"""A server's process killed at the steps of what a coordinator does in the middle of a round: nothing is lost."""

import json
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from confed.deployment.audit import audit
from confed.deployment.demo import free_port, parties, started
from confed.deployment.provision import SITES as LIST
from confed.deployment.provision import Federation, provision, read_sites
from confed.deployment.roster import add_site, quarantine_site, renew_server, revoke_site
from confed.results.folder import read_jsonl
from real_processes import SITES, ended, recipe_of, same_as_simulated, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROUNDS = 30
ALL, TWO = sorted(SITES), ["both", "warm"]


class Killable:
    """A server that is killed when it says something, in the middle of a round, and started again; sites live on."""

    def __init__(self, root: Path, running: ExitStack) -> None:
        self.root, self.running, self.port, self.read = root, running, free_port(), 0
        self.recipe = recipe_of("fedper", f"run.rounds={ROUNDS}", "run.checkpoint_seconds=0")
        provision(root, Federation(SITES, "localhost", self.port, self.recipe.to_toml()))
        self.server, self.log, self.commands = root / "server", root / "server" / "log.txt", parties(root, self.port)

    def start(self, *sites: str, minimum: int = 2) -> None:
        lead, where = self.commands["server"]
        self.commands["server"] = ([*lead, "--minimum", str(minimum), "--away", "10", "--wait", "30"], where)
        for name in ("server", *sites):
            self.begin(name)
        until(self.log, "round 2/")

    def begin(self, name: str) -> None:
        (process,) = self.running.enter_context(started({name: self.commands[name]})).values()
        if name == "server":
            self.process = process

    def kill(self, says: str = "") -> None:
        until(self.log, says, since=self.read)
        self.process.kill()
        self.process.wait()
        self.read = self.log.stat().st_size
        self.begin("server")

    def go_on(self, rounds: int = 3) -> None:
        """Waits for some rounds, all but the last of which have their checkpoint."""
        began = time.monotonic()
        while self.log.read_bytes()[self.read :].count(b"loss") < rounds:
            assert time.monotonic() - began < 240, self.log.read_text()[-2000:]
            time.sleep(0.02)

    def rounds(self) -> list[list[str]]:
        """Who took part in each round, after the end; every round is there once, and the books are sound."""
        ended(self.process, self.log)
        state = self.server / "state"
        lines = [line for line in read_jsonl(state / "metrics.jsonl") if line["event"] == "round"]
        assert [line["round"] for line in lines] == list(range(1, ROUNDS + 1))
        took_part = [sorted(line["loss"]) for line in lines]
        privates = [self.root / "sites" / name / "private" for name in SITES]
        verdicts = audit(state, [private for private in privates if (private / "audit.jsonl").is_file()])
        assert verdicts
        assert all(line.sound for line in verdicts), verdicts
        members = {member["id"] for member in json.loads((state / "members.json").read_text())}
        assert members >= set(took_part[-1])
        return took_part


@pytest.fixture
def led(tmp_path: Path) -> Iterator[Killable]:
    with ExitStack() as running:
        yield Killable(tmp_path / "fed", running)


def test_a_site_is_added_while_the_server_is_killed(led: Killable) -> None:
    public = read_sites(led.server / LIST)["cold"]
    revoke_site(led.server, "cold", None)
    led.start("warm", "both")
    add_site(led.server, "cold", public, None, ("localhost", led.port))
    led.kill()  # before it has read the list
    led.kill("loss")  # the list is read, and the new site is not here
    led.begin("cold")
    led.kill("site cold: connected")  # it is here, and no member
    led.kill("loss")
    rounds = led.rounds()
    assert rounds[:2] == [TWO] * 2
    assert rounds[-2:] == [ALL] * 2
    assert all(round in (TWO, ALL) for round in rounds)


def test_a_site_is_revoked_while_the_server_is_killed(led: Killable) -> None:
    led.start(*SITES)
    revoke_site(led.server, "cold", None)
    led.kill()
    led.kill("loss")
    rounds = led.rounds()
    without = rounds.index(TWO)
    assert without >= 2
    assert rounds == [ALL] * without + [TWO] * (ROUNDS - without)
    assert set(read_sites(led.server / LIST)) == {"warm", "both"}


def test_quarantine_and_its_end_while_the_server_is_killed(led: Killable) -> None:
    led.start(*SITES)
    quarantine_site(led.server, "cold", release=False)
    led.kill()
    led.kill("loss")
    led.go_on()
    quarantine_site(led.server, "cold", release=True)
    led.kill()
    led.kill("loss")
    rounds = led.rounds()
    assert rounds[:2] == [ALL] * 2
    assert rounds[-2:] == [ALL] * 2
    assert TWO in rounds


def test_a_certificate_is_renewed_while_the_server_is_killed(led: Killable) -> None:
    led.start(*SITES, minimum=3)
    for says in ("", "loss", "loss"):
        renew_server(led.server, None, "localhost", 30)
        led.kill(says)
    until(led.log, "loss", since=led.read)
    shown = ssl.get_server_certificate(("localhost", led.port))
    assert shown.split() == (led.server / "server.crt").read_text().split()
    assert led.rounds() == [ALL] * ROUNDS
    same_as_simulated(led.recipe, led.root)

"""Life of a federation: sites added, revoked and in quarantine in a run, certificates renewed, authorities rotated."""

import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509

from command_line import confed
from confed.deployment.authority import issue_server, make_authority, make_key
from confed.deployment.flower import TRANSPORT
from confed.deployment.manifest import accept, check_serial, verified
from confed.deployment.policy import SitePolicy, read_policy
from confed.deployment.provision import SITES, Federation, provision, read_sites
from confed.deployment.roster import (
    QUARANTINE,
    Roster,
    add_site,
    quarantine_site,
    renew_server,
    revoke_site,
    rotate_authority,
)
from confed.deployment.site import open_site
from confed.deployment.transports import Joining, Leading
from confed.engines.flower.supernode import SuperNode, public_of, read_key, read_public
from confed.engines.flower.transport import client_app
from confed.engines.remote.client import Site
from confed.engines.remote.sites import SiteRegistry, Timeouts
from confed.system.events import Event, Note, RunProgress, SiteStates
from led_recipe import SITES_OF, recipe_of
from refusals import refuses
from repository import SUPPORT

# Flower's and FastAPI's own.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    root = tmp_path / "federation"
    provision(root, Federation(SITES_OF, "localhost", 8443, recipe_of("fedavg", "run.rounds=4").to_toml()))
    return root


class Led:
    """A server in a thread, and sites in threads, over sockets with TLS and keys."""

    def __init__(self, kit: Path, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kit, self.server = kit, kit / "server"
        self.recipe = recipe_of("fedavg", f"run.rounds={rounds}", "run.evaluate_every=0", "run.checkpoint_seconds=0")
        self.said: list[str] = []
        self.port, self.summary = 0, dict[str, Any]()
        self.error: BaseException | None = None
        self.connected, self.awaited, self.notes = set[str](), set[str](), dict[str, str]()
        self.wait = 60.0
        self.at_round: dict[int, Callable[[], None]] = {}
        self.stop, self.threads = threading.Event(), list[threading.Thread]()
        turn, handle = threading.Lock(), Site.handle

        def one_at_a_time(site: Site, head: bytes, body: bytes) -> tuple[bytes, bytes]:
            with turn:
                return handle(site, head, body)

        monkeypatch.setattr(Site, "handle", one_at_a_time)

    def tell(self, event: Event) -> None:
        if isinstance(event, Note):
            self.said.append(event.text)
            if event.text.startswith("listening on"):
                self.port = int(event.text.split(":")[1].split(",")[0])
        elif isinstance(event, SiteStates):
            self.notes = {name: status.note for name, status in event.sites.items()}
            self.connected = {name for name, status in event.sites.items() if status.state != "away"}
        elif isinstance(event, RunProgress) and event.stage == "training":
            self.at_round.pop(event.round, lambda: None)()
            time.sleep(0.0 if self.connected >= self.awaited else 0.6)  # rounds must not end before it is here

    def lead(self) -> None:
        leading = Leading(
            self.kit / "state", self.server, port=0, timeouts=Timeouts(1, 60.0, 0.5, 0.05), wait=self.wait
        )
        try:
            self.summary = TRANSPORT.lead(self.recipe, leading, self.tell)
        except BaseException as error:
            self.error = error

    def opened(self, name: str) -> Site:
        return open_site(self.recipe, name, self.kit / "private" / name, policy=SitePolicy())

    def join(self, site: Site) -> None:
        folder = self.kit / "sites" / site.client.id
        node = SuperNode(
            f"localhost:{self.port}", read_key(folder / "key"), (folder / "ca.crt").read_bytes(), interval=0.05
        )
        thread = threading.Thread(target=node.serve, args=(client_app(lambda _: site), self.stop), daemon=True)
        thread.start()
        self.threads.append(thread)

    @contextmanager
    def running(self, *sites: str) -> Iterator[None]:
        opened = [self.opened(name) for name in sites]  # imports of one thread at a time
        server = threading.Thread(target=self.lead, daemon=True)
        server.start()
        until(lambda: self.port > 0 or self.error is not None)
        for site in opened:
            self.join(site)
        try:
            yield
            server.join(120)
            assert not server.is_alive(), self.said
            if self.error is not None:
                raise self.error
        finally:
            self.stop.set()
            for thread in self.threads:
                thread.join(20)

    def rounds(self) -> list[list[str]]:
        """Who took part in each round."""
        lines = map(json.loads, (self.kit / "state" / "metrics.jsonl").read_text().splitlines())
        return [sorted(line["loss"]) for line in lines if line["event"] == "round"]


def until(ready: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.02)


def test_the_coordinator_reads_why_a_site_does_not_join(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SUPPORT))
    led, folder = Led(kit, 2, monkeypatch), kit / "sites" / "both"
    led.wait = 8.0
    (folder / "policy.toml").write_text("rounds = 1\n")
    refused: list[str] = []

    def join() -> None:
        joining = Joining(
            "both", folder / "private", f"localhost:{led.port}", folder / "ca.crt", folder / "key",
            policy=read_policy(folder / "policy.toml"),
        )  # fmt: skip
        try:
            TRANSPORT.join(led.recipe, joining, None, threading.Event(), lambda event: None)
        except ValueError as error:
            refused.append(str(error))

    with led.running("warm", "cold"):
        thread = threading.Thread(target=join, daemon=True)
        thread.start()
        led.threads.append(thread)
    assert refused == ["this site's policy, line 1, rounds = 1: the recipe has 2 rounds"]
    assert f"cannot take part: Refused: {refused[0]}" in led.notes["both"]
    assert led.rounds() == [["cold", "warm"]] * 2


def test_a_revoked_site_is_out_at_once_and_the_run_goes_on(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SUPPORT))
    led = Led(kit, 4, monkeypatch)
    led.at_round[2] = lambda: (revoke_site(led.server, "cold", None), time.sleep(0.7), None)[-1]
    with led.running(*SITES_OF):
        pass
    assert led.rounds() == [sorted(SITES_OF)] * 2 + [["both", "warm"]] * 2
    assert "site cold was revoked" in led.said
    signed = verified(led.server, (led.server / "ca.crt").read_bytes())
    assert sorted(signed.sites) == ["both", "warm"]
    assert signed.serial == 2


def test_a_site_in_quarantine_is_asked_nothing(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SUPPORT))
    led = Led(kit, 12, monkeypatch)

    def into() -> None:
        quarantine_site(led.server, "warm", release=False)
        time.sleep(0.7)

    def out() -> None:
        quarantine_site(led.server, "warm", release=True)
        led.awaited = {"warm"}

    led.at_round |= {1: into, 2: out}
    with led.running(*SITES_OF):
        pass
    assert led.rounds()[0] == sorted(SITES_OF)
    assert led.rounds()[1] == ["both", "cold"]
    assert led.rounds()[-1] == sorted(SITES_OF)
    assert json.loads((led.server / QUARANTINE).read_text()) == []


def test_a_site_that_is_added_takes_part_from_the_next_round(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SUPPORT))
    revoke_site(kit / "server", "cold", None)
    led = Led(kit, 12, monkeypatch)

    def more() -> None:
        public = public_of(read_key(kit / "sites" / "cold" / "key"))
        add_site(led.server, "cold", public, None, ("localhost", led.port))
        time.sleep(0.7)  # who asks before the list is read is refused, and waits before it asks again
        led.join(led.opened("cold"))
        led.awaited = {"cold"}

    led.at_round[2] = more
    with led.running("warm", "both"):
        pass
    assert led.rounds()[:2] == [["both", "warm"]] * 2
    assert led.rounds()[-1] == sorted(SITES_OF)
    assert len(led.rounds()) == 12
    assert "site cold was added" in led.said
    assert set(led.summary["membership"]["evaluated"]) == set(SITES_OF)


def test_ctrl_c_ends_the_server_also_while_a_site_is_added(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SUPPORT))
    revoke_site(kit / "server", "cold", None)
    led, look, registries = Led(kit, 30, monkeypatch), SiteRegistry.look, list[SiteRegistry]()

    def noted(registry: SiteRegistry, always: bool = False) -> None:
        registries.append(registry)
        look(registry, always)

    monkeypatch.setattr(SiteRegistry, "look", noted)

    def more() -> None:
        public = public_of(read_key(kit / "sites" / "cold" / "key"))
        add_site(led.server, "cold", public, None, ("localhost", led.port))
        time.sleep(0.7)
        led.join(led.opened("cold"))
        registry = registries[-1]
        until(lambda: (look(registry, always=True), "cold" in registry.lines)[-1])
        raise KeyboardInterrupt  # before the end of the round, at which the server goes on with the new one

    led.at_round[2] = more
    with pytest.raises(KeyboardInterrupt), led.running("warm", "both"):
        pass
    assert len(led.rounds()) == 2


def test_a_renewed_certificate_is_shown_to_new_connections(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SUPPORT))
    led = Led(kit, 3, monkeypatch)
    serials: list[int] = []

    def shown() -> int:
        text = ssl.get_server_certificate(("localhost", led.port))
        return x509.load_pem_x509_certificate(text.encode()).serial_number

    def renew() -> None:
        serials.append(shown())
        renew_server(led.server, None, "localhost", 30)
        time.sleep(0.7)
        httpx.post(f"https://localhost:{led.port}/", verify=ssl.create_default_context(cafile=led.server / "ca.crt"))
        until(lambda: shown() != serials[0])

    led.at_round[1] = renew
    with led.running(*SITES_OF):
        pass
    assert led.rounds() == [sorted(SITES_OF)] * 3


def test_two_authorities_are_trusted_while_one_follows_the_other(kit: Path, tmp_path: Path) -> None:
    server, site = kit / "server", kit / "sites" / "warm"
    old = (site / "ca.crt").read_bytes()
    accept(tmp_path, old, verified(site, old))
    rotate_authority(server, tmp_path / "next", 100, encrypted=False)
    both = (site / "ca.crt").read_bytes()
    assert both.endswith(old)
    assert both.count(b"BEGIN CERTIFICATE") == 2
    revoke_site(server, "cold", tmp_path / "next" / "ca.key")  # signed by the next one
    signed = verified(site, both)
    refuses("not signed by the authority", verified, site, old)
    accept(tmp_path, both, signed)
    renew_server(server, tmp_path / "next", "localhost", 10)
    context = ssl.create_default_context(cafile=str(site / "ca.crt"))
    assert len(context.get_ca_certs()) == 2
    older = json.loads((server / "federation.json").read_text()) | {"serial": 1}
    from confed.deployment.manifest import Manifest

    older.pop("format")
    refuses("it is an older one", check_serial, tmp_path, both, Manifest(**older))


def test_keys_may_be_encrypted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONFED_PASSPHRASE", "correct horse")
    make_authority(tmp_path / "ca", 100, encrypted=True)
    public = make_key(tmp_path / "key", encrypted=True)
    assert b"ENCRYPTED" in (tmp_path / "ca" / "ca.key").read_bytes()
    provision(tmp_path / "f", Federation(("a",), "localhost", 8443, "name = 'toy'\n", authority=tmp_path / "ca"))
    assert not (tmp_path / "f" / "authority").exists()
    assert public.startswith("ecdsa-sha2-nistp384")
    read_key(tmp_path / "key")
    monkeypatch.setenv("CONFED_PASSPHRASE", "wrong")
    refuses("is no private key", read_key, tmp_path / "key")
    monkeypatch.delenv("CONFED_PASSPHRASE")
    with pytest.raises(ValueError, match="is encrypted: give its passphrase in CONFED_PASSPHRASE"):
        issue_server(tmp_path / "f" / "server", tmp_path / "ca", "localhost", 10)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    (tmp_path / "confed.passphrase").write_text("correct horse\n")
    issue_server(tmp_path / "f" / "server", tmp_path / "ca", "localhost", 10)


def test_a_damaged_list_leaves_the_one_of_before(kit: Path) -> None:
    told: list[str] = []
    listed = kit / "server" / SITES
    roster = Roster(listed, read_public, told.append)
    names = set(roster.values())
    listed.write_text("{")
    time.sleep(0.6)
    assert set(roster.values()) == names
    assert told[0].startswith("the list of sites stays as it was: ")


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (["revoke", "x"], "there is no site 'x' on the list; there are warm, cold, both"),
        (["quarantine", "x"], "there is no site 'x' on the list"),
        (["add", "warm"], "site 'warm' is on the list already"),
        (["add", "server"], "no site can be called 'server'"),
    ],
)
def test_what_cannot_be_done_is_refused(
    kit: Path, act: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (kit / "server" / SITES).read_bytes()
    assert confed("federation", act[0], str(kit / "server"), *act[1:])
    assert why in " ".join(capsys.readouterr().err.split())
    assert (kit / "server" / SITES).read_bytes() == before


def test_the_commands_do_what_they_say(kit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = str(kit / "server")
    for words in (
        ["add", server, "natural"],
        ["quarantine", server, "warm"],
        ["revoke", server, "cold"],
        ["ca", str(tmp_path / "next"), "--beside", server],
        ["renew", server, "--host", "localhost", "--authority", str(tmp_path / "next")],
    ):
        assert confed("federation", *words) == 0, (words, capsys.readouterr().err)
    assert list(read_sites(kit / "server" / SITES)) == ["warm", "both", "natural"]
    assert (kit / "sites" / "natural" / "policy.toml").is_file()
    assert verified(kit / "sites" / "natural", (kit / "sites" / "natural" / "ca.crt").read_bytes()).serial == 3


@pytest.mark.parametrize("act", ["add", "revoke", "quarantine", "renew", "rotate"])
def test_a_kit_of_flare_says_that_its_list_is_fixed(act: str, tmp_path: Path) -> None:
    server = tmp_path / "server"
    (server / "startup").mkdir(parents=True)
    (server / SITES).write_text('{"a": "a", "b": "b"}')
    before = sorted(tmp_path.rglob("*"))
    acts: dict[str, Callable[[], Any]] = {
        "add": lambda: add_site(server, "c", "", None, ("localhost", 1)),
        "revoke": lambda: revoke_site(server, "a", None),
        "quarantine": lambda: quarantine_site(server, "a", release=False),
        "renew": lambda: renew_server(server, None, "localhost", 10),
        "rotate": lambda: rotate_authority(server, tmp_path / "next", 10, encrypted=False),
    }
    with pytest.raises(ValueError, match="is a kit of FLARE, whose sites and certificates are those that it was made"):
        acts[act]()
    assert sorted(tmp_path.rglob("*")) == before

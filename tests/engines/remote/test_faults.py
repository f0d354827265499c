"""Faults of time over real sockets, TLS and keys; those of content are in test_remote.py, without a transport."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from confed.algorithms.fedper import FedPer
from confed.deployment.provision import SITES, Federation, provision, read_sites
from confed.engines.flower.superlink import open_superlink
from confed.engines.flower.supernode import SuperNode, read_key, read_public
from confed.engines.flower.transport import FlowerTransport, client_app
from confed.engines.local import InProcess
from confed.engines.perform import Setup
from confed.engines.remote.client import Site, client_named
from confed.engines.remote.server import Remote
from confed.engines.remote.sites import Timeouts
from confed.testing.toy import toy_setup
from memory_transport import CLIENTS, Without, rounds, same

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Flower's and FastAPI's own

Change = Callable[[int, bytes, bytes], tuple[bytes, bytes]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("federation") / "made"
    provision(root, Federation(CLIENTS, "localhost", 8443, "name = 'toy'\n"))
    return root


class Turn(Site):
    """A site that shares its process with others, and does something else to its n-th reply to ``fit``."""

    turn = threading.Lock()
    change: Change | None = None
    fits = 0

    def handle(self, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        with self.turn:
            reply = super().handle(head, body)
        if b'"action": "fit"' in head and self.change is not None:
            self.fits += 1
            return self.change(self.fits, *reply)
        return reply


@contextmanager
def federation(
    folder: Path,
    setup: Setup,
    sites: Sequence[Site],
    timeouts: Timeouts,
    watch: Callable[[Remote], None] = lambda remote: None,
) -> Iterator[tuple[Remote, Callable[[Site, float], threading.Event]]]:
    """A server with its sites, each in a thread; and what sends one more on its way, after so many seconds."""
    server = folder / "server"
    keys = {read_public(key): name for name, key in read_sites(server / SITES).items()}
    running: list[tuple[threading.Event, threading.Thread]] = []
    with open_superlink(keys, certificate=server / "server.crt", key=server / "server.key") as (grid, port):

        def dial(site: Site, after: float = 0.0) -> threading.Event:
            own, stop = folder / "sites" / site.client.id, threading.Event()
            line = SuperNode(f"localhost:{port}", read_key(own / "key"), (own / "ca.crt").read_bytes(), interval=0.05)
            running.append((stop, threading.Timer(after, line.serve, args=(client_app(lambda _: site), stop))))
            running[-1][1].start()
            return stop

        for site in sites:
            dial(site)
        try:
            remote = Remote(setup, FlowerTransport(grid, keys.get), timeouts=timeouts, progress=lambda _: watch(remote))
            yield remote, dial
        finally:
            for stop, _ in running:
                stop.set()
            for _, thread in running:
                thread.join(timeout=30)


def sites_of(setup: Setup, root: Path, change: Change | None = None) -> list[Site]:
    """Three sites, of which the second has a fault."""
    made = [Turn(setup, client_named(setup, name), root / name) for name in CLIENTS]
    made[1].change = change
    return list(made)


def test_who_is_slow_does_not_hold_the_others_past_the_deadline(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup, over, later = toy_setup(FedPer(), rounds=3), threading.Event(), [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + later[0], sleep=time.sleep)
    monkeypatch.setattr("confed.engines.remote.server.time", clock)

    def slow(number: int, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        if number == 1:
            over.wait(60)
        return head, body

    def watch(remote: Remote) -> None:
        """When the others' replies are there, an hour goes by."""
        states.append([remote.sites.status[name].state for name in CLIENTS if name in remote.sites.status])
        if ["round 1: fit"] * 3 in states and states[-1] == ["idle", "round 1: fit", "idle"]:
            later[0] = 3600.0

    states: list[list[str]] = []
    timeouts = Timeouts(deadline=1800.0, interval=0.02)
    with federation(folder, setup, sites_of(setup, tmp_path, slow), timeouts, watch) as (remote, _):
        remote.sites.gather(CLIENTS, wait=60)
        records = rounds(setup, remote, stop=1)
        over.set()  # its reply comes all the same, and counts for nothing
        records += rounds(setup, remote, records[-1].servers, 1)
    assert [set(record.errors) for record in records] == [{"client-1"}, set(), set()]
    assert records[0].errors["client-1"] == "TimeoutError: no reply within 1800 s"
    # Nothing but its part in that round is lost: the others' numbers are those without it, and so are its own.
    assert same(records[-1].servers, rounds(setup, Without(setup, "client-1", 0))[-1].servers)


def test_below_the_minimum_a_round_waits_and_loses_nothing(folder: Path, tmp_path: Path) -> None:
    setup = toy_setup(FedPer(), rounds=2)
    timeouts = Timeouts(minimum=3, away=0.0, interval=0.02)
    sites = sites_of(setup, tmp_path)
    with federation(folder, setup, [sites[0], sites[2]], timeouts) as (remote, dial):
        first = dial(sites[1], 0.0)
        remote.sites.gather(CLIENTS, wait=60)
        records = rounds(setup, remote, stop=1)
        first.set()
        began = time.monotonic()
        while "client-1" in remote.sites.lines:
            remote.sites.look(always=True)
            assert time.monotonic() - began < 60
            time.sleep(0.05)
        again = Turn(setup, sites[1].client, tmp_path / "client-1")  # a new process with the old folder
        dial(again, 1.0)
        records += rounds(setup, remote, records[-1].servers, 1)
    assert not any(record.errors for record in records)
    assert same(records[-1].servers, rounds(setup, InProcess(setup))[-1].servers)

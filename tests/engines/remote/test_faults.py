"""The fault table of docs/federation.md over real sockets, TLS and keys: what happened, and what was lost."""

import errno
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from confed.algorithms.fedper import FedPer
from confed.deployment.provision import SITES, Federation, provision, read_sites
from confed.engines.flower.superlink import open_superlink
from confed.engines.flower.supernode import SuperNode, read_key, read_public
from confed.engines.flower.transport import FlowerTransport, client_app
from confed.engines.local import InProcess, RoundRecord
from confed.engines.perform import Setup
from confed.engines.remote.client import Site, client_named
from confed.engines.remote.protocol import Answer, Limits, open_body, seal
from confed.engines.remote.server import Remote
from confed.engines.remote.sites import Timeouts
from confed.federation import directory_store
from confed.federation.messages import Message
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
            remote = Remote(setup, FlowerTransport(grid, keys), timeouts=timeouts, progress=lambda _: watch(remote))
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


def not_a_number(number: int, head: bytes, body: bytes) -> tuple[bytes, bytes]:
    message = open_body(body, Limits(), {}, frozenset())
    if number == 1:
        message.tensors["body.bias"][0] = math.nan
    return head, seal(message)


def private_name(number: int, head: bytes, body: bytes) -> tuple[bytes, bytes]:
    message = open_body(body, Limits(), {}, frozenset())
    extra = {"head.weight": torch.zeros(3, 8)} if number == 1 else {}
    return head, seal(Message({**message.tensors, **extra}, message.scalars))


def replayed(number: int, head: bytes, body: bytes) -> tuple[bytes, bytes]:
    if number == 1:
        head = replace(Answer.from_bytes(head, Limits()), id="another/0/0/client-1").to_bytes()
    return head, body


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (not_a_number, "'body.bias' holds a NaN"),
        (private_name, r"unexpected: \['head.weight'\]"),
        (replayed, "the reply is to 'another"),
    ],
)  # fmt: skip
def test_who_is_late_or_sends_what_is_no_update_is_left_out_of_that_round_only(
    folder: Path, tmp_path: Path, change: Change, says: str
) -> None:
    setup = toy_setup(FedPer(), rounds=3)
    with federation(folder, setup, sites_of(setup, tmp_path, change), Timeouts(interval=0.02)) as (remote, _):
        remote.sites.gather(CLIENTS, wait=60)
        records = rounds(setup, remote)
    assert_left_out_once(setup, records, says)


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
    assert_left_out_once(setup, records, "TimeoutError: no reply within 1800 s")


def assert_left_out_once(setup: Setup, records: Sequence[RoundRecord], says: str) -> None:
    assert [set(record.errors) for record in records] == [{"client-1"}, set(), set()]
    assert re.search(says, records[0].errors["client-1"])
    # Nothing but its part in that round is lost: the others' numbers are those without it, and so are its own.
    assert same(records[-1].servers, rounds(setup, Without(setup, "client-1", 0))[-1].servers)


def test_a_full_disk_costs_a_site_its_part_in_the_round(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup, real, full = toy_setup(FedPer(), rounds=3), directory_store.write_atomically, [True]

    def write(path: Path, data: bytes, *, sync: bool = False) -> None:
        if "client-1" in str(path) and full[0]:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        real(path, data, sync=sync)

    monkeypatch.setattr(directory_store, "write_atomically", write)
    with federation(folder, setup, sites_of(setup, tmp_path), Timeouts(interval=0.02)) as (remote, _):
        remote.sites.gather(CLIENTS, wait=60)
        records = rounds(setup, remote, stop=1)
        full[0] = False
        records += rounds(setup, remote, records[-1].servers, 1)
    assert_left_out_once(setup, records, r"^OSError: \[Errno 28\] No space left on device$")


def test_another_version_recipe_or_backbone_is_told_on_both_sides_and_left_out(folder: Path, tmp_path: Path) -> None:
    setup = toy_setup(FedPer(), rounds=1)

    def other() -> torch.nn.Module:
        model = setup.build()
        with torch.no_grad():
            model.get_parameter("stem.weight")[0, 0] += 1e-3
        return model

    version = sites_of(setup, tmp_path)[0]
    version.fingerprint = replace(version.fingerprint, version="0.0.1")
    recipe = sites_of(replace(setup, seed=7), tmp_path / "seed")[1]
    backbone = sites_of(replace(setup, build=other), tmp_path / "build")[2]
    wrong = {"client-0": "the version of confed", "client-1": "the recipe", "client-2": "frozen backbone"}
    with federation(folder, setup, [version, recipe, backbone], Timeouts(interval=0.02)) as (remote, _):
        began = time.monotonic()
        while len(remote.sites.status) < 3 or not all(status.note for status in remote.sites.status.values()):
            remote.sites.look(always=True)
            assert time.monotonic() - began < 60
            time.sleep(0.05)
        assert not remote.sites.lines
    for site in (version, recipe, backbone):
        assert wrong[site.client.id] in remote.sites.status[site.client.id].note
        assert wrong[site.client.id] in str(site.problem)


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
